"""Mixtral: Mistral with experts in every layer; weights of a token's experts sum to 1."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilth.config.schema import ModelConfig
from tilth.models.config import DecoderConfig, need
from tilth.models.family import ATTENTION, EMBEDDING, END, NORMS, Family, experts


class Mixtral(Family):
    """Family whose ``intermediate_size`` in config.json is the inner width of an expert."""

    def new(self, model: ModelConfig, vocab_size: int) -> DecoderConfig:
        found = super().new(model, vocab_size)
        return replace(found, intermediate_size=found.expert_size)

    def from_hf(self, hf: Mapping[str, Any]) -> DecoderConfig:
        layers = tuple(range(need(hf, "num_hidden_layers")))
        return self.read(hf, expert_layers=layers, expert_size=need(hf, "intermediate_size"))


FAMILY = Mixtral(
    architecture="MixtralForCausalLM",
    table=(
        *EMBEDDING,
        *ATTENTION,
        *experts(
            "model.layers.*.block_sparse_moe.experts.#.{}.weight",
            "w1",
            "w3",
            "w2",
            router="model.layers.*.block_sparse_moe.gate.weight",
        ),
        *NORMS,
        *END,
    ),
    fixed={
        "qk_norm": False,
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "shared_experts": 0,
        "router_score": "softmax",
        "renormalise": True,
        "routed_scale": 1.0,
    },
    implied=lambda config: {
        "expert_layers": tuple(range(config.num_layers)),
        "intermediate_size": config.expert_size,
    },
    keys={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    windows="all",
)
