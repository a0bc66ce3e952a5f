"""The task of the learning curves: its data, and the one model that every run of them begins with.

Lists of two to eight numbers of one or two digits are put in order. Long lists are hard and short ones easy, so answers
differ in length (4 to 24 tokens) and in how often they are right.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

WARM = "warm"
"""Name of the run that made the shared checkpoint."""
SHAPE = {"model.hidden": 64, "model.layers": 2, "model.heads": 4}


@dataclass(frozen=True)
class Task:
    """lists: fewest and most numbers; below: what the numbers are below; longest: tokens of an answer at most, two
    more than the longest right one has with its end; until: greedy held-out accuracy at which the warm-up ends."""

    lists: tuple[int, int] = (2, 8)
    below: int = 100
    longest: int = 26
    train: int = 20_000
    heldout: int = 512
    until: float = 0.45
    warm_steps: int = 600


QUICK = Task(lists=(2, 4), below=10, longest=10, train=4000, heldout=256, until=0.3, warm_steps=60)


def record(numbers: list[int]) -> dict[str, str]:
    """``31,7,12=`` -> ``7,12,31``."""
    return {"prompt": ",".join(map(str, numbers)) + "=", "answer": ",".join(map(str, sorted(numbers)))}


def lists(task: Task, count: int) -> list[list[int]]:
    """So many different lists, of even length and with even numbers."""
    draw = np.random.default_rng(0)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        size = int(draw.integers(task.lists[0], task.lists[1] + 1))
        found[tuple(draw.integers(0, task.below, size).tolist())] = None
    return [list(numbers) for numbers in found]


def write(task: Task, folder: Path) -> None:
    """The files of both sides; no list is on both."""
    folder.mkdir(parents=True, exist_ok=True)
    every = lists(task, task.train + task.heldout)
    for name, some in (("train", every[task.heldout :]), ("heldout", every[: task.heldout])):
        text = "".join(json.dumps(record(numbers)) + "\n" for numbers in some)
        (folder / f"{name}.jsonl").write_text(text)


def base(task: Task, folder: Path) -> dict[str, Any]:
    """Keys of every run: data, reward, machine."""
    return {
        "model.context": 64,
        "data.source": str(folder / "train.jsonl"),
        "data.heldout": str(folder / "heldout.jsonl"),
        "reward.function": "sorting",
        "rollout.max_tokens": task.longest,
        "train.threads": 1,
        "train.device": "cpu",
        "run.dir": str(folder / "runs"),
        "run.eval_prompts": task.heldout,
        "run.save_every": 10**6,
        "run.save_minutes": 0.0,
    }


def warm_up(task: Task, folder: Path) -> dict[str, Any]:
    """Keys of the fine-tuning that all runs share, of a new model."""
    return base(task, folder) | {
        "flow": "sft",
        **SHAPE,
        "supervised.steps": task.warm_steps,
        "supervised.until": task.until,
        "supervised.check_every": 20,
        "supervised.batch": 128,
        "supervised.lr": 2e-3,
        "optimizer.name": "muon",
        "run.name": WARM,
    }
