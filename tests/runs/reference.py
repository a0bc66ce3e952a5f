"""Write the reference of all metrics from their declarations: ``python -m tests.runs.reference > docs/metrics.md``."""

import textwrap
from typing import get_args

from tilth.runs.metrics import KEYS, METRICS, OTHER, Reduction
from tilth.trace.ops import PHASES

INTRODUCTION = (
    "One line of a run's `metrics.jsonl` is one committed step: the fields {keys}, and the metrics below that were "
    "measured in it. `metrics_schema.json` beside it holds this table for programs.",
    "A metric is declared once, in [`runs/metrics.py`](../src/tilth/runs/metrics.py). A name that is not declared "
    "there is an error, and so is a reduction other than the declared one.",
    "A name that ends in `/*` is a family. `time/*`: `step`, the phases {phases} that occur in the step, and {other}. "
    "`reward/part/*`: names that the reward function chooses.",
)
MEANS = {
    "mean": "sum over count: a part is weighted by its number of items; left out if there is no item",
    "sum": "sum of all parts of the step",
    "max": "maximum of all parts of the step",
    "min": "minimum of all parts of the step",
    "last": "newest value of the step",
}
"""Meaning of each reduction."""


def reference() -> str:
    """Return all metrics as Markdown."""
    words = {"keys": _names(KEYS), "phases": _names(sorted(PHASES)), "other": f"`{OTHER}`, the time in no phase"}
    used = {m.reduction for m in METRICS.values()}
    reductions = [f"| {name} | {MEANS[name]} |" for name in get_args(Reduction) if name in used]
    rows = [f"| `{m.name}` | {m.unit} | {m.reduction} | {m.description} |" for m in METRICS.values()]
    parts = [
        "# Metrics\n",
        *[textwrap.fill(p.format(**words), 120, break_on_hyphens=False) + "\n" for p in INTRODUCTION],
        f"## The {len(METRICS)} metrics\n",
        *["| metric | unit | reduction | meaning |", "|---|---|---|---|", *rows],
        "\nThe unit `1` is a number without a unit; a `share` is between 0 and 1.\n",
        "## Reductions\n",
        *["| reduction | how parts become one number |", "|---|---|", *reductions],
    ]
    return "\n".join(parts) + "\n"


def _names(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(reference(), end="")
