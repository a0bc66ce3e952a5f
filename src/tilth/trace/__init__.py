"""Recording: spans, their totals per step, and a table of events in Parquet."""

from tilth.trace.ops import PHASES
from tilth.trace.spans import Recorder, Total, recorder, span, traced

__all__ = ["PHASES", "Recorder", "Total", "recorder", "span", "traced"]
