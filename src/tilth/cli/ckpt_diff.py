"""What is different between two checkpoints, or between one and a directory of Hugging Face, tensor by tensor."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from tilth.cli.ckpt import Told, bar
from tilth.cli.ckpt_source import MODEL, TensorSource, dtype_name, flattened, open_source
from tilth.cli.tables import new_table, show
from tilth.core.errors import DataError
from tilth.core.layout import Box, Shape
from tilth.runs.files import to_json
from tilth.ui import format

BLOCK = 1 << 22
"""Elements that are compared at once: what bounds memory."""
_SHOWN = 20
"""Tensors and values in the tables; ``--json`` has all."""
_WIDTH = 48
_ALWAYS = "events"
"""Of which attempt a checkpoint is, beside the tensors: every command that goes on with a run is another one."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """A tensor that differs, as ``tilth ckpt diff --json`` says it."""

    group: str
    name: str
    kind: str
    """only in a, only in b, shape, dtype (values are compared all the same) or values."""
    a: str | None = None
    """dtype and shape there."""
    b: str | None = None
    count: int = 0
    """Elements that differ."""
    share: float = 0.0
    """Of all elements."""
    max_abs: float | None = None
    """Greatest difference, also within the tolerance; None where one of the two is not a finite number."""
    max_rel: float | None = None
    """Greatest difference over the greater of the two magnitudes."""
    first: list[int] | None = None
    """Index of the first element that differs."""


@dataclass(frozen=True)
class Change:
    """A value beside the tensors that differs; what is absent is None, and not in ``there``."""

    key: str
    a: Any
    b: Any
    there: str
    """both, a or b."""


@dataclass
class Comparison:
    """All that was found."""

    a: str
    b: str
    tensors: list[Difference] = field(default_factory=list)
    objects: list[Change] = field(default_factory=list)
    compared: int = 0
    """Tensors whose values were compared."""
    groups: dict[str, int] = field(default_factory=dict)
    """How many of those in each group."""
    bytes: int = 0
    """Of those, on both sides."""
    tolerance: float | None = None
    """Greatest difference that is none; None: bit for bit."""
    within: float | None = 0.0
    """Greatest one of the tensors whose values do not differ by more; None: not finite."""
    left_out: list[str] = field(default_factory=list)
    """Groups that were not compared since the other side is a directory of Hugging Face."""

    @property
    def equal(self) -> bool:
        """Nothing differs."""
        return not self.tensors and not self.objects


def diff(a: str, b: str, *, tolerance: float | None, as_json: bool) -> None:
    """Print the differences; exit code 1 if there are any."""
    if tolerance is not None and not tolerance >= 0:
        raise DataError(f"--tolerance {tolerance}: it must be a number of at least 0", key="--tolerance")
    with bar() as told:
        found = compare(open_source(a), open_source(b), tolerance, told)
    if as_json:
        typer.echo(to_json({"equal": found.equal, **asdict(found)}))
    else:
        show(*_said(found))
    raise typer.Exit(0 if found.equal else 1)


# ---- what differs ----


def compare(a: TensorSource, b: TensorSource, tolerance: float | None, told: Told | None = None) -> Comparison:
    """Read both, a block of one tensor at a time. tolerance: greatest difference that is none; None: bit for bit."""
    found = Comparison(a.name, b.name, tolerance=tolerance)
    groups = list(dict.fromkeys([*a.groups(), *b.groups()]))
    if a.objects is None or b.objects is None:
        found.left_out = [group for group in groups if group != MODEL]
        groups = [MODEL]
    else:
        found.objects = list(_changes(_values(a.objects), _values(b.objects)))
    pairs = list(_pairs(a, b, groups, found))
    total, done, within = sum(_nbytes(*a.kind(*pair)) for pair in pairs), 0, 0.0
    for group, name in pairs:
        difference = _tensor(a, b, group, name, tolerance)
        if difference.count or difference.kind == "dtype":
            found.tensors.append(difference)
        if not difference.count:
            within = _greater(within, math.inf if difference.max_abs is None else difference.max_abs)
        done += _nbytes(*a.kind(group, name))
        found.compared, found.bytes = found.compared + 1, found.bytes + _nbytes(*b.kind(group, name))
        found.groups[group] = found.groups.get(group, 0) + 1
        if told is not None:
            told(group, done, total)
    found.bytes, found.within = found.bytes + done, _finite(within)
    order = {(group, name): i for i, (group, name) in enumerate(_all(a, b, groups))}
    found.tensors.sort(key=lambda one: order[one.group, one.name])
    return found


def _all(a: TensorSource, b: TensorSource, groups: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Group and name of every tensor of both."""
    for group in groups:
        names = [name for side in (a, b) if group in side.groups() for name in side.names(group)]
        yield from ((group, name) for name in dict.fromkeys(names))


