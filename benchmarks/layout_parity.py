"""The same training under every layout: what differs from one rank, what it moves, how fast it is, what it holds.

    python benchmarks/layout_parity.py [--quick] [--json PATH] [--rows 1,dp2,fsdp2] [--steps 20]

A decoder (grouped query attention, a vocabulary that no number of ranks divides, dropout 0.1) is initialised from one
seed and trained with AdamW on one batch of sequences of unequal lengths, in micro-batches of a token budget, on
processes of this machine (backend local, gloo): as one rank, and spread by each layout. The columns:

- weights: whether the initial weights, put together from all ranks, have the bits of one rank's.
- first: greatest relative difference of loss and gradient norm of the first step from one rank's, in float32 (goal
  1e-5); last: the same of the last of 20 steps (goal 1e-4); double: the greater of both in float64 (goal 1e-11).
- MB/step: bytes that each rank sends in collectives for one step, on average over ranks, as the usual ring algorithms
  send them: for n ranks and a whole tensor of b bytes (n-1)/n b for a gather or a scatter of sums, twice that for an
  all-reduce. Every operator of torch's process groups is seen, on a step of its own; a layout that moves nothing fails.
- tokens/s: tokens of the whole batch over the fastest step; on one machine ranks share its cores, each has one thread.
- peak: greatest resident memory of a rank in the float32 run, with the libraries (MiB).

Exit status 1 if a row misses a goal. --quick: a smaller model, and under a minute.
"""

import ctypes
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from driver import benchmark_parser
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilth.cluster.controller.cluster import Cluster, open_cluster
from tilth.cluster.protocol import transfer
from tilth.cluster.worker.context import Context
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.checksum import checksum
from tilth.core.layout import Mesh
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims, join
from tilth.parallel.sharded import ShardedModel, shard
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
}
GOALS = {"first": 1e-5, "last": 1e-4, "double": 1e-11}
SIZES: dict[str, dict[str, Any]] = {
    "full": {"vocab_size": 4099, "hidden_size": 256, "intermediate_size": 688, "num_layers": 6},
    "quick": {"vocab_size": 1031, "hidden_size": 64, "intermediate_size": 176, "num_layers": 2},
}
BATCHES = {"full": (32, 120, 512), "quick": (10, 40, 100)}
"""Sequences, tokens of the longest, tokens of a micro-batch."""


@dataclass(frozen=True)
class Task:
    """One training run. dp, fsdp, cp, tp: ranks along each axis."""

    size: str
    steps: int
    double: bool = False
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    sp: bool = False
    cp_style: Literal["ring", "ulysses"] = "ring"

    @property
    def mesh(self) -> Mesh:
        return Mesh(("dp", "fsdp", "cp", "tp"), (self.dp, self.fsdp, self.cp, self.tp))


@dataclass
class Found:
    """What one rank saw."""

    weights: dict[str, int]
    """Checksum of each initial weight, put together."""
    losses: list[float]
    norms: list[float]
    seconds: float
    """Of the fastest step."""
    sent: float
    """Bytes a step."""
    peak: float
    """MiB."""
    padded: int
    elements: int
    """Of parameters that this rank holds."""


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
    weights = {name: checksum(tensor) for name, tensor in sharded.assemble(list(sharded.parameters)).items()}
    section = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_norm=1.0)
    engine = TrainEngine(sharded, section, total_steps=task.steps, micro_tokens=BATCHES[task.size][2], seed=1)
    tokens, mask = batch(task.size)
    rows = np.arange(len(tokens.lengths))[part_of(grid) :: grid.size("dp", "fsdp")]
    own, starts = tokens.take(rows), tokens.offsets[rows]
    own_mask = Jagged(mask, tokens.offsets).take(rows).values
    loss = negative_log_likelihood(float(mask.sum()))
    results, seconds = [], []
    for _ in range(task.steps):
        begin = time.perf_counter()
        results.append(engine.update(own, own_mask, {}, loss, entropy=False, starts=starts))
        seconds.append(time.perf_counter() - begin)
    top = peak()
    with Collectives() as collectives:
        engine.update(own, own_mask, {}, loss, entropy=False, starts=starts)
    losses, norms = [r.loss for r in results], [r.grad_norm for r in results]
    elements, padded = sum(p.numel() for p in sharded.parameters.values()), sum(r.padded for r in results)
    return Found(weights, losses, norms, min(seconds), collectives.sent, top, padded, elements)


