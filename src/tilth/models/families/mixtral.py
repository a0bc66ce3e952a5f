"""Mixtral: Mistral with experts in every layer; weights of a token's experts sum to 1."""

from tilth.models.family import ATTENTION, EMBEDDING, END, NORMS, ExpertFamily, experts, of_experts

MOE = "model.layers.*.block_sparse_moe"
FAMILY = ExpertFamily(
    architecture="MixtralForCausalLM",
    table=(
        *EMBEDDING, *ATTENTION,
        *experts(f"{MOE}.experts.#.{{}}.weight", "w1", "w3", "w2", router=f"{MOE}.gate.weight"), *NORMS, *END,
    ),
    fixed={
        "qk_norm": False, "qkv_bias": False, "o_bias": False, "mlp_bias": False, "shared_experts": 0,
        "router_score": "softmax", "renormalise": True, "routed_scale": 1.0,
    },
    implied=of_experts,
    keys={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_local_experts": 8,
        "num_experts_per_tok": 2, "rope_theta": 1e6,
    },
    windows="all",
)  # fmt: skip
