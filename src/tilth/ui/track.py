"""Trackers: a run's metrics in TensorBoard, Weights & Biases, MLflow and Trackio (``run.track``).

Each writes in its own thread, so that a slow disk or network never delays a step. An error of its library is reported
once, and the run continues without it. A step that a resume runs again appears once.
"""

import html
import importlib.util
import inspect
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from tilth.config.code import describe
from tilth.config.load import dump_toml
from tilth.config.open_sets import TRACKERS
from tilth.config.plugins import declared
from tilth.config.schema import Recipe
from tilth.core.errors import PluginError, RecipeError
from tilth.core.files import atomic_write
from tilth.flows.callbacks import Callback, RunView
from tilth.runs.metrics import KEYS, declaration, schema
from tilth.ui.prometheus import Endpoint

SAMPLE_EVERY = 25  # steps between two sampled answers that are logged as text
PATIENCE = 60.0  # seconds to wait for pending writes and uploads at the end of a run


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics of a record of ``metrics.jsonl``, without the fields that name the step."""
    return {
        name: float(value)
        for name, value in record.items()
        if name not in KEYS and isinstance(value, (int, float)) and math.isfinite(value)
    }


def sample_text(sample: Mapping[str, Any]) -> str:
    """Return a sampled answer as plain text: reward, right answer, prompt and completion."""
    reward = "missing" if sample.get("reward") is None else f"{sample['reward']:g}"
    right = f", right: {sample['answer']}" if sample.get("answer") else ""
    return f"reward {reward}{right}\n\n{sample.get('prompt') or ''}{sample.get('text') or ''}"


class Tracker(Callback):
    """Base of trackers. The methods of a subclass run one after another in the tracker's thread.

    package: the library that it needs, which is an extra of Tilth; empty: none.
    """

    package: ClassVar[str] = ""

    def __init__(self, recipe: Recipe) -> None:
        """Raise RecipeError if the library is not installed."""
        if self.package and importlib.util.find_spec(self.package) is None:
            raise RecipeError(
                f"run.track asks for {self.package}, which is not installed; in Tilth's folder: "
                f"pip install '.[{self.package}]'",
                key=f"run.track.{self.package}",
            )
        self.recipe = recipe
        self.name = self.package or type(self).__name__
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.name)
        self._pending: dict[Future[None], str] = {}  # -> the call; in order: the first failure causes the others
        self._next_sample = 0
        self._begun = self._lost = False
        self._say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)

    def on_run_start(self, run: RunView) -> None:
        """Open, or resume after the last committed step."""
        self._say, self._begun = run.say, True
        self._do(self.open, run.directory.path, run.state.step)

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Write the step's metrics, and a sampled answer every SAMPLE_EVERY steps."""
        sample = run.sample if step >= self._next_sample else None
        if sample is not None:
            self._next_sample = step + SAMPLE_EVERY
        self._do(self.write, step, numbers(metrics), sample_text(sample) if sample else "")
        self._look()

    def on_run_end(self, run: RunView, summary: dict[str, Any]) -> None:
        self._do(self.conclude, summary)

    def close(self, failed: bool) -> None:
        """Wait until everything is written, PATIENCE seconds at most. failed: an error ended the run."""
        self._say = lambda text: print(text, file=sys.stderr)  # the run's own log is closed
        if self._begun:
            self._do(self.finish, failed)
        _, late = wait(self._pending, PATIENCE, FIRST_EXCEPTION)
        self._look()
        if late and not self._lost:
            self._say(f"{self.name}: not done after {PATIENCE:.0f} s; what is missing there is in metrics.jsonl")
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _do(self, job: Callable[..., None], *arguments: Any) -> None:
        if not self._lost:
            step = f" of step {arguments[0]}" if job.__name__ == "write" else ""
            self._pending[self._thread.submit(job, *arguments)] = f"{job.__name__}(){step}"

    def _look(self) -> None:
        """Report the first failed job and stop writing."""
        done = {future: call for future, call in self._pending.items() if future.done()}
        self._pending = {future: call for future, call in self._pending.items() if future not in done}
        failed = [(call, error) for future, call in done.items() if (error := _failure(future)) is not None]
        if failed and not self._lost:
            self._lost = True
            call, error = failed[0]
            what = describe(error, inspect.getsourcefile(type(self)) or "")
            self._say(
                f"tracker {self.name}: {call} failed: {what}; the run continues without it, "
                "and what is missing there is in metrics.jsonl"
            )

    # ---- overridden by subclasses, called in the thread ----

    def open(self, directory: Path, step: int) -> None:
        """Start, or resume after ``step``."""
        raise NotImplementedError

    def write(self, step: int, values: Mapping[str, float], text: str) -> None:
        """Write the metrics of a step, and a sampled answer if it is not empty."""
        raise NotImplementedError

    def conclude(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, which ``tilth show RUN --json`` prints."""

    def finish(self, failed: bool) -> None:
        """Close; nothing follows."""


def _failure(done: Future[None]) -> BaseException | None:
    return None if done.cancelled() else done.exception()


class TensorBoard(Tracker):
    """Writes event files in RUN/tensorboard. A resume starts a file that voids later steps of older ones."""

    package = "tensorboard"

    def open(self, directory: Path, step: int) -> None:
        """Start an event file."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder = directory / "tensorboard"
        fresh = not folder.exists()
        self._writer = EventFileWriter(str(folder))
        self._described: set[str] = set()
        self._add(step + 1, session_log=SessionLog(status=SessionLog.START))
        if fresh:
            self._add(0, summary={"value": [self._text("recipe", dump_toml(self.recipe))]})
        self._writer.flush()

    def write(self, step: int, values: Mapping[str, float], text: str) -> None:
        """Write one event for all metrics of the step; the first of each has its description."""
        found = [self._scalar(name, value) for name, value in values.items()]
        if text:
            found.append(self._text("sample", text))
        self._add(step, summary={"value": found})
        self._writer.flush()  # a SIGKILL must not lose a step that a checkpoint has

    def finish(self, failed: bool) -> None:
        """Close the file."""
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, **what))

    def _scalar(self, name: str, value: float) -> Any:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.scalar.metadata import create_summary_metadata

        if name in self._described:
            return Summary.Value(tag=name, simple_value=value)
        self._described.add(name)
        # With metadata readers no longer infer the plugin from the value, so it must name the scalar plugin.
        about = create_summary_metadata(display_name="", description=declaration(name).about)
        return Summary.Value(tag=name, simple_value=value, metadata=about)

    def _text(self, tag: str, text: str) -> Any:
        """Make a value of the text plugin; as a code block, so that its Markdown is not interpreted."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        block = "\n".join("    " + line for line in text.splitlines())
        tensor = TensorProto(dtype=DT_STRING, string_val=[block.encode()])
        return Summary.Value(tag=tag, metadata=create_summary_metadata("", ""), tensor=tensor)


class SentOnce(Tracker):
    """Base of trackers whose history cannot go back: a step that a resume runs again is not sent again, since it is
    equal. RUN/PACKAGE.json has the id under which a resumed run continues, and the last step that was sent."""

    def open(self, directory: Path, step: int) -> None:
        """Start under a new id, or resume under the directory's."""
        self._path = directory / f"{self.package}.json"
        known: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {"id": "", "step": 0}
        self.id, self._sent = known["id"], known["step"]
        self.id = self.begin(directory, self.id)
        self._remember(self._sent)

    def write(self, step: int, values: Mapping[str, float], text: str) -> None:
        """Send a step, unless an earlier attempt sent it."""
        if step > self._sent:
            self._remember(step)  # before: a SIGKILL in between may lose a step, but never doubles one
            self.send(step, values, text)

    def begin(self, directory: Path, known: str) -> str:
        """Start, or resume under the id ``known``; return the id."""
        raise NotImplementedError

    def send(self, step: int, values: Mapping[str, float], text: str) -> None:
        """Send a step that was not sent before."""
        raise NotImplementedError

    def _remember(self, step: int) -> None:
        self._sent = step
        with atomic_write(self._path) as temporary:
            temporary.write_text(json.dumps({"id": self.id, "step": step}))


