"""Rows ``lans`` and ``dynamic`` of ``economy.py``: large batches at equal epochs, and batches that change in a run.

Both train one process on the same bytes of text. lans: AdamW, LAMB, LARS and LANS with cosine and plateau, three rates
each, the best one is shown; beside it the processor time of an optimizer's step over that of torch's AdamW with
``foreach``. Where rows of the smallest batch are among them: the steps after which a row has the best loss of that
batch, and the largest batch whose loss is at most 2 % above it. dynamic: batches 1, 4, 2, 4 times the first one by
AdamW, by SGD with momentum, and by LARS, whose momentum has a factor of the rate: with a fixed batch, a jump of the
rate, without and with the correction of momentum, and a ramp.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from driver import write_rows

from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.random import stream
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.sharded import ShardedModel
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.optim import Optimizers
from tilth.training.packed import packed_logprobs

LENGTH, HELD, MICRO = 128, 64, 32
"""Bytes of a sequence; sequences held out, and of a micro-batch."""
RATES = {
    "adamw": (1e-3, 3e-3, 1e-2), "lamb": (3e-3, 1e-2, 3e-2), "lans": (3e-3, 1e-2, 3e-2), "lars": (3.0, 10.0, 30.0),
}  # fmt: skip
METHODS = {
    "fixed": (False, False, False), "jump": (True, False, False), "jump, corrected": (True, True, False),
    "ramp": (True, True, True),
}  # fmt: skip
"""True: the batch follows the workers; momentum is corrected; the rate rises over some steps."""
PHASES = (1, 4, 2, 4)
"""Workers of each quarter of the samples."""
BATCHES, LARGE, SHOWN = (64, 256, 1024, 4096), ("adamw", "lamb", "lars", "lans"), 16
"""Batches and optimizers of lans, and how often a run is evaluated, at most."""
DYNAMIC = {"adamw": 1e-3, "sgd": 0.1, "lars": 10.0}
"""Rates of the first batch."""


def engine_of(config: DecoderConfig, seed: int, steps: int, **options: Any) -> TrainEngine:
    """Return the engine of a new model."""
    sharded = ShardedModel.alone(Decoder(config))
    sharded.init_(seed)
    return TrainEngine(
        sharded, OptimizerConfig(**options), total_steps=steps, micro_tokens=LENGTH * MICRO, seed=seed
    )  # fmt: skip


def learn(engine: TrainEngine, codes: np.ndarray, places: Sequence[int]) -> float:
    """Run one step on the sequences at these places; return its loss."""
    tokens = Jagged.of([codes[at : at + LENGTH].astype(np.int64) for at in places])
    mask = np.tile(np.arange(LENGTH) > 0, len(places)).astype(np.uint8)
    return engine.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum()))).loss


def held_out(engine: TrainEngine, codes: np.ndarray) -> float:
    """Return the loss of the end of the text, in nats a byte."""
    rows = codes[-HELD * LENGTH :].astype(np.int64).reshape(HELD, LENGTH)
    tokens, mask = Jagged.of(list(rows)), np.tile(np.arange(LENGTH) > 0, HELD).astype(np.uint8)
    return -float(packed_logprobs(engine.sharded, tokens, mask, max_tokens=LENGTH * MICRO)[mask > 0].mean())


def places_of(codes: np.ndarray, seed: int, count: int) -> list[int]:
    """Return where sequences begin."""
    found: list[int] = stream(seed, "places").integers(0, count, len(codes) - (HELD + 1) * LENGTH).tolist()
    return found


def step_seconds(config: DecoderConfig, repeats: int = 7) -> dict[str, float]:
    """Return the processor seconds of a step of each optimizer, the least of some."""
    model = Decoder(config)
    model.init_weights_(0)
    named = dict(model.named_parameters())
    for p in named.values():
        p.grad = torch.randn_like(p)
    made: dict[str, Callable[[], Any]] = {"foreach": torch.optim.AdamW(named.values(), foreach=True).step}
    for name in ("adamw", "lamb", "lars", "lans", "adaalter"):
        optimizers = Optimizers(named, OptimizerConfig(name=name, weight_decay=0.01), model.table)
        made[name] = partial(optimizers.step, 1e-5)
    found: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repeats):
        for name, step in made.items():
            began = time.process_time()
            step()
            found[name].append(time.process_time() - began)
    return {name: min(own[1:]) for name, own in found.items()}


def lans_rows(*, quick: bool) -> dict[str, tuple[int, str, str]]:
    """Return the rows: batch, optimizer, schedule."""
    every = itertools.product((16, 64) if quick else BATCHES, LARGE, ("cosine", "plateau"))
    return {f"lans, {batch}, {name}, {schedule}": (batch, name, schedule) for batch, name, schedule in every}


def dynamic_rows(*, quick: bool) -> dict[str, tuple[str, str]]:
    """Return the rows: optimizer, method. Momentum of AdamW and SGD has no factor of the rate to correct."""
    every = itertools.product(("adamw", "sgd", "lars"), METHODS)
    return {f"dynamic, {own}, {how}": (own, how) for own, how in every if own == "lars" or how != "jump, corrected"}


def lans(
    config: DecoderConfig, codes: np.ndarray, row: tuple[int, str, str], seeds: Sequence[int], lr: float, samples: int
) -> dict[str, Any]:
    """Train with one batch, optimizer and schedule at three rates, or at ``lr``."""
    batch, name, schedule = row
    steps, losses, curves = samples // batch, dict[float, float](), dict[float, list[float]]()
    more = {"warmup_steps": max(1, steps // 10), "plateau_steps": steps // 4 * (schedule == "plateau")}
    for rate in (lr,) if lr else RATES[name]:
        every = list[list[float]]()
        for seed in seeds:
            engine = engine_of(config, seed, steps, name=name, lr=rate, schedule=schedule, **more)
            places, shown = places_of(codes, seed, samples), list[float]()
            for step in range(steps):
                learn(engine, codes, places[step * batch : (step + 1) * batch])
                if step + 1 in {-(-steps * k // SHOWN) for k in range(1, SHOWN + 1)}:
                    shown.append(held_out(engine, codes))
            every.append(shown)
        curves[rate] = [statistics.mean(several) for several in zip(*every)]
        losses[rate] = curves[rate][-1]
    best = min(losses, key=lambda rate: losses[rate])
    found = {"optimizer": name, "schedule": schedule, "batch": batch, "steps": steps, "seeds": [*seeds]}
    print(f"batch {batch:5} {name:6} {schedule:8} rate {best:8.4f} loss {losses[best]:7.4f}", flush=True)
    return {"row": "lans", **found, "losses": losses, "rate": best, "loss": losses[best], "curve": curves[best]}


def large(table: Sequence[dict[str, Any]], least: int) -> list[dict[str, Any]]:
    """Print and return, for each optimizer and schedule, after which steps, and with which batches, the best loss of
    the smallest batch is reached. least: that batch; without a row of it there is nothing to compare with."""
    found = list[dict[str, Any]]()
    bar = min((row["loss"] for row in table if row["batch"] == least), default=None)
    if bar is None:
        return found
    for name, schedule in dict.fromkeys((row["optimizer"], row["schedule"]) for row in table):
        own = [row for row in table if (row["optimizer"], row["schedule"]) == (name, schedule)]
        near = max((row["batch"] for row in own if row["loss"] <= 1.02 * bar), default=None)
        reached = dict[int, int | None]()
        for row in own:
            points = [i for i, loss in enumerate(row["curve"], 1) if loss <= bar]
            reached[row["batch"]] = -(-row["steps"] * points[0] // len(row["curve"])) if points else None
        found.append({"row": "lans", "optimizer": name, "schedule": schedule, "within": near, "reached": reached})
        print(f"{name:6} {schedule:8} largest batch within 2 %: {near}; steps to {bar:.4f}, by batch: {reached}")
    return found


def dynamic(
    config: DecoderConfig, codes: np.ndarray, row: tuple[str, str], seeds: Sequence[int], lr: float, samples: int
) -> dict[str, Any]:
    """Train while the number of workers changes."""
    optimizer, name = row
    scaled, corrected, ramped = METHODS[name]
    batch, ramp = max(4, samples // 512), max(4, samples // 400)
    rate, worsts, losses, steps = lr or DYNAMIC[optimizer], list[float](), list[float](), 0
    for seed in seeds:
        how: dict[str, Any] = {"name": optimizer, "lr": rate, "ramp_steps": ramp * ramped}
        engine = engine_of(config, seed, samples // batch, schedule="cosine", warmup_steps=4, **how)
        if not corrected:
            engine.optimizers.rescale = _uncorrected  # type: ignore[method-assign]
        at, worst, recent, places = 0, 0.0, list[float](), places_of(codes, seed, samples)
        for quarter, workers in enumerate(PHASES):
            size = batch * workers if scaled else batch
            engine.tune(rate, samples // batch, share=size / batch)
            while at < (quarter + 1) * samples // len(PHASES):
                loss = learn(engine, codes, places[at : at + size])
                worst = max(worst, loss - statistics.mean(recent)) if len(recent) == 8 else worst
                recent, at = [*recent, loss][-8:], at + size
        worsts, steps = [*worsts, worst], engine.updates
        losses.append(held_out(engine, codes))
    figures = f"steps {steps:5} loss {statistics.mean(losses):7.4f} worst rise {max(worsts):7.4f}"
    print(f"{optimizer:5} {name:15} {figures}", flush=True)
    found = {"row": "dynamic", "optimizer": optimizer, "method": name, "seeds": [*seeds], "steps": steps, "rate": rate}
    return {**found, "worst": max(worsts), "worsts": worsts, "loss": statistics.mean(losses), "losses": losses}


def _uncorrected(ratio: float) -> None:
    """In place of the correction of momentum."""


def studied(
    only: str,
    config: DecoderConfig,
    text: str,
    seeds: Sequence[int],
    lr: float,
    samples: int,
    path: Path | None,
    *,
    quick: bool,
) -> None:
    """Train the rows in whose names ``only`` is; print and write them. samples: sequences of each run; 0: default."""
    codes, table = np.frombuffer(text.encode(), np.uint8), list[dict[str, Any]]()
    by_batch = {name: row for name, row in lans_rows(quick=quick).items() if only in name}
    if only == "lans":
        table.append({"row": "lans", "seconds": (seconds := step_seconds(config, 3 if quick else 7))})
        for name, own in seconds.items():
            print(f"step of {name:9} {1e3 * own:8.2f} ms {own / seconds['foreach']:6.2f} of AdamW with foreach")
    done = list[dict[str, Any]]()
    for row in by_batch.values():
        rate = lr or RATES[row[1]][1] * quick
        done.append(lans(config, codes, row, seeds, rate, samples or (128 if quick else 16_384)))
        write_rows(path, [*table, *done])
    table += [*done, *large(done, min(batch for batch, _, _ in lans_rows(quick=quick).values()))]
    for name, own_row in dynamic_rows(quick=quick).items():
        if only in name:
            table.append(dynamic(config, codes, own_row, seeds, lr, samples or (128 if quick else 8_192)))
            write_rows(path, table)
    write_rows(path, table)
