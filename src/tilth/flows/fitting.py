"""What this machine has for a run, compared with what its plan says, before anything of it is allocated."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil
import torch

from tilth.config.schema import Recipe
from tilth.core.errors import RecipeError
from tilth.core.memory import Room, host_memory
from tilth.plan.fit import MemoryUse, places, remedies, verdict
from tilth.plan.layout import RankPlan
from tilth.plan.steps import RunPlan

Planner = Callable[[Recipe], RunPlan]


def resolved(recipe: Recipe) -> Recipe:
    """With the kind of device that ``train.device=auto`` finds here."""
    if recipe.train.device != "auto":
        return recipe
    return recipe.replaced("train", device="cuda" if torch.cuda.is_available() else "cpu")


def check_fits(recipe: Recipe, planned: Planner, host: Room | None, gpus: Sequence[Room] = ()) -> list[str]:
    """What is to be said of a run that may not fit. RecipeError for one whose weights, gradients and optimizer states
    alone are more than there is. Both with keys that would help, by prediction."""
    plan = planned(recipe)
    refused, told = judged(recipe, plan.longest, lambda other: planned(other).workers, host, gpus)
    if refused:
        raise RecipeError(refused, key="memory")
    return told


def judged(
    recipe: Recipe,
    longest: int,
    workers: Callable[[Recipe], Sequence[RankPlan]],
    host: Room | None,
    gpus: Sequence[Room],
) -> tuple[str, list[str]]:
    """Why a recipe cannot run here, or "", and where its memory may run out. workers: of a recipe, as predicted."""

    def again(other: Recipe) -> list[MemoryUse]:
        return places(other, workers(other), host, gpus)

    return verdict(again(recipe), lambda place: remedies(recipe, longest, place, again))


def rooms(recipe: Recipe) -> tuple[Room | None, list[Room]]:
    """Of the machine that all workers share, None where they are on others, and of each worker's GPU. What this process
    and its children hold already counts as free: the plan has it."""
    elsewhere = recipe.cluster.backend == "ray" and bool(recipe.cluster.address)
    host = host_memory()
    return None if elsewhere else host._replace(free=min(host.total, host.free + _ours())), _gpus(recipe)


def _ours() -> int:
    """Private memory of this process and of what it has started."""
    me, found = psutil.Process(), 0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended meanwhile
            info = process.memory_info()
            found += info.rss - getattr(info, "shared", 0)
    return found


def _gpus(recipe: Recipe) -> list[Room]:
    """Inline this process asks the device what is free; elsewhere it takes no context on the workers' devices, and what
    they have at all must do."""
    if not recipe.train.device.startswith("cuda") or not torch.cuda.is_available():
        return []
    chosen = torch.device(recipe.train.device).index
    if recipe.cluster.backend == "inline":
        free, total = torch.cuda.mem_get_info(chosen or 0)
        return [Room(total, free, f"GPU {chosen or 0}")]
    every = range(torch.cuda.device_count()) if chosen is None else [chosen]
    sizes = [(i, torch.cuda.get_device_properties(i).total_memory) for i in every]
    return [Room(size, size, f"GPU {i}") for i, size in sizes]
