"""The same training under every layout: what differs from one rank, what it moves, how fast it is, what it holds.

    python benchmarks/layout_parity.py [--quick] [--json PATH] [--rows 1,dp2,fsdp2] [--steps 20]

A decoder (grouped query attention, a vocabulary that no number of ranks divides, dropout 0.1) is initialised from one
seed and trained with AdamW or Muon on one batch of sequences of unequal lengths, in micro-batches of a token budget, on
processes of this machine (backend local, gloo): as one rank, and spread by each layout. The columns:

- weights: whether the initial weights, put together from all ranks, have the bits of one rank's.
- first: greatest relative difference of loss and gradient norm of the first step from one rank's, in float32 (goal
  1e-5); last: the same of the last of 20 steps (goal 1e-4, with hdp 1e-5); double: the greater of both in float64,
  after 5 steps (goal 1e-11).
- flips: share of router decisions that differ from one rank's after the last step.
- MB/step: bytes that each rank sends in collectives for one step, on average over ranks, as the usual ring algorithms
  send them: for n ranks and a whole tensor of b bytes (n-1)/n b for a gather or a scatter of sums, twice that for an
  all-reduce. Every operator of torch's process groups is seen, on a step of its own.
- of the formula: by axes, these bytes over what the layout alone says (``layout_formulas.py``). A tenth more or less
  fails, and so does an axis along which nothing moves or no formula says what.
- tokens/s: tokens of the whole batch over the fastest step; on one machine ranks share its cores, each has one thread.
- peak, predicted: growth of a rank's resident memory in the float32 run, the greatest of all ranks, and what
  ``tilth layout`` would predict for it (MiB; libraries are in neither).

Exit status 1 if a row misses a goal. --quick: rows that cover every axis and kind of product, a smaller model, 4 steps.
"""

import ctypes
import gc
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from driver import benchmark_parser, write_rows
from layout_formulas import Choices, Collectives, Rounds, Step, formula, predicted
from trial import JoinedRole

from tilth.cluster.controller.cluster import Cluster, open_cluster
from tilth.cluster.protocol import transfer
from tilth.config.axes import AXES
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.checksum import checksum
from tilth.core.layout import Mesh
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.moe import ExpertContext
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.plan.batch import MicroBatchLimits, MicroBatchPlan, RowTable, plan_batch
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.packed import PLACES, Scored, computed_tokens, cut, limits_of, model_input, plan_micros, run_forward

