"""Model families: what a family declares, and the lookup by name.

Each file of ``tilth/models/families`` declares the family of its name, as ``FAMILY``; a plugin uses ``tilth.family``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from typing import Any, Literal, TypeVar

from tilth.config.errors import RecipeError
from tilth.config.plugins import Declaration, call_declared, declared, shipped_families
from tilth.config.schema import ModelConfig
from tilth.core.errors import ModelError, PluginError
from tilth.models.config import DecoderConfig, check, need, rope_from_hf
from tilth.plan.rules import Parameter, Space, Table

_LAYER = "model.layers.*."
_FULL, _WINDOW = "full_attention", "sliding_attention"
_PLAIN = {"rope_type": "default"}
SPACES: dict[str, Space] = {
    "vocab_size": "tokens", "hidden_size": "residual", "query_size": "heads", "kv_size": "heads",
    "intermediate_size": "inner", "expert_size": "inner", "shared_size": "inner", "num_experts": "experts",
}  # fmt: skip
"""Attribute of the config that is a size -> the space of a dimension of this size, unless a row declares another."""


def linear(
    name: str,
    shape: tuple[str, str],
    tp: Any,
    bias: str = "",
    init: Any = "normal",
    reads: Space = "",
    writes: Space = "",
) -> Table:
    """Return the rows of a linear of the layers: weight [out, in], and a bias if the config's flag ``bias`` is set.

    reads, writes: spaces of input and output; "": those of ``SPACES``.
    """
    into, out = reads or SPACES.get(shape[1], ""), writes or SPACES.get(shape[0], "")
    weight = Parameter(f"{_LAYER}{name}.weight", shape, "matrix", tp, init, reads=into, writes=out)
    rule: Any = "residual" if tp == "columns" else tp
    own = Parameter(f"{_LAYER}{name}.bias", shape[:1], "bias", rule, "zeros", bias, writes=out)
    return (weight, own) if bias else (weight,)


def norm(
    name: str,
    size: str = "hidden_size",
    tp: Any = "residual",
    when: str = "",
    reads: Space = "residual",
    writes: Space = "",
) -> Table:
    """Return the row of a norm of the layers, by default over the residual stream. writes: "": what it reads."""
    name = f"{_LAYER}{name}.weight"
    return (Parameter(name, (size,), "norm", tp, "ones", when, reads=reads, writes=writes or reads),)


def norm_behind(name: str) -> Table:
    """Return the row of a norm of what attention or MLP adds to the residual stream (see ``normed_behind``)."""
    return norm(name, reads="branch", writes="residual")


def normed_behind(table: Iterable[Parameter]) -> Table:
    """Return the rows of attention or MLP whose result a norm takes before it is added to the residual stream."""
    return tuple(row._replace(writes="branch") if row.writes == "residual" else row for row in table)


def centered(table: Table) -> Table:
    """Return the table with norms whose weights begin at 0, for modules that add 1 to them."""
    return tuple(row._replace(init="zeros") if row.kind == "norm" else row for row in table)


_TOKENS = ("vocab_size", "hidden_size")
EMBEDDING: Table = (
    Parameter("model.embed_tokens.weight", _TOKENS, "embedding", "rows", "normal", reads="tokens", writes="residual"),
)
ATTENTION: Table = (
    *linear("self_attn.q_proj", ("query_size", "hidden_size"), "rows", "qkv_bias", writes="queries"),
    *linear("self_attn.k_proj", ("kv_size", "hidden_size"), "copied", "qkv_bias", writes="keys"),
    *linear("self_attn.v_proj", ("kv_size", "hidden_size"), "copied", "qkv_bias"),
    *linear("self_attn.o_proj", ("hidden_size", "query_size"), "columns", "o_bias", "residual"),
    *norm("self_attn.q_norm", "head_dim", "heads", "qk_norm", "queries"),
    *norm("self_attn.k_norm", "head_dim", "heads", "qk_norm", "keys"),
)
SWIGLU: Table = (
    *linear("mlp.gate_proj", ("intermediate_size", "hidden_size"), "rows", "mlp_bias"),
    *linear("mlp.up_proj", ("intermediate_size", "hidden_size"), "rows", "mlp_bias"),
    *linear("mlp.down_proj", ("hidden_size", "intermediate_size"), "columns", "mlp_bias", "residual"),
)
NORMS: Table = (*norm("input_layernorm"), *norm("post_attention_layernorm"))
_EXPERTS = "expert_layers"


def router_row(hf: str = "") -> Parameter:
    """Return the row of a router's weight. hf: pattern of its name in a Hugging Face directory; "": the same."""
    sizes, name = ("num_experts", "hidden_size"), f"{_LAYER}mlp.gate.weight"
    kind: Any = {"reads": "residual", "writes": "experts"}
    return Parameter(name, sizes, "router", "heads", "normal", "", hf, _EXPERTS, **kind)


