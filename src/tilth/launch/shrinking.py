"""Shrink a run: the largest layout for the workers that are left, where a lost one cannot be replaced.

Model axes (pp, ep, hdp, cp, tp) stay, since fewer ranks along them would each need more memory. Rows are divided over
fewer ranks (dp, fsdp), so a rank has more rows, and steps have the batch, the data and the order that they had.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from tilth.config.axes import over
from tilth.config.checks import pools
from tilth.config.load import all_differences, dump_value, load_recipe
from tilth.config.roles import roles_of
from tilth.config.schema import LayoutConfig, Recipe
from tilth.core.errors import RecipeError

ROWS = over("rows", without=("experts", "tokens"))
"""Axes that shrink: of replicas, and of the ranks that shard one's parameters."""
_REPLICAS, _SHARDS = ROWS


def smaller(run: Path, recipe: Recipe, lost: Collection[int]) -> tuple[list[str], dict[str, str], list[str]]:
    """Return overrides for the largest layout without these ranks, key -> message, and the overrides that lead back;
    all empty if none works."""
    before, left = pools(recipe), _left(recipe, lost)
    changed = [pool for pool in before if left[pool] < before[pool]]
    while changed and all(left[pool] for pool in changed):
        overrides, back = _overrides(recipe, left, changed)
        if overrides:
            try:
                after = load_recipe(str(run / "recipe.toml"), overrides)
            except RecipeError:  # a layout that another check refuses
                overrides = []
            else:
                return overrides, all_differences(recipe, after), back
        largest = max(changed, key=lambda pool: left[pool])
        left[largest] -= 1
    return [], {}, []


def _left(recipe: Recipe, lost: Collection[int]) -> dict[str, int]:
    """Return pool -> workers that are left."""
    found = [pool for pool, workers in pools(recipe).items() for _ in range(workers)]
    gone = Counter(found[rank] for rank in lost)
    return {pool: workers - gone[pool] for pool, workers in pools(recipe).items()}


def _overrides(recipe: Recipe, left: Mapping[str, int], changed: Collection[str]) -> tuple[list[str], list[str]]:
    """Return overrides for these workers, and those that lead back; none if a role's model axes do not fit them."""
    first, found, before = next(iter(left)), dict[str, int](), dict[str, int]()
    for spec in roles_of(recipe).values():
        section = spec.section(recipe) if spec.section else spec.key
        placed = recipe.section(section)
        pool = placed.pool or first if hasattr(placed, "pool") else first
        if spec.mesh not in ("layout", "engines") or pool not in changed:
            continue
        sizes = _fit(placed.layout, pools(recipe)[pool], left[pool])
        if sizes is None:
            return [], []
        found |= {f"{section}.layout.{axis}": size for axis, size in sizes.items()}
        before |= {f"{section}.layout.{axis}": getattr(placed.layout, axis) for axis in sizes}
    return [*_workers(recipe, left), *_words(found)], [*_workers(recipe, pools(recipe)), *_words(before)]


def _words(sizes: Mapping[str, int]) -> list[str]:
    return [f"{key}={size}" for key, size in sizes.items()]


def _workers(recipe: Recipe, of: Mapping[str, int]) -> list[str]:
    """Return overrides for pools of these workers."""
    if not recipe.cluster.pools:
        return [f"cluster.workers={next(iter(of.values()))}"]
    return [f"cluster.pools={dump_value(dict(of))}", "cluster.workers=1"]  # else their former sum


def _fit(layout: LayoutConfig, before: int, workers: int) -> dict[str, int] | None:
    """Return the sizes of ``ROWS`` that differ over fewer workers; None if the other axes do not fit them."""
    sizes = layout.sizes(before)
    model = math.prod(size for axis, size in sizes.items() if axis not in ROWS)
    if workers % model:
        return None
    rows = workers // model
    wanted = sizes[_SHARDS]
    shards = wanted if rows % wanted == 0 else rows if wanted > 1 else 1
    found = {_REPLICAS: rows // shards if getattr(layout, _REPLICAS) else 0, _SHARDS: shards}
    return {axis: size for axis, size in found.items() if size != getattr(layout, axis)}
