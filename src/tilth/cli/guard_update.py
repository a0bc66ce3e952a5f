"""``tilth guard update``: ask an active run to go on with other keys or other code."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from tilth.cli.main import GuardUpdateCommand
from tilth.config.load import all_differences, dump_value, given, load_recipe
from tilth.core.clock import utc_now
from tilth.core.errors import DataError, RecipeError
from tilth.runs.readers import read_state, supervised
from tilth.runs.trust import check_trust, remember
from tilth.runs.updates import (
    CODE,
    PLUGIN_KEYS,
    RecipeChange,
    Update,
    allowed,
    asked_by,
    check,
    keep_code,
    request,
    waiting,
)


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
    check(before, after, changes)
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
