"""Contents of the pages on time and health: the newest steps of a trace, or older ones by range; ranks and verdicts."""

import bisect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tilth.analysis.events import Events, from_table
from tilth.analysis.read import parts, read_events
from tilth.analysis.recent import recent
from tilth.analysis.slow_rank import SHARE, slow_in, slow_rank
from tilth.analysis.time_breakdown import CONTROLLER, PEERS, STAGES, Account, account
from tilth.core.errors import DataError
from tilth.data.cache import FileState, file_state
from tilth.guard.verdict import Verdict
from tilth.process.child import Child
from tilth.runs.readers import HOUR, read_warnings
from tilth.trace.clock_samples import events_folder, read_rounds, rounds_path
from tilth.ui import format
from tilth.ui.heat import colour
from tilth.ui.report import workers_of
from tilth.ui.signs import living, sign_of
from tilth.ui.timeline import LANES, chosen, hues, lanes, pictures
from tilth.ui.web.follow import FollowedRun
from tilth.ui.web.search import StoredFile

NEWEST = 20
"""Newest steps that are shown where none are named."""
TORN = 1 << 60
"""Last step of a file that cannot be read: its process was killed while it wrote."""
EVENTS = 1_500_000
"""Most events that are read for a page."""
KEPT = 16
"""Most runs whose pictures of the newest steps are kept."""
SECONDS = 60.0
"""Seconds that a replay may take."""
LOOK = threading.Lock()
"""Held while the slow rank of a run is looked for."""
Row = dict[str, Any]


def read_steps_of(run: Path, steps: range | None) -> tuple[Events, range]:
    """Return the newest events and their complete steps, or those of some steps. DataError: there are none."""
    if steps is None:
        events, known = recent(run, NEWEST)
        if events is None or not len(known):
            raise DataError(f"{run.name} has written no events of a whole step", key="events")
        return events, range(max(known.start, known.stop - NEWEST), known.stop)
    folder = events_folder(run)
    written = parts(folder) if folder.is_dir() else {}
    for attempt in sorted({its for its, _ in written}, reverse=True):
        files = [_covering([*of.values()], steps) for (its, _), of in written.items() if its == attempt]
        paths = [path for some in files for path in some]
        if (count := sum(pq.read_metadata(path).num_rows for path in paths)) > EVENTS:
            raise DataError(f"steps {steps.start}:{steps.stop} have {count:,} events; name fewer steps", key="steps")
        tables = [read_events(path) for path in paths]
        if tables and (table := pa.concat_tables(tables)).num_rows:
            since = pc.min(table["start"]).as_py()
            events = from_table(table, read_rounds(folder, attempt, since))
            if any(step in steps for step in events.steps):
                return events, steps
    raise DataError(f"{run.name} has no events of steps {steps.start}:{steps.stop}", key="steps")


def _covering(paths: Sequence[Path], steps: range) -> Sequence[Path]:
    """Return the files of one process, in order, with events of these steps."""
    first = bisect.bisect_left(paths, steps.start, key=_last_step)
    last = bisect.bisect_right(paths, steps.stop, key=_last_step)
    return [path for path in paths[first : last + 1] if path != paths[-1] or _last_step(path) != TORN]


def _last_step(path: Path) -> int:
    """Return the last step that a file has events of; a file that is torn is the last one of its process. Files of
    earlier versions have no statistics, so that their column is read."""
    try:
        ends = [most for _, most in StoredFile(path, file_state(path)).bounds("step")]
        if None not in ends:
            return max(ends, default=-1)
        last = pc.max(pq.read_table(path, columns=["step"])["step"]).as_py()
    except (pa.ArrowException, OSError):
        return TORN
    return -1 if last is None else int(last)


def time_page(run: FollowedRun, steps: range | None) -> Row:
    """Return pictures of the time of some steps, and which ranks are slow. DataError: there are no events of them."""
    if steps is None:
        return _newest_times(run.path, _events_state(run)) | _slow_of(run)
    return _times(run.path, steps)


