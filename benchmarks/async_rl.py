"""Samples that a run consumes per minute, synchronous and with experience that is behind.

    python benchmarks/async_rl.py [--quick] [--json PATH] [--replicas N ...] [--seeds N] [--tails | --counted]

``paced``: a trainer and N replicas in processes of their own. The trainer is real; a decode step of a replica only
sleeps, max(t0, c b) seconds for b sequences (``async_engine.py``), and lengths have p99/p50 = 10. ``plain``: one
trainer and one replica, nothing emulated, on the cores that are here. Every contender consumes the same samples, and
their lengths are compared before a ratio is made; the first steps, which also start the engines, are not timed. The
paced contenders are simulated too (``tilth_studies.asynchrony``), with the same lengths and rounds, and with seconds as
they were measured: of a decode step, of the trainer in a step (less those in which it waited for samples or for rounds
to end), and of a copy of the weights (``time/publish`` of the synchronous run, in which no round is under way).

``--tails``, in place of these: paced replicas that take weights from a relay, with and without moves of their last
samples (``rollout.repack``), for both ways of ``rollout.inflight``.

``--counted``, in place of these: the same moves in counted rounds (``async_counted.py``), beside their simulation; what
they gain depends on no machine.

``--replicas`` with several numbers, in place of these: for each, paced replicas that take weights from a relay in their
own time (``rollout.inflight = "finish"``), and the actor's stall in a step: seconds in which the trainer publishes,
its own copy alone, and those in which it waits for samples.
"""

import json
import statistics
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
from async_counted import STEPS, CountedCase, CountedRun
from async_counted import simulated as simulated_rounds
from async_lengths import length_of
from driver import benchmark_parser, write_rows
from tilth_studies.asynchrony import AsyncMode, AsyncSimulation, RolloutCosts, RolloutJob
from work import same_work

from tilth.api import run_recipe
from tilth.config.load import from_dict
from tilth.data.trajectories import read_trajectories
from tilth.flows import replicas as flows_replicas
from tilth.flows.callbacks import Callback
from tilth.plan.repack import ReplicaLimits
from tilth.roles.rollout import LIMITS
from tilth.runs.readers import read_metrics

CONTENDERS: dict[str, Any] = {"sync": 0, "one_step": 1, "k4": 4, "free": "free"}
TAILS: dict[str, dict[str, Any]] = {
    "update": {},
    "update_repack": {"repack": True},
    "finish": {"inflight": "finish"},
    "finish_repack": {"inflight": "finish", "repack": True},
}
"""Keys of ``rollout`` of ``--tails``, all with ``staleness = "free"``."""
PACE, QUICK = {"t0": 0.05, "c": 0.001}, {"t0": 0.01, "c": 0.0002}
BUFFER = 4
"""Steps of samples in the books of "free"."""
PROMPTS, GROUP, LONGEST = 16, 4, 224
PLANS = 0.5
"""Seconds between two plans of moves of ``--tails``, whose answers take 11 s at most; the run's own are 5 s apart."""
OWN_TIME = "finish"
"""Row of ``TAILS`` for several numbers of replicas."""
UNTIMED = 2
"""Steps before the clock begins."""


class Memory(Callback):
    """Memory of the run's processes that none of them shares, in bytes each, once engines have generated."""

    def __init__(self) -> None:
        self.each = 0.0

    def on_step_end(self, run: Any, step: int, metrics: dict[str, Any]) -> None:
        """Read it once."""
        if step == UNTIMED:
            some = psutil.Process().children(recursive=True)
            self.each = statistics.fmean(child.memory_full_info().uss for child in some)


def score(prompt: str, completion: str, info: dict[str, Any]) -> float:
    """A reward with spread."""
    return float(len(completion) % 3)


