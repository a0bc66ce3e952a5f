"""Shapes of the models that benchmarks compare, by name. Those from 0.5B on are Qwen's; the rest are as wide as a CPU
can bear. All have norms of queries and keys, since every contender runs them as Qwen3."""

from typing import Any

CONTEXT = 512
SHAPES: dict[str, dict[str, Any]] = {
    "6M": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_layers": 6, "num_heads": 4},
    "13M": {"vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1152, "num_layers": 6, "num_heads": 6},
    "50M": {"vocab_size": 16_384, "hidden_size": 512, "intermediate_size": 1536, "num_layers": 12, "num_heads": 8},
    "0.5B": {"vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_layers": 24, "num_heads": 14,
             "num_kv_heads": 2},
    "1.5B": {"vocab_size": 151_936, "hidden_size": 1536, "intermediate_size": 8960, "num_layers": 28, "num_heads": 12,
             "num_kv_heads": 2},
    "3B": {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 11_008, "num_layers": 36, "num_heads": 16,
           "num_kv_heads": 2},
    "8B": {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_layers": 36, "num_heads": 32,
           "num_kv_heads": 8, "tie_embeddings": False},
}  # fmt: skip


def as_hugging_face(name: str) -> dict[str, Any]:
    """A shape by the keys of transformers' configurations."""
    s = SHAPES[name]
    heads = s["num_heads"]
    return {
        "vocab_size": s["vocab_size"], "hidden_size": s["hidden_size"], "intermediate_size": s["intermediate_size"],
        "num_hidden_layers": s["num_layers"], "num_attention_heads": heads,
        "num_key_value_heads": s.get("num_kv_heads", heads), "head_dim": s["hidden_size"] // heads,
        "tie_word_embeddings": s.get("tie_embeddings", True),
    }  # fmt: skip
