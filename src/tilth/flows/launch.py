"""From a recipe to a run: set the machine up, build or restore, run the phases, end cleanly."""

import hashlib
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilth.checkpoint import Checkpoint, complete, latest, newest_valid, note_best, open_checkpoint
from tilth.checkpoint.directory import step_of
from tilth.checkpoint.storage import Location, is_url, split, storage_of
from tilth.cluster.controller.cluster import Cluster, open_cluster
from tilth.config.checks import pools
from tilth.config.plugins import declared
from tilth.config.roles import ROLES
from tilth.config.schema import Recipe
from tilth.core.errors import CallTimeout, CheckpointError, OutOfMemory, StorageError, WorkerLost
from tilth.core.target import make_folder
from tilth.data.prompts import PromptSet
from tilth.data.trajectories import TRAJECTORIES, TrajectoryFiles
from tilth.flows.actor_critic import actor_critic, pretrain_critic
from tilth.flows.build import Dataset, RunParts, build
from tilth.flows.callbacks import Callback, RunView, notify
from tilth.flows.checks import check_algorithm, in_scripts, replaced
from tilth.flows.contamination import seen_before
from tilth.flows.model import MODEL_FOLDER, save_shape
from tilth.flows.phases import VALUES, WARMUP
from tilth.flows.policy_gradient import policy_gradient
from tilth.flows.profiling import Profiling
from tilth.flows.roles import Roles
from tilth.flows.run import Run
from tilth.flows.saving import Saving
from tilth.flows.supervised import preference, supervised
from tilth.flows.workers import threads
from tilth.rewards.fingerprint import files_fingerprint, fingerprint
from tilth.rewards.process_pool import RewardPool
from tilth.runs.directory import REWARD_LOG, RunDir, summarise
from tilth.runs.identity import Identity, find
from tilth.runs.metrics import Metrics
from tilth.runs.model_refs import all_lost, foreign, identity
from tilth.runs.readers import checkpoints_of
from tilth.runs.signals import Interrupted, StopRequest
from tilth.trace.collector import collector
from tilth.trace.spans import recorder


class _Clocks(Callback):
    """Compare the workers' clocks between two steps: a worker that is lost there loses none."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Compare; the cluster does so a last time when it ends."""
        self._cluster.compare_clocks()


@dataclass(frozen=True)
class RunResult:
    """How a run ended. summary: as in ``tilth show RUN --json``."""

    directory: Path
    summary: dict[str, Any]

    @property
    def report(self) -> Path:
        """The page that tells of the run."""
        return self.directory / "report.html"

    @property
    def accuracy(self) -> float | None:
        """Share of right greedy answers to prompts never trained on, at the end; None where an answer is not just right
        or wrong."""
        found: float | None = self.summary.get("accuracy_last")
        return found

    @property
    def reward(self) -> float | None:
        """Mean reward of the same answers."""
        found: float | None = self.summary.get("reward_heldout_last")
        return found


