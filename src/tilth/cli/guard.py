"""``tilth guard``: who holds up a job, a test of this machine, and other keys or code for an active run."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from tilth.cli.main import GuardCheckCommand, GuardLocateCommand, GuardUpdateCommand
from tilth.config.load import all_differences, dump_value, given, load_recipe
from tilth.core.clock import utc_now
from tilth.core.errors import DataError, RecipeError
from tilth.guard.flight_recorder import read_dumps
from tilth.guard.localise import localise
from tilth.guard.node_check import check_node
from tilth.runs.readers import read_state, supervised
from tilth.runs.trust import check_trust, remember
from tilth.runs.updates import (
    CODE,
    PLUGIN_KEYS,
    RecipeChange,
    Update,
    allowed,
    asked_by,
    keep_code,
    request,
    waiting,
)
from tilth.runs.updates import check as check_update


def locate(options: GuardLocateCommand) -> None:
    """Print the verdict on a folder of dumps; members of groups that have none there are silent."""
    dumps = read_dumps(options.folder)
    members = {rank for dump in dumps.values() for group in dump.groups.values() for rank in group.ranks}
    silent = sorted(members - set(dumps))
    found = localise(dumps, silent)
    if options.as_json:
        plain = {"dumps": sorted(dumps), "silent": silent, "verdict": asdict(found) if found else None}
        print(json.dumps(plain, indent=1))
        return
    print(f"{len(dumps)} dumps" + (f", none of rank {', '.join(map(str, silent))}" if silent else ""))
    if found is None:
        print("no rank waits for another one")
        return
    print(f"{found.kind}: {'rank ' + ', '.join(map(str, found.ranks)) if found.ranks else 'no rank can be named'}")
    for part in found.evidence.split("; "):
        print(f"  {part}")


def check(options: GuardCheckCommand) -> None:
    """Print what the tests found; exit code 1 if something is wrong for certain."""
    found = check_node()
    print(json.dumps(found.as_dict()) if options.as_json else f"{found.sentence()} ({found.seconds:.1f} s)")
    if not found.sound:
        raise typer.Exit(1)


def update(options: GuardUpdateCommand) -> None:
    """Check an update and write the request for it. RecipeError for what makes another run, DataError for a run that
    cannot take one."""
    run, now = options.run, options.now
    state = _active(run)
    made = request(run, _update(run, state, options.overrides or (), options.plugin or (), urgent=now))
    remember(given(str(run / "recipe.toml"), made.change.overrides))  # who names a plugin here trusts it
    if options.as_json:
        typer.echo(json.dumps({"number": made.number, "changes": dict(made.changes), "urgent": made.urgent}))
        return
    when = "after the step that runs" if now else "at the next restart, in 24 hours at the latest (--now: at once)"
    typer.echo(f"{made.title()}: {when}; {run}/log.txt tells what becomes of it")


def _active(run: Path) -> dict[str, Any]:
    """Return the state of a run whose supervisor is active on this machine. DataError for any other."""
    state = read_state(run)
    if state["state"] == "finished":
        raise DataError(
            f"{run} is finished: the same command with --allow KEY KEY=VALUE makes it longer", key="run.json.state"
        )
    if state.get("host") != (here := os.uname().nodename):
        message = f"{run} is active on {state.get('host')!r}, and this is {here!r}; ask there"
        raise DataError(message, key="run.json.host")
    if not supervised(state):
        why = (
            "is not active" if state["state"] != "running" else "has no supervisor (guard.restarts = 0, or no command)"
        )
        raise DataError(f"{run} {why}: end it and resume it with --allow KEY KEY=VALUE", key="run.json.supervisor")
    return state


def _update(
    run: Path, state: Mapping[str, Any], overrides: Sequence[str], files: Sequence[str], *, urgent: bool
) -> Update:
    recipe = str(run / "recipe.toml")
    pending = waiting(run)
    base = pending[-1].change if pending else RecipeChange.of(state["change"])
    plugins = _plugins(run, given(recipe, base.overrides).get("plugins", ()), files)
    brought = (f"plugins={dump_value(plugins)}",) if files else ()
    own = (*overrides, *brought)
    check_trust(run, given(recipe, base.overrides))
    after = load_recipe(recipe, [*base.overrides, *own])
    before = load_recipe(recipe, [*base.overrides, f"plugins={dump_value(plugins)}"])
    changes = all_differences(before, after)
    check_update(before, after, changes)
    if overrides and not changes:
        raise RecipeError(f"{' '.join(overrides)}: {run} has these values already", key=overrides[0].partition("=")[0])
    if files:
        changes["plugins"] = f"plugins: {', '.join(Path(file).name for file in files)}"
    allow = (*allowed(changes), *(PLUGIN_KEYS if files else ()))
    return Update(
        RecipeChange(0, (*base.overrides, *own), tuple(dict.fromkeys((*base.allow, *allow)))),
        changes or CODE,
        after.guard.restarts,
        urgent,
        asked_by(),
        utc_now(),
        hang_after=after.guard.hang_after,
    )


def _plugins(run: Path, now: Sequence[str], files: Sequence[str]) -> list[str]:
    """Return the run's plugins with these files, as the run keeps them, in the place of those of the same name."""
    found = list(now)
    for name, kept in zip(files, keep_code(run, [str(Path(file).expanduser().resolve()) for file in files])):
        same = [index for index, one in enumerate(found) if Path(one).name == Path(name).name]
        if same:
            found[same[0]] = kept
        else:
            found.append(kept)
    return found
