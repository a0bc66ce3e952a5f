"""Simulate Laminar's jobs (arXiv 2510.12633) on 64 to 1,024 GPUs, with ``plan.repack``, beside the published ratios.

    python benchmarks/rollout_scale.py [--quick] [--json PATH]

Every mode of ``tilth_studies.asynchrony`` trains equal batches of equal lengths: sync on all GPUs in turn, the others
with half of them for generation. Constants are published ones and stand first in this file; nothing is fitted. The
published ratios stand beside ours.

Where the simulation differs from the paper, of which only a digest is at hand:

- Its divisions of GPUs, KV memory, concurrency and lengths but for p99 over p50 are unknown: ours are halves, the
  memory that is left, rows up to the roofline's bound, and a log-normal.
- Baselines are their rules alone on one engine. verl's own costs (reshards, launches, drivers) are in its figures.
- Training is the matrix products at the attained rate, over any number of GPUs without loss, so every mode is bound by
  rollouts where theirs is partly bound by training.
- All modes but sync and one-step have ``AHEAD`` batches on their way. Laminar has no such bound, and how many rows a
  replica takes is unknown; the table "repack" shows what depends on it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from driver import benchmark_parser, write_rows
from tilth_studies.asynchrony import AsyncOutcome, RolloutCosts, RolloutJob, modes, simulate
from work import UnequalWork, Work, same_work

from tilth.plan.devices import DEVICES
from tilth.plan.repack import ReplicaLimits

# ---- constants of the paper ----

SAMPLES, GROUP = 8192, 16
"""512 prompts x 16."""
PROMPT, LONGEST = 2048, 16_384
"""Most tokens in and out."""
TAIL = 10.0
"""99th-percentile length over the median."""
PUBLISH = {"7B": 0.64, "32B": 0.64, "72B": 1.40}
"""Stall of the actor in seconds, 32B and 72B published; 7B has that of 32B, an upper bound."""
RELAY = 1.6
"""Seconds of the chain of relays, below which 72B stays."""
MOVE = 0.69
"""Seconds of a move."""
PUBLISHED = {"one-step": 1.98, "partial": 1.39, "sync": 2.56}
"""Mean speed of Laminar over one-step, AReaL and verl."""
GREATEST, AT_1024, REPACK = 5.48, 3.34, 1.26
"""Greatest over verl; mean over verl at the largest scale; gain of repack in generated tokens."""
KV_USE = 0.716, 0.822
"""Without and with repack."""
WAIT = 0.37
"""Share by which the mean wait for weights is below that of a global sync."""

# ---- constants of others ----

H800 = DEVICES["h800"]
MEDIAN = 1500
"""Tokens; assumed, p99 is ten times of it."""
AHEAD = 4
"""Batches on their way, and staleness of the modes that bound it; AReaL's default order, assumed."""

SHORTER = 0.1
"""Relative difference of trained lengths up to which rates are compared: what is on its way at the end is long."""


class Model(NamedTuple):
    """Qwen2.5's published shape, and ranks of a replica: the fewest whose memory holds two copies of the weights."""

    size: float
    layers: int
    kv_width: int
    """Keys and values of a token in a layer, elements."""
    ranks: int


MODELS = {"7B": Model(7.6e9, 28, 1024, 1), "32B": Model(32.8e9, 64, 2048, 2), "72B": Model(72.7e9, 80, 2048, 4)}


def drawn(count: int, seed: int) -> list[int]:
    """Draw lengths: log-normal of this tail, cut at the longest."""
    sigma = np.log(TAIL) / 2.3263  # the normal's 99th percentile
    found = np.random.default_rng(seed).lognormal(np.log(MEDIAN), sigma, count)
    return np.clip(found, 16, LONGEST).astype(int).tolist()


def job(name: str, gpus: int, generating: int, *, samples: int, updates: int) -> RolloutJob:
    """Make a job; generating: GPUs with replicas, all of them where training takes turns with them."""
    model, replicas = MODELS[name], generating // MODELS[name].ranks
    memory, rate = H800.links * H800.memory_bandwidth * model.ranks, H800.rate("bf16") * model.ranks
    weights, kv = 2 * model.size, 2 * model.layers * model.kv_width  # bytes, bf16
    loaded = weights / model.ranks / (H800.links * H800.inter)
    costs = RolloutCosts(
        step=weights / memory,
        row=2 * model.size / rate,
        kv_token=kv / memory,
        prefill=2 * model.size / rate,
        train_token=6 * model.size / H800.rate("bf16"),
        sync=loaded,
        publish=PUBLISH[name],
        relay=RELAY,
        move=MOVE,
    )
    tokens = int((0.9 * H800.memory * model.ranks - weights) / kv)
    rows = int(costs.step / costs.row)
    devices = gpus if generating == gpus else gpus - generating
    lengths = drawn(2 * samples * updates, seed=0)
    limits = ReplicaLimits(tokens, rows)
    return RolloutJob(
        costs, limits, replicas, devices, samples, GROUP, PROMPT, lengths, updates=updates, ahead=AHEAD
    )  # fmt: skip


