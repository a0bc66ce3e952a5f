"""Simulate ByteScale's jobs (arXiv 2502.21231) with the plans of this package, beside the published speed-ups.

    python benchmarks/hdp_scale.py [--quick] [--json PATH]

Contenders share capacity of a rank, tensor and pipeline parallelism: static data x context parallelism with packing
(context parallelism as the longest sequence needs it, whole packs around the ring), algorithm 1 (a ring as large as a
sequence needs), algorithm 1 with activations on the host, and the balance scheduler. All constants are published ones
of an H800-class machine and stand first in this file; nothing is fitted, and the table "sensitivity" changes each.

Where the simulation differs from the paper, which does not publish its layouts, capacities, attention kernel, or the
lengths below 128K of its GitHub set:

- Speed-ups over static are greater for models with as many key heads as heads: static is bound by its ring (the paper
  has 97.6 % of a micro-batch at 2M), and what takes its place here runs at the attained rates: the balanced step of
  the ablation takes 157 s in the paper, about 40 s here. They double with half the network and halve with twice of it.
- Offload alone, under algorithm 1, is slower than none: equation 3 takes the fewest ranks, where a long sequence then
  computes for long. The balance scheduler widens gangs that would outlast the mean load, and gains from both; the paper
  gives each its fewest ranks, and its idle time stays larger.
- Grouped key heads (70B, 8x7B, 141B) shrink the ring, so static loses less and the gains are smaller than the paper's
  3.42x to 4.28x; at 1,024 GPUs the way of one sequence of 2M through all stages takes most of a step for everyone.
- Static is well packed and reads no data. Links have no contention, machines do not vary, and short sequences multiply
  at the rate of long ones.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from driver import benchmark_parser, write_rows
from work import Work, same_work

from tilth.plan.devices import DEVICES
from tilth.plan.offload import HostRates, OffloadLimits
from tilth.plan.packing import micro_batches
from tilth.plan.schedule import Rounds, Unit, loads, schedule


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU, in FLOP/s, bytes/s, bytes and seconds."""

    peak: float = DEVICES["h800"].flops["bf16"]
    products: float = DEVICES["h800"].attained
    """Share of the peak that matrix products reach."""
    attention: float = 0.35
    """Share of the peak that FlashAttention-2 reaches on this architecture (arXiv 2407.08608, abstract)."""
    intra: float = DEVICES["h800"].links * DEVICES["h800"].intra
    inter: float = DEVICES["h800"].links * DEVICES["h800"].inter
    host: float = DEVICES["h800"].links * 64e9
    """PCIe 5.0 x16, one way."""
    host_memory: float = 2e12 / 8
    """2 TB in a node of eight (DGX)."""
    hop: float = DEVICES["h800"].far
    launch: float = DEVICES["h800"].launch


KERNELS = 12
"""Kernels of a layer's forward pass; the backward pass has twice as many."""
BACKWARD = 2.5
"""Attention's backward over its forward pass, which computes the scores again (arXiv 2205.14135)."""
RING = 3
"""Rounds of keys and values that a training pass sends: one forward, one and their gradients backward."""
ACTIVATIONS = 34
"""Bytes of a layer's activations for each token and hidden unit (arXiv 2205.05198, without the scores)."""
PIECES = 4
"""Pieces of a product beside which tensor parallelism's gather proceeds; the first one waits."""
BATCH = 32 << 20
"""Tokens of a global batch."""
CAPACITY = 8192
"""Tokens of a rank in a micro-batch, or more where a static mesh needs it to hold its longest sequence."""
K = 1024
BANDS: dict[str, tuple[tuple[int, int, float], ...]] = {
    "byted": (
        (2 * K, 4 * K, 0.2),
        (8 * K, 128 * K, 0.357),
        (128 * K, 256 * K, 0.073),
        (256 * K, 2048 * K, 0.249),
        (2048 * K, 2049 * K, 0.121),
    ),
    "github": (
        (256, 4 * K, 0.4),
        (4 * K, 128 * K, 0.438),
        (128 * K, 256 * K, 0.064),
        (256 * K, 2048 * K, 0.076),
        (2048 * K, 2049 * K, 0.022),
    ),
}
"""Set -> (shortest, longest, share of all tokens), even over the logarithm of the length within a band.

Byted: 80 % of samples up to 4K, 1 % from 128K with 44.3 % of tokens, 37 % of tokens above 256K, 12.1 % from 2M; the
edges of the two lower bands are those with these shares of samples. GitHub: 16.2 % of tokens above 128K, 9.8 % above
256K, continued as a power law; its two lower bands are assumed.
"""
PUBLISHED = {"static": 1.0, "dynamic": 1.59, "offload": 2.01, "balance": 3.69}
"""Speed-ups of the ablation: 7B, 2M, Byted, 1,024 GPUs."""
CONTENDERS = ("static", "dynamic", "offload", "balance_resident", "balance")
"""Balance_resident: the balance scheduler with all activations on the device, which the paper does not have."""
BEST = {"byted": 4.26, "github": 7.89}
"""Greatest published speed-ups, with the remote loader."""


