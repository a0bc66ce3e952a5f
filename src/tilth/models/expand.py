"""Expansion of a trained decoder to more width and depth that computes the same function (LEMON, arXiv 2310.07999).

All follows from ``reads`` and ``writes`` of the rows of a family's table. With d channels of the residual stream, D
after expansion, r = D // d and rho = r d / D:

- The stream becomes r copies of itself and D - r d zeros. What writes to it has its rows copied, and zeros behind.
- A norm of it has its weight times sqrt(rho) and eps times rho, so that its result is expanded alike. All norms share
  one eps: what queries' and keys' norms take is made greater by sqrt(rho), too.
- Inner units, and heads in whole groups of a key head and its queries, are copied in turn.
- Columns that read copies sum to those of the source; columns that read zeros are free. Both are otherwise the weights
  of a new model, so that copies differ from each other, and learn different things.
- A layer that is inserted is a copy of the one before it which adds zero.
- Tied embeddings meet r copies of the result: the final norm is divided by r.

No family has a norm that takes a mean (LayerNorm), for which the paper expands the stream otherwise.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilth.core.errors import ModelError
from tilth.core.random import stream
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.family import family_of
from tilth.plan.rules import Parameter, rule_of
from tilth.plan.shape import parameter_shapes

_EMBEDDING = "model.embed_tokens.weight"
_STREAM = ("residual", "branch")
_HEADS = ("queries", "keys", "heads")
_GROWS = ", ".join((*_STREAM, *_HEADS, "inner"))
PROBE, TOLERANCE = 32, 1e-9
"""Tokens on which both models are compared, and the greatest difference of logits in float64, relative to them."""


class Sizes(NamedTuple):
    """Shape to grow to, by the keys of a recipe's ``[model]``; 0: as it is."""

    hidden: int = 0
    layers: int = 0
    heads: int = 0
    ffn: int = 0
    expert_ffn: int = 0


_FIELDS = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "expert_size")
"""Of a config, in the order of ``Sizes``."""


# ---- the shape ----


def expanded_config(config: DecoderConfig, sizes: Sizes, *, untie: bool = False) -> DecoderConfig:
    """Return the config of the expanded model. ModelError: no expansion to these sizes computes the same function.

    Key heads grow with the heads, in groups; the width of a head, latents and the number of experts stay.
    """
    for (key, given), field in zip(sizes._asdict().items(), _FIELDS):
        own = getattr(config, field)
        _check(given == 0 or given >= own, key, given, f"{own} or more, since the model has {own}")
    _check(not untie or config.tie_embeddings, "untie", untie, "left out: the model has an output head of its own")
    _check_inner(config, sizes)
    group, heads = config.num_heads // config.num_kv_heads, sizes.heads or config.num_heads
    right = f"a multiple of {group}: a key head is copied with its {group} queries"
    _check(heads % group == 0, "heads", heads, right)
    layers, width = sizes.layers or config.num_layers, config.hidden_size
    hidden = sizes.hidden or width
    of = source_layers(config.num_layers, layers)
    grown = replace(
        config,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads // group,
        intermediate_size=sizes.ffn or config.intermediate_size,
        expert_size=sizes.expert_ffn or config.expert_size,
        rms_norm_eps=config.rms_norm_eps * _share(width, hidden),
        tie_embeddings=config.tie_embeddings and not untie,
        window_layers=tuple(i for i, layer in enumerate(of) if layer in config.window_layers),
        expert_layers=tuple(i for i, layer in enumerate(of) if layer in config.expert_layers),
    )
    grown = _implied(grown, group)
    if grown == config:
        message = f"nothing to expand: give a greater one of {', '.join(Sizes._fields)}, or untie"
        raise ModelError(message, key="hidden")
    return grown


