"""Shape of a decoder, decided by its family, a recipe or a Hugging Face ``config.json``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from tilth.core.errors import ModelError
from tilth.plan.rules import Table

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Supported types of rope scaling -> keys that each one needs."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. Widths in elements, positions in tokens. Raises ModelError on impossible values."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    """0: equal to num_heads."""
    head_dim: int = 0
    """0: hidden_size / num_heads."""
    family: str = "qwen3"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    """``rope_type`` and its factors, as in transformers; None: no scaling."""
    window_rope_theta: float | None = None
    """Base of the rotary embedding, then without scaling, in the layers of ``window_layers``; None: as elsewhere."""
    scale_embeddings: bool = False
    """Multiply embeddings by sqrt(hidden_size)."""
    query_scalar: int = 0
    """Attention scores are divided by its root; 0: equal to head_dim."""
    qk_norm: bool = False
    wide_qk_norm: bool = False
    """Norm queries, and keys, over all heads together instead of each head alone."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    """Tokens that a token sees, itself included, in the layers of ``window_layers``."""
    window_layers: tuple[int, ...] = field(default=())
    tie_embeddings: bool = False
    max_positions: int = 2048
    dropout: float = 0.0
    """Probability on both residual branches, while training."""
    num_experts: int = 0
    """0: a dense model; the fields below are ignored."""
    experts_per_token: int = 0
    expert_size: int = 0
    """Inner width of each expert."""
    shared_experts: int = 0
    """Experts that see every token, as one MLP of ``shared_size``."""
    expert_layers: tuple[int, ...] = field(default=())
    """Layers with experts; the others have one MLP of ``intermediate_size``."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to scores: over all experts, or of each alone."""
    renormalise: bool = True
    """Divide the weights of a token's experts by their sum."""
    routed_scale: float = 1.0
    """Factor on the weights of a token's experts."""
    expert_groups: int = 1
    """Groups of neighbouring experts; a token chooses among those of ``groups_per_token`` groups (arXiv 2412.19437)."""
    groups_per_token: int = 1
    router_correction: bool = False
    """A bias on the scores that decides the choice of experts and not their weights (arXiv 2408.15664)."""

    def __post_init__(self) -> None:
        if self.rope_scaling is not None:  # transformers writes into the dictionaries it is given
            object.__setattr__(self, "rope_scaling", dict(self.rope_scaling))
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.head_dim:
            right = f"a multiple of num_heads ({self.num_heads})"
            check(self.hidden_size % self.num_heads == 0, "hidden_size", self.hidden_size, right)
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if not self.query_scalar:
            object.__setattr__(self, "query_scalar", self.head_dim)
        self._validate()

    def _validate(self) -> None:
        _families().family_of(self.family)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_positions"):
            check(getattr(self, name) > 0, name, getattr(self, name), "positive")
        right = f"a divisor of num_heads ({self.num_heads})"
        check(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", self.num_kv_heads, right)
        check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")
        check(self.value_dim <= self.head_dim, "value_dim", self.value_dim, f"at most head_dim ({self.head_dim})")
        check(self.query_scalar > 0, "query_scalar", self.query_scalar, "positive")
        check(0 <= self.dropout < 1, "dropout", self.dropout, "at least 0 and below 1")
        window, layers = self.sliding_window, self.window_layers
        check(window is None or window > 0, "sliding_window", window, "positive, or none")
        check(window is not None or not layers, "window_layers", layers, "empty without a sliding_window")
        _check_rope(self.rope_scaling)
        if self.num_experts or self.expert_layers:
            _check_experts(self)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers without experts."""
        return tuple(i for i in range(self.num_layers) if i not in self.expert_layers)

    @property
    def shared_size(self) -> int:
        """Inner width of the MLP that every token of a layer with experts goes through; 0: there is none."""
        return self.shared_experts * self.expert_size

    @property
    def rope_type(self) -> str:
        """Type of rope scaling; ``default``: none."""
        return self.rope_scaling["rope_type"] if self.rope_scaling else "default"

    def window(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, the token itself included; None: all earlier tokens."""
        return self.sliding_window if layer in self.window_layers else None

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value head, and of what a query head mixes."""
        return self.head_dim

    @property
    def latents(self) -> bool:
        """True if keys and values are made of a latent, which a KV cache may hold in their place."""
        return False

    def cached(self, latent: bool) -> tuple[int, int, int]:
        """Return heads and widths of keys and of values that a KV cache holds of a token in each layer. latent: instead
        of keys and values, what they are made of, if the family has that; values are then the beginning of keys."""
        return self.num_kv_heads, self.head_dim, self.value_dim

    @property
    def rope_dim(self) -> int:
        """Width of the part of a head that is rotated."""
        return self.head_dim

    @property
    def table(self) -> Table:
        """Table of parameters of its family, and of its encoders."""
        return _families().table_of(self.family)

    @staticmethod
    def from_hf(hf: Mapping[str, Any]) -> "DecoderConfig":
        """Read a ``config.json`` of transformers 4 or 5. Raises ModelError with the key and the reason."""
        return _families().family_of_hf(hf).from_hf(hf)

    def to_hf(self) -> dict[str, Any]:
        """Return a ``config.json`` for transformers 4 and 5 and vLLM. Raises ModelError if the family cannot express
        it."""
        return _families().family_of(self.family).to_hf(self)


def _check_experts(config: DecoderConfig) -> None:
    """Raise ModelError unless the fields of a model with experts fit together."""
    experts, groups, size = config.num_experts, config.expert_groups, config.num_experts // max(config.expert_groups, 1)
    most = groups and config.groups_per_token * size
    check(experts > 0, "num_experts", experts, "positive if there are expert_layers")
    check(0 < config.experts_per_token <= experts, "experts_per_token", config.experts_per_token, f"1 to {experts}")
    check(config.expert_size > 0, "expert_size", config.expert_size, "positive")
    check(config.shared_experts >= 0, "shared_experts", config.shared_experts, "0 or more")
    check(groups > 0 and experts % groups == 0, "expert_groups", groups, f"a divisor of num_experts ({experts})")
    enough = 0 < config.groups_per_token <= groups and config.experts_per_token <= most
    right = f"1 to {groups}, with experts_per_token ({config.experts_per_token}) experts in them"
    check(enough, "groups_per_token", config.groups_per_token, right)
    layers = config.expert_layers
    inside = layers == tuple(sorted({*layers})) and all(0 <= i < config.num_layers for i in layers)
    check(bool(layers) and inside, "expert_layers", layers, f"layers in order, of 0 to {config.num_layers - 1}")


def _families() -> ModuleType:
    from tilth.models import family  # imports DecoderConfig

    return family


def check(good: bool, name: str, value: object, right: str) -> None:
    """Raise ModelError with name, value and what would be right, unless good."""
    if not good:
        raise ModelError(f"model {name} is {value}; it must be {right}", key=name)


def need(hf: Mapping[str, Any], key: str) -> int:
    """Return a whole number of config.json. Raises ModelError if it is none."""
    if not isinstance(hf.get(key), int):
        raise ModelError(f"config.json: {key} is {hf.get(key)!r}; it must be a whole number", key=f"config.json.{key}")
    return hf[key]


def rope_from_hf(hf: Mapping[str, Any], max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling): of rope_parameters in transformers 5, of rope_theta and rope_scaling before."""
    found = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = float(found.pop("rope_theta", None) or hf.get("rope_theta") or 10_000.0)
    old_kind = found.pop("type", "default")
    found["rope_type"] = found.get("rope_type") or old_kind
    partial = found.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0
    check(partial == 1.0, "partial_rotary_factor", partial, "1 (rotary embedding of a part of a head is not supported)")
    if found["rope_type"] == "default":
        return theta, None
    if found["rope_type"] in ("llama3", "yarn"):
        found.setdefault(
            "original_max_position_embeddings", hf.get("original_max_position_embeddings") or max_positions
        )
    return theta, found


def _check_rope(scaling: Mapping[str, Any] | None) -> None:
    if scaling is None:
        return
    kind = scaling.get("rope_type")
    if kind not in ROPE_TYPES:
        message = f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        raise ModelError(message, key="rope_scaling.rope_type")
    for key in ROPE_TYPES[kind]:
        value = scaling.get(key)
        check(isinstance(value, (int, float)), f"rope_scaling.{key}", value, f"a number ({kind} needs it)")