class Model(NamedTuple):
    """Shape of a model, and how its layers divide."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int = 1
    """Feed-forward networks that a token meets."""
    tp: int = 8
    pp: int = 1

    @property
    def weights(self) -> float:
        """Elements of a layer's matrices that a token meets."""
        kv = self.hidden // self.heads * self.kv_heads
        return 2.0 * self.hidden * (self.hidden + kv) + 3.0 * self.hidden * self.ffn * self.experts

    @property
    def kept(self) -> float:
        """Bytes of a layer's keys and values of a token, on one rank."""
        return 2.0 * self.hidden / self.heads * self.kv_heads * 2 / self.tp


MODELS = {
    "7B": Model(4096, 32, 32, 32, 11_008, tp=4),
    "13B": Model(5120, 40, 40, 40, 13_824),
    "30B": Model(6656, 60, 52, 52, 17_920, tp=4, pp=2),
    "70B": Model(8192, 80, 64, 8, 28_672, pp=4),
    "8x7B": Model(4096, 32, 32, 8, 14_336, 2, tp=8, pp=2),
    "141B": Model(6144, 56, 48, 8, 16_384, 2, tp=8, pp=4),
}
"""Layouts are ours; the paper does not publish its own."""


class Job(NamedTuple):
    """One training job. ``context``: length to which longer samples are cut."""

    model: Model
    data: str
    context: int
    gpus: int = 1024
    machine: Machine = Machine()
    capacity: int = CAPACITY

    @property
    def ranks(self) -> int:
        """Ranks that hold a whole model each, in data and context parallelism."""
        return self.gpus // (self.model.tp * self.model.pp)

    @property
    def tokens(self) -> int:
        """Capacity of a rank."""
        return max(self.capacity, -(-self.context // self.ranks))

    @property
    def stage(self) -> float:
        """Layers of a stage."""
        return self.model.layers / self.model.pp


def drawn(job: Job, seed: int) -> np.ndarray:
    """Draw the lengths of a global batch, int64."""
    low, high, share = np.array(BANDS[job.data]).T
    inverse = np.stack([1 / high, 1 / low])  # tokens even over log length: 1 / length is even over samples
    samples = share * (1 / low - 1 / high) / np.log(high / low)
    rng = np.random.default_rng([seed, job.context])
    count = int(1.5 * BATCH * samples.sum())
    band = rng.choice(len(low), count, p=samples / samples.sum())
    lengths = np.minimum(1 / rng.uniform(inverse[0][band], inverse[1][band]), job.context).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), BATCH)) + 1]
    lengths[-1] -= lengths.sum() - BATCH
    return lengths


def attention(job: Job, lengths: np.ndarray) -> np.ndarray:
    """Return seconds of a layer's attention over each sequence on one rank, forward and backward."""
    flops = 2.0 * job.model.hidden * lengths.astype(np.float64) ** 2 / job.model.tp
    return flops * (1 + BACKWARD) / (job.machine.attention * job.machine.peak)


def products(job: Job, lengths: np.ndarray) -> np.ndarray:
    """Return seconds of a layer's matrix products and exposed gathers over each sequence on one rank."""
    model, machine = job.model, job.machine
    flops = 6.0 * model.weights / model.tp / (machine.products * machine.peak)
    gathers = 10 * (model.tp - 1) / model.tp * model.hidden * 2 / machine.intra / PIECES
    return (flops + gathers) * lengths.astype(np.float64)


def sequence_seconds(job: Job, lengths: np.ndarray) -> np.ndarray:
    """Return seconds of a stage for each sequence on one rank: what the scheduler sees."""
    return job.stage * (attention(job, lengths) + products(job, lengths))


