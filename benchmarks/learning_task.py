"""The task of the learning curves: its data, and the one model that every run of them begins with.

Lists of two to eight numbers of one or two digits are put in order. Long lists are hard and short ones easy, so answers
differ in length (4 to 24 tokens), in how often they are right, and some ramble on to the limit.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

LISTS = (2, 8)
"""Fewest and most numbers of a list."""
TRAIN, HELDOUT = 20_000, 512
"""Prompts that are trained on, and those that every evaluation of every run is about."""
LONGEST = 26
"""Tokens of an answer at most; the longest right one has 24, the end included."""
WARM = "warm"
"""Name of the run that made the shared checkpoint."""


def record(numbers: list[int]) -> dict[str, str]:
    """``31,7,12=`` -> ``7,12,31``."""
    return {"prompt": ",".join(map(str, numbers)) + "=", "answer": ",".join(map(str, sorted(numbers)))}


def lists(count: int, seed: int) -> list[list[int]]:
    """Different lists: the length even over LISTS, the numbers even in 0 to 99."""
    draw = np.random.default_rng(seed)
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        size = int(draw.integers(LISTS[0], LISTS[1] + 1))
        found[tuple(draw.integers(0, 100, size).tolist())] = None
    return [list(numbers) for numbers in found]


def write(folder: Path) -> None:
    """The files of both sides; no list is on both."""
    folder.mkdir(parents=True, exist_ok=True)
    every = lists(TRAIN + HELDOUT, 0)
    for name, some in (("train", every[HELDOUT:]), ("heldout", every[:HELDOUT])):
        text = "".join(json.dumps(record(numbers)) + "\n" for numbers in some)
        (folder / f"{name}.jsonl").write_text(text)


def base(folder: Path) -> dict[str, object]:
    """Keys of every run: data, reward, machine."""
    return {
        "model.context": 64,
        "data.source": str(folder / "train.jsonl"),
        "data.heldout": str(folder / "heldout.jsonl"),
        "reward.function": "sorting",
        "rollout.max_tokens": LONGEST,
        "train.threads": 1,
        "train.device": "cpu",
        "run.dir": str(folder / "runs"),
        "run.eval_prompts": HELDOUT,
        "run.save_every": 10**6,
        "run.save_minutes": 0.0,
    }


def warm_up(folder: Path, until: float) -> dict[str, object]:
    """Keys of the fine-tuning that all runs share: a new model, until it answers this share rightly when it is
    greedy (its samples are right less often)."""
    return base(folder) | {
        "flow": "sft",
        "model.hidden": 64,
        "model.layers": 2,
        "model.heads": 4,
        "supervised.steps": 1500,
        "supervised.until": until,
        "supervised.check_every": 20,
        "supervised.batch": 128,
        "supervised.lr": 2e-3,
        "optimizer.name": "muon",
        "run.name": WARM,
    }


def command(script: Path, *words: str) -> list[str]:
    """A script beside this one, run by the same Python."""
    return [sys.executable, str(script), *words]


def run_quietly(words: list[str], log: Path, env: dict[str, str]) -> None:
    """To its end; RuntimeError with the end of what it said."""
    with log.open("w") as out:
        code = subprocess.run(words, stdout=out, stderr=subprocess.STDOUT, env=env).returncode
    if code:
        said = [line for line in log.read_text().splitlines() if line.strip()]
        raise RuntimeError(f"{' '.join(words[1:])} failed: {' | '.join(said[-3:])} (all of it: {log})")
