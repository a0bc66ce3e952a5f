"""``tilth simulate rollout``: what asynchronous rollouts would bring, before anything starts."""

import json
from dataclasses import asdict
from typing import Any

import typer

from tilth.cli.main import SimulateRolloutCommand
from tilth.cli.tables import new_table, show
from tilth.launch.planning import chosen_device
from tilth.launch.simulated import SimulatedMode, read_lengths, simulated
from tilth.runs.trust import load_named


def rollout(options: SimulateRolloutCommand) -> None:
    """Simulate every mode, and print a row for each."""
    lengths = read_lengths(options.lengths)
    recipe = load_named(options.name, options.overrides or ())
    device = chosen_device(options.device_type, recipe, options.gpus)
    found = list(simulated(recipe, device, options.gpus, lengths))
    if options.as_json:
        typer.echo(json.dumps([as_object(one) for one in found]))
        return
    titles = ("mode", "generate", "samples/min", "speed", "staleness", "idle", "trainer idle", "KV use", "moves")
    rows = [_cells(one, found[0].outcome.samples_per_minute) for one in found]
    show(
        f"{len(lengths):,} lengths, {options.gpus} devices of type {device.name} ({device.source})",
        new_table(*titles, right=titles[1:], rows=rows),
    )


def as_object(one: SimulatedMode) -> dict[str, Any]:
    """Return an outcome as plain data. Shares are of 1, times in seconds."""
    return {"mode": one.mode, "generating": one.generating, **asdict(one.outcome)}


def _cells(one: SimulatedMode, sync: float) -> tuple[str, ...]:
    found = one.outcome
    mean = sum(age * share for age, share in found.staleness.items())
    return (
        one.mode,
        str(one.generating),
        f"{found.samples_per_minute:,.0f}",
        f"{found.samples_per_minute / sync:.2f}x",
        f"{mean:.1f}, max {max(found.staleness)}",
        f"{found.replica_idle:.0%}",
        f"{found.trainer_idle:.0%}",
        f"{found.kv_use:.1%}",
        f"{found.moves:,}",
    )
