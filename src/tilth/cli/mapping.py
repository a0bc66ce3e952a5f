"""``tilth layout RECIPE --search``: pools and layouts with the shortest predicted step, beside the runner-up."""

import json
from typing import Any

import typer
from rich.table import Table

from tilth.cli.tables import WIDTH, new_table
from tilth.cli.tables import show as show_parts
from tilth.config.axes import AXES
from tilth.config.roles import roles_of
from tilth.config.schema import LayoutConfig, Recipe, RolloutConfig
from tilth.launch.planning import chosen_device, searched
from tilth.plan.mapping import PoolChoice, RoleMapping
from tilth.plan.search import STAGES, SearchResult
from tilth.plan.shape import parameters
from tilth.plan.steps import size
from tilth.ui import format


def show(recipe: Recipe, device_type: str, devices: int, *, as_json: bool) -> None:
    """Print the mapping that the search finds."""
    found = searched(recipe, chosen_device(device_type, recipe, devices), devices)
    if as_json:
        typer.echo(json.dumps(as_object(found), ensure_ascii=False))
    else:
        show_parts(*tables(found), width=WIDTH)


# ---- JSON ----


def as_object(found: SearchResult) -> dict[str, Any]:
    """Return the result as plain data, in bytes and seconds."""
    given = found.given
    return {
        "device_type": given.device.name,
        "source": given.device.source,
        "devices": given.devices,
        "parameters": parameters(given.shape),
        "longest": given.longest,
        "best": _mapping(found, found.best),
        "second": _mapping(found, found.second) if found.second else None,
        "why": found.why,
        "keys": keys(found.recipe),
    }


def _mapping(found: SearchResult, mapping: RoleMapping) -> dict[str, Any]:
    pools = [_pool(found, pool) for pool in mapping.pools]
    return {"seconds": mapping.total, "stages": dict(zip(STAGES, mapping.seconds)), "pools": pools}


def _pool(found: SearchResult, pool: PoolChoice) -> dict[str, Any]:
    """Return a pool as plain data; memory: bytes of each device at the peak."""
    return {
        "roles": {role: option.layout.model_dump() for role, option in zip(pool.roles, pool.options)},
        "devices": pool.devices,
        "memory": pool.memory + found.given.problem.base,
        "stages": dict(zip(STAGES, pool.seconds)),
    }


def keys(recipe: Recipe) -> list[str]:
    """Return the overrides with which a recipe has these pools and layouts."""
    pools = recipe.cluster.pools
    found = [f"cluster.pools={{{', '.join(f'{name} = {n}' for name, n in pools.items())}}}"] if pools else []
    found = [f"cluster.backend={recipe.cluster.backend}", *(found or [f"cluster.workers={recipe.cluster.workers}"])]
    for spec in roles_of(recipe).values():
        if spec.mesh == "one":
            continue
        section = spec.placed_by(recipe)
        if section.pool:
            found.append(f"{spec.key}.pool={section.pool}")
        if section.layout != LayoutConfig():
            found.append(f"{spec.key}.layout={{{_sizes(section.layout, key=True)}}}")
    if recipe.rollout.max_rows != RolloutConfig.model_fields["max_rows"].default:
        found.append(f"rollout.max_rows={recipe.rollout.max_rows}")
    return found


# ---- printing ----


def tables(found: SearchResult) -> list[Table | str]:
    """Return the tables and lines of the result."""
    given, device = found.given, found.given.device
    head = [
        f"model: {parameters(given.shape):,} parameters; sequences of at most {given.longest:,} tokens",
        f"device type {device.name}: {size(device.memory)} each, {device.per_node} to a machine; {device.source}",
        "all seconds and bytes are predicted, not measured",
    ]
    parts: list[Table | str] = [*head, "", f"best: {_title(found, found.best)}", _table(found, found.best)]
    if found.second is not None:
        parts += ["", f"runner-up: {_title(found, found.second)}", _table(found, found.second)]
    return [*parts, "", found.why, "", "keys:", *(f"  {key}" for key in keys(found.recipe))]


def _title(found: SearchResult, mapping: RoleMapping) -> str:
    stages = ", ".join(f"{name} {seconds:.3g}" for name, seconds in zip(STAGES, mapping.seconds) if seconds)
    left = found.given.devices - mapping.devices
    idle = f"; {format.count(left, 'device')} left over" if left else ""
    return f"{mapping.total:.3g} s a step ({stages}) on {format.count(mapping.devices, 'device')}{idle}"


def _table(found: SearchResult, mapping: RoleMapping) -> Table:
    table = new_table("devices", "role", "layout", *STAGES, "memory", right=("devices", *STAGES, "memory"))
    for pool in sorted(mapping.pools, key=lambda pool: -pool.devices):
        for role, option in zip(pool.roles, pool.options):
            seconds = (f"{value:.3g}" if value else "" for value in option.seconds)
            own = option.held + max(option.training, option.generation)
            table.add_row("", role, _sizes(option.layout), *seconds, size(own))
        memory = size(pool.memory + found.given.problem.base)
        seconds = (f"{value:.3g}" if value else "" for value in pool.seconds)
        table.add_row(str(pool.devices), "together", "", *seconds, memory, end_section=True)
    return table


def _sizes(layout: LayoutConfig, key: bool = False) -> str:
    """Return the entries of a layout that differ from 1 and the defaults; all of them 1: dp1. key: as TOML has them."""
    names = {name: getattr(layout, name) for name in AXES if getattr(layout, name) > 1} or {"dp": 1}
    plain = LayoutConfig()
    modes = {n: getattr(layout, n) for n in LayoutConfig.model_fields if n not in AXES}
    names |= {name: value for name, value in modes.items() if value != getattr(plain, name)}
    if key:
        return ", ".join(f"{name} = {json.dumps(value)}" for name, value in names.items())
    return ", ".join(
        name if value is True else f"{name}{value}" if name in AXES else str(value) for name, value in names.items()
    )
