"""Sweep: runs of one recipe with other values of some keys and other seeds, each in a process of its own.

A run of a sweep is an ordinary run whose folder is named after the sweep, its values and its seed. So the same command
again finds it: a finished run stays, any other continues, and values that are added are runs that are added.
"""

import hashlib
import json
import math
import os
import re
import shlex
import signal
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from tilth.cluster.backends.capacity import cores
from tilth.config.keys import find
from tilth.config.load import digest, dump_value, given, load_recipe, recipe_name
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, RecipeError
from tilth.data.pairs import recipe_prompts
from tilth.data.prompts import with_holdout
from tilth.process.child import Child, how_ended
from tilth.process.handlers import handling
from tilth.process.output import OutputFile
from tilth.runs.identity import Identity
from tilth.runs.readers import read_state
from tilth.runs.signals import Interrupted, ends

SEED = "seed"
OWN = ("run.dir", "run.name", "run.sweep")
"""Keys that a sweep sets itself, or that place it: they have one value."""
MOST = 1000
"""Most runs of a sweep."""
LABEL = 24
"""Most characters of a value in the name of a run."""
LONGEST = 120
"""Most characters of all values there."""
BOOT = (
    "import json, os, sys; parent, program, cores, sys.path[:], sys.argv[:] = json.loads(sys.argv.pop()); "
    "cores and os.sched_setaffinity(0, cores); import pkgutil; from tilth.process.program import die_with; "
    "die_with(parent); pkgutil.resolve_name(program)()"
)
"""Program of a child: the command line, on its share of the cores, killed with the sweep."""


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep. values: swept key -> its text; overrides: all that the command line of its run has."""

    path: Path
    values: Mapping[str, str]
    seed: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.path.name


@dataclass(frozen=True)
class Sweep:
    """Runs of a recipe, as its command line names them. name: begins the names of its runs, and is their tag."""

    name: str
    recipe: str
    keys: Mapping[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    runs: tuple[SweepRun, ...]


def split_values(override: str) -> tuple[str, list[str]]:
    """Return the key of ``key=A,B`` and the text of each value. RecipeError: a text with a comma that has no quotes.

    A value that TOML reads as one (a list, a table, a quoted text) is one; else commas part values.
    """
    name, _, text = (part.strip() for part in override.partition("="))
    if "," not in text or _toml(text) is not None:
        return name, [text]
    found = None if text.endswith(",") else _toml(f"[{text}]")
    if found is not None:
        return name, [dump_value(value) for value in found]
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise RecipeError(f"{name}={text}: a value is empty; write {name}=A,B", key=name)
    if any(mark in text for mark in "\"'[]{}"):
        right = 'quote each text, as in \'"a,b","c"\', and close each list, as in [1,2],[3]'
        raise RecipeError(f"{name}={text}: where one value ends is not clear; {right}", key=name)
    return name, parts


def _toml(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None


def plan_sweep(name: str, overrides: Sequence[str], seeds: int | None) -> Sweep:
    """Return the runs of a sweep: all combinations of values, each with all seeds. RecipeError, before anything starts:
    a value is wrong, given twice, or there is but one run, or more than ``MOST``.

    seeds: from the recipe's own on; None: one, or the values of ``seed=A,B``.
    """
    fixed, swept = [], dict[str, list[str]]()
    for override in overrides:
        key, values = split_values(override)
        if key in swept or len(values) == 1:
            fixed.append(override)
        else:
            swept[key] = values
    if own := [key for key in swept if key in OWN]:
        raise RecipeError(f"{own[0]}={','.join(swept[own[0]])}: a sweep has one {own[0]}; give one value", key=own[0])
    once = {one.partition("=")[0].strip() for one in fixed}
    if again := [key for key in swept if key in once]:
        raise RecipeError(f"{again[0]} is given twice; write {again[0]}=A,B once", key=again[0])
    if "run.sweep" in once:
        raise RecipeError("run.sweep: a sweep names itself; choose its name by run.name=NAME", key="run.sweep")
    swept = dict(sorted(swept.items()))  # the order of a command line makes no other sweep
    if (count := math.prod(map(len, swept.values())) * (seeds or 1)) > MOST:
        raise RecipeError(f"{count} runs: a sweep has at most {MOST}; give fewer values or seeds", key="--seeds")
    base = load_recipe(name, [*fixed, *(f"{key}={values[0]}" for key, values in swept.items())])
    numbers = _seeds(base, swept, seeds)
    same = [override for override in fixed if override.partition("=")[0].strip() != SEED]  # more seeds are no other one
    title = base.run.name or f"{recipe_name(name)}-sweep-{_digest([given(name, same), [*swept]])}"
    known = _runs(name, base, title, fixed, swept, numbers)
    if not base.run.name:
        command = shlex.join(["tilth", "sweep", name, *overrides, *(["--seeds", str(seeds)] if seeds else [])])
        if (begun := _sweep_of(known, title, command)) != title:
            title, known = begun, _runs(name, base, begun, fixed, swept, numbers)
    runs = tuple(_begun(name, known, title))
    if len(runs) < 2:
        raise RecipeError("there is but one run: give several values, as in optimizer.lr=1e-4,3e-4, or --seeds 3",
                          key="--seeds")  # fmt: skip
    return Sweep(title, name, {key: tuple(values) for key, values in swept.items()}, tuple(numbers), runs)


def _seeds(base: Recipe, swept: dict[str, list[str]], count: int | None) -> Sequence[int]:
    texts = swept.pop(SEED, None)
    if texts is None:
        return range(base.seed, base.seed + (count or 1))
    if count is not None:
        raise RecipeError(f"seed={','.join(texts)} beside --seeds {count}: give one of them", key=SEED)
    if not all(text.isdecimal() for text in texts):
        raise RecipeError(f"seed={','.join(texts)}: seeds are whole numbers of at least 0, as in seed=0,1", key=SEED)
    return tuple(map(int, texts))


def _runs(
    name: str, base: Recipe, title: str, fixed: Sequence[str], swept: Mapping[str, Sequence[str]], seeds: Sequence[int]
) -> dict[str, SweepRun]:
    """Return the runs by the digests of their recipes."""
    known, folder = dict[str, SweepRun](), Path(base.run.dir)
    short = [key.rpartition(".")[2] for key in swept]
    labels = [leaf if short.count(leaf) == 1 else key for key, leaf in zip(swept, short)]
    for values, seed in product(product(*swept.values()), seeds):
        words = [label + _label(value) for label, value in zip(labels, values)]
        named = "-".join(words)
        own = "-".join(
            [title, *([named if len(named) <= LONGEST else _digest(named)] if words else []), f"{SEED}{seed}"]
        )
        pairs = [f"{key}={value}" for key, value in zip(swept, values)]
        overrides = (*fixed, *pairs, f"{SEED}={seed}", f"run.name={own}", f"run.sweep={title}")
        run = SweepRun(folder / own, dict(zip(swept, values)), seed, overrides)
        recipe = load_recipe(name, overrides)
        if (other := known.setdefault(digest(recipe), run)) is not run:
            key = next((key for key in swept if other.values[key] != run.values[key]), next(iter(swept), SEED))
            texts = ",".join(swept.get(key, map(str, seeds)))
            raise RecipeError(f"{key}={texts}: two of the values ask for the same run; give each once", key=key)
        _check(recipe, run)
    return known


def _sweep_of(runs: Mapping[str, SweepRun], title: str, command: str) -> str:
    """Return the name of the sweep without a name of its own that has runs with the settings of these: an earlier
    version named it otherwise, or its command gave seeds or folders otherwise. ``title``: there is none.

    command: of these runs. RecipeError: a sweep over other keys has such a run.
    """
    folder, stem, others = next(iter(runs.values())).path.parent, title.rpartition("-")[0], dict[str, str]()
    if any((run.path / "run.json").exists() for run in runs.values()):
        return title
    for path, state in _of_sweeps(folder):
        sweep: str = state["sweep"]
        if sweep.startswith(f"{stem}-") and (key := _work_of(path, state, runs)) in runs:
            if path.name.removeprefix(sweep) == runs[key].name.removeprefix(title):
                return sweep
            others[sweep] = f"{path} of the sweep {sweep}, over other keys, has the settings of {runs[key].name}"
    for sweep, why in others.items():
        raise RecipeError(
            f"{why}: {command} run.name={sweep} goes on with that sweep, run.name=NAME begins another one",
            key="run.name",
        )
    return title


def _begun(name: str, runs: Mapping[str, SweepRun], title: str) -> Iterator[SweepRun]:
    """Yield the runs; one that is there for this sweep under another name keeps that: an earlier version, or a command
    with other swept keys, has begun it."""
    there = {key for key, run in runs.items() if (run.path / "run.json").exists()}
    names, moved = {run.name for run in runs.values()}, dict[str, Path]()
    folder = next(iter(runs.values())).path.parent
    for path, state in _of_sweeps(folder) if len(there) < len(runs) else ():
        if state["sweep"] == title and path.name not in names and (key := _work_of(path, state, runs)) in runs:
            moved[key] = path
    for key, run in runs.items():
        if key in moved and key not in there:
            run = replace(run, path=moved[key], overrides=(*run.overrides, f"run.name={moved[key].name}"))
            _check(load_recipe(name, run.overrides), run)
        yield run


def _of_sweeps(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield folders of runs that are of a sweep, with their states."""
    for path in sorted(file.parent for file in folder.glob("*/run.json")):
        with suppress(DataError):  # it is damaged, and no run of this sweep has its name
            state = read_state(path)
            if isinstance(state.get("sweep"), str) and state["sweep"]:
                yield path, state


