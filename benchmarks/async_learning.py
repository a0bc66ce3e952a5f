"""What samples that are behind teach: the reward at the end, after equally many samples from one checkpoint.

    python benchmarks/async_learning.py [--quick] [--json PATH] [--task addition|sorting] [--seeds N]

Tasks: addition of two digits, whose answers end within a round of the engine, and sorting of 2 to 8 digits (4 to 16
tokens), where updates come while an answer grows; the reward is the share of right characters. A small model is
fine-tuned once for each task, and every run goes on from there with GRPO: with ``rollout.staleness`` 0, 1, 4, "free",
with and without ``algorithm.correction``, and with both ways of ``rollout.inflight`` where these differ. A run's figure
is the reward of greedy answers to the same held-out prompts after its last step. A row is inside where its mean over
seeds lies between the least and the greatest seed of staleness 0 with correction.

Runs are inline: counted rounds and no clock decide what is in flight, so a busy machine changes no row.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driver import benchmark_parser, write_rows
from learning_task import WARM, Task, write
from work import same_work

from tilth.api import run_recipe
from tilth.config.load import from_dict
from tilth.runs.readers import read_metrics

CORRECTION = "decoupled_token_is"
"""That of samples which are behind, by default."""
BUFFER = 8
"""Steps of samples that are in flight or wait, with staleness "free"."""
SORTING = Task(lists=(2, 8), below=10, longest=17, train=4000, heldout=128)
TASKS = ("addition", "sorting")
REWARD, UNTIL = "reward/heldout", 0.5
"""UNTIL: reward at which the fine-tuning ends."""
OPTIMIZER = {"name": "adamw", "lr": 1e-3}


class Case(NamedTuple):
    """A row of the table."""

    task: str
    staleness: int | str
    correction: bool
    inflight: str = "update"


class Sizes(NamedTuple):
    """Steps of the fine-tuning and of each run, prompts of a step, samples of a prompt."""

    warm: int
    steps: int
    prompts: int = 8
    group: int = 8


FULL, QUICK = Sizes(200, 20), Sizes(10, 4, 4, 4)


def right(prompt: str, completion: str, info: dict[str, Any]) -> float:
    """Share of characters that are right."""
    answer = info["answer"]
    return sum(a == b for a, b in zip(completion, answer)) / max(len(completion), len(answer))


def cases(task: str, *, quick: bool) -> list[Case]:
    """Rows of a task; staleness 0 with correction is the first."""
    behind: list[int | str] = [4] if quick else [1, 4, "free"]
    ways = ("update",) if task == "addition" else ("update", "finish")
    found = [Case(task, 0, correction) for correction in (True, False)]
    return found + [Case(task, n, correction, way) for n in behind for correction in (True, False) for way in ways]


def settings(task: str, folder: Path, seed: int) -> dict[str, Any]:
    """Sections that the fine-tuning and the runs of a task share."""
    data: dict[str, Any] = {"source": "addition", "digits": 1, "holdout": 0.3}
    if task == "sorting":
        data = {"source": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")}
    kept = {"save_every": 10**6, "save_minutes": 0}
    return {
        "seed": seed,
        "data": data,
        "rollout": {"max_tokens": 4 if task == "addition" else SORTING.longest},
        "train": {"threads": 1, "device": "cpu"},
        "run": {"dir": str(folder / task), "eval_every": 0, "eval_prompts": SORTING.heldout, **kept},
    }


def warm_up(task: str, folder: Path, sizes: Sizes) -> float:
    """Fine-tune the model that all runs of a task begin with; return its reward."""
    made = settings(task, folder, 0)
    made |= {"flow": "sft", "model": {"hidden": 32, "layers": 1, "heads": 2, "context": 48}}
    made |= {"supervised": {"steps": sizes.warm, "batch": 64, "lr": 2e-3, "check_every": 20, "until": UNTIL}}
    made |= {"optimizer": {"name": "muon"}}
    return float(read_metrics(run_recipe(from_dict(made), name=WARM, reward=right).directory)[-1][REWARD])


def learn(case: Case, seed: int, folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Make one run; return its figures."""
    made = settings(case.task, folder, seed)
    made["rollout"] |= {"prompts": sizes.prompts, "group": sizes.group, "max_rows": sizes.prompts * sizes.group}
    made["rollout"] |= {"staleness": case.staleness} | ({"inflight": case.inflight} if case.staleness else {})
    made["rollout"] |= {"buffer": BUFFER} if case.staleness == "free" else {}
    made |= {"model": {"path": str(folder / case.task / f"{WARM}-001")}, "supervised": {"steps": 0}}
    made |= {"optimizer": OPTIMIZER, "policy": {"probe_every": 0}, "guard": {"restarts": 0}}
    made["algorithm"] = {"steps": sizes.steps, "correction": CORRECTION if case.correction else ""}
    name = "-".join(map(str, (*case[1:], seed)))
    records = read_metrics(run_recipe(from_dict(made), name=name, reward=right).directory)

    def mean(metric: str) -> float:
        return round(statistics.fmean(record.get(metric, 0.0) for record in records), 3)

    found = {**case._asdict(), "seed": seed, "samples": sum(record["samples"] for record in records)}
    found |= {"reward": round(float(records[-1][REWARD]), 4), "versions_behind": mean("staleness/mean")}
    return found | {"of_several_versions": mean("fully_async/partial/partial_ratio")}


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a task: mean and standard deviation over seeds, and where the mean lies."""
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[name] for name in Case._fields), []).append(row)
    base = [row["reward"] for row in next(iter(grouped.values()))]
    found = list[str]()
    for (task, staleness, correction, inflight), some in grouped.items():
        rewards = [row["reward"] for row in some]
        mean, spread = statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        where = "below" if mean < min(base) else "above" if mean > max(base) else "inside"
        how = f"{task:<9} {staleness!s:>4} {inflight:<6} {'corrected' if correction else 'as it is':<9}"
        behind = statistics.fmean(row["versions_behind"] for row in some)
        several = statistics.fmean(row["of_several_versions"] for row in some)
        found.append(
            f"{how} {mean:.3f} +- {spread:.3f}  {where:<6}  behind {behind:.2f}, several versions {several:.2f}"
        )
    return found


def main() -> None:
    """Run all cases, seed by seed."""
    parser = benchmark_parser(__doc__, "sorting in three rows of one seed, 4 steps")
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    sizes, rows = QUICK if asked.quick else FULL, list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(SORTING, folder)
        for task in [asked.task] if asked.task else TASKS[asked.quick :]:
            print(f"{task}: reward {warm_up(task, folder, sizes):.3f} after the fine-tuning", flush=True)
            own = list[dict[str, Any]]()
            for seed in range(1 if asked.quick else asked.seeds):
                for case in cases(task, quick=asked.quick):
                    own.append(learn(case, seed, folder, sizes))
                    write_rows(asked.json, rows + own)
            same_work({f"run {i}": {"samples": row["samples"]} for i, row in enumerate(own)})
            print("\n".join(table(own)), flush=True)
            rows += own


if __name__ == "__main__":
    main()
