"""``tilth ckpt diff``: compare two checkpoints, or one and a Hugging Face directory, tensor by tensor."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.table import Table

from tilth.cli.ckpt import bar
from tilth.cli.ckpt_show import abridged, more
from tilth.cli.main import CkptDiffCommand
from tilth.cli.tables import new_table, show
from tilth.core.errors import DataError
from tilth.runs.files import to_json
from tilth.runs.tensors import Comparison, Difference, compare, open_source
from tilth.ui import format

_SHOWN = 20  # most tensors and values in a table; ``--json`` has all


def diff(options: CkptDiffCommand) -> None:
    """Print the differences; exit code 1 if there are any."""
    tolerance = options.tolerance
    if tolerance is not None and not tolerance >= 0:
        raise DataError(f"--tolerance {tolerance}: it must be a number of at least 0", key="--tolerance")
    with bar() as report:
        found = compare(open_source(options.a), open_source(options.b), tolerance, report)
    if options.as_json:
        typer.echo(to_json({"equal": found.equal, **asdict(found)}))
    else:
        show(*_lines(found))
    raise typer.Exit(0 if found.equal else 1)


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
