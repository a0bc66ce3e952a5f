"""OLMo 2: norms behind attention and MLP instead of before them, and over all heads of queries and of keys."""

from torch import Tensor

from tilth.models.attention import CacheSlots, DropoutContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Layer, WideRMSNorm, norm_of
from tilth.models.family import ATTENTION, EMBEDDING, END, SWIGLU, Family, norm, norm_behind, normed_behind
from tilth.models.moe import ExpertContext
from tilth.models.rope import Tables

TABLE = (
    *EMBEDDING,
    *normed_behind(row for row in ATTENTION if "norm" not in row.name),
    *norm("self_attn.q_norm", "query_size", "rows", reads="queries"),
    *norm("self_attn.k_norm", "kv_size", "copied", reads="keys"),
    *normed_behind(SWIGLU),
    *norm_behind("post_attention_layernorm"),
    *norm_behind("post_feedforward_layernorm"),
    *END,
)


class PostNormLayer(Layer):
    """Residual block x + norm(attention(x)), x + norm(mlp(x)) (arXiv 2501.00656, section 2.1)."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        del self.input_layernorm
        self.post_feedforward_layernorm = norm_of(config)

    def enter(self, x: Tensor, tables: Tables, *into: CacheSlots) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn(x, tables, *into)

    def leave(self, x: Tensor, mixed: Tensor, dropout: DropoutContext | None, *routed: ExpertContext | None) -> Tensor:
        mixed = self.post_attention_layernorm(self.self_attn.o_proj(mixed.flatten(1)))
        x = x + self._drop(mixed, dropout, "attention")
        return x + self._drop(self.post_feedforward_layernorm(self.mlp(x, *routed)), dropout, "mlp")


FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    table=TABLE,
    layer=PostNormLayer,
    norm=WideRMSNorm,
    fixed={"qk_norm": True, "wide_qk_norm": True, "mlp_bias": False},
    implied=lambda config: {"head_dim": config.hidden_size // config.num_heads},
    keys={"qkv_bias": "attention_bias", "o_bias": "attention_bias"},
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
