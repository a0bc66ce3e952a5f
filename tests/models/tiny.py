"""Tiny random models of each family, and the same weights in transformers, the independent reference."""

from typing import Any

import torch
import transformers
from torch import Tensor

from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.families.deepseek_v3 import LatentConfig

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
    if family == "gpt_oss":
        base |= {"num_experts": 5, "experts_per_token": 2, "expert_size": 24, "expert_layers": (0, 1, 2)}
        base |= {
            "intermediate_size": 24,
            "qkv_bias": True,
            "o_bias": True,
            "sliding_window": 5,
            "window_layers": (0, 2),
        }
        base["rope_scaling"] = ROPES["yarn"] | {"truncate": False}
    if family == "deepseek_v3":
        base |= {
            "num_experts": 8,
            "experts_per_token": 3,
            "expert_size": 24,
            "expert_layers": (1, 2),
            "num_kv_heads": 4,
        }
        base |= {"expert_groups": 4, "groups_per_token": 2, "router_score": "sigmoid", "router_correction": True}
        base |= {"shared_experts": 2, "routed_scale": 2.5, "rope_scaling": ROPES["yarn-mscale"]}
        base |= {"q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
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
    return (LatentConfig if family == "deepseek_v3" else DecoderConfig)(**{**base, **changes})


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
    "gpt-oss": shape("gpt_oss"),
    "gpt-oss-plain": shape("gpt_oss", rope_scaling=None, sliding_window=None, window_layers=()),
    "deepseek-v3": shape("deepseek_v3"),
    "deepseek-v3-direct": shape(
        "deepseek_v3",
        q_lora_rank=0,
        rope_scaling=None,
        rope_interleave=False,
        expert_groups=1,
        groups_per_token=1,
        renormalise=False,
        qkv_bias=True,
        o_bias=True,
    ),
    "deepseek-v3-biases": shape("deepseek_v3", qkv_bias=True, o_bias=True, tie_embeddings=True),
    "deepseek-v3-dense": shape("deepseek_v3", num_experts=0, expert_layers=()),
    "mistral": shape("mistral"),
    "mistral-full": shape("mistral", sliding_window=None, window_layers=()),
    "mixtral": shape("mixtral"),
    "qwen3-moe": shape("qwen3_moe"),
    "qwen3-moe-window": shape("qwen3_moe", sliding_window=5, window_layers=(0, 1, 2)),
    "qwen3-moe-dense": shape("qwen3_moe", num_experts=0, expert_layers=()),
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


def _unfused(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors of gpt-oss by the names of transformers: gate and up in alternate columns, matrices transposed."""
    found = {}
    for name, tensor in state.items():
        place, leaf = name.rsplit(".", 1)
        if ".experts." not in name:
            found[name.replace("mlp.gate.", "mlp.router.")] = tensor
            continue
        path, suffix = place.rpartition(".")[0], "" if leaf == "weight" else "_bias"
        own = tensor.transpose(1, 2) if leaf == "weight" else tensor
        if "gate_proj" in name:
            other = state[name.replace("gate_proj", "up_proj")]
            other = other.transpose(1, 2) if leaf == "weight" else other
            found[f"{path}.gate_up_proj{suffix}"] = torch.stack((own, other), -1).flatten(-2)
        elif "down_proj" in name:
            found[f"{path}.down_proj{suffix}"] = own
    return found


def _fused_gradients(other: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients of gpt-oss in transformers by our names."""
    found = {}
    for name, parameter in other.named_parameters():
        grad = parameter.grad
        if ".experts." not in name:
            found[name.replace("mlp.router.", "mlp.gate.")] = grad
            continue
        path, leaf = name.rpartition("experts.")[0] + "experts.", "bias" if name.endswith("_bias") else "weight"
        parts = {"gate_proj": grad[..., ::2], "up_proj": grad[..., 1::2]} if "gate_up" in name else {"down_proj": grad}
        found |= {f"{path}{n}.{leaf}": g.transpose(1, 2) if leaf == "weight" else g for n, g in parts.items()}
    return found


_GATE, _UP, _DOWN = (f".experts.{name}_proj.weight" for name in ("gate", "up", "down"))


def joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors by the names of transformers, which joins gate and up of all experts."""
    if any(name.endswith("sinks") for name in state):
        return _unfused(state)
    state = {name.replace("gate.correction", "gate.e_score_correction_bias"): x for name, x in state.items()}
    found = {}
    for name, tensor in state.items():
        if name.endswith(_GATE):
            both = [tensor, state[name.replace(_GATE, _UP)]]
            found[name.replace(_GATE, ".experts.gate_up_proj")] = torch.cat(both, 1)
        elif name.endswith(_DOWN):
            found[name.removesuffix(".weight")] = tensor
        elif not name.endswith(_UP):
            found[name] = tensor
    return found


def gradients(other: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients of a model of transformers by our names."""
    if other.config.model_type == "gpt_oss":
        return _fused_gradients(other)
    found = {}
    for name, parameter in other.named_parameters():
        if name.endswith(".experts.gate_up_proj"):
            path = name.removesuffix("gate_up_proj")
            gate, up = parameter.grad.chunk(2, 1)
            found |= {f"{path}gate_proj.weight": gate, f"{path}up_proj.weight": up}
        else:
            found[f"{name}.weight" if name.endswith(".experts.down_proj") else name] = parameter.grad
    return found


def tokens(lengths: list[int], seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
