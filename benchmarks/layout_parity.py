"""The same training under every layout: what differs from one rank, what it moves, how fast it is, what it holds.

    python benchmarks/layout_parity.py [--quick] [--json PATH] [--rows 1,dp2,fsdp2] [--steps 20]

A decoder (grouped query attention, a vocabulary that no number of ranks divides, dropout 0.1) is initialised from one
seed and trained with AdamW on one batch of sequences of unequal lengths, in micro-batches of a token budget, on
processes of this machine (backend local, gloo): as one rank, and spread by each layout. The columns:

- weights: whether the initial weights, put together from all ranks, have the bits of one rank's.
- first: greatest relative difference of loss and gradient norm of the first step from one rank's, in float32 (goal
  1e-5); last: the same of the last of 20 steps (goal 1e-4); double: the greater of both in float64 (goal 1e-11).
- flips: share of router decisions that differ from one rank's after the last step.
- MB/step: bytes that each rank sends in collectives for one step, on average over ranks, as the usual ring algorithms
  send them: for n ranks and a whole tensor of b bytes (n-1)/n b for a gather or a scatter of sums, twice that for an
  all-reduce. Every operator of torch's process groups is seen, on a step of its own; a layout that moves nothing fails.
- of the formula: by axes, these bytes over what the layout alone says; a tenth more or less fails.
- tokens/s: tokens of the whole batch over the fastest step; on one machine ranks share its cores, each has one thread.
- peak: greatest resident memory of a rank in the float32 run, with the libraries (MiB).

Exit status 1 if a row misses a goal. --quick: a smaller model, and under a minute.
"""

import ctypes
import gc
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from driver import benchmark_parser
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilth.cluster.controller.cluster import Cluster, open_cluster
from tilth.cluster.protocol import transfer
from tilth.cluster.worker.context import Context
from tilth.config.axes import AXES
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.checksum import checksum
from tilth.core.layout import Layout, Mesh
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.moe import ExpertContext
from tilth.parallel.dims import ParallelDims, join
from tilth.parallel.sharded import ShardedModel, shard
from tilth.plan.experts import dispatch_mode
from tilth.plan.layout import layouts
from tilth.plan.pipeline import chunks_of
from tilth.plan.rules import rule_of
from tilth.training.engine import TrainEngine, negative_log_likelihood

ROWS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "dp2": {"dp": 2},
    "fsdp2": {"fsdp": 2},
    "fsdp4": {"fsdp": 4},
    "hsdp2x2": {"dp": 2, "fsdp": 2},
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sp": True},
    "tp4": {"tp": 4},
    "fsdp2xtp2": {"fsdp": 2, "tp": 2},
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "ulysses2": {"cp": 2, "cp_style": "ulysses"},
    "ulysses4": {"cp": 4, "cp_style": "ulysses"},
    "cp2xtp2": {"cp": 2, "tp": 2},
    "dp2xcp2": {"dp": 2, "cp": 2},
    "fsdp2xcp2": {"fsdp": 2, "cp": 2},
    "moe 1 rank": {"experts": True},
    "moe dp2": {"experts": True, "dp": 2},
    "moe fsdp2": {"experts": True, "fsdp": 2},
    "moe tp2": {"experts": True, "tp": 2},
    "moe ep2": {"experts": True, "ep": 2},
    "moe ep2 zero2": {"experts": True, "ep": 2, "zero": 2},
    "moe ep4": {"experts": True, "ep": 4},
    "moe ep2xfsdp2": {"experts": True, "ep": 2, "fsdp": 2},
    "moe dp2xep2": {"experts": True, "dp": 2, "ep": 2},
    "moe cp2xep2": {"experts": True, "ep": 2, "cp": 2},
    "moe ep2xtp2": {"experts": True, "ep": 2, "tp": 2},
    "moe dp2xfsdp2xep2": {"experts": True, "dp": 2, "fsdp": 2, "ep": 2},
    "moe ep2xtp2xfsdp2": {"experts": True, "fsdp": 2, "ep": 2, "tp": 2},
    "pp2": {"pp": 2},
    "pp2 interleaved": {"pp": 2, "schedule": "interleaved"},
    "pp2 zero-bubble": {"pp": 2, "schedule": "zero-bubble"},
    "pp4": {"pp": 4},
    "dp2xpp2": {"pp": 2, "dp": 2},
    "fsdp2xpp2": {"pp": 2, "fsdp": 2},
    "pp2xtp2": {"pp": 2, "tp": 2, "sp": True},
}
"""Row -> its layout, as in a recipe; experts: of a model with experts in all layers but the first."""
EXPERTS = {"family": "qwen3_moe", "num_experts": 8, "experts_per_token": 2, "qk_norm": True}
ALONE = ("1 rank", "moe 1 rank")
"""Rows with which the others, without and with experts, are compared."""
CLOSE = 0.1
"""Part of an axis's bytes that its formula may leave out."""
GOALS = {"first": 1e-5, "last": 1e-4, "double": 1e-11}
SIZES: dict[str, dict[str, Any]] = {
    "full": {"vocab_size": 4099, "hidden_size": 256, "intermediate_size": 688, "num_layers": 6},
    "quick": {"vocab_size": 1031, "hidden_size": 64, "intermediate_size": 176, "num_layers": 4},
}
BATCHES = {"full": (32, 120, 512), "quick": (10, 40, 100)}
"""Sequences, tokens of the longest, tokens of a micro-batch."""


