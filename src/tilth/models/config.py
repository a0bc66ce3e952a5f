"""The shape of a decoder, and its translation from and to a Hugging Face ``config.json``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilth.core.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
}
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Supported kinds of rope scaling and the keys each one needs."""

# What transformers takes for a key that config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "mistral": {"max_position_embeddings": 131072, "sliding_window": 4096, "num_key_value_heads": 8},
}


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder. Widths in elements, positions in tokens. Raises ModelError on impossible values."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    """0: as many as query heads."""
    head_dim: int = 0
    """0: hidden_size / num_heads."""
    family: str = "qwen3"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    """None, or ``rope_type`` and its factors, as in transformers."""
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    """A token sees itself and the ``sliding_window - 1`` tokens before it, in the layers of ``window_layers``."""
    window_layers: tuple[int, ...] = field(default=())
    tie_embeddings: bool = False
    max_positions: int = 2048
    dropout: float = 0.0
    """On both residual branches, while training."""

    def __post_init__(self) -> None:
        if self.rope_scaling is not None:  # transformers writes into the dictionaries it is given
            object.__setattr__(self, "rope_scaling", dict(self.rope_scaling))
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.head_dim:
            _check(
                self.hidden_size % self.num_heads == 0,
                "hidden_size",
                self.hidden_size,
                f"a multiple of num_heads ({self.num_heads})",
            )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        self._validate()

    def _validate(self) -> None:
        _check(
            self.family in ARCHITECTURES.values(), "family", self.family, "one of " + ", ".join(ARCHITECTURES.values())
        )
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_positions"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "positive")
        _check(
            self.num_heads % self.num_kv_heads == 0,
            "num_kv_heads",
            self.num_kv_heads,
            f"a divisor of num_heads ({self.num_heads})",
        )
        _check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")
        _check(0 <= self.dropout < 1, "dropout", self.dropout, "at least 0 and below 1")
        window = self.sliding_window
        _check(window is None or window > 0, "sliding_window", window, "positive, or none")
        _check(
            window is not None or not self.window_layers,
            "window_layers",
            self.window_layers,
            "empty without a sliding_window",
        )
        _check_rope(self.rope_scaling)

    @property
    def rope_type(self) -> str:
        """Kind of rope scaling; ``default`` is none."""
        return self.rope_scaling["rope_type"] if self.rope_scaling else "default"

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, the token itself included; None: all earlier tokens."""
        return self.sliding_window if layer in self.window_layers else None

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "DecoderConfig":
        """Out of a ``config.json`` as transformers 4 or 5 writes it. Raises ModelError with the key and the reason."""
        family = _family(hf)
        get: Callable[..., Any] = {**_DEFAULTS[family], **hf}.get
        theta, scaling = _rope_from_hf(hf, get("max_position_embeddings"))
        _check(get("hidden_act", "silu") == "silu", "hidden_act", get("hidden_act"), "silu")
        attention_bias = bool(get("attention_bias", False)) and family in ("llama", "qwen3")
        window, window_layers = _windows_from_hf(family, get, _need(hf, "num_hidden_layers"))
        return cls(
            family=family,
            vocab_size=_need(hf, "vocab_size"),
            hidden_size=_need(hf, "hidden_size"),
            intermediate_size=_need(hf, "intermediate_size"),
            num_layers=_need(hf, "num_hidden_layers"),
            num_heads=_need(hf, "num_attention_heads"),
            num_kv_heads=get("num_key_value_heads") or 0,
            head_dim=get("head_dim") or 0,
            rms_norm_eps=get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=family == "llama" and bool(get("mlp_bias", False)),
            sliding_window=window,
            window_layers=window_layers,
            tie_embeddings=bool(get("tie_word_embeddings", False)),
            max_positions=get("max_position_embeddings"),
        )

    def to_hf(self) -> dict[str, Any]:
        """A ``config.json`` that transformers 4 and 5 and vLLM read. Raises ModelError if the family cannot say it."""
        self._check_family()
        hf: dict[str, Any] = {
            "architectures": [next(a for a, f in ARCHITECTURES.items() if f == self.family)],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if self.rope_scaling is None else dict(self.rope_scaling),
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
        }
        if self.family in ("llama", "qwen3"):
            hf["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            hf["mlp_bias"] = self.mlp_bias
        return {**hf, **self._windows_to_hf()}

    def _windows_to_hf(self) -> dict[str, Any]:
        if self.family == "llama":
            return {}
        if self.family == "mistral":
            return {"sliding_window": self.sliding_window}
        kinds = ["full_attention" if self.window(i) is None else "sliding_attention" for i in range(self.num_layers)]
        first = self.num_layers - len(self.window_layers)
        return {
            "use_sliding_window": bool(self.window_layers),
            "sliding_window": self.sliding_window,
            "max_window_layers": first,
            "layer_types": kinds,
        }

    def _check_family(self) -> None:
        """The flags that a family fixes must be as it fixes them, or a reader would build another model."""
        everywhere = self.window_layers == tuple(range(self.num_layers))
        table: dict[str, dict[str, Any]] = {
            "llama": {"qk_norm": False, "o_bias": self.qkv_bias, "sliding_window": None},
            "qwen2": {
                "qk_norm": False,
                "qkv_bias": True,
                "o_bias": False,
                "mlp_bias": False,
                "head_dim": self.hidden_size // self.num_heads,
            },
            "qwen3": {"qk_norm": True, "o_bias": self.qkv_bias, "mlp_bias": False},
            "mistral": {"qk_norm": False, "qkv_bias": False, "o_bias": False, "mlp_bias": False},
        }
        for name, value in table[self.family].items():
            _check(getattr(self, name) == value, name, getattr(self, name), f"{value} in family {self.family}")
        if self.family == "mistral" and self.sliding_window is not None:
            _check(everywhere, "window_layers", self.window_layers, "all layers in family mistral")


def _check(good: bool, name: str, value: object, right: str) -> None:
    if not good:
        raise ModelError(f"model {name} is {value}; it must be {right}")


def _need(hf: Mapping[str, Any], key: str) -> int:
    if not isinstance(hf.get(key), int):
        raise ModelError(f"config.json: {key} is {hf.get(key)!r}; it must be a whole number")
    return hf[key]


def _family(hf: Mapping[str, Any]) -> str:
    names = hf.get("architectures") or []
    family = ARCHITECTURES.get(names[0]) if names else hf.get("model_type")
    if family not in ARCHITECTURES.values():
        what = names[0] if names else hf.get("model_type")
        raise ModelError(f"config.json: architecture {what!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return str(family)


def _rope_from_hf(hf: Mapping[str, Any], max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling). transformers 5 keeps both in rope_parameters, earlier ones in rope_theta and rope_scaling."""
    found = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = float(found.pop("rope_theta", None) or hf.get("rope_theta") or 10_000.0)
    old_kind = found.pop("type", "default")
    found["rope_type"] = found.get("rope_type") or old_kind
    partial = found.pop("partial_rotary_factor", None) or hf.get("partial_rotary_factor") or 1.0
    _check(
        partial == 1.0, "partial_rotary_factor", partial, "1 (rotary embedding of a part of a head is not supported)"
    )
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
        raise ModelError(f"rope_type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for key in ROPE_TYPES[kind]:
        _check(
            isinstance(scaling.get(key), (int, float)),
            f"rope_scaling.{key}",
            scaling.get(key),
            f"a number ({kind} needs it)",
        )


def _windows_from_hf(family: str, get: Callable[..., Any], layers: int) -> tuple[int | None, tuple[int, ...]]:
    window = get("sliding_window")
    if family == "llama" or window is None or (family != "mistral" and not get("use_sliding_window", False)):
        return None, ()
    if family == "mistral":
        return window, tuple(range(layers))
    kinds = get("layer_types") or [
        "sliding_attention" if i >= get("max_window_layers") else "full" for i in range(layers)
    ]
    return window, tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