ROWS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "dp2": {"dp": 2},
    "fsdp2": {"fsdp": 2},
    "fsdp4": {"fsdp": 4},
    "hsdp2x2": {"dp": 2, "fsdp": 2},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "dp4 zero1": {"dp": 4, "zero": 1},
    "dp2xcp2 zero1": {"dp": 2, "cp": 2, "zero": 1},
    "dp2xtp2+sp zero1": {"dp": 2, "tp": 2, "sp": True, "zero": 1},
    "dp2xpp2 zero1": {"dp": 2, "pp": 2, "zero": 1},
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sp": True},
    "tp4": {"tp": 4},
    "dp2xtp2": {"dp": 2, "tp": 2},
    "fsdp2xtp2": {"fsdp": 2, "tp": 2},
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "ulysses2": {"cp": 2, "cp_style": "ulysses"},
    "ulysses4": {"cp": 4, "cp_style": "ulysses"},
    "cp2xtp2": {"cp": 2, "tp": 2},
    "dp2xcp2": {"dp": 2, "cp": 2},
    "fsdp2xcp2": {"fsdp": 2, "cp": 2},
    "hdp2": {"hdp": 2},
    "hdp4": {"hdp": 4},
    "hdp2xtp2": {"hdp": 2, "tp": 2},
    "hdp2xpp2": {"hdp": 2, "pp": 2},
    "fsdp2xhdp2": {"fsdp": 2, "hdp": 2},
    "pp2": {"pp": 2},
    "pp2 interleaved": {"pp": 2, "schedule": "interleaved"},
    "pp2 zero-bubble": {"pp": 2, "schedule": "zero-bubble"},
    "pp4": {"pp": 4},
    "dp2xpp2": {"pp": 2, "dp": 2},
    "fsdp2xpp2": {"pp": 2, "fsdp": 2},
    "pp2xtp2": {"pp": 2, "tp": 2},
    "pp2xtp2+sp": {"pp": 2, "tp": 2, "sp": True},
    "pp2xcp2": {"pp": 2, "cp": 2},
    "pp2xulysses2": {"pp": 2, "cp": 2, "cp_style": "ulysses"},
    "dp2xpp2xtp2": {"dp": 2, "pp": 2, "tp": 2},
    "fsdp2xpp2xtp2": {"fsdp": 2, "pp": 2, "tp": 2},
    "fsdp2xpp2xcp2": {"fsdp": 2, "pp": 2, "cp": 2},
    "moe 1 rank": {"experts": True},
    "moe dp2": {"experts": True, "dp": 2},
    "moe fsdp2": {"experts": True, "fsdp": 2},
    "moe tp2": {"experts": True, "tp": 2},
    "moe cp2": {"experts": True, "cp": 2},
    "moe pp2": {"experts": True, "pp": 2},
    "moe ep2": {"experts": True, "ep": 2},
    "moe ep2 zero2": {"experts": True, "ep": 2, "zero": 2},
    "moe dp2xep2 zero1": {"experts": True, "dp": 2, "ep": 2, "zero": 1},
    "moe ep4": {"experts": True, "ep": 4},
    "moe ep2xfsdp2": {"experts": True, "ep": 2, "fsdp": 2},
    "moe dp2xep2": {"experts": True, "dp": 2, "ep": 2},
    "moe cp2xep2": {"experts": True, "ep": 2, "cp": 2},
    "moe ep2xhdp2": {"experts": True, "ep": 2, "hdp": 2},
    "moe ep2xtp2": {"experts": True, "ep": 2, "tp": 2},
    "moe pp2xep2": {"experts": True, "pp": 2, "ep": 2},
    "moe fsdp2xpp2": {"experts": True, "pp": 2, "fsdp": 2},
    "moe dp2xfsdp2xep2": {"experts": True, "dp": 2, "fsdp": 2, "ep": 2},
    "moe ep2xtp2xfsdp2": {"experts": True, "fsdp": 2, "ep": 2, "tp": 2},
    "moe pp2xep2xfsdp2": {"experts": True, "pp": 2, "fsdp": 2, "ep": 2},
    "muon 1 rank": {"muon": True},
    "muon fsdp2xtp2": {"muon": True, "fsdp": 2, "tp": 2},
    "muon dp2xtp2 zero1": {"muon": True, "dp": 2, "tp": 2, "zero": 1},
    "muon cp2xpp2": {"muon": True, "cp": 2, "pp": 2},
    "moe muon 1 rank": {"muon": True, "experts": True},
    "moe muon ep2xfsdp2": {"muon": True, "experts": True, "ep": 2, "fsdp": 2},
    "moe muon pp2xep2": {"muon": True, "experts": True, "pp": 2, "ep": 2},
}
"""Row -> its layout, as in a recipe; experts: of a model with experts in all layers but the first; muon: trained with
Muon, the others with AdamW."""
KINDS = ("experts", "muon")
QUICK = (
    "fsdp2xtp2",
    "dp2xcp2",
    "dp2xcp2 zero1",
    "ulysses2",
    "cp2xtp2",
    "hdp2xpp2",
    "pp2 interleaved",
    "pp2 zero-bubble",
    "fsdp2xpp2",
    "moe ep2xfsdp2",
    "moe pp2xep2",
    "muon fsdp2xtp2",
    "moe muon ep2xfsdp2",
)
"""Rows of the quick form: each axis, each kind of product, dense and with experts."""
EXPERTS = {"family": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "qk_norm": True}
ALONE = ("1 rank", "moe 1 rank", "muon 1 rank", "moe muon 1 rank")
"""Rows with which the others of their kind are compared."""
CLOSE = 0.1
"""Part of an axis's bytes that its formula may leave out."""
GOALS = {"first_relative": 1e-5, "last_relative": 1e-4, "double_relative": 1e-11}
OF_UNITS = GOALS | {"last_relative": 1e-5}
"""Goals of rows with ``hdp``."""
SIZES: dict[str, dict[str, Any]] = {
    "full": {"vocab_size": 3001, "hidden_size": 192, "intermediate_size": 512, "num_layers": 4},
    "quick": {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 176, "num_layers": 4},
}
BATCHES = {"full": (12, 64, 160), "quick": (10, 40, 100)}
"""Sequences, tokens of the longest, tokens of a micro-batch."""
DOUBLE_STEPS = 5
"""Steps in float64, at most."""


