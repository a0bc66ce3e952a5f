"""``tilth run``: train by a recipe with a live view, and print the results at the end."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from pydantic import ValidationError

from tilth.cli.main import RunCommand
from tilth.cluster.controller.launcher import enter_job, job_size
from tilth.config.checks import pools
from tilth.config.load import check_allowed, given, load_recipe, recipe_name
from tilth.config.schema import GuardConfig, Recipe
from tilth.core.errors import CallTimeout, WorkerLost
from tilth.launch.supervisor import LEFT, REPLACEABLE, Inherited, Supervisor, block, unblock
from tilth.process.handlers import handling
from tilth.runs.signals import HandOver, Interrupted, ends
from tilth.ui.output import outlived

if TYPE_CHECKING:
    from tilth.data.prompts import PromptSet
    from tilth.ui.result import RunResult


WORDS = 5  # words of a document's beginning that the suggested prompt has
ENOUGH = 512  # prompts that measure accuracy to within some percent; all of addition's would take an hour


def train(options: RunCommand) -> None:
    """Run to the end; where workers can be replaced, as the supervisor of the process that does.

    Exit codes: 130 after Ctrl-C, SIGTERM or SIGHUP during the steps, with everything saved and a line on how to resume;
    143 and 129 after SIGTERM and SIGHUP before and after the steps; after them the report is written first.
    """
    name, overrides, allow, obj = options.name, options.overrides or [], options.allow or [], options.ctx.obj
    handed = obj if isinstance(obj, Inherited) else None
    with outlived(), _terminable(handed):
        if obj and handed is None and (found := _supervisor(name, overrides)):
            raise typer.Exit(_supervised(found, partial(_launched, name, overrides, allow)))
        if handed is not None:
            overrides, allow = [*overrides, *handed.change.overrides], [*allow, *handed.change.allow]
        recipe = _launched(name, overrides, allow)
        how = {"fallback": options.fallback, "replay": options.replay}
        result = _watched(recipe, recipe_name(name), allow, handed, **how)
        typer.echo("\n".join(closing(recipe, name, result.summary, result.directory, result.report)))


class Terminated(KeyboardInterrupt):
    """A signal, named by the argument, outside of the steps, where the run does not handle it itself."""


@contextmanager
def _terminable(handed: Inherited | None) -> Iterator[None]:
    """Turn the first SIGTERM or SIGHUP into a line and exit code 143 or 129, after all processes of the run have ended.
    Only the main thread can handle signals. handed: lets a supervisor know of it."""
    with handling(dict.fromkeys(ends(), partial(_terminate, handed))):
        try:
            yield
        except Terminated as ended:
            typer.echo("interrupted; whatever a run has saved is intact", err=True)
            raise typer.Exit(128 + signal.Signals[ended.args[0]]) from None
        except KeyboardInterrupt:
            if handed is not None:
                handed.ask(signal.SIGINT)
            raise


def _terminate(handed: Inherited | None, number: int, frame: FrameType | None) -> NoReturn:
    for other in ends():
        signal.signal(other, lambda *_: None)
    if handed is not None:
        handed.ask(number)
    raise Terminated(signal.Signals(number).name)


def _supervisor(name: str, overrides: Sequence[str]) -> Supervisor | None:
    """Return the supervisor of the run; None if its workers cannot be replaced, or a mistake in it must be told
    first."""
    if sys.platform != "linux" or job_size() > 1 or threading.current_thread() is not threading.main_thread():
        return None
    found = given(name, overrides)
    cluster, guard = found.get("cluster"), found.get("guard", {})
    if not isinstance(cluster, dict) or not isinstance(guard, dict) or cluster.get("backend") not in REPLACEABLE:
        return None
    try:
        checked = GuardConfig.model_validate(guard)
    except ValidationError:
        return None
    return Supervisor(checked.restarts, checked.hang_after, _note_failed) if checked.restarts else None


def _note_failed(run: str, record: Mapping[str, Any]) -> None:
    from tilth.runs.directory import note_failed  # a supervisor is small

    note_failed(Path(run), record)


def _supervised(supervisor: Supervisor, check: Callable[[], object]) -> int:
    """Supervise the run and return its exit code. check: loads the recipe, in a process of its own."""
    block()
    try:
        if child := os.fork():
            return supervisor.run(child)
    finally:
        unblock()
    check()
    sys.stdout.flush()
    os._exit(0)


def _launched(name: str, overrides: Sequence[str], allow: Sequence[str]) -> Recipe:
    """Load the recipe in the controller; in a process that a launcher started as a worker, never return."""
    check_allowed(allow)
    recipe = load_recipe(name, overrides, job_size())
    enter_job(recipe.cluster.backend, sum(pools(recipe).values()), recipe.cluster.timeout)
    return recipe


def _watched(recipe: Recipe, name: str, allow: Sequence[str], handed: Inherited | None, **how: Any) -> "RunResult":
    # Nothing here may import torch before run_recipe does: the processes that score start first, and without it.
    from tilth.api import run_recipe
    from tilth.ui.live import Live

    live = Live(recipe)
    live.start()
    try:
        return run_recipe(recipe, name=name, callbacks=[live], allow=allow, handed=handed, **how)
    except HandOver:
        raise typer.Exit(LEFT) from None
    except (CallTimeout, WorkerLost) as error:
        if handed is None or not handed.fall(error):
            raise
        raise typer.Exit(1) from None  # the supervisor tells of it
    except Interrupted as stopped:
        live.stop()
        typer.echo(str(stopped), err=True)
        raise typer.Exit(130) from None
    finally:
        live.stop()


def closing(recipe: Recipe, name: str, summary: Mapping[str, Any], directory: Path, report: Path) -> list[str]:
    """Return lines on results, cost, the report and further commands. name: of the recipe on the command line."""
    from tilth.launch.rewards import is_unscored, named_reward
    from tilth.ui.result import outcome

    lines = [*outcome(summary), f"report: {report}", "", "next:"]
    run = shlex.quote(str(directory))
    held = None if recipe.flow_spec.value or recipe.flow == "pretrain" else _heldout(recipe)
    question = "" if recipe.flow_spec.value else _question(recipe, held)
    if question:
        lines.append(f"  tilth generate {run} {shlex.quote(question)} --temperature 0")
    silent = recipe.teaches and is_unscored(recipe) and not named_reward(recipe)
    if recipe.flow_spec.samples and not silent:
        limit = f" --limit {ENOUGH}" if held is not None and len(held) > ENOUGH else ""
        lines.append(f"  tilth eval {run} --k 1,8{limit}")
    if recipe.data.template:
        lines.append(f"  tilth chat {run}")
    lines.append(f"  tilth show {run}")
    if recipe.flow_spec.value:
        export = f"  tilth export {shlex.quote(f'{directory}@best')} my-model --group reward_model"
        return [*lines, export, f"  tilth run RECIPE {shlex.quote(f'reward.model={directory}@best')}"]
    lines.append(f"  tilth export {run} my-model")
    if recipe.data.source == "addition":
        lines.append(f"  tilth run {shlex.quote(name)} data.digits={recipe.data.digits + 1} model.context=64")
    return lines


def _heldout(recipe: Recipe) -> "PromptSet":
    from tilth.data.pairs import recipe_prompts

    return recipe_prompts(recipe).split(recipe.data.holdout)[1]


def _question(recipe: Recipe, held: "PromptSet | None") -> str:
    """Return a held-out prompt that fits a command line, or the beginning of a held-out document."""
    if held is None:
        held = _heldout(recipe)
        tried = (" ".join(held[i].document.split()[:WORDS]) for i in held.rows[:10])
    else:
        tried = (prompt.text for prompt in held.subset(10))
    return next((text for text in tried if 0 < len(text) < 60 and text.isprintable()), "")
