"""From a recipe to a run: set the machine up, build or restore, run the phases, end cleanly."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilth.checkpoint import (
    Checkpoint,
    abandon_save,
    begin_save,
    commit_save,
    latest,
    mark_best,
    open_checkpoint,
    prune,
)
from tilth.cluster.cluster import Cluster, open_cluster
from tilth.config.checks import pools
from tilth.config.schema import Recipe
from tilth.core.errors import CallTimeout, CheckpointError, TilthError, WorkerLost
from tilth.data.prompts import PromptSet
from tilth.flows.build import Material, Parts, build
from tilth.flows.checks import check_algorithm
from tilth.flows.grpo import grpo
from tilth.flows.metrics import Metrics
from tilth.flows.model import MODEL_FOLDER, save_shape
from tilth.flows.ppo import ppo, values
from tilth.flows.pretrain import pretrain
from tilth.flows.run import PPO, VALUES, WARMUP, Beginner, Observer, Progress, Roles, Run
from tilth.flows.rundir import RunDir, check_name, find, read_state, summarise
from tilth.flows.seen import seen_before
from tilth.flows.sft import sft
from tilth.flows.signals import Interrupted, StopRequest
from tilth.flows.workers import threads
from tilth.roles.reward_pool import RewardPool
from tilth.trace.spans import recorder


@dataclass(frozen=True)
class RunResult:
    """How a run ended. summary: as in ``tilth show RUN --json``."""

    directory: Path
    summary: dict[str, Any]

    @property
    def accuracy(self) -> float | None:
        """Last held-out accuracy: mean reward of greedy answers to prompts never trained on."""
        found: float | None = self.summary.get("accuracy_last")
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
    material: Material,
    pool: RewardPool | None,
    observers: Sequence[Observer],
    *,
    reward: str = "",
    reward_file: str = "",
) -> RunResult:
    """Run a recipe to its end, in a new directory or continuing its newest unfinished one.

    pool: None where nothing is to be generated. reward: identity of a reward function that the recipe does not name; a
    run goes on only with the same one, the same data and the same template. reward_file: hash of the file of one that
    it names; that it changed is told.
    """
    check_algorithm(recipe)
    fingerprint = material.fingerprint()
    inputs = _inputs(recipe, fingerprint, reward)
    check_name(recipe, inputs)
    with machine(recipe), _cluster(recipe) as cluster:
        parts = build(recipe, material, pool, cluster, _earlier(recipe, name, inputs))
        if isinstance(parts.heldout, PromptSet):
            parts.notes.extend(seen_before(recipe, parts.heldout))
        if parts.roles.reward is not None:
            parts.roles.reward.ready()
        with (
            RunDir.create(recipe, name, inputs) as directory,
            recorder.to(directory.events, cluster.rank, directory.attempt),
            _told_how_to_go_on(directory.path),
        ):
            with StopRequest() as stop:
                cluster.trace(directory.events.resolve(), directory.attempt)
                run = _run(parts, cluster, directory, observers, stop)
                directory.update(data=fingerprint)
                _announce(run, parts, reward_file)
                _restore(run)
                for observer in observers:
                    if isinstance(observer, Beginner):
                        observer.on_begin(directory.path, run.at.step, run.say)
                try:
                    _phases(run)
                except Interrupted:
                    directory.end("interrupted")
                    raise
            directory.end("finished")
            summary = summarise(directory.path)
    for observer in observers:
        observer.on_end(summary)
    return RunResult(directory.path, summary)


@contextmanager
def _told_how_to_go_on(directory: Path) -> Iterator[None]:
    """A lost or silent worker is no fault of the run's own: what was committed is intact."""
    try:
        yield
    except (WorkerLost, CallTimeout) as error:
        kept = latest(directory / "checkpoints")
        where = f"from {kept.name}" if kept else "from its beginning: it had not come to a checkpoint"
        raise type(error)(f"{error}\nthe same command continues in {directory} {where}") from error


def _inputs(recipe: Recipe, fingerprint: str, reward: str) -> str:
    """Fingerprint of what decides the run beside its recipe: the data, a reward by value, a template's file."""
    said = f"{fingerprint} {reward}"
    template = Path(recipe.data.template)
    if recipe.data.template and template.is_file():
        said += f" {hashlib.blake2b(template.read_bytes(), digest_size=8).hexdigest()}"
    return hashlib.blake2b(said.encode(), digest_size=4).hexdigest()


def _earlier(recipe: Recipe, name: str, inputs: str) -> Path | None:
    """Model folder of the run that will go on, where it has come to a checkpoint: before that it is not complete."""
    folder = find(recipe, name, inputs)
    return folder / MODEL_FOLDER if folder and latest(folder / "checkpoints") else None