def _events_state(run: FollowedRun) -> tuple[FileState, ...]:
    """Return what changes where events or clocks of the newest attempt are written: files of events are renamed into
    their folder."""
    folder = events_folder(run.path)
    return file_state(folder), file_state(rounds_path(folder, int(run.state().get("attempt") or 0)))


@lru_cache(KEPT)
def _newest_times(run: Path, state: tuple[FileState, ...]) -> Row:
    """Return ``_times`` of the newest steps, computed anew where events were written. state: ``_events_state``."""
    return _times(run, None)


def slow_rank_of(run: FollowedRun) -> str:
    """Return the evidence against the rank that is slow in the newest steps; "": none is."""
    return str(_slow_of(run)["slow"])


def _slow_of(run: FollowedRun) -> Row:
    """Return ``_judged`` of the newest steps. Requests come in threads; one of them looks, and the others wait."""
    with LOOK:
        return _newest_slow(run.path, _events_state(run))


@lru_cache(KEPT)
def _newest_slow(run: Path, state: tuple[FileState, ...]) -> Row:
    """Return ``_slow_of``, computed anew where events were written. state: ``_events_state``."""
    return _judged(lambda: slow_rank(run))


def _judged(look: Callable[[], tuple[Verdict | None, int]]) -> Row:
    """Return what ``slow`` has as evidence ("": none), why there is no verdict as ``unknown`` ("": there is one, or
    steps or ranks are too few), and True as ``compared`` if ranks were compared."""
    try:
        verdict, last = look()
    except DataError as error:
        return {"slow": "", "unknown": str(error), "compared": False}
    return {"slow": verdict.evidence if verdict else "", "unknown": "", "compared": last >= 0}


def _times(run: Path, steps: range | None) -> Row:
    """Return pictures of some steps, of named ones with ``_judged``; of the newest ones ``_slow_of`` has it."""
    events, known = read_steps_of(run, steps)
    found = account(events, known)
    return pictures(events, found) | ({} if steps is None else _judged(lambda: slow_in(events, known))) | {
        "first": int(found.steps[0]), "last": int(found.steps[-1]), "heat": heat(events, found),
        "idle": idle_share(found), "steps": list(zip(found.steps.tolist(), found.seconds.tolist()))[-NEWEST:],
        "attempt": found.attempt, "step": float(np.median(found.seconds)), "share": SHARE,
    }  # fmt: skip


def idle_share(found: Account) -> float:
    """Return the share of the ranks' time in which they wait."""
    idle = [found.names.index(name) for name in (STAGES, PEERS, CONTROLLER)]
    return float(found.by_rank[:, idle].sum() / max(found.by_rank.sum(), 1e-12))


def lanes_of(run: FollowedRun, step: int, part: tuple[float, float]) -> Row:
    """Return a part of a step's timeline: for each rank the part of the time in each of ``COLUMNS`` columns."""
    events, _ = read_steps_of(run.path, range(step, step + 1))
    ranks = events.workers[:LANES]
    made, names, seconds = lanes(events, step, ranks, part)
    begin = seconds / max(part[1] - part[0], 1e-9) * part[0]
    rows = {"names": [lane.name for lane in made], "codes": [lane.codes.tolist() for lane in made]}
    return rows | {"step": step, "parts": list(names), "hues": hues(names), "begin": begin, "seconds": seconds}


# ---- health ----


def health_page(run: FollowedRun) -> Row:
    """Return who lives, what each rank does and uses, what was survived and warned of, and a heat map of phases."""
    look, state, times = run.look(), run.state(), Row()
    with suppress(DataError):  # there is no step yet, or the page on time names the trouble
        times = time_page(run, None)
    survived = look.recoveries
    findings = [{"title": f"{format.outcome(one)}: {format.survived(one)}", **_verdict(one)} for one in survived]
    findings += [{"title": f"warning: {one['kind']}", **_verdict(one)} for one in read_warnings(run.path)]
    told = [{"time": "", "evidence": one["text"], **one} for one in state.get("warnings") or ()]
    findings += [{"title": "warning", **_verdict(one)} for one in told]
    return {
        "look": look, "workers": [_worker(row) for row in living(look.state)], "used": workers_of(state),
        "slow": times.get("slow"), "heat": times.get("heat"), "nodes": nodes_of(run.path, _events_state(run)),
        "findings": sorted(findings, key=lambda one: (one["step"], one["time"]), reverse=True)[:100],
        "running": look.running, "ettr": look.ettr(), "hour": look.ettr(HOUR), "state": state,
        "lost": sum(one["lost"] + one["seconds"] for one in survived), "count": len(survived),
    }  # fmt: skip


