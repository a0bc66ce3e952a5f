"""Qwen3: norms of queries and keys."""

from tilth.models.family import Family

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    fixed={"qk_norm": True, "mlp_bias": False},
    keys={"qkv_bias": "attention_bias", "o_bias": "attention_bias"},
    defaults={
        "max_position_embeddings": 32768, "num_key_value_heads": 32, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128,
    },
    windows="some",
)  # fmt: skip
