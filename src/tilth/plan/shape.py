"""Sizes derived from a decoder's config and its family's table: parameters, matrices, KV bytes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np

from tilth.plan.kernels import FLASH_WIDTH, PAGED_TORCH
from tilth.plan.rules import ENCODERS, VALUE_HEAD, Parameter, Table


class DecoderShape(Protocol):
    """Attributes of a ``DecoderConfig`` that plans read; widths in elements."""

    def __hash__(self) -> int: ...
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
    def value_dim(self) -> int: ...
    @property
    def latents(self) -> bool: ...
    def cached(self, latent: bool) -> tuple[int, int, int]: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...
    @property
    def expert_size(self) -> int: ...
    @property
    def shared_size(self) -> int: ...
    @property
    def expert_layers(self) -> tuple[int, ...]: ...
    @property
    def dense_layers(self) -> tuple[int, ...]: ...
    @property
    def table(self) -> Table: ...


Sized = tuple[Parameter, tuple[int, ...]]


def _sized(shape: DecoderShape, value: bool = False, table: Table = ()) -> list[Sized]:
    """Return the rows of a table, by default the config's, that apply to it, with the sizes of their parameters."""

    def size(of: str | int) -> int:
        return of if isinstance(of, int) else getattr(shape, of)

    def there(when: str) -> bool:
        flag = when.removeprefix("not ")
        return not when or (bool(getattr(shape, flag)) or (value and flag == "tie_embeddings")) == (flag == when)

    rows = table or shape.table + (VALUE_HEAD if value else ())
    return [(row, tuple(map(size, row.shape))) for row in rows if there(row.when)]


def parameter_shapes(shape: DecoderShape, *, value: bool = False) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter, in module order. value: of a value model on this shape."""
    return _by_name(shape, _sized(shape, value))


def sized_names(shape: DecoderShape, table: Table) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameters that further rows give a model of this shape."""
    return _by_name(shape, _sized(shape, table=table))