@lru_cache(KEPT)
def nodes_of(run: Path, state: tuple[FileState, ...]) -> dict[int, str]:
    """Return the host of each rank of the newest attempt, as its events name it; empty where all ran on one.

    state: ``_events_state``, of which it is computed anew.
    """
    folder = events_folder(run)
    written = parts(folder) if folder.is_dir() else {}
    newest, found = max((attempt for attempt, _ in written), default=0), {}
    for (attempt, rank), files in written.items():
        for path in reversed(files.values()) if attempt == newest else ():
            with suppress(pa.ArrowException, OSError):  # torn, or removed meanwhile
                found[rank] = (pq.read_schema(path).metadata or {}).get(b"host", b"").decode()
                break
    return found if len({*found.values()}) > 1 else {}


def _verdict(one: Mapping[str, Any]) -> Row:
    ranks = ", ".join(map(str, one.get("ranks") or []))
    return {"time": one["time"], "step": one["step"], "ranks": ranks, "evidence": one["evidence"]}


def _worker(row: Mapping[str, Any]) -> Row:
    """Return the health of a rank, with True as ``late`` if it gives no sign of life."""
    late, doing = sign_of(row)
    return {**row, "late": late, "doing": doing, "beat": row.get("heartbeat_age")}


def heat(events: Events, found: Account) -> Row | None:
    """Return the time of ranks in each part of some steps over the median of the ranks; None without peers."""
    if len(found.ranks) < 2:
        return None
    usual = np.median(found.by_rank, axis=0)
    shown = [k for k, name in enumerate(found.names) if found.by_rank[:, k].max() > 0.005 * found.whole]
    rows = []
    for i in chosen(found):
        took = [(float(found.by_rank[i, k]), float(found.by_rank[i, k] / max(usual[k], 1e-9))) for k in shown]
        cells = [(s / len(found.steps), ratio, "#{:02x}{:02x}{:02x}".format(*colour(ratio))) for s, ratio in took]
        codes = np.unique(events.place.codes[events.rank == found.ranks[i]])
        rows.append((found.ranks[i], next(filter(None, (events.place.names[c] for c in codes)), ""), cells))
    ends = {"first": int(found.steps[0]), "last": int(found.steps[-1])}
    return {"names": [found.names[k] for k in shown], "rows": rows, **ends}


# ---- what if ----


class ReplayProcesses:
    """``tilth trace whatif`` in a process of its own, one at a time; a replay of the same steps is made once."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._known: dict[tuple[Path, int, int], Row] = {}

    def of(self, run: Path, first: int, last: int) -> Row:
        """Return the findings of ``tilth trace whatif --json`` for steps ``first`` to ``last``. DataError."""
        key = run, first, last
        if key in self._known:
            return self._known[key]
        if not self._busy.acquire(blocking=False):
            raise DataError("another replay is being made; try again in a moment", key="whatif.busy")
        try:
            made = self._made(run, f"{first}:{last + 1}")
        finally:
            self._busy.release()
        self._known = {**dict([*self._known.items()][-31:]), key: made}
        return made

    def _made(self, run: Path, steps: str) -> Row:
        command = [sys.executable, "-m", "tilth", "trace", "whatif", str(run), "--steps", steps, "--json"]
        child = Child(command, os.environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            said, wrong = child.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise DataError(
                f"the replay took longer than {SECONDS:.0f} s; name fewer steps", key="whatif.slow"
            ) from None
        finally:
            child.kill()
        if child.process.returncode:
            raise DataError(wrong.decode(errors="replace").strip()[-500:] or "the replay failed", key="whatif")
        found: Row = json.loads(said)
        return found
