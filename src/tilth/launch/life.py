"""Launch a run: set up the machine, build or restore the roles, run the phases, end cleanly."""

import hashlib
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilth.checkpoint import Checkpoint, complete, latest, newest_valid, open_checkpoint, record_best
from tilth.checkpoint.directory import step_of
from tilth.checkpoint.storage import Location, is_url, split, storage_of
from tilth.cluster.controller.cluster import Cluster, open_cluster
from tilth.config.checks import pools
from tilth.config.plugins import Declaration, call_declared, declared
from tilth.config.roles import ROLES
from tilth.config.schema import Recipe
from tilth.core.errors import (
    CallTimeout,
    CheckpointError,
    OutOfMemory,
    PluginError,
    RecipeError,
    StorageError,
    TilthError,
    WorkerLost,
)
from tilth.core.files import make_folder
from tilth.core.write_queue import SLOW
from tilth.data.prompts import PromptSet
from tilth.data.template import template_files
from tilth.data.trajectories import TRAJECTORIES, TrajectoryFiles
from tilth.envs.process import file_of
from tilth.flows.actor_critic import actor_critic, pretrain_critic
from tilth.flows.callbacks import Callback, RunView, notify
from tilth.flows.contamination import count_seen
from tilth.flows.policy_gradient import policy_gradient
from tilth.flows.roles import Roles
from tilth.flows.run import Run
from tilth.flows.saving import Saving
from tilth.flows.supervised import preference, supervised
from tilth.launch.balance_costs import CostFits
from tilth.launch.build import Dataset, RunParts, build
from tilth.launch.checks import check_algorithm, in_scripts, replaced, unused
from tilth.launch.compilation import CompileCost, began_with, to_record
from tilth.launch.health import RunHealth
from tilth.launch.hot_update import HotUpdates, leave_for_updated
from tilth.launch.loader_plans import LoaderPlans
from tilth.launch.planning import with_found_layouts
from tilth.launch.profiling import Profiling
from tilth.launch.supervisor import Inherited
from tilth.launch.survive import Survival, close, is_new, unchanged
from tilth.launch.workers import threads
from tilth.plan.costs import load_costs
from tilth.rewards.fingerprint import files_fingerprint, fingerprint
from tilth.rewards.process_pool import RewardPool
from tilth.rl.algorithm import Algorithm
from tilth.rl.rollout_correction import Corrector
from tilth.runs.directory import RunDir, summarise
from tilth.runs.events import REPLAY, RunReplay
from tilth.runs.identity import Identity, find, passed_over
from tilth.runs.metrics import Metrics
from tilth.runs.model_refs import all_lost, foreign, identity
from tilth.runs.models import MODEL_FOLDER, save_shape
from tilth.runs.readers import checkpoints_of, read_state
from tilth.runs.signals import HandOver, Interrupted, StopRequest
from tilth.runs.state import VALUES, WARMUP
from tilth.runs.trust import remember
from tilth.trace.collector import collector
from tilth.trace.spans import recorder