def kind_of(name: str) -> tuple[bool, ...]:
    """Whether a row has each of ``KINDS``."""
    return tuple(kind in ROWS[name] for kind in KINDS)


@dataclass(frozen=True)
class Task:
    """One training run. layout: sizes of axes and modes, as in a recipe."""

    size: str
    steps: int
    double: bool = False
    experts: bool = False
    muon: bool = False
    layout: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, size: str, steps: int, double: bool = False) -> "Task":
        layout = {key: value for key, value in ROWS[name].items() if key not in KINDS}
        return cls(size, steps, double, **dict(zip(KINDS, kind_of(name))), layout=layout)

    @property
    def modes(self) -> dict[str, Any]:
        """All of the layout but sizes of axes."""
        return {name: value for name, value in self.layout.items() if name not in AXES}

    @property
    def mesh(self) -> Mesh:
        return Mesh.of({name: size for name, size in self.layout.items() if name in AXES})

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch; with ``hdp`` few, so that the longest sequence has all ranks."""
        _, longest, most = BATCHES[self.size]
        return -(-longest // self.mesh.units) if self.mesh.units > 1 else most

    @property
    def config(self) -> DecoderConfig:
        sizes = {**SIZES[self.size], "num_heads": 8, "num_kv_heads": 2, "dropout": 0.1}
        if self.experts:
            layers = tuple(range(1, sizes["num_layers"]))
            sizes |= {**EXPERTS, "expert_layers": layers, "expert_size": sizes["intermediate_size"] // 4}
        return DecoderConfig(**sizes)


@dataclass
class Found:
    """What one rank saw."""

    weights: dict[str, int]
    """Checksum of each initial weight, put together."""
    losses: list[float]
    norms: list[float]
    seconds: float
    """Of the fastest step."""
    sent: dict[str, float]
    """Bytes of a step, by axes."""
    formula: dict[str, float]
    """Bytes that the formulas say, by axes."""
    peak: float
    """Growth in MiB."""
    predicted: float
    """MiB."""
    padded: int
    elements: int
    """Of parameters that this rank holds."""
    choices: Choices
    """After the last step."""


class Trial(JoinedRole):
    """A role that trains a model of its own on each of its ranks."""

    @transfer("all", "all")
    def train(self, task: dict[str, Any]) -> Found:
        """Every rank's view of a run."""
        fresh_peak()
        return run(Task(**task), ParallelDims.of(self.context.mesh, self.context.rank))


