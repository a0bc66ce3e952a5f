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
    if family in ("mixtral", "qwen3_moe"):
        base |= {"num_experts": 5, "experts_per_token": 2, "expert_size": 24, "expert_layers": (0, 1, 2)}
    if family == "mixtral":
        base["intermediate_size"] = 24
    if family == "qwen3_moe":
        base |= {"expert_layers": (0, 2), "experts_per_token": 3, "renormalise": False, "qk_norm": True}
    if family in ("olmo2", "olmo3"):
        base.update(qk_norm=True, wide_qk_norm=True)
    if family == "olmo3":
        base.update(sliding_window=5, window_layers=(0, 1), rope_theta=5e5, window_rope_theta=5e5)
    if family == "gemma3":
        base.update(
            qk_norm=True, scale_embeddings=True, tie_embeddings=True, head_dim=24, query_scalar=40, sliding_window=5,
            window_layers=(0, 2), rope_theta=1e6, window_rope_theta=100.0,
        )  # fmt: skip
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
    "olmo2": shape("olmo2", rope_scaling=ROPES["yarn"]),
    "olmo2-biases": shape("olmo2", qkv_bias=True, o_bias=True, num_kv_heads=4),
    "olmo3": shape("olmo3", rope_scaling=ROPES["yarn"]),
    "gemma3": shape("gemma3"),
    "gemma3-linear": shape("gemma3", rope_scaling=ROPES["linear"], query_scalar=0, qkv_bias=True, o_bias=True),
    "mistral": shape("mistral"),
    "mistral-full": shape("mistral", sliding_window=None, window_layers=()),
    "mixtral": shape("mixtral"),
    "qwen3-moe": shape("qwen3_moe"),
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
    missing, unexpected = other.load_state_dict(joined(model.state_dict()), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"} and (model.lm_head is None or not missing)
    other.tie_weights()
    other.get_input_embeddings().padding_idx = None  # transformers gives a padding token no gradient
    return other


_GATE, _UP, _DOWN = (f"experts.{name}_proj.weight" for name in ("gate", "up", "down"))


def joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors by the names of transformers, which joins gate and up of all experts."""
    found = {}
    for name, tensor in state.items():
        if name.endswith(_GATE):
            both = [tensor, state[name.replace(_GATE, _UP)]]
            found[name.replace(_GATE, "experts.gate_up_proj")] = torch.cat(both, 1)
        elif name.endswith(_DOWN):
            found[name.removesuffix(".weight")] = tensor
        elif not name.endswith(_UP):
            found[name] = tensor
    return found


def gradients(other: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients of a model of transformers by our names."""
    found = {}
    for name, parameter in other.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            path = name.removesuffix("gate_up_proj")
            gate, up = parameter.grad.chunk(2, 1)
            found |= {f"{path}gate_proj.weight": gate, f"{path}up_proj.weight": up}
        else:
            found[f"{name}.weight" if name.endswith("experts.down_proj") else name] = parameter.grad
    return found


def tokens(lengths: list[int], seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
