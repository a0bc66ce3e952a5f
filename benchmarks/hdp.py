"""Hybrid data parallelism beside a static mesh: the same heavy-tailed batch, on 2 and 4 ranks.

    python benchmarks/hdp.py [--quick] [--json PATH]

A decoder learns from one global batch: most sequences are short, a few hold most of the work, and the longest fills all
ranks. Processes of this machine (backend local, gloo, one thread each), in three ways:

- static: a mesh of dp x cp whose cp holds the longest sequence, with best-fit packing. So each micro-batch has all
  ranks, and the shortest sequence goes around the ring too.
- naive: ``hdp`` by algorithm 1 of ByteScale (arXiv 2502.21231): a sequence has the ranks that its length needs.
- balanced: ``hdp`` as a run has it, with the balance scheduler by tokens and squares.

Before anything is timed, loss and gradient norm of each way are compared with those of one process. The columns:

- makespan: when the last rank ends. It is no wall time, since this machine has fewer cores than there are ranks: each
  micro-batch takes its processor time (the greatest of its ranks), and begins when all of its ranks have ended what
  stands before it in the plan. over static: makespan of static over this one (goal 1.8 for balanced).
- idle: share of the makespan in which a rank waits, on average.
- wall: seconds of the fastest step, with 2 ranks alone, which have a core each. over static: as above (goal 1.3).
- ring MB: what all ranks send between each other in forward and backward passes; of short: of it, in micro-batches of
  one rank, which is to be 0; planned: what the plan says of the ring and of what a unit shares.

Without --quick, one step with a sequence of 32,768 tokens besides (``long``). Exit status 1 if results differ, a short
sequence sends anything, or bytes are not those of the plan.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from driver import benchmark_parser, write_rows
from long_context import Attention
from trial import JoinedRole
from work import same_work

from tilth.cluster.controller.cluster import Cluster, open_cluster
from tilth.cluster.protocol import transfer
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.layout import Mesh
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.plan.batch import BatchPlan, MicroBatches, MicroBatchLimits, PlannedMicroBatch, RowTable, plan_batch
from tilth.plan.context import ZigZag
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.packed import limits_of

CONFIG = DecoderConfig(
    vocab_size=512, hidden_size=64, intermediate_size=176, num_layers=4, num_heads=4, num_kv_heads=2, qk_norm=True
)
LONG = replace(CONFIG, num_layers=1)
"""Model of the step with a very long sequence, whose attention is most of the work."""
WAYS = ("static", "naive", "balanced")
FP32 = 4
TOLERANCE = 1e-5
SQUARE = CONFIG.num_layers * 2 * CONFIG.num_heads * CONFIG.head_dim
TOKEN = 2 * CONFIG.num_layers * (CONFIG.hidden_size * (3 * CONFIG.intermediate_size + 2 * CONFIG.hidden_size))
"""Work of a pair of tokens, and of a token: products of a forward pass."""


@dataclass(frozen=True)
class Task:
    """Steps on one batch. capacity: tokens of a rank in a micro-batch."""

    way: str
    ranks: int
    capacity: int
    steps: int
    long: bool = False

    @property
    def mesh(self) -> Mesh:
        return Mesh.of({}) if self.way == "alone" else Mesh.of({"cp" if self.way == "static" else "hdp": self.ranks})

    @property
    def config(self) -> DecoderConfig:
        return LONG if self.long else CONFIG

    @property
    def lengths(self) -> np.ndarray:
        """Lengths of the batch: one sequence for all ranks, some for two or more, many short ones."""
        if self.long:
            return np.array([self.ranks * self.capacity, *[self.capacity // 16] * 24])
        rng, most = np.random.default_rng(0), self.ranks * self.capacity
        found = [most, 5 * most // 8, most // 2, 5 * self.capacity // 4, 7 * self.capacity // 8]
        while sum(found) < 6 * most:
            found.append(int(np.clip(rng.lognormal(np.log(self.capacity / 12), 1.2), 8, self.capacity)))
        return rng.permutation(found)


@dataclass
class Found:
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    wall: float
    """Seconds of the fastest step."""
    micros: list[tuple[tuple[int, ...], float, int]]
    """Of each micro-batch: its ranks, least processor time of both passes, bytes that this rank sends in them."""
    planned: int
    """Bytes that the plan says for all of them."""
    tokens: float = 0.0
    """Tokens of the rows of a step, a share of those that several ranks have."""


def costs(lengths: np.ndarray) -> np.ndarray:
    """Work of each sequence."""
    return TOKEN * lengths + SQUARE * lengths.astype(np.float64) ** 2 / 2


def planned_of(task: Task, limits: MicroBatchLimits, table: RowTable) -> BatchPlan | None:
    """The plan of ``hdp``; None: the engine packs by itself."""
    if task.way in ("alone", "static"):
        return None
    how: dict[str, Any] = {"costs": costs, "balance": "none" if task.way == "naive" else "cost"}
    return plan_batch(table, None, task.ranks, limits, units=task.ranks, **how)


class Trial(JoinedRole):
    """A role that trains a model of its own on each of its ranks."""

    @transfer("all", "all")
    def train(self, task: dict[str, Any]) -> Found:
        """Every rank's view of a run."""
        return run(Task(**task), ParallelDims.of(self.context.mesh, self.context.rank))