def experts(pattern: str, gate: str, up: str, down: str, router: str = "") -> Table:
    """Return the rows of the router and the stacked experts of layers that have them.

    pattern: name of an expert's tensor in a Hugging Face directory, with ``*`` for the layer, ``#`` for the expert, and
    ``{}`` for the names gate, up and down. router: pattern of the router's weight there; "": the same name.
    """

    def stacked(name: str, shape: tuple[str, str], tp: Any, there: str, init: Any = "normal") -> Parameter:
        own, sizes = f"{_LAYER}mlp.experts.{name}.weight", ("num_experts", *shape)
        out, into = (SPACES[size] for size in shape)
        there = pattern.format(there)
        return Parameter(own, sizes, "matrix", tp, init, "", there, _EXPERTS, True, reads=into, writes=out)

    return (
        router_row(router),
        stacked("gate_proj", ("expert_size", "hidden_size"), "rows", gate),
        stacked("up_proj", ("expert_size", "hidden_size"), "rows", up),
        stacked("down_proj", ("hidden_size", "expert_size"), "columns", down, "residual"),
    )


_STORED = f"{_LAYER}mlp.gate.e_score_correction_bias"
CORRECTION: Table = (
    Parameter(f"{_LAYER}mlp.gate.correction", ("num_experts",), "bias", "whole", "zeros", "router_correction", _STORED,
              _EXPERTS, writes="experts"),
)  # fmt: skip
"""Bias of the choice of experts, which no gradient moves."""
SHARED: Table = tuple(
    row._replace(layers=_EXPERTS, when="shared_experts")
    for row in (
        *linear("mlp.shared_experts.gate_proj", ("shared_size", "hidden_size"), "rows"),
        *linear("mlp.shared_experts.up_proj", ("shared_size", "hidden_size"), "rows"),
        *linear("mlp.shared_experts.down_proj", ("hidden_size", "shared_size"), "columns", init="residual"),
    )
)
"""MLP that every token of a layer with experts goes through."""
DENSE: Table = tuple(row._replace(layers="dense_layers") for row in SWIGLU)
"""MLP of the layers without experts."""
END: Table = (
    Parameter("model.norm.weight", ("hidden_size",), "norm", "residual", "ones", reads="residual", writes="residual"),
    Parameter("lm_head.weight", _TOKENS, "embedding", "rows", "normal", "not tie_embeddings", reads="residual",
              writes="tokens"),
)  # fmt: skip
"""Final norm and output head."""


_NEEDED = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
}  # fmt: skip
_KEYS = {
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta", "tie_embeddings": "tie_word_embeddings", "max_positions": "max_position_embeddings",
}  # fmt: skip
"""Field of a config -> key of config.json, in all families."""

_QUANTISED = ("quantization_config", "compression_config")


_ELSEWHERE: dict[str, Any] = {"window_rope_theta": None, "scale_embeddings": False, "wide_qk_norm": False}
"""Field of a config -> its value in the families that do not name it."""


def _nothing(config: DecoderConfig) -> dict[str, Any]:
    return {}


