"""Seconds until a run has a reward, synchronous and with experience that is behind.

    python benchmarks/async_reward.py [--quick] [--json PATH] [--seeds 0 1 2] [--reward R]

The setting of ``async_rl.py``'s paced part, but that answers are the policy's: a trainer and two replicas in processes
of their own, a decode step takes max(t0, c b) seconds for b sequences, and an answer is held back until as many steps
are over as a given length, of which p99/p50 = 10. The task is ``async_learning.py``'s addition, from one fine-tuned
checkpoint, by GRPO; a run ends when the mean reward of its last ten batches is R. Samples that are behind were drawn by
an older policy and have its reward, so that none gains by this measure.
"""

import statistics
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_learning import OPTIMIZER, right, settings, warm_up
from async_rl import BUFFER, CONTENDERS
from driver import benchmark_parser, write_rows
from learning_task import WARM

from tilth.api import run_recipe
from tilth.config.load import from_dict
from tilth.flows.callbacks import Callback
from tilth.runs.readers import read_metrics
from tilth.runs.signals import Interrupted

TASK = "addition"
PACE, QUICK = {"t0": 0.02, "c": 0.0004}, {"t0": 0.002, "c": 0.00004}
REPLICAS, PROMPTS, GROUP, WINDOW = 2, 16, 4, 10
MOST = 300
"""Steps of a run that does not come there."""


class Reached(Callback):
    """End a run once its last batches have a mean reward."""

    def __init__(self, reward: float) -> None:
        self.reward, self.found = reward, list[float]()
        self.directory: Any = None

    def mean(self) -> float:
        """Mean reward of the last batches; 0.0 before there are as many."""
        return statistics.fmean(self.found[-WINDOW:]) if len(self.found) >= WINDOW else 0.0

    def on_run_start(self, run: Any) -> None:
        """Keep where its files are."""
        self.directory = run.directory.path

    def on_step_end(self, run: Any, step: int, metrics: dict[str, Any]) -> None:
        """Look at the reward of one more batch."""
        self.found.append(metrics["reward/mean"])
        if self.mean() >= self.reward:
            run.stop(f"the mean reward of {WINDOW} batches is {self.mean():.3f}")


def reach(name: str, seed: int, folder: Path, reward: float, pace: dict[str, float]) -> dict[str, Any]:
    """Make one run; return its figures."""
    made, staleness = settings(TASK, folder, seed), CONTENDERS[name]
    made["plugins"] = [str(Path(__file__).with_name("async_engine.py"))]
    made["rollout"] |= {"pool": "rollout", "prompts": PROMPTS, "group": GROUP, "max_rows": PROMPTS * GROUP // REPLICAS}
    made["rollout"] |= {"engine": "slowed", "options": pace, "staleness": staleness}
    made["rollout"] |= {"buffer": BUFFER} if staleness == "free" else {}
    made |= {"model": {"path": str(folder / f"{WARM}-001")}, "supervised": {"steps": 0}}
    made |= {"optimizer": OPTIMIZER, "policy": {"probe_every": 0}, "guard": {"restarts": 0}}
    made |= {"algorithm": {"steps": MOST, "advantage": "grpo_no_std"}}
    made |= {"cluster": {"backend": "local", "pools": {"train": 1, "rollout": REPLICAS}}}
    until = Reached(reward)
    with suppress(Interrupted):
        run_recipe(from_dict(made), name=f"{name}-{seed}", reward=right, callbacks=[until])
    records = read_metrics(until.directory)
    if until.mean() < reward:
        raise SystemExit(f"{name}, seed {seed}: the mean reward is {until.mean():.3f} after {MOST} steps, not {reward}")
    found = {"contender": name, "seed": seed, "reward": reward, "seconds": round(records[-1]["seconds"], 2)}
    found |= {"steps": len(records), "samples": sum(record["samples"] for record in records)}
    behind = statistics.fmean(record.get("staleness/mean", 0.0) for record in records)
    return found | {"staleness_mean": round(behind, 2)}


def main() -> None:
    """Run all contenders, seed by seed."""
    parser = benchmark_parser(__doc__, "two contenders of one seed, a low reward, a faster pace")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--reward", type=float, default=0.35)
    asked = parser.parse_args()
    names, seeds = (["sync", "k4"], asked.seeds[:1]) if asked.quick else (list(CONTENDERS), asked.seeds)
    reward, pace, rows = 0.05 if asked.quick else asked.reward, QUICK if asked.quick else PACE, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        warm_up(TASK, Path(folder))
        for seed in seeds:
            for name in names:
                rows.append(reach(name, seed, Path(folder), reward, pace))
                row = rows[-1]
                row["sync_over_this"] = round(next(r["seconds"] for r in rows if r["seed"] == seed) / row["seconds"], 2)
                print(
                    f"{name:<9} seed {seed}: reward {reward} after {row['seconds']:>7.1f} s, {row['samples']} samples, "
                    f"behind {row['staleness_mean']}; {row['sync_over_this']} times as soon as sync",
                    flush=True,
                )
                write_rows(asked.json, rows)


if __name__ == "__main__":
    main()