def spread(task: Task, grid: ParallelDims) -> ShardedModel:
    """The model of a task, uninitialised."""
    config = DecoderConfig(**SIZES[task.size], num_heads=8, num_kv_heads=2, dropout=0.1)

    def build() -> Decoder:
        return Decoder(config, torch.float64).double() if task.double else Decoder(config)

    return (
        ShardedModel.alone(build()) if len(grid.mesh) == 1 else shard(build, grid, sp=task.sp, cp_style=task.cp_style)
    )


def batch(size: str) -> tuple[Jagged, np.ndarray]:
    """Sequences of unequal lengths and the mask of what is learned from: all but their first tokens."""
    rng = np.random.default_rng(0)
    sequences, longest, _ = BATCHES[size]
    lengths = rng.integers(8, longest + 1, sequences)
    tokens = Jagged.with_lengths(rng.integers(0, SIZES[size]["vocab_size"], lengths.sum()), lengths)
    mask = np.ones(len(tokens.values), np.uint8)
    mask[tokens.offsets[:-1]] = 0
    return tokens, mask


def part_of(grid: ParallelDims) -> int:
    """Which share of the rows this rank has."""
    return grid.coordinate("dp") * grid.size("fsdp") + grid.coordinate("fsdp")


class Collectives(TorchDispatchMode):
    """Inside of it, ``sent`` adds up the bytes that the collectives of this process send by the ring algorithms."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.__name__.partition(".")[0] != "barrier":
            name = func.__name__.partition(".")[0]
            whole, times = COLLECTIVES[name]
            ranks = next(g.size() for g in map(group_of, args) if g is not None)
            share = 1.0 if name == "send" else times * (ranks - 1) / ranks
            self.sent += share * sum(t.nbytes for t in tree_leaves(args[whole]))
        return func(*args, **(kwargs or {}))


COLLECTIVES: dict[str, tuple[int, int]] = {
    "allreduce_": (0, 2),
    "allgather_": (0, 1),
    "_allgather_base_": (0, 1),
    "reduce_scatter_": (1, 1),
    "_reduce_scatter_base_": (1, 1),
    "send": (0, 1),
    "recv_": (0, 0),
    "alltoall_base_": (1, 1),
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


def row(cluster: Cluster, name: str, size: str, steps: int, ones: dict[bool, Found]) -> dict[str, Any]:
    """One line of the table."""
    tasks = [Task(size, steps, double, **ROWS[name]) for double in (False, True)]
    group = cluster.group(name, "layout_parity:Trial", {}, mesh=tasks[0].mesh)
    single, double = (group.train(asdict(task)) for task in tasks)
    if name == "1 rank":
        ones |= {False: single[0], True: double[0]}
    found, exact = compare(tasks[0], single, ones[False]), compare(tasks[1], double, ones[True])
    tokens = len(batch(size)[0].values)
    return {
        "layout": name,
        "weights": found["weights"] and exact["weights"],
        "first": found["first"],
        "last": found["last"],
        "double": max(exact["first"], exact["last"]),
        "agree": found["agree"] and exact["agree"],
        "bytes_per_step": sum(r.sent for r in single) / len(single),
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
    silent = found["layout"] != "1 rank" and not found["bytes_per_step"]
    return missed + (["moved no byte"] if silent else [])


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    figures = " ".join(f"{found[what]:9.1e}" for what in GOALS)
    moved, speed = found["bytes_per_step"] / 1e6, found["tokens_per_second"]
    equal = "yes" if found["weights"] else "NO"
    said = "; ".join(failures(found)) or "ok"
    return f"{found['layout']:10} {equal:>7} {figures} {moved:8.2f} {speed:9.0f} {found['peak_mib']:9.0f}  {said}"


def main() -> int:
    parser = benchmark_parser(__doc__, "a smaller model, fewer steps")
    parser.add_argument("--rows", default=",".join(ROWS), help="layouts, of " + ", ".join(ROWS))
    parser.add_argument("--steps", type=int, default=0, help="default 20, with --quick 4")
    options = parser.parse_args()
    options.steps = options.steps or (4 if options.quick else 20)
    names = ["1 rank", *(name for name in options.rows.split(",") if name not in ("1", "1 rank"))]
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"--rows {unknown[0]}: unknown; use {', '.join(ROWS)}")
    size, workers = "quick" if options.quick else "full", max(len(Task("", 1, **ROWS[name]).mesh) for name in names)
    print(f"{'layout':10} weights     first      last    double  MB/step  tokens/s  peak MiB")
    table: list[dict[str, Any]] = []
    ones: dict[bool, Found] = {}
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