def _work_of(path: Path, state: Mapping[str, Any], known: Collection[str]) -> str:
    """Return the digest of a run's recipe as this version has it; "": it cannot read that."""
    if (found := state["digest"].partition("-")[0]) in known:
        return str(found)
    try:
        return digest(load_recipe(str(path / "recipe.toml"), ["plugins=[]"]))
    except RecipeError:  # written by a version with other keys
        return ""


def _label(value: str) -> str:
    """Return the text of a value as it can stand in a folder's name; another value has another one."""
    text = value.strip("\"'")
    plain = re.sub(r"[^A-Za-z0-9.+_-]+", "_", text)
    return plain if plain == text and len(plain) <= LABEL else f"{plain[:LABEL].strip('_')}_{_digest(value)}"


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=3).hexdigest()


def _check(recipe: Recipe, run: SweepRun) -> None:
    """Raise RecipeError if the folder of a run has another one. Data and code that a recipe names are checked by the
    command of a run that is not finished. DataError: the data are needed, and cannot be read."""
    if not (run.path / "run.json").exists():
        return
    state = read_state(run.path)
    inputs = state.get("inputs", {})
    changes = Identity(recipe, inputs).changes(run.path, state)
    if "data.holdout" in changes:  # a share that nobody has set fits the data
        changes = Identity(with_holdout(recipe, recipe_prompts(recipe)), inputs).changes(run.path, state)
    if changes:
        key, why = next(iter(changes.items()))
        raise RecipeError(f"{run.path} is another run: {why}; choose another name: run.name=NAME", key=key)
    if state["state"] == "running":
        where = f"process {state['pid']} of {state['host']}"
        raise DataError(f"{run.path} is being trained by {where}; wait for its end", key="run.json.state")


