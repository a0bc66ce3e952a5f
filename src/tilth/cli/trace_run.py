"""``tilth trace RUN``: a breakdown of the time of a run, in about ten lines."""

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from tilth.analysis.events import parse_steps
from tilth.analysis.recent import told
from tilth.analysis.run_trace import hint, open_run
from tilth.analysis.summaries import breakdown_summary, gain, state_of
from tilth.analysis.time_breakdown import COMMUNICATION, CONTROLLER, IDLE, PAUSE, PEERS, PROFILE, STAGES, account
from tilth.cli.main import TraceRunCommand
from tilth.cli.tables import WIDTH
from tilth.core.errors import DataError
from tilth.ui import format

SHOWN = 4  # most ranks with a line of their own; of more, half have most work and half least
INDENT, SHORT = 15, 40  # columns of the labels, and most letters of a part that is not wrapped
LEAST = 0.01  # parts of the time below this share are summed up as the rest
Found = dict[str, Any]


def account_of(options: TraceRunCommand) -> None:
    """Print the breakdown of a run's steps."""
    run, steps = options.run, options.steps
    if not run.exists():
        raise DataError(f"no run at {str(run)!r}, nor is it a command of tilth trace (tilth trace --help)", key="RUN")
    opened = open_run(run, options.attempt)
    events = opened.events
    ended = (told(events) or None) if state_of(run) == "running" else None
    try:
        found = account(events, parse_steps(steps) if steps else ended)
    except DataError as error:
        raise DataError(f"{run}: {error}{hint(run, events.attempt) if steps else ''}", key=error.key) from error
    plain = breakdown_summary(run, events, found) | {"gain": gain(events, found), "notes": opened.notes}
    typer.echo(json.dumps(plain, allow_nan=False) if options.as_json else "\n".join(lines(plain)))


def lines(found: Found) -> list[str]:
    lost = found["dropped"]
    pairs = [
        ("steps", _steps(found)),
        ("where", _where(found)),
        ("roles", _roles(found)),
        *_ranks(found),
        ("communication", _communication(found)),
        ("controller", [f"busy {_share(found['controller']['busy'], found['seconds'])}, else it waits for answers"]
         if found["controller"] else []),
        ("rates", _speeds(found["rates"])),
        ("predicted", _predicted(found["predicted"])),
        ("gain", _gain(found["gain"], inline=found["controller"] is None)),
        ("cause", [found["gain"]["cause"]["text"]] if found["gain"] else []),
        ("profile", _profile(found["profiled"])),
        ("trace", [f"{found['events']:,} events", f"{lost:,} dropped" if lost else "none dropped"]),
        *(("note", [note]) for note in found["notes"]),
    ]  # fmt: skip
    return [line for name, parts in pairs if parts for line in _wrapped(name, parts)]


def _wrapped(name: str, parts: Sequence[str]) -> list[str]:
    """Wrap the parts behind a label; short ones are not split."""
    width = max(shutil.get_terminal_size((WIDTH, 24)).columns, 2 * INDENT)
    bound = [p.replace(" ", "\u00a0") if len(p) <= SHORT else p for p in parts]
    text = textwrap.wrap(", ".join(bound), width - INDENT, break_long_words=False)
    return [f"{name if i == 0 else '':<{INDENT}}{line}".replace("\u00a0", " ") for i, line in enumerate(text)]


def _share(seconds: float, whole: float) -> str:
    return format.part(seconds / whole)


def _steps(found: Found) -> list[str]:
    steps, step = found["steps"], found["step"]
    several = steps["count"] > 1
    state = {"running": "so far", None: ""}.get(found["state"], found["state"])
    return [
        f"{steps['first']} to {steps['last']}" if several else str(steps["first"]),
        f"attempt {found['attempt']}",
        *([state] if state else []),
        format.timed(found["seconds"]) if found["seconds"] >= 60 else format.brief(found["seconds"]),
        *([f"{format.brief(step['median'])} a step (median)"] if several else []),
        *([f"step {step['longest_at']} the longest with {format.brief(step['longest'])}"] if several else []),
    ]


