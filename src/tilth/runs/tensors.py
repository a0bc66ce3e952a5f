"""Tensors of a checkpoint or of a Hugging Face directory by group and name, read on demand, and their comparison."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilth.checkpoint import Checkpoint, open_checkpoint
from tilth.checkpoint.manifest import Manifest, Piece, TensorEntry
from tilth.config.load import flattened
from tilth.core.errors import ModelError
from tilth.core.layout import Box, Shape
from tilth.models.unread import Unread
from tilth.runs.model_refs import EMA, Named, explained, find_checkpoint

MODEL = "model"
BLOCK = 1 << 22
"""Elements that are compared at once, which bounds memory."""
ATTEMPT = "events"
"""Object of a checkpoint that holds the attempt, which every resume changes; it is not compared."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Report = Callable[[str, int, int], None]
"""Called with the group that is read, the bytes so far and the bytes in all."""


class StoredTensors(Unread):
    """Tensors of a group of a checkpoint, verified as they are read; CheckpointError if damaged."""

    def __init__(self, checkpoint: Checkpoint, group: str, named: Named) -> None:
        super().__init__(checkpoint.names(group))
        self._checkpoint, self._group, self._named = checkpoint, group, named

    def part(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        box = Box(tuple(s.start for s in slices), tuple(s.stop - s.start for s in slices)) if slices else None
        with explained(self._named):
            return self._checkpoint.read(self._group, name, box)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._checkpoint.entry(self._group, name).shape


def _read(tensors: Unread, name: str, box: Box) -> Tensor:
    return tensors.part(name, box.slices)


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a source. read: returns one box of it; entry: its boxes in a checkpoint."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[Box], Tensor]
    file: str = ""
    entry: TensorEntry | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def text(self) -> str:
        """Return dtype and shape as ``float32 [2, 3]``."""
        return f"{self.dtype_name} {list(self.shape)}"

    @property
    def pieces(self) -> list[Piece]:
        return list(self.entry.boxes) if self.entry is not None else []


@dataclass(frozen=True)
class TensorSource:
    """Tensors by group and name, of a checkpoint (with its manifest) or of a Hugging Face directory."""

    name: str
    groups: Mapping[str, Mapping[str, SourceTensor]]
    manifest: Manifest | None = None


def open_source(spec: str) -> TensorSource:
    """Open any checkpoint or Hugging Face directory. ModelError, CheckpointError."""
    named = find_checkpoint(spec)
    if named is None:
        from tilth.models.hf import open_tensors  # a checkpoint needs no model

        found = open_tensors(Path(spec))
        tensors = {}
        for name in found:
            shape = found.shape(name)
            dtype = found.part(name, tuple(slice(0, 0) for _ in shape)).dtype
            tensors[name] = SourceTensor(shape, dtype, partial(_read, found, name), found.files[name])
        return TensorSource(str(Path(spec)), {MODEL: tensors})
    with explained(named):
        return _checkpoint(named)


def _checkpoint(named: Named) -> TensorSource:
    """Open a checkpoint; of ``RUN@ema`` the average is the model."""
    checkpoint = open_checkpoint(named.path)
    if named.group not in checkpoint.groups:
        there = ", ".join(checkpoint.groups) or "none"
        message = f"{checkpoint.path} has no group {named.group}; its groups are: {there}"
        raise ModelError(message, key=f"group.{named.group}")
    groups = {MODEL: EMA} if named.group == EMA else {group: group for group in checkpoint.groups}
    tensors: dict[str, dict[str, SourceTensor]] = {shown: {} for shown in groups}
    for shown, group in groups.items():
        stored = StoredTensors(checkpoint, group, named)
        for name in stored:
            entry = checkpoint.entry(group, name)
            tensors[shown][name] = SourceTensor(
                entry.shape, entry.torch_dtype, partial(_read, stored, name), entry=entry
            )
    return TensorSource(str(checkpoint.path), tensors, checkpoint.manifest)


# ---- comparing ----


@dataclass(frozen=True)
class Difference:
    """A tensor that differs: one row of ``tilth ckpt diff --json``.

    kind: only in a, only in b, shape, dtype (values are compared all the same) or values. a, b: dtype and shape. count:
    elements that differ; share: of all elements. max_abs: greatest difference, also within the tolerance, max_rel: over
    the greater magnitude; None: not finite. first: index of the first element that differs.
    """

    group: str
    name: str
    kind: str
    a: str | None = None
    b: str | None = None
    count: int = 0
    share: float = 0.0
    max_abs: float | None = None
    max_rel: float | None = None
    first: list[int] | None = None


@dataclass(frozen=True)
class Change:
    """An object that differs. there: both, a or b; an absent one is None."""

    key: str
    a: Any
    b: Any
    there: str


@dataclass
class Comparison:
    """All differences.

    compared: tensors whose values were compared; groups: their number by group; bytes: read on both sides. tolerance:
    greatest difference of two equal values, None: bit for bit. within: greatest difference of the tensors without one
    above it; None: not finite. left_out: groups that a Hugging Face directory does not have.
    """

    a: str
    b: str
    tensors: list[Difference] = field(default_factory=list)
    objects: list[Change] = field(default_factory=list)
    compared: int = 0
    groups: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    tolerance: float | None = None
    within: float | None = 0.0
    left_out: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """True if nothing differs."""
        return not self.tensors and not self.objects


def compare(a: TensorSource, b: TensorSource, tolerance: float | None, report: Report | None = None) -> Comparison:
    """Read both, a block of one tensor at a time. tolerance: greatest difference of equal values; None: bit for bit."""
    found = Comparison(a.name, b.name, tolerance=tolerance)
    groups = list(dict.fromkeys([*a.groups, *b.groups]))
    if a.manifest is None or b.manifest is None:
        found.left_out = [group for group in groups if group != MODEL]
        groups = [MODEL]
    else:
        found.objects = list(_changes(_values(a.manifest.objects), _values(b.manifest.objects)))
    ours, theirs = ({(g, n): one for g in groups for n, one in side.groups.get(g, {}).items()} for side in (a, b))
    order = [(g, n) for g in groups for n in dict.fromkeys([*a.groups.get(g, {}), *b.groups.get(g, {})])]
    shared = [key for key in order if key in ours and key in theirs and ours[key].shape == theirs[key].shape]
    total, done, within = sum(ours[key].nbytes for key in shared), 0, 0.0
    for key in order:
        group, left, right = key[0], ours.get(key), theirs.get(key)
        if left is None or right is None or left.shape != right.shape:
            kind = "only in b" if left is None else "only in a" if right is None else "shape"
            found.tensors.append(Difference(*key, kind, left.text if left else None, right.text if right else None))
            continue
        difference = _tensor(key, left, right, tolerance)
        if difference.count or difference.kind == "dtype":
            found.tensors.append(difference)
        if not difference.count:
            within = _greater(within, math.inf if difference.max_abs is None else difference.max_abs)
        done += left.nbytes
        found.compared, found.bytes = found.compared + 1, found.bytes + left.nbytes + right.nbytes
        found.groups[group] = found.groups.get(group, 0) + 1
        if report is not None:
            report(group, done, total)
    found.within = _finite(within)
    return found


def _tensor(key: tuple[str, str], a: SourceTensor, b: SourceTensor, tolerance: float | None) -> Difference:
    count, most, relative, first = 0, 0.0, 0.0, None
    for box in blocks(a.shape, BLOCK):
        ours, theirs = a.read(box), b.read(box)
        differs = different(ours, theirs, tolerance)
        here = int(differs.sum())
        if (here or tolerance) and ours.numel():
            apart, share = distances(ours, theirs)
            most, relative = _greater(most, apart), _greater(relative, share)
        if here and first is None:
            index = differs.nonzero()[0].tolist() if differs.ndim else []
            first = [i + o for i, o in zip(index, box.offset)]
        count += here
    share = count / math.prod(a.shape) if count else 0.0
    kind = "values" if a.dtype == b.dtype else "dtype"
    return Difference(*key, kind, a.text, b.text, count, share, _finite(most), _finite(relative), first)


def _greater(a: float, b: float) -> float:
    return max(a, b) if b == b else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def blocks(shape: Shape, most: int) -> Iterator[Box]:
    """Tile a tensor in the order of its elements by boxes of at most ``most`` elements."""
    inner = math.prod(shape[1:])
    if not shape or math.prod(shape) <= most:
        yield Box.whole(shape)
        return
    if inner > most:
        for i in range(shape[0]):
            for box in blocks(shape[1:], most):
                yield Box((i, *box.offset), (1, *box.size))
        return
    rows = max(1, most // max(inner, 1))
    for start in range(0, shape[0], rows):
        yield Box((start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:]))


def different(a: Tensor, b: Tensor, tolerance: float | None) -> Tensor:
    """Return bool, of their shape: elements that differ by more than the tolerance. NaN equals NaN.

    tolerance None: elements with other bits, or, if the dtypes differ, with other values.
    """
    if tolerance is None and a.dtype == b.dtype:
        return _bits(a) != _bits(b) if not a.is_complex() else (_bits(a) != _bits(b)).any(-1)
    left, right = _wide(a), _wide(b)
    same = (left == right) | (left.isnan() & right.isnan())
    return ~same & ~((left - right).abs() <= (tolerance or 0.0))


def distances(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the greatest absolute and relative difference; NaN or infinite if an element is not finite."""
    left, right = _wide(a), _wide(b)
    same = (left == right) | (left.isnan() & right.isnan())
    apart = torch.where(same, 0.0, (left - right).abs())
    scale = torch.maximum(left.abs(), right.abs())
    return float(apart.max()), float(torch.where(apart == 0, 0.0, apart / scale).max())


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _wide(tensor: Tensor) -> Tensor:
    """Convert to float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _values(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects to compare by dotted key."""
    kept = {key: value for key, value in objects.items() if key != ATTEMPT}
    return flattened(kept) if kept else {}


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    for key in dict.fromkeys([*a, *b]):
        there = "both" if key in a and key in b else "a" if key in a else "b"
        if there != "both" or json.dumps(a[key]) != json.dumps(b[key]):
            yield Change(key, a.get(key), b.get(key), there)
