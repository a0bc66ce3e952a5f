"""What samples that are behind teach: the reward at the end, after equally many samples from one checkpoint.

    python benchmarks/async_learning.py [--quick] [--json PATH] [--task TASK] [--seeds 0 1 2]
                                        [--staleness 1 4 free] [--rate 1] [--momentum 0.95] [--far]

Tasks: addition of two digits, whose answers end within a round of the engine, and sorting of 2 to 6 digits (4 to 12
tokens), where updates come while an answer grows; the reward is the share of right characters. With ``--task
addition-grpo`` that recipe: its model, batch and optimizer, from its warm-up on; the reward is right or wrong. A model
is fine-tuned once for each task, and every run goes on from there with GRPO: with ``rollout.staleness`` 0, 1, 4,
"free", with and without ``algorithm.correction``, and with both ways of ``rollout.inflight`` where these differ. A
run's figure is the mean reward of answers drawn for the same held-out prompts after its last step. A row is inside
where its mean over seeds lies between the least and the greatest seed of staleness 0 with correction. That run has
another row for each N of ``--staleness``: its figure N steps before its end, where it knows what samples N versions
behind can tell; the delay alone does not explain a row of staleness N below it. ``--rate`` multiplies the learning
rate of all runs: how far the policy moves in N versions is the product of both. ``--momentum``: that of Muon in all
runs; gradients of samples behind add up as momentum does, so less of it is right (Mitliagkas et al. 2016, 1605.09774).

``--far``, in place of these: addition with samples that are up to 256 versions behind (Second-Moment Trust Policy
Optimization, M2PO, is said to learn from such), with the default correction, with M2PO and without any. The engine
holds all that is begun, so the first 256 steps learn from samples of the first weights, later ones from such of 256
versions before.

Runs are inline: counted rounds and no clock decide what is in flight, so a busy machine changes no row.
"""

import statistics
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from driver import benchmark_parser, write_rows
from learning_task import WARM, Task, write
from work import same_work

from tilth.api import run_recipe
from tilth.config.load import from_dict
from tilth.flows.callbacks import Callback
from tilth.roles.rollout import ask
from tilth.runs.readers import read_metrics

CORRECTION = "decoupled_token_is"
"""That of samples which are behind, by default."""
NONE, M2PO = "", "decoupled_m2po"
FAR = 256
"""Versions that samples may be behind with ``--far``."""
BUFFER = 8
"""Steps of samples that are in flight or wait, with staleness "free"."""
DRAWN, DRAWN_IDS = 8, -(10**6)
"""Answers to each held-out prompt, and the first id of them: no other samples have these."""
SORTING = Task(lists=(2, 6), below=10, longest=12, train=4000, heldout=32)
WARM_STEPS = {"addition": 20, "sorting": 40}
"""Of the fine-tuning, for each small task."""
RECIPE = "addition-grpo"
OPTIMIZER = {"name": "adamw", "lr": 2e-3}
CPU = {"threads": 1, "device": "cpu"}
KEPT = {"save_every": 10**6, "save_minutes": 0}
"""Checkpoints: that of the end."""


class Case(NamedTuple):
    """A row of the table."""

    task: str
    staleness: int | str
    correction: str
    inflight: str = "update"


class Sizes(NamedTuple):
    """Steps of a run, prompts of a step, samples of a prompt."""

    steps: int
    prompts: int = 8
    group: int = 8


FULL, QUICK, OF_RECIPE, LONG = Sizes(20), Sizes(4, 4, 4), Sizes(120, 64, 8), Sizes(320, 4, 4)


def right(prompt: str, completion: str, info: dict[str, Any]) -> float:
    """Share of characters that are right."""
    answer = info["answer"]
    return sum(a == b for a, b in zip(completion, answer)) / max(len(completion), len(answer))


