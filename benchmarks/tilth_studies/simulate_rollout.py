"""``tilth simulate rollout``: what asynchronous rollouts would bring to a recipe, by its costs on a type of device and
measured lengths."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import typer

from tilth.cli.main import SimulateRolloutCommand
from tilth.cli.tables import new_table, show
from tilth.config.schema import Recipe
from tilth.core.errors import DataError, RecipeError
from tilth.data.trajectories import read_trajectories
from tilth.launch.planning import chosen_device, described
from tilth.plan.devices import DeviceType
from tilth.plan.layout import place
from tilth.plan.memory import kv_tokens
from tilth.plan.repack import ReplicaLimits
from tilth.plan.search import KERNELS, optimizer_seconds
from tilth.plan.shape import DecoderShape, kv_bytes, parameters, token_flops
from tilth.plan.working import element_of
from tilth.runs.trust import load_named
from tilth_studies.asynchrony import AsyncOutcome, RolloutCosts, RolloutJob, modes, simulate

STALENESS = 4
"""Of k-step and partial rollouts; batches on their way in all modes but sync and one-step."""
UPDATES = 8
EIGHTHS = (3, 4, 5, 6)
"""Of the devices that generate, tried for modes that divide them; the fastest is shown."""


@dataclass(frozen=True)
class SimulatedMode:
    """Outcome of one mode on the division of devices that is fastest for it."""

    mode: str
    generating: int
    """Devices of replicas; sync: all of them, in turn with training."""
    outcome: AsyncOutcome


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


def read_lengths(source: Path) -> list[int]:
    """Return lengths of completions: of a run's trajectories, or of a file with one a line or a JSON list of them.

    Raises DataError: nothing there, or something that is no length.
    """
    if (source / "run.json").is_file():
        table = read_trajectories(source, columns=["tokens", "prompt_length"])
        found = pc.subtract(pc.list_value_length(table["tokens"]), table["prompt_length"]).drop_null().to_pylist()
        if not found:
            message = f"{source} has no trajectories; name a run that has sampled, or a file of lengths"
            raise DataError(message, key=source.name)
        return [max(1, int(length)) for length in found]
    try:
        text = source.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        message = f"{source} is neither a run nor a readable file of lengths: {error}"
        raise DataError(message, key=source.name) from error
    try:
        found = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    except (ValueError, RecursionError) as error:
        message = f"{source}: it must hold one length a line, or a JSON list of them: {error}"
        raise DataError(message, key=source.name) from error
    for place_, length in enumerate(found, 1):
        if type(length) is not int or length < 1:
            message = f"{source}: length {place_} is {length!r}; it must be a whole number of tokens, at least 1"
            raise DataError(message, key=f"{source.name}.{place_}")
    if not found:
        raise DataError(f"{source} is empty; it must hold lengths in tokens, one a line", key=source.name)
    return found


def simulated(recipe: Recipe, device: DeviceType, gpus: int, lengths: list[int]) -> Iterator[SimulatedMode]:
    """Yield the outcome of each mode. lengths: drawn with the run's seed. Raises RecipeError, PlanError."""
    if not recipe.flow_spec.samples:
        raise RecipeError(f"flow={recipe.flow} has no rollouts to simulate; use one that samples", key="flow")
    placed = place(recipe)["rollout"]
    parts = placed.mesh.size(*placed.mesh.over("parameters", "layers", "experts"))
    if gpus < 2 * parts:
        message = f"--gpus {gpus}: a replica of {parts} and a trainer need at least {2 * parts}"
        raise RecipeError(message, key="--gpus")
    shape, longest, _ = described(recipe)
    r, draw = recipe.rollout, np.random.default_rng(recipe.seed)
    drawn = draw.choice(lengths, size=2 * UPDATES * r.prompts * r.group).tolist()
    prompt = max(1, longest - r.max_tokens)
    limits = ReplicaLimits(kv_tokens(recipe), min(r.max_rows, r.step_tokens))
    attended = prompt + sum(drawn) / len(drawn) / 2
    job = RolloutJob(
        costs=costs_of(recipe, shape, device, parts, attended),
        limits=limits,
        replicas=gpus // parts,
        devices=gpus,
        samples=r.prompts * r.group,
        group=r.group,
        prompt=prompt,
        lengths=drawn,
        updates=UPDATES,
        ahead=STALENESS,
    )
    for name, mode in modes(STALENESS).items():
        shares = [gpus // parts] if mode.shared else sorted({max(1, gpus * n // 8 // parts) for n in EIGHTHS})
        best: SimulatedMode | None = None
        for replicas in shares:
            devices = gpus if mode.shared else gpus - replicas * parts
            size = parameters(shape) * element_of(recipe)
            costs = replace(
                job.costs,
                train=optimizer_seconds(device, parameters(shape) // devices),
                publish=size / devices / device.bandwidth(_apart(device)),
            )
            found = simulate(replace(job, costs=costs, replicas=replicas, devices=devices), mode)
            if best is None or found.samples_per_minute > best.outcome.samples_per_minute:
                best = SimulatedMode(name, replicas * parts, found)
        if best is not None:
            yield best


def costs_of(recipe: Recipe, shape: DecoderShape, device: DeviceType, parts: int, attended: float) -> RolloutCosts:
    """Return seconds of a replica of ``parts`` devices, and of a device that trains, by published or measured rates.

    attended: tokens that a token sees on average. As in ``search.decode_seconds``: a decode step reads weights, keys
    and values, or computes, or takes the least time of its kernels. Weights travel over one link of each device.
    """
    element, memory = element_of(recipe), device.links * device.memory_bandwidth * parts
    size = parameters(shape) * element
    flops, rate = token_flops(shape, attended), device.rate(recipe.train.precision, recipe.train.matmul)
    loaded = size / parts / device.bandwidth(_apart(device))
    return RolloutCosts(
        step=max(size / memory, shape.num_layers * KERNELS * device.launch),
        row=flops.forward / parts / rate,
        kv_token=kv_bytes(shape, element) / memory,
        prefill=flops.forward / parts / rate,
        train_token=(flops.both + bool(recipe.train.checkpointing) * flops.forward) / rate,
        sync=loaded,
        relay=loaded,
    )


def _apart(device: DeviceType) -> tuple[int, int]:
    """Return two ranks whose link weights travel over: of two nodes, if there are several."""
    return (0, device.per_node) if device.gpu else (0, 1)