class WeightsAndBiases(SentOnce):
    """Writes a run in RUN/wandb, offline unless WANDB_MODE is set, under the id in RUN/wandb.json."""

    package = "wandb"

    def begin(self, directory: Path, known: str) -> str:
        """Start or resume."""
        import wandb

        identity = known or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tilth"),
            name=directory.name,
            id=identity,
            resume="allow",
            dir=str(directory),
            mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
            config={**self.recipe.dump(), "metrics": schema()},
            settings=wandb.Settings(console="off", silent=True, init_timeout=PATIENCE / 2),
        )
        return identity

    def send(self, step: int, values: Mapping[str, float], text: str) -> None:
        """Log one row of the history."""
        import wandb

        shown = {"sample": wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)} if text else {}
        self._run.log({**values, **shown}, step=step, commit=True)

    def conclude(self, summary: Mapping[str, Any]) -> None:
        """Add the run's summary to the last values."""
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items() if value is not None})

    def finish(self, failed: bool) -> None:
        """Wait for an upload."""
        self._run.finish(exit_code=int(failed))


class MLflow(SentOnce):
    """Writes a run of the experiment MLFLOW_EXPERIMENT_NAME [tilth] where MLFLOW_TRACKING_URI leads."""

    package = "mlflow"

    def begin(self, directory: Path, known: str) -> str:
        """Start, with the recipe, or resume."""
        from mlflow import MlflowClient

        self._client, name = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME", "tilth")
        if known:
            self._client.update_run(known, status="RUNNING")
            return known
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        identity: str = self._client.create_run(experiment, run_name=directory.name).info.run_id
        self._client.log_text(identity, dump_toml(self.recipe), "recipe.toml")
        return identity

    def send(self, step: int, values: Mapping[str, float], text: str) -> None:
        """Log the metrics of a step, and a sampled answer as a file."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self.id, [Metric(name, value, now, step) for name, value in values.items()])
        if text:
            self._client.log_text(self.id, text, f"samples/step-{step:06d}.txt")

    def finish(self, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


class Trackio(SentOnce):
    """Writes a run of the project TRACKIO_PROJECT [tilth] into Trackio's folder (TRACKIO_DIR), on this machine."""

    package = "trackio"

    def begin(self, directory: Path, known: str) -> str:
        """Start, with the recipe, or resume by the run's name."""
        import trackio

        name, project = known or f"{directory.name}-{uuid.uuid4().hex[:4]}", os.environ.get("TRACKIO_PROJECT", "tilth")
        self._run = trackio.init(project, name=name, resume="allow", config=self.recipe.dump(), embed=False)
        return name

    def send(self, step: int, values: Mapping[str, float], text: str) -> None:
        """Log the metrics of a step, and a sampled answer as text."""
        self._run.log({**values, **({"sample": text} if text else {})}, step=step)

    def finish(self, failed: bool) -> None:
        """Wait until all is written."""
        self._run.finish()


def _tracker(name: str) -> type[Tracker]:
    """Return the class of a name in ``run.track``. PluginError: a plugin's class that is no tracker."""
    if name in TRACKERS:
        return globals()[TRACKERS[name]]
    declaration = declared("tracker")[name]
    if not (inspect.isclass(declaration.value) and issubclass(declaration.value, Tracker)):
        raise PluginError(f"{declaration.title} is no subclass of tilth.Tracker", key=f"tracker.{name}")
    return declaration.value


@contextmanager
def tracking(recipe: Recipe) -> Iterator[list[Tracker | Endpoint]]:
    """Open the trackers of ``run.track`` and the endpoint of ``run.prometheus``; close them at the end. RecipeError: a
    library is missing, or the port is not free."""
    trackers: list[Tracker | Endpoint] = [_tracker(name)(recipe) for name in dict.fromkeys(recipe.run.track)]
    if recipe.run.prometheus:
        trackers.append(Endpoint(recipe.run.prometheus))
    failed = True
    try:
        yield trackers
        failed = False
    finally:
        for tracker in trackers:
            tracker.close(failed)
