"""The table of ranks in the report: work, waiting, pace, and time that others waited for each."""

import math

import numpy as np
from markupsafe import Markup

from tilth.analysis.time_breakdown import COMMUNICATION, CONTROLLER, PAUSE, PEERS, Account
from tilth.ui.html import render
from tilth.ui.timeline import hues

ROWS = 24  # most ranks in the table; of more, those that differ most from the median
SLOW = 1.1  # pace (time over that of its peers for the same work) from which a rank is called slow


def health(found: Account) -> Markup:
    """Render the table: for each rank its parts of the time, its pace, and how long others waited for it."""
    shown = chosen(found)
    return render("health.html", rows=[_row(found, i) for i in shown], left=len(found.ranks) - len(shown))


def chosen(found: Account, most: int = ROWS) -> list[int]:
    """Choose at most ``most`` ranks, those whose parts differ most from the median; return their places, ascending."""
    if len(found.ranks) <= most:
        return list(range(len(found.ranks)))
    far = np.abs(found.by_rank - np.median(found.by_rank, axis=0)).sum(1)
    return sorted(np.argsort(-far, kind="stable")[:most].tolist())


def _row(found: Account, i: int) -> tuple[int, list[tuple[str, float, str]], list[float], str, bool]:
    """Return rank, parts, shares of the time, pace, and True if it is slow."""
    whole, colours = found.whole, hues(found.names)
    at = {name: float(found.by_rank[i, k]) / whole for k, name in enumerate(found.names)}
    pace = float(found.pace[i])
    shares = [
        float(found.busy[i]) / whole, at[COMMUNICATION], at[PAUSE], at[PEERS] + at[CONTROLLER],
        float(found.meetings.blamed[i]) / whole,
    ]  # fmt: skip
    parts = [(name, share, colours[name]) for name, share in at.items() if share > 0]
    return found.ranks[i], parts, shares, "–" if math.isnan(pace) else f"{pace:.2f}", pace >= SLOW