@contextmanager
def machine(recipe: Recipe) -> Iterator[None]:
    """Set threads and matmul precision of this process for the time of a run."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads(recipe, 1))
    torch.set_float32_matmul_precision(recipe.train.matmul)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


_RUN = threading.Lock()


@contextmanager
def _alone() -> Iterator[None]:
    """Keep this process, its clocks and its trace to one run at a time. RecipeError: another run has it."""
    if not _RUN.acquire(blocking=False):
        message = "another run is under way in this process; wait for its end, or give this one a process of its own"
        raise RecipeError(message, key="run")
    try:
        yield
    finally:
        _RUN.release()


class Until(Callback):
    """End a replay after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, run: RunView, step: int, metrics: dict[str, Any]) -> None:
        """Stop."""
        if step >= self._step:
            run.stop("the end of the replay")


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
    handed: Inherited | None = None,
    replay: Path | None = None,
    finished: Callable[[], None] = lambda: None,
) -> tuple[Path, dict[str, Any]]:
    """Run a recipe to its end, in a new directory or resuming its newest unfinished run; return directory and summary.

    pool: None if nothing is generated. reward: fingerprint of the reward function; a run resumes only with the same
    reward, data and template. allow: keys whose values may have changed. fallback: resume from the newest valid
    checkpoint if the newest one is damaged. handed: what a supervisor hands to this process. replay: asynchronous run
    to repeat. finished: called before the run is recorded as finished.
    """
    check_algorithm(recipe)
    note = ""
    if recipe.cluster.search:
        recipe, note = with_found_layouts(recipe, material)
    data = material.fingerprint()
    folder = Path(handed.run) if handed and handed.run else None
    inputs, replayed = _inputs(recipe, data, reward), None
    if replay is not None:
        replayed = RunReplay.of(replay, Identity(recipe, inputs))
        inputs[REPLAY] = replayed.name  # what continues is a replay of the same steps, and not the run itself
        callbacks = [*callbacks, Until(replayed.steps)]
    who = Identity(recipe, inputs, tuple(allow), folder)
    forgotten = remember(recipe.dump())
    if handed is not None:
        leave_for_updated(handed, who, name)
    who.check_name()
    if recipe.run.checkpoints:
        _check_place(recipe.run.checkpoints)
    warned = [note] if note else []

    def warn(text: str) -> None:  # the log does not exist yet
        warned.append(text)
        notify(callbacks, "on_message", text)

    with _alone(), _add_hints(), machine(recipe), _cluster(recipe, handed) as cluster:
        parts = build(recipe, material, pool, cluster, _earlier(who, name), warn, _compiled(replay or find(who, name)))
        if isinstance(parts.heldout, PromptSet):
            parts.notes.extend(count_seen(recipe, parts.heldout))
        parts.notes.extend(passed_over(who, name))
        with (
            RunDir.create(recipe, name, who.inputs, who.allow, folder, replayed) as directory,
            _recorded(directory, cluster.rank, callbacks),
            collector.to(planned=bool(recipe.run.collect_every)),
        ):
            if handed is not None:
                handed.enter(directory.path)
            for text in warned:
                directory.log(text)
            directory.update(data=data, **to_record(recipe, parts.recipe))
            run = _train(parts, cluster, directory, callbacks, fallback=fallback, handed=handed)
            finished()
            directory.end("finished")
            late = [*close(cluster, directory, run.state.step), *filter(None, [forgotten])]
            summary = summarise(directory.path)
            for line in late:
                _log_late(directory, callbacks, line)
    notify(run.callbacks, "on_run_end", run, summary)
    return directory.path, summary


def _train(
    parts: RunParts,
    cluster: Cluster,
    directory: RunDir,
    callbacks: Sequence[Callback],
    *,
    fallback: bool,
    handed: Inherited | None = None,
) -> Run:
    """Make the run, restore it, and run its phases to their end and its last checkpoint, whatever fails meanwhile."""

    def say(text: str) -> None:
        directory.log(text)
        notify(callbacks, "on_message", text)

    directory.say = say
    with (
        _add_hints(directory.path),
        StopRequest(parts.recipe.run.grace, *([handed.ask] if handed else [])) as stop,
        RunHealth(cluster, directory) as health,
        directory.progress.watched(),
    ):
        survival = Survival(parts, cluster, directory, say)
        survival.prepare()
        survival.trace()
        profiling = Profiling(cluster, parts.recipe, directory.path, directory.attempt, stop)
        updates = None if handed is None else HotUpdates(handed, directory, parts.recipe.plugins, cluster.has_room)
        plans = [LoaderPlans(parts)] if parts.recipe.data.loaders else []
        compiling = CompileCost(parts.recipe, parts.config, parts.roles.policy)
        watches = [health, survival, CostFits(parts, cluster), compiling, *plans, *callbacks, profiling]
        make = partial(_run, parts, cluster, directory, watches, stop, say, survival, updates)
        life = LifeOfRun(make, survival, profiling, updates, handed)
        return life.live(fallback=fallback)