def ratio(one: AsyncOutcome, other: AsyncOutcome) -> float | None:
    """Return the tokens/s of one over those of the other; None if one has learned from shorter samples, whose tails
    take less time."""
    trained: dict[str, Work] = {
        "one": {"tokens of a sample": one.lengths[1]}, "other": {"tokens of a sample": other.lengths[1]}
    }  # fmt: skip
    try:
        same_work(trained, within=SHORTER)
    except UnequalWork:
        return None
    return one.tokens_per_second / other.tokens_per_second


def scale(name: str, gpus: int, **size: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each mode; ratios are of free+repack over the row, as the paper's are of Laminar."""
    rows, outcomes = list[dict[str, Any]](), list[AsyncOutcome]()
    for mode_name, mode in modes(AHEAD).items():
        generating = gpus if mode.shared else gpus // 2
        outcome = simulate(job(name, gpus, generating, **size), mode)
        ages = outcome.staleness
        outcomes.append(outcome)
        assert abs(sum(ages.values()) - 1) < 1e-9, "every trained sample has an age"
        rows.append({
            "table": "scale", "model": name, "gpus": gpus, "mode": mode_name, "generating_gpus": generating,
            **size, "tokens_per_second": outcome.tokens_per_second, "replica_idle_share": outcome.replica_idle,
            "trainer_idle_share": outcome.trainer_idle, "kv_use_share": outcome.kv_use, "moved_rows": outcome.moves,
            "weight_wait_seconds": outcome.load_wait, "staleness_mean": sum(a * s for a, s in ages.items()),
            "staleness_max": max(ages), "trained_to_admitted_length": outcome.lengths[1] / outcome.lengths[0],
        })  # fmt: skip
    for row, outcome in zip(rows, outcomes):
        row["laminar_speedup"] = ratio(outcomes[-1], outcome)
        row["laminar_speedup_published_mean"] = PUBLISHED.get(row["mode"])
        yield row


def repacked(name: str, gpus: int, samples: int) -> Iterator[dict[str, Any]]:
    """Yield what repack alone brings where replicas take a batch together, or several, and no trainer is waited for:
    the tail's share of a replica's time falls with the rows that it takes at once."""
    for ahead in (1, 2, 4):
        given = job(name, gpus, gpus // 2, samples=samples, updates=6 * ahead)
        given = replace(given, ahead=ahead, buffer=given.updates, costs=replace(given.costs, train_token=0.0))
        plain, packed = (simulate(given, modes(AHEAD)[mode]) for mode in ("free", "free+repack"))
        yield {
            "table": "repack", "model": name, "gpus": gpus, "generating_gpus": gpus // 2, "samples": samples,
            "updates": given.updates, "batches_ahead": ahead, "rows_per_replica": ahead * samples // given.replicas,
            "gain": ratio(packed, plain), "gain_published": REPACK,
            "kv_use_share_plain": plain.kv_use, "kv_use_share_repacked": packed.kv_use,
            "kv_use_share_published": list(KV_USE), "moved_rows": packed.moves,
            "trained_rows": samples * given.updates,
        }  # fmt: skip


def shown(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    where = f"{row['table']:<7} {row['model']:>4} {row['gpus']:>5} GPUs {row['generating_gpus']:>5} generate"
    if row["table"] == "repack":
        kv = f"KV {row['kv_use_share_plain']:.1%} -> {row['kv_use_share_repacked']:.1%}"
        moved = f"{row['moved_rows']:,} moves, {row['trained_rows']:,} rows trained"
        return f"{where} {row['rows_per_replica']:>5} rows a replica: {_times(row['gain'])}, {kv}, {moved}"
    theirs, ours = row["laminar_speedup_published_mean"], _times(row["laminar_speedup"])
    return (
        f"{where} {row['mode']:<12} {row['tokens_per_second']:>12,.0f} tokens/s, Laminar {ours}"
        f"{f' (theirs {theirs:.2f}x)' if theirs else '':<15} staleness {row['staleness_mean']:.1f}, max "
        f"{row['staleness_max']}; KV {row['kv_use_share']:.1%}; idle {row['replica_idle_share']:.0%}, trainer "
        f"{row['trainer_idle_share']:.0%}; wait {row['weight_wait_seconds']:.1f} s"
    )


def _times(value: float | None) -> str:
    return "of other samples" if value is None else f"{value:.2f}x"


def main() -> None:
    """Print and write the rows."""
    chosen = benchmark_parser(__doc__, "64 GPUs, batches of 1,024").parse_args()
    size = {"samples": 1024, "updates": 32} if chosen.quick else {"samples": SAMPLES, "updates": 6}
    sizes = (64,) if chosen.quick else (64, 256, 1024)
    print(f"published: Laminar over others, means {PUBLISHED}, at most {GREATEST}x, at 1,024 GPUs {AT_1024}x over sync")
    print(f"published: repack {REPACK}x, KV {KV_USE[0]:.1%} -> {KV_USE[1]:.1%}; wait for weights {WAIT:.0%} shorter")
    rows = list[dict[str, Any]]()
    for table in (
        *(scale("7B", gpus, **size) for gpus in sizes),
        repacked("7B", 64, 512 if chosen.quick else 2048),
    ):
        for row in table:
            rows.append(row)
            print(shown(row), flush=True)
            write_rows(chosen.json, rows)


if __name__ == "__main__":
    main()
