"""gpt-oss: attention sinks, a window in every other layer, experts with biases and a clamped SwiGLU, YaRN."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilth.models.config import DecoderConfig, check
from tilth.models.decoder import Layer, WideRMSNorm
from tilth.models.family import ATTENTION, EMBEDDING, END, NORMS, SPACES, ExpertFamily, of_experts, router_row
from tilth.models.moe import Experts, MoE
from tilth.plan.rules import Parameter, Table

ALPHA, LIMIT = 1.702, 7.0
"""Gain of the sigmoid, and bound of gate and up."""


class ClampedExperts(Experts):
    """Experts with down((up + 1) * gate * sigmoid(alpha gate)), gate at most and up within the limit."""

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


class ClampedLayer(Layer):
    """Pre-norm residual block with ``ClampedExperts``."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        assert isinstance(self.mlp, MoE)
        self.mlp.experts = ClampedExperts()


class GptOss(ExpertFamily):
    """Family whose config.json always names a type of rope scaling."""

    def from_hf(self, hf: Mapping[str, Any]) -> DecoderConfig:
        scaled = hf.get("rope_parameters") or hf.get("rope_scaling", True)
        right = "absent, or name a rope_type: null is no scaling to transformers 4 and YaRN to transformers 5"
        check(scaled is not None, "rope_scaling", None, right)
        return super().from_hf(hf)

    def to_hf(self, config: DecoderConfig) -> dict[str, Any]:
        found = super().to_hf(config)
        scaling = found.pop("rope_scaling") or {"rope_type": "default"}  # none at all means YaRN to transformers
        return found | {"rope_parameters": {"rope_theta": config.rope_theta, **scaling}}


def _experts() -> Table:
    """Return the rows of routers and experts. Hugging Face has gate and up in one tensor, in alternate columns."""
    inside, there = "model.layers.*.mlp.", "expert_layers"
    fused, down = f"{inside}experts.gate_up_proj", f"{inside}experts.down_proj"
    inner, outer = ("num_experts", "expert_size", "hidden_size"), ("num_experts", "hidden_size", "expert_size")

    def weight(name: str, sizes: tuple[str, ...], tp: Any, init: Any, hf: str) -> Parameter:
        into, out = SPACES[sizes[2]], SPACES[sizes[1]]
        name = f"{inside}experts.{name}.weight"
        return Parameter(name, sizes, "matrix", tp, init, "", hf, there, True, True, reads=into, writes=out)

    def bias(name: str, size: str, tp: Any, hf: str) -> Parameter:
        sizes, name = ("num_experts", size), f"{inside}experts.{name}.bias"
        return Parameter(name, sizes, "bias", tp, "zeros", "", hf, there, True, writes=SPACES[size])

    router = f"{inside}router"
    return (
        router_row(f"{router}.weight"),
        Parameter(f"{inside}gate.bias", inner[:1], "bias", "heads", "zeros", "", f"{router}.bias", there,
                  writes="experts"),
        weight("gate_proj", inner, "rows", "normal", fused),
        bias("gate_proj", "expert_size", "rows", f"{fused}_bias"),
        weight("up_proj", inner, "rows", "normal", fused),
        bias("up_proj", "expert_size", "rows", f"{fused}_bias"),
        weight("down_proj", outer, "columns", "residual", down),
        bias("down_proj", "hidden_size", "heads", f"{down}_bias"),
    )  # fmt: skip


SINKS: Table = (Parameter("model.layers.*.self_attn.sinks", ("num_heads",), "bias", "rows", "zeros", writes="heads"),)
FAMILY = GptOss(
    architecture="GptOssForCausalLM",
    table=(*EMBEDDING, *SINKS, *ATTENTION, *_experts(), *NORMS, *END),
    layer=ClampedLayer,
    norm=WideRMSNorm,
    fixed={
        "qk_norm": False, "qkv_bias": True, "o_bias": True, "mlp_bias": False, "shared_experts": 0,
        "router_score": "softmax", "renormalise": True, "routed_scale": 1.0,
    },
    implied=of_experts,
    keys={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
        "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4, "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    only={"attention_bias": True, "swiglu_alpha": ALPHA, "swiglu_limit": LIMIT},
    windows="alternate",
    period=2,
)  # fmt: skip