class LifeOfRun:
    """Life of a run in one controller: begin, then finish; after each failure restore and finish again.

    make: makes a ``Run`` at its beginning, for each attempt a new one.
    """

    def __init__(
        self,
        make: Callable[[], Run],
        survival: Survival,
        profiling: Profiling,
        updates: HotUpdates | None,
        handed: Inherited | None,
    ) -> None:
        self._make, self._survival, self._profiling = make, survival, profiling
        self._updates, self._handed = updates, handed
        self.run = make()
        """Run of this attempt."""
        self._whole = self.run
        """The last run that was restored."""
        self._failed: TilthError | None = None
        self._back = False
        """True: the state must come from a checkpoint on disk, also if another failure follows."""

    def live(self, *, fallback: bool) -> Run:
        """Run to the end, and return the run of the last attempt. Raises what cannot be recovered from."""
        self.begin(fallback)
        while True:
            try:
                if self._failed is not None:
                    self.restore(self._failed)
                return self.finish()
            except HandOver:
                raise
            except Interrupted as stopped:
                self.run.directory.end("interrupted", why=str(stopped))
                raise
            except TilthError as error:
                self.fail(error)
            finally:
                stuck = self._halt()
                self._survival.tell()
                if not self._survival.cluster.dispatch.idle():  # rows that the writer holds are lost with their step
                    self.run.directory.trajectories = TrajectoryFiles(self.run.directory.path / TRAJECTORIES)
                self.run.saving.give_up()
            if stuck is not None:  # a recovery would wait for it
                raise stuck from self._failed

    def _halt(self) -> TilthError | None:
        """End the rounds of the engines; log and return what fails in that: the attempt has an outcome of its own."""
        try:
            self.run.sampler.halt()
        except TilthError as error:
            self._survival.say(str(error))
            return error
        return None

    def begin(self, fallback: bool) -> None:
        """Return to the newest state of an earlier process, or start at step 0."""
        _announce(self.run, self._survival.parts)
        _restore(self.run, self._survival.remake, fallback=fallback)
        if self._handed is not None:
            if self._handed.death is not None:
                self._survival.note(self._handed.death)
            self._handed.begin()
        if self._updates is not None:
            self._updates.begin(self.run.state.step)
        notify(self.run.callbacks, "on_run_start", self.run)

    def fail(self, error: TilthError) -> None:
        """Note a failure to restore from. Raises it if it is hopeless, as ``Survival.recover`` has found."""
        if error is self._failed:
            if self._updates is not None:
                self._updates.instead_of(error, self._survival.parts.recipe, self._survival.lost)
            raise error
        self.run.saving.give_up(0.0)
        self._failed = error

    def restore(self, failed: TilthError) -> None:
        """Recover from a failure, and return to the newest state that it has left."""
        survival, whole = self._survival, self._whole
        self._back = survival.recover(failed, whole.state.step).step == "rollback" or self._back
        self.run = self._make()
        if self._back:
            _roll_back(self.run, whole.sampler.position(), survival.remake)
        else:
            _restore(self.run, survival.remake, again=True)

    def finish(self) -> Run:
        """Run the phases to their end, with the last checkpoint."""
        run, self._whole, self._back = self.run, self.run, False
        _complete(run, self._profiling)
        if self._updates is not None:
            self._updates.finish()
        return run


def _complete(run: Run, profiling: Profiling) -> None:
    """Run the phases to their end, and save what is not saved yet."""
    _phases(run)
    profiling.conclude()
    run.saving.finish()
    if run.saving.wanted:
        run.secure()
    run.directory.flush(SLOW)  # the writer may be lost with rows that are in no file yet


def _restore(run: Run, remake: Callable[[], None], *, fallback: bool = False, again: bool = False) -> None:
    """Return to the newest state that a failure has left, in memory or on disk, or to the run's beginning.

    remake: makes roles anew that have loaded a part of a damaged state; again: True if roles were kept.
    """
    directory = run.directory
    if _load_from_memory(run, remake):
        step = run.state.step
        directory.rewind(step)
        directory.accept()
        if directory.resumed:
            run.say(f"continuing after step {step}, from memory")
        return
    if again:
        _leave_none(run, remake)
    _restore_from_disk(run, fallback=fallback)


def _load_from_memory(run: Run, remake: Callable[[], None]) -> bool:
    """Load the newest snapshot; False if there is none that can be used, or the disk has a newer state."""
    while run.snapshots is not None and (kept := run.snapshots.newest()) is not None:
        if kept.step < run.directory.saved:  # its snapshot has failed
            return False
        try:
            _check_own(kept, run.directory)
            _load(kept, run.roles, run.directory)
        except CheckpointError as error:
            run.say(f"the state of step {kept.step} in memory cannot be used: {error}")
            run.snapshots.discard()
            remake()
            continue
        run.restore(kept.objects)
        return True
    return False