def ring_seconds(job: Job, tokens: float, ranks: int) -> float:
    """Return seconds in which keys and values of ``tokens`` pass a layer's ring, forward and backward."""
    if ranks == 1:
        return 0.0
    inside = ranks * job.model.tp <= DEVICES["h800"].per_node
    link = job.machine.intra if inside else job.machine.inter
    return RING * (ranks - 1) * (tokens / ranks * job.model.kept / link + job.machine.hop)


def unit_seconds(job: Job, lengths: np.ndarray, ranks: int) -> float:
    """Return seconds of a stage for a micro-batch that ``ranks`` ranks share: attention hides its ring."""
    scores, ring = float(attention(job, lengths).sum()) / ranks, ring_seconds(job, float(lengths.sum()), ranks)
    rest = float(products(job, lengths).sum()) / ranks
    return job.stage * (max(scores, ring) + max(rest, 3 * KERNELS * job.machine.launch))


def step_seconds(job: Job) -> float:
    """Return seconds of a step's sums of gradients and gathers of weights over all ranks."""
    held = job.model.weights * job.stage / job.model.tp
    return 6 * held / job.machine.inter


def static(job: Job, lengths: np.ndarray) -> Rounds:
    """Pack for as many ranks as the longest possible sequence needs, and deal the packs to the groups in turn."""
    width = 1 << (-(-job.context // job.tokens) - 1).bit_length()
    width = min(width, job.ranks)
    groups = job.ranks // width
    packs = micro_batches(lengths, width * job.tokens)
    members = [tuple(range(g * width, (g + 1) * width)) for g in range(groups)]
    return [
        [Unit(rows, members[g], 0.0) for g, rows in enumerate(packs[at : at + groups])]
        for at in range(0, len(packs), groups)
    ]


def planned(job: Job, lengths: np.ndarray, how: str) -> Rounds:
    """Plan a batch as one of the contenders."""
    if how == "static":
        return static(job, lengths)
    limits = OffloadLimits(
        layers=int(job.stage),
        per_token=ACTIVATIONS * job.model.hidden / job.model.tp,
        work=lambda n: attention(job, n) / (1 + BACKWARD) + products(job, n) / 3,
        rates=HostRates(job.machine.host, job.machine.host_memory, 1.0),  # work is in seconds
    )
    return schedule(
        lengths,
        job.tokens,
        job.ranks,
        partial(sequence_seconds, job),
        balance="cost" if how.startswith("balance") else "none",
        stages=job.model.pp,
        ring=job.stage * RING * job.model.kept / job.machine.inter,
        offload=None if how in ("dynamic", "balance_resident") else limits,
    )


def timed(job: Job, lengths: np.ndarray, rounds: Rounds) -> Rounds:
    """Replace the predicted cost of each unit by its seconds, with its ring and its kernels' least time."""
    return [[u._replace(cost=unit_seconds(job, lengths[u.rows], len(u.ranks))) for u in units] for units in rounds]


def makespan(job: Job, rounds: Rounds) -> float:
    """Return seconds of the slowest rank; of pipelines as if forward and backward pass were one.

    1F1B takes about that with units of one level in a pipeline, and up to a quarter more with algorithm 1's mixed ones.
    """
    return float(loads(rounds, job.ranks, job.model.pp).max())


def compare(job: Job, seeds: int) -> dict[str, Any]:
    """Return mean seconds of each contender over some batches, and their speed-ups over static."""
    found: dict[str, list[float]] = {how: [] for how in CONTENDERS}
    idle: dict[str, list[float]] = {how: [] for how in CONTENDERS}
    for seed in range(seeds):
        lengths, work = drawn(job, seed), dict[str, Work]()
        for how in CONTENDERS:
            rounds = timed(job, lengths, planned(job, lengths, how))
            rows = np.concatenate([unit.rows for units in rounds for unit in units])
            work[how] = {"sequences": len(np.unique(rows)), "tokens": int(lengths[rows].sum())}
            seconds = makespan(job, rounds)
            busy = sum(u.cost * len(u.ranks) for units in rounds for u in units) / job.ranks
            found[how].append(seconds + step_seconds(job))
            idle[how].append(1 - busy / seconds)
        same_work(work)
    mean = {how: float(np.mean(each)) for how, each in found.items()}
    return {
        **{f"{how}_seconds": seconds for how, seconds in mean.items()},
        **{f"{how}_idle": float(np.mean(each)) for how, each in idle.items()},
        **{f"{how}_speedup": mean["static"] / seconds for how, seconds in mean.items()},
    }


def described(name: str, job: Job) -> dict[str, Any]:
    """Return the columns that name a job."""
    return {"model": name, "data": job.data, "context": job.context, "gpus": job.gpus, "ranks": job.ranks,
            "capacity": job.tokens}  # fmt: skip


ABLATION = Job(MODELS["7B"], "byted", 2048 * K)


def ablation(seeds: int) -> Iterator[dict[str, Any]]:
    """Yield the row beside the paper's ablation."""
    yield {"table": "ablation", **described("7B", ABLATION), **compare(ABLATION, seeds),
           **{f"{how}_published": value for how, value in PUBLISHED.items()}}  # fmt: skip


def contexts(seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each context of both sets."""
    for data in BANDS:
        for context in (256 * K, 512 * K, 1024 * K, 2048 * K):
            job = Job(MODELS["7B"], data, context)
            yield {"table": "contexts", **described("7B", job), **compare(job, seeds)}


def models(seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, both sets and both numbers of GPUs at the longest context."""
    for gpus in (1024, 12_288):
        for name, model in MODELS.items():
            for data in BANDS:
                job = Job(model, data, 2048 * K, gpus)
                yield {"table": "models", **described(name, job), **compare(job, seeds), "best_published": BEST[data]}


def sensitivity(seeds: int) -> Iterator[dict[str, Any]]:
    """Yield the ablation with each constant halved and doubled."""
    for field in ("products", "attention", "inter", "intra", "host", "host_memory"):
        for factor in (0.5, 2.0):
            machine = replace(ABLATION.machine, **{field: factor * getattr(ABLATION.machine, field)})
            job = ABLATION._replace(machine=machine)
            yield {
                "table": "sensitivity",
                "constant": field,
                "factor": factor,
                **described("7B", job),
                **compare(job, seeds),
            }
    for factor in (2, 4):
        job = ABLATION._replace(capacity=factor * CAPACITY)
        yield {
            "table": "sensitivity",
            "constant": "capacity",
            "factor": factor,
            **described("7B", job),
            **compare(job, seeds),
        }


def planning(sizes: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Yield processor seconds of one plan of 32M tokens for numbers of ranks."""
    for ranks in sizes:
        for data in BANDS:
            job = Job(MODELS["7B"], data, 2048 * K, gpus=ranks * MODELS["7B"].tp)
            lengths = drawn(job, 0)
            for how in ("offload", "balance"):
                begin = time.process_time()
                rounds = planned(job, lengths, how)
                seconds = time.process_time() - begin
                units = sum(map(len, rounds))
                yield {"table": "planning", **described("7B", job), "how": how, "sequences": len(lengths),
                       "units": units, "rounds": len(rounds), "planning_seconds": seconds}  # fmt: skip


def shown(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    where = f"{row['table']:<11} {row['model']:>4} {row['data']:<6} {row['context'] // K:>5}K {row['gpus']:>6,} GPUs"
    if row["table"] == "planning":
        work = f"{row['sequences']:>6,} sequences on {row['ranks']:,} ranks"
        return f"{where} {row['how']:<8} {work} in {row['planning_seconds']:.2f} s"
    each = "  ".join(f"{how} {row[f'{how}_seconds']:6.1f} s {row[f'{how}_speedup']:5.2f}x" for how in CONTENDERS)
    changed = f" {row['constant']} x{row['factor']:g}" if "constant" in row else ""
    return f"{where} {each}{changed}"


def main() -> None:
    """Print and write the rows."""
    chosen = benchmark_parser(__doc__, "the ablation on one batch, and one plan").parse_args()
    quick, rows = chosen.quick, []
    tables = [ablation(1), planning((256,))] if quick else [
        ablation(8), contexts(4), models(2), sensitivity(4), planning((256, 12_288))
    ]  # fmt: skip
    print("published: " + ", ".join(f"{how} {value:.2f}x" for how, value in PUBLISHED.items()), end="")
    print("; at most " + ", ".join(f"{value:.2f}x ({data})" for data, value in BEST.items()))
    for row in (row for table in tables for row in table):
        rows.append(row)
        print(shown(row), flush=True)
        write_rows(chosen.json, rows)


if __name__ == "__main__":
    main()
