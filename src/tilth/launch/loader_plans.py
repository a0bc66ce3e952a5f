"""Plans of the processes that load sources: the first one, and others as costs are measured and weights change.

The run's ``loaders.jsonl`` has each plan, a line with the first step that follows it, before loaders do, so that a
resume begins with the newest. Plans decide who makes a sample: which samples a step has does not depend on them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field, Strict, TypeAdapter, ValidationError

from tilth.cluster.backends.capacity import PER_CORE, cores
from tilth.cluster.controller.group import WorkerGroup
from tilth.config.schema import DataConfig, Recipe
from tilth.core.errors import DataError, RecipeError, StorageError
from tilth.core.lines import read_lines
from tilth.core.random import Stream, stream
from tilth.data.mixture import Mixture
from tilth.data.prompts import PromptSet
from tilth.data.records import Joined, parts_of
from tilth.data.template import Tools, template_names
from tilth.data.tokenizer import Tokenizer
from tilth.flows.callbacks import Callback, RunView
from tilth.launch.build import RunParts
from tilth.plan.loaders import Shares, place_loaders, plan_loaders
from tilth.roles.source_loader import LoaderSettings
from tilth.roles.source_loaders import SourceLoaders
from tilth.runs.files import append_line
from tilth.runs.state import is_supervised

LOADERS = "loaders.jsonl"
HELD_OUT = "data.heldout"
"""Name of the held-out source among the sources of loaders; no source of a mixture can have it."""
EVERY = 10
"""Steps between two looks at the plan."""
AHEAD = 50
"""Steps that a plan looks ahead: longer than processes take to start."""


class LoaderPlan(NamedTuple):
    """Plan that holds from a step on, made for at most this many processes. shares: of sources, by process
    (``plan.loaders.place_loaders``)."""

    step: Annotated[int, Strict()]
    most: Annotated[int, Strict()]
    shares: list[dict[str, Annotated[float, Strict(), Field(gt=0, le=1)]]]


def record_plan(run: Path, plan: LoaderPlan) -> None:
    """Add a plan durably, before loaders follow it. StorageError."""
    append_line(run / LOADERS, plan._asdict(), sync=True)


def read_plans(run: Path) -> list[LoaderPlan]:
    """Return the plans of a run, oldest first; none if it has no loaders. DataError for a damaged record."""
    found, kind = list[LoaderPlan](), TypeAdapter(LoaderPlan)
    for number, line in enumerate(read_lines(run / LOADERS), 1):
        try:
            found.append(kind.validate_python(line))
        except ValidationError:
            message = f"{run / LOADERS} line {number} has no step, number of processes and shares of sources for each"
            raise DataError(
                f"{message}; without the file, the run begins with a new plan", key=f"{LOADERS}.{number}"
            ) from None
    return found


def processes(data: DataConfig, cores: int) -> int:
    """Return the number of loader processes on a machine with this many cores. Raises RecipeError if they are too many
    for it."""
    found = cores if data.loaders == "auto" else data.loaders
    if found > (most := PER_CORE * cores):
        why = f"data.loaders = {found}: this machine has {cores} CPU cores, enough for at most {most} loaders"
        raise RecipeError(f"{why}; use data.loaders=auto, which is {cores} here", key="data.loaders.cores")
    return found


def source_loaders(recipe: Recipe, prompts: PromptSet, tokenizer: Tokenizer, tools: Tools) -> SourceLoaders | None:
    """Start the loaders of a recipe; None if it has none."""
    data = recipe.data
    if not data.loaders:
        return None
    sources = {part.name: source for part, source in zip(data.sources, parts_of(prompts.source))}
    if isinstance(prompts.source, Joined) and prompts.source.held:
        sources[HELD_OUT] = prompts.source.parts[-1]
    settings = LoaderSettings(template_names(data), tokenizer, recipe.model.context, tools, recipe.plugins)
    return SourceLoaders(sources, settings, first_plan(data, processes(data, cores())), shadows=data.shadows)


def first_plan(data: DataConfig, most: int) -> list[dict[str, float]]:
    """Return the plan of at most this many processes for sources whose samples cost the same."""
    weights = {part.name: part.weight * part.schedule.get("0", 1.0) for part in data.sources}
    counts = plan_loaders(dict.fromkeys(weights, 1.0), [weights], most, {}, cap=most)
    return place_loaders(counts, weights, most)


def follow_recorded(loader: WorkerGroup, data: DataConfig, run: Path) -> bool:
    """Have the loaders of a role that was made follow the newest plan on record; False if there is none for them."""
    found = read_plans(run)
    if not found or found[-1].most != processes(data, loader.loading()["cores"]):
        return False
    if set().union(*found[-1].shares) - {part.name for part in data.sources}:  # the mixture has changed, as allowed
        return False
    loader.follow(found[-1].shares)
    return True


class LoaderPlans(Callback):
    """Plans the loaders of a run that has some: anew as it goes on, if it draws from several sources."""

    def __init__(self, parts: RunParts) -> None:
        self._recipe, self._train, self._loader = parts.recipe, parts.train, parts.roles["loader"]

    def on_run_start(self, run: RunView) -> None:
        """Follow the plan on record, or record the one that the loaders began with."""
        data, path = self._recipe.data, run.directory.path
        if not follow_recorded(self._loader, data, path):
            known = self._loader.loading()
            record_plan(path, LoaderPlan(run.state.step + 1, processes(data, known["cores"]), known["plan"]))

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Follow another plan if one pays."""
        if not isinstance(self._train, Mixture) or step % EVERY:
            return
        before = read_plans(run.directory.path)[-1]
        known, weights = self._loader.loading(), self._ahead(run.state.phase, run.state.drawn)
        plan = next_plan(known["costs"], weights, before.most, before.shares)
        if plan == before.shares:
            return
        try:
            record_plan(run.directory.path, LoaderPlan(step + 1, before.most, plan))
        except StorageError as trouble:  # a plan that is not on record is not followed; a later step tries again
            run.say(f"another plan of loaders is not followed yet: {trouble}")
            return
        self._loader.follow(plan)
        run.say(f"from step {step + 1} on {len(plan)} processes load sources by another plan; {LOADERS} has it")

    def _ahead(self, phase: str, drawn: Mapping[str, int]) -> list[dict[str, int]]:
        """Return the samples of each source in the next steps, up to the end of the data."""
        name, each = "prompts", self._recipe.rollout.prompts
        if is_supervised(phase):
            name = "pairs" if self._recipe.flow_spec.learns == "pairs" else "examples"
            each = self._recipe.supervised.batch
        assert isinstance(self._train, Mixture)
        return samples_ahead(self._train, stream(self._recipe.seed, name), drawn.get(name, 0), each)


def samples_ahead(train: Mixture, order: Stream, start: int, each: int) -> list[dict[str, int]]:
    """Return the samples of each source in the steps from a position on, fewer steps if the data ends."""
    found: list[dict[str, int]] = []
    try:
        for number in range(AHEAD):
            found.append(train.counts(train.take(order, start + number * each, each)))
    except DataError:  # which the step that draws it raises
        pass
    return found


def next_plan(
    costs: Mapping[str, float], weights: Sequence[Mapping[str, int]], most: int, before: Sequence[Shares]
) -> list[dict[str, float]]:
    """Return the plan of the steps to come, or the one before if it is as good.

    costs: processor seconds of a sample of each source that is known; the others are taken to cost their mean.
    """
    if not costs or not weights:
        return [dict(shares) for shares in before]
    mean = sum(costs.values()) / len(costs)
    each = {name: costs.get(name, mean) for own in weights for name in own}
    now = {name: sum(name in shares for shares in before) for name in each}
    counts = plan_loaders(each, weights, most, now, cap=most)
    work = {name: each[name] * max(own.get(name, 0) for own in weights) for name in counts}
    return place_loaders(counts, work, most, before)
