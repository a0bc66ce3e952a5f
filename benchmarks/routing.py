"""Flips of experts between generation engine and trainer, and what replaying the engine's choices does to log-probs.

    python benchmarks/routing.py [--quick] [--json PATH]

A random model with experts generates in bf16, and fp32 scores its answers: once by the router's own choices, once by
those that the engine recorded. A dense model of the same depth is what rounding does without experts.
"""

from typing import Any

import numpy as np
import torch
from driver import benchmark_parser, write_rows

from tilth.core.batch import Jagged
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.moe import ExpertContext
from tilth.training.packed import packed_logprobs

DENSE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 4,
    "num_heads": 4,
}
SPARSE: dict[str, Any] = {**DENSE, "family": "qwen3_moe", "expert_size": 32, "expert_layers": (0, 1, 2, 3)}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "8 experts, 2 a token": {**SPARSE, "num_experts": 8, "experts_per_token": 2},
    "32 experts, 4 a token": {**SPARSE, "num_experts": 32, "experts_per_token": 4},
    "128 experts, 8 a token": {**SPARSE, "num_experts": 128, "experts_per_token": 8},
}


def measure(name: str, sequences: int) -> dict[str, object]:
    """Return one row: share of flips, and differences of log-probs with own and with replayed choices."""
    config = DecoderConfig(**MODELS[name], qk_norm=True, max_positions=256)
    model = Decoder(config)
    model.init_weights_(0)
    for parameter in model.parameters():
        parameter.data.mul_(4.0 if parameter.ndim > 1 else 1.0)  # as decided as a trained model
    engine = Engine(config, EngineOptions(dtype=torch.bfloat16, max_length=256, routing=True))
    engine.update_weights(model.named_parameters(), version=1)
    prompts = np.random.default_rng(0).integers(0, 512, (sequences, 16))
    found = engine.generate([Request(i, p, SamplingParams(max_tokens=48)) for i, p in enumerate(prompts)])
    tokens = Jagged.of([t.tokens for t in found])
    mask, said = (np.concatenate([getattr(t, n) for t in found]) for n in ("mask", "logprobs"))
    row: dict[str, object] = {"model": name, "tokens": int(mask.sum())}
    ways: dict[str, np.ndarray | None] = {"own": None}
    if config.num_experts:
        recorded = np.concatenate([t.routing for t in found if t.routing is not None]).astype(np.int64)
        choices = np.where(recorded == 255, -1, recorded).reshape(len(mask), config.num_layers, -1)
        ways["replayed"], row["flips"] = choices, flips(model, tokens, choices)
    for way, routing in ways.items():
        logprobs = packed_logprobs(model, tokens, mask, max_tokens=4096, routing=routing)
        apart = np.abs(logprobs - said)[mask == 1]
        row |= {f"{way}_mean": float(apart.mean()), f"{way}_max": float(apart.max())}
    return row


@torch.no_grad()
def flips(model: Decoder, tokens: Jagged, recorded: np.ndarray) -> float:
    """Return the share of recorded pairs of token and expert that the model's routers do not choose."""
    noted = ExpertContext(record=True)
    model(torch.from_numpy(tokens.values), PackedContext(tokens.lengths, experts=noted))
    own = torch.stack([noted.chosen[layer] for layer in model.config.expert_layers], 1).numpy()
    missed = (recorded[..., None] != own[:, :, None]).all(-1) & (recorded >= 0)
    return float(missed.sum() / (recorded >= 0).sum())


def main() -> None:
    options = benchmark_parser(__doc__, "fewer sequences").parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, 8 if options.quick else 64) for name in MODELS]
    for row in rows:
        print("  ".join(f"{k} {v:.2e}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
