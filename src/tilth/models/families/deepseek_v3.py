"""DeepSeek-V3 and R1: multi-head latent attention, shared experts, sigmoid routing in groups with a bias of choice."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilth.config.schema import ModelConfig
from tilth.models.attention import DropoutContext
from tilth.models.config import DecoderConfig, check, need
from tilth.models.decoder import Layer, Linear, RMSNorm
from tilth.models.family import (
    CORRECTION,
    DENSE,
    EMBEDDING,
    END,
    NORMS,
    SHARED,
    Family,
    check_new,
    experts,
    linear,
    norm,
)
from tilth.models.lora import Adapter
from tilth.models.moe import ExpertContext
from tilth.models.rope import Tables, rotate
from tilth.plan.rules import Table

EPS = 1e-6
"""Of the norms of latents, whatever ``rms_norm_eps`` is."""


@dataclass(frozen=True)
class LatentConfig(DecoderConfig):
    """Shape of a decoder with multi-head latent attention; ``head_dim`` is the width of queries and keys."""

    q_lora_rank: int = 0
    """Width of the latent of queries; 0: they are projected at once."""
    kv_lora_rank: int = 0
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int = 0
    """Width of the part of a head that is not rotated."""
    qk_rope_head_dim: int = 0
    """Width of the part that is rotated, one for the keys of all heads."""
    v_head_dim: int = 0
    rope_interleave: bool = True
    """Rotate neighbouring elements together, else those of the two halves."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.qk_nope_head_dim + self.qk_rope_head_dim)
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            check(getattr(self, name) > 0, name, getattr(self, name), "positive")
        check(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "even")
        super().__post_init__()
        right = f"num_heads ({self.num_heads}): each head has its own key"
        check(self.num_kv_heads == self.num_heads, "num_kv_heads", self.num_kv_heads, right)

    @property
    def value_dim(self) -> int:
        return self.v_head_dim

    @property
    def latents(self) -> bool:
        return True

    def cached(self, latent: bool) -> tuple[int, int, int]:
        return (1, self.latent_size, self.kv_lora_rank) if latent else super().cached(latent)

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """Width of what a token's keys and values are made of."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expanded_size(self) -> int:
        """Width of all heads' keys, without their rotated part, and values."""
        return self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)

    @property
    def mixed_size(self) -> int:
        """Width of attention's result."""
        return self.num_heads * self.v_head_dim

    @property
    def q_latent_bias(self) -> bool:
        """Flag of the bias of the projection to the latent of queries."""
        return self.qkv_bias and bool(self.q_lora_rank)


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1).

    Keys and values are expanded from their latent. After ``fuse``, for inference, queries are taken to the latent
    instead, which is then the key of all heads, and its beginning the value: a cache holds the latent alone, and what
    heads mix of it is expanded behind attention (section 2.1.2).
    """

    sinks: None = None

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        self.config, self.scale, self.latent = config, _mscale(config) ** 2, False
        if config.q_lora_rank:
            self.q_a_proj, self.q_a_layernorm, self.q_b_proj = Linear(), RMSNorm(EPS), Linear()
        else:
            self.q_proj = Linear()
        self.kv_a_proj_with_mqa, self.kv_a_layernorm, self.kv_b_proj = Linear(), RMSNorm(EPS), Linear()
        self.o_proj = Linear()

    def forward(self, x: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [N, heads, head_dim], partly rotated, and values [N, heads, v_head_dim].

        Fused: queries [N, heads, latent_size], and keys [N, 1, latent_size] and values [N, 1, kv_lora_rank] of the
        latent.
        """
        c, rows = self.config, x.shape[0]
        heads = self.kv_b_proj.weight.shape[0] // (c.qk_nope_head_dim + c.v_head_dim)  # perhaps one rank's
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if c.q_lora_rank else self.q_proj(x)
        q_plain, q_turned = queries.view(rows, heads, c.head_dim).split((c.qk_nope_head_dim, c.qk_rope_head_dim), 2)
        latent, k_turned = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.qk_rope_head_dim), 1)
        latent, q_turned, k_turned = (
            self.kv_a_layernorm(latent),
            *(self._turned(part, tables) for part in (q_turned, k_turned[:, None])),
        )
        if self.latent and not torch.is_grad_enabled():
            return self._of_latent(q_plain, q_turned, latent, k_turned)
        expanded = self.kv_b_proj(latent).view(rows, heads, c.qk_nope_head_dim + c.v_head_dim)
        k_plain, v = expanded.split((c.qk_nope_head_dim, c.v_head_dim), 2)
        q = torch.cat((q_plain, q_turned), 2)
        k = torch.cat((k_plain, k_turned.expand(-1, k_plain.shape[1], -1)), 2)
        return (q if self.scale == 1 else q * self.scale), k, v

    def _of_latent(
        self, q_plain: Tensor, q_turned: Tensor, latent: Tensor, k_turned: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        q = torch.cat((torch.einsum("nhd,hdl->nhl", q_plain, self._expansion(q_plain)[0]), q_turned), 2)
        scale = self.scale * (c.latent_size / c.head_dim) ** 0.5  # a context divides by the root of the keys' width
        return q * scale, torch.cat((latent[:, None], k_turned), 2), latent[:, None]

    def _expansion(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrices of each head from the latent to keys and to values, [heads, width, kv_lora_rank]."""
        c = self.config
        weight: Tensor = self.kv_b_proj.weight
        weight = self.kv_b_proj.lora.merged(weight) if isinstance(self.kv_b_proj.lora, Adapter) else weight
        every = weight.to(x.dtype).view(-1, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        keys, values = every.split((c.qk_nope_head_dim, c.v_head_dim), 1)
        return keys, values

    def expand(self, mixed: Tensor) -> Tensor:
        """Return values [N, heads, v_head_dim] of latents [N, heads, kv_lora_rank]; values stay as they are."""
        if not self.latent or torch.is_grad_enabled():
            return mixed
        return torch.einsum("nhl,hvl->nhv", mixed, self._expansion(mixed)[1])

    def fuse(self) -> None:
        """Attend to latents in inference."""
        self.latent = True

    def _turned(self, heads: Tensor, tables: Tables) -> Tensor:
        if self.config.rope_interleave:
            heads = torch.cat((heads[..., 0::2], heads[..., 1::2]), -1)
        return rotate(heads, *tables)


def _mscale(config: LatentConfig) -> float:
    """Return the factor of YaRN on queries and on keys alike."""
    scaling = config.rope_scaling or {}
    strength, factor = scaling.get("mscale_all_dim") or 0.0, scaling.get("factor") or 1.0
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


class LatentLayer(Layer):
    """Pre-norm residual block with ``LatentAttention``."""

    def __init__(self, config: LatentConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.self_attn: LatentAttention = LatentAttention(config)  # type: ignore[assignment]

    def leave(self, x: Tensor, mixed: Tensor, dropout: DropoutContext | None, *routed: ExpertContext | None) -> Tensor:
        return super().leave(x, self.self_attn.expand(mixed), dropout, *routed)


class DeepSeekV3(Family):
    """Family whose first layers are dense, and whose files may hold layers for further tokens, which are not read."""

    def more_of_new(self, model: ModelConfig) -> dict[str, Any]:
        right = f"0, or model.heads = {model.heads}: each head has its own key in family {self.name}"
        check_new(model.kv_heads in (0, model.heads), model, "kv_heads", right)
        head = model.head_dim or model.hidden // model.heads
        widths = {"qk_nope_head_dim": head, "qk_rope_head_dim": -(-head // 4) * 2, "v_head_dim": head}
        ranks = {"q_lora_rank": -(-model.hidden // 2), "kv_lora_rank": -(-model.hidden // 4)}
        return super().more_of_new(model) | widths | ranks

    def from_hf(self, hf: Mapping[str, Any]) -> DecoderConfig:
        layers, dense = need(hf, "num_hidden_layers"), {**self.defaults, **hf}["first_k_dense_replace"] or 0
        widths = {"head_dim": 0, "q_lora_rank": {**self.defaults, **hf}["q_lora_rank"] or 0}
        return self.read(hf, expert_layers=tuple(range(min(dense, layers), layers)), **widths)

    def to_hf(self, config: DecoderConfig) -> dict[str, Any]:
        dense, layers = len(config.dense_layers), config.num_layers
        right = f"the last ones in family {self.name}"
        check(config.expert_layers == tuple(range(dense, layers)), "expert_layers", config.expert_layers, right)
        found = super().to_hf(config) | {"first_k_dense_replace": dense, "head_dim": config.rope_dim}
        return found | {"q_lora_rank": found["q_lora_rank"] or None, "num_nextn_predict_layers": 0}


def _attention() -> Table:
    """Return the rows of attention. Latents are whole on each rank along "tp", which uses them for its own heads."""
    (direct,) = linear("self_attn.q_proj", ("query_size", "hidden_size"), "rows")
    q_sizes, kv_sizes = ("q_lora_rank", "hidden_size"), ("latent_size", "hidden_size")
    down, bias = linear("self_attn.q_a_proj", q_sizes, "heads", "q_latent_bias", writes="latent")
    (up,) = linear("self_attn.q_b_proj", ("query_size", "q_lora_rank"), "rows", reads="latent")
    return (
        direct._replace(when="not q_lora_rank"),
        down._replace(when="q_lora_rank"),
        bias,
        *norm("self_attn.q_a_layernorm", "q_lora_rank", "heads", "q_lora_rank", "latent"),
        up._replace(when="q_lora_rank"),
        *linear("self_attn.kv_a_proj_with_mqa", kv_sizes, "heads", "qkv_bias", writes="latent"),
        *norm("self_attn.kv_a_layernorm", "kv_lora_rank", "heads", reads="latent"),
        *linear("self_attn.kv_b_proj", ("expanded_size", "kv_lora_rank"), "rows", reads="latent", writes="heads"),
        *linear("self_attn.o_proj", ("hidden_size", "mixed_size"), "columns", "o_bias", "residual", "heads"),
    )


FAMILY = DeepSeekV3(
    architecture="DeepseekV3ForCausalLM",
    table=(
        *EMBEDDING, *_attention(), *DENSE,
        *experts("model.layers.*.mlp.experts.#.{}.weight", "gate_proj", "up_proj", "down_proj"), *CORRECTION, *SHARED,
        *NORMS, *END,
    ),
    layer=LatentLayer,
    config=LatentConfig,
    fixed={"qk_norm": False, "mlp_bias": False, "router_score": "sigmoid", "router_correction": True},
    keys={
        "qkv_bias": "attention_bias", "o_bias": "attention_bias", "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank", "qk_nope_head_dim": "qk_nope_head_dim", "qk_rope_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim", "rope_interleave": "rope_interleave", "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok", "expert_size": "moe_intermediate_size",
        "shared_experts": "n_shared_experts", "renormalise": "norm_topk_prob", "routed_scale": "routed_scaling_factor",
        "expert_groups": "n_group", "groups_per_token": "topk_group",
    },
    defaults={
        "max_position_embeddings": 4096, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": True,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3,
    },
)  # fmt: skip
