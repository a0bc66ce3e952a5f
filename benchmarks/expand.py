"""Compute that a larger model saves by starting from a trained smaller one (LEMON, arXiv 2310.07999).

    python benchmarks/expand.py [--quick] [--json PATH] [--data ../shared/data/gsm8k] [--steps N] [--seeds 0,1,2]
                                [--only ROW] [--shape quick|full]

A small model reads N steps of text; then each row trains a model of the large shape on other places of it, with AdamW
and one peak learning rate on a cosine. Full: 1.0M parameters become 6.4M, by tilth.models.expand.

- from scratch: a new model, N steps.
- expanded: two thirds of the steps, as the paper's language model; half the steps; slow schedule: N.
- equal copies: half the steps, with copies of the weights that nothing tells apart.
- zero padding: half the steps; the small model in a corner, and what reads new heads and units, or writes to new
  channels, is zero.

Columns: loss of held-out text (nats a byte) at the start and at the end; the compute until the loss is that of the end
of "from scratch", by FLOPs of forward and backward passes (interpolated between evaluations), and what it saves of the
compute from scratch; saved with the small model's own training counted. Means over the seeds, and all seeds. "-": it
was not reached. The figures are of these sizes and this text alone.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from driver import benchmark_parser, write_rows
from torch import Tensor

from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.random import stream
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.expand import Sizes, expand, expanded_config
from tilth.models.hf import load_weights
from tilth.plan.rules import rule_of
from tilth.plan.shape import parameters, token_flops
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.packed import packed_logprobs

SHAPES: dict[str, tuple[DecoderConfig, Sizes]] = {
    "full": (
        DecoderConfig(256, 160, 448, num_layers=3, num_heads=5, family="llama"),
        Sizes(hidden=384, layers=4, heads=12, ffn=832),
    ),
    "quick": (
        DecoderConfig(256, 32, 64, num_layers=2, num_heads=2, family="llama"),
        Sizes(hidden=80, layers=3, heads=4, ffn=144),
    ),
}
"""The small model, and the sizes it grows to: 2 copies of the residual stream, and new channels behind them."""
ROWS = {
    "from scratch": 1.0, "expanded": 2 / 3, "half the steps": 0.5, "equal copies": 0.5, "zero padding": 0.5,
    "slow schedule": 1.0,
}  # fmt: skip
"""Name -> share of the steps."""
LENGTH, BATCH, HELD = 128, 16, 32
"""Bytes of a sequence; sequences of a step, and held out."""
EVALUATIONS = 20
"""In N steps."""
PEAK = 3e-3
Weights = Mapping[str, Tensor]


def padded(config: DecoderConfig, weights: Weights, grown: DecoderConfig, seed: int) -> tuple[DecoderConfig, Weights]:
    """Return the config and weights of a model of the same shape by zero padding, which computes the same."""
    share = config.hidden_size / grown.hidden_size
    grown = replace(grown, rms_norm_eps=config.rms_norm_eps * share)
    model, found = Decoder(grown, torch.float64).double(), dict[str, Tensor]()
    model.init_weights_(seed)
    for name, parameter in model.named_parameters():
        row, fresh = rule_of(grown.table, name), parameter.detach()
        source, adds = weights.get(name), row.writes == "residual" and row.kind != "norm"
        if source is None:  # of a further layer, behind the others
            found[name] = torch.zeros_like(fresh) if adds else fresh
            continue
        if row.reads == "tokens":
            fresh.zero_()
        elif adds:
            fresh[source.shape[0] :] = 0
        if row.kind == "matrix" and row.reads != "residual":
            fresh[:, source.shape[1] :] = 0
        fresh[tuple(map(slice, source.shape))] = source.double() * (share**0.5 if row.kind == "norm" else 1)
        found[name] = fresh
    return grown, found


def start_of(name: str, config: DecoderConfig, weights: Weights, sizes: Sizes, seed: int) -> Decoder:
    """Return the model that a row begins with."""
    grown, found = expanded_config(config, sizes), dict[str, Tensor]()
    if name == "zero padding":
        grown, found = padded(config, weights, grown, seed)  # type: ignore[assignment]
    elif name != "from scratch":
        found = expand(config, weights, grown, None if name == "equal copies" else seed)
    else:
        grown = replace(grown, rms_norm_eps=config.rms_norm_eps)
    model = Decoder(grown, torch.bfloat16)
    model.init_weights_(seed)
    if found:
        load_weights(model, found)
    return model


def sequences(codes: np.ndarray, seed: int, name: str, steps: int) -> Iterator[Jagged]:
    """Yield the sequences of each step."""
    places = stream(seed, name).integers(0, steps * BATCH, len(codes) - (HELD + 1) * LENGTH).view(steps, BATCH)
    for step in places.tolist():
        yield Jagged.of([codes[at : at + LENGTH].astype(np.int64) for at in step])


def held_out(model: Decoder, codes: np.ndarray) -> float:
    """Return the loss of the end of the text, in nats a byte."""
    rows = codes[-HELD * LENGTH :].astype(np.int64).reshape(HELD, LENGTH)
    mask = np.tile(np.arange(LENGTH) > 0, HELD).astype(np.uint8)
    found = packed_logprobs(model, Jagged.of(list(rows)), mask, max_tokens=LENGTH * BATCH)
    return -float(found[mask > 0].mean())


def train(model: Decoder, codes: np.ndarray, seed: int, name: str, steps: int, every: int) -> list[tuple[float, float]]:
    """Train; return (FLOPs so far, held-out loss) at the start and after each ``every`` steps."""
    options = OptimizerConfig(lr=PEAK, warmup_steps=max(steps // 30, 2), schedule="cosine", weight_decay=0.1)
    engine = TrainEngine(model, options, total_steps=steps, micro_tokens=LENGTH * BATCH, seed=seed)
    mask = np.tile(np.arange(LENGTH) > 0, BATCH).astype(np.uint8)
    one = token_flops(model.config, (LENGTH + 1) / 2).both * LENGTH * BATCH
    curve = [(0.0, held_out(model, codes))]
    for number, tokens in enumerate(sequences(codes, seed, name, steps), 1):
        engine.update(tokens, mask, {}, negative_log_likelihood(float(BATCH * (LENGTH - 1))))
        if number % every == 0 or number == steps:
            curve.append((number * one, held_out(model, codes)))
    return curve


def reached(curve: list[tuple[float, float]], loss: float) -> float | None:
    """Return the FLOPs at which a curve first has a loss, interpolated; None: never."""
    for (before, high), (after, low) in pairwise(curve):
        if high <= loss:
            return before
        if low <= loss:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def line(name: str, found: list[dict[str, Any]]) -> str:
    """Format a row."""
    start, end = (statistics.mean(one["curve"][i][1] for one in found) for i in (0, -1))
    tflop = statistics.mean(one["curve"][-1][0] for one in found) / 1e12
    each = [one["saved"] for one in found]
    shares = " ".join("-" if share is None else f"{100 * share:.1f} %" for share in each)
    known = [share for share in each if share is not None]
    mean = f"{100 * statistics.mean(known):.1f} %" if len(known) == len(each) else "-"
    whole = [one["saved_with_source"] for one in found if one["saved_with_source"] is not None]
    both = f"{100 * statistics.mean(whole):.1f} %" if len(whole) == len(each) else "-"
    return f"{name:15} {start:7.4f} {end:7.4f} {tflop:9.2f} {mean:>9} {both:>9}   {shares}"


def main() -> None:
    parser = benchmark_parser(__doc__, "a smaller model and fewer steps")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data" / "gsm8k")
    parser.add_argument("--steps", type=int, default=0, help="from scratch; default 2000, with --quick 60")
    parser.add_argument("--seeds", default="", help="default 0,1,2, with --quick 0")
    parser.add_argument("--only", default="", help="text in the names of rows; the one from scratch runs too")
    parser.add_argument("--shape", choices=SHAPES, default="", help="default full, with --quick quick")
    options = parser.parse_args()
    if not (options.data / "train.jsonl").is_file():
        raise SystemExit(f"no train.jsonl in {options.data}; give the folder of GSM8K's files with --data")
    lines = map(json.loads, (options.data / "train.jsonl").read_text().splitlines())
    text = "\n".join(f"{one['question']}\n{one['answer']}" for one in lines)
    codes = np.frombuffer(text.encode("ascii", "ignore"), np.uint8)
    config, sizes = SHAPES[options.shape or ("quick" if options.quick else "full")]
    steps = options.steps or (60 if options.quick else 2000)
    seeds = [int(seed) for seed in (options.seeds or ("0" if options.quick else "0,1,2")).split(",")]
    every = max(steps // EVALUATIONS, 1)
    names = [name for name in ROWS if options.only in name or name == "from scratch"]
    large, found = parameters(expanded_config(config, sizes)), dict[str, list[dict[str, Any]]]()
    print(f"{parameters(config) / 1e6:.2f}M -> {large / 1e6:.2f}M parameters, {steps} steps of {LENGTH * BATCH} bytes")
    for seed in seeds:
        small = Decoder(config, torch.bfloat16)
        small.init_weights_(seed)
        before = train(small, codes, seed, "small", steps, steps)
        weights = {name: p.detach() for name, p in small.named_parameters()}
        print(f"seed {seed}: small model {before[-1][1]:.4f} after {before[-1][0] / 1e12:.2f} TFLOP", flush=True)
        for name in names:
            model = start_of(name, config, weights, sizes, seed)
            curve = train(model, codes, seed, "large", round(steps * ROWS[name]), every)
            scratch = found["from scratch"][-1]["curve"][-1] if name != "from scratch" else curve[-1]
            spent = reached(curve, scratch[1])
            row = {
                "row": name, "seed": seed, "steps": steps, "parameters": [parameters(config), large],
                "small": before[-1], "curve": curve,
                "saved": None if spent is None else 1 - spent / scratch[0],
                "saved_with_source": None if spent is None else 1 - (spent + before[-1][0]) / scratch[0],
            }  # fmt: skip
            found.setdefault(name, []).append(row)
            print(f"  {line(name, [row])}", flush=True)
            write_rows(options.json, [one for rows in found.values() for one in rows])
    print("row               start     end     TFLOP     saved  +source   each seed")
    for name, rows in found.items():
        print(line(name, rows))


if __name__ == "__main__":
    main()