class Meter:
    """Adds up processor time and sent bytes of each micro-batch of an engine."""

    def __init__(self, engine: TrainEngine, sent: Attention) -> None:
        self.seconds, self.bytes, self.sent = defaultdict[int, float](float), defaultdict[int, int](int), sent
        for name in ("_forward", "_backward"):
            setattr(engine, name, self.around(getattr(engine, name)))

    def around(self, run: Callable[..., None]) -> Callable[..., None]:
        """Measure a pass."""

        def measured(flight: Any, one: Any, *rest: Any) -> None:
            begin, before = time.process_time(), self.sent.bytes
            run(flight, one, *rest)
            self.seconds[one.micro_batch] += time.process_time() - begin
            self.bytes[one.micro_batch] += self.sent.bytes - before

        return measured


def run(task: Task, grid: ParallelDims) -> Found:
    """Initialise, and train for the task's steps."""
    config = task.config
    sharded = ShardedModel.alone(Decoder(config)) if task.way == "alone" else shard(lambda: Decoder(config), grid)
    sharded.init_(0)
    budget = task.capacity * (task.ranks if task.way in ("alone", "static") else 1)
    engine = TrainEngine(sharded, OptimizerConfig(lr=1e-3), total_steps=task.steps + 1, micro_tokens=budget)
    lengths = task.lengths
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size, lengths.sum())
    tokens = Jagged.with_lengths(ids, lengths)
    mask = np.ones(len(ids), np.uint8)
    mask[tokens.offsets[:-1]] = 0
    plan = planned_of(task, limits_of(sharded, budget, parity=False), RowTable.of(tokens, mask, digests=False))
    rows = np.arange(len(lengths)) if plan is None else plan.rows[grid.rank]
    own, part = tokens.take(rows), None if plan is None else plan.ranks[grid.rank]
    own_mask, loss = Jagged(mask, tokens.offsets).take(rows).values, negative_log_likelihood(float(mask.sum()))
    found = Found([], [], np.inf, [], 0)
    least = defaultdict[int, float](lambda: np.inf)
    with Attention() as sent:
        meter = Meter(engine, sent)
        for _ in range(task.steps):
            meter.seconds.clear()
            meter.bytes.clear()
            begin = time.perf_counter()
            done = engine.update(own, own_mask, {}, loss, entropy=False, plan=part)
            found.wall = min(found.wall, time.perf_counter() - begin)
            found.losses.append(done.loss)
            found.tokens = done.tokens / grid.mesh.pieces
            found.norms.append(done.grad_norm)
            for number, seconds in meter.seconds.items():
                least[number] = min(least[number], seconds)
    learn: MicroBatches | None = None if part is None else part.learn
    everyone = tuple(range(task.ranks))
    ranks = [everyone if learn is None else learn[n].ranks or (grid.rank,) for n in sorted(least)]
    found.micros = [(ranks[n], least[n], meter.bytes[n]) for n in sorted(least)]
    found.planned = 0 if learn is None else sum(bytes_of(config, m, grid.rank) for m in learn if m.several)
    return found


