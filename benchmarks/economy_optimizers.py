"""Rows ``lans`` and ``dynamic`` of ``economy.py``: large batches at equal epochs, and batches that change in a run.

Both train one process on the same bytes of text. lans: AdamW, LAMB, LARS and LANS with cosine and plateau, three rates
each, the best one is shown; beside it the processor time of an optimizer's step over that of torch's AdamW with
``foreach``. dynamic: batches 1, 4, 2, 4 times the first one by AdamW and by LARS, whose momentum has a factor of the
rate: with a fixed batch, a jump of the rate, without and with the correction of momentum, and a ramp.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

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


def lans(config: DecoderConfig, text: str, *, quick: bool) -> list[dict[str, Any]]:
    """Train with each batch, optimizer and schedule at equal epochs; print and return rows."""
    codes = np.frombuffer(text.encode(), np.uint8)
    batches, samples = ((16, 64), 128) if quick else ((64, 256, 1024, 4096), 16_384)
    seconds, table = step_seconds(config, 3 if quick else 7), list[dict[str, Any]]()
    for name, own in seconds.items():
        print(f"step of {name:9} {1e3 * own:8.2f} ms {own / seconds['foreach']:6.2f} of AdamW with foreach")
    places = places_of(codes, 0, samples)
    for batch in batches:
        for name, rates in RATES.items():
            for schedule in ("cosine", "plateau"):
                steps, losses = samples // batch, dict[float, float]()
                more = {"warmup_steps": max(1, steps // 10), "plateau_steps": steps // 4 * (schedule == "plateau")}
                for rate in rates[1:2] if quick else rates:
                    given: dict[str, Any] = {"name": name, "lr": rate, "schedule": schedule, **more}
                    engine = engine_of(config, 0, steps, **given)
                    for step in range(steps):
                        learn(engine, codes, places[step * batch : (step + 1) * batch])
                    losses[rate] = held_out(engine, codes)
                best = min(losses, key=lambda rate: losses[rate])
                row = {"row": "lans", "optimizer": name, "schedule": schedule, "batch": batch, "steps": steps}
                table.append({**row, "losses": losses, "rate": best, "loss": losses[best]})
                print(f"batch {batch:5} {name:6} {schedule:8} rate {best:8.4f} loss {losses[best]:7.4f}", flush=True)
    return [*table, {"row": "lans", "seconds": seconds}]


def dynamic(config: DecoderConfig, text: str, *, quick: bool) -> list[dict[str, Any]]:
    """Train while the number of workers changes; print and return rows."""
    codes, table = np.frombuffer(text.encode(), np.uint8), list[dict[str, Any]]()
    batch, samples, ramp = (4, 128, 4) if quick else (16, 8_192, 20)
    places, worst = places_of(codes, 0, samples), 0.0
    rates = {"adamw": RATES["adamw"][0], "lars": RATES["lars"][1]}
    for optimizer, (name, (scaled, corrected, ramped)) in itertools.product(rates, METHODS.items()):
        if optimizer == "adamw" and name == "jump, corrected":  # its momentum has no factor of the rate
            continue
        how: dict[str, Any] = {"name": optimizer, "lr": rates[optimizer], "ramp_steps": ramp * ramped}
        engine = engine_of(config, 0, samples // batch, schedule="cosine", warmup_steps=4, **how)
        if not corrected:
            engine.optimizers.rescale = _uncorrected  # type: ignore[method-assign]
        at, worst = 0, 0.0
        recent = list[float]()
        for quarter, workers in enumerate(PHASES):
            size = batch * workers if scaled else batch
            engine.tune(rates[optimizer], samples // batch, share=size / batch)
            while at < (quarter + 1) * samples // len(PHASES):
                loss = learn(engine, codes, places[at : at + size])
                worst = max(worst, loss - statistics.mean(recent)) if len(recent) == 8 else worst
                recent, at = [*recent, loss][-8:], at + size
        row = {"row": "dynamic", "optimizer": optimizer, "method": name, "worst": worst}
        table.append({**row, "loss": held_out(engine, codes), "steps": engine.updates})
        figures = f"steps {engine.updates:5} loss {table[-1]['loss']:7.4f} worst rise {worst:7.4f}"
        print(f"{optimizer:5} {name:15} {figures}", flush=True)
    return table


def _uncorrected(ratio: float) -> None:
    """In place of the correction of momentum."""


STUDIES = {"lans": lans, "dynamic": dynamic}
