"""The ranks of a run beside each other: who works, who waits, who is slow, who is waited for."""

import math
from collections.abc import Sequence

import numpy as np

from tilth.analysis.time_breakdown import COMMUNICATION, CONTROLLER, PAUSE, PEERS, Account
from tilth.ui import words
from tilth.ui.html import Html, tag
from tilth.ui.timeline import hues

ROWS = 24
"""Most ranks in the table; of more, those that differ most from the others."""
SLOW = 1.1
"""Times as long as its peers for the same work: from there on a rank is called slow."""


def health(found: Account) -> Html:
    """A table with a row a rank: how its time was divided, its pace, and how long the others waited for it."""
    shown = chosen(found)
    head = tag(
        "tr", *[tag("th", n) for n in ("rank", "", "busy", "communication", "gc", "waits", "waited for", "pace")]
    )
    rows = [_row(found, i) for i in shown]
    left = len(found.ranks) - len(shown)
    more = tag("p", f"{left:,} ranks that differ less from the others are left out.", class_="lead") if left else None
    return tag("div", more, tag("div", tag("table", head, *rows), class_="scroll"))


def chosen(found: Account, most: int = ROWS) -> list[int]:
    """Places of the ranks that are shown, ascending: all, or those whose time is divided most unlike the others'."""
    if len(found.ranks) <= most:
        return list(range(len(found.ranks)))
    far = np.abs(found.by_rank - np.median(found.by_rank, axis=0)).sum(1)
    return sorted(np.argsort(-far, kind="stable")[:most].tolist())


def _row(found: Account, i: int) -> Html:
    whole = found.whole
    at = {name: float(found.by_rank[i, k]) / whole for k, name in enumerate(found.names)}
    pace = float(found.pace[i])
    shares = [
        float(found.busy[i]) / whole, at[COMMUNICATION], at[PAUSE], at[PEERS] + at[CONTROLLER],
        float(found.meetings.blamed[i]) / whole,
    ]  # fmt: skip
    slow = pace >= SLOW
    return tag(
        "tr", tag("td", str(found.ranks[i])), tag("td", _bar(found.names, at), class_="wide"),
        *[tag("td", words.part(s) if s else "–") for s in shares],
        tag("td", "–" if math.isnan(pace) else f"{pace:.2f}", class_="clay" if slow else None),
    )  # fmt: skip


def _bar(names: Sequence[str], at: dict[str, float]) -> Html:
    colours = hues(names)
    parts = [
        tag("i", class_=colours[n], style=f"flex:{at[n]:.5f}", title=f"{n} {words.part(at[n])}")
        for n in names
        if at[n] > 0
    ]
    return tag("div", *parts, class_="bar thin")