def bytes_of(config: DecoderConfig, unit: PlannedMicroBatch, rank: int) -> int:
    """Bytes that a rank sends in a unit: keys and values twice and gradients of those it got, for each layer; the
    log-probs of its tokens to the first rank, which returns their gradients."""
    division, place = ZigZag.of(unit.lengths, len(unit.ranks)), unit.ranks.index(rank)
    sent, wide = division.sent(), 2 * config.num_kv_heads * config.head_dim * FP32
    ring = config.num_layers * wide * int(2 * sent[place].sum() + sent[:, place].sum())
    held = [len(division.tokens(r)) for r in range(len(unit.ranks))]
    return ring + FP32 * (sum(held[1:]) if place == 0 else held[place])


def makespan(ranks: list[Found]) -> tuple[float, float]:
    """When the last rank ends, and the share of that in which ranks wait: each has its micro-batches in its order, and
    one of several ranks begins when all have come to it, and takes as long as on the slowest of them."""
    at, ends = [0] * len(ranks), [0.0] * len(ranks)
    busy = 0.0
    while any(at[r] < len(found.micros) for r, found in enumerate(ranks)):
        ready = [r for r, found in enumerate(ranks) if at[r] < len(found.micros)]
        unit = next(u for r in ready if _all_at(ranks, at, u := ranks[r].micros[at[r]][0]))
        seconds = max(ranks[r].micros[at[r]][1] for r in unit)
        busy += sum(ranks[r].micros[at[r]][1] for r in unit)
        end = max(ends[r] for r in unit) + seconds
        for r in unit:
            at[r], ends[r] = at[r] + 1, end
    return max(ends), 1 - busy / (len(ranks) * max(ends))


def _all_at(ranks: list[Found], at: list[int], unit: tuple[int, ...]) -> bool:
    """Whether all ranks of a unit have come to it."""
    return all(at[r] < len(ranks[r].micros) and ranks[r].micros[at[r]][0] == unit for r in unit)


def rows_of(cluster: Cluster, ranks: int, capacity: int, steps: int) -> list[dict[str, Any]]:
    """The three ways on so many ranks."""
    alone = cluster.group(f"one {ranks}", "hdp:Trial", {}, mesh=Mesh.of({}))
    (one,) = alone.train(asdict(Task("alone", ranks, capacity, 1)))
    table: list[dict[str, Any]] = []
    for way in WAYS:
        task = Task(way, ranks, capacity, steps)
        group = cluster.group(f"{way} {ranks}", "hdp:Trial", {}, mesh=task.mesh)
        found = group.train(asdict(task))
        last, idle = makespan(found)
        same_work({"one rank": {"tokens": one.tokens}, way: {"tokens": sum(each.tokens for each in found)}})
        first = table[0] if table else {"makespan_seconds": last, "wall_seconds": found[0].wall}
        wall = max(each.wall for each in found)
        short = sum(sent for each in found for unit, _, sent in each.micros if len(unit) == 1)
        table.append(
            {
                "ranks": ranks,
                "way": way,
                "sequences": len(task.lengths),
                "tokens": int(task.lengths.sum()),
                "longest": int(task.lengths.max()),
                "relative_error": apart(found[0], one),
                "makespan_seconds": last,
                "speedup_over_static": first["makespan_seconds"] / last,
                "idle_share": idle,
                "wall_seconds": wall if ranks == 2 else None,
                "wall_speedup_over_static": first["wall_seconds"] / wall if ranks == 2 else None,
                "micro_batches": [len(each.micros) for each in found],
                "ranks_of_units": sorted(len(unit) for each in found for unit, *_ in each.micros),
                "sent_bytes": sum(sent for each in found for *_, sent in each.micros),
                "short_bytes": short,
                "planned_bytes": sum(each.planned for each in found) if way != "static" else None,
            }
        )
    return table


