"""Predicted memory beside what a device's allocator counts: a step of training, and generation.

    python benchmarks/memory.py [--quick] [--json PATH] [--models 0.5B,1.5B,8B] [--dtypes bf16] [--device cuda]
        [--offload 0,0.5,1]

Training: one AdamW step on 32 sequences of 256 tokens (parameters, gradients and optimizer state in fp32). Generation:
256 samples of 256 tokens, 8 of each prompt of 64. Random weights. Predicted is what ``tilth plan`` would say of the
device: all items but those of the host and the CUDA context. Measured is the most that was allocated at once. What is
predicted not to fit is not tried, and its row says so. On a CPU it is torch's profiler that counts; it remembers every
allocation (gigabytes for one such case), so there is only the quick form: 16 rows of 32 tokens. Training is repeated
for each share of the activations that moves to the host (``train.offload``); a CPU counts the host's part too.
"""

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from driver import benchmark_parser, write_rows
from machine import DTYPES, config_of, peak_allocated, random_model
from torch.profiler import ProfilerActivity, profile

from tilth.config.load import load_recipe
from tilth.config.schema import OptimizerConfig, Recipe
from tilth.core.batch import Jagged
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.models.config import DecoderConfig
from tilth.plan.memory import Need, policy_need, rollout_need
from tilth.plan.shape import matrices, parameters
from tilth.plan.working import ShardFactors, total
from tilth.training.engine import TrainEngine, negative_log_likelihood

GROUP = 8


def recipe_of(dtype: str, device: str, *keys: str) -> Recipe:
    """What the plan is asked about."""
    fixed = [f"train.precision={dtype}", f"train.device={device}", "model.context=512", "run.eval_prompts=1"]
    return load_recipe("addition-grpo", [*fixed, *keys])


class Training:
    """One step on equal sequences."""

    def __init__(
        self, config: DecoderConfig, dtype: str, device: str, rows: int, length: int, offload: float = 0.0
    ) -> None:
        self.config, self.dtype, self.device, self.rows, self.length = config, dtype, device, rows, length
        self.offload = offload

    def need(self) -> Need:
        """As predicted."""
        recipe = recipe_of(
            self.dtype, self.device, "flow=sft", "supervised.steps=1", f"supervised.batch={self.rows}",
            "optimizer.name=adamw",
        ).replaced("train", offload=self.offload)  # fmt: skip
        cut = ShardFactors(parameters(self.config), 0, self.config, matrices(self.config))
        return policy_need(recipe, cut, self.length)

    def run(self) -> None:
        """Make the engine and take the step."""
        model = random_model(self.config, DTYPES[self.dtype], self.device)
        section = OptimizerConfig(name="adamw")
        engine = TrainEngine(model, section, total_steps=9, micro_tokens=16_384, offload=self.offload)
        ids = np.arange(self.rows * self.length) % self.config.vocab_size
        mask = np.ones((self.rows, self.length), np.uint8)
        mask[:, 0] = 0
        loss = negative_log_likelihood(float(mask.sum()))
        tokens = Jagged(ids, np.arange(self.rows + 1) * self.length)
        engine.update(tokens, mask.ravel(), {}, loss, entropy=False)


class Generation:
    """Samples in groups that share a prompt."""

    def __init__(self, config: DecoderConfig, dtype: str, device: str, rows: int, length: int) -> None:
        self.config, self.dtype, self.device, self.rows, self.length = config, dtype, device, rows, length
        self.prompt = length // 4

    def need(self) -> Need:
        """As predicted."""
        sizes = [f"rollout.prompts={self.rows // GROUP}", f"rollout.group={GROUP}", f"rollout.max_tokens={self.length}"]
        recipe = recipe_of(self.dtype, self.device, *sizes, f"rollout.max_rows={self.rows}")
        return rollout_need(recipe, ShardFactors(0, 0, self.config, 0), self.prompt + self.length)

    def run(self) -> None:
        """Make the engine and generate."""
        engine = Engine(
            self.config,
            EngineOptions(
                device=self.device,
                dtype=DTYPES[self.dtype],
                max_rows=self.rows,
                max_length=512,
                kv_tokens=self.rows * 512,
            ),
        )
        engine.update_weights(((name, torch.zeros_like(p)) for name, p in engine.named_parameters()), version=0)
        params = SamplingParams(max_tokens=self.length)
        prompts = [(np.arange(self.prompt) + i) % self.config.vocab_size for i in range(self.rows // GROUP)]
        engine.generate(Request(i, prompts[i // GROUP], params, group=i // GROUP) for i in range(self.rows))


WORKS: dict[str, Callable[..., Training | Generation]] = {"training": Training, "generation": Generation}


def predicted(need: Need, device: str) -> int:
    """Bytes on the device: held all the time and, while it works, besides; a CPU has the host's activations too."""
    items = (*need.held, *need.training, *need.generation)
    cpu = device == "cpu"
    return total(tuple(item for item in items if not item.host or (cpu and item.name == "activations on the host")))


def measured(work: Callable[[], None], device: str) -> int:
    """Most bytes at once."""
    if device == "cpu":
        return _profiled(work)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    return (peak_allocated(device) or 0) - before


def _profiled(work: Callable[[], None]) -> int:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            work()
        recorded.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    sizes = [e["args"]["Bytes"] for e in sorted(events, key=lambda e: e.get("ts", 0)) if e.get("name") == "[memory]"]
    return int(np.cumsum(sizes).max())


def free(device: str) -> float:
    """Bytes that a GPU has."""
    return torch.cuda.mem_get_info(device)[0] if device != "cpu" else float("inf")


def row(what: str, model: str, dtype: str, device: str, quick: bool, offload: float = 0.0) -> dict[str, Any]:
    """One case."""
    rows, length = (16, 32) if quick else (32, 256) if what == "training" else (256, 256)
    work = WORKS[what](config_of(model), dtype, device, rows, length, *((offload,) if offload else ()))
    asked, room = predicted(work.need(), device), free(device)
    found = measured(work.run, device) if asked < room else None
    gc.collect()
    return {
        "what": what, "model": model, "dtype": dtype, "rows": rows, "length": length, "offload": offload,
        "predicted_bytes": asked, "peak_bytes": found,
        "predicted_over_peak": round(asked / found, 3) if found else None, "fits": asked < room,
    }  # fmt: skip


def main() -> None:
    parser = benchmark_parser(__doc__, "6M only, few short rows")
    parser.add_argument("--models", default="0.5B,1.5B,8B")
    parser.add_argument("--dtypes", default="bf16")
    parser.add_argument("--offload", default="0,0.5,1")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    rows, quick = list[dict[str, Any]](), args.quick or args.device == "cpu"
    works = [("training", float(share)) for share in args.offload.split(",")] + [("generation", 0.0)]
    print("what       model dtype offload  predicted MB   peak MB  predicted / peak")
    for model in ["6M"] if quick else args.models.split(","):
        for dtype in args.dtypes.split(","):
            for what, share in works:
                one = row(what, model, dtype, args.device, quick, share)
                rows.append(one)
                peak = f"{one['peak_bytes'] / 1e6:9,.0f} {one['predicted_over_peak']:17.2f}" if one["fits"] else ""
                said = f"{what:10} {model:5} {dtype:5} {share:7g} {one['predicted_bytes'] / 1e6:13,.0f} "
                print(said + (peak or "does not fit"), flush=True)
                write_rows(args.json, rows)


if __name__ == "__main__":
    main()
