"""``tilth layout``: place roles on ranks, predict memory and traffic, before anything starts; ``--search``: pools and
layouts with the shortest predicted step, beside the runner-up."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count, groupby
from typing import Any

import typer
from rich.table import Table

from tilth.cli.declare import study
from tilth.cli.main import LayoutCommand
from tilth.cli.tables import WIDTH, new_table
from tilth.cli.tables import show as show_parts
from tilth.config.axes import AXES
from tilth.config.roles import roles_of
from tilth.config.schema import LayoutConfig, Recipe, RolloutConfig
from tilth.launch.build import judged, rooms
from tilth.launch.planning import chosen_device, described, described_models, searched, with_found_layouts
from tilth.launch.rewards import generating, named_reward
from tilth.plan.fit import MemoryUse, places
from tilth.plan.layout import Placed, RankPlan, Seat, per_rank, place
from tilth.plan.mapping import PoolChoice, RoleMapping
from tilth.plan.search import STAGES, SearchResult
from tilth.plan.shape import DecoderShape, parameters
from tilth.plan.steps import size
from tilth.plan.traffic import GroupTraffic, tokens_of_rank, traffic, work
from tilth.plan.working import total, with_device
from tilth.ui import format

SHOWN = 32  # most workers in the tables; ``--json`` has all


@dataclass
class Plan:
    """The plan of a recipe.

    longest: tokens of the longest sequence. vocabulary: where its size comes from. places: the memories of this machine
    and their predicted use. told: warnings on memories that are too small, and remedies.
    """

    recipe: Recipe
    shape: DecoderShape
    longest: int
    vocabulary: str
    placed: dict[str, Placed]
    workers: list[RankPlan]
    talks: list[GroupTraffic]
    places: list[MemoryUse]
    told: list[str]
    device: str
    """The planned device: ``train.device``, and of ``auto`` that of this machine."""


def show(options: LayoutCommand, recipe: Recipe) -> None:
    """Print the plan; with --search the mapping that the search finds, with --check-against errors of predictions."""
    if options.check_against is not None:
        study("published_steps:show")(recipe, as_json=options.as_json)
        return
    if options.search:
        devices = options.devices or recipe.cluster.workers
        found = searched(recipe, chosen_device(options.device_type, recipe, devices), devices)
        plain, parts = search_object(found), search_tables(found)
    else:
        plan = look(with_found_layouts(recipe)[0] if recipe.cluster.search else recipe)
        plain, parts = as_object(plan), tables(plan)
    if options.as_json:
        typer.echo(json.dumps(plain, ensure_ascii=False))
    else:
        show_parts(*parts, width=WIDTH)


# ---- planning ----


def look(recipe: Recipe) -> Plan:
    """Plan shape, places, memory and traffic without training anything. TilthError: a bad recipe."""
    generates = generating(recipe)
    placed = place(recipe, generates=generates)  # before any file is read
    shape, longest, vocabulary = described(recipe)
    others = described_models(recipe)
    predicted = partial(per_rank, shape=shape, longest=longest, generates=generates, loaded=others)
    here = with_device(recipe)
    workers, (host, gpus) = predicted(here), rooms(here)
    refused, told = judged(here, longest, predicted, host, gpus)
    told = [f"it cannot run here: {refused}"] if refused else told
    if not named_reward(recipe):
        placed.pop("reward", None)
        workers = [replace(one, seats=tuple(seat for seat in one.seats if seat.role in placed)) for one in workers]
    talks, found = traffic(recipe, shape, longest, generates=generates), places(here, workers, host, gpus)
    return Plan(recipe, shape, longest, vocabulary, placed, workers, talks, found, told, here.train.device)


# ---- JSON ----


def as_object(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data, in bytes and tokens."""
    return {
        "backend": plan.recipe.cluster.backend, "device": plan.device, "workers": len(plan.workers),
        "parameters": parameters(plan.shape),
        "vocabulary": plan.shape.vocab_size, "longest": plan.longest,
        "roles": {role: _role(plan, p) for role, p in plan.placed.items()},
        "ranks": [{"rank": one.rank, "roles": [_seat(seat) for seat in one.seats], "memory": one.memory.by_name(),
                   "peak": one.memory.peak} for one in plan.workers],
        "machine": [asdict(p) | {"room": p.room._asdict(), "fits": not p.tight} for p in plan.places],
        "told": plan.told,
        "traffic": [asdict(talk) for talk in plan.talks],
    }  # fmt: skip


def _role(plan: Plan, placed: Placed) -> dict[str, Any]:
    sizes = {name: placed.mesh.size(name) for name in placed.mesh.names}
    tokens = tokens_of_rank(plan.recipe, placed, plan.longest)
    return {"pool": placed.pool, "ranks": list(placed.ranks), **sizes, "tokens_per_rank": tokens}