def apart(found: Found, one: Found) -> float:
    """Greatest relative difference of loss and gradient norm of the first step."""
    return max(abs(found.losses[0] / one.losses[0] - 1), abs(found.norms[0] / one.norms[0] - 1))


def long_row(cluster: Cluster) -> dict[str, Any]:
    """One step with a sequence of 32,768 tokens, which no rank could have alone, and short ones beside it."""
    task = Task("balanced", 2, 16_384, 1, long=True)
    found = cluster.group("long", "hdp:Trial", {}, mesh=task.mesh).train(asdict(task))
    last, idle = makespan(found)
    return {
        "ranks": 2,
        "way": "long",
        "sequences": len(task.lengths),
        "tokens": int(task.lengths.sum()),
        "longest": int(task.lengths.max()),
        "loss": found[0].losses[0],
        "makespan_seconds": last,
        "idle_share": idle,
        "wall_seconds": max(each.wall for each in found),
        "sent_bytes": sum(sent for each in found for *_, sent in each.micros),
        "planned_bytes": sum(each.planned for each in found),
        "short_bytes": sum(sent for each in found for unit, _, sent in each.micros if len(unit) == 1),
    }


def failures(found: dict[str, Any]) -> list[str]:
    """What a row misses."""
    missed = []
    if not found.get("relative_error", 0.0) <= TOLERANCE:
        missed.append(f"loss or norm differ by {found['relative_error']:.1e}")
    if not np.isfinite(found.get("loss", 0.0)):
        missed.append("the loss is not finite")
    if found["short_bytes"]:
        missed.append(f"micro-batches of one rank sent {found['short_bytes']} bytes")
    if found["planned_bytes"] not in (None, found["sent_bytes"]):
        missed.append(f"sent {found['sent_bytes']} bytes, planned {found['planned_bytes']}")
    return missed


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    ratios = [found.get("speedup_over_static"), found.get("wall_speedup_over_static")]
    faster, wall = (f"{ratio:.2f}" if ratio else "-" for ratio in ratios)
    sizes = [
        None if found[name] is None else found[name] / 1e6 for name in ("sent_bytes", "short_bytes", "planned_bytes")
    ]
    sent = " ".join("       -" if size is None else f"{size:8.1f}" for size in sizes)
    return (
        f"{found['ranks']:5} {found['way']:9} {found['longest']:7} {found['tokens']:7} "
        f"{found['makespan_seconds']:9.2f} {faster:>11} {found['idle_share']:5.0%} "
        f"{found['wall_seconds'] or 0:7.2f} {wall:>11} {sent}  {'; '.join(failures(found)) or 'ok'}"
    )


def main() -> int:
    options = benchmark_parser(__doc__, "2 ranks and short sequences").parse_args()
    capacity, steps = (192, 2) if options.quick else (512, 2)
    table: list[dict[str, Any]] = []
    print("ranks way       longest  tokens  makespan over static  idle    wall over static  ring MB of short  planned")
    with open_cluster("local", 2 if options.quick else 4) as cluster:
        for ranks in (2,) if options.quick else (2, 4):
            table += rows_of(cluster, ranks, capacity, steps)
            print("\n".join(map(line, table[-len(WAYS) :])), flush=True)
            write_rows(options.json, table)
        if not options.quick:
            table.append(long_row(cluster))
            print(line(table[-1]), flush=True)
            write_rows(options.json, table)
    return int(any(failures(found) for found in table))


if __name__ == "__main__":
    sys.exit(main())
