"""Find steps that torch's profiler recorded: they take longer and are left out of analyses."""

import numpy as np

from tilth.analysis.events import Events


def profiled(events: Events) -> np.ndarray:
    """Return the steps that overlap a profile, from its begin mark to its end mark: int64, ascending."""
    home = events.rank == events.controller
    marks = np.flatnonzero(home & events.op.is_("profile"))
    rows = np.flatnonzero(home & events.op.is_("step"))
    during, since = np.zeros(len(rows), bool), -1
    for row in marks.tolist():
        if events.detail.text(row) == "begin":
            since = int(events.start[row]) if since < 0 else since
        elif since >= 0:
            during |= (events.end[rows] > since) & (events.start[rows] < events.end[row])
            since = -1
    if since >= 0:  # it has not ended yet
        during |= events.end[rows] > since
    return np.unique(events.step[rows[during]])