def _pairs(a: TensorSource, b: TensorSource, groups: Sequence[str], found: Comparison) -> Iterator[tuple[str, str]]:
    """Those whose values can be compared; of the others it is written down why not."""
    there = [
        {(g, n) for g in groups if g in side.groups() for n in side.names(g)} for side in (a, b)
    ]  # fmt: skip
    for group, name in _all(a, b, groups):
        kinds = [_text(*side.kind(group, name)) if (group, name) in t else None for side, t in zip((a, b), there)]
        if None in kinds:
            kind = "only in b" if kinds[0] is None else "only in a"
            found.tensors.append(Difference(group, name, kind, kinds[0], kinds[1]))
        elif a.kind(group, name)[0] != b.kind(group, name)[0]:
            found.tensors.append(Difference(group, name, "shape", kinds[0], kinds[1]))
        else:
            yield group, name


def _text(shape: Shape, dtype: torch.dtype) -> str:
    return f"{dtype_name(dtype)} {list(shape)}"


def _nbytes(shape: Shape, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _tensor(a: TensorSource, b: TensorSource, group: str, name: str, tolerance: float | None) -> Difference:
    shape, dtype = a.kind(group, name)
    other = b.kind(group, name)[1]
    count, most, relative, first = 0, 0.0, 0.0, None
    for box in blocks(shape, BLOCK):
        ours, theirs = a.read(group, name, box), b.read(group, name, box)
        differs = different(ours, theirs, tolerance)
        here = int(differs.sum())
        if (here or tolerance) and ours.numel():
            some = distances(ours, theirs)
            most, relative = _greater(most, float(some[0])), _greater(relative, float(some[1]))
        if not here:
            continue
        if first is None:
            index = differs.nonzero()[0].tolist() if differs.ndim else []
            first = [i + o for i, o in zip(index, box.offset)]
        count += here
    share = count / math.prod(shape) if count else 0.0
    kinds = _text(shape, dtype), _text(shape, other)
    kind = "values" if dtype == other else "dtype"
    return Difference(group, name, kind, *kinds, count, share, _finite(most), _finite(relative), first)


def _greater(a: float, b: float) -> float:
    return max(a, b) if b == b else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def blocks(shape: Shape, most: int) -> Iterator[Box]:
    """Boxes that tile a tensor in the order of its elements, of at most ``most`` elements each."""
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
    """bool, of their shape: which elements are not the same, or by more than the tolerance.

    tolerance None: other bits (other values where the dtypes differ). NaN is the same as NaN.
    """
    if tolerance is None and a.dtype == b.dtype:
        return _bits(a) != _bits(b) if not a.is_complex() else (_bits(a) != _bits(b)).any(-1)
    left, right = _wide(a), _wide(b)
    same = (left == right) | (left.isnan() & right.isnan())
    return ~same & ~((left - right).abs() <= (tolerance or 0.0))


def distances(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Greatest absolute and greatest relative difference; NaN or infinite where one element is not finite."""
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
    """In float64 or complex128."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _values(objects: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are compared, by dotted key."""
    kept = {key: value for key, value in objects.items() if key != _ALWAYS}
    return flattened(kept) if kept else {}


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    for key in dict.fromkeys([*a, *b]):
        there = "both" if key in a and key in b else "a" if key in a else "b"
        if there != "both" or json.dumps(a[key]) != json.dumps(b[key]):
            yield Change(key, a.get(key), b.get(key), there)


# ---- for people ----


def _said(found: Comparison) -> list[Any]:
    parts: list[Any] = [f"a: {found.a}", f"b: {found.b}"]
    if found.left_out:
        parts.append(f"not compared, since a Hugging Face directory has weights only: {', '.join(found.left_out)}")
    kept = [one for one in found.tensors if one.kind == "dtype" and not one.count]
    parts += _listed([one for one in found.tensors if one.kind != "dtype" or one.count], _tensors)
    if kept:
        values = (
            f"values within the tolerance (at most {_number(_most(kept))} apart)"
            if found.tolerance
            else "the same values"
        )
        parts += ["", f"{len(kept)} tensors have another dtype and {values}, as {kept[0].name}: {_what(kept[0])}"]
    parts += _listed(found.objects, _objects)
    parts += ["", *_summed(found)]
    what = f"{found.compared} tensors compared ({format.size(found.bytes)} read), {_alike(found, len(kept))}"
    count = len(found.objects)
    others = f"; {count} {'value beside them differs' if count == 1 else 'values beside them differ'}" if count else ""
    return [*parts, what + others + (": no difference" if found.equal else "")]


def _alike(found: Comparison, kept: int) -> str:
    """How many do not differ; kept: how many of those in nothing but their dtype."""
    same = found.compared - sum(one.count > 0 for one in found.tensors)
    if found.tolerance:
        how = f" (at most {_number(found.within)} apart)" if same else ""
        return f"{same} are within the tolerance{how}"
    return f"{same - kept} are the same" + (f", {kept} but for their dtype" if kept else "")


def _most(differences: Sequence[Difference]) -> float | None:
    found = [one.max_abs for one in differences]
    return None if None in found else max(value or 0.0 for value in found)


def _summed(found: Comparison) -> Iterator[str]:
    """A line for each group in which values differ."""
    for group, count in found.groups.items():
        apart = [one for one in found.tensors if one.group == group and one.count]
        if apart:
            yield f"{group}: {len(apart)} of {count} tensors differ, at most by {_number(_most(apart))}"


def _listed(found: Sequence[Any], draw: Callable[[Sequence[Any]], Table]) -> list[Any]:
    if not found:
        return []
    more = [f"and {len(found) - _SHOWN} more; --json has all"] if len(found) > _SHOWN else []
    return ["", draw(found[:_SHOWN]), *more]


def _tensors(differences: Sequence[Difference]) -> Table:
    numbers = ("elements", "share", "max |a-b|", "relative")
    made = new_table("tensor", "what", *numbers, "first", right=numbers)
    for one in differences:
        cells = [f"{one.count:,}", f"{100 * one.share:.3g} %", _number(one.max_abs), _number(one.max_rel)]
        first = str(one.first) if one.first is not None else ""
        compared = one.kind in ("values", "dtype")
        made.add_row(f"{one.group}/{one.name}", _what(one), *(cells if compared else [""] * 4), first)
    return made


def _what(one: Difference) -> str:
    if one.kind == "dtype":
        return " / ".join(str(side).split()[0] for side in (one.a, one.b))
    return one.kind if one.kind != "shape" else f"{one.a} / {one.b}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"


def _objects(changes: Sequence[Change]) -> Table:
    made = new_table("object", "a", "b")
    for change in changes:
        a, b = (abridged(v) if change.there in ("both", s) else "–" for v, s in ((change.a, "a"), (change.b, "b")))
        made.add_row(change.key, a, b)
    return made


def abridged(value: Any) -> str:
    """JSON in at most a few words."""
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, list) and len(text) > _WIDTH:
        return f"{text[: _WIDTH // 2]}... {len(value):,} values"
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}... {len(text):,} characters"