@contextmanager
def machine(recipe: Recipe) -> Iterator[None]:
    """Threads and matmul precision of this process for the time of a run."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads(recipe, 1))
    torch.set_float32_matmul_precision(recipe.train.matmul)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


def launch(
    recipe: Recipe,
    name: str,
    material: Dataset,
    pool: RewardPool | None,
    callbacks: Sequence[Callback],
    *,
    reward: str = "",
    allow: Sequence[str] = (),
    fallback: bool = False,
) -> RunResult:
    """Run a recipe to its end, in a new directory or continuing its newest unfinished one.

    pool: None where nothing is to be generated. reward: fingerprint of the reward function; a run goes on only with the
    same one, the same data and the same template. allow: keys in which the run that goes on may have had other values.
    fallback: where its newest checkpoint is damaged, go on from the newest that is not.
    """
    check_algorithm(recipe)
    data = material.fingerprint()
    who = Identity(recipe, _inputs(recipe, data, reward), tuple(allow))
    who.check_name()
    if recipe.run.checkpoints:
        _check_place(recipe.run.checkpoints)  # before anything is made
    warned: list[str] = []
    with _told_what_would_help(), machine(recipe), _cluster(recipe) as cluster:
        warn = partial(_warn, warned, callbacks)
        parts = build(recipe, material, pool, cluster, _earlier(who, name), warn)
        if isinstance(parts.heldout, PromptSet):
            parts.notes.extend(seen_before(recipe, parts.heldout))
        if parts.roles.reward is not None:
            parts.roles.reward.ready()
        with (
            RunDir.create(recipe, name, who.inputs, who.allow) as directory,
            _recorded(directory, cluster.rank, callbacks),
            collector.to(planned=bool(recipe.run.collect_every)),
        ):
            if parts.roles.reward is not None:
                parts.roles.reward.print_to(str(directory.path.resolve() / REWARD_LOG))
            with _told_how_to_go_on(directory.path), StopRequest(recipe.run.grace) as stop:
                cluster.trace(directory.events.resolve(), directory.attempt, bool(recipe.run.collect_every))
                profiling = Profiling(cluster, parts.recipe, directory.path, directory.attempt, stop)
                watching = [_Clocks(cluster), *callbacks, profiling]
                run = _run(parts, cluster, directory, watching, stop)
                for text in warned:
                    directory.log(text)
                directory.update(data=data)
                _announce(run, parts)
                _restore(run, fallback=fallback)
                notify(watching, "on_run_start", run)
                try:
                    _phases(run)
                    profiling.conclude()
                    run.saving.finish()
                    if run.saving.failed:
                        run.secure()
                except Interrupted as stopped:
                    directory.end("interrupted", why=str(stopped))
                    raise
                finally:
                    if not cluster.dispatch.idle():  # what the writer has not written goes with it, as does its step
                        directory.trajectories = TrajectoryFiles(directory.path / TRAJECTORIES)
                    run.saving.give_up()
            directory.end("finished")
            summary = summarise(directory.path)
            for line in cluster.close():
                _tell(directory, callbacks, line)
    notify(watching, "on_run_end", run, summary)
    return RunResult(directory.path, summary)


def _check_place(where: str) -> None:
    """StorageError, naming the key: a store or a folder in which no file can be made."""
    try:
        if is_url(where):
            probe = f".tilth-{uuid.uuid4().hex}"
            storage_of(where).put(probe, b"")
            storage_of(where).remove(probe)
            return
        make_folder(Path(where))
        with tempfile.TemporaryFile(dir=where):
            pass
    except (OSError, StorageError) as error:
        what = "a folder that can be written, or the URL of a store that fsspec knows, as in s3://bucket/path"
        raise StorageError(f"run.checkpoints = {where!r}: {error}; it must be {what}", key="run.checkpoints") from error


@contextmanager
def _recorded(directory: RunDir, rank: int, callbacks: Sequence[Callback]) -> Iterator[None]:
    """The spans of this process are written. That some could not be is told: it ends no run, and hides no error."""
    recorder.start(directory.events, rank, directory.attempt)
    try:
        yield
    finally:
        if line := recorder.conclude():
            _tell(directory, callbacks, line)


def _tell(directory: RunDir, callbacks: Sequence[Callback], line: str) -> None:
    """What comes when the run is over, in the log as far as its disk takes it."""
    with suppress(StorageError):
        directory.log(line)
    notify(callbacks, "on_message", line)


@contextmanager
def _told_how_to_go_on(directory: Path) -> Iterator[None]:
    """A lost or silent worker is no fault of the run's own: what was committed is intact."""
    try:
        yield
    except (WorkerLost, CallTimeout, OutOfMemory) as error:
        kept = latest(checkpoints_of(directory))
        where = f"from {Path(kept).name}" if kept else "from its beginning: it had not come to a checkpoint"
        said = _with_key(error) if isinstance(error, OutOfMemory) else str(error)
        raise type(error)(f"{said}\nthe same command continues in {directory} {where}", key=error.key) from error


def _with_key(error: OutOfMemory) -> str:
    """What a role that could not have its memory says, with the key that makes it need less."""
    key = ROLES[error.role if error.role in ROLES else "policy"].less
    more = ", or train.checkpointing=true" if key == "train.micro_tokens" else ""
    return f"{error}; a smaller {key}{more} needs less (in a run that goes on, with --allow {key})"


@contextmanager
def _told_what_would_help() -> Iterator[None]:
    """Around a run that may find no memory before it has a directory."""
    try:
        yield
    except OutOfMemory as error:
        if not error.role:  # it has been said where the run can go on
            raise
        raise OutOfMemory(_with_key(error), key=error.key) from error


