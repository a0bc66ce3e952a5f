"""The ranks of a run beside each other: who works, who waits, who is slow, who is waited for."""

import math

import numpy as np
from markupsafe import Markup

from tilth.analysis.time_breakdown import COMMUNICATION, CONTROLLER, PAUSE, PEERS, Account
from tilth.ui.html import render
from tilth.ui.timeline import hues

ROWS = 24
"""Most ranks in the table; of more, those that differ most from the others."""
SLOW = 1.1
"""Times as long as its peers for the same work: from there on a rank is called slow."""


def health(found: Account) -> Markup:
    """A table with a row a rank: how its time was divided, its pace, and how long the others waited for it."""
    shown = chosen(found)
    return render("health.html", rows=[_row(found, i) for i in shown], left=len(found.ranks) - len(shown))


def chosen(found: Account, most: int = ROWS) -> list[int]:
    """Places of the ranks that are shown, ascending: all, or those whose time is divided most unlike the others'."""
    if len(found.ranks) <= most:
        return list(range(len(found.ranks)))
    far = np.abs(found.by_rank - np.median(found.by_rank, axis=0)).sum(1)
    return sorted(np.argsort(-far, kind="stable")[:most].tolist())


def _row(found: Account, i: int) -> tuple[int, list[tuple[str, float, str]], list[float], str, bool]:
    """Rank, its parts, shares of the time, pace, and whether it is slow."""
    whole, colours = found.whole, hues(found.names)
    at = {name: float(found.by_rank[i, k]) / whole for k, name in enumerate(found.names)}
    pace = float(found.pace[i])
    shares = [
        float(found.busy[i]) / whole, at[COMMUNICATION], at[PAUSE], at[PEERS] + at[CONTROLLER],
        float(found.meetings.blamed[i]) / whole,
    ]  # fmt: skip
    parts = [(name, share, colours[name]) for name, share in at.items() if share > 0]
    return found.ranks[i], parts, shares, "–" if math.isnan(pace) else f"{pace:.2f}", pace >= SLOW
