"""Findings on the time of a run as plain data, as JSON has them. Times in seconds, shares from 0 to 1."""

from pathlib import Path
from typing import Any

import numpy as np

from tilth.analysis.events import Events, profiled
from tilth.analysis.predicted import predicted
from tilth.analysis.recent import dropped
from tilth.analysis.run_whatif import analyse_events
from tilth.analysis.time_breakdown import Account
from tilth.analysis.whatif import Cause
from tilth.core.errors import DataError
from tilth.runs.costs import read_costs
from tilth.runs.readers import rate, read_metrics, read_state


def cause_summary(cause: Cause) -> dict[str, Any]:
    """Return a cause with its findings and evidence."""
    findings = [
        {"kind": f.kind, "share": f.share, "where": list(f.where), "text": f.text}
        | ({"seconds": f.seconds} if f.seconds is not None else {})
        for f in cause.findings
    ]
    return {"text": cause.text, "findings": findings, "evidence": cause.evidence}


def breakdown_summary(run: Path, events: Events, found: Account) -> dict[str, Any]:
    """Return a breakdown of steps, with rates in tokens per second."""
    slowest = int(found.seconds.argmax())
    inline = events.controller in events.workers
    return {
        "run": str(run),
        "state": state_of(run),
        "attempt": found.attempt,
        "steps": {"first": int(found.steps[0]), "last": int(found.steps[-1]), "count": len(found.steps)},
        "seconds": found.whole,
        "step": {
            "mean": float(found.seconds.mean()), "median": float(np.median(found.seconds)),
            "longest": float(found.seconds[slowest]), "longest_at": int(found.steps[slowest]),
        },
        "parts": {name: {"seconds": s, "share": s / found.whole} for name, s in found.parts.items()},
        "roles": {
            role: {str(r): float(t) for r, t in zip(found.ranks, took) if t} for role, took in found.roles.items()
        },
        "ranks": [_rank(found, i) for i in range(len(found.ranks))],
        "communication": {"by_op": found.meetings.by_op} | {
            name: float(getattr(found.meetings, name).mean()) for name in ("transfer", "waiting", "hidden")
        },
        "controller": None if inline else {"rank": events.controller, "busy": found.controller},
        "rates": _rates(run, found),
        "predicted": _predicted(run, events, found),
        "profiled": [step for step in profiled(events).tolist() if step in found.steps],
        "events": len(events),
        "dropped": dropped(run, found.attempt),
    }  # fmt: skip


def _predicted(run: Path, events: Events, found: Account) -> dict[str, Any] | None:
    """Return predicted and measured seconds of micro-batches in these steps; None if the run balances by no costs."""
    fits = read_costs(run) if run.is_dir() else []
    these = predicted(events.select(np.isin(events.step, found.steps)), fits)
    return None if these is None else these.summary()


def gain(events: Events, found: Account) -> dict[str, Any] | None:
    """Estimate the time of a step if ranks and communications were as their peers, and the likely cause of the loss.

    None: there are no peers (inline), or calls of these steps are missing.
    """
    if len(found.ranks) == 1:
        return None
    try:
        model, replayed, cause = analyse_events(events, range(int(found.steps[0]), int(found.steps[-1]) + 1))
    except DataError:
        return None
    return {
        "slowdown": replayed.slowdown, "step": float(replayed.replayed.mean()),
        "ideal_step": float(replayed.ideal.mean()), "error": replayed.error,
        "earlier": model.steps.older,
        "cause": cause_summary(cause),
    }  # fmt: skip


def state_of(run: Path) -> str | None:
    """Return the run's state; None for a folder of events."""
    return str(read_state(run)["state"]) if (run / "run.json").exists() else None


def _rank(found: Account, i: int) -> dict[str, Any]:
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


def _rates(run: Path, found: Account) -> dict[str, float | None]:
    """Return rates from the metrics of these steps; None where they have none."""
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