def _seat(seat: Seat) -> dict[str, Any]:
    """Return a seat as plain data; parameters: elements, the other sizes: bytes."""
    need = seat.need
    return {
        "role": seat.role, **seat.coordinates, "parameters": seat.elements,
        "held": {item.name: item.bytes for item in need.held}, "gradients": need.gradients,
        "working": {item.name: item.bytes for item in need.training + need.generation},
    }  # fmt: skip


# ---- printing ----


def tables(plan: Plan) -> list[Table | str]:
    """Return the tables and lines of the plan."""
    backend = f"{format.count(len(plan.workers), 'worker')}, backend {plan.recipe.cluster.backend}"
    if plan.device == "cpu" and plan.recipe.train.device == "auto":
        backend += "; train.device = auto is a CPU here: train.device=cuda would plan GPUs"
    whole, active = parameters(plan.shape), parameters(plan.shape, active=True)
    active_part = f" ({active:,} active)" if active < whole else ""
    model = f"model: {whole:,} parameters{active_part}, vocabulary {plan.shape.vocab_size:,} ({plan.vocabulary})"
    rows = work(plan.recipe, "policy", 1, plan.longest).rows
    step = f"a step: {rows:,} sequences of at most {plan.longest:,} tokens, {rows * plan.longest:,} together"
    parts: list[Table | str] = [backend, model, step, "", _roles(plan), "", _ranks(plan)]
    if len(plan.workers) > SHOWN:
        parts.append(f"and {len(plan.workers) - SHOWN} more; --json has all")
    heaviest = max(plan.workers, key=lambda worker: worker.memory.peak)
    items = sorted(heaviest.memory.items, key=lambda item: -item.bytes)[:4]
    largest = ", ".join(f"{item.name} {size(item.bytes)}" for item in items)
    parts.append(f"most memory: rank {heaviest.rank}, {size(heaviest.memory.peak)} ({largest})")
    parts += [_place(place) for place in plan.places] + plan.told
    return [*parts, "", _talks(plan) if plan.talks else "no rank talks with another about tensors"]


def _place(place: MemoryUse) -> str:
    seen = f"{size(place.needed)} predicted, {size(place.room.free)} free of {size(place.room.total)}"
    return f"{place.what} of {place.room.where}: {seen}: {'does NOT fit' if place.tight else 'fits'}"


def _roles(plan: Plan) -> Table:
    table = new_table("role", "pool", "ranks", *AXES, "tokens a rank", right=(*AXES, "tokens a rank"))
    for role, placed in plan.placed.items():
        tokens = tokens_of_rank(plan.recipe, placed, plan.longest)
        sizes = (str(placed.mesh.size(name)) for name in AXES)
        table.add_row(role, placed.pool or "all", spans(sorted(placed.ranks)), *sizes, f"{tokens:,}")
    return table


def _ranks(plan: Plan) -> Table:
    numbers = ("parameters", "weights", "gradients", "optimizer", "activations", "KV")
    used = [axis for axis in AXES if any(seat.coordinates[axis] for worker in plan.workers for seat in worker.seats)]
    table = new_table("rank", "role", ",".join(used), *numbers, right=("rank", *numbers))
    for worker in plan.workers[:SHOWN]:
        for seat in worker.seats:
            if seat.elements:
                at = ",".join(str(seat.coordinates[axis]) for axis in used)
                shown = (size(n) if n else "" for n in _shares(seat))
                table.add_row(str(worker.rank), seat.role, at, f"{seat.elements:,}", *shown)
        table.add_row(str(worker.rank), "together", "", "", size(worker.memory.peak), end_section=True)
    return table


def _shares(seat: Seat) -> tuple[int, ...]:
    """Return bytes of weights, gradients, optimizer state, working set and KV cache."""
    held = {item.name: item.bytes for item in seat.need.held}
    state = sum(count for name, count in held.items() if name.endswith("optimizer state"))
    cache = sum(count for name, count in held.items() if name.endswith("KV cache"))
    working = max(total(seat.need.training), total(seat.need.generation)) - seat.need.gradients
    return sum(held.values()) - state - cache, seat.need.gradients, state, max(0, working), cache


def _talks(plan: Plan) -> Table:
    rows = [(talk.role, talk.axis, _groups(talk), talk.what, size(talk.bytes)) for talk in plan.talks]
    return new_table("role", "axis", "ranks that talk", "what", "bytes a step", right=("bytes a step",), rows=rows)


def _groups(talk: GroupTraffic) -> str:
    shown = " | ".join(spans(group) for group in talk.groups[:4])
    return shown + (f" | ... {len(talk.groups)} groups" if len(talk.groups) > 4 else "")


def spans(ranks: Sequence[int]) -> str:
    """Return ranks as ``0-3, 6``."""
    place = count()
    runs = [list(run) for _, run in groupby(ranks, key=lambda rank: rank - next(place))]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# ---- the mapping search ----


def search_object(found: SearchResult) -> dict[str, Any]:
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


def search_tables(found: SearchResult) -> list[Table | str]:
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
            held = option.held + max(option.training, option.generation)
            table.add_row("", role, _sizes(option.layout), *seconds, size(held))
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