def run(task: Task, grid: ParallelDims) -> Found:
    """Initialise, train for the task's steps, and count on one more."""
    before = peak()
    sharded = spread(task, grid)
    sharded.init_(0)
    weights = {name: checksum(tensor) for name, tensor in sharded.assemble(list(sharded.layouts)).items()}
    fresh_peak()  # whole weights are no part of training
    section = OptimizerConfig(name="muon" if task.muon else "adamw", lr=1e-3, weight_decay=0.1, clip_norm=1.0)
    budget = task.budget
    engine = TrainEngine(sharded, section, total_steps=task.steps, micro_tokens=budget, seed=1)
    tokens, mask = batch(task.size)
    mine, plan = planned(task, sharded, tokens, mask)
    own, starts = tokens.take(mine), tokens.offsets[mine]
    own_mask = Jagged(mask, tokens.offsets).take(mine).values
    loss = negative_log_likelihood(float(mask.sum()))
    results, seconds = [], []
    for _ in range(task.steps):
        begin = time.perf_counter()
        results.append(engine.update(own, own_mask, {}, loss, entropy=False, starts=starts, plan=plan))
        seconds.append(time.perf_counter() - begin)
    top = peak() - before
    chosen = choices(sharded, own, starts, budget, plan) if task.experts else {}
    with Collectives(grid.mesh) as collectives, Rounds() as rounds:
        engine.update(own, own_mask, {}, loss, entropy=False, starts=starts, plan=plan)
    at = grid.coordinate("hdp")
    units = (
        tuple((int(m.lengths.sum()), len(m.ranks), m.ranks.index(at)) for m in plan.learn if m.several) if plan else ()
    )
    step = Step(
        grid.mesh, grid.rank, task.config, 8 if task.double else 4, task.modes, rounds.count // len(sharded.parts),
        own.lengths, results[-1].padded, chosen, units, results[-1].computed if plan else -1, task.muon,
    )  # fmt: skip
    elements, padded = sum(p.numel() for p in sharded.parameters.values()), sum(r.padded for r in results)
    needed = predicted(step, task.layout, BATCHES[task.size]) / 2**20
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    sent = dict(collectives.sent)
    return Found(weights, losses, norms, min(seconds), sent, formula(step), top, needed, padded, elements, chosen)


def planned(
    task: Task, sharded: ShardedModel, tokens: Jagged, mask: np.ndarray
) -> tuple[np.ndarray, MicroBatchPlan | None]:
    """The rows of this rank, and with ``hdp`` its part of a plan: units of up to all of its ranks."""
    mesh = sharded.grid.mesh
    ranks, place = mesh.count("rows"), mesh.index(sharded.grid.rank, *mesh.over("rows"))
    if mesh.units == 1:
        return np.arange(len(tokens.lengths))[place::ranks], None
    limits, table = limits_of(sharded, task.budget, parity=False), RowTable.of(tokens, mask, digests=False)
    plan = plan_batch(table, None, ranks, limits, units=mesh.units, stages=mesh.count("layers"))
    return plan.rows[place], plan.ranks[place]


def spread(task: Task, grid: ParallelDims) -> ShardedModel:
    """The model of a task, uninitialised."""

    def build() -> Decoder:
        return Decoder(task.config, torch.float64).double() if task.double else Decoder(task.config)

    return ShardedModel.alone(build()) if len(grid.mesh) == 1 else shard(build, grid, **task.modes)


def choices(
    sharded: ShardedModel, tokens: Jagged, starts: np.ndarray, budget: int, planned: MicroBatchPlan | None
) -> Choices:
    """The experts that this rank's routers choose for its tokens, best first; every rank makes one pass.

    starts: index of each sequence's first token in the whole batch."""
    mask = np.ones(len(tokens.values), np.uint8)
    mask[tokens.offsets[:-1]] = 0
    noted: list[tuple[np.ndarray, ExpertContext]] = []

    def begin() -> Iterator[Scored]:
        for index, micro in cut(tokens, mask, {PLACES: places}, plan, sharded.device, sharded.context):
            if micro.blank:
                yield Scored(*sharded.blank_input())
                continue
            x, ctx = model_input(micro)
            ctx.experts = ExpertContext(record=True)
            noted.append((micro.columns[PLACES][computed_tokens(micro)].numpy(), ctx.experts))
            yield Scored(x, ctx, index, micro)

    places = np.repeat(starts - tokens.offsets[:-1], tokens.lengths) + np.arange(len(mask))
    plan = plan_micros(tokens, mask, MicroBatchLimits(budget), plan=planned).score
    run_forward(sharded, begin(), len(plan))
    sharded.reshard()
    found = dict[int, tuple[np.ndarray, np.ndarray]]()
    for layer in noted[0][1].chosen if noted else ():
        parts = [(own, ctx.chosen[layer].numpy()[: len(own)]) for own, ctx in noted]
        found[layer] = np.concatenate([p for p, _ in parts]), np.concatenate([c for _, c in parts])
    return found