def finished(run: SweepRun) -> bool:
    """Return True if a run needs nothing more."""
    return (run.path / "run.json").exists() and read_state(run.path)["state"] == "finished"


def shares(parallel: int) -> list[list[int]]:
    """Return the cores of each run side by side: [] for one alone, which takes what there is. RecipeError: there are
    fewer."""
    if parallel > cores():
        message = f"--parallel {parallel}: this machine has {cores()} cores for this process; use at most that many"
        raise RecipeError(message, key="--parallel")
    if parallel == 1 or not hasattr(os, "sched_getaffinity"):
        return [[]] * parallel
    able = sorted(os.sched_getaffinity(0))
    return [able[slot::parallel] for slot in range(parallel)]


def devices(parallel: int, device: str) -> list[str | None]:
    """Return ``CUDA_VISIBLE_DEVICES`` of each run side by side; None: as it is."""
    if parallel == 1 or device == "cpu":
        return [None] * parallel
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = visible.split(",") if visible else [str(i) for i in range(there)]
    return [",".join(named[slot::parallel]) or (named[slot % there] if there else None) for slot in range(parallel)]


class SweepProcesses:
    """Processes of the runs of a sweep, ``parallel`` side by side, each with its share of cores and GPUs."""

    def __init__(self, sweep: Sweep, parallel: int, program: str) -> None:
        """program: "module:function" of the command line. RecipeError: the machine has too few cores."""
        self._sweep, self._program = sweep, program
        self._slots: SimpleQueue[tuple[list[int], str | None]] = SimpleQueue()
        device = load_recipe(sweep.recipe, sweep.runs[0].overrides).train.device
        for slot in zip(shares(parallel), devices(parallel, device)):
            self._slots.put(slot)
        self._parallel = parallel
        self._children: set[Child] = set()
        self._asked = 0

    def train(self, ended: Callable[[SweepRun, str], None]) -> None:
        """Train all runs that are not finished, in order. ended: called with each and what went wrong ("": nothing), in
        this thread. Interrupted: a signal came, which the runs got too."""
        left = [run for run in self._sweep.runs if not finished(run)]
        with self._passing_on(), ThreadPoolExecutor(self._parallel, "sweep") as pool:
            jobs = {pool.submit(self._run, run): run for run in left}
            for job in as_completed(jobs):
                if not self._asked:
                    ended(jobs[job], job.result())
        if self._asked:
            raise Interrupted(
                f"a sweep ended by {signal.Signals(self._asked).name}", key=signal.Signals(self._asked).name
            )

    def _run(self, run: SweepRun) -> str:
        if self._asked:
            return ""
        slot, output = self._slots.get(), OutputFile()
        share, visible = slot
        start = [os.getpid(), self._program, share, sys.path, ["tilth", "run", self._sweep.recipe, *run.overrides]]
        more = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        command = [sys.executable, "-P", "-c", BOOT, json.dumps(start)]
        child = Child(command, os.environ | more, stdout=output, stderr=output)
        child.tell(b"")
        self._children.add(child)
        if self._asked:  # it came between
            os.kill(child.pid, self._asked)
        try:
            code = child.process.wait()
        finally:
            child.kill()  # what it has left behind
            self._children.discard(child)
            self._slots.put(slot)
        return "" if code == 0 and finished(run) else output.tail(1) or how_ended(code)

    @contextmanager
    def _passing_on(self) -> Iterator[None]:
        def pass_on(number: int, frame: FrameType | None) -> None:
            self._asked = number
            for child in [*self._children]:
                if child.alive():
                    os.kill(child.pid, number)

        with handling(dict.fromkeys([signal.SIGINT, *ends()], pass_on)):
            yield


def value_of(key: str, text: str) -> object:
    """Return a swept value as JSON has it."""
    found, declared = _toml(text), find(key)
    return text if found is None or (declared is not None and declared.field.annotation is str) else found
