"""Shrink a run: the largest layout for the workers that are left, where a lost one cannot be replaced.

Model axes (pp, ep, cp, tp) stay, since fewer ranks along them would each need more memory. Rows are divided over fewer
ranks (dp, fsdp), so a rank has more rows, and steps have the batch, the data and the order that they had.
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

ROWS = tuple(axis for axis in over("rows") if axis not in over("experts"))
"""Axes that shrink: of replicas, and of the ranks that shard one's parameters."""
_REPLICAS, _SHARDS = ROWS


def smaller(run: Path, recipe: Recipe, lost: Collection[int]) -> tuple[list[str], dict[str, str]]:
    """Return overrides for the largest layout without these ranks, and key -> message; ([], {}) if none works."""
    before, left = pools(recipe), _left(recipe, lost)
    changed = [pool for pool in before if left[pool] < before[pool]]
    while changed and all(left[pool] for pool in changed):
        if overrides := _overrides(recipe, left, changed):
            try:
                after = load_recipe(str(run / "recipe.toml"), overrides)
            except RecipeError:  # a layout that another check refuses
                overrides = []
            else:
                return overrides, all_differences(recipe, after)
        largest = max(changed, key=lambda pool: left[pool])
        left[largest] -= 1
    return [], {}


def _left(recipe: Recipe, lost: Collection[int]) -> dict[str, int]:
    """Return pool -> workers that are left."""
    found = [pool for pool, workers in pools(recipe).items() for _ in range(workers)]
    gone = Counter(found[rank] for rank in lost)
    return {pool: workers - gone[pool] for pool, workers in pools(recipe).items()}


def _overrides(recipe: Recipe, left: Mapping[str, int], changed: Collection[str]) -> list[str]:
    """Return overrides for these workers; [] if a role's model axes do not fit them."""
    first, found = next(iter(left)), dict[str, str]()
    for spec in roles_of(recipe).values():
        section = spec.section(recipe) if spec.section else spec.key
        placed = recipe.section(section)
        pool = placed.pool or first if hasattr(placed, "pool") else first
        if spec.mesh not in ("layout", "engines") or pool not in changed:
            continue
        sizes = _fit(placed.layout, pools(recipe)[pool], left[pool])
        if sizes is None:
            return []
        found |= {f"{section}.layout.{axis}": f"{size}" for axis, size in sizes.items()}
    key, value = ("cluster.pools", dict(left)) if recipe.cluster.pools else ("cluster.workers", left[first])
    total = ["cluster.workers=1"] if recipe.cluster.pools else []  # else their sum, which is another now
    return [f"{key}={dump_value(value)}", *total, *(f"{key}={value}" for key, value in found.items())]


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