def _warn(warned: list[str], callbacks: Sequence[Callback], text: str) -> None:
    """Before there is a log."""
    warned.append(text)
    notify(callbacks, "on_message", text)


def _inputs(recipe: Recipe, data: str, reward: str) -> dict[str, str]:
    """Key -> fingerprint of what decides the run beside its recipe: the data, the reward function, plugins, what a
    script declares, a template's file, the models that paths lead to."""
    found = {"data": data}
    if reward:
        found["reward.function"] = reward
    if recipe.plugins:
        found["plugins"] = files_fingerprint(recipe.plugins)
    found |= {key: fingerprint(declaration.value) for key, declaration in in_scripts(recipe).items()}
    template = Path(recipe.data.template)
    if recipe.data.template and template.is_file():
        found["data.template"] = hashlib.blake2b(template.read_bytes(), digest_size=8).hexdigest()
    return found | {spec.loads: identity(path) for spec in ROLES.values() if (path := spec.path(recipe))}


def _earlier(who: Identity, name: str) -> Path | None:
    """Model folder of the run that will go on, where it has come to a checkpoint: before that it is not complete."""
    folder = find(who, name)
    return folder / MODEL_FOLDER if folder and latest(checkpoints_of(folder)) else None


def _cluster(recipe: Recipe) -> Cluster:
    """The workers of ``[cluster]``; they start while the data is being read."""
    c, device = recipe.cluster, recipe.train.device
    gpus = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return open_cluster(c.backend, sum(pools(recipe).values()), timeout=c.timeout, address=c.address, gpus=gpus)


def _run(parts: RunParts, cluster: Cluster, directory: RunDir, callbacks: Sequence[Callback], stop: StopRequest) -> Run:
    metrics = Metrics(sum(parts.roles.policy.peak_flops()), cluster.totals, cluster.traffic)

    def say(text: str) -> None:
        directory.log(text)
        notify(callbacks, "on_message", text)

    return Run(
        parts.recipe,
        parts.roles,
        parts.train,
        parts.heldout,
        cluster.store,
        directory,
        callbacks,
        saving=Saving(parts.recipe, directory, parts.roles.keepers(), metrics, say),
        stop=stop,
        metrics=metrics,
        say=say,
        adopt=parts.adopt,
        collect_garbage=partial(_collect_garbage, cluster, parts.recipe.run.collect_every),
    )


def _collect_garbage(cluster: Cluster, every: int, step: int) -> None:
    if every and step % every == 0:
        cluster.collect(step)


def _phases(run: Run) -> None:
    """The recipe's flow, after a supervised warm-up where it learns from experience and has one."""
    recipe, given = run.recipe, run.recipe.supervised
    loop = training_loop(recipe)
    if not recipe.flow_spec.samples:
        loop(run.enter(recipe.flow, given.steps, given.lr))
        return
    if given.steps:
        supervised(run.enter(WARMUP, given.steps, given.lr))
    if recipe.flow_spec.critic and recipe.critic.steps:
        pretrain_critic(run.enter(VALUES, recipe.critic.steps, recipe.optimizer.lr))
    loop(run.enter(recipe.flow, recipe.algorithm.steps, recipe.optimizer.lr))


def training_loop(recipe: Recipe) -> Callable[[Run], None]:
    """The loop of the recipe's flow: one that a plugin declares, or that of all flows that learn from the same."""
    if own := declared("flow").get(recipe.flow):
        return own.value
    if recipe.flow_spec.samples:
        return actor_critic if recipe.flow_spec.critic else policy_gradient
    return preference if recipe.flow_spec.learns == "pairs" else supervised


