"""Llama 2 and 3: biases, if any, on all of attention's projections or on all of the MLP's."""

from tilth.models.family import Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    fixed={"qk_norm": False},
    keys={"qkv_bias": "attention_bias", "o_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    defaults={"max_position_embeddings": 2048},
)