def _roll_back(run: Run, drawn: Mapping[str, int], remake: Callable[[], None]) -> None:
    """Return to the newest checkpoint on disk, or to the beginning, and leave out the data that has been drawn since.

    drawn: positions in the streams; remake: as of ``_restore``. Every checkpoint was saved before the trouble or holds
    the weights from before it: a step that is not finite changes none.
    """
    if run.snapshots is not None:
        run.snapshots.clear()
    _leave_none(run, remake)
    _restore_from_disk(run, fallback=False)
    run.sampler.leave_out("rollback")
    left = {name: now - run.state.drawn.get(name, 0) for name, now in drawn.items()}
    run.state.drawn |= drawn
    what = ", ".join(f"{count} {name}" for name, count in left.items() if count)
    run.say(f"back at step {run.state.step}; what was drawn since is left out: {what or 'nothing'}")


def _check_place(where: str) -> None:
    """Raise StorageError for a store or a folder in which no file can be made."""
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
        raise StorageError(
            f"run.checkpoints = {where!r}: {error}; use a writable folder, or the URL of a store that fsspec "
            "supports, as in s3://bucket/path",
            key="run.checkpoints",
        ) from error


@contextmanager
def _recorded(directory: RunDir, rank: int, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Write the spans of this process; log it if some could not be written, without ending the run."""
    recorder.start(directory.events, rank, directory.attempt)
    try:
        yield
    finally:
        if line := recorder.conclude():
            _log_late(directory, callbacks, line)


def _log_late(directory: RunDir, callbacks: Sequence[Callback], line: str) -> None:
    """Log a line after the end of a run, if its disk can take it, and show it."""
    with suppress(StorageError):
        directory.log(line)
    notify(callbacks, "on_message", line)


@contextmanager
def _add_hints(directory: Path | None = None) -> Iterator[None]:
    """Add hints to the error of a lost, silent or too large worker: a smaller key, and where the run resumes.

    directory: the run's, once it exists. An OutOfMemory without a role already has its hint.
    """
    try:
        yield
    except (WorkerLost, CallTimeout, OutOfMemory) as error:
        message = str(error)
        if isinstance(error, OutOfMemory) and (directory is not None or error.role):
            key = ROLES[error.role if error.role in ROLES else "policy"].less
            more = ", or train.checkpointing=true" if key == "train.micro_tokens" else ""
            message += f"; a smaller {key}{more} needs less (to resume the run with it, --allow {key})"
        elif directory is None:
            raise
        if directory is not None:
            kept = latest(checkpoints_of(directory))
            where = f"from {Path(kept).name}" if kept else "from its beginning: it has no checkpoint yet"
            message += f"\nthe same command continues in {directory} {where}"
        raise type(error)(message, key=error.key) from error


def _inputs(recipe: Recipe, data: str, reward: str) -> dict[str, str]:
    """Return key -> fingerprint of the inputs that a recipe only names: data, reward, plugins, template, models."""
    found = {"data": data}
    if reward:
        found["reward.function"] = reward
    correction = Algorithm.of(recipe).correction
    if isinstance(correction, Corrector) and correction.revised:
        found["algorithm.correction"] = correction.revised
    if recipe.plugins:
        found["plugins"] = files_fingerprint(recipe.plugins)
    if file := file_of(recipe.rollout.environment):
        found["rollout.environment"] = files_fingerprint([file])
    found |= {key: fingerprint(declaration.value) for key, declaration in in_scripts(recipe).items()}
    if recipe.cluster.costs:  # rows that are dealt otherwise are added up otherwise
        load_costs(recipe.cluster.costs)
        found["cluster.costs"] = hashlib.blake2b(Path(recipe.cluster.costs).read_bytes(), digest_size=8).hexdigest()
    if files := template_files(recipe.data):
        found["data.template"] = hashlib.blake2b(b"\0".join(files), digest_size=8).hexdigest()
    paths = (spec.paths(recipe) for spec in ROLES.values())
    return found | {key: identity(path) for some in paths for key, path in some.items()}


def _earlier(who: Identity, name: str) -> Path | None:
    """Return the model folder of the run to resume; None if it has no checkpoint, so that the folder may be partial."""
    folder = find(who, name)
    return folder / MODEL_FOLDER if folder and latest(checkpoints_of(folder)) else None


def _compiled(run: Path | None) -> dict[str, bool]:
    """Return which passes of the run to resume or to repeat were compiled, by section."""
    return began_with(read_state(run)) if run else {}


def _cluster(recipe: Recipe, handed: Inherited | None) -> Cluster:
    """Start the workers of ``[cluster]``. They keep their states where the next controller finds them."""
    c, device = recipe.cluster, recipe.train.device
    gpus = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    workers, spares = sum(pools(recipe).values()), recipe.guard.spares
    lasting = handed.folder if handed is not None else ""
    cluster = open_cluster(
        c.backend, workers, timeout=c.timeout, address=c.address, gpus=gpus, spares=spares, lasting=lasting
    )
    cluster.balance.begin(recipe.balance, measures=not gpus)
    cluster.watch(recipe.guard.hang_after, keep=bool(recipe.guard.restarts), waits={"reward": recipe.reward.timeout})
    return cluster


def _run(
    parts: RunParts,
    cluster: Cluster,
    directory: RunDir,
    callbacks: Sequence[Callback],
    stop: StopRequest,
    say: Callable[[str], None],
    survival: Survival,
    updates: HotUpdates | None,
) -> Run:
    """Make the run of an attempt, each of whose commits updates see."""
    metrics = Metrics(sum(parts.roles.policy.peak_flops()), cluster.totals, cluster.traffic, cluster.balance.take)
    every = parts.recipe.run.collect_every

    def collect_garbage(step: int) -> None:
        if every and step % every == 0:
            cluster.collect_garbage(step)

    run = Run(
        parts.recipe, parts.roles, parts.train, parts.heldout, cluster.store, directory, callbacks,
        saving=Saving(parts.recipe, directory, parts.roles.stateful_roles(), metrics, say), stop=stop, metrics=metrics,
        say=say, adopt=parts.adopt, collect_garbage=collect_garbage, snapshots=survival.snapshots,
        followed=parts.followed, repair=survival,
    )  # fmt: skip
    if updates is not None:
        run.after_step = updates.after_step
    return run


def _phases(run: Run) -> None:
    """Run the phases: a supervised warm-up and value pre-training where the recipe has them, then the flow."""
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


def _own_loop(own: Declaration, run: Run) -> None:
    """Run a plugin's training loop. PluginError for what it raises, and if it ends before the phase does."""
    call_declared(own, run)
    if run.state.phase not in run.state.finished:
        steps = f"{run.state.phase_step} of {run.phase_steps} steps"
        raise PluginError(
            f"{own.title} ended after {steps}; loop over run.experience(...) to its end, or call run.stop(why)",
            key=f"flow.{own.name}.steps",
        )


def training_loop(recipe: Recipe) -> Callable[[Run], None]:
    """Return the loop of the recipe's flow: a plugin's, or the one for what the flow learns from."""
    if own := declared("flow").get(recipe.flow):
        return partial(_own_loop, own)
    if recipe.flow_spec.samples:
        return actor_critic if recipe.flow_spec.critic else policy_gradient
    return preference if recipe.flow_spec.learns == "pairs" else supervised


def _announce(run: Run, parts: RunParts) -> None:
    """Store plan and model shape, and log what the run is going to do."""
    directory, elsewhere = run.directory, run.recipe.run.checkpoints
    lines = [f"{'continuing' if directory.resumed else 'new run'} in {directory.path}"]
    lines += [directory.before] if directory.before else []
    lines += [*parts.plan.lines(), *parts.notes]
    directory.set_plan(parts.plan.as_dict())
    lines += [*replaced(run.recipe), *unused(run.recipe)]
    save_shape(directory.path / MODEL_FOLDER, parts.config, parts.tokenizer)
    if directory.changes:
        changed = "; ".join(directory.changes.values())
        lines.append(f"it goes on changed, as allowed, and what it has learned so far stays: {changed}")
    if elsewhere and not directory.checkpoints.startswith((elsewhere.rstrip("/"), str(Path(elsewhere).resolve()))):
        lines.append(f"its checkpoints stay where they are, in {directory.checkpoints}")
    if directory.checkpoints.startswith("memory://"):
        lines.append("checkpoints in memory:// are gone when this process ends: nothing can go on from them")
    loaded = [(key, s.label if key in s.loads else key) for s in ROLES.values() for key in s.paths(run.recipe)]
    lines += [f"{label}: {directory.inputs[key]}" for key, label in loaded if key in directory.inputs]
    for line in lines:
        run.say(line)


def _leave_none(run: Run, remake: Callable[[], None]) -> None:
    """Make kept roles anew that have left the beginning of a run without a checkpoint, to which it returns."""
    if not run.directory.saved and not all(map(is_new, run.roles.stateful_roles().values())):
        remake()


def _restore_from_disk(run: Run, *, fallback: bool) -> None:
    """Return to the newest checkpoint of the run, or to its beginning."""
    directory = run.directory
    newest = _newest(run, fallback=fallback)
    if newest is not None:
        _load(newest, run.roles, directory)
    run.restore({} if newest is None else newest.objects)
    step = run.state.step
    record_best(directory.checkpoints, run.state.best)  # a kill may have come between a checkpoint and this
    directory.rewind(step)
    directory.accept()
    directory.update(best=run.state.best, saved=step)
    if directory.resumed:
        run.say(f"continuing after step {step}")


def _newest(run: Run, *, fallback: bool) -> Checkpoint | None:
    """Return the checkpoint to resume from; None before the first. CheckpointError if it is damaged or missing."""
    directory, root, saved = run.directory, run.directory.checkpoints, run.directory.saved
    found = latest(root)
    if found is None:
        if saved:  # a run that has saved does not begin anew because its disk is not mounted
            raise CheckpointError(
                f"{all_lost(root, saved)} If they are lost for good, begin a new run (run.name=NAME)", key="checkpoints"
            )
        return None
    if (step_of(found) or 0) < saved:
        message = f"the newest checkpoint in {root} is {split(found)[1]}, but this run saved one of step {saved} there"
        if not fallback:
            raise CheckpointError(f"{message}; {_alternative(directory, saved)}", key=f"step-{saved:06d}")
        run.say(message)
    if fallback:
        return newest_valid(root, run.say, partial(_check_own, directory=directory))
    try:
        newest = open_checkpoint(found)
        _check_own(newest, directory)
        return newest
    except CheckpointError as error:
        raise _with_alternative(error, found, directory) from error


def _with_alternative(error: CheckpointError, newest: Location, directory: RunDir) -> CheckpointError:
    return CheckpointError(f"{error}; {_alternative(directory, step_of(newest) or 0)}", key=error.key)


def _alternative(directory: RunDir, before: int) -> str:
    """Name the newest checkpoint of an earlier step that this run made and that can be opened."""
    for path in reversed(complete(directory.checkpoints)):
        with suppress(CheckpointError):
            if (step_of(path) or 0) < before:
                _check_own(open_checkpoint(path), directory)
                return f"--fallback goes on from {split(path)[1]}"
    return "there is no older one of this run: begin a new run"


def _check_own(checkpoint: Checkpoint, directory: RunDir) -> None:
    """Raise CheckpointError for a checkpoint of another run."""
    if message := foreign(checkpoint.objects, directory.digests):
        path = checkpoint.path
        raise CheckpointError(
            f"{path} {message}; model.path={path} begins with its weights", key=f"{split(path)[1]}.digest"
        )


def _load(checkpoint: Checkpoint, roles: Roles, directory: RunDir) -> None:
    """Load every role on all its workers, unless it was kept with this state. CheckpointError for another shape, or for
    damage, with the alternative."""
    positions = checkpoint.objects["positions"]
    try:
        for role, group in roles.stateful_roles().items():
            if group.marked is not None:  # it was kept; a save that was given up must end
                group.saving(True)
            if not unchanged(group, checkpoint.step):
                group.load(str(checkpoint.path), positions.get(role, {}))
                group.mark(checkpoint.step)
    except CheckpointError as error:
        try:
            checkpoint.verify()
        except CheckpointError:
            raise _with_alternative(error, checkpoint.path, directory) from error
        raise
