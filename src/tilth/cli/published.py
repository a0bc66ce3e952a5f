"""``tilth layout RECIPE --check-against published``: predicted step times beside those that other systems publish."""

import json
from typing import Any

import typer
from rich.table import Table

from tilth.cli.tables import WIDTH, new_table
from tilth.cli.tables import show as show_parts
from tilth.config.schema import Recipe
from tilth.core.errors import RecipeError
from tilth.launch.published import CHARON, Prediction, check, like, typical_error
from tilth.plan.devices import DEVICES

PUBLISHED = "published"


def show(recipe: Recipe, against: str, *, as_json: bool) -> None:
    """Print published and predicted seconds, and the errors of all rows and of those like the recipe."""
    if against != PUBLISHED:
        raise RecipeError(f"--check-against {against!r} is not there; use {PUBLISHED}", key="--check-against")
    found = check()
    alike = like(recipe, found)
    if as_json:
        typer.echo(json.dumps(as_object(found, alike), ensure_ascii=False))
    else:
        show_parts(*tables(found, alike), width=WIDTH)


def as_object(found: list[Prediction], alike: list[Prediction]) -> dict[str, Any]:
    """Return the rows as plain data, in seconds and parts."""
    rows = [one.row._asdict() | {"predicted": one.seconds, "error": one.error} for one in found]
    errors = {"median_error": typical_error(found), "median_error_alike": typical_error(alike), "charon": CHARON}
    return {"rows": rows, **errors}


def tables(found: list[Prediction], alike: list[Prediction]) -> list[Table | str]:
    """Return the table and lines."""
    names = ("system", "model", "devices", "published s", "predicted s", "error")
    table = new_table(*names, right=names[2:])
    for one in found:
        row, seconds = one.row, (f"{one.row.seconds:.3g}", f"{one.seconds:.3g}")
        table.add_row(row.system, row.model, f"{row.devices:,} {row.device}", *seconds, f"{100 * one.error:+.0f} %")
    kinds = [DEVICES[name] for name in dict.fromkeys(one.row.device for one in found)]
    constants = (
        f"{kind.name}: {kind.attained:.0%} of {kind.flops['bf16'] / 1e12:.0f} TFLOP/s, {kind.links:.0%} of links"
        for kind in kinds
    )
    every, own = (f"{typical_error(rows):.1%} of {len(rows)} rows" for rows in (found, alike))
    return [
        "all predicted, nothing fitted: published rates of devices, of which layers and links reach a share",
        *constants,
        "",
        table,
        f"median error: {every}, {own} like this recipe; Charon publishes {CHARON:.2%}",
        "",
        *dict.fromkeys(f"{one.row.system.partition(',')[0]}: {one.row.source}; {one.row.apart}" for one in found),
    ]
