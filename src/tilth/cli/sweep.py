"""``tilth sweep``: train a recipe with several values and seeds, and compare them."""

import json
import shlex
import signal
from typing import Any
from urllib.parse import quote

import typer

from tilth.cli.main import SweepCommand
from tilth.cli.tables import new_table, show
from tilth.core.errors import TilthError
from tilth.launch.sweep import Sweep, SweepProcesses, SweepRun, finished, plan_sweep, value_of
from tilth.runs.readers import read_state
from tilth.runs.signals import Interrupted
from tilth.ui import format

PROGRAM = "tilth.cli.main:main"
Row = dict[str, Any]


def train(options: SweepCommand) -> None:
    """Train what is not finished and print the comparison. Exit codes: 1: a run has failed; 128 + N after a
    signal N (Ctrl-C: 130), which the runs got too."""
    sweep = plan_sweep(options.name, options.overrides or [], options.seeds)
    processes, runs, failed = SweepProcesses(sweep, options.parallel, PROGRAM), len(sweep.runs), dict[str, str]()
    there = sum(map(finished, sweep.runs))
    typer.echo(f"{sweep.name}: {format.count(runs, 'run')}, {there} finished", err=True)

    def ended(run: SweepRun, error: str) -> None:
        failed.update({run.name: error} if error else {})
        done = sum(map(finished, sweep.runs))
        typer.echo(f"{done} of {runs}  {run.path}  {format.plain(error) or 'finished'}", err=True)

    try:
        processes.train(ended)
    except Interrupted as stopped:
        typer.echo("interrupted; the same command goes on with its unfinished runs", err=True)
        raise typer.Exit(128 + signal.Signals[stopped.key]) from None
    found = result_of(sweep, failed)
    if options.as_json:
        typer.echo(json.dumps(found))
    else:
        _print(sweep, found)
    raise typer.Exit(bool(failed))


def result_of(sweep: Sweep, failed: dict[str, str]) -> Row:
    """Return the runs of a sweep, and its settings with their means and intervals over seeds, the best first."""
    from tilth.ui.web.compare import over_seeds, settings_of
    from tilth.ui.web.follow import FollowedRun

    followed = [FollowedRun(run.path) for run in sweep.runs if finished(run)]
    settings, by_name = over_seeds(followed, [*map(settings_of, followed)]), {run.name: run for run in sweep.runs}
    for row in settings:
        row["values"] = _values(by_name[row["runs"][0]])
        row |= {name: dict(zip(("mean", "half"), row[name])) for name in ("final", "best")}
    runs = [
        {
            "run": str(run.path),
            "values": _values(run),
            "seed": run.seed,
            "state": _state(run),
            "error": failed.get(run.name),
        }
        for run in sweep.runs
    ]
    return {"sweep": sweep.name, "recipe": sweep.recipe, "runs": runs, "settings": settings}


def _values(run: SweepRun) -> Row:
    return {key: value_of(key, text) for key, text in run.values.items()}


def _state(run: SweepRun) -> str | None:
    try:
        return str(read_state(run.path)["state"])
    except TilthError:  # it has failed before its folder was whole
        return None


def _print(sweep: Sweep, found: Row) -> None:
    table = new_table(*sweep.keys, "seeds", "metric", "final", "best", right=("seeds", "final", "best"))
    for row in found["settings"]:
        values = [str(value) for value in row["values"].values()]
        ends = [_ranged(row["metric"], row[name]) for name in ("final", "best")]
        table.add_row(*values, str(len(row["runs"])), row["metric"], *ends)
    several = any(len(row["runs"]) > 1 for row in found["settings"])
    notes = ["mean ± half of its 95 % interval over seeds (Student's t)"] if several else []
    unfinished = sum(run["state"] != "finished" for run in found["runs"])
    notes += [f"{format.count(unfinished, 'run')} not finished and left out"] if unfinished else []
    if len({json.dumps(row["values"]) for row in found["settings"]}) < len(found["settings"]):
        notes.append("values with several rows: their runs had other data, code or models (/compare names them)")
    if not found["settings"]:
        notes.insert(0, "nothing to compare: no finished run has an evaluation")
    notes.append(f"tilth ui {shlex.quote(str(sweep.runs[0].path.parent))}  # /compare?sweep={quote(sweep.name)}")
    if found["settings"]:
        show(table, "\n".join(notes))
    else:
        typer.echo("\n".join(notes))


def _ranged(metric: str, one: Row) -> str:
    mean, half = format.figure(metric, one["mean"]), one["half"]
    return mean if half is None else f"{mean} ± {format.figure(metric, half)}"
