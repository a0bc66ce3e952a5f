"""Layouts under test, and what the ranks of a pool do with a small model under them."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from tilth.config.axes import AXES, DATA, MODEL
from tilth.config.schema import LoraConfig, OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.layout import Mesh
from tilth.models.config import DecoderConfig
from tilth.models.converters import LowRank, ValueModel, converted
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.plan.batch import MicroBatchPlan, RowTable, plan_batch
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.packed import appraise, limits_of, packed_logprobs, packed_values, score

CONFIG = DecoderConfig(
    vocab_size=33, hidden_size=20, intermediate_size=28, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6,
    qk_norm=True, tie_embeddings=True,
)  # fmt: skip
"""33 rows of the embedding and 1 of the value head divide over no number of ranks."""
MOE = replace(
    CONFIG, family="qwen3_moe", num_experts=5, experts_per_token=2, expert_size=12, expert_layers=(1,), num_layers=2
)
LORA = LowRank(LoraConfig(rank=3, alpha=2.0))
LENGTHS = (5, 9, 4, 12, 3, 7, 6, 11, 8, 2)


@dataclass(frozen=True)
class Case:
    """How a model is spread, and how it is trained."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    ep: int = 1
    hdp: int = 1
    cp: int = 1
    tp: int = 1
    sp: bool = False
    cp_style: str = "ring"
    zero: int = 3
    schedule: str = "1f1b"
    layers: int = 2
    tied: bool = True
    value: bool = False
    experts: bool = False
    num_experts: int = 5
    per_token: int = 2
    lora: bool = False
    lora_dropout: float = 0.0
    family: str = ""
    """Another family than that of ``CONFIG``, in a shape of its own."""
    ffn: int = CONFIG.intermediate_size
    both: bool = False
    """Both layers have experts; else the second one."""
    double: bool = False
    checkpointing: bool | str = False
    dropout: float = 0.0
    micro_tokens: int = 16
    offload: float = 0.0
    rows: tuple[int, ...] = ()
    """Rows of the batch for each data rank (the rest go to the last); empty: alike."""

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.fsdp * self.ep * self.hdp * self.cp * self.tp

    def __str__(self) -> str:
        sizes = [f"{n}{s}" for n in AXES if (s := getattr(self, n)) > 1]
        sizes += ["ulysses"] * (self.cp_style == "ulysses")
        sizes += [self.schedule] * (self.pp > 1) + [f"{self.layers}layers"] * (self.layers != 2)
        names = ("sp", "value", "experts", "both", "double", "checkpointing", "dropout", "rows", "lora")
        names += ("lora_dropout", "offload")
        marks = [n for n in names if getattr(self, n)] + [self.family] * bool(self.family)
        marks += [f"ffn{self.ffn}"] * (self.ffn != CONFIG.intermediate_size)
        sizes += [f"zero{self.zero}"] * (self.zero == 1 or self.fsdp * self.ep > 1)
        return "-".join(sizes + ["untied"] * (not self.tied) + marks)

    @property
    def alone(self) -> "Case":
        return replace(self, **dict.fromkeys(AXES, 1), sp=False, rows=())


def build(case: Case) -> Decoder:
    layers = (0, 1) if case.both else (1,)
    shape = (
        replace(MOE, num_experts=case.num_experts, experts_per_token=case.per_token, expert_layers=layers)
        if case.experts
        else CONFIG
    )
    if case.family:
        from tests.models import tiny  # imports transformers

        model = tiny.decoder(tiny.shape(case.family), torch.float64 if case.double else torch.float32)
        return model.double() if case.double else model
    config = replace(
        shape, tie_embeddings=case.tied, dropout=case.dropout, num_layers=case.layers, intermediate_size=case.ffn
    )
    model = Decoder(config, torch.float64 if case.double else torch.float32)
    made = ValueModel(model) if case.value else model
    made.checkpointing = case.checkpointing
    lora = LORA.lora.model_copy(update={"dropout": case.lora_dropout})
    made = converted(made, [LowRank(lora)] if case.lora else [])
    return made.double() if case.double else made


def spread(case: Case, rank: int = 0) -> ShardedModel:
    if case.ranks == 1:
        return ShardedModel.alone(build(case))
    grid = ParallelDims.of(Mesh.of({name: getattr(case, name) for name in AXES}), rank)
    how = {"sp": case.sp, "zero": case.zero, "cp_style": case.cp_style, "schedule": case.schedule}
    return shard(lambda: build(case), grid, **how)


def weights(case: Case) -> dict[str, torch.Tensor]:
    """Livelier than at initialisation: every term matters, the value head is not zero."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, p in build(replace(case, value=False)).named_parameters():
        found[name] = torch.empty(p.shape, dtype=torch.float64).normal_(0, 0.15, generator=generator)
        found[name] += 0.8 * (p.ndim == 1)
    if case.value:
        found = {n: t for n, t in found.items() if not n.startswith("lm_head")}
        found["score.weight"] = torch.linspace(-1, 1, CONFIG.hidden_size, dtype=torch.float64)[None]
        found["score.bias"] = torch.tensor([0.3], dtype=torch.float64)
    return found


def batch() -> tuple[Jagged, np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = np.array(LENGTHS)
    tokens = Jagged.with_lengths(rng.integers(0, CONFIG.vocab_size, lengths.sum()), lengths)
    return tokens, np.concatenate([[0] + [1] * (n - 1) for n in lengths]).astype(np.uint8)


def planned(case: Case, sharded: ShardedModel) -> tuple[np.ndarray, MicroBatchPlan]:
    """This rank's rows and micro-batches in a plan of units."""
    mesh = sharded.grid.mesh
    limits = replace(limits_of(sharded, case.micro_tokens, parity=False), offload=case.offload)
    plan = plan_batch(RowTable.of(*batch()), None, mesh.count("rows"), limits, units=case.hdp, stages=case.pp)
    part = mesh.index(sharded.grid.rank, *mesh.over("rows"))
    return plan.rows[part], plan.ranks[part]