def source_layers(layers: int, grown: int) -> list[int]:
    """Return the layer of the source that each layer is a copy of; of several copies the first is the source's."""
    return [i * layers // grown for i in range(grown)]


def _check_inner(config: DecoderConfig, sizes: Sizes) -> None:
    """Check that the model has layers of the inner widths that are given."""
    there, other = len(config.dense_layers), "; expert_ffn widens experts" if config.expert_layers else ""
    _check(not sizes.ffn or there > 0, "ffn", sizes.ffn, f"left out: no layer has an MLP of its own{other}")
    right = "left out: no layer has experts; ffn widens the MLP"
    _check(not sizes.expert_ffn or len(config.expert_layers) > 0, "expert_ffn", sizes.expert_ffn, right)


def _share(width: int, grown: int) -> float:
    """Return the share of copies among the channels of the expanded residual stream, rho."""
    return grown // width * width / grown


def _implied(grown: DecoderConfig, group: int) -> DecoderConfig:
    """Return the config with the fields that its family derives from others. ModelError: that would be another head."""
    implied = family_of(grown.family).implied(grown)
    if "head_dim" in implied:
        width, whole = grown.head_dim, grown.num_heads * grown.head_dim
        heads = max(-(-grown.hidden_size // (group * width)) * group, grown.num_heads)
        right = f"heads * {width} in family {grown.family}, as hidden {heads * width} with heads {heads}"
        _check(grown.hidden_size == whole, "hidden", grown.hidden_size, right)
    return replace(grown, **implied)


def _check(good: bool, key: str, value: object, right: str) -> None:
    if not good:
        raise ModelError(f"cannot expand losslessly to {key} = {value}; it must be {right}", key=key)


# ---- the weights ----


def expand(
    config: DecoderConfig, tensors: Mapping[str, Tensor], grown: DecoderConfig, seed: int | None = 0
) -> dict[str, Tensor]:
    """Return the weights, in float64, of a model of the config ``grown`` that computes what these do.

    config, tensors: of the source, its tensors read one at a time; grown: by ``expanded_config``. seed: of what is new;
    None: copies are equal and all else is 0, so that no training ever tells them apart (for comparison). ModelError: a
    row of the table declares no space, or the family computes something that these rules do not know: logits differ.
    """
    with torch.device("meta"):
        blank = Decoder(grown)
    shapes, of = parameter_shapes(grown), source_layers(config.num_layers, grown.num_layers)
    rows = {name: rule_of(grown.table, name) for name in shapes}
    _check_spaces(rows.values())
    normed: dict[int, dict[str, int]] = {}
    for name, row in rows.items():
        if row.kind == "norm":
            normed.setdefault(_layer(name), {})[row.reads] = shapes[name][0]
    found = {}
    for name, row in rows.items():
        layer, fresh = _layer(name), torch.zeros(shapes[name], dtype=torch.float64)
        if seed is not None or row.kind == "norm":
            blank.init_parameter_(name, fresh, seed or 0)
        there = name if layer < 0 else name.replace(f".{layer}.", f".{of[layer]}.", 1)
        source = tensors[there if there in tensors else _EMBEDDING].double()  # the output head of one that was tied
        inserted = layer > 0 and of[layer] == of[layer - 1]
        found[name] = _Expansion(config, grown, row, normed.get(layer, {})).of(source, fresh, inserted)
    _check_logits(config, tensors, grown, found)
    return found


class _Expansion(NamedTuple):
    """Expansion of the parameters of a row. normed: space -> width of the norm that a layer has of it."""

    config: DecoderConfig
    grown: DecoderConfig
    row: Parameter
    normed: Mapping[str, int]

    def of(self, source: Tensor, fresh: Tensor, inserted: bool) -> Tensor:
        """Return the expanded parameter. fresh: that of a new model. inserted: its layer is to add zero."""
        row = self.row
        if row.kind == "norm":
            return self._norm(source, fresh, inserted)
        if inserted and row.writes == "residual":
            return torch.zeros_like(fresh)
        if row.reads == "tokens":  # of a table, rows are what it reads
            return self._rows(source.T, fresh.shape[1]).T * self._scale()
        if row.kind == "bias":
            return self._rows(source[..., None], fresh.shape[-1])[..., 0]
        return self._columns(self._rows(source, fresh.shape[-2]), fresh)

    def _norm(self, source: Tensor, fresh: Tensor, inserted: bool) -> Tensor:
        row, config = self.row, self.config
        one = float(row.init == "zeros")  # what the module adds to it
        if inserted and row.reads == "branch":
            return torch.full_like(fresh, -one)
        index = self._index(row.reads, len(source), len(fresh))
        factor = self._stretch(index, len(source)) if row.reads in _HEADS else torch.ones_like(fresh)
        if row.reads in _STREAM:
            factor = factor * self._rho() ** 0.5
        if "*" not in row.name and self.grown.tie_embeddings:
            factor = factor / (self.grown.hidden_size // config.hidden_size * self._scale())
        return torch.where(index < 0, fresh, (source[index] + one) * factor - one)

    def _rows(self, source: Tensor, size: int) -> Tensor:
        """Return the rows [..., size, in] of source [..., out, in]: copies, and zeros for what is new."""
        space = self.row.writes
        index = self._index(space, source.shape[-2], size)
        found = source[..., index, :] * (index >= 0)[:, None]
        if space not in self.normed or space not in _HEADS:  # norms of latents have an eps of their own
            return found
        wide = self.normed[space] == size  # over all heads, else over each
        return found * self._rho() ** 0.5 / (self._stretch(index, source.shape[-2])[:, None] if wide else 1)

    def _columns(self, source: Tensor, fresh: Tensor) -> Tensor:
        """Return the columns [..., size] of source [..., in]: those of a new model, moved so that copies sum to the
        source's. Rows that write zeros stay zero."""
        index = self._index(self.row.reads, source.shape[-1], fresh.shape[-1])
        if len(index) == source.shape[-1]:
            return source
        old = index >= 0
        at, copies = index[old], _copies(index, source.shape[-1])
        sums = torch.zeros_like(source).index_add_(-1, at, fresh[..., old])
        fresh[..., old] += ((source - sums) / copies)[..., at]
        if self.row.writes in _STREAM:
            fresh[..., fresh.shape[-2] // self.config.hidden_size * self.config.hidden_size :, :] = 0
        return fresh

    def _index(self, space: str, size: int, grown: int) -> Tensor:
        """Return what each element is a copy of, int64 [grown]; -1: of none."""
        every = torch.arange(grown)
        if size == grown:
            return every
        if space in _STREAM:
            return torch.where(every < grown // size * size, every % size, -1)
        if space == "inner":
            return every % size
        if space in _HEADS:
            groups = self.config.num_kv_heads
            width = size // groups
            return every // width % groups * width + every % width
        message = f"{self.row.name}: {size} elements of space {space!r} became {grown}; only those of {_GROWS} grow"
        raise ModelError(message, key=self.row.name)

    def _stretch(self, index: Tensor, size: int) -> Tensor:
        """Return the factors of a norm over all heads [grown]. An element with c copies is made smaller by sqrt(c), so
        that the sum of squares does not change its parts."""
        return (_copies(index, size)[index] * size / len(index)).sqrt()

    def _rho(self) -> float:
        return _share(self.config.hidden_size, self.grown.hidden_size)

    def _scale(self) -> float:
        """Return the factor of embeddings where the family multiplies them by the root of its width."""
        return (self.config.hidden_size / self.grown.hidden_size) ** 0.5 if self.config.scale_embeddings else 1.0


def _copies(index: Tensor, size: int) -> Tensor:
    """Return how often each element of the source is copied, float64 [size]."""
    return torch.bincount(index[index >= 0], minlength=size).double()


def _layer(name: str) -> int:
    """Return the number of the layer of a parameter; -1: it is in none."""
    parts = name.split(".")
    return next((int(part) for part in parts if part.isdecimal()), -1)


def _check_spaces(rows: Iterable[Parameter]) -> None:
    """Raise ModelError for the first row that does not declare what it reads and writes."""
    for row in rows:
        if not row.writes or not (row.reads or row.kind == "bias"):
            message = (
                f"the table's row {row.name} declares no {'reads' if row.writes else 'writes'}, so that it is unknown"
            )
            raise ModelError(f"{message} how to expand it; add it to its tilth.plan.rules.Parameter", key=row.name)


def _check_logits(
    config: DecoderConfig, tensors: Mapping[str, Tensor], grown: DecoderConfig, found: Mapping[str, Tensor]
) -> None:
    """Raise ModelError unless both models give the same logits to some tokens."""
    ids = stream(0, "probe").integers(0, min(PROBE, config.max_positions), config.vocab_size)
    wanted = _logits(config, {name: tensor.double() for name, tensor in tensors.items()}, ids)
    far = float((_logits(grown, found, ids) - wanted).abs().max())
    if not far <= TOLERANCE * max(1.0, float(wanted.abs().max())):
        message = (
            f"family {config.family}: logits of the expanded model differ by {far:.1e}: its layers compute what its"
        )
        raise ModelError(f"{message} table's reads and writes do not say", key="logits")


@torch.no_grad()
def _logits(config: DecoderConfig, weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    model = Decoder(config, torch.float64)
    model.load_state_dict(weights, assign=True)
    return model.logits(model(ids, PackedContext([len(ids)])))
