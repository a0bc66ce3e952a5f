"""``tilth ckpt diff``: compare two checkpoints, or one and a Hugging Face directory, tensor by tensor."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from tilth.cli.ckpt import Report, bar
from tilth.cli.ckpt_show import MODEL, SourceTensor, TensorSource, abridged, flattened, more, open_source
from tilth.cli.tables import new_table, show
from tilth.core.errors import DataError
from tilth.core.layout import Box, Shape
from tilth.runs.files import to_json
from tilth.ui import format

BLOCK = 1 << 22  # elements that are compared at once, which bounds memory
_SHOWN = 20  # most tensors and values in a table; ``--json`` has all
_ALWAYS = "events"  # the object that holds the attempt, which every resume changes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def diff(a: str, b: str, *, tolerance: float | None = None, as_json: bool) -> None:
    """Print the differences; exit code 1 if there are any."""
    if tolerance is not None and not tolerance >= 0:
        raise DataError(f"--tolerance {tolerance}: it must be a number of at least 0", key="--tolerance")
    with bar() as report:
        found = compare(open_source(a), open_source(b), tolerance, report)
    if as_json:
        typer.echo(to_json({"equal": found.equal, **asdict(found)}))
    else:
        show(*_lines(found))
    raise typer.Exit(0 if found.equal else 1)


# ---- comparing ----


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
    kept = {key: value for key, value in objects.items() if key != _ALWAYS}
    return flattened(kept) if kept else {}


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Change]:
    for key in dict.fromkeys([*a, *b]):
        there = "both" if key in a and key in b else "a" if key in a else "b"
        if there != "both" or json.dumps(a[key]) != json.dumps(b[key]):
            yield Change(key, a.get(key), b.get(key), there)


# ---- printing ----


def _lines(found: Comparison) -> list[Any]:
    parts: list[Any] = [f"a: {found.a}", f"b: {found.b}"]
    if found.left_out:
        parts.append(f"not compared, since a Hugging Face directory has weights only: {', '.join(found.left_out)}")
    same = [one for one in found.tensors if one.kind == "dtype" and not one.count]
    apart = [one for one in found.tensors if one.kind != "dtype" or one.count]
    if apart:
        parts += ["", _tensor_table(apart[:_SHOWN]), *more(apart, _SHOWN)]
    if same:
        limit = f"values within the tolerance (at most {_number(_most(same))} apart)"
        values = limit if found.tolerance else "the same values"
        parts += ["", f"{len(same)} tensors have another dtype and {values}, as {same[0].name}: {_what(same[0])}"]
    if found.objects:
        rows = [(c.key, *(abridged(v) if c.there in ("both", s) else "–" for v, s in ((c.a, "a"), (c.b, "b"))))
                for c in found.objects[:_SHOWN]]  # fmt: skip
        parts += ["", new_table("object", "a", "b", rows=rows), *more(found.objects, _SHOWN)]
    parts.append("")
    for group, count in found.groups.items():
        if some := [one for one in found.tensors if one.group == group and one.count]:
            parts.append(f"{group}: {len(some)} of {count} tensors differ, at most by {_number(_most(some))}")
    count = len(found.objects)
    others = f"; {count} {'value beside them differs' if count == 1 else 'values beside them differ'}" if count else ""
    what = f"{found.compared} tensors compared ({format.size(found.bytes)} read), {_alike(found, len(same))}"
    return [*parts, what + others + (": no difference" if found.equal else "")]


def _alike(found: Comparison, other_dtype: int) -> str:
    """Count the tensors whose values do not differ, of which ``other_dtype`` have another dtype."""
    same = found.compared - sum(one.count > 0 for one in found.tensors)
    if found.tolerance:
        return f"{same} are within the tolerance" + (f" (at most {_number(found.within)} apart)" if same else "")
    return f"{same - other_dtype} are the same" + (f", {other_dtype} but for their dtype" if other_dtype else "")


def _most(differences: Sequence[Difference]) -> float | None:
    found = [one.max_abs for one in differences]
    return None if None in found else max(value or 0.0 for value in found)


def _tensor_table(differences: Sequence[Difference]) -> Table:
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
