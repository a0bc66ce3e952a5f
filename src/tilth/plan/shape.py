"""Sizes derived from a decoder's config and its family's table: parameters, matrices, KV bytes."""

import math
from itertools import groupby
from typing import Protocol

from tilth.plan.rules import VALUE_HEAD, Parameter, Table


class DecoderShape(Protocol):
    """Attributes of a ``DecoderConfig`` that plans read; widths in elements."""

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
    def tie_embeddings(self) -> bool: ...
    @property
    def table(self) -> Table: ...


Sized = tuple[Parameter, tuple[int, ...]]


def _sized(shape: DecoderShape, value: bool = False) -> list[Sized]:
    """Return the rows of the table that apply to this config, with the sizes of their parameters."""

    def size(of: str | int) -> int:
        return of if isinstance(of, int) else getattr(shape, of)

    def there(when: str) -> bool:
        flag = when.removeprefix("not ")
        return not when or (bool(getattr(shape, flag)) or (value and flag == "tie_embeddings")) == (flag == when)

    rows = shape.table + (VALUE_HEAD if value else ())
    return [(row, tuple(map(size, row.shape))) for row in rows if there(row.when)]


def parameter_shapes(shape: DecoderShape, *, value: bool = False) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter, in module order. value: of a value model on this shape."""
    found: dict[str, tuple[int, ...]] = {}
    for inside, group in groupby(_sized(shape, value), key=lambda one: "*" in one[0].name):
        rows = list(group)
        for layer in range(shape.num_layers if inside else 1):
            found |= {row.name.replace("*", str(layer)): sizes for row, sizes in rows}
    return found


def hf_names(shape: DecoderShape) -> dict[str, str]:
    """Return parameter -> its name in a Hugging Face directory, for those with a different name there."""
    return {
        row.name.replace("*", str(layer)): row.hf.replace("*", str(layer))
        for row in shape.table
        if row.hf
        for layer in range(shape.num_layers if "*" in row.name else 1)
    }


def layer_width(shape: DecoderShape, kind: str, tp: str) -> int:
    """Sum the rows of one layer's parameters of this kind and rule: their output elements per token."""
    return sum(sizes[0] for row, sizes in _sized(shape) if "*" in row.name and (row.kind, row.tp) == (kind, tp))


def matrices(shape: DecoderShape) -> int:
    """Count the elements of the weight matrices of all layers."""
    return sum(_numel(shape, one) for one in _sized(shape) if one[0].kind == "matrix")


def parameters(shape: DecoderShape, *, value: bool = False) -> int:
    """Count the elements of all parameters. value: of a value model on this shape."""
    return sum(_numel(shape, one) for one in _sized(shape, value))


def _numel(shape: DecoderShape, one: Sized) -> int:
    return math.prod(one[1]) * (shape.num_layers if "*" in one[0].name else 1)


def kv_bytes(shape: DecoderShape, element: int) -> int:
    """Return bytes of keys and values of one token, with ``element`` bytes per element."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element
