"""The shape of a decoder as plans need it, and the numbers that follow from it."""

from dataclasses import dataclass
from typing import Protocol

from tilth.config.schema import Model


class DecoderShape(Protocol):
    """What plans read of a ``DecoderConfig``; widths in elements."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def tie_embeddings(self) -> bool: ...


@dataclass(frozen=True)
class Shape:
    """A decoder's shape without the model room."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False


def new_shape(model: Model, vocab_size: int) -> Shape:
    """The shape of a new model: the zeros of a recipe's ``[model]`` resolved, and what its family implies."""
    return Shape(
        vocab_size=vocab_size,
        hidden_size=model.hidden,
        intermediate_size=model.ffn or -(-model.hidden * 8 // (3 * 64)) * 64,
        num_layers=model.layers,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads or model.heads,
        head_dim=model.head_dim or model.hidden // model.heads,
        qk_norm=model.family == "qwen3",
        qkv_bias=model.family == "qwen2",
        tie_embeddings=model.tied,
    )


def parameter_shapes(shape: DecoderShape, *, value: bool = False) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter, by the names of Hugging Face. value: of a value model on this shape."""
    width = shape.hidden_size
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, width)}
    for layer in range(shape.num_layers):
        found |= {f"model.layers.{layer}.{name}": sizes for name, sizes in _layer_shapes(shape).items()}
    found["model.norm.weight"] = (width,)
    if value:
        return found | {"score.weight": (1, width), "score.bias": (1,)}
    return found if shape.tie_embeddings else found | {"lm_head.weight": (shape.vocab_size, width)}


def _layer_shapes(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    width, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    found: dict[str, tuple[int, ...]] = {}
    for name, rows, columns, bias in (
        ("self_attn.q_proj", query, width, shape.qkv_bias),
        ("self_attn.k_proj", key, width, shape.qkv_bias),
        ("self_attn.v_proj", key, width, shape.qkv_bias),
        ("self_attn.o_proj", width, query, shape.o_bias),
        ("mlp.gate_proj", inner, width, shape.mlp_bias),
        ("mlp.up_proj", inner, width, shape.mlp_bias),
        ("mlp.down_proj", width, inner, shape.mlp_bias),
    ):
        found |= {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})
    norms = ("self_attn.q_norm", "self_attn.k_norm") if shape.qk_norm else ()
    found |= {f"{name}.weight": (shape.head_dim,) for name in norms}
    return found | {f"{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}


def matrices(shape: DecoderShape) -> int:
    """Elements of the weight matrices of all layers."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = shape.hidden_size * (2 * query + 2 * key)
    return shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)


def parameters(shape: DecoderShape) -> int:
    """All parameters, exactly as the decoder has them."""
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    vectors = 2 * shape.hidden_size
    vectors += 2 * shape.head_dim * shape.qk_norm + (query + 2 * key) * shape.qkv_bias
    vectors += shape.hidden_size * shape.o_bias + (2 * shape.intermediate_size + shape.hidden_size) * shape.mlp_bias
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)
    return matrices(shape) + shape.num_layers * vectors + shape.hidden_size + embeddings


def kv_bytes(shape: DecoderShape, element: int) -> int:
    """Bytes of keys and values of one token, with ``element`` bytes each."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element
