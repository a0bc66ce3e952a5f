"""The reference of all metrics, written from their declarations: ``python -m tilth.runs.docs > docs/metrics.md``."""

import textwrap
from typing import get_args

from tilth.runs.metrics import KEYS, METRICS, OTHER, Reduction
from tilth.trace.ops import PHASES

INTRODUCTION = (
    "One line of a run's `metrics.jsonl` is one committed step: the fields {keys}, and those of the metrics below that "
    "were measured in it. `metrics_schema.json` beside it holds this table for programs.",
    "A metric is declared once, in [`runs/metrics.py`](../src/tilth/runs/metrics.py). A name that is not declared "
    "there is an error, and so are parts of a metric that were put together otherwise than declared.",
    "A name that ends in `/*` is a family: those of `time/*` are `step`, the phases {phases}, as far as a step has "
    "them, and {other}; those of `reward/part/*` are named by the reward function.",
)
MEANS = {
    "mean": "sum over count, so that a part weighs as many items as it stands for; left out where there is no item",
    "sum": "of all parts of the step",
    "max": "of all parts of the step",
    "min": "of all parts of the step",
    "last": "the newest value of the step",
}
"""How each reduction makes one number of a step out of its parts."""


def reference() -> str:
    """All metrics as Markdown: name, unit, reduction, meaning."""
    words = {"keys": _names(KEYS), "phases": _names(sorted(PHASES)), "other": f"`{OTHER}`, what lies in no phase"}
    used = {m.reduction for m in METRICS.values()}
    reductions = [f"| {name} | {MEANS[name]} |" for name in get_args(Reduction) if name in used]
    rows = [f"| `{m.name}` | {m.unit} | {m.reduction} | {m.description} |" for m in METRICS.values()]
    parts = [
        "# Metrics\n",
        *[textwrap.fill(p.format(**words), 120, break_on_hyphens=False) + "\n" for p in INTRODUCTION],
        f"## The {len(METRICS)} metrics\n",
        *["| metric | unit | reduction | meaning |", "|---|---|---|---|", *rows],
        "\nThe unit `1` is a number without a unit; a `share` lies between 0 and 1.\n",
        "## Reductions\n",
        *["| reduction | how parts become one number |", "|---|---|", *reductions],
    ]
    return "\n".join(parts) + "\n"


def _names(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(reference(), end="")
