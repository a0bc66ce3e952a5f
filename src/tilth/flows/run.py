"""``Run``: the object that a training loop gets. Batches as streams, weight sync, evaluation; each step a transaction.

The body of a loop between two batches is one step. Asking for the next batch commits it: metrics and trajectories are
written, held-out data is evaluated and a checkpoint is saved where the recipe says so. A resume drops what was not
committed and runs the step again from its start with the same random numbers.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.controller.leases import LeasedStore
from tilth.config.roles import ROLES
from tilth.config.schema import Recipe
from tilth.core.batch import Batch
from tilth.core.errors import RecipeError, StorageError
from tilth.core.random import stream
from tilth.core.write_queue import PATIENCE, PROMPT, SLOW
from tilth.flows.async_sampler import AsyncSampler, WorkerRepair
from tilth.flows.callbacks import Callback, load_states, notify, states
from tilth.flows.heldout import Evaluator
from tilth.flows.replay_sampler import ReplaySampler
from tilth.flows.reward_shaping import Keep, current
from tilth.flows.roles import Roles
from tilth.flows.sampler import Sampler, Split
from tilth.flows.saving import Saving
from tilth.flows.step_log import StepLog
from tilth.flows.teachers import each_by_its_own
from tilth.flows.weight_sync import Publisher, SyncBounds
from tilth.guard.snapshots import Snapshots
from tilth.plan.memory import has_relay
from tilth.rl.algorithm import Algorithm
from tilth.rl.metrics import Metric
from tilth.roles.experience import UNALIGNED
from tilth.runs.directory import REWARD_LOG, RunDir
from tilth.runs.metrics import Metrics
from tilth.runs.model_refs import hold_pinned, pinned
from tilth.runs.signals import Interrupted, StopRequest
from tilth.runs.state import VALUES, WARMUP, RunState, is_supervised
from tilth.trace.spans import span


class Run:
    """One run of a recipe: its roles, its phases and the transaction of a step.

    sampler: draws, generates and scores; evaluator: measures held-out data; log: collects a step's metrics.
    """

    def __init__(
        self,
        recipe: Recipe,
        roles: Roles,
        train: Split,
        heldout: Split,
        store: LeasedStore,
        directory: RunDir,
        callbacks: Sequence[Callback],
        saving: Saving,
        stop: StopRequest,
        metrics: Metrics,
        say: Callable[[str], None],
        adopt: str | None = None,
        collect_garbage: Callable[[int], None] = lambda step: None,
        snapshots: Snapshots | None = None,
        followed: np.ndarray | None = None,
        repair: WorkerRepair | None = None,
    ) -> None:
        """say: log a line and show it; adopt: checkpoint whose optimizer state the first phase begins with;
        collect_garbage: called at the end of each step; snapshots: where its states are kept in memory; followed:
        the teacher of each prompt (``launch.build.followed_teachers``); repair: of engines beside training."""
        self.recipe, self.algorithm = recipe, Algorithm.of(recipe)
        self.roles, self.store, self.directory, self.callbacks = roles, store, directory, callbacks
        self.policy, self.loader = roles.policy, roles["loader"]
        self.rollout, self.reference, self._followed = roles.rollout, roles.reference, followed
        self.metrics, self.say, self.saving = metrics, say, saving
        self.state = RunState()
        self.bounds = SyncBounds.of(recipe)
        self.progress = directory.progress
        algo, state, log = self.algorithm, self.state, directory.path / REWARD_LOG
        given = recipe, algo, roles, train, state, metrics, directory.journal, log, say, self.progress
        self._publisher: Publisher | None = None
        if roles.weight_sync is not None and roles.rollout is not None and has_relay(recipe):
            meshes, every = (roles.policy.mesh, roles.rollout.mesh), recipe.rollout.whole_every
            apart = recipe.rollout.adapters == "adapter"
            self._publisher = Publisher(roles.weight_sync, *meshes, store, every, adapters=apart)
        self.sampler = Sampler(*given)
        if recipe.rollout.staleness:
            events, again = directory.experience_log(), directory.replay
            how: dict[str, Any] = {"store": store, "events": events, "attempt": directory.attempt}
            if again is not None:
                self.sampler = ReplaySampler(*given, replay=again, **how)
            else:
                self.sampler = AsyncSampler(*given, publisher=self._publisher, repair=repair, **how)
        self.evaluator = Evaluator(recipe, roles, self.sampler, heldout, store, state, metrics, self._refresh_engine)
        self.snapshots, spill = snapshots, None if snapshots is None else snapshots.spill
        self.kept_in_memory = True
        """False without room for the newest state."""
        self.after_step: Callable[[Run], None] | None = None
        """Called when a step and all that belongs to it is committed."""
        self.log = StepLog(recipe, algo, roles, directory, state, metrics, self.bounds, say, spill)
        self.log.updated = lambda found: notify(callbacks, "on_update", self, state.step + 1, found)
        saving.then = lambda step, path: notify(callbacks, "on_save", self, step, path)
        self._stop, self._adopt, self._collect_garbage = stop, adopt, collect_garbage
        self._engine_version: int | None = None
        self._syncs = self._empty = 0
        self._base = pinned(recipe.model.path) if recipe.policy.lora.rank else None
        if self._base is not None:
            try:
                hold_pinned(self._base, str(directory.path.resolve()))
            except StorageError as error:  # a base that others share may be read-only, and then who prunes it is warned
                say(f"model.path: {error}")

    @property
    def critic(self) -> WorkerGroup:
        """The critic; RecipeError in a flow that has none."""
        if self.roles.critic is None:
            raise RecipeError(f"flow={self.recipe.flow} has no critic; set flow=ppo or vapo", key="flow.critic")
        return self.roles.critic

    # ---- phases ----

    def enter(self, phase: str, steps: int, lr: float) -> "Run":
        """Begin a phase of this many steps, or continue it after a resume, also if it is longer than before."""
        self.entered, self.phase_steps = phase, steps
        self.progress.begin(phase, self.state.phase_step if self.state.phase == phase else 0, steps)
        if self.recipe.guard.batch == "scale":
            self.state.ranks = self.state.ranks or self.policy.mesh.count("rows")
        if phase in self.state.finished:
            if phase != self.state.phase or self._over():
                return self
            self.state.finished.remove(phase)
        if self.state.phase == phase:
            self._resume(phase, lr, steps)
            return self
        self.state.phase, self.state.phase_step, self.state.more_samples = phase, 0, 0
        self._begin(phase, lr, steps)
        self._sync_for(phase)
        if phase != WARMUP:
            self._evaluate_first(phase)
        return self

    def _begin(self, phase: str, lr: float, steps: int) -> None:
        """Make new optimizers with schedules as long as the phase, and copy the policy to roles that begin as it."""
        self.policy.begin(lr, self._updates(phase, steps))
        if self._adopt is not None and not self.state.step:
            self.policy.adopt(self._adopt)
        first = phase != WARMUP and VALUES not in self.state.finished
        for role in self.roles.receiving("phase"):
            if first or not ROLES[role].trains:
                self._sync(role)
        if self._trains_critic(phase):
            self.critic.begin(self.recipe.critic.lr, self._updates(phase, steps))

    def _resume(self, phase: str, lr: float, steps: int) -> None:
        """Continue in the middle of a phase, with the recipe's current learning rates and lengths."""
        share = self._batch / self.recipe.supervised.batch
        self.policy.tune(lr, self._updates(phase, steps), share)
        if share != 1:
            self.say(
                f"a step has {self._batch} samples now, in proportion to the workers that divide them (guard.batch)"
            )
        if self._trains_critic(phase):
            self.critic.tune(self.recipe.critic.lr, self._updates(phase, steps))
        self._sync_for(phase)

    @property
    def _batch(self) -> int:
        """Samples of a supervised step: the recipe's, or in proportion to the ranks that divide them."""
        whole, ranks = self.recipe.supervised.batch, self.state.ranks
        if self.recipe.guard.batch == "keep" or not ranks:
            return whole
        return max(1, round(whole * self.policy.mesh.count("rows") / ranks))

    @property
    def _left(self) -> int:
        """Samples that the phase has left; of one that samples, steps times the batch of supervised ones."""
        whole = self.recipe.supervised.batch
        return (self.phase_steps - self.state.phase_step) * whole - self.state.more_samples

    @property
    def _length(self) -> int:
        """Steps of the phase, if those to come have as many samples as now."""
        return self.state.phase_step - (-self._left // self._batch)

    def _trains_critic(self, phase: str) -> bool:
        return self.recipe.flow_spec.critic and phase != WARMUP

    def _updates(self, phase: str, steps: int) -> int:
        """Return the number of optimizer steps of a phase."""
        algo = self.recipe.algorithm
        return steps if is_supervised(phase) else steps * algo.epochs * algo.minibatches

    def _sync_for(self, phase: str) -> None:
        """Sync the engine's weights unless the phase is supervised and uses the engine for evaluations only."""
        if not is_supervised(phase):
            self.sync_weights(self.policy)

    def _evaluate_first(self, phase: str) -> None:
        """Evaluate where the phase begins, unless an earlier evaluation had the same weights."""
        if is_supervised(phase):
            self.evaluate_heldout()
        elif self.state.accuracy_last is None:
            self.state.accuracy_last = self.evaluate()
        else:
            self.evaluator.repeat()
        self.state.accuracy_first = self.state.accuracy_last
        self.state.outcomes_first = self.state.outcomes

    def _leave(self) -> None:
        """End the phase and save a checkpoint, from which the next one starts."""
        self.state.finished.append(self.state.phase)
        if self._empty:
            steps = "1 step" if self._empty == 1 else f"{self._empty:,} steps"
            self.say(f"{steps} of {self.state.phase} had no sample left to learn from; see groups/flat")
        self._empty = 0
        self.sampler.leave()
        if self._publisher is not None:
            self._publisher.wait()
        self.save()

    # ---- streams ----

    def experience(self, *, group: int, keep: Keep | None = None, rounds: int = 0) -> Iterator[Batch]:
        """Yield one batch of scored samples per step, ``group`` samples for each prompt.

        keep, rounds: as in ``Sampler.sample``. With ``rollout.staleness`` the engines go on while the caller computes.
        """
        while self._continues():
            with self._step():
                self.sampler.left = self.phase_steps - self.state.phase_step
                sampled = self.sampler.sample(group, keep, rounds)
                self._empty += not len(sampled.kept)
                notify(self.callbacks, "on_rollout", self, self.state.step + 1, sampled.kept)
                yield sampled.kept
                self.log.record(sampled.drawn)

    def examples(self, count: int) -> Iterator[Batch]:
        """Yield one batch of ``count`` prompts with answers per step; the loss is on the answers."""
        return self._given("examples", count)

    def documents(self, count: int) -> Iterator[Batch]:
        """Yield one batch of ``count`` pieces of documents per step; the loss is on all tokens but each first one."""
        return self._given("documents", count)

    def pairs(self, count: int) -> Iterator[Batch]:
        """Yield one batch of the pairs of ``count`` prompts per step, two rows for each pair."""
        return self._given("pairs", count)

    def _given(self, kind: str, count: int) -> Iterator[Batch]:
        whole = self.recipe.supervised.batch
        while self._continues():
            with self._step():
                now = min(self._batch, self._left)  # of the last step, if workers have changed
                size = max(1, round(count * now / whole))
                indices = self.sampler.draw(kind, size)
                batch = getattr(self.loader, kind)(indices, **self.sampler.then())
                self.progress.at("updating")
                yield batch
                self.state.more_samples += now - whole

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        """Yield the batch in the recipe's number of parts, once per epoch, rows in a new order each time."""
        algo, self.log.learned = self.recipe.algorithm, batch
        whole = algo.epochs * algo.minibatches
        for epoch in range(algo.epochs):
            self.progress.at("updating", epoch * algo.minibatches, whole)
            if algo.minibatches == 1:
                yield batch
                continue
            order = stream(self.recipe.seed, "minibatch", self.state.step, epoch).permutation(len(batch)).numpy()
            for i, part in enumerate(np.array_split(order, max(1, min(algo.minibatches, len(batch))))):
                self.progress.at("updating", epoch * algo.minibatches + i, whole)
                yield batch.select(np.sort(part))

    # ---- parts of a step ----

    def generating(self) -> AbstractContextManager[None]:
        """Return a block beside which the engines generate ahead (``rollout.staleness``). A loop that has such blocks
        keeps them from it elsewhere, but where it waits for its next batch."""
        return self.sampler.generating()

    @property
    def algo(self) -> Algorithm:
        """The run's algorithm with the current values of adapted weights."""
        return self.algorithm.updated(**current(self.recipe.algorithm, self.state.weights))

    def logprobs(self, batch: Batch) -> Batch:
        """Add the log-probs that the update needs: the policy's before it, and the reference's, or those of the teacher
        that a row follows."""
        needed, reference = self.algorithm.computed, self.reference
        self.progress.at("computing log-probs")
        if reference is not None and self._followed is not None:
            batch = self.policy.logprobs(batch, squares="sum_pi_squared" in needed)
            return each_by_its_own(batch, reference, self.recipe.teachers, self._followed, self.log)
        teacher = reference if self.recipe.aligns else None
        theirs = None if teacher is None else teacher.translated(batch)  # beside the policy's pass, in its own pool
        if "logprobs" in needed:
            batch = self.policy.logprobs(batch, squares="sum_pi_squared" in needed)
        if teacher is None:
            return batch if reference is None else reference.logprobs(batch)
        batch = teacher.aligned(batch, teacher.logprobs(theirs))
        self.log.add_unaligned(int(batch[UNALIGNED].sum()), int(batch["completion"].sum()))
        return batch

    def baselines(self, batch: Batch) -> Batch:
        """Add the row column ``baselines``: see ``Evaluator.baselines``."""
        return self.evaluator.baselines(batch)

    def generate_and_score(self, asked: Batch, *, greedy: bool = False, prefix: str = "") -> Batch:
        """Generate an answer for each row of ``asked`` and score it: see ``Sampler.generate_and_score``."""
        return self.sampler.generate_and_score(asked, greedy=greedy, prefix=prefix)

    def log_update(self, metrics: Mapping[str, Metric]) -> None:
        """Log an optimizer step of the policy. Its metrics are read and checked later, so roles work in parallel."""
        self.log.add_update(metrics)

    def log_values(self, metrics: Mapping[str, Metric]) -> None:
        """Log an optimizer step of the critic."""
        self.log.add_update(metrics, policy=False)

    def sync_weights(self, policy: WorkerGroup) -> None:
        """Copy the policy's weights to the engines, which verify what arrived, and probe them where that is due."""
        if self.rollout is None:
            return
        self.log.flush()
        self.progress.at("syncing weights")
        unseen = any([self._sync(role) for role in self.roles.receiving("step")])
        self._engine_version = self.state.version
        self.sampler.published(self.state.version)
        every = self.recipe.policy.probe_every
        if unseen or (every and self._syncs % every == 0):
            self.evaluator.probe(policy, self.bounds)
        self._syncs += 1

    def _sync(self, target: str) -> bool:
        """Copy the policy's weights to a role; True if only a probe can tell whether they arrived."""
        if self.roles.weight_sync is None:
            raise RecipeError(
                f"flow={self.recipe.flow} has no {target} that could receive weights", key=f"roles.{target}"
            )
        self.roles[target].changed_by.add("receive")  # weight_sync changes its state
        if target == "rollout" and self._publisher is not None:
            written = self._publisher.publish(self.state.version)
            if self.recipe.policy.lora.rank:
                self.metrics.add("sync/bytes", float(written))
            if self._publisher.sent_bytes:
                self.metrics.add("sync/sent_bytes", float(self._publisher.sent_bytes))
                self.metrics.add("sync/whole_bytes", float(written))
            return False
        found = self.roles.weight_sync.sync(target, self.state.version)
        if self.recipe.policy.lora.rank:
            self.metrics.add("sync/bytes", float(sum(delivery.taken for delivery in found)))
        return any(delivery.probe for delivery in found)

    def _refresh_engine(self) -> None:
        if self._engine_version != self.state.version:
            self.sync_weights(self.policy)

    def evaluate_heldout(self) -> None:
        """Evaluate on held-out data: see ``Evaluator.evaluate_heldout``."""
        self.evaluator.evaluate_heldout()

    def evaluate(self) -> float | None:
        """Return the accuracy or mean reward of greedy answers to held-out prompts: see ``Evaluator.evaluate``."""
        return self.evaluator.evaluate()

    # ---- the transaction ----

    def _continues(self) -> bool:
        """Return True while the phase has steps left; end it otherwise."""
        if self.entered in self.state.finished:
            return False
        if self._over():
            self._leave()
            return False
        return True

    def _over(self) -> bool:
        """True at the end of the phase: all its steps are done, or a supervised phase has reached its target."""
        state = self.state
        # A mean reward above 1 is no share of right answers, so it reaches no target.
        reached = is_supervised(state.phase) and self.recipe.supervised.until <= (state.accuracy_last or 0.0) <= 1
        return self._left <= 0 or reached

    @property
    def at_end(self) -> bool:
        """True after the last step of the last phase."""
        return self._over() and self.entered == self.recipe.flow

    @contextmanager
    def _step(self) -> Iterator[None]:
        state = self.state
        self.sampler.rollback()
        self.log.start()
        self.progress.begin(state.phase, state.phase_step + 1, self._length)
        with span("step", step=state.step + 1), self.store.scope():
            yield
            self.log.flush()
            state.step += 1
            self.sampler.commit()
            self.log.adapt_weights()
            state.phase_step += 1
            if self._evaluation_due():
                self.evaluate_heldout()
            self._collect_garbage(state.step)
        self._commit()

    def _evaluation_due(self) -> bool:
        state = self.state
        if state.phase == VALUES:  # the policy does not change in it
            return False
        every = self.recipe.supervised.check_every if is_supervised(state.phase) else self.recipe.run.eval_every
        return self._left <= 0 or bool(every and state.phase_step % every == 0)

    def _commit(self) -> None:
        state = self.state
        record = self.log.commit(self._length)
        for role, group in self.roles.items() if state.phase_step == 1 else ():
            if hasattr(group, "compile_seconds") and (seconds := self._compile_seconds(role, group)):
                self.say(f"{ROLES[role].label}: compiling took {seconds:.1f} s")
        for step, measured in self.evaluator.results().items():
            notify(self.callbacks, "on_evaluation", self, step, measured)
        notify(self.callbacks, "on_step_end", self, state.step, record)
        self.saving.look()
        if self.snapshots is not None:  # before a checkpoint: copies that differ are not saved
            self._keep_in_memory(self.snapshots)
        if self._stop.requested and not self.at_end:
            self.secure()
            by = self._stop.by and f" by {self._stop.by}"
            raise Interrupted(
                f"stopped{by} after step {state.step}, everything is saved; the same command continues in "
                f"{self.directory.path}",
                key="stop",
            )
        if (self.evaluator.improved or self.saving.due(state.step)) and not self._over():
            self.save()  # at its end the phase saves anyway
        if self.after_step is not None:
            self.after_step(self)

    def _compile_seconds(self, role: str, group: WorkerGroup) -> float:
        """Return how long torch.compile took in a role; 0 of engines of which one is lost beside the step."""
        if role == "rollout":
            return self.sampler.ask_engines(lambda engines: engines.compile_seconds()) or 0.0
        seconds: float = group.compile_seconds()
        return seconds

    def _keep_in_memory(self, snapshots: Snapshots) -> None:
        """Take a snapshot. Without room the run goes on: a failure costs it the steps since the last one.

        The step's trajectories come first: a writer that dies with them would lose rows of a step that is never run
        again.
        """
        rows = self.directory.settle()
        before, self.kept_in_memory = self.kept_in_memory, True
        try:
            if rows.get("alone"):
                raise StorageError(f"cannot write its trajectories to {rows['path']}: {rows['reason']}", key="snapshot")
            snapshots.take(self.roles.stateful_roles(), self.state.step, self._objects(), self.policy.mesh)
        except StorageError as error:
            self.kept_in_memory = False
            if before:
                self.say(f"step {self.state.step} and those after it are not kept in memory: {error}")
            return
        if not before:
            self.say(f"step {self.state.step} is kept in memory again")

    # ---- for callbacks, and for who starts the run ----

    @property
    def sample(self) -> dict[str, Any] | None:
        """A sampled answer of the newest step: prompt, text, answer, reward; None before the first."""
        return self.log.sample

    def stop(self, why: str) -> None:
        """End the run after this step as Ctrl-C does; why: who or what asked, for the message."""
        self._stop.requested, self._stop.by = True, why

    def save(self) -> None:
        """Begin a checkpoint of everything up to this step; training continues while it is written."""
        with span("save"):
            trouble = self.directory.flush(PROMPT if self.saving.wanted else SLOW)
            step, best = self.state.step, self.state.best
            self.saving.begin(step, self.checkpoint_objects(), best, self.policy.mesh, trouble)
        self.evaluator.improved = False

    def secure(self) -> None:
        """Save a checkpoint and wait until it is complete; StorageError if it fails for ``PATIENCE`` seconds."""
        until, told = time.monotonic() + PATIENCE, False
        self.progress.at("saving")
        while True:
            self.saving.finish()
            self.save()
            self.saving.finish()
            if not self.saving.wanted:
                return
            if not told:
                told = True
                self.say(f"waiting {PATIENCE:g} s at most until a checkpoint can be written: {self.saving.error}")
            if time.monotonic() >= until and self.saving.error is not None:
                raise self.saving.error
            time.sleep(self.saving.pause)

    def checkpoint_objects(self) -> dict[str, Any]:
        """Return everything that a checkpoint holds besides tensors, as JSON.

        Random numbers are pure functions of seed, name and position, so they need no state. Of samples in flight it has
        the ids and prompts: a resume asks for them again.
        """
        positions = {name: role.position() for name, role in self.roles.stateful_roles().items()}
        return {**self._objects(), "positions": {role: position for role, position in positions.items() if position}}

    def _objects(self) -> dict[str, Any]:
        """Return ``checkpoint_objects`` without the roles' positions."""
        events = {"attempt": self.directory.attempt, "step": self.state.step}
        found = {"progress": asdict(self.state), "digest": self.directory.digest, "events": events}
        found["data"] = self.directory.data
        found |= {"callbacks": kept} if (kept := states(self.callbacks)) else {}
        return found if self._base is None else {**found, "base": self._base}

    def restore(self, objects: Mapping[str, Any]) -> None:
        """Set the state to that of a checkpoint, in place: the parts of the run share it. {}: to the beginning."""
        load_states(self.callbacks, objects.get("callbacks", {}))
        vars(self.state).update(vars(RunState(**objects.get("progress", {}))))
        if objects and objects.get("data") != self.directory.data:  # its indices name other prompts, or may do so
            self.state.outcomes_first = {}
            self.sampler.leave_out("recipe")
