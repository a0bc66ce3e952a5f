"""Gemma 3, its text model: norms around both blocks, five local layers to a global one, GeGLU, scaled embeddings."""

from torch import Tensor

from tilth.models.attention import DropoutContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Layer, WideRMSNorm, norm_of
from tilth.models.family import (
    ATTENTION,
    EMBEDDING,
    END,
    SWIGLU,
    Family,
    centered,
    norm,
    norm_behind,
    normed_behind,
)
from tilth.models.moe import ExpertContext


class CenteredRMSNorm(WideRMSNorm):
    """RMSNorm times 1 + weight."""

    offset = 1.0


class SandwichLayer(Layer):
    """Residual block x + norm(attention(norm(x))), x + norm(mlp(norm(x))) (arXiv 2503.19786)."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm_of(config), norm_of(config)

    def leave(self, x: Tensor, mixed: Tensor, dropout: DropoutContext | None, *routed: ExpertContext | None) -> Tensor:
        mixed = self.post_attention_layernorm(self.self_attn.o_proj(mixed.flatten(1)))
        x = x + self._drop(mixed, dropout, "attention")
        mapped = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), *routed))
        return x + self._drop(mapped, dropout, "mlp")


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    table=centered((
        *EMBEDDING, *normed_behind((*ATTENTION, *SWIGLU)), *norm("input_layernorm"),
        *norm_behind("post_attention_layernorm"), *norm("pre_feedforward_layernorm"),
        *norm_behind("post_feedforward_layernorm"), *END,
    )),
    layer=SandwichLayer,
    norm=CenteredRMSNorm,
    fixed={"qk_norm": True, "mlp_bias": False, "scale_embeddings": True},
    keys={"qkv_bias": "attention_bias", "o_bias": "attention_bias", "query_scalar": "query_pre_attn_scalar"},
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
    only={"final_logit_softcapping": None, "attn_logit_softcapping": None, "use_bidirectional_attention": False},
    activation="gelu_pytorch_tanh",
    activation_key="hidden_activation",
    windows="alternate",
    period=6,
    window_theta="rope_local_base_freq",
)  # fmt: skip