Choices = dict[int, np.ndarray]
"""Row of the batch -> experts of its tokens, int64 [layers, tokens, k], best first."""


@dataclass(frozen=True)
class Task:
    """One training run. layout: sizes of axes and modes, as in a recipe."""

    size: str
    steps: int
    double: bool = False
    experts: bool = False
    layout: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, size: str, steps: int, double: bool = False) -> "Task":
        layout = {key: value for key, value in ROWS[name].items() if key != "experts"}
        return cls(size, steps, double, "experts" in ROWS[name], layout)

    @property
    def mesh(self) -> Mesh:
        return Mesh.of({name: size for name, size in self.layout.items() if name in AXES})

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
    """MiB."""
    padded: int
    elements: int
    """Of parameters that this rank holds."""
    choices: Choices
    """After the last step."""


class Trial:
    """A role that trains a model of its own on each of its ranks."""

    def __init__(self, context: Context) -> None:
        join(context.rank, context.workers, context.init_method, context.timeout)
        torch.set_num_threads(1)
        self.context = context

    @transfer("all", "all")
    def train(self, task: dict[str, Any]) -> Found:
        """Every rank's view of a run."""
        fresh_peak()
        return run(Task(**task), ParallelDims.of(self.context.mesh, self.context.rank))


def run(task: Task, grid: ParallelDims) -> Found:
    """Initialise, train for the task's steps, and count on one more."""
    sharded = spread(task, grid)
    sharded.init_(0)
    weights = {name: checksum(tensor) for name, tensor in sharded.assemble(list(sharded.layouts)).items()}
    section = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_norm=1.0)
    engine = TrainEngine(sharded, section, total_steps=task.steps, micro_tokens=BATCHES[task.size][2], seed=1)
    tokens, mask = batch(task.size)
    rows = np.arange(len(tokens.lengths))[
        grid.mesh.index(grid.rank, *grid.mesh.over("rows")) :: grid.mesh.count("rows")
    ]
    own, starts = tokens.take(rows), tokens.offsets[rows]
    own_mask = Jagged(mask, tokens.offsets).take(rows).values
    loss = negative_log_likelihood(float(mask.sum()))
    results, seconds = [], []
    for _ in range(task.steps):
        begin = time.perf_counter()
        results.append(engine.update(own, own_mask, {}, loss, entropy=False, starts=starts))
        seconds.append(time.perf_counter() - begin)
    top = peak()
    chosen = choices(sharded, own, rows) if task.experts else {}
    with Collectives(grid.mesh) as collectives, Rounds() as rounds:
        engine.update(own, own_mask, {}, loss, entropy=False, starts=starts)
    wanted = formula(task, grid, rounds.count // len(sharded.parts), len(own.values) + results[-1].padded, chosen)
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    elements, padded = sum(p.numel() for p in sharded.parameters.values()), sum(r.padded for r in results)
    sent = dict(collectives.sent)
    return Found(weights, losses, norms, min(seconds), sent, wanted, top, padded, elements, chosen)


def spread(task: Task, grid: ParallelDims) -> ShardedModel:
    """The model of a task, uninitialised."""

    def build() -> Decoder:
        return Decoder(task.config, torch.float64).double() if task.double else Decoder(task.config)

    modes = {name: value for name, value in task.layout.items() if name not in AXES}
    return ShardedModel.alone(build()) if len(grid.mesh) == 1 else shard(build, grid, **modes)


@torch.no_grad()
def choices(sharded: ShardedModel, tokens: Jagged, rows: np.ndarray) -> Choices:
    """The experts that routers choose for each token, best first, by row of the batch; every rank makes one pass."""
    noted = ExpertContext(record=True)
    sharded.forward(torch.from_numpy(tokens.values), PackedContext(tokens.lengths, experts=noted))
    sharded.reshard()
    table = torch.stack([noted.chosen[layer] for layer in sorted(noted.chosen)]).numpy()
    return dict(zip(rows.tolist(), np.split(table, tokens.offsets[1:-1], axis=1)))


class Rounds:
    """Counts forward passes of decoders, blanks included."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Rounds":
        def see(module: Any, *_: Any) -> None:
            self.count += isinstance(module, Decoder)

        self._hook = torch.nn.modules.module.register_module_forward_pre_hook(see)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


def formula(
    task: Task, grid: ParallelDims, rounds: int, tokens: int, chosen: dict[int, np.ndarray]
) -> dict[str, float]:
    """Bytes that this rank sends in a step, by axes: parameters and gradients of zero = 3 or 2, gradients over copies,
    sums around the blocks of tp, and tokens to experts. Scalars, norms and the vocabulary's sums are left out, and all
    along cp. Between stages: hidden states for each part but the last, gradients for each but the first.

    rounds: micro-batches with blanks; tokens: of this rank.
    """
    mesh, config, found = grid.mesh, task.config, defaultdict[str, float](float)
    element = 8 if task.double else 4
    schedule, tp = task.layout.get("schedule", "1f1b"), mesh.size("tp")
    every = layouts(config, mesh, schedule=schedule)
    mine = {name: layout for name, layout in every.items() if layout.mesh.has(grid.rank)}
    for name, layout in mine.items():
        shards = mesh.expert_shards if rule_of(config.table, name).stacked else mesh.shards
        n, held = mesh.size(*shards), most_of(layout, mesh)
        times = 2 if task.layout.get("zero") == 2 else rounds * (3 if name.startswith("model.layers.") else 2)
        found[label(mesh, shards)] += (n - 1) * held * element * times
        copies = mesh.size(*mesh.copies)
        found[label(mesh, mesh.copies)] += 2 * (copies - 1) / copies * held * element
    width = tokens * config.hidden_size * element
    layers, ends = len({name.split(".")[2] for name in mine if name.startswith("model.layers.")}), ends_of(grid)
    found[label(mesh, ["tp"])] += (4 * layers + ends) * 2 * (tp - 1) / tp * width
    if mesh.size("pp") > 1:
        parts = mesh.size("pp") * chunks_of(schedule)
        own = range(grid.coordinate("pp"), parts, mesh.size("pp"))
        times = sum(part < parts - 1 for part in own) + sum(part > 0 for part in own)
        found["pp"] += times * width / (tp if task.layout.get("sp") else 1)
        found["pp"] += sum(most_of(mine[n], mesh) for n in mine if mine[n].mesh.size("pp") > 1) * element  # both ends
    if chosen:
        found[label(mesh, ["ep"])] += 4 * away(grid, config, chosen) * config.hidden_size * element
    return {axes: sent for axes, sent in found.items() if sent and "cp" not in axes.split("+")}


def ends_of(grid: ParallelDims) -> int:
    """How many of embedding and head this rank computes with."""
    return (grid.coordinate("pp") == 0) + (grid.coordinate("pp") == grid.size("pp") - 1)


def most_of(layout: Layout, mesh: Mesh) -> int:
    """Elements of the largest share of a parameter, up to which FSDP fills the others."""
    return max(sum(box.numel for box in layout.boxes(rank)) for rank in mesh.ranks)


def away(grid: ParallelDims, config: DecoderConfig, chosen: Choices) -> int:
    """Pairs of a token and an expert of another rank, in all layers."""
    ep, local = grid.size("ep"), config.num_experts // grid.size("ep")
    if dispatch_mode(config.experts_per_token, ep) == "gather":
        raise NotImplementedError("count tokens, not pairs")
    return sum(int((table // local != grid.coordinate("ep")).sum()) for table in chosen.values())


def label(mesh: Mesh, names: Sequence[str]) -> str:
    """The axes of several ranks among these, as a key."""
    return "+".join(name for name in mesh.names if name in names and mesh.size(name) > 1)


def batch(size: str) -> tuple[Jagged, np.ndarray]:
    """Sequences of unequal lengths and the mask of what is learned from: all but their first tokens."""
    rng = np.random.default_rng(0)
    sequences, longest, _ = BATCHES[size]
    lengths = rng.integers(8, longest + 1, sequences)
    tokens = Jagged.with_lengths(rng.integers(0, SIZES[size]["vocab_size"], lengths.sum()), lengths)
    mask = np.ones(len(tokens.values), np.uint8)
    mask[tokens.offsets[:-1]] = 0
    return tokens, mask


class Collectives(TorchDispatchMode):
    """Inside of it, ``sent`` adds up the bytes that the collectives of this process send by the ring algorithms, by the
    axes of the mesh along which the ranks of a group differ."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh, self.sent = mesh, defaultdict[str, float](float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.__name__.partition(".")[0] != "barrier":
            name = func.__name__.partition(".")[0]
            group = next(g for g in map(group_of, args) if g is not None)
            places = [self.mesh.coordinates(rank) for rank in dist.get_process_group_ranks(group)]
            axes = "+".join(n for n, at in zip(self.mesh.names, zip(*places)) if len(set(at)) > 1)
            self.sent[axes] += sent_by(name, args, group)
        return func(*args, **(kwargs or {}))


def sent_by(name: str, args: Any, group: dist.ProcessGroup) -> float:
    """Bytes that this rank sends in one call of torch's operator."""
    if name in ("send", "recv_"):  # to one peer
        return sum(t.nbytes for t in tree_leaves(args[0])) * (name == "send")
    if name == "alltoall_base_":
        return args[1].nbytes - args[4][group.rank()] * (args[1].nbytes // max(len(args[1]), 1))
    whole, times = COLLECTIVES[name]
    return times * (group.size() - 1) / group.size() * sum(t.nbytes for t in tree_leaves(args[whole]))


COLLECTIVES: dict[str, tuple[int, int]] = {
    "allreduce_": (0, 2),
    "broadcast_": (0, 1),
    "allgather_": (0, 1),
    "_allgather_base_": (0, 1),
    "reduce_scatter_": (1, 1),
    "_reduce_scatter_base_": (1, 1),
}
"""Torch's operator -> which argument is the whole tensor, and how often a ring sends (n - 1) / n of it."""


def group_of(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an operator was given, if this argument is one."""
    return dist.ProcessGroup.unbox(argument) if isinstance(argument, torch.ScriptObject) else None


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


def compare(task: Task, ranks: list[Found], one: Found) -> dict[str, Any]:
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
    found = {row: table for rank in ranks for row, table in rank.choices.items()}
    other = [(np.sort(found[row]) != np.sort(table)).any(-1) for row, table in one.choices.items()]
    return float(np.concatenate([table.ravel() for table in other]).mean()) if other else 0.0


def off(ranks: list[Found]) -> dict[str, float]:
    """Bytes that all ranks sent, relative to the formula, by axes."""
    return {
        axes: sum(r.sent.get(axes, 0.0) for r in ranks) / sum(r.formula[axes] for r in ranks)
        for axes in ranks[0].formula
    }


def row(cluster: Cluster, name: str, size: str, steps: int, ones: dict[tuple[bool, bool], Found]) -> dict[str, Any]:
    """One line of the table."""
    tasks = [Task.of(name, size, steps, double) for double in (False, True)]
    group = cluster.group(name, "layout_parity:Trial", {}, mesh=tasks[0].mesh)
    single, double = (group.train(asdict(task)) for task in tasks)
    if name in ALONE:
        ones |= {(tasks[0].experts, False): single[0], (tasks[0].experts, True): double[0]}
    alone, precise = (ones[tasks[0].experts, double] for double in (False, True))
    found, exact = compare(tasks[0], single, alone), compare(tasks[1], double, precise)
    tokens = len(batch(size)[0].values)
    return {
        "layout": name,
        "weights": found["weights"] and exact["weights"],
        "first": found["first"],
        "last": found["last"],
        "double": max(exact["first"], exact["last"]),
        "agree": found["agree"] and exact["agree"],
        "bytes_per_step": sum(sum(r.sent.values()) for r in single) / len(single),
        "off": off(single),
        "flips": flips(single, alone),
        "tokens_per_second": tokens / max(r.seconds for r in single),
        "peak_mib": max(r.peak for r in single),
        "elements": [r.elements for r in single],
        "padded": [r.padded for r in single],
        "losses": [single[0].losses[0], single[0].losses[-1]],
    }


def failures(found: dict[str, Any]) -> list[str]:
    """What a row misses."""
    missed = [f"{what} {found[what]:.1e} > {goal:g}" for what, goal in GOALS.items() if not found[what] <= goal]
    missed += [] if found["weights"] else ["other initial weights"]
    missed += [] if found["agree"] else ["ranks disagree"]
    silent = found["layout"] not in ALONE and not found["bytes_per_step"]
    wrong = [
        f"{axes} moved {times:.2f} of its formula" for axes, times in found["off"].items() if abs(times - 1) > CLOSE
    ]
    return missed + (["moved no byte"] if silent else []) + wrong


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    figures = " ".join(f"{found[what]:9.1e}" for what in GOALS)
    moved, speed = found["bytes_per_step"] / 1e6, found["tokens_per_second"]
    equal = "yes" if found["weights"] else "NO"
    said = "; ".join(failures(found)) or "ok"
    formulas = " ".join(f"{axes} {times:.2f}" for axes, times in found["off"].items()) or "-"
    flipped = f"{found['flips']:7.1%}" if found["layout"].startswith("moe") else "      -"
    return (
        f"{found['layout']:18} {equal:>7} {figures} {flipped} {moved:8.2f} {formulas:24} {speed:9.0f} "
        f"{found['peak_mib']:9.0f}  {said}"
    )


def main() -> int:
    parser = benchmark_parser(__doc__, "a smaller model, fewer steps")
    parser.add_argument("--rows", default=",".join(ROWS), help="layouts, of " + ", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=0, help="default 20, with --quick 4")
    options = parser.parse_args()
    options.steps = options.steps or (4 if options.quick else 20)
    names = [name for name in options.rows.split(",") if name not in ("1", *ALONE)]
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows {unknown[0]}: unknown; use {', '.join(ROWS)}")
    kinds = {"experts" in ROWS[name] for name in names} or {False}
    names = [name for name in ALONE if ("experts" in ROWS[name]) in kinds] + names
    size, workers = "quick" if options.quick else "full", max(len(Task.of(name, "", 1).mesh) for name in names)
    head = f"{'layout':18} weights     first      last    double   flips  MB/step {'of the formula':24}  tokens/s"
    print(f"{head}  peak MiB")
    table: list[dict[str, Any]] = []
    ones: dict[tuple[bool, bool], Found] = {}
    with open_cluster("local" if workers > 1 else "inline", workers) as cluster:
        for name in names:
            table.append(row(cluster, name, size, options.steps, ones))
            print(line(table[-1]), flush=True)
    if options.json:
        about = {"size": size, "steps": options.steps, "torch": torch.__version__}
        options.json.write_text(json.dumps([{**about, **found} for found in table], indent=1) + "\n")
    return int(any(failures(found) for found in table))


if __name__ == "__main__":
    sys.exit(main())
