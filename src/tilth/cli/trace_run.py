"""``tilth trace RUN``: where the time of a run went, in about ten lines."""

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from tilth.analysis.events import Events, parse_steps
from tilth.analysis.profiled import profiled
from tilth.analysis.recent import dropped, told
from tilth.analysis.run_trace import hint, open_run
from tilth.analysis.run_whatif import analyse_events
from tilth.analysis.time_breakdown import COMMUNICATION, CONTROLLER, PAUSE, PEERS, PROFILE, Account, account
from tilth.cli.tables import WIDTH
from tilth.cli.trace_whatif import about
from tilth.core.errors import DataError
from tilth.ui import format

SHOWN = 4
"""Most ranks with a line of their own; of more the two with most work and the two with least."""
INDENT, SHORT = 15, 40
"""Columns before the text, and most letters of a part that stands in one line."""
LEAST = 0.01
"""Parts of the time below this share are told together."""
Found = dict[str, Any]


def account_of(run: Path, steps: str, attempt: int | None = None, *, as_json: bool) -> None:
    """Print where the time of a run's steps went. steps: "A:B" or "A"; empty: all that have ended."""
    if not run.exists():
        raise DataError(f"no run at {str(run)!r}, nor is it a command of tilth trace (tilth trace --help)", key="RUN")
    opened = open_run(run, attempt)
    events = opened.events
    try:
        found = account(events, parse_steps(steps) if steps else _ended(run, events))
    except DataError as error:
        raise DataError(f"{run}: {error}{hint(run, events.attempt) if steps else ''}", key=error.key) from error
    said = as_dict(run, events, found) | {"gain": gain(events, found), "notes": opened.notes}
    typer.echo(json.dumps(said, allow_nan=False) if as_json else "\n".join(lines(said)))


def _ended(run: Path, events: Events) -> range | None:
    """Of a run that goes on the steps that all ranks have told; None: all."""
    return (told(events) or None) if _state(run) == "running" else None


def as_dict(run: Path, events: Events, found: Account) -> Found:
    """The findings as JSON has them. Times in seconds, rates in tokens per second, shares from 0 to 1."""
    slowest = int(found.seconds.argmax())
    inline = events.controller in events.workers
    return {
        "run": str(run),
        "state": _state(run),
        "attempt": found.attempt,
        "steps": {"first": int(found.steps[0]), "last": int(found.steps[-1]), "count": len(found.steps)},
        "seconds": found.whole,
        "step": {
            "mean": float(found.seconds.mean()), "median": float(np.median(found.seconds)),
            "longest": float(found.seconds[slowest]), "longest_at": int(found.steps[slowest]),
        },
        "parts": {name: {"seconds": s, "share": s / found.whole} for name, s in found.parts.items()},
        "roles": {role: _by_rank(found, took) for role, took in found.roles.items()},
        "ranks": [_rank(found, i) for i in range(len(found.ranks))],
        "communication": {"by_op": found.meetings.by_op, **_talk(found)},
        "controller": None if inline else {"rank": events.controller, "busy": found.controller},
        "rates": _rates(run, found),
        "profiled": [step for step in profiled(events).tolist() if step in found.steps],
        "events": len(events),
        "dropped": dropped(run, found.attempt),
    }  # fmt: skip


def gain(events: Events, found: Account) -> Found | None:
    """What a step would take if ranks and communications were as their peers, and the likely cause that they are not.

    None: there are no peers (inline), or the calls of these steps are not told as a whole.
    """
    if len(found.ranks) == 1:
        return None
    try:
        _, replayed, cause = analyse_events(events, range(int(found.steps[0]), int(found.steps[-1]) + 1))
    except DataError:
        return None
    return {
        "slowdown": replayed.slowdown, "step": float(replayed.replayed.mean()),
        "ideal_step": float(replayed.ideal.mean()), "error": replayed.error,
        "earlier": replayed.older,
        "cause": about(cause),
    }  # fmt: skip


def _state(run: Path) -> str | None:
    """None: not a run's folder, but that of its events."""
    from tilth.runs.readers import read_state

    return str(read_state(run)["state"]) if (run / "run.json").exists() else None


def _by_rank(found: Account, took: np.ndarray) -> dict[str, float]:
    return {str(r): float(t) for r, t in zip(found.ranks, took) if t}


