"""``tilth layout RECIPE --check-against published``: step times of other systems beside what ``plan.search`` predicts.

Nothing is fitted: rates are those of ``plan.devices``, the share of the peak that layers reach included, and a row is
the published model, batch and layout. ``Published.apart`` says how it differs from the published run. Tables in fp8
alone are left out, as torchtitan's of H200, since Tilth does not compute in it.
"""

import json
from statistics import median
from typing import Any, NamedTuple

import typer
from rich.table import Table

from tilth.cli.tables import WIDTH, new_table
from tilth.cli.tables import show as show_parts
from tilth.config.load import load_recipe
from tilth.config.schema import Recipe
from tilth.models.family import new_config
from tilth.plan.devices import DEVICES
from tilth.plan.search import SearchInput

CHARON = 0.0374
"""Error that Charon (arXiv 2605.17164) publishes for training."""


class Published(NamedTuple):
    """One published step."""

    system: str
    model: str
    device: str
    """Of ``plan.devices``."""
    devices: int
    recipe: str
    keys: tuple[str, ...]
    """What makes the recipe the published job."""
    vocabulary: int
    longest: int
    """Tokens of each sequence."""
    seconds: float
    source: str
    apart: str = ""
    """How the prediction's job differs from the published one."""


def _keys(model: dict[str, int], layout: str, micro: int, *more: str) -> tuple[str, ...]:
    shape = [f"model.{name}={str(size).lower()}" for name, size in model.items()]
    precision = ["train.precision=bf16", "train.device=cuda", "cluster.backend=ray", "optimizer.name=adamw"]
    return (*shape, *precision, f"policy.layout={layout}", f"train.micro_tokens={micro}", *more)