def _announce(run: Run, parts: RunParts) -> None:
    directory = run.directory
    say = [f"{'continuing' if directory.resumed else 'new run'} in {directory.path}"]
    say += [directory.before] if directory.before else []
    say += [*parts.plan.lines(), *parts.notes]
    directory.set_plan(parts.plan.as_dict())
    say += replaced(run.recipe)
    save_shape(directory.path / MODEL_FOLDER, parts.config, parts.tokenizer)
    if directory.changes:
        changed = "; ".join(directory.changes.values())
        say.append(f"it goes on changed, as allowed, and what it has learned so far stays: {changed}")
    elsewhere = run.recipe.run.checkpoints
    if elsewhere and not directory.checkpoints.startswith((elsewhere.rstrip("/"), str(Path(elsewhere).resolve()))):
        say.append(f"its checkpoints stay where they are, in {directory.checkpoints}")
    if directory.checkpoints.startswith("memory://"):
        say.append("checkpoints in memory:// are gone when this process ends: nothing can go on from them")
    say += [f"{s.label}: {directory.inputs[s.loads]}" for s in ROLES.values() if s.loads in directory.inputs]
    for line in say:
        run.say(line)


def _restore(run: Run, *, fallback: bool) -> None:
    """Go back to the newest checkpoint of the run, or to the very beginning."""
    directory, step = run.directory, 0
    newest = _newest(run, fallback=fallback)
    if newest is not None:
        _load(newest, run.roles, directory)
        run.restore(newest.objects["progress"])
        step = run.state.step
    note_best(directory.checkpoints, run.state.best)  # a kill may have come between a checkpoint and this
    directory.rewind(step)
    directory.accept()
    directory.update(best=run.state.best, saved=step)
    if directory.resumed:
        run.say(f"continuing after step {step}")


def _newest(run: Run, *, fallback: bool) -> Checkpoint | None:
    """The checkpoint to go on from; None before the first. CheckpointError if it is damaged, or not to be found."""
    root, saved = run.directory.checkpoints, run.directory.saved
    found = latest(root)
    if saved and (found is None or (step_of(found) or 0) < saved):
        _miss(run, root, found, saved, fallback=fallback)
    if found is None:
        return None
    own = partial(_check_own, directory=run.directory)
    if fallback:
        return newest_valid(root, run.say, own)
    try:
        newest = open_checkpoint(found)
        own(newest)
        return newest
    except CheckpointError as error:
        raise _hinted(error, found, run.directory) from error


def _miss(run: Run, root: str, found: str | Path | None, saved: int, *, fallback: bool) -> None:
    """A run that has saved does not begin anew because its disk is not mounted, or its newest checkpoint is gone."""
    if found is None:
        raise CheckpointError(
            f"{all_lost(root, saved)} If they are lost for good, begin a new run (run.name=NAME)", key="checkpoints"
        )
    told = f"the newest checkpoint in {root} is {split(found)[1]}, but this run saved one of step {saved} there"
    if not fallback:
        raise CheckpointError(f"{told}; {_what_is_left(run.directory, saved)}", key=f"step-{saved:06d}")
    run.say(told)


def _hinted(error: CheckpointError, newest: Location, directory: RunDir) -> CheckpointError:
    """The error of a checkpoint that cannot be gone on from, with what else there is."""
    return CheckpointError(f"{error}; {_what_is_left(directory, step_of(newest) or 0)}", key=error.key)


def _what_is_left(directory: RunDir, before: int) -> str:
    """The newest checkpoint of an earlier step that this run made and that can be opened, in words."""
    for path in reversed(complete(directory.checkpoints)):
        with suppress(CheckpointError):
            if (step_of(path) or 0) < before:
                _check_own(open_checkpoint(path), directory)
                return f"--fallback goes on from {split(path)[1]}"
    return "there is no older one of this run: begin a new run"


def _check_own(checkpoint: Checkpoint, directory: RunDir) -> None:
    """CheckpointError for a checkpoint that another run made: its progress is not this one's."""
    told = foreign(checkpoint.objects, directory.digests)
    if told:
        path = checkpoint.path
        raise CheckpointError(
            f"{path} {told}; model.path={path} would begin with its weights", key=f"{split(path)[1]}.digest"
        )


def _load(checkpoint: Checkpoint, roles: Roles, directory: RunDir) -> None:
    """Into every role, on all its workers. CheckpointError: damaged, with what else there is, or of another shape."""
    positions = checkpoint.objects["positions"]
    try:
        for role, group in roles.keepers().items():
            group.load(str(checkpoint.path), positions.get(role, {}))
    except CheckpointError as error:
        raise (_hinted(error, checkpoint.path, directory) if _damaged(checkpoint) else error) from error


def _damaged(checkpoint: Checkpoint) -> bool:
    try:
        checkpoint.verify()
    except CheckpointError:
        return True
    return False
