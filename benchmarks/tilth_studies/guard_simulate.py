"""``tilth guard simulate``: effective training time of a recipe under a trace of faults."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from tilth.cli.main import GuardSimulateCommand
from tilth.cli.tables import new_table, show
from tilth.core.errors import RecipeError
from tilth.runs.trust import load_named
from tilth_studies.faults import DAY, FaultTrace, read_trace, scaled
from tilth_studies.survival import MECHANISMS, SurvivalPolicy, Survived, measured, standby, switched_off
from tilth_studies.survival import simulate as survive

INTERVALS = (1, 6, 60)
"""Checkpoints on disk beside the recipe's, in minutes."""
DETECTIONS = (0.1, 10.0, 60.0, 600.0)


def simulate(options: GuardSimulateCommand) -> None:
    """Print the table, or JSON."""
    recipe, without, seed = load_named(options.name, options.overrides or ()), options.without, options.seed
    if without not in ("wait", "shrink"):
        raise RecipeError(f"--without {without!r}: use wait or shrink", key="without")
    trace = read_trace(options.trace, options.trace_nodes)
    faults = scaled(trace, options.nodes or options.trace_nodes, seed)
    probability = len(faults.faults) / faults.nodes / (faults.seconds / DAY)
    enough = standby(faults.nodes, probability)
    policy = SurvivalPolicy(
        step=options.step,
        detect=options.detect,
        hangs=options.hangs,
        restart=options.restart,
        wake=options.wake,
        cold=options.cold,
        hang_after=recipe.guard.hang_after,
        interval=recipe.run.save_every * options.step,
        spares=enough if options.spares is None else options.spares,
        without="shrink" if without == "shrink" else "wait",
    )
    policy = policy if options.measurements is None else measured(options.measurements, policy)
    rows = [(about, survive(faults, changed, seed)) for about, changed in _variants(policy)]
    if options.as_json:
        print(json.dumps(_as_object(faults, probability, enough, policy, rows), indent=1))
        return
    show(*_parts(faults, probability, enough, policy, rows))


def _variants(policy: SurvivalPolicy) -> Iterator[tuple[str, SurvivalPolicy]]:
    yield "the recipe's settings", policy
    for mechanism in MECHANISMS:
        yield f"without {mechanism}", switched_off(policy, mechanism)
    for minutes in INTERVALS:
        disk = replace(policy, memory=False, interval=60.0 * minutes)
        yield f"disk alone, every {minutes} min", disk
    for spares in sorted({0, 1, 2, policy.spares // 2, 2 * policy.spares} - {policy.spares}):
        yield f"{spares} spares", replace(policy, spares=spares)
    yield "spares without limit", replace(policy, spares=10**9)
    for detect in DETECTIONS:
        yield f"every failure seen after {detect:g} s", replace(policy, detect=detect, hangs=0.0)


def _as_object(
    faults: FaultTrace, probability: float, enough: int, policy: SurvivalPolicy, rows: list[tuple[str, Survived]]
) -> dict[str, Any]:
    return {
        "nodes": faults.nodes,
        "days": faults.seconds / DAY,
        "incidents": rows[0][1].incidents,
        "probability": probability,
        "standby": enough,
        "policy": {key: None if value == math.inf else value for key, value in asdict(policy).items()},
        "rows": [{"about": about, **asdict(found)} for about, found in rows],
    }


def _parts(
    faults: FaultTrace, probability: float, enough: int, policy: SurvivalPolicy, rows: list[tuple[str, Survived]]
) -> list[Any]:
    days, count = faults.seconds / DAY, rows[0][1].incidents
    columns = ("", "ETTR %", "worst hour %", "from disk", "stops", "lost h: detect", "replace", "restart", "recompute")
    kinds = ("detect", "replace", "restart", "recompute")
    cells = [
        [
            about,
            f"{100 * found.ettr:.2f}",
            f"{100 * found.worst_hour:.1f}",
            str(found.from_disk),
            str(found.stops),
            *(f"{found.lost[kind] / 3600:.1f}" for kind in kinds),
        ]
        for about, found in rows
    ]
    return [
        f"{faults.nodes} nodes, {days:.0f} days, {count} incidents: one every {24 * days / count:.1f} hours",
        f"a node has a fault with {100 * probability:.3f} % a day; {enough} spares are enough for 99 % of days",
        f"{_words(policy)}",
        "",
        new_table(*columns, right=columns[1:], rows=cells),
    ]


def _words(policy: SurvivalPolicy) -> str:
    p = policy
    return (
        f"steps of {p.step:g} s, a checkpoint every {p.interval:g} s, crash seen after {p.detect:g} s, "
        f"{100 * p.hangs:g} % hang and are seen after {p.hang_after:g} s, restart {p.restart:g} s ({p.load:g} s more "
        f"from disk), {p.spares} spares in {p.wake:g} s, other nodes in {p.cold:g} s, {100 * p.again:g} % of restarts "
        "fail"
    )