LLAMA_8B = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "ffn": 14_336, "tied": False}
QWEN_32B = {"hidden": 5120, "layers": 64, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn": 25_600, "tied": False}
GPT_175B = {"hidden": 12_288, "layers": 96, "heads": 128, "kv_heads": 128, "ffn": 32_768, "tied": True}
GPT_530B = {"hidden": 20_480, "layers": 105, "heads": 128, "kv_heads": 128, "ffn": 54_608, "tied": True}
"""Two thirds of the published inner width: a gated MLP has three matrices where theirs has two."""


def _titan(devices: int, tokens_per_second: float, how: str) -> Published:
    layout, batch = f"{{fsdp = {devices}}}", 2 * devices
    keys = _keys(LLAMA_8B, layout, 2 * 8192, f"supervised.batch={batch}", "train.checkpointing=selective")
    source = "pytorch/torchtitan@31a17bfd benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3"
    seconds = 2 * 8192 / tokens_per_second
    return Published(f"torchtitan, {how}", "Llama 3.1 8B", "h100", devices, "pretrain", keys, 128_256, 8192, seconds,
                     source, "their H100 has HBM2e and 500 W; they recompute every other product")  # fmt: skip


def _megatron(devices: int, batch: int, mfu: float) -> Published:
    """Seconds: those of MegaScale's step at 12,288 devices and 55.2 % MFU, for another MFU and share of the work."""
    seconds = 6.34 * 55.2 / mfu * (batch / 6144) * (12_288 / devices)
    layout = f'{{pp = 8, dp = {devices // 64}, tp = 8, sp = true, zero = 1, pp_schedule = "interleaved"}}'
    keys = _keys(GPT_175B, layout, 2048, f"supervised.batch={batch}")
    return Published("Megatron-LM", "GPT 175B", "a100-80g", devices, "pretrain", keys, 64_000, 2048, seconds,
                     "arXiv 2402.15627, table 2", "2 instead of 6 chunks of a stage; gated MLP")  # fmt: skip


def _turing(devices: int, seconds: float) -> Published:
    layout = f"{{pp = 35, dp = {devices // 280}, tp = 8, sp = true, zero = 1}}"
    keys = _keys(GPT_530B, layout, 2048, "supervised.batch=1920", "train.checkpointing=true")
    return Published("Megatron-DeepSpeed", "MT-NLG 530B", "a100-80g", devices, "pretrain", keys, 50_272, 2048, seconds,
                     "arXiv 2201.11990, section 2.4, by cli99/llm-analysis@b60b392f examples/megatron-turing-nlg",
                     "sequence parallelism; gated MLP")  # fmt: skip


def _nemo(model: dict[str, int], name: str, devices: int, layout: str, tokens: tuple[int, int, int], seconds: float,
          *more: str) -> Published:  # fmt: skip
    """tokens: of the vocabulary, a sequence (their tokens per second over the samples), and of its answer."""
    vocabulary, longest, answer = tokens
    rollout = ("rollout.prompts=64", "rollout.group=32", f"rollout.max_tokens={answer}", "algorithm.minibatches=4",
               "algorithm.kl_coef=0.01", f"reference.layout={layout}")  # fmt: skip
    keys = _keys(model, layout, 4096, *rollout, *more)
    return Published("NeMo-RL 0.4", f"{name}, GRPO on policy", "h100", devices, "addition-grpo", keys, vocabulary,
                     longest, seconds, "NVIDIA-NeMo/RL@06beed91 docs/about/performance-summary.md and its recipes",
                     "all answers have the mean length")  # fmt: skip


ROWS = (
    _titan(8, 5762, "eager"),
    _titan(8, 6667, "compiled"),
    _titan(128, 5605, "eager"),
    _titan(128, 6514, "compiled"),
    *(_megatron(*row) for row in ((256, 768, 53.0), (1024, 768, 44.7), (3072, 6144, 48.7), (6144, 6144, 47.8),
                                  (8192, 6144, 43.3), (12_288, 6144, 41.2))),
    *(_turing(*row) for row in ((2240, 60.1), (2800, 50.2), (3360, 44.4))),
    _nemo(LLAMA_8B, "Llama 3.1 8B", 16, "{pp = 2, dp = 8, zero = 1}", (128_256, 1192, 1060), 97.7,
          "train.checkpointing=true", "rollout.layout={dp = 16}"),
    _nemo(QWEN_32B, "Qwen3 32B", 32, "{pp = 4, dp = 2, tp = 4, sp = true, zero = 1}", (151_936, 3316, 3206), 393.0,
          "model.family=qwen3", "rollout.layout={dp = 8, tp = 4}"),
)  # fmt: skip


class Prediction(NamedTuple):
    """A published step beside a predicted one."""

    row: Published
    seconds: float

    @property
    def error(self) -> float:
        """Predicted over published seconds, less 1."""
        return self.seconds / self.row.seconds - 1


def job(row: Published) -> SearchInput:
    """Return the published job as what the search predicts."""
    recipe = load_recipe(row.recipe, [*row.keys, f"cluster.workers={row.devices}", f"model.context={row.longest}"])
    shape = new_config(recipe.model, row.vocabulary)
    device, samples = DEVICES[row.device], recipe.flow_spec.samples
    return SearchInput(recipe, shape, row.longest, device, row.devices, generates=samples)


def predicted(row: Published) -> Prediction:
    """Predict a step: the stages of all roles, which take turns on all devices."""
    given = job(row)
    beside = frozenset(given.roles)
    options = (given.problem.options(role, row.devices, beside) for role in given.roles)
    return Prediction(row, sum(min(sum(option.seconds) for option in own) for own in options))


def check() -> list[Prediction]:
    """Predict all rows."""
    return [predicted(row) for row in ROWS]


def typical_error(found: list[Prediction]) -> float:
    """Return the median of the absolute errors."""
    return median(abs(one.error) for one in found)


def like(recipe: Recipe, found: list[Prediction]) -> list[Prediction]:
    """Return those of recipes that, like this one, sample answers or do not."""
    return [one for one in found if (one.row.recipe == "addition-grpo") == recipe.flow_spec.samples]


# ---- printing ----


def show(recipe: Recipe, *, as_json: bool) -> None:
    """Print published and predicted seconds, and the errors of all rows and of those like the recipe."""
    found = check()
    alike = like(recipe, found)
    if as_json:
        typer.echo(json.dumps(as_object(found, alike), ensure_ascii=False))
    else:
        show_parts(*tables(found, alike), width=WIDTH)


def as_object(found: list[Prediction], alike: list[Prediction]) -> dict[str, Any]:
    """Return the rows as plain data, in seconds and parts."""
    rows = [one.row._asdict() | {"predicted": one.seconds, "error": one.error} for one in found]
    errors = {"median_error": typical_error(found), "median_error_alike": typical_error(alike), "charon": CHARON}
    return {"rows": rows, **errors}


def tables(found: list[Prediction], alike: list[Prediction]) -> list[Table | str]:
    """Return the table and lines."""
    names = ("system", "model", "devices", "published s", "predicted s", "error")
    table = new_table(*names, right=names[2:])
    for one in found:
        row, seconds = one.row, (f"{one.row.seconds:.3g}", f"{one.seconds:.3g}")
        table.add_row(row.system, row.model, f"{row.devices:,} {row.device}", *seconds, f"{100 * one.error:+.0f} %")
    kinds = [DEVICES[name] for name in dict.fromkeys(one.row.device for one in found)]
    constants = (
        f"{kind.name}: {kind.attained:.0%} of {kind.flops['bf16'] / 1e12:.0f} TFLOP/s, {kind.links:.0%} of links"
        for kind in kinds
    )
    every, own = (f"{typical_error(rows):.1%} of {len(rows)} rows" for rows in (found, alike))
    return [
        "all predicted, nothing fitted: published rates of devices, of which layers and links reach a share",
        *constants,
        "",
        table,
        f"median error: {every}, {own} like this recipe; Charon publishes {CHARON:.2%}",
        "",
        *dict.fromkeys(f"{one.row.system.partition(',')[0]}: {one.row.source}; {one.row.apart}" for one in found),
    ]