def _where(found: Found) -> list[str]:
    """Return the shares of work, then those of waiting, the greatest first."""
    items = sorted(found["parts"].items(), key=lambda kv: (kv[0] in IDLE, -kv[1]["seconds"]))
    seconds = {name: part["seconds"] for name, part in items if part["share"] >= LEAST}
    rest = sum(part["seconds"] for part in found["parts"].values()) - sum(seconds.values())
    parts = [f"{name} {_share(took, found['seconds'])}" for name, took in seconds.items()]
    return parts + ([f"the rest {_share(rest, found['seconds'])}"] if rest > 0 and len(parts) < len(items) else [])


def _roles(found: Found) -> list[str]:
    """Return each role's share of its ranks' time, the least and the greatest if they differ."""
    roles = []
    for role, ranks in found["roles"].items():
        shares = sorted(ranks.values())
        low, high = (_share(s, found["seconds"]) for s in (shares[0], shares[-1]))
        who = f" (rank {next(iter(ranks))})" if len(ranks) == 1 < len(found["ranks"]) else ""
        roles.append(f"{role} {high}{who}" if low == high else f"{role} {low.removesuffix(' %')} to {high}")
    return roles


def _ranks(found: Found) -> list[tuple[str, list[str]]]:
    ranks = found["ranks"]
    if len(ranks) == 1:
        return []
    order = sorted(ranks, key=lambda r: (-r["busy"], r["rank"]))
    half = SHOWN // 2
    shown = ranks if len(ranks) <= SHOWN else order[:half] + order[-half:]
    rest = [("", [f"and {len(ranks) - SHOWN} ranks between these"])] if len(ranks) > SHOWN else []
    return [(f"rank {r['rank']}", _rank_parts(r, found["seconds"])) for r in shown] + rest


def _rank_parts(rank: Mapping[str, Any], whole: float) -> list[str]:
    parts, talk = rank["parts"], rank["communication"]
    named = [
        (COMMUNICATION, parts.get(COMMUNICATION)), (PAUSE, parts.get(PAUSE)), (PROFILE, parts.get(PROFILE)),
        ("waits for stages", parts.get(STAGES)), ("waits for ranks", parts.get(PEERS)),
        ("for the controller", parts.get(CONTROLLER)), ("others waited for it", talk["others_waited"]),
    ]  # fmt: skip
    return [f"busy {_share(rank['busy'], whole)}", *(f"{name} {_share(s, whole)}" for name, s in named if s)]


def _communication(found: Found) -> list[str]:
    talk, whole = found["communication"], found["seconds"]
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


def _speeds(rates: Mapping[str, float | None]) -> list[str]:
    """Return rates within their phases, and over the whole time."""
    found = []
    for name, key in (("generated", "generate"), ("trained", "train")):
        inside, overall = rates[key], rates[f"{name}_overall"]
        if inside:
            found.append(f"{inside:,.0f} tokens/s {name}" + (f" ({overall:,.0f} over all time)" if overall else ""))
    if rates["mfu"] is not None and rates["mfu_overall"] is not None:
        found.append(f"MFU {format.part(rates['mfu'])} of updates ({format.part(rates['mfu_overall'])} of all time)")
    return found


def _predicted(found: Found | None) -> list[str]:
    if found is None:
        return []
    error, p90 = (format.part(found[name]) for name in ("error", "p90"))
    return [
        f"{format.brief(found['predicted'])} of passes in {found['micro_batches']:,} micro-batches, and they took "
        f"{format.brief(found['measured'])}: error of one {error} (p90 {p90})"
    ]


def _gain(gain: Found | None, *, inline: bool) -> list[str]:
    if gain is None:
        return ["unknown: one process has no peers to be compared with"] if inline else []
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
