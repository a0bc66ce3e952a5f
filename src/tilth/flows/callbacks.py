"""Callbacks: user code that watches a run, or acts on it between two steps."""

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from tilth.config.code import describe, source
from tilth.config.plugins import declared_by
from tilth.core.errors import PluginError, RecipeError, TilthError

if TYPE_CHECKING:
    from tilth.config.schema import Recipe
    from tilth.core.batch import Batch
    from tilth.runs.directory import RunDir
    from tilth.runs.state import RunState

Say = Callable[[str], None]
"""Log a line and show it."""


class RunView(Protocol):
    """The part of a run that a callback may use.

    directory: its files are in ``directory.path``. state: step, phase and position. say: log a line and show it.
    """

    recipe: "Recipe"
    directory: "RunDir"
    state: "RunState"
    say: Say

    @property
    def sample(self) -> dict[str, Any] | None:
        """A sampled answer of the newest step: prompt, text, answer, reward; None before the first."""
        ...

    def save(self) -> None:
        """Begin a checkpoint of everything up to this step."""

    def stop(self, why: str) -> None:
        """End the run after this step as Ctrl-C does: everything is saved, and the same command continues."""


class Callback:
    """Base class of callbacks; a subclass overrides the methods it needs.

    The controller calls one callback after another, and the step waits for them. An exception ends the run with a
    PluginError that names class, method, file and line; committed steps stay.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise PluginError for a method ``on_...`` that is never called."""
        super().__init_subclass__(**options)
        events = [name for name in vars(Callback) if name.startswith("on_")]
        for name in vars(cls):
            if name.startswith("on_") and name not in events:
                where = f"{cls.__qualname__}.{name} ({source(cls)})"
                raise PluginError(
                    f"{where} is not a method of a callback; use one of {', '.join(events)}",
                    key=f"{cls.__name__}.{name}",
                )
        if (cls.state is Callback.state) != (cls.load_state is Callback.load_state):
            where = f"{cls.__qualname__} ({source(cls)})"
            raise PluginError(f"{where} has one of state and load_state; define both", key=f"{cls.__name__}.state")

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this callback, as JSON; {}: nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Return to the state of a checkpoint, before ``on_run_start``; {}: to the beginning, also of a new run."""

    def on_run_start(self, run: RunView) -> None:
        """Before the first step. ``run.state.step``: the last committed step; later ones of earlier attempts
        are void."""

    def on_rollout(self, run: RunView, step: int, batch: "Batch") -> None:
        """The samples from which a step is going to learn are scored: one row each, their tokens are in workers. A step
        that a failure breaks off runs again, and calls this and ``on_update`` again."""

    def on_update(self, run: RunView, step: int, metrics: dict[str, float]) -> None:
        """The policy has taken an optimizer step, of which there may be several in a step."""

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """A step was committed. metrics: its line of ``metrics.jsonl``."""

    def on_evaluation(self, run: RunView, step: int, metrics: dict[str, float]) -> None:
        """Held-out data was evaluated after this step (0: before the first), and the figures are committed."""

    def on_save(self, run: RunView, step: int, path: str) -> None:
        """The checkpoint of this step is complete. path: its folder or URL."""

    def on_message(self, text: str) -> None:
        """A line was logged, possibly before the run has a folder; a line that this method logs is not passed to it."""

    def on_run_end(self, run: RunView, summary: dict[str, Any]) -> None:
        """The run has finished without an error. summary: as in ``tilth show RUN --json``."""


_TOLD: ContextVar[tuple[Callback, ...]] = ContextVar("told", default=())
"""Callbacks whose ``on_message`` is running in this thread."""


def notify(callbacks: Iterable[Callback], event: str, *given: Any) -> None:
    """Call the method ``event`` of each callback; PluginError for one that fails, but a TilthError passes.

    A line that a callback logs in ``on_message`` goes to the others only: it would be told its own lines without end.
    """
    for callback in callbacks:
        told = _TOLD.get()
        if event == "on_message" and any(callback is one for one in told):
            continue
        token = _TOLD.set((*told, callback) if event == "on_message" else told)
        try:
            with _named(callback, event):
                getattr(callback, event)(*given)
        finally:
            _TOLD.reset(token)


@contextmanager
def _named(callback: Callback, method: str) -> Iterator[None]:
    """Raise PluginError with class, method, file and line for what fails in the block, but let a TilthError pass."""
    try:
        yield
    except TilthError:
        raise
    except (Exception, SystemExit) as error:
        where = f"{type(callback).__qualname__}.{method} ({source(getattr(type(callback), method))})"
        file = inspect.getsourcefile(type(callback)) or ""
        raise PluginError(f"{where}: {describe(error, file)}", key=f"{type(callback).__name__}.{method}") from error


def states(callbacks: Iterable[Callback]) -> dict[str, Any]:
    """Return the states of callbacks that have one, by class and number. PluginError: one is no JSON."""
    found = {}
    for name, callback in _numbered(callbacks):
        with _named(callback, "state"):
            if state := json.loads(json.dumps(callback.state(), allow_nan=False)):
                found[name] = state
    return found


def load_states(callbacks: Iterable[Callback], found: Mapping[str, Any]) -> None:
    """Return callbacks to the states of a checkpoint, those without one to their beginning."""
    for name, callback in _numbered(callbacks):
        with _named(callback, "load_state"):
            callback.load_state(found.get(name, {}))


def _numbered(callbacks: Iterable[Callback]) -> Iterator[tuple[str, Callback]]:
    counts = Counter[str]()
    for callback in callbacks:
        name = type(callback).__qualname__
        counts[name] += 1
        yield f"{name}.{counts[name]}", callback


def checked(callbacks: Sequence[Any], plugins: Iterable[str]) -> list[Callback]:
    """Return the given callbacks, and one of each class that these plugins or the script declare.

    RecipeError for a given object, PluginError for a declared class, that is not a Callback or cannot be made.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            right = f"{callback.__name__}()" if inspect.isclass(callback) else "an instance of a tilth.Callback"
            raise RecipeError(
                f"callbacks has {callback!r}, which is not a tilth.Callback; give {right}", key="callbacks"
            )
    made = []
    for declaration in declared_by("callback", plugins):
        if not (inspect.isclass(declaration.value) and issubclass(declaration.value, Callback)):
            raise PluginError(
                f"{declaration.title} is not a subclass of tilth.Callback", key=f"callback.{declaration.name}"
            )
        try:
            made.append(declaration.value())
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{declaration.title}: {describe(error, declaration.file)}", key=f"callback.{declaration.name}.__init__"
            ) from error
    return [*callbacks, *made]
