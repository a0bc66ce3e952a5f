"""``train.compile = "auto"``: compile the training passes where a run is long enough to earn it.

A run knows its steps, and what compiling costs: as an earlier run of this model and machine has measured it
(RUNS/.cache), else ``COLD``. It decides once, before its first step; run.json has the decision, which every resume
follows, since compiled passes round otherwise.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilth.cluster.backends.capacity import cores
from tilth.config.checks import learners
from tilth.config.schema import Recipe
from tilth.core.device import triton_missing
from tilth.core.errors import RecipeError, StorageError
from tilth.core.files import make_folder, writing
from tilth.flows.callbacks import Callback, RunView
from tilth.models.config import DecoderConfig
from tilth.plan.devices import DEVICES
from tilth.plan.memory import on_many_machines
from tilth.plan.steps import RunPlan
from tilth.runs.costs import measured_file
from tilth.runs.files import to_json
from tilth.training.rate import measured_flops

COLD = 55.0
"""Seconds that compiling takes where nothing is known of it (docs/benchmarks.md: 13 to 55 on a CPU)."""
SAVED = 0.1
"""Share of the seconds of training that compiled passes save: the median of six measured ratios is 1.11."""
KEYS = {"train": "compile", "rollout": "compile_rollout"}
"""Section whose passes are asked to be compiled -> field of run.json, True or False: what a run began with."""


class CompileChoice(NamedTuple):
    """Decision of a run, and a line that says why."""

    compiled: bool
    why: str


def choose(recipe: Recipe, config: DecoderConfig, plan: RunPlan, known: bool | None) -> CompileChoice:
    """Decide for a run whose device is resolved. known: what the run has decided before, if it goes on."""
    if known is not None:
        _check_compiler("train", known, _missing(recipe.train.device))
        return CompileChoice(known, f"{_does(known)}, as this run began")
    if reason := _impossible(recipe):
        return CompileChoice(False, f"eager: {reason}")
    seconds, cost = training_seconds(recipe, plan), measured_seconds(recipe, config)
    saved, source = SAVED * seconds, "measured" if cost is not None else "at most"
    cost = COLD if cost is None else cost
    pays = saved > cost
    gain = f"about {saved:.3g} of {seconds:.3g} s of training to save"
    return CompileChoice(pays, f"{_does(pays)}: {gain}, compiling takes {cost:.3g} s ({source})")


def _does(compiled: bool) -> str:
    return "compiled" if compiled else "eager"


def _impossible(recipe: Recipe) -> str:
    """Return why passes are not compiled, whatever it would bring; "" if they can be."""
    if recipe.train.device.startswith("cuda"):
        return "what compiling costs and saves was never measured on a GPU; set it to true to try"
    if recipe.train.parity:
        return "train.parity needs eager kernels"
    if any(layout.pp_schedule == "zero-bubble" for layout in learners(recipe).values()):
        return "zero-bubble splits the backward pass"
    if recipe.policy.lora.dropout:
        return "dropout of adapters would compile every step anew"
    return _missing(recipe.train.device)


def possible(recipe: Recipe, device: str, known: Mapping[str, bool]) -> tuple[Recipe, list[str]]:
    """Return a recipe without compiled passes that this machine cannot make, or that the run began without, and why.

    device: of its workers; known: section -> what the run began with, if it goes on. A GPU generates by CUDA graphs,
    which need no compiler. RecipeError: the run began with compiled passes, which have other bits than eager ones.
    """
    missing, why = "" if on_many_machines(recipe) else _missing(device), dict[str, list[str]]()
    for section in ("train",) if device.startswith("cuda") else KEYS:
        began = known.get(section)
        if getattr(recipe, section).compile is not True:
            continue
        _check_compiler(section, began, missing)
        if missing or began is False:
            recipe = recipe.replaced(section, compile=False)
            why.setdefault(missing or "as this run began", []).append(f"{section}.compile")
    return recipe, [f"{' and '.join(keys)} = true: eager: {reason}" for reason, keys in why.items()]


def _check_compiler(section: str, began: bool | None, missing: str) -> None:
    """Raise RecipeError if a run began with compiled passes, and goes on where they cannot be compiled."""
    if began and missing:
        message = f"{section}.compile: this run began with compiled passes, and eager ones have other bits: {missing}"
        raise RecipeError(message, key=f"{section}.compile.missing")


def began_with(state: Mapping[str, Any]) -> dict[str, bool]:
    """Return what a run began with, by section, from its run.json."""
    return {section: state[key] for section, key in KEYS.items() if key in state}


def to_record(asked: Recipe, made: Recipe) -> dict[str, bool]:
    """Return the fields of run.json. asked: the recipe as it is given; made: with what was decided."""
    return {key: getattr(made, section).compile for section, key in KEYS.items() if getattr(asked, section).compile}


def _missing(device: str) -> str:
    """Return what this machine lacks to compile; "" if nothing."""
    if device.startswith("cuda"):
        return triton_missing()
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # torch looks for no other
    return "" if shutil.which(compiler) else f"there is no C++ compiler {compiler}; install it, or set CXX"


def training_seconds(recipe: Recipe, plan: RunPlan) -> float:
    """Return the seconds of a run's eager training passes on a CPU: its FLOPs at the measured rate of products,
    of which layers reach a share. The rate is of ``train.threads``, or of all cores, which workers share."""
    dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
    rate = DEVICES["cpu"].attained * measured_flops(torch.device("cpu"), dtype)
    beside = min(len(plan.workers), max(1, cores() // recipe.train.threads)) if recipe.train.threads else 1
    return plan.flops / (rate * beside)


def cached(recipe: Recipe, config: DecoderConfig) -> Path:
    """Return the file of what compiling took for such a model on this machine."""
    train = recipe.train
    return measured_file(recipe.run.dir, "compile", config, train=[train.precision, train.checkpointing, train.threads])


def measured_seconds(recipe: Recipe, config: DecoderConfig) -> float | None:
    """Return what compiling took in the newest run that did; None if none has, or its record is damaged."""
    try:
        seconds = json.loads(cached(recipe, config).read_text(encoding="utf-8"))["seconds"]
        return float(seconds) if seconds > 0 else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


class CompileCost(Callback):
    """Records what compiling took, for the decisions of later runs."""

    def __init__(self, recipe: Recipe, config: DecoderConfig, policy: Any) -> None:
        """recipe: of this run, with the decision."""
        self._recipe, self._config, self._policy, self._done = recipe, config, policy, not recipe.train.compile

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Write it once, after the first step that this process has seen."""
        if self._done:
            return
        self._done = True
        path, seconds = cached(self._recipe, self._config), self._policy.compile_seconds()
        if not seconds:
            return
        try:
            with writing(path):
                make_folder(path.parent)
                path.write_text(to_json({"seconds": seconds}), encoding="utf-8")
        except StorageError as trouble:
            run.say(f"the next run does not know what compiling took: {trouble}")
