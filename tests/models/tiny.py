"""Tiny random models of each family, and the same weights in transformers, the independent reference."""

from typing import Any

import torch
import transformers
from torch import Tensor

from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder

VOCAB = 97
ROPES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
}


def shape(family: str, **changes: Any) -> DecoderConfig:
    """Three layers, two query heads to a key head, everything the family has switched on."""
    base: dict[str, Any] = {
        "family": family,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_positions": 64,
        "rms_norm_eps": 1e-5,
        "qk_norm": family == "qwen3",
        "qkv_bias": family == "qwen2",
        "tie_embeddings": family in ("qwen2", "qwen3"),
    }
    if family == "qwen3":
        base["head_dim"] = 32
    if family == "mistral":
        base.update(sliding_window=6, window_layers=(0, 1, 2))
    return DecoderConfig(**{**base, **changes})


FAMILIES: dict[str, DecoderConfig] = {
    **{f"llama-{name}": shape("llama", rope_scaling=rope) for name, rope in ROPES.items()},
    "llama-biases": shape("llama", qkv_bias=True, o_bias=True, mlp_bias=True, head_dim=24, tie_embeddings=True),
    "qwen2": shape("qwen2"),
    "qwen2-window": shape("qwen2", sliding_window=5, window_layers=(1, 2), tie_embeddings=False),
    "qwen3": shape("qwen3"),
    "qwen3-window-yarn": shape("qwen3", sliding_window=5, window_layers=(2,), rope_scaling=ROPES["yarn"]),
    "mistral": shape("mistral"),
    "mistral-full": shape("mistral", sliding_window=None, window_layers=()),
}


def lively_(model: Decoder, seed: int = 0) -> Decoder:
    """Weights larger than at initialisation, with random norms and biases: every term matters to the result."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.12, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(0.8)
    return model


def decoder(config: DecoderConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    return lively_(Decoder(config, dtype), seed)


def reference(model: Decoder) -> torch.nn.Module:
    """The model in transformers, with eager attention and the same weights."""
    hf = model.config.to_hf()
    config = transformers.AutoConfig.for_model(**{k: v for k, v in hf.items() if k != "architectures"})
    other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    missing, unexpected = other.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"} and (model.lm_head is None or not missing)
    other.tie_weights()
    return other


def tokens(lengths: list[int], seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