def _by_name(shape: DecoderShape, rows_with_sizes: Sequence[Sized]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for inside, group in groupby(rows_with_sizes, key=lambda one: "*" in one[0].name):
        rows = [(row, sizes, frozenset(_layers(shape, row))) for row, sizes in group]
        for layer in range(shape.num_layers if inside else 1):
            found |= {row.name.replace("*", str(layer)): sizes for row, sizes, there in rows if layer in there}
    return found


def _layers(shape: DecoderShape, row: Parameter) -> Sequence[int]:
    """Return the numbers of the layers that have a parameter of this row; one if it is outside of layers."""
    return getattr(shape, row.layers) if row.layers else range(shape.num_layers if "*" in row.name else 1)


def hf_names(shape: DecoderShape) -> dict[str, str]:
    """Return parameter -> its name in a Hugging Face directory, for those with a different name there."""
    return {
        row.name.replace("*", str(layer)): row.hf.replace("*", str(layer))
        for row, _ in _sized(shape)
        if row.hf and "#" not in row.hf and not _fused(shape.table, row)
        for layer in _layers(shape, row)
    }


def _fused(table: Table, row: Parameter) -> bool:
    """Return True if a parameter is not a tensor of a Hugging Face directory as it is."""
    return row.transposed or (bool(row.hf) and sum(one.hf == row.hf for one in table) > 1)


@dataclass(frozen=True)
class Fused:
    """Tensor of a Hugging Face directory with another layout than the parameters in it."""

    name: str
    parts: tuple[str, ...]
    """Parameters of equal shape that alternate along its last dimension."""
    transposed: bool
    """The last two dimensions are exchanged."""

    def shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """Return its shape, given that of a part."""
        *outer, last = (*part[:-2], part[-1], part[-2]) if self.transposed else part
        return (*outer, last * len(self.parts))

    def part(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a part, given its own."""
        *outer, last = shape
        found = (*outer, last // len(self.parts))
        return (*found[:-2], found[-1], found[-2]) if self.transposed else found


def hf_fused(shape: DecoderShape) -> dict[str, Fused]:
    """Return parameter -> the tensor of another layout that holds it in a Hugging Face directory."""
    found: dict[str, Fused] = {}
    rows = [row for row, _ in _sized(shape) if _fused(shape.table, row)]
    for row in rows:
        together = [one.name for one in rows if one.hf == row.hf]
        for layer in map(str, _layers(shape, row)):
            parts = tuple(name.replace("*", layer) for name in together)
            found[row.name.replace("*", layer)] = Fused(row.hf.replace("*", layer), parts, row.transposed)
    return found


def hf_experts(shape: DecoderShape) -> dict[str, tuple[str, ...]]:
    """Return stacked parameter -> names of its experts' tensors in a Hugging Face directory, in order."""
    return {
        row.name.replace("*", str(layer)): tuple(
            row.hf.replace("*", str(layer)).replace("#", str(expert)) for expert in range(sizes[0])
        )
        for row, sizes in _sized(shape)
        if "#" in row.hf
        for layer in _layers(shape, row)
    }


def layer_width(shape: DecoderShape, kind: str, tp: str, *, experts: bool = False) -> int:
    """Sum the rows of one layer's parameters of this kind and rule: their output elements per token.

    experts: of a layer with experts, of which each token counts its own; else of a dense layer.
    """
    skipped = "dense_layers" if experts else "expert_layers"
    return sum(
        sizes[1] * shape.experts_per_token if row.stacked else sizes[0]
        for row, sizes in _sized(shape)
        if "*" in row.name and (row.kind, row.tp) == (kind, tp) and row.layers != skipped
    )


def matrices(shape: DecoderShape, *, active: bool = False) -> int:
    """Count the elements of the weight matrices of all layers. active: of those that one token meets, which are
    ``experts_per_token`` of all experts, and of routers."""
    wanted = ("matrix", "router") if active else ("matrix",)
    rows = [one for one in _sized(shape) if one[0].kind in wanted and not one[0].name.startswith(ENCODERS)]
    return sum(_numel(shape, one, active) for one in rows)


def parameters(shape: DecoderShape, *, value: bool = False, active: bool = False) -> int:
    """Count the elements of all parameters. value: of a value model on this shape. active: of those that one token
    meets."""
    return sum(_numel(shape, one, active) for one in _sized(shape, value))


def _numel(shape: DecoderShape, one: Sized, active: bool = False) -> int:
    row, sizes = one
    own = (shape.experts_per_token, *sizes[1:]) if active and row.stacked else sizes
    return math.prod(own) * len(_layers(shape, row))


def routing_bytes(shape: DecoderShape) -> int:
    """Return bytes of the numbers of one token's experts in all layers, as the rollout engine keeps them."""
    return len(shape.expert_layers) * shape.experts_per_token * (1 if shape.num_experts < 255 else 2)


def cached_widths(shape: DecoderShape, latent: bool = True) -> tuple[int, ...]:
    """Return the widths of what a KV cache holds of a token, all heads together: of keys and of values, or latents."""
    heads, keys, values = shape.cached(latent)
    return (heads * keys,) if latent and shape.latents else (heads * keys, heads * values)


def kv_bytes(shape: DecoderShape, element: int, latent: bool = True) -> int:
    """Return bytes of one token in a KV cache, with ``element`` bytes per element. latent: of latents, where the family
    has them, as the engine holds them outside of parity mode."""
    return shape.num_layers * sum(cached_widths(shape, latent)) * element


def pages_fit(shape: DecoderShape) -> bool:
    """Return True if torch's kernel attends over pages of this shape's KV cache, in a torch that has it."""
    _, keys, values = shape.cached(latent=False)
    sinks = any(row.name.endswith(".sinks") for row, _ in _sized(shape))
    return keys == values <= FLASH_WIDTH and not keys % 8 and not shape.latents and not sinks


def torch_has_pages() -> bool:
    """Return True if the installed torch has a kernel that attends over pages."""
    import torch  # where a recipe has a GPU

    return bool(torch.__version__ >= PAGED_TORCH)


class Flops(NamedTuple):
    """Operations of the forward and of the backward pass; a multiply and an add are two."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """FLOPs of a training pass."""
        return self.forward + self.backward


def token_flops(shape: DecoderShape, attended: float, head: bool = True, frozen: bool = False) -> Flops:
    """Return the FLOPs of one token that attends to ``attended`` tokens, itself included. head: with its logits.
    frozen: no gradients of weights, as with adapters, whose own FLOPs are left out.

    Forward: 2 for each matrix element that the token meets (``experts_per_token`` of all experts), and 2 x heads x
    (head_dim + value_dim) for each attended token (scores and mixing). Backward: twice that. Look-ups, norms and the
    softmax are left out, as usual (PaLM, arXiv 2204.02311, appendix B).
    """
    weights = matrices(shape, active=True) + (shape.vocab_size * shape.hidden_size if head else 0)
    pairs = 2.0 * shape.num_layers * shape.num_heads * (shape.head_dim + shape.value_dim)
    forward = 2.0 * weights + pairs * attended
    return Flops(forward, 2 * forward - (2.0 * weights if frozen else 0))


def sequence_flops(shape: DecoderShape, lengths: np.ndarray, window: int | None = None) -> Flops:
    """Return the FLOPs of whole sequences under causal attention, with logits at every token. lengths: int [n]."""
    return pass_flops(shape, int(np.sum(lengths)), attended(lengths, window))


def pass_flops(shape: DecoderShape, tokens: int, pairs: int, head: bool = True, frozen: bool = False) -> Flops:
    """Return the FLOPs of a pass over ``tokens`` with ``pairs`` attended tokens in all. head, frozen: as in
    ``token_flops``."""
    if tokens == 0:
        return Flops(0.0, 0.0)
    one = token_flops(shape, pairs / tokens, head, frozen)
    return Flops(tokens * one.forward, tokens * one.backward)


def layer_flops(shape: DecoderShape, lengths: np.ndarray) -> np.ndarray:
    """Return the FLOPs of one layer's forward pass over each sequence: float64 [n]."""
    passes = [pass_flops(shape, n, n * (n + 1) // 2, head=False).forward for n in np.asarray(lengths).tolist()]
    return np.array(passes, np.float64) / shape.num_layers


def attended(lengths: np.ndarray, window: int | None = None) -> int:
    """Count pairs of a token and one that it attends to, over all sequences; a window includes the token."""
    n = np.asarray(lengths, np.int64)
    w = n if window is None else np.minimum(n, window)
    return int((w * (w + 1) // 2 + (n - w) * w).sum())
