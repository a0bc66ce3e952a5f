"""A run that takes a second: one-digit addition by a model of a few thousand parameters."""

import json
import math
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import cloudpickle
import numpy as np

import tests.flows
from tilth import api
from tilth.api import run_recipe
from tilth.cluster.controller.cluster import open_cluster
from tilth.config.load import from_dict
from tilth.data.prompts import PromptSet
from tilth.flows.callbacks import Callback
from tilth.rewards.process_pool import RewardPool
from tilth.runs.progress import Doing
from tilth.runs.readers import read_metrics
from tilth.runs.state import RunState

cloudpickle.register_pickle_by_value(tests.flows)  # the process of a reward does not import its test, and so no torch
SHAPE = {"hidden": 16, "layers": 1, "heads": 2, "ffn": 32}
TIMES = (
    "seconds", "attempt", "tokens_per_second/", "time/", "memory/", "mfu", "save/", "bytes/", "balance/idle",
    "loader/stall", "kv_cache_usage/",
)  # fmt: skip


def settings(folder: Path, **sections):
    base = {
        "seed": 3,
        "model": {**SHAPE, "context": 16},
        "data": {"source": "addition", "digits": 1, "holdout": 0.2},
        "supervised": {"steps": 6, "batch": 16, "check_every": 3, "lr": 5e-3},
        "rollout": {"prompts": 6, "group": 4, "max_tokens": 4, "max_rows": 32},
        "algorithm": {"advantage": "grpo_no_std", "steps": 6},
        "train": {"threads": 1},
        "run": {"dir": str(folder), "eval_every": 3, "eval_prompts": 16, "save_every": 4},
    }
    for section, values in sections.items():
        base[section] = {**base[section], **values} if isinstance(values, dict) and section in base else values
    if base["model"].get("path"):  # which has a shape of its own
        base["model"] = {k: v for k, v in base["model"].items() if k not in SHAPE or k in sections["model"]}
    return base


def recipe(folder: Path, **sections):
    return from_dict(settings(folder, **sections))


def inline():
    """The one worker of a test that builds the roles itself."""
    return open_cluster("inline", 1)


def worker(group):
    """The role's own object behind a group of the inline backend."""
    return group._dispatch.backend.host.roles[group.role]


def stand_in(directory=Path("nowhere"), step=0, say=str, sample=None):
    """What a callback sees of a run, where there is none."""
    seen = SimpleNamespace(now=Doing())
    folder = SimpleNamespace(path=directory, progress=seen)
    return SimpleNamespace(directory=folder, state=RunState(step), say=say, sample=sample)


class Recorder(Callback):
    """Remember what comes, and perhaps act on a step."""

    def __init__(self, at_step=None):
        self.records, self.messages, self.samples, self.ended = [], [], [], None
        self.at_step = at_step

    def on_step_end(self, run, step, metrics):
        self.records.append(metrics)
        self.samples.append(run.sample)
        if self.at_step is not None:
            self.at_step(metrics)

    def on_message(self, text):
        self.messages.append(text)

    def on_run_end(self, run, summary):
        self.ended = summary


def close_enough(prompt, completion, info):
    """A reward with spread from the first step on: how many characters are right."""
    return sum(a == b for a, b in zip(completion, info["answer"])) / len(info["answer"]) + 0.1 * len(completion)


@cache
def _rewards():
    """The reward process of all runs here that score with ``close_enough``: to start one is a third of a short run."""
    return RewardPool(close_enough, wait=False)


def run(made, *, reward=close_enough, callbacks=(), name="tiny", prompts=None, report=False, **how):
    """report: write report.html, a tenth of the time; how: of ``run_recipe``."""
    shared = reward is close_enough and made.cluster.backend == "inline" and made.reward == type(made.reward)()
    with ExitStack() as patches:
        if not report:
            patches.enter_context(patch("tilth.ui.report.write_report"))
        if shared:
            patches.enter_context(patch.object(api, "_pool", lambda _, function: nullcontext(function and _rewards())))
        return run_recipe(made, name=name, callbacks=list(callbacks), reward=reward, prompts=prompts, **how)


def write(path, records):
    """Write records as JSON lines, and return the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


TEXTS = [f"{a} and {b} are {a + b}, and {b} and {a} are too" for a in range(12) for b in range(12)]
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


def learn(folder: Path, flow: str, *, prompts=None, reward=None, callbacks=(), **sections):
    """A supervised flow on its own: one-digit addition with answers, or documents of some words."""
    sections = {"flow": flow, "supervised": {}, "model": {}, "data": {}, **sections}
    sections["supervised"] = {"steps": 8, "check_every": 3, **sections["supervised"]}
    sections["model"] = {"context": 12 if flow == "pretrain" else 24, **sections["model"]}
    if flow == "pretrain":
        sections["data"] = {"tokenizer": "bpe:300", **sections["data"]}
    prompts = PromptSet.of(TEXTS if flow == "pretrain" else SUMS) if prompts is None else prompts
    return run(recipe(folder, **sections), reward=reward, callbacks=callbacks, name=flow, prompts=prompts)


SUPERVISED = {
    "sft": lambda folder: learn(folder, "sft"),
    "scored": lambda folder: learn(folder, "sft", reward=close_enough),
    "pretrain": lambda folder: learn(folder, "pretrain"),
}
"""A run of each kind in a folder."""


def weights(directory: Path) -> dict[str, bytes]:
    """Data files of the newest checkpoint: weights and optimizer state, byte by byte."""
    newest = max((directory / "checkpoints").glob("step-*"))
    return {file.name: file.read_bytes() for file in sorted(newest.glob("*.safetensors"))}


def numbers(directory: Path) -> list[dict]:
    """Committed metrics without times."""
    return [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in read_metrics(directory)]


def same(a, b) -> bool:
    """Equal JSON, NaN equal to itself."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def finite(values) -> bool:
    return all(math.isfinite(v) for v in np.ravel(values))
