"""What happened: spans on every phase, their totals per step, and one event table in Parquet."""

from tilth.trace.ops import PHASES
from tilth.trace.spans import Recorder, Total, recorder, span, traced

__all__ = ["PHASES", "Recorder", "Total", "recorder", "span", "traced"]
