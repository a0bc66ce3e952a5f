"""Replay a step of a stored run on groups of its workers: did a device or the data make what was wrong?

A replay is a resume in a copy of the run's folder, from the newest checkpoint before the step to the end of the step.
It is deterministic, so all groups of equal layout must end with the same bits. The stored run is not changed.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tilth.analysis.events import parse_ranks
from tilth.api import run_recipe
from tilth.checkpoint import complete
from tilth.checkpoint.directory import step_of
from tilth.checkpoint.storage import is_url
from tilth.cli.main import GuardReplayCommand
from tilth.config.axes import AXES, MODEL, over
from tilth.config.checks import pools
from tilth.config.load import from_dict
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, NonFiniteError, TilthError
from tilth.flows.callbacks import Callback
from tilth.guard.verdict import Verdict
from tilth.launch.life import Until
from tilth.launch.loader_plans import LOADERS
from tilth.runs.costs import COSTS, OFFLOAD
from tilth.runs.models import MODEL_FOLDER
from tilth.runs.readers import checkpoints_of, read_metrics, read_state
from tilth.runs.signals import Interrupted
from tilth.runs.trust import load_recipe_of
from tilth_studies.dual_phase import DualPhase, GroupResult, judge

TIMES = (
    "seconds", "attempt", "tokens_per_second/", "time/", "memory/", "mfu", "save/", "bytes/", "balance/idle",
    "loader/stall", "draft/", "kv_cache_usage/",
)  # fmt: skip
"""Beginnings of metrics that differ between equal runs; drafts follow a history that a resume begins anew."""
LAYOUTS = tuple(f"{role}.layout" for role in ("policy", "critic", "reference", "rollout"))
PLACES = tuple(f"data.{key}" for key in ("source", "mixture", "heldout", "template", "tokenizer"))
"""Keys that name files, which a replay finds where the run began; their content stays compared."""
CHANGED = ("run", "cluster", "guard", *LAYOUTS, *PLACES)
"""Keys that a replay changes."""
NAME = "replay"
Watch = Callable[[tuple[int, ...]], Sequence[Callback]]


@dataclass(frozen=True)
class Replay:
    """Result. verdict: None if nothing is wrong; recorded: True if the record came back, None if that was not tried."""

    step: int
    checkpoint: int
    """Step of the checkpoint that the replays began with."""
    ranks: tuple[int, ...]
    verdict: Verdict | None
    recorded: bool | None
    outcomes: Mapping[str, GroupResult] = field(default_factory=dict)
    """By phase and ranks of a group."""


def print_replay(options: GuardReplayCommand) -> None:
    """Print the verdict."""
    found = replay(options.run, options.step, parse_ranks(options.ranks) if options.ranks else ())
    if options.as_json:
        print(json.dumps(asdict(found), indent=1))
        return
    print("\n".join(_lines(found)))


def _lines(found: Replay) -> list[str]:
    kinds = list(dict.fromkeys(outcome.bits for outcome in found.outcomes.values()))
    lines = [f"step {found.step}, from the checkpoint of step {found.checkpoint}"]
    for title, outcome in found.outcomes.items():
        lines.append(f"  {title}: result {kinds.index(outcome.bits) + 1}{'' if outcome.finite else ', not finite'}")
    if found.recorded is not None:
        lines.append(f"the metrics of the run came {'back' if found.recorded else 'not back'}")
    if found.verdict is None:
        return [*lines, "all groups compute the same finite numbers: nothing is wrong"]
    return [*lines, f"{found.verdict.details['cause']}: {found.verdict.evidence}"]


def replay(run: Path, step: int, ranks: Sequence[int] = (), watch: Watch = lambda group: ()) -> Replay:
    """Replay a step of a run twice on each of these workers (none: all), in two groupings.

    watch: callbacks of the replay by a group of ranks. DataError: no such step, no checkpoint before it, or a run that
    cannot be replayed here; ArgumentError for ranks without groups.
    """
    recipe, before = _recipe(run), _checkpoint(run, step)
    workers = sum(pools(recipe).values())
    chosen = tuple(sorted(set(ranks))) or tuple(range(workers))
    if chosen[0] < 0 or chosen[-1] >= workers:
        raise DataError(f"--ranks {ranks}: this run has workers 0 to {workers - 1}", key="--ranks")
    plan = DualPhase.of(len(chosen), _least(recipe))
    found: dict[str, GroupResult] = {}

    def outcome(title: str, group: tuple[int, ...], made: Recipe) -> GroupResult:
        given = _again(run, made, before, step, group, watch(group))
        found[f"{title}: {', '.join(map(str, group))}"] = given
        return given

    small = shrunk(recipe, plan.size)
    phases = [
        [outcome(title, tuple(chosen[x] for x in group), small) for group in groups]
        for title, groups in (("first", plan.first()), ("second", plan.second()))
    ]
    recorded = None
    if len(chosen) == workers:
        recorded = outcome("all", chosen, shrunk(recipe, workers)).about.startswith(_record(run, step))
    if all(given.error for given in found.values()):
        raise DataError(f"{run} cannot be replayed: {next(iter(found.values())).about}", key="replay")
    return Replay(step, before, chosen, judge(plan, phases[0], phases[1], chosen, recorded), recorded, found)


def _recipe(run: Path) -> Recipe:
    """Return the recipe of a run. DataError for one that cannot be replayed, or for a folder that is no run."""
    read_state(run)
    recipe = load_recipe_of(run)
    if recipe.cluster.backend not in ("local", "inline"):
        raise DataError(
            f"cluster.backend={recipe.cluster.backend}: a replay chooses workers of this machine; only runs of local "
            "and inline can be replayed",
            key="cluster.backend",
        )
    if recipe.rollout.staleness:
        raise DataError(
            f"{run}: with rollout.staleness = {recipe.rollout.staleness} clocks have chosen what a step learned from; "
            "tilth run RECIPE --replay RUN repeats it by its log",
            key="rollout.staleness",
        )
    if recipe.rollout.speculate != "off" and not recipe.train.parity:
        raise DataError(
            f"{run}: with rollout.speculate = {recipe.rollout.speculate} earlier steps chose the shapes of passes, "
            "which round by them; only runs with train.parity = true, or without drafts, can be replayed",
            key="rollout.speculate",
        )
    if len(pools(recipe)) > 1:
        raise DataError(f"{run} has pools {', '.join(pools(recipe))}: a replay needs all in one", key="cluster.pools")
    if is_url(checkpoints_of(run)):
        raise DataError(
            f"the checkpoints of {run} are in {checkpoints_of(run)}: copy them first", key="run.checkpoints"
        )
    return recipe


def _checkpoint(run: Path, step: int) -> int:
    """Return the step of the newest checkpoint before a step. DataError names the nearest ones if there is none."""
    steps = [row["step"] for row in read_metrics(run)]
    if step not in steps:
        some = f"it has {steps[0]} to {steps[-1]}" if steps else "it has none"
        raise DataError(f"--step {step} is not a committed step of {run}; {some}", key="--step")
    kept = sorted(found for path in complete(checkpoints_of(run)) if (found := step_of(path)) is not None)
    before = [one for one in kept if one < step]
    if not before:
        near = f"the nearest are those of steps {', '.join(map(str, kept[:3]))}" if kept else "it has none at all"
        raise DataError(f"{run} has no checkpoint before step {step}; {near} (run.keep, run.save_every)", key="--step")
    return before[-1]


def _least(recipe: Recipe) -> int:
    """Return the number of workers that hold a model together: sizes of the axes that divide tokens, layers, experts.

    Axes that divide nothing but the storage of parameters (fsdp) can be of any size.
    """
    kept = _kept()
    given = [getattr(recipe, role).layout for role in ("policy", "critic", "reference", "rollout")]
    return math.lcm(*(math.prod(getattr(layout, axis) or 1 for axis in kept) for layout in given))


def _kept() -> set[str]:
    """Return the axes whose sizes a smaller layout keeps."""
    return set(over("tokens", *MODEL)) - set(over("rows"))


def shrunk(recipe: Recipe, workers: int) -> Recipe:
    """Return the recipe for so many workers: tensor parallelism and stages stay, ranks with other rows are fewer."""
    made: dict[str, Any] = recipe.dump()
    several = workers == sum(pools(recipe).values())
    made["cluster"] |= {"workers": workers, "pools": {}}
    made["guard"] |= {"restarts": 0}
    for role in ("policy", "critic", "reference", "rollout"):
        layout = made[role]["layout"]
        if not several:
            layout |= {axis: 0 if axis == "dp" else 1 for axis in AXES if axis not in _kept()}
    return from_dict(made)


def _again(
    run: Path, recipe: Recipe, before: int, step: int, group: tuple[int, ...], callbacks: Sequence[Callback]
) -> GroupResult:
    """Resume a copy of the run, and stop after the step."""
    with tempfile.TemporaryDirectory(prefix="tilth-replay-") as root:
        made, problem = recipe.dump(), None
        made["run"] |= {"dir": root, "name": NAME, "checkpoints": "", "track": ()}
        copy = _copied(run, Path(root) / NAME, before)
        with _only(group):
            try:
                run_recipe(from_dict(made), name=NAME, callbacks=[Until(step), *callbacks], allow=CHANGED)
            except Interrupted:
                pass
            except NonFiniteError as error:
                problem = GroupResult(type(error).__name__, False, _first_line(error))
            except TilthError as error:
                problem = GroupResult(f"{type(error).__name__} [{error.key}]", about=_first_line(error), error=True)
        return problem or _outcome(copy, step)


def _first_line(error: TilthError) -> str:
    return str(error).partition("\n")[0]


def _copied(run: Path, to: Path, step: int) -> Path:
    """Make an unfinished run of another one as it was after this step."""
    name = next(Path(str(path)) for path in complete(checkpoints_of(run)) if step_of(path) == step)
    shutil.copytree(run / MODEL_FOLDER, to / MODEL_FOLDER)
    shutil.copytree(name, to / "checkpoints" / name.name, copy_function=_linked)
    for file in ("recipe.toml", "metrics.jsonl", "scores.jsonl", COSTS, OFFLOAD, LOADERS):
        with suppress(FileNotFoundError):
            shutil.copy(run / file, to / file)
    state = {**read_state(run), "state": "interrupted", "checkpoints": "", "saved": step, "best": None, "warnings": []}
    (to / "run.json").write_text(json.dumps(state))
    return to


def _linked(source: str, target: str) -> None:
    """Link a file, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def _only(group: Sequence[int]) -> Iterator[None]:
    """Show the processes of the block the devices of these workers only."""
    if not torch.cuda.is_available():
        yield
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = before.split(",") if before else [str(i) for i in range(torch.cuda.device_count())]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(named[rank % len(named)] for rank in group)
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def _outcome(copy: Path, step: int) -> GroupResult:
    """Return what a replay came to. about: begins with the metrics of the step, as ``_record`` has them."""
    record = _record(copy, step)
    digest = hashlib.blake2b(record.encode(), digest_size=8)
    newest = next(Path(str(path)) for path in complete(checkpoints_of(copy)) if step_of(path) == step)
    for file in sorted(newest.glob("*.safetensors")):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    found = json.loads(record)
    said = "; ".join(one["text"] for one in read_state(copy).get("warnings", []) if one["step"] == step)
    finite = not found.get("steps/not_finite") and all(
        math.isfinite(value) for value in found.values() if isinstance(value, float)
    )
    return GroupResult(digest.hexdigest(), finite, f"{record} {said}".strip())


def _record(run: Path, step: int) -> str:
    """Return the metrics of a step without times, as JSON."""
    (row,) = [row for row in read_metrics(run) if row["step"] == step]
    return json.dumps({k: v for k, v in row.items() if not k.startswith(TIMES)}, sort_keys=True)