def batch(size: str) -> tuple[Jagged, np.ndarray]:
    """Sequences of unequal lengths and the mask of what is learned from: all but their first tokens."""
    rng = np.random.default_rng(0)
    sequences, longest, _ = BATCHES[size]
    lengths = rng.integers(8, longest + 1, sequences)
    tokens = Jagged.with_lengths(rng.integers(0, SIZES[size]["vocab_size"], lengths.sum()), lengths)
    mask = np.ones(len(tokens.values), np.uint8)
    mask[tokens.offsets[:-1]] = 0
    return tokens, mask


def fresh_peak() -> None:
    """Give back freed memory and begin to measure the peak anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> float:
    """Greatest resident memory since ``fresh_peak``, in MiB."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


# The table


def compare(ranks: list[Found], one: Found) -> dict[str, Any]:
    """A run beside that of one rank; ranks must agree among themselves to the bit."""
    agree = all((r.losses, r.norms) == (ranks[0].losses, ranks[0].norms) for r in ranks)
    apart = [
        max(abs(a / b - 1) for a, b in ((ranks[0].losses[i], one.losses[i]), (ranks[0].norms[i], one.norms[i])))
        for i in (0, -1)
    ]
    return {
        "first": apart[0],
        "last": apart[1],
        "agree": agree,
        "weights": all(r.weights == one.weights for r in ranks),
    }


def flips(ranks: list[Found], one: Found) -> float:
    """Share of decisions (of a token in a layer) that choose another set of experts than one rank."""
    other = []
    for layer, (tokens, chosen) in one.choices.items():
        table = np.empty_like(chosen)
        table[tokens] = np.sort(chosen)
        for theirs, found in (r.choices[layer] for r in ranks if layer in r.choices):
            other.append((np.sort(found) != table[theirs]).any(-1))
    return float(np.concatenate(other).mean()) if other else 0.0


def by_axes(ranks: list[Found]) -> dict[str, dict[str, float]]:
    """Bytes that all ranks sent, and those of the formula, by axes."""
    names = dict.fromkeys(axes for r in ranks for axes in (*r.formula, *r.sent))
    both = {"bytes": [r.sent for r in ranks], "formula": [r.formula for r in ranks]}
    return {
        axes: {what: sum(table.get(axes, 0.0) for table in tables) for what, tables in both.items()} for axes in names
    }


def row(cluster: Cluster, name: str, size: str, steps: int, ones: dict[tuple[bool, ...], Found]) -> dict[str, Any]:
    """One line of the table."""
    tasks = [Task.of(name, size, steps), Task.of(name, size, min(steps, DOUBLE_STEPS), True)]
    group = cluster.group(name, "layout_parity:Trial", {}, mesh=tasks[0].mesh)
    double, single = (group.train(asdict(task)) for task in reversed(tasks))  # the first run loads code
    if name in ALONE:
        ones |= {(*kind_of(name), False): single[0], (*kind_of(name), True): double[0]}
    alone, precise = (ones[*kind_of(name), double] for double in (False, True))
    found, exact = compare(single, alone), compare(double, precise)
    tokens = len(batch(size)[0].values)
    return {
        "layout": name,
        "optimizer": "muon" if tasks[0].muon else "adamw",
        "axes": {axis: ranks for axis, ranks in tasks[0].layout.items() if axis in AXES},
        "initial_weights_equal": found["weights"] and exact["weights"],
        "ranks_agree": found["agree"] and exact["agree"],
        "first_relative": found["first"],
        "last_relative": found["last"],
        "double_relative": max(exact["first"], exact["last"]),
        "flips_share": flips(single, alone),
        "bytes_per_step_and_rank": sum(sum(r.sent.values()) for r in single) / len(single),
        "bytes_by_axes": by_axes(single),
        "tokens_per_second": tokens / max(r.seconds for r in single),
        "peak_mib": max(r.peak for r in single),
        "predicted_mib": max(r.predicted for r in single),
        "elements": [r.elements for r in single],
        "padded_micro_batches": [r.padded for r in single],
        "losses": [single[0].losses[0], single[0].losses[-1]],
    }