def cases(task: str, behind: Sequence[int | str]) -> list[Case]:
    """Rows of a task; staleness 0 with correction is the first."""
    ways = ("update", "finish") if task == "sorting" else ("update",)
    found = [Case(task, 0, correction) for correction in (CORRECTION, NONE)]
    return found + [Case(task, n, correction, way) for n in behind for correction in (CORRECTION, NONE) for way in ways]


def far(task: str) -> list[Case]:
    """Rows of ``--far``."""
    return [Case(task, 0, CORRECTION), *(Case(task, FAR, one) for one in (CORRECTION, M2PO, NONE))]


def settings(task: str, folder: Path, seed: int) -> dict[str, Any]:
    """Sections that the fine-tuning and the runs of a task share."""
    if task == RECIPE:
        found: dict[str, Any] = tomllib.loads((files("tilth.recipes") / f"{RECIPE}.toml").read_text())
        return found | {
            "seed": seed,
            "train": CPU,
            "run": {"dir": str(folder), "eval_every": 0, "eval_prompts": 256, **KEPT},
        }
    data: dict[str, Any] = {"source": "addition", "digits": 1, "holdout": 0.3}
    if task == "sorting":
        data = {"source": str(folder / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")}
    return {
        "seed": seed,
        "data": data,
        "rollout": {"max_tokens": 4 if task == "addition" else SORTING.longest},
        "train": CPU,
        "run": {"dir": str(folder), "eval_every": 0, "eval_prompts": SORTING.heldout, **KEPT},
        "optimizer": OPTIMIZER,
    }


class Draw(Callback):
    """Draw answers to held-out prompts after some steps, by the same random numbers, and keep their mean reward."""

    def __init__(self, *steps: int) -> None:
        self.rewards = dict.fromkeys(sorted(steps), 0.0)

    def on_step_end(self, run: Any, step: int, metrics: dict[str, Any]) -> None:
        """Ask the engines, which have the newest weights."""
        if step in self.rewards:
            with run.store.scope():
                drawn = run.generate_and_score(ask(run.evaluator.chosen().tolist(), DRAWN, DRAWN_IDS))
                self.rewards[step] = float(drawn["reward"].mean())


def warm_up(task: str, folder: Path) -> None:
    """Fine-tune the model that all runs of a task begin with."""
    made = settings(task, folder, 0)
    if task == RECIPE:
        made["algorithm"]["steps"] = 0
        run_recipe(from_dict(made), name=WARM)
        return
    made |= {"flow": "sft", "model": {"hidden": 32, "layers": 1, "heads": 2, "context": 48}}
    made |= {"supervised": {"steps": WARM_STEPS[task], "batch": 64, "lr": 2e-3, "check_every": 100}}
    made |= {"optimizer": {"name": "muon"}}
    run_recipe(from_dict(made), name=WARM, reward=right)


def learn(
    case: Case, seed: int, folder: Path, sizes: Sizes, before: Sequence[int] = (), rate: float = 1.0,
    momentum: float = 0.95,
) -> list[dict[str, Any]]:  # fmt: skip
    """Make one run, with ``rate`` times the learning rate of its task and this momentum if it uses Muon; return figures
    of its end, then for each N in ``before`` those N steps earlier."""
    made = settings(case.task, folder, seed)
    rows = sizes.prompts * sizes.group * (FAR + 1 if case.staleness == FAR else 1)
    made["rollout"] |= {"prompts": sizes.prompts, "group": sizes.group, "max_rows": rows}
    made["rollout"] |= {"staleness": case.staleness} | ({"inflight": case.inflight} if case.staleness else {})
    made["rollout"] |= {"buffer": BUFFER} if case.staleness == "free" else {}
    made |= {"model": {"path": str(folder / f"{WARM}-001")}, "supervised": {"steps": 0}}
    made |= {"policy": {"probe_every": 0}, "guard": {"restarts": 0}}
    made["optimizer"] = made["optimizer"] | {"lr": rate * made["optimizer"]["lr"], "muon_momentum": momentum}
    made["algorithm"] = made.get("algorithm", {}) | {
        "steps": sizes.steps, "correction": case.correction
    }  # fmt: skip
    name = "-".join(map(str, (*case[1:], seed)))
    draw = Draw(sizes.steps, *(sizes.steps - n for n in before))
    reward = None if case.task == RECIPE else right
    records = read_metrics(run_recipe(from_dict(made), name=name, reward=reward, callbacks=[draw]).directory)

    def figures(steps: int) -> dict[str, Any]:
        some = records[:steps]

        def mean(metric: str) -> float:
            return round(statistics.fmean(record.get(metric, 0.0) for record in some), 3)

        found = {**case._asdict(), "steps": steps, "seed": seed, "samples": sum(record["samples"] for record in some)}
        found |= {
            "before": round(some[0]["reward/mean"], 4),
            "reward_of_20_steps": round(statistics.fmean(record["reward/mean"] for record in some[-20:]), 4),
            "reward": round(draw.rewards[steps], 4),
            "versions_behind": mean("staleness/mean"),
            "chi2_of_answers": mean("mismatch/chi2_seq"),
            "left_out": mean("correction/rejected"),
        }
        return found | {"of_several_versions": mean("fully_async/partial/partial_ratio")}

    return [figures(steps) for steps in sorted(draw.rewards, reverse=True)]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a task: mean and standard deviation over seeds, and where the mean lies."""
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[name] for name in (*Case._fields, "steps")), []).append(row)
    base = [row["reward"] for row in next(iter(grouped.values()))]
    found = list[str]()
    for (task, staleness, correction, inflight, steps), some in grouped.items():
        rewards = [row["reward"] for row in some]
        mean, spread = statistics.fmean(rewards), statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        where = "below" if mean < min(base) else "above" if mean > max(base) else "inside"
        how = f"{task:<9} {staleness!s:>4} {inflight:<6} {correction or 'as it is':<18} step {steps:<3}"
        behind = statistics.fmean(row["versions_behind"] for row in some)
        several = statistics.fmean(row["of_several_versions"] for row in some)
        found.append(
            f"{how} {mean:.3f} +- {spread:.3f}  {where:<6}  behind {behind:.2f}, several versions {several:.2f}"
        )
    return found


def main() -> None:
    """Run all cases, seed by seed."""
    parser = benchmark_parser(__doc__, "sorting in three rows of one seed, 4 steps")
    parser.add_argument("--task", choices=[*WARM_STEPS, RECIPE])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", nargs="+", default=["1", "4", "free"])
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--momentum", type=float, default=0.95)
    parser.add_argument("--far", action="store_true")
    asked = parser.parse_args()
    behind = [int(one) if one.isdecimal() else one for one in (["2"] if asked.quick else asked.staleness)]
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        tasks = [asked.task] if asked.task else ["addition"] if asked.far else list(WARM_STEPS)[asked.quick :]
        for task in tasks:
            sizes = QUICK if asked.quick else LONG if asked.far else OF_RECIPE if task == RECIPE else FULL
            folder = Path(name) / task
            folder.mkdir()
            write(SORTING, folder)
            warm_up(task, folder)
            own = list[dict[str, Any]]()
            before = [n for n in behind if isinstance(n, int) and 0 < n < sizes.steps]
            for seed in asked.seeds[: 1 if asked.quick else None]:
                for i, case in enumerate(far(task) if asked.far else cases(task, behind)):
                    earlier = [] if i or asked.far else before
                    own += learn(case, seed, folder, sizes, earlier, asked.rate, asked.momentum)
                    write_rows(asked.json, rows + own)
            ends = [row for row in own if row["steps"] == sizes.steps]
            same_work({f"run {i}": {"samples": row["samples"]} for i, row in enumerate(ends)})
            print("\n".join(table(own)), flush=True)
            rows += own


if __name__ == "__main__":
    main()
