"""Weights from training to generation: bytes, memory and time of three transitions, beside HybridFlow's formulas.

    python benchmarks/reshard.py [--quick] [--json PATH] [--rows 1-4-1:1-2,...]

Each row is a training layout p-t-d (pipeline, tensor, data) and the layout p_g-t_g of the engines that a training
replica becomes, on p t d processes of this machine (backend local, gloo). The transitions (``tilth.parallel.reshard``):

- full: gathers whole parameters over all ranks, from training by ZeRO-3, as DeepSpeed-Chat.
- naive: gathers whole parameters over one training replica, engines on neighbouring ranks, as HybridFlow-V.
- zero-redundancy: engines on ranks at a stride, so that a training shard is a part of the generation shard, in the same
  memory; only the rest travels.

The columns, M being the bytes of all divided parameters (under tp each rank has the norms of its layers):

- moved: MB that a rank writes to its sockets in one transition, on average, which is what a rank receives, and the
  formula: (n-1)/n M over n = p t d (full) or p t (naive) ranks, (t p - t_g p_g) / (t_g p_g t p) M (zero-redundancy).
- weights: MB of storage of training and generation weights together, that remains, and the formula:
  M/p_g + M/n, M/(t_g p_g).
- peak: growth of the largest process's resident memory in a transition over that before there were weights (MB); above
  the weights there are buffers of one bucket, here the largest parameter.
- ms: fastest of the transitions, of the slowest rank.
- bits: every generation shard equals that of the undivided model, also after training changed the weights.
- kept: the training shards have the same values at the same addresses before and after.

Exit status 1 if a figure differs from its formula, a bit from the model or a shard has moved. --quick: a smaller model,
4 ranks.
"""

import ctypes
import gc
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from driver import benchmark_parser, write_rows
from torch import Tensor, nn
from transitions import TRANSITIONS, Training
from trial import JoinedRole

from tilth.cluster.controller.cluster import Cluster, open_cluster
from tilth.cluster.protocol import transfer
from tilth.config.axes import Split
from tilth.core.layout import Box, Mesh, Replicate
from tilth.core.random import fill_normal_, stream
from tilth.models.config import DecoderConfig
from tilth.parallel.dims import ParallelDims
from tilth.parallel.reshard import Parts, allocate, share
from tilth.plan.layout import layouts
from tilth.plan.reshard import generation_ranks