def share(case: Case, sharded: ShardedModel) -> np.ndarray:
    """The rows of the batch that this rank has: of every n-th, or as the case or its plan says."""
    mesh = sharded.grid.mesh
    part, parts = mesh.index(sharded.grid.rank, *mesh.over("rows")), mesh.count("rows")
    if case.hdp > 1:
        return planned(case, sharded)[0]
    if not case.rows:
        return np.arange(len(LENGTHS))[part::parts]
    return np.split(np.arange(len(LENGTHS)), np.cumsum(case.rows)[: parts - 1])[part]


def loss_of(case: Case, mask: np.ndarray):
    """Divided by a denominator of the whole batch."""
    total = float(mask.sum())
    if not case.value:
        return negative_log_likelihood(total)
    return lambda micro: (((micro.values - micro.ids / 10) * micro.mask).square().sum() / total, {})


def engine_of(case: Case, sharded: ShardedModel, **options) -> TrainEngine:
    section = OptimizerConfig(**{"lr": 3e-3, "clip_norm": 0.5, "weight_decay": 0.1, **options.pop("optimizer", {})})
    how = {"total_steps": 100, "micro_tokens": case.micro_tokens, "scorer": appraise if case.value else score}
    engine = TrainEngine(sharded, section, **{"offload": case.offload, **how, **options})
    for part in sharded.parts if case.offload else ():
        part.offload.least = 1
    return engine


def rows_of(case: Case, sharded: ShardedModel):
    """This rank's tokens, mask and starts."""
    tokens, mask = batch()
    rows = share(case, sharded)
    own = tokens.take(rows)
    return own, Jagged(mask, tokens.offsets).take(rows).values, tokens.offsets[rows]


def train(rank: int, case: Case, steps: int = 1, init: bool = False, **options) -> dict:
    """Steps on the same batch: scores before and after, results, whole gradients of the last step, weights after."""
    sharded = spread(case, rank)
    sharded.init_(7) if init else sharded.load_(weights(case))
    names = list(sharded.layouts)
    found = {"start": copied(sharded.assemble(names)), "results": [], "rows": share(case, sharded)}
    engine = engine_of(case, sharded, **options)
    gradients = {}
    watch_gradients(engine, gradients)
    tokens, mask, starts = rows_of(case, sharded)
    scored = packed_values if case.value else packed_logprobs
    plan = planned(case, sharded)[1] if case.hdp > 1 else None
    how = {"max_tokens": case.micro_tokens, "parity": options.get("parity", False), "plan": plan}
    found["before"] = scored(sharded, tokens, mask, **how)
    for _ in range(steps):
        found["results"].append(engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts, plan=plan))
    found["after"] = scored(sharded, tokens, mask, **how)
    found["gradients"] = copied(whole(sharded, sharded.learned, gradients))
    found["end"] = copied(sharded.assemble(names))
    if engine.ema.tensors:
        found["ema"] = copied(whole(sharded, names, engine.ema.tensors))
    return found


def whole(sharded: ShardedModel, names, parts):
    """Whole tensors of parts that are divided as the updates of these parameters."""
    if sharded.updates is None:
        return sharded.assemble(names, parts)
    axes, held = sharded.grid.mesh.over(*DATA, *MODEL), {name: sharded.update_layouts[name] for name in names}
    return sharded.grid.gather_boxes(axes, held, parts, next(iter(parts.values())))


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def watch_gradients(engine: TrainEngine, into: dict) -> None:
    """Keep the gradients of each step, as they are before clipping."""
    clip = engine.optimizers.clip

    def keeping(*args):
        into.update({n: p.grad.clone() for n, p in engine.optimizers.parameters.items()})
        return clip(*args)

    engine.optimizers.clip = keeping


def bytes_held(rank: int, case: Case) -> dict:
    """Bytes of this rank's parameters, gradients and optimizer state, and elements by parameter."""
    sharded = spread(case, rank)
    sharded.init_(0)
    engine = engine_of(case, sharded)
    gradients = {}
    watch_gradients(engine, gradients)
    tokens, mask, starts = rows_of(case, sharded)
    engine.update(tokens, mask, {}, loss_of(case, batch()[1]), starts=starts)
    state = [t for name, t in engine.optimizers.state_tensors().items() if not name.startswith("step.")]
    held = {"parameters": sharded.parameters.values(), "gradients": gradients.values(), "state": state}
    storages = {
        kind: {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in ts} for kind, ts in held.items()
    }
    model = {p.to_local() if hasattr(p, "to_local") else p for p in sharded.model.parameters()}
    return {
        **{kind: sum(t.nbytes for t in tensors) for kind, tensors in held.items()},
        "storage": sum(storages["parameters"].values()),
        "model": sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model}.values()),
        "elements": {name: p.numel() for name, p in sharded.parameters.items()},
    }


def storage(tensors) -> int:
    """Bytes of the storages behind tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
