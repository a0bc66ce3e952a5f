"""Qwen3 with experts: softmax over all experts, their weights renormalised or not, no shared expert."""

from collections.abc import Mapping
from typing import Any

from tilth.models.config import DecoderConfig, need
from tilth.models.family import ATTENTION, DENSE, EMBEDDING, END, NORMS, Family, experts


class Qwen3MoE(Family):
    """Family with ``decoder_sparse_step`` and ``mlp_only_layers`` in config.json, which name layers with experts."""

    def from_hf(self, hf: Mapping[str, Any]) -> DecoderConfig:
        hf = {"num_experts": hf.get("num_local_experts", 128), **hf}  # the name in transformers 5
        step, dense = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or []
        layers = range(need(hf, "num_hidden_layers"))
        return self.read(hf, expert_layers=tuple(i for i in layers if i not in dense and (i + 1) % step == 0))

    def to_hf(self, config: DecoderConfig) -> dict[str, Any]:
        return super().to_hf(config) | {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}


FAMILY = Qwen3MoE(
    architecture="Qwen3MoeForCausalLM",
    table=(
        *EMBEDDING, *ATTENTION, *DENSE,
        *experts("model.layers.*.mlp.experts.#.{}.weight", "gate_proj", "up_proj", "down_proj"), *NORMS, *END,
    ),
    fixed={"qk_norm": True, "mlp_bias": False, "shared_experts": 0, "router_score": "softmax", "routed_scale": 1.0},
    keys={
        "qkv_bias": "attention_bias", "o_bias": "attention_bias", "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok", "expert_size": "moe_intermediate_size",
        "renormalise": "norm_topk_prob",
    },
    defaults={
        "max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": False, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    },
    windows="all",
)  # fmt: skip