def _rank(found: Account, i: int) -> Found:
    at = {name: float(found.by_rank[i, k]) for k, name in enumerate(found.names)}
    meetings = found.meetings
    return {
        "rank": found.ranks[i],
        "busy": float(found.busy[i]),
        "pace": None if np.isnan(found.pace[i]) else float(found.pace[i]),
        "communication": {
            "transfer": float(meetings.transfer[i]), "waiting": float(meetings.waiting[i]),
            "hidden": float(meetings.hidden[i]), "others_waited": float(meetings.blamed[i]),
        },
        "parts": {name: seconds for name, seconds in at.items() if seconds},
    }  # fmt: skip


def _talk(found: Account) -> dict[str, float]:
    """Means over ranks."""
    meetings = found.meetings
    return {name: float(getattr(meetings, name).mean()) for name in ("transfer", "waiting", "hidden")}


def _rates(run: Path, found: Account) -> dict[str, float | None]:
    """From the metrics of these steps; None where they have none."""
    from tilth.runs.readers import rate, read_metrics

    first, last = int(found.steps[0]), int(found.steps[-1])
    records = [r for r in read_metrics(run) if first <= r["step"] <= last]
    generated, trained = (sum(r.get(f"tokens/{n}") or 0 for r in records) for n in ("generated", "trained"))
    mfu = rate(records, "mfu", "time/update")
    updating = sum(r.get("time/update") or 0 for r in records if r.get("mfu") is not None)
    return {
        "generate": rate(records, "tokens_per_second/generate", "time/generate"),
        "train": rate(records, "tokens_per_second/train", "time/update"),
        "generated_overall": generated / found.whole if generated else None,
        "trained_overall": trained / found.whole if trained else None,
        "mfu": mfu,
        "mfu_overall": None if mfu is None else mfu * updating / found.whole,
    }


def lines(said: Found) -> list[str]:
    """What a person reads."""
    pairs = [
        ("steps", _steps(said)),
        ("where", _where(said)),
        ("roles", _roles(said)),
        *_ranks(said),
        ("communication", _communication(said)),
        ("controller", _controller(said)),
        ("rates", _speeds(said["rates"])),
        ("gain", _gain(said["gain"], inline=said["controller"] is None)),
        ("cause", [said["gain"]["cause"]["text"]] if said["gain"] else []),
        ("profile", _profile(said["profiled"])),
        ("trace", _trace(said)),
        *(("note", [note]) for note in said["notes"]),
    ]
    return [line for name, parts in pairs if parts for line in _wrapped(name, parts)]


def _wrapped(name: str, parts: Sequence[str]) -> list[str]:
    """A label, and parts behind it in as many lines as they need; short ones are not torn."""
    width = max(shutil.get_terminal_size((WIDTH, 24)).columns, 2 * INDENT)
    bound = [p.replace(" ", "\u00a0") if len(p) <= SHORT else p for p in parts]
    text = textwrap.wrap(", ".join(bound), width - INDENT, break_long_words=False)
    return [f"{name if i == 0 else '':<{INDENT}}{line}".replace("\u00a0", " ") for i, line in enumerate(text)]


def _share(seconds: float, whole: float) -> str:
    return format.part(seconds / whole)


def _steps(said: Found) -> list[str]:
    steps, step = said["steps"], said["step"]
    several = steps["count"] > 1
    state = {"running": "so far", None: ""}.get(said["state"], said["state"])
    return [
        f"{steps['first']} to {steps['last']}" if several else str(steps["first"]),
        f"attempt {said['attempt']}",
        *([state] if state else []),
        format.timed(said["seconds"]) if said["seconds"] >= 60 else format.brief(said["seconds"]),
        *([f"{format.brief(step['median'])} a step (median)"] if several else []),
        *([f"step {step['longest_at']} the longest with {format.brief(step['longest'])}"] if several else []),
    ]


def _where(said: Found) -> list[str]:
    """Shares of the time: what was done first, then waiting, the greatest first in both."""
    items = sorted(said["parts"].items(), key=lambda kv: (kv[0] in (PEERS, CONTROLLER), -kv[1]["seconds"]))
    seconds = {name: part["seconds"] for name, part in items if part["share"] >= LEAST}
    rest = sum(part["seconds"] for part in said["parts"].values()) - sum(seconds.values())
    told = [f"{name} {_share(took, said['seconds'])}" for name, took in seconds.items()]
    return told + ([f"the rest {_share(rest, said['seconds'])}"] if rest > 0 and len(told) < len(items) else [])