ROWS = {
    4: ("1-4-1:1-1", "1-4-1:1-2", "1-2-2:1-1", "2-2-1:1-2", "2-2-1:2-1"),
    8: ("1-8-1:1-2", "1-8-1:1-4", "1-4-2:1-2", "1-2-4:1-1", "2-2-2:1-2"),
}
SIZES: dict[str, dict[str, Any]] = {
    "full": {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_layers": 6},
    "quick": {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384, "num_layers": 4},
}
REPEATS = 5
SLACK = 20_000
"""Bytes of messages beside the weights: sockets carry headers, and the barrier before a transition."""
SPLITS: tuple[Split, ...] = ("rows", "parameters", "layers")


@dataclass(frozen=True)
class Case:
    """One transition between two layouts."""

    size: str
    transition: str
    p: int
    t: int
    d: int
    pg: int
    tg: int

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig(**SIZES[self.size], num_heads=8, num_kv_heads=8)

    @property
    def training(self) -> Mesh:
        ranks = self.p * self.t * self.d
        return Mesh.of({"fsdp": ranks} if self.transition == "full" else {"pp": self.p, "dp": self.d, "tp": self.t})

    @property
    def generation(self) -> Mesh:
        ranks = self.training.ranks
        if self.transition == "zero-redundancy":
            ranks = generation_ranks(self.training, self.pg, self.tg)
        return Mesh.of({"pp": self.pg, "dp": len(ranks) // (self.pg * self.tg), "tp": self.tg}, ranks)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the parameters that tp divides, and of those that it copies."""
        found = layouts(self.config, self.training)
        whole = {name: 4 * Box.whole(layout.shape).numel for name, layout in found.items()}
        copied = sum(n for name, n in whole.items() if all(isinstance(p, Replicate) for p in found[name].placements))
        return sum(whole.values()) - copied, copied

    @property
    def received(self) -> float:
        """Bytes that a rank receives, by the formula."""
        divided, copied = self.sizes
        if self.transition == "zero-redundancy":
            tp, small = self.t * self.p, self.tg * self.pg
            return (tp - small) / (small * tp) * divided + (self.p - self.pg) / (self.p * self.pg) * copied
        n = self.t * self.p * (self.d if self.transition == "full" else 1)
        return (n - 1) / n * divided + (self.p - 1) / self.p * copied

    @property
    def weights(self) -> float:
        """Bytes of training and generation weights together, by the formula."""
        divided, copied = self.sizes
        if self.transition == "zero-redundancy":
            return divided / (self.tg * self.pg) + copied / self.pg
        n = self.t * self.p * (self.d if self.transition == "full" else 1)
        return (divided + copied) / self.pg + divided / n + copied / self.p


@dataclass
class Found:
    """Measurements of one rank, in bytes and seconds."""

    wire: int
    weights: int
    peak: int
    seconds: float
    equal: bool
    kept: bool


class Trial(JoinedRole):
    """A role that makes generation weights of training shards, on each of its ranks."""

    @transfer("all", "all")
    def run(self, case: dict[str, Any]) -> Found:
        """Return this rank's measurements of a case."""
        return Attempt(Case(**case), self.context.rank).measure()


class Attempt:
    """A case on one rank: its training shards and what becomes of them."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        fresh_peak()
        self.before = resident("VmRSS")
        held, self.wanted = layouts(case.config, case.training), layouts(case.config, case.generation)
        self.parameters = {
            name: nn.Parameter(weights(name, box, layout.shape))
            for name, layout in held.items()
            for box in layout.boxes(rank)
        }
        bucket = 4 * max(Box.whole(layout.shape).numel for layout in held.values())
        self.training = Training(rank, case.training, held, self.parameters, bucket)
        self.into: Parts = {}
        if case.transition == "zero-redundancy":
            self.into = allocate(self.wanted, rank, torch.empty(0))
            share(self.parameters, self.training.parts, self.into, strided=True)
        self.found: Parts = {}

    def measure(self) -> Found:
        """Make generation weights several times, once after the training shards have changed."""
        places = self.places()
        equal, kept = self.turn_is_right(0.0)
        for parameter in self.parameters.values():
            parameter.data.add_(1.0)
        later, still = self.turn_is_right(1.0)
        fresh_peak()
        turns = [self.turn() for _ in range(REPEATS)]
        tensors = [*self.parameters.values(), *(part.values for part in self.found.values())]
        storage = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return Found(
            wire=turns[-1][0],
            weights=sum(storage.values()),
            peak=resident("VmHWM") - self.before,
            seconds=min(seconds for _, seconds in turns),
            equal=equal and later,
            kept=kept and still and self.places() == places,
        )

    def turn(self) -> tuple[int, float]:
        """Make generation weights; return bytes written to sockets, and seconds."""
        self.found = {}
        ParallelDims.of(self.case.training, self.rank).sum(torch.zeros(1), *SPLITS)  # all begin together
        sent, begin = written(), time.perf_counter()
        self.found = TRANSITIONS[self.case.transition](self.training, self.case.generation, self.wanted, self.into)
        return written() - sent, time.perf_counter() - begin

    def turn_is_right(self, added: float) -> tuple[bool, bool]:
        """Make generation weights; return whether they are the model's, and whether the training shards are."""
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.turn()
        right = [
            torch.equal(part.values, weights(name, part.box, self.wanted[name].shape) + added)
            for name, part in self.found.items()
        ]
        return all(right), all(torch.equal(before[name], p.detach()) for name, p in self.parameters.items())

    def places(self) -> dict[str, int]:
        """Return the addresses of the training shards."""
        return {name: p.data_ptr() for name, p in self.parameters.items()}


def weights(name: str, box: Box, shape: tuple[int, ...]) -> Tensor:
    """Return a box of a parameter of the undivided model, which no process ever holds whole."""
    found = torch.empty(box.size)
    fill_normal_(found, stream(0, "init", name), 0.02, box, shape)
    return found


def written() -> int:
    """Return the bytes that this process has written to files and sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


def fresh_peak() -> None:
    """Give back freed memory and begin to measure the peak anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def resident(which: str) -> int:
    """Return resident memory in bytes: now (VmRSS), or the greatest since ``fresh_peak`` (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(which)).split()[1])


# The table


def row(cluster: Cluster, case: Case, name: str) -> dict[str, Any]:
    """Measure one line of the table."""
    ranks: list[Found] = cluster.group(f"{name} {case.transition}", "reshard:Trial", {}, mesh=case.training).run(
        asdict(case)
    )
    return {
        "row": name,
        "transition": case.transition,
        "ranks": len(ranks),
        "model_bytes": sum(case.sizes),
        "moved": sum(r.wire for r in ranks) / len(ranks),
        "moved_formula": case.received,
        "weights": max(r.weights for r in ranks),
        "weights_formula": case.weights,
        "peak": max(r.peak for r in ranks),
        "seconds": max(r.seconds for r in ranks),
        "equal": all(r.equal for r in ranks),
        "kept": all(r.kept for r in ranks),
    }


def failures(found: dict[str, Any]) -> list[str]:
    """Return what a row misses."""
    missed = [
        f"{what} {found[what]:.0f}, not {found[f'{what}_formula']:.0f}"
        for what, most in (("moved", 0.01), ("weights", 1e-3))
        if abs(found[what] - found[f"{what}_formula"]) > most * found[f"{what}_formula"] + SLACK * (what == "moved")
    ]
    missed += [] if found["equal"] else ["other bits than the model"]
    return missed + ([] if found["kept"] else ["training shards have moved or changed"])


def line(found: dict[str, Any]) -> str:
    """Format a row of the table."""
    sizes = (found[what] / 1e6 for what in ("moved", "moved_formula", "weights", "weights_formula", "peak"))
    figures = " ".join(f"{size:9.3f}" for size in sizes)
    said = "; ".join(failures(found)) or "ok"
    return f"{found['row']:10} {found['transition']:16} {figures} {found['seconds'] * 1e3:8.1f}  {said}"


def main() -> int:
    parser = benchmark_parser(__doc__, "a smaller model on 4 ranks")
    parser.add_argument("--rows", default="", help="p-t-d:pg-tg, separated by commas; default: all")
    options = parser.parse_args()
    size, most = ("quick", 4) if options.quick else ("full", 8)
    names = (
        options.rows.split(",")
        if options.rows
        else [n for ranks, found in ROWS.items() if ranks <= most for n in found]
    )
    layout = [tuple(map(int, name.replace(":", "-").split("-"))) for name in names]
    print(f"{'row':10} {'transition':16}     moved   formula   weights   formula      peak       ms  (MB)")
    table: list[dict[str, Any]] = []
    for ranks in sorted({p * t * d for p, t, d, *_ in layout}):
        with open_cluster("local", ranks) as cluster:
            for name, (p, t, d, pg, tg) in zip(names, layout):
                for transition in TRANSITIONS if p * t * d == ranks else ():
                    table.append(row(cluster, Case(size, transition, p, t, d, pg, tg), name))
                    print(line(table[-1]), flush=True)
                    write_rows(options.json, table)
    return int(any(failures(found) for found in table))


if __name__ == "__main__":
    sys.exit(main())
