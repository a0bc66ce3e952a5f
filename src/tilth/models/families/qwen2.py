"""Qwen2 and Qwen2.5: biases on queries, keys and values; the width of a head is no choice."""

from tilth.models.family import Family

FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    fixed={"qk_norm": False, "qkv_bias": True, "o_bias": False, "mlp_bias": False},
    implied=lambda config: {"head_dim": config.hidden_size // config.num_heads},
    defaults={
        "max_position_embeddings": 32768, "num_key_value_heads": 32, "use_sliding_window": False,
        "sliding_window": 4096, "max_window_layers": 28,
    },
    windows="some",
)  # fmt: skip