def _inner(model: ModelConfig) -> int:
    """Return the inner width of the SwiGLU of a new model."""
    return model.ffn or -(-model.hidden * 8 // (3 * 64)) * 64


@dataclass(frozen=True)
class Family:
    """Declaration of a family: ``table`` decides everything about parameters, the other fields about config.json; a
    subclass may extend ``from_hf`` and ``to_hf``."""

    architecture: str
    """Class of transformers, ``...ForCausalLM``."""
    table: Table = (*EMBEDDING, *ATTENTION, *SWIGLU, *NORMS, *END)
    """Rows in the order of the modules."""
    layer: Callable[..., Any] | None = None
    """(config, number) -> one layer; None: ``decoder.Layer``."""
    norm: Callable[[float], Any] | None = None
    """(eps) -> a norm; None: ``decoder.RMSNorm``."""
    config: type[DecoderConfig] = DecoderConfig
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Field of the config -> its value in all models of the family; not in config.json."""
    implied: Callable[[DecoderConfig], Mapping[str, Any]] = _nothing
    """Further fields that are not in config.json -> values that follow from the others."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Further field of the config -> key of config.json."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Key of config.json -> default of transformers."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Key of config.json -> the one value that is supported, the default of transformers."""
    activation: str = "silu"
    activation_key: str = "hidden_act"
    windows: Literal["none", "all", "some", "alternate"] = "none"
    """Layers that may have a sliding window. alternate: all but every ``period``-th one. With a default for
    ``use_sliding_window`` that key of config.json switches them."""
    period: int = 0
    window_theta: str = ""
    """Key of config.json for the rotary base of layers with a window, which have no scaling; "": it is no other."""
    model_type: str = ""
    """``model_type`` in config.json; "": the name."""
    encoders: tuple[str, ...] = ()
    """Names of the encoders of media that its models have; their rows follow those of ``table``."""
    name: str = ""
    """Name of the declaration: ``model.family`` in a recipe."""

    @property
    def hf_type(self) -> str:
        """``model_type`` in config.json."""
        return self.model_type or self.name

    def new(self, model: ModelConfig, vocab_size: int) -> DecoderConfig:
        """Return the config of a new model: a recipe's ``[model]`` with its zeros resolved."""
        return self.config(
            vocab_size=vocab_size,
            hidden_size=model.hidden,
            intermediate_size=_inner(model),
            num_layers=model.layers,
            num_heads=model.heads,
            num_kv_heads=model.kv_heads,
            head_dim=model.head_dim or model.hidden // model.heads,
            family=self.name,
            rope_theta=model.rope_theta,
            tie_embeddings=model.tied,
            max_positions=model.context,
            dropout=model.dropout,
            **self.more_of_new(model),
            **self.fixed,
        )

    def more_of_new(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of a new model's config that not all families have."""
        return {**self._new_experts(model), **self._new_windows(model)}

    def _new_experts(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of experts of a new model. Raises RecipeError for what the family does not have."""
        there = {row.layers for row in self.table}
        checks = {"experts": _EXPERTS in there, "dense_layers": "dense_layers" in there}
        checks |= {"shared_experts": "shared_experts" not in self.fixed}
        for name, good in checks.items():
            check_new(good or not getattr(model, name), model, name, f"0 in family {self.name}")
        if _EXPERTS not in there:
            return {}
        experts, most = model.experts or 8, f"1 to {model.experts or 8}, the experts of a layer"
        check_new(model.experts_per_token <= experts, model, "experts_per_token", most)
        check_new(model.dense_layers < model.layers, model, "dense_layers", f"below model.layers = {model.layers}")
        own = model.expert_ffn or -(-_inner(model) // (8 * model.experts_per_token)) * 8
        found: dict[str, Any] = {
            "num_experts": experts,
            "experts_per_token": model.experts_per_token,
            "expert_size": own,
            "shared_experts": model.shared_experts,
            "expert_layers": tuple(range(model.dense_layers, model.layers)),
        }
        return {name: value for name, value in found.items() if name not in self.fixed}

    def _new_windows(self, model: ModelConfig) -> dict[str, Any]:
        """Return windows and their rotary base in a new model: those that the family is known by."""
        if self.windows != "alternate":
            return {}
        bases = {"": None, _KEYS["rope_theta"]: model.rope_theta}
        local = bases[self.window_theta] if self.window_theta in bases else self.defaults[self.window_theta]
        layers = tuple(i for i, kind in enumerate(self._kinds(model.layers, self.period)) if kind == _WINDOW)
        window = self.defaults["sliding_window"] if layers else None
        return {"sliding_window": window, "window_layers": layers, "window_rope_theta": local}

    @staticmethod
    def _kinds(layers: int, period: int) -> list[str]:
        return [_WINDOW if (i + 1) % period else _FULL for i in range(layers)]

    def from_hf(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """Return the config that a ``config.json`` describes. Raises ModelError with the key and the reason."""
        return self.read(hf)

    def read(self, hf: Mapping[str, Any], **more: Any) -> DecoderConfig:
        """Return the config of a ``config.json``. more: fields that a family's own keys decide."""
        whole = {**self.defaults, **hf}
        get: Callable[..., Any] = whole.get
        rope = self._rope_from_hf(whole)
        activation = get(self.activation_key, self.activation)
        check(activation == self.activation, self.activation_key, activation, self.activation)
        for key, right in self.only.items():
            check(get(key) is None or get(key) == right, key, get(key), str(right))
        for key in _QUANTISED:
            check(get(key) is None, key, get(key), "absent: convert quantised weights to bf16 first")
        window, layers = self._windows_from_hf(get, need(hf, "num_hidden_layers"))
        found: dict[str, Any] = {name: need(hf, key) for name, key in _NEEDED.items()}
        found |= {name: get(key) for name, key in {**_KEYS, **self.keys}.items() if get(key) is not None}
        flags = {one.name for one in fields(self.config) if isinstance(one.default, bool)}
        found |= {name: bool(found[name]) for name in flags & found.keys()}
        found |= {**rope, "sliding_window": window, "window_layers": layers}
        if not more.get("expert_layers", True):
            more["num_experts"] = 0
        return self.config(family=self.name, **{**found, **more}, **self.fixed)

    def _rope_from_hf(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of rotary embedding; transformers 5 writes them by kind of layer if there are several."""
        given: Mapping[str, Any] = hf.get("rope_parameters") or {}
        longest: int = hf.get("max_position_embeddings")  # type: ignore[assignment]  # read where scaling needs it
        apart = bool(given.keys() & {_FULL, _WINDOW})
        theta, scaling = rope_from_hf({**hf, "rope_parameters": given.get(_FULL)} if apart else hf, longest)
        if not self.window_theta:
            return {"rope_theta": theta, "rope_scaling": scaling}
        local = (given.get(_WINDOW) or {}) if apart else {}
        base, other = rope_from_hf({"rope_theta": hf.get(self.window_theta), "rope_parameters": local}, longest)
        check(other is None, f"rope_parameters.{_WINDOW}", other, "without scaling")
        return {"rope_theta": theta, "rope_scaling": scaling, "window_rope_theta": base}

    def to_hf(self, config: DecoderConfig) -> dict[str, Any]:
        """Return a ``config.json`` for transformers 4 and 5 and vLLM. Raises ModelError if the family cannot express
        it."""
        for name, value in {**self.fixed, **self.implied(config)}.items():
            self._must_be(config, name, value)
        hf: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.hf_type,
            self.activation_key: self.activation,
        }
        keys = {
            **_NEEDED,
            **_KEYS,
            **self.keys,
            **({"window_rope_theta": self.window_theta} if self.window_theta else {}),
        }
        for name, value in {**_ELSEWHERE, "query_scalar": config.head_dim}.items():
            if name not in keys and name not in self.fixed:
                self._must_be(config, name, value)
        for name, key in keys.items():
            self._must_be(config, name, hf.setdefault(key, getattr(config, name)))  # fields that share a key agree
        scaling = None if config.rope_scaling is None else dict(config.rope_scaling)
        if (
            self.window_theta
        ):  # transformers 5 takes the two by kind of layer, and reads no theta of the second elsewhere
            full, local = {"rope_theta": config.rope_theta, **(scaling or _PLAIN)}, config.window_rope_theta
            hf["rope_parameters"] = {_FULL: full, _WINDOW: {"rope_theta": local, **_PLAIN}}
        hf |= {"rope_scaling": scaling, "attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}
        return hf | self._windows_to_hf(config)

    def _must_be(self, config: DecoderConfig, name: str, value: object) -> None:
        """Raise ModelError unless a field has the value that the family's config.json implies to its readers."""
        check(getattr(config, name) == value, name, getattr(config, name), f"{value} in family {self.name}")

    def _windows_from_hf(self, get: Callable[..., Any], layers: int) -> tuple[int | None, tuple[int, ...]]:
        off = "use_sliding_window" in self.defaults and not get("use_sliding_window")
        window = None if off else get("sliding_window")
        if self.windows == "all" and window is not None:
            return window, tuple(range(layers))
        if self.windows == "alternate":
            kinds = get("layer_types") or self._kinds(layers, get("sliding_window_pattern", self.period))
            found = tuple(i for i, kind in enumerate(kinds) if kind == _WINDOW)
            right = f"set, since layer_types has {_WINDOW}"
            check(window is not None or not found, "sliding_window", window, right)
            return window if found else None, found
        if self.windows != "some" or window is None:
            return None, ()
        kinds = get("layer_types") or [_WINDOW if i >= get("max_window_layers") else _FULL for i in range(layers)]
        return window, tuple(i for i, kind in enumerate(kinds) if kind == _WINDOW)

    def _windows_to_hf(self, config: DecoderConfig) -> dict[str, Any]:
        if self.windows == "none":
            self._must_be(config, "sliding_window", None)
            return {}
        if self.windows == "all":
            everywhere = tuple(range(config.num_layers)) if config.sliding_window is not None else ()
            self._must_be(config, "window_layers", everywhere)
            switch = {"use_sliding_window": bool(everywhere)} if "use_sliding_window" in self.defaults else {}
            return {"sliding_window": config.sliding_window, **switch}
        kinds = [_FULL if config.window(i) is None else _WINDOW for i in range(config.num_layers)]
        if self.windows == "alternate":
            window = config.sliding_window or self.defaults["sliding_window"]  # transformers needs one in any case
            return {"sliding_window": window, "layer_types": kinds}
        return {
            "use_sliding_window": bool(config.window_layers),
            "sliding_window": config.sliding_window,
            "max_window_layers": config.num_layers - len(config.window_layers),
            "layer_types": kinds,
        }


@dataclass(frozen=True)
class Encoder:
    """Declaration of an encoder of media, by ``tilth.encoder``."""

    table: Table
    """Rows of its parameters, whose names begin with ``encoders.NAME.``."""
    module: Callable[[DecoderConfig], Any]
    """Returns a module whose forward pass takes the bytes of each item, uint8 [n], the count of positions of each, and
    a dtype: it returns embeddings [sum of counts, hidden] of that dtype; those of an item depend on it alone."""
    name: str = ""


Declared = TypeVar("Declared", Family, Encoder)


def of_experts(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields that follow from the others where every layer has experts (``ExpertFamily.implied``)."""
    return {"expert_layers": tuple(range(config.num_layers)), "intermediate_size": config.expert_size}


class ExpertFamily(Family):
    """Family with experts in every layer; ``intermediate_size`` in config.json is the inner width of an expert."""

    def new(self, model: ModelConfig, vocab_size: int) -> DecoderConfig:
        found = super().new(model, vocab_size)
        return replace(found, intermediate_size=found.expert_size)

    def from_hf(self, hf: Mapping[str, Any]) -> DecoderConfig:
        layers = tuple(range(need(hf, "num_hidden_layers")))
        return self.read(hf, expert_layers=layers, expert_size=need(hf, "intermediate_size"))


def check_new(good: bool, model: ModelConfig, key: str, right: str) -> None:
    """Raise RecipeError with a key of ``[model]``, its value and what would be right, unless good."""
    if not good:
        raise RecipeError(f"model.{key} = {getattr(model, key)}; it must be {right}", key=f"model.{key}")


# ---- by name ----


@cache
def _shipped() -> dict[str, Family]:
    package = "tilth.models.families"
    return {name: replace(import_module(f"{package}.{name}").FAMILY, name=name) for name in shipped_families()}


@cache
def _of_plugin(declaration: Declaration, kind: type[Declared]) -> Declared:
    made = call_declared(declaration)
    if not isinstance(made, kind):
        message = f"{declaration.title} returns no {kind.__module__}.{kind.__name__}"
        raise PluginError(message, key=f"{declaration.kind}.{declaration.name}")
    return replace(made, name=declaration.name)


def families() -> dict[str, Family]:
    """Return the families by name: those of Tilth, then those of plugins."""
    return _shipped() | {name: _of_plugin(found, Family) for name, found in declared("family").items()}


def family_of(name: str) -> Family:
    """Return the family of this name. Raises ModelError with the known names."""
    known = families()
    check(name in known, "family", name, f"one of {', '.join(known)}")
    return known[name]


def encoder_of(name: str) -> Encoder:
    """Return the encoder of this name. Raises ModelError with the known names."""
    known = declared("encoder")
    check(name in known, "encoder", name, f"one that a plugin declares, here {', '.join(known) or 'none'}")
    return _of_plugin(known[name], Encoder)


def table_of(name: str) -> Table:
    """Return the rows of a family's decoders, then those of its encoders."""
    family = family_of(name)
    return family.table + tuple(row for one in family.encoders for row in encoder_of(one).table)


def new_config(model: ModelConfig, vocab_size: int) -> DecoderConfig:
    """Return the config that a recipe's ``[model]`` describes."""
    return family_of(model.family).new(model, vocab_size)


def family_of_hf(hf: Mapping[str, Any]) -> Family:
    """Return the family of a ``config.json``, by its architecture or else its model type. Raises ModelError."""
    for family in families().values():
        if _claims(hf) == (family.architecture if hf.get("architectures") else family.hf_type):
            return family
    supported = ", ".join(family.architecture for family in families().values())
    message = f"config.json: architecture {_claims(hf)!r} is not supported; supported: {supported}"
    raise ModelError(message, key="config.json.architectures")


def is_known(hf: Mapping[str, Any]) -> bool:
    """True if the family of a ``config.json`` is declared."""
    return _claims(hf) in {name for family in families().values() for name in (family.hf_type, family.architecture)}


def _claims(hf: Mapping[str, Any]) -> object:
    names = hf.get("architectures") or []
    return names[0] if names else hf.get("model_type")
