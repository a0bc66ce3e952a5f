"""docs/metrics.md says what the declarations say."""

from pathlib import Path

from tests.runs.reference import MEANS, reference
from tilth.runs.metrics import METRICS
from tilth.trace.ops import PHASES


def test_the_page_equals_the_declarations():
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == reference(), "run: python -m tests.runs.reference > docs/metrics.md"


def test_every_metric_is_one_row_with_its_unit_and_reduction():
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) == len(METRICS)
    for row, metric in zip(rows, METRICS.values()):
        assert [cell.strip() for cell in row.strip("|").split("|")] == [
            f"`{metric.name}`", metric.unit, metric.reduction, metric.description
        ]  # fmt: skip


def test_reductions_and_phases_that_are_used_are_explained():
    text = reference()
    assert all(f"| {m.reduction} | {MEANS[m.reduction]} |" in text for m in METRICS.values())
    assert all(f"`{phase}`" in text for phase in PHASES)