def _roles(said: Found) -> list[str]:
    """Each role's share of its ranks' time; where ranks differ, the least and the most."""
    found = []
    for role, ranks in said["roles"].items():
        shares = sorted(ranks.values())
        low, high = (_share(s, said["seconds"]) for s in (shares[0], shares[-1]))
        who = f" (rank {next(iter(ranks))})" if len(ranks) == 1 < len(said["ranks"]) else ""
        found.append(f"{role} {high}{who}" if low == high else f"{role} {low.removesuffix(' %')} to {high}")
    return found


def _ranks(said: Found) -> list[tuple[str, list[str]]]:
    ranks = said["ranks"]
    if len(ranks) == 1:
        return []
    order = sorted(ranks, key=lambda r: (-r["busy"], r["rank"]))
    half = SHOWN // 2
    shown = ranks if len(ranks) <= SHOWN else order[:half] + order[-half:]
    rest = [("", [f"and {len(ranks) - SHOWN} ranks between these"])] if len(ranks) > SHOWN else []
    return [(f"rank {r['rank']}", _rank_parts(r, said["seconds"])) for r in shown] + rest


def _rank_parts(rank: Mapping[str, Any], whole: float) -> list[str]:
    parts, talk = rank["parts"], rank["communication"]
    named = [
        (COMMUNICATION, parts.get(COMMUNICATION)), (PAUSE, parts.get(PAUSE)), (PROFILE, parts.get(PROFILE)),
        ("waits for ranks", parts.get(PEERS)),
        ("for the controller", parts.get(CONTROLLER)), ("others waited for it", talk["others_waited"]),
    ]  # fmt: skip
    return [f"busy {_share(rank['busy'], whole)}", *(f"{name} {_share(s, whole)}" for name, s in named if s)]


def _communication(said: Found) -> list[str]:
    talk, whole = said["communication"], said["seconds"]
    exposed = talk["transfer"] + talk["waiting"]
    if not exposed + talk["hidden"]:
        return []
    most = max(talk["by_op"], key=talk["by_op"].get, default=None)
    return [
        f"exposed {_share(exposed, whole)} (waiting for the last rank {_share(talk['waiting'], whole)}",
        f"transfer {_share(talk['transfer'], whole)})",
        f"hidden {_share(talk['hidden'], whole)}",
        *([f"most in {most}"] if most else []),
    ]


def _controller(said: Found) -> list[str]:
    if said["controller"] is None:
        return []
    return [f"busy {_share(said['controller']['busy'], said['seconds'])}, else it waits for answers"]


def _speeds(rates: Mapping[str, float | None]) -> list[str]:
    """Rates within their phases, and over the whole time."""
    pairs = [
        (name, rates[key], rates[f"{name}_overall"]) for name, key in (("generated", "generate"), ("trained", "train"))
    ]
    found = [
        f"{inside:,.0f} tokens/s {name}" + (f" ({overall:,.0f} over all time)" if overall else "")
        for name, inside, overall in pairs
        if inside
    ]
    if rates["mfu"] is not None and rates["mfu_overall"] is not None:
        found.append(f"MFU {format.part(rates['mfu'])} of updates ({format.part(rates['mfu_overall'])} of all time)")
    return found


def _gain(gain: Found | None, *, inline: bool) -> list[str]:
    if gain is None:
        return ["not known: one process has no peers to be compared with"] if inline else []
    return [
        f"{format.brief(gain['ideal_step'])} a step instead of {format.brief(gain['step'])} (means) if ranks and "
        f"communications were as their peers: S {gain['slowdown']:.3f}",
        f"error of the model {format.part(abs(gain['error']))}",
        *([f"without {format.count(gain['earlier'], 'earlier step')}"] if gain["earlier"] else []),
    ]


def _profile(steps: Sequence[int]) -> list[str]:
    if not steps:
        return []
    which = f"step {steps[0]} was" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} ({len(steps)}) were"
    return [f"{which} recorded by torch's profiler and took longer for that; gain and cause are of the other steps"]


def _trace(said: Found) -> list[str]:
    lost = f"{said['dropped']:,} dropped" if said["dropped"] else "none dropped"
    return [f"{said['events']:,} events", lost]