def recipe(
    folder: str,
    staleness: Any,
    replicas: int,
    steps: int,
    seed: int,
    pace: dict[str, float] | None,
    tails: dict[str, Any] | None = None,
) -> Any:
    """One contender. pace: None: of the native engine; tails: of ``TAILS``, else None."""
    paced, plugin = pace is not None, Path(__file__).with_name("async_engine.py")
    pools = {"train": 1, "rollout": replicas if paced else 1}
    rollout = {"pool": "rollout", "prompts": PROMPTS, "group": GROUP, "max_tokens": LONGEST if paced else 32}
    if tails is not None:
        plugin = Path(folder) / "pace.py"
        plugin.write_text(f"from async_engine import pace_native\n\npace_native({pace})\n")
        rollout |= tails
    elif paced:
        rollout |= {"engine": "paced", "options": {**(pace or {}), "log": folder}}
    rollout |= {"buffer": BUFFER} if staleness == "free" else {}
    return from_dict(
        {
            "seed": seed,
            "plugins": [str(plugin)] if paced else [],
            "model": {"hidden": 32, "layers": 2, "heads": 2, "context": LONGEST + 16 if paced else 48},
            "data": {"source": "addition", "digits": 2, "holdout": 0.05},
            "supervised": {"steps": 0},
            "rollout": {**rollout, "max_rows": PROMPTS * GROUP // pools["rollout"], "staleness": staleness},
            "algorithm": {"steps": steps, "drop_flat": False, "advantage": "grpo_no_std"},
            "train": {"threads": 1, "mismatch": 1e6 if paced else 0.0},  # the paced engine asks no model
            "policy": {"probe_every": 0},
            "cluster": {"backend": "local", "pools": pools},
            "guard": {"restarts": 0},
            "run": {"dir": folder, "eval_every": 0, "eval_prompts": 2, "save_every": 10_000, "save_minutes": 0},
        }
    )


def raced(
    name: str, asked: Namespace, seed: int, *, paced: bool, copy: float | None = None
) -> tuple[dict[str, Any], dict[int, int]]:
    """Figures of one contender, and the length of each sample. copy: seconds of a copy of the weights; None: those in
    which this one publishes."""
    steps, pace = (5, QUICK) if asked.quick else (20, PACE)
    staleness, tails = CONTENDERS.get(name, "free"), TAILS.get(name)
    with tempfile.TemporaryDirectory() as folder:
        made = recipe(folder, staleness, asked.replicas, steps, seed, pace if paced else None, tails)
        memory = Memory()
        result = run_recipe(made, name=name, reward=score, callbacks=[memory])
        records, rows = read_metrics(result.directory), read_trajectories(result.directory).to_pylist()
        slower = stretch(Path(folder), steps)
    timed, first = records[UNTIMED:], records[UNTIMED - 1]
    seconds, samples = timed[-1]["seconds"] - first["seconds"], sum(r["samples"] for r in timed)
    behind = staleness != 0
    waits = "fully_async/trainer/idle_seconds" if behind else "time/generate"
    own = (seconds - sum(record[waits] for record in timed)) / len(timed)
    found = {"part": "paced" if paced else "plain", "contender": name, "seed": seed, "samples": samples}
    found |= {"replicas": asked.replicas if paced else 1, "seconds": round(seconds, 3)}
    found |= {"samples_per_minute": round(60 * samples / seconds, 1)}
    found |= {"trainer_waits_share": mean(timed, "fully_async/trainer/idle_ratio") if behind else None}
    found |= {"replica_idle_share": mean(timed, "fully_async/rollouter/idle_ratio") if behind else None}
    found |= {"staleness_mean": mean(timed, "staleness/mean") if behind else 0.0}
    found |= {"publish_seconds": mean(timed, "time/publish"), "trainer_seconds": round(own, 3)}
    found |= {"publish_median": round(statistics.median(record["time/publish"] for record in timed), 4)}
    found |= {"waits_seconds": round(statistics.median(record[waits] for record in timed), 3)}
    found |= {"megabytes_of_a_process": round(memory.each / 1e6)}
    if tails is not None:
        found |= {"moved": sum(record["samples/moved"] for record in records)}
    elif paced:
        publish = statistics.fmean(record["time/publish"] for record in timed)
        real = {key: seconds * slower for key, seconds in pace.items()}
        rate = simulated(name, asked.replicas, steps, own - publish, real, publish if copy is None else copy)
        found |= {"step_over_pace": round(slower, 3), "simulated_samples_per_minute": round(rate, 1)}
        found |= {"simulated_over_measured": round(rate / found["samples_per_minute"], 3)}
    return found, {row["id"]: len(row["tokens"]) - row["prompt_length"] for row in rows}


def stretch(folder: Path, steps: int) -> float:
    """Seconds that timed decode steps took over those that they sleep; 1 without logs of paced engines."""
    asked = taken = 0.0
    for path in folder.glob("*.jsonl"):
        lines = {version: times for version, *times in map(json.loads, path.read_text().splitlines())}
        first, last = (lines[min(max(lines), min(lines) + count)] for count in (UNTIMED, steps))
        asked, taken = asked + last[0] - first[0], taken + last[1] - first[1]
    return taken / asked if asked else 1.0


def simulated(name: str, replicas: int, steps: int, train: float, pace: dict[str, float], copy: float) -> float:
    """Samples per minute of a contender by the simulator. train: seconds of the trainer in a step; copy: of one of the
    weights."""
    samples, staleness = PROMPTS * GROUP, CONTENDERS[name]
    lengths = [min(length_of(i), LONGEST) for i in range(2 * steps * samples)]
    limits = ReplicaLimits(samples * (LONGEST + 16), samples // replicas)
    costs = RolloutCosts(step=pace["t0"], row=pace["c"], train=train, sync=copy)
    bound = BUFFER - 1 if staleness == "free" else staleness  # a buffer admits as many as this bound
    mode = AsyncMode(staleness=bound, rounds=LIMITS.seconds, bounded=staleness != "free", together=True)
    job = RolloutJob(costs, limits, replicas, 1, samples, GROUP, 16, lengths, updates=steps)
    simulation = AsyncSimulation(job, mode)
    simulation.run()
    (first, _), (last, _) = simulation.ends[UNTIMED - 1], simulation.ends[steps - 1]
    return 60 * (steps - UNTIMED) * samples / (last - first)


def mean(records: list[dict[str, Any]], name: str) -> float:
    """Mean of a metric over steps."""
    return round(statistics.fmean(record.get(name, 0.0) for record in records), 4)


def race(asked: Namespace, seed: int, *, paced: bool) -> list[dict[str, Any]]:
    """All contenders on one seed; each has consumed the same samples."""
    names = ["sync", "one_step", "free"] if asked.quick else list(CONTENDERS)
    names = list(TAILS) if asked.tails else names
    found, copy = dict[str, tuple[dict[str, Any], dict[int, int]]](), None
    for name in names if paced else names[:2]:
        found[name] = raced(name, asked, seed, paced=paced, copy=copy)
        copy = found[names[0]][0]["publish_seconds"]
    rows, lengths = zip(*found.values())
    same_work({name: {"samples": len(one)} for name, one in zip(found, lengths)})
    assert all(one.keys() == lengths[0].keys() for one in lengths), "contenders consumed other samples"
    if paced:
        same_work({name: {"tokens": sum(one.values())} for name, one in zip(found, lengths)})
        assert all(one == {i: min(length_of(i), LONGEST) for i in one} for one in lengths), "lengths are not as given"
    for row in rows:
        row["over_first"] = round(row["samples_per_minute"] / rows[0]["samples_per_minute"], 3)
    return list(rows)


def stalls(asked: Namespace) -> None:
    """The actor's stall with each number of replicas, which share equally many rows."""
    rows = list[dict[str, Any]]()
    for seed in range(asked.seeds):
        for count in asked.replicas:
            row, _ = raced(OWN_TIME, Namespace(**{**vars(asked), "replicas": count}), seed, paced=True)
            rows.append(row)
            print(
                f"{count:>3} replicas, seed {seed}: publishes in {row['publish_median']} s, waits for samples "
                f"{row['waits_seconds']} s (medians of steps), {row['samples_per_minute']} samples/min, replicas idle "
                f"{row['replica_idle_share']}, {row['megabytes_of_a_process']} MB of a process",
                flush=True,
            )
            write_rows(asked.json, rows)


def moves(asked: Namespace) -> list[dict[str, Any]]:
    """What moves of last samples gain in counted rounds."""
    steps, rows, base = 10 if asked.quick else 100, list[dict[str, Any]](), dict[str, Any]()
    for replicas in (2, 4, 8):
        for move in (0, STEPS):
            for every in (0, 20, 4, 1):
                lengths = [min(length_of(i), LONGEST) for i in range(2 * steps * PROMPTS * GROUP)]
                case = CountedCase(replicas, 5, every, lengths, move, PROMPTS, GROUP, BUFFER, steps)
                row = {"part": "counted", **case._asdict(), **CountedRun(case).run()}
                del row["lengths"]
                row["simulated_samples_per_round"] = simulated_rounds(case)
                base = row if not every else base
                for kind in ("", "simulated_"):
                    name = f"{kind}samples_per_round"
                    row[f"{kind}over_none"] = row[name] / base[name]
                rows.append(row)
                print(
                    f"{replicas} replicas, a move costs {move} steps, plans every {every:>2} rounds: "
                    f"{row['samples_per_round']:.2f} samples a round, {row['over_none']:.2f} of none, simulated "
                    f"{row['simulated_samples_per_round']:.2f}, {row['simulated_over_none']:.2f}; {row['moved']} moved"
                    f", replicas idle {row['replica_idle_share']:.2f}",
                    flush=True,
                )
    return rows


def main() -> None:
    """Run both parts."""
    parser = benchmark_parser(__doc__, "5 steps, three contenders, a faster pace")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tails", action="store_true")
    parser.add_argument("--counted", action="store_true")
    asked = parser.parse_args()
    if asked.counted:
        write_rows(asked.json, moves(asked))
        return
    if len(asked.replicas) > 1:
        stalls(asked)
        return
    (asked.replicas,) = asked.replicas
    if asked.tails:
        flows_replicas.PERIOD = PLANS
    parts = (True,) if asked.tails else (True, False)
    rows = [row for paced in parts for seed in range(asked.seeds) for row in race(asked, seed, paced=paced)]
    for row in rows:
        print(
            f"{row['part']:<6} {row['contender']:<13} seed {row['seed']}: {row['samples_per_minute']:>8.1f} samples/min"
            f", {row['over_first']:.2f} of the first, trainer waits {row['trainer_waits_share']}, replicas idle "
            f"{row['replica_idle_share']}, behind {row['staleness_mean']}, simulated "
            f"{row.get('simulated_samples_per_minute')} ({row.get('simulated_over_measured')} of measured), moved "
            f"{row.get('moved')}"
        )
    write_rows(asked.json, rows)


if __name__ == "__main__":
    main()