def _cluster(recipe: Recipe) -> Cluster:
    """The workers of ``[cluster]``; they start while the data is being read."""
    c, device = recipe.cluster, recipe.train.device
    gpus = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return open_cluster(c.backend, sum(pools(recipe).values()), timeout=c.timeout, address=c.address, gpus=gpus)


def _run(parts: Parts, cluster: Cluster, directory: RunDir, observers: Sequence[Observer], stop: StopRequest) -> Run:
    return Run(
        parts.recipe,
        parts.roles,
        parts.train,
        parts.heldout,
        cluster.store,
        directory,
        observers,
        save=_save,
        stop=stop,
        metrics=Metrics(sum(parts.roles.policy.peak_flops()), cluster.totals),
    )


def _phases(run: Run) -> None:
    """The recipe's flow, after a supervised warm-up where it learns from experience and has one."""
    recipe, given = run.recipe, run.recipe.supervised
    if recipe.flow == "pretrain":
        pretrain(run.enter("pretrain", given.steps, given.lr))
    elif recipe.flow == "sft":
        sft(run.enter("sft", given.steps, given.lr))
    elif given.steps:
        sft(run.enter(WARMUP, given.steps, given.lr))
    if recipe.flow == "grpo":
        grpo(run.enter("grpo", recipe.algorithm.steps, recipe.optimizer.lr))
    if recipe.flow == "ppo":
        if recipe.critic.steps:
            values(run.enter(VALUES, recipe.critic.steps, recipe.optimizer.lr))
        ppo(run.enter(PPO, recipe.algorithm.steps, recipe.optimizer.lr))


def _announce(run: Run, parts: Parts, reward_file: str) -> None:
    directory = run.directory
    before = read_state(directory.path).get("reward_file", reward_file)
    directory.update(reward_file=reward_file)
    say = [f"{'continuing' if directory.resumed else 'new run'} in {directory.path}", *parts.plan.lines(), *parts.notes]
    directory.set_plan(parts.plan.as_dict())
    save_shape(directory.path / MODEL_FOLDER, parts.config, parts.tokenizer)
    if before != reward_file:
        say.append("the reward's file has changed since this run began; it goes on with the new one")
    for line in say:
        run.say(line)


_POSITIONS = {"policy": "engine", "critic": "critic_engine"}
"""Under which name a checkpoint keeps what a role must restore besides tensors."""


def _save(run: Run) -> None:
    """Every worker writes its part; the checkpoint counts when the controller has put the parts together."""
    root, keepers = run.directory.checkpoints.resolve(), run.roles.keepers()
    state: dict[str, Any] = {"progress": run.state(), "digest": run.directory.digest}
    state |= {key: keepers[role].position() for role, key in _POSITIONS.items() if role in keepers}
    folder = begin_save(root, run.at.step)
    try:
        saved = [saved for group in keepers.values() for saved in group.save(str(folder))]
    except TilthError:
        abandon_save(folder)
        raise
    commit_save(folder, root, run.at.step, [part for parts in saved for part in parts.values()], state, run.policy.mesh)
    _mark_best(run)
    prune(root, run.recipe.run.keep)


def _mark_best(run: Run) -> None:
    mark_best(run.directory.checkpoints, run.at.best)
    run.directory.update(best=run.at.best)


def _restore(run: Run) -> None:
    """Go back to the newest checkpoint of the directory, or to the very beginning."""
    newest = latest(run.directory.checkpoints)
    step = 0
    if newest is not None:
        checkpoint = _open(newest, run)
        run.at = Progress(**checkpoint.objects["progress"])
        step = run.at.step
    _mark_best(run)  # a kill may have come between a checkpoint and this
    run.directory.rewind(step)
    if run.directory.resumed:
        run.say(f"continuing after step {step}")


def _open(newest: Path, run: Run) -> Checkpoint:
    try:
        checkpoint = open_checkpoint(newest)
        _load(checkpoint, run.roles)
    except CheckpointError as error:
        older = [p for p in sorted(newest.parent.glob("step-*")) if p < newest and p.name.count(".") == 0]
        hint = f"continue from {older[-1].name}" if older else "start again from the beginning"
        raise CheckpointError(f"{error}; to {hint}, remove {newest}") from error
    return checkpoint


def _load(checkpoint: Checkpoint, roles: Roles) -> None:
    for role, group in roles.keepers().items():
        position = [checkpoint.objects[_POSITIONS[role]]] if role in _POSITIONS else []
        group.load(str(checkpoint.path.resolve()), *position)