def failures(found: dict[str, Any]) -> list[str]:
    """What a row misses."""
    goals = OF_UNITS if "hdp" in found["axes"] else GOALS
    missed = [f"{what} {found[what]:.1e} > {goal:g}" for what, goal in goals.items() if not found[what] <= goal]
    missed += [] if found["initial_weights_equal"] else ["other initial weights"]
    missed += [] if found["ranks_agree"] else ["ranks disagree"]
    sent = found["bytes_by_axes"]
    moved = {axis for axes, both in sent.items() if both["bytes"] for axis in axes.split("+")}
    missed += [f"{axis} moved no byte" for axis in found["axes"] if axis not in moved]
    for axes, both in sent.items():
        if both["formula"] and abs(both["bytes"] / both["formula"] - 1) > CLOSE:
            missed.append(f"{axes} moved {both['bytes'] / both['formula']:.2f} of its formula")
        elif not both["formula"] and both["bytes"] > CLOSE * sum(each["bytes"] for each in sent.values()):
            missed.append(f"{axes} moved {both['bytes']:.0f} bytes of which no formula says")
    return missed


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    figures = " ".join(f"{found[what]:9.1e}" for what in GOALS)
    equal = "yes" if found["initial_weights_equal"] else "NO"
    each = found["bytes_by_axes"].items()
    formulas = " ".join(f"{axes} {both['bytes'] / both['formula']:.2f}" for axes, both in each if both["formula"])
    flipped = f"{found['flips_share']:7.1%}" if found["layout"].startswith("moe") else "      -"
    return (
        f"{found['layout']:18} {equal:>7} {figures} {flipped} {found['bytes_per_step_and_rank'] / 1e6:8.2f} "
        f"{formulas or '-':38} {found['tokens_per_second']:8.0f} {found['peak_mib']:8.1f} {found['predicted_mib']:9.1f}"
        f"  {'; '.join(failures(found)) or 'ok'}"
    )


def main() -> int:
    parser = benchmark_parser(__doc__, "some rows, a smaller model, fewer steps")
    parser.add_argument("--rows", default="", help="layouts, of " + ", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=0, help="default 20, with --quick 4")
    options = parser.parse_args()
    options.steps = options.steps or (4 if options.quick else 20)
    chosen = options.rows.split(",") if options.rows else QUICK if options.quick else ROWS
    names = [name for name in chosen if name not in ("1", *ALONE)]
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows {unknown[0]}: unknown; use {', '.join(ROWS)}")
    kinds = {kind_of(name) for name in names} or {kind_of(ALONE[0])}
    names = [name for name in ALONE if kind_of(name) in kinds] + names
    size, workers = "quick" if options.quick else "full", max(len(Task.of(name, "", 1).mesh) for name in names)
    head = f"{'layout':18} weights     first      last    double   flips  MB/step {'of the formula':38} tokens/s"
    print(f"{head} peak MiB predicted")
    table: list[dict[str, Any]] = []
    ones: dict[tuple[bool, ...], Found] = {}
    about = {"size": size, "steps": options.steps, "torch": torch.__version__}
    with open_cluster("local" if workers > 1 else "inline", workers) as cluster:
        for name in names:
            table.append({**about, **row(cluster, name, size, options.steps, ones)})
            print(line(table[-1]), flush=True)
            write_rows(options.json, table)
    return int(any(failures(found) for found in table))


if __name__ == "__main__":
    sys.exit(main())
