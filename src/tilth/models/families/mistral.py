"""Mistral: a sliding window in every layer, or in none."""

from tilth.models.family import Family

FAMILY = Family(
    architecture="MistralForCausalLM",
    fixed={"qk_norm": False, "qkv_bias": False, "o_bias": False, "mlp_bias": False},
    defaults={"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
    windows="all",
)
