"""Check that a plan fits into memory: refuse impossible ones, warn of tight ones, and suggest keys."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilth.config.axes import MODEL, over
from tilth.config.checks import pool_of, pools
from tilth.config.schema import LayoutConfig, Recipe
from tilth.core.memory import Room
from tilth.plan.layout import RankPlan
from tilth.plan.memory import BASE, micro_tokens
from tilth.plan.working import on_gpu

SCORER = 90_000_000
"""Bytes of a reward process before the function's own (measured)."""
ENVIRONMENTS, EPISODE = 40_000_000, 60_000
"""Bytes of a process of environments, and of each episode in it before the environment's own (measured)."""
FEWEST_ROWS = 8


@dataclass(frozen=True)
class MemoryUse:
    """Predicted bytes in the memory of the machine or of one GPU."""

    what: str
    needed: int
    certain: int
    """Bytes of weights, gradients and optimizer states, independent of the data."""
    room: Room

    @property
    def impossible(self) -> bool:
        """True if the certain part alone exceeds the total."""
        return self.certain > self.room.total

    @property
    def tight(self) -> bool:
        """True if the prediction exceeds the free memory."""
        return self.needed > self.room.free


def places(
    recipe: Recipe, workers: Sequence[RankPlan], host: Room | None, gpus: Sequence[Room] = ()
) -> list[MemoryUse]:
    """Return the use of the host memory that the workers share, and of each GPU, which has one worker.

    host: None if the workers' machines are unknown.
    """
    gpu = on_gpu(recipe)
    found = [
        MemoryUse(f"memory of GPU {i}", worker.memory.on_gpu(), worker.memory.certain(gpu=True), room)
        for i, (worker, room) in enumerate(zip(workers, gpus))
    ]
    if host is None:
        return found
    needed = beside(recipe) + sum(w.memory.peak - (w.memory.on_gpu() if gpu else 0) for w in workers)
    certain = 0 if gpu else sum(w.memory.certain(gpu=False) for w in workers)
    return [MemoryUse("memory", needed, certain, host), *found]


def beside(recipe: Recipe) -> int:
    """Return bytes of the controller, and of the processes of rewards or, beside each engine, of environments."""
    r, controller = recipe.rollout, BASE * (recipe.cluster.backend != "inline")
    if not r.environment:
        return controller + SCORER * recipe.reward.workers * recipe.flow_spec.samples
    engines = pools(recipe)[pool_of(recipe, "rollout")]  # one a worker
    episodes = max(r.prompts * r.group * recipe.flow_spec.samples, recipe.run.eval_prompts)
    return controller + engines * r.environments * ENVIRONMENTS + episodes * EPISODE


def verdict(found: Sequence[MemoryUse], remedy: Callable[[MemoryUse], str]) -> tuple[str, list[str]]:
    """Return the reason to refuse the run, or "", and warnings otherwise. remedy: suggests keys."""
    for place in found:
        if place.impossible:
            why = f"weights, gradients and optimizer states need {_size(place.certain)} of {place.what}"
            return f"{why}, and {place.room.where} has {_size(place.room.total)}: {remedy(place)}", []
    return "", [
        f"{place.what} may run out: {_size(place.needed)} predicted, and {place.room.where} has "
        f"{_size(place.room.free)} free of {_size(place.room.total)}; {remedy(place)}"
        for place in found
        if place.tight
    ]


def remedies(recipe: Recipe, longest: int, place: MemoryUse, again: Callable[[Recipe], Sequence[MemoryUse]]) -> str:
    """Return keys with which the run would fit by prediction, or else those that come nearest."""
    tried = []
    for steps in _keys(recipe, longest):
        for words, other in steps:
            needed = next(p.needed for p in again(other) if p.what == place.what)
            tried.append((needed, words))
            if needed <= place.room.free:
                break
    fits = [f"{words} would need {_size(n)}" for n, words in tried if n <= place.room.free]
    if fits and not place.impossible:
        return " or ".join(fits[:3])
    less = sorted((n, words) for n, words in tried if n < 0.95 * place.needed)[:2]
    near = " or ".join(f"{words} would need {_size(n)}" for n, words in less)
    model = "a smaller [model], or more machines (cluster.workers with policy.layout.fsdp)"
    return f"{near}; to fit takes {model}" if near else f"to fit takes {model}"


def _keys(recipe: Recipe, longest: int) -> Iterator[list[tuple[str, Recipe]]]:
    """Yield lists of changes, small to large, that do not change results."""
    tokens, rows, steps = micro_tokens(recipe, longest), recipe.rollout.max_rows, list[tuple[str, Recipe]]()
    while tokens > longest:
        tokens = max(longest, tokens // 2)
        steps.append(_with(recipe, "train", micro_tokens=tokens))
    yield steps
    if not recipe.train.checkpointing:
        yield [_with(recipe, "train", checkpointing=True)]
    rows = min(rows, max(recipe.rollout.prompts * recipe.rollout.group, recipe.run.eval_prompts))
    yield [
        _with(recipe, "rollout", max_rows=n)
        for n in (rows >> i for i in range(1, rows.bit_length()))
        if n >= FEWEST_ROWS
    ]
    layout = recipe.policy.layout
    if recipe.cluster.workers > 1 and all(getattr(layout, n) == 1 for n in over(*MODEL)) and not recipe.cluster.pools:
        split, words = LayoutConfig(fsdp=recipe.cluster.workers, zero=max(2, layout.zero)), "policy.layout.zero=2"
        words = " ".join([f"policy.layout.fsdp={recipe.cluster.workers}", *([words] if layout.zero == 1 else [])])
        yield [(words, recipe.replaced("policy", layout=split))]


def _with(recipe: Recipe, section: str, **values: int | bool) -> tuple[str, Recipe]:
    words = " ".join(f"{section}.{key}={str(value).lower()}" for key, value in values.items())
    return words, recipe.replaced(section, **values)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
