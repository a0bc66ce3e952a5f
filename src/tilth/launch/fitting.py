"""Compare the memory of this machine with the plan of a run before anything is allocated."""

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
    """Return the recipe with the device type that ``train.device=auto`` resolves to."""
    if recipe.train.device != "auto":
        return recipe
    return recipe.replaced("train", device="cuda" if torch.cuda.is_available() else "cpu")


def check_fits(recipe: Recipe, planned: Planner, host: Room | None, gpus: Sequence[Room] = ()) -> list[str]:
    """Return warnings for a run that may not fit, with keys that would help.

    RecipeError if weights, gradients and optimizer states alone need more memory than there is.
    """
    plan = planned(recipe)

    def workers(other: Recipe) -> Sequence[RankPlan]:
        return (plan if other is recipe else planned(other)).workers

    refused, warnings = judged(recipe, plan.longest, workers, host, gpus)
    if refused:
        raise RecipeError(refused, key="memory")
    return warnings


def judged(
    recipe: Recipe,
    longest: int,
    workers: Callable[[Recipe], Sequence[RankPlan]],
    host: Room | None,
    gpus: Sequence[Room],
) -> tuple[str, list[str]]:
    """Return why a recipe cannot run here, or "", and warnings; workers: predicts the ranks of a recipe."""

    def uses(other: Recipe) -> list[MemoryUse]:
        return places(other, workers(other), host, gpus)

    return verdict(uses(recipe), lambda place: remedies(recipe, longest, place, uses))


def rooms(recipe: Recipe) -> tuple[Room | None, list[Room]]:
    """Return the memory of this machine, None if the workers are on others, and of each worker's GPU.

    Memory of this process and its children counts as free, since the plan includes it.
    """
    elsewhere = recipe.cluster.backend == "ray" and bool(recipe.cluster.address)
    host = host_memory()
    return None if elsewhere else host._replace(free=min(host.total, host.free + _ours())), _gpus(recipe)


def _ours() -> int:
    """Return the private memory of this process and its children in bytes."""
    me, found = psutil.Process(), 0
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended
            info = process.memory_info()
            found += info.rss - getattr(info, "shared", 0)
    return found


def _gpus(recipe: Recipe) -> list[Room]:
    """Return free memory of the GPU of an inline run, else total memory of all GPUs, which opens no CUDA context."""
    if not recipe.train.device.startswith("cuda") or not torch.cuda.is_available():
        return []
    chosen = torch.device(recipe.train.device).index
    if recipe.cluster.backend == "inline":
        free, total = torch.cuda.mem_get_info(chosen or 0)
        return [Room(total, free, f"GPU {chosen or 0}")]
    every = range(torch.cuda.device_count()) if chosen is None else [chosen]
    sizes = [(i, torch.cuda.get_device_properties(i).total_memory) for i in every]
    return [Room(size, size, f"GPU {i}") for i, size in sizes]
