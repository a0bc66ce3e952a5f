"""``Run``: what a flow's page gets. Experience as a stream of batches, each step a transaction, publishing, evaluation.

The body of a page between two batches is one step. What it did is committed when it asks for the next batch: metrics
and trajectories are kept, the held-out accuracy is measured and a checkpoint is written where the recipe says so. What
is not committed is dropped on resume, and the step runs again from its start with the same random numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.controller.leases import LeasedStore
from tilth.config.flows import FLOWS
from tilth.config.roles import ROLES
from tilth.config.schema import Recipe
from tilth.core.batch import Batch, concat
from tilth.core.errors import RecipeError, RewardError
from tilth.core.random import Stream, stream
from tilth.data.trajectories import TRAJECTORIES
from tilth.flows import hopeless
from tilth.flows.callbacks import Callback, notify
from tilth.flows.checks import check_parts
from tilth.flows.group_filters import Keep, first_groups, has_spread, missing_prompts
from tilth.flows.heldout import ACCURACY, LOSS, REWARD, figures, is_graded, measure
from tilth.flows.measured import measure_parts, measure_rows
from tilth.flows.reward_shaping import adapted, current
from tilth.flows.roles import Roles
from tilth.flows.saving import Saving
from tilth.flows.weight_sync import SyncBounds, check_mismatch
from tilth.rl.algorithm import Algorithm
from tilth.rl.metrics import Metric
from tilth.roles.rollout import ask
from tilth.runs.directory import REWARD_LOG, RunDir
from tilth.runs.metrics import Metrics
from tilth.runs.signals import Interrupted, StopRequest
from tilth.runs.state import RunState
from tilth.trace.spans import span

WARMUP = "warmup"
VALUES = "values"
"""The phase in which the critic alone learns, before that of a flow with a critic."""


def is_supervised(phase: str) -> bool:
    """True for a phase that learns from what is given: a flow of its own, or the warm-up of another."""
    return phase == WARMUP or (phase in FLOWS and not FLOWS[phase].samples)


EVALUATION_IDS = -(2**40)
PROBE_IDS = 2 * EVALUATION_IDS
BASELINE_IDS = 3 * EVALUATION_IDS
"""First trajectory ids. Those of training begin at 0; below them are those of evaluations, then of probes, and lowest
the greedy answers that are baselines, so that none takes another's random numbers."""
PROBES = 8
"""Prompts of a probe."""


class Split(Protocol):
    """One side of the data, prompts or pieces of documents, drawn from by number of step."""

    def __len__(self) -> int: ...

    def take(self, stream: Stream, start: int, count: int) -> np.ndarray:
        """Indices int64 [count] from this place of the stream's endless order on, a pure function of the arguments."""
        ...


class Run:
    """One run of a recipe: its roles, its data, its directory and its position."""

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
        collect: Callable[[int], None] = lambda step: None,
    ) -> None:
        """say: puts a line into the log and before whoever watches; adopt: the checkpoint whose optimizer state the
        first phase begins with; collect: garbage is collected at the end of this step, if it is its turn."""
        self.recipe = recipe
        self.algorithm = Algorithm.of(recipe)
        self.roles = roles
        self.policy, self.rollout, self.reward, self.reference = (
            roles.policy,
            roles.rollout,
            roles.reward,
            roles.reference,
        )
        self.loader = roles["loader"]
        if roles.writer is not None:
            roles.writer.open(str(directory.path.resolve() / TRAJECTORIES))
            directory.trajectories = roles.writer
        self.train = train
        self.heldout = heldout
        self.store = store
        self.directory = directory
        self.callbacks = callbacks
        self.bounds = SyncBounds.of(recipe)
        self.at = RunState()
        self.metrics = metrics
        self.say = say
        self.saving = saving
        saving.then = lambda step, path: notify(callbacks, "on_save", self, step, path)
        self._stop = stop
        self.sample: dict[str, Any] | None = None
        self._evaluated: dict[int, dict[str, float]] = {}
        self._rewarded = self._printed = False
        self._reasons: set[str] = set()
        self._engine_version: int | None = None
        self._published = 0
        self._pending: list[tuple[Mapping[str, Metric], bool]] = []
        self._improved = False
        self._drawn: dict[str, int] = {}
        self._updated: list[Mapping[str, Metric]] = []
        self._empty = 0
        self._adopt = adopt
        self._collect = collect

    # ---- phases ----

    def enter(self, phase: str, steps: int, lr: float) -> "Run":
        """Make ``phase`` the current one, or continue inside it after a resume, also where it shall be longer now."""
        self.entered, self.phase_steps = phase, steps
        if phase in self.at.finished:
            if phase != self.at.phase or self._over():
                return self
            self.at.finished.remove(phase)
        if self.at.phase == phase:
            self._go_on(phase, lr, steps)
            return self
        self.at.phase, self.at.phase_step = phase, 0
        self._begin(phase, lr, steps)
        self._publish_for(phase)
        if phase != WARMUP:
            self._assess_first(phase)
        return self

    def _begin(self, phase: str, lr: float, steps: int) -> None:
        """Optimizers anew, with schedules as long as the phase; copies of the policy as it is now where one begins."""
        self.policy.begin(lr, self._updates(phase, steps))
        if self._adopt is not None and not self.at.step:
            self.policy.adopt(self._adopt)
        first = phase != WARMUP and VALUES not in self.at.finished
        for role in self.roles.receiving("phase"):
            if first or not ROLES[role].trains:
                self._sync(role)
        if self._judges(phase):
            self.critic.begin(self.recipe.critic.lr, self._updates(phase, steps))

    def _go_on(self, phase: str, lr: float, steps: int) -> None:
        """In the middle of a phase, with the learning rates and lengths that the recipe has now."""
        self.policy.tune(lr, self._updates(phase, steps))
        if self._judges(phase):
            self.critic.tune(self.recipe.critic.lr, self._updates(phase, steps))
        self._publish_for(phase)

    def _judges(self, phase: str) -> bool:
        """Whether a critic learns in it."""
        return self.recipe.flow_spec.critic and phase != WARMUP

    def _updates(self, phase: str, steps: int) -> int:
        """Optimizer steps of a phase."""
        how = self.recipe.algorithm
        return steps if is_supervised(phase) else steps * how.epochs * how.minibatches

    def _publish_for(self, phase: str) -> None:
        """Experience comes from the engine; supervised phases need it for their evaluations only."""
        if not is_supervised(phase):
            self.sync_weights(self.policy)

    def _assess_first(self, phase: str) -> None:
        """Where the phase begins. The weights are those of the last evaluation, if there was one."""
        if is_supervised(phase):
            self.evaluate_heldout()
        elif self.at.accuracy_last is None:
            self.at.accuracy_last = self.evaluate()
        else:
            self._tell_heldout()
        self.at.accuracy_first = self.at.accuracy_last

    def _leave(self) -> None:
        """End the phase: the next one starts from a checkpoint of its own."""
        self.at.finished.append(self.at.phase)
        if self._empty:
            self.say(
                f"{self._empty} of the steps of {self.at.phase} had no sample left to learn from: groups/flat says why"
            )
        self._empty = 0
        self.save()

    @property
    def critic(self) -> WorkerGroup:
        """The critic; RecipeError in a flow that has none."""
        if self.roles.critic is None:
            raise RecipeError(f"flow={self.recipe.flow} has no critic; set flow=ppo or vapo", key="flow.critic")
        return self.roles.critic

    # ---- the streams ----

    def experience(
        self, *, group: int, max_staleness: int = 0, keep: Keep | None = None, rounds: int = 0
    ) -> Iterator[Batch]:
        """Batches of scored samples, ``group`` for each prompt, one batch a step.

        Samples whose reward is missing are left out, and those that ``keep`` refuses. max_staleness: policy versions
        that a sample may be behind; only 0 (synchronous) so far. rounds: above 0, further prompts are sampled, at most
        so many times in all, until the recipe's number of them is kept; whole groups beyond it are left out again, the
        last ones drawn.
        """
        if max_staleness:
            raise RecipeError(
                f"max_staleness={max_staleness}: only synchronous experience (0) is available", key="max_staleness"
            )
        while self._goes_on():
            with self._step():
                sampled, kept = list[Batch](), list[Batch]()
                wanted = self.recipe.rollout.prompts
                while wanted > 0 and len(sampled) < max(rounds, 1):
                    indices = self._draw("prompts", wanted)
                    first = self._advance("samples", len(indices) * group)
                    sampled.append(self.collect(ask(indices.tolist(), group, first)))
                    kept.append(self._filter(sampled[-1], keep))
                    wanted = missing_prompts(self.recipe.rollout.prompts, sampled, kept)
                found = first_groups(concat(kept), self.recipe.rollout.prompts)
                self.metrics.add("samples/rounds", float(len(sampled)))
                self.metrics.add("samples/trained", float(len(found)))
                self._empty += not len(found)
                yield found
                self._record(concat(sampled))
                self._warn(concat(sampled))

    def examples(self, count: int) -> Iterator[Batch]:
        """Batches of ``count`` prompts with their answers, one batch a step, the loss on the answers."""
        while self._goes_on():
            with self._step():
                yield self.loader.examples(self._draw("examples", count))

    def documents(self, count: int) -> Iterator[Batch]:
        """Batches of ``count`` pieces of documents, one batch a step, the loss on every token but each first one."""
        while self._goes_on():
            with self._step():
                yield self.loader.documents(self._draw("documents", count))

    def pairs(self, count: int) -> Iterator[Batch]:
        """Batches of the pairs of ``count`` prompts, one batch a step, both answers of each pair as rows."""
        while self._goes_on():
            with self._step():
                yield self.loader.pairs(self._draw("pairs", count))

    def _draw(self, source: str, count: int) -> np.ndarray:
        """The next indices of a stream of the training data, by its name."""
        return self.train.take(stream(self.recipe.seed, source), self._advance(source, count), count)

    def _advance(self, counter: str, count: int) -> int:
        """Where this counter stands; the step that is under way moves it when it is committed."""
        start = self._drawn.get(counter, self.at.drawn.get(counter, 0))
        self._drawn[counter] = start + count
        return start

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        """The batch once for each epoch, in the recipe's number of parts, rows in a new order each time."""
        how = self.recipe.algorithm
        for epoch in range(how.epochs):
            if how.minibatches == 1:
                yield batch
                continue
            order = stream(self.recipe.seed, "minibatch", self.at.step, epoch).permutation(len(batch)).numpy()
            for part in np.array_split(order, max(1, min(how.minibatches, len(batch)))):
                yield batch.select(np.sort(part))

    # ---- parts of a step ----

    @property
    def algo(self) -> Algorithm:
        """The run's algorithm, with the weights that are adapted as they are now."""
        return self.algorithm.updated(**current(self.recipe.algorithm, self.at.weights))

    def logprobs(self, batch: Batch) -> Batch:
        """With the log-probs that what follows needs: of the policy before its updates, and of the reference."""
        needed = self.algorithm.computed
        if "logprobs" in needed:
            batch = self.policy.logprobs(batch, squares="sum_pi_squared" in needed)
        return self.reference.logprobs(batch) if self.reference is not None else batch

    def baselines(self, batch: Batch) -> Batch:
        """With the row column ``baselines``: the reward of the greedy answer to the prompt; NaN where it is missing."""
        prompts, place = np.unique(batch["prompt"], return_inverse=True)
        greedy = self.collect(ask(prompts.tolist(), 1, BASELINE_IDS), greedy=True, prefix="baseline")
        known = greedy["reward"][~np.isnan(greedy["reward"])]
        if len(known):
            self.metrics.add("baseline/mean", float(known.mean(dtype=np.float64)), len(known))
            self.metrics.add("tokens/baseline", float(greedy["completion"].sum()))
        return batch.with_rows(baselines=greedy["reward"][place])

    def collect(self, asked: Batch, *, greedy: bool = False, prefix: str = "") -> Batch:
        """Generate and score; rewards are written to the journal, or taken from it when the step runs again.

        prefix: of the metric that counts missing rewards; empty: ``reward/heldout`` of greedy answers, else ``reward``.
        """
        if self.rollout is None:
            raise RecipeError(
                f"flow={self.recipe.flow} without a reward generates nothing; set reward.function",
                key="reward.function",
            )
        batch = self.rollout.generate(self.loader.encode(asked), greedy=greedy)
        scored, failures = (batch, {}) if self.reward is None else self._score(self.reward, batch)
        if self.roles.reward_model is not None:
            scored = self.roles.reward_model.rate(scored, alone=self.reward is None)
        self.at.graded |= is_graded(scored)
        missing = float(np.isnan(scored["reward"]).sum())
        self.metrics.add(f"{prefix or (REWARD if greedy else 'reward')}/missing", missing)
        self.metrics.add("reward/timeout", float(sum(o["status"] == "timeout" for o in failures.values())))
        if self.recipe.flow_spec.samples:
            check_parts(self.algorithm, scored)
        return scored

    def _score(self, reward: WorkerGroup, batch: Batch) -> tuple[Batch, dict[int, dict[str, Any]]]:
        """Rewards, and those that are missing: in calls that end within the limit of a call even if each reward takes
        all of its own."""
        parts, failures, replayed = list[Batch](), dict[int, dict[str, Any]](), set[int]()
        how, limit = self.recipe.reward, self.recipe.cluster.timeout / 2
        rows = len(batch) if self.recipe.cluster.backend == "inline" else how.workers * int(limit / how.timeout)
        for start in range(0, max(len(batch), 1), max(rows, 1)):
            some = batch.select(np.arange(start, min(start + rows, len(batch))))
            known = self.directory.journal.known(self.at.step, some)
            parts.append(reward.score(some, known=known))
            failures |= reward.failures()
            replayed |= known.keys()
        if not self._printed and (printed := self.directory.path / REWARD_LOG).exists():
            self._printed = True
            self.say(f"what the reward prints is in {printed}")
        scored = concat(parts) if len(parts) > 1 else parts[0]
        self._tell_failures(failures, len(scored), replayed)
        self.directory.journal.write(self.at.step, scored, failures)
        return scored, failures

    def _tell_failures(self, failures: dict[int, dict[str, Any]], asked: int, replayed: set[int]) -> None:
        """The first reason is said aloud; a reward that has never worked ends the run."""
        if not failures:
            self._rewarded |= asked > 0
            return
        reason = next(iter(failures.values()))["reason"]
        if 0 < asked - len(replayed) == len(failures.keys() - replayed) and not self._rewarded:
            raise RewardError(
                f"none of the first {asked} rewards could be had; the first reason: {reason}", key="reward.function"
            )
        self._rewarded |= len(failures) < asked
        if reason not in self._reasons:
            self._reasons.add(reason)
            self.say(f"{len(failures)} of {asked} rewards are missing and left out; the first reason: {reason}")

    def _filter(self, batch: Batch, keep: Keep | None) -> Batch:
        measure_rows(self.metrics, batch)
        scored = batch.select(~np.isnan(batch["reward"]))
        kept = keep(scored) if keep is not None else np.ones(len(scored), bool)
        if keep is not None and len(scored):
            self.metrics.add("groups/flat", float(1 - kept.mean()), len(scored))
        if len(scored) and self.recipe.rollout.group > 1:
            groups = len(np.unique(scored["group"]))
            spread = len(np.unique(scored["group"][has_spread(scored)]))
            self.metrics.add("groups/gradient", spread / groups, groups)
        return scored.select(kept)

    def log_update(self, metrics: Mapping[str, Metric]) -> None:
        """One optimizer step of the policy: its metrics are taken, and checked, when they are there."""
        self._pending.append((metrics, True))

    def log_values(self, metrics: Mapping[str, Metric]) -> None:
        """One optimizer step of the critic; the policy stays as it is."""
        self._pending.append((metrics, False))

    def _flush(self) -> None:
        """Wait for the step's updates, which roles in different pools make at the same time, and take their metrics."""
        owed, self._pending = self._pending, []
        self._updated += [metrics for metrics, policy in owed if policy]
        for metrics, policy in owed:
            if policy:
                self.at.optimizer_steps += 1
                self.at.version += not float(metrics["steps/skipped"])
                check_mismatch(metrics, self.bounds, self.at.step)
            self.metrics.take(metrics)

    def sync_weights(self, policy: WorkerGroup) -> None:
        """Bring the policy's weights to the rollout engines; each checks what arrived against what was meant."""
        if self.rollout is None:
            return
        self._flush()
        unseen = any([self._sync(role) for role in self.roles.receiving("step")])
        self._engine_version = self.at.version
        every = self.recipe.policy.probe_every
        if unseen or (every and self._published % every == 0):
            self._probe(policy)
        self._published += 1

    def _sync(self, target: str) -> bool:
        """Copy the policy's weights to a role; True if only what it computes can tell whether they arrived."""
        if self.roles.weight_sync is None:
            raise RecipeError(f"flow={self.recipe.flow} has no {target} to bring weights to", key=f"roles.{target}")
        return any(delivery.probe for delivery in self.roles.weight_sync.sync(target, self.at.version))

    def _probe(self, policy: WorkerGroup) -> None:
        """Let the engines answer a few prompts and the policy say what it thinks of each token: they must agree."""
        if self.rollout is None or not len(self.train):
            return
        with span("verify"), self.store.scope():
            indices = self.train.take(stream(self.recipe.seed, "probe"), 0, min(PROBES, len(self.train)))
            batch = self.rollout.generate(self.loader.encode(ask(indices.tolist(), 1, PROBE_IDS)))
            check_mismatch(policy.compare(batch), self.bounds, self.at.step - 1)

    # ---- what is held out ----

    def evaluate_heldout(self) -> None:
        """Measure what is held out as this phase can: answers where there is a reward, loss where text is given.

        The best evaluation is remembered, on ties the earlier one; the commit of its step keeps its checkpoint.
        """
        self.at.accuracy_last = accuracy = self.evaluate()
        metric, value = measure(self) if self.at.phase != WARMUP and is_supervised(self.at.phase) else (ACCURACY, None)
        if self.rollout is not None:
            metric, value = REWARD if self.at.graded else ACCURACY, accuracy
        elif value is not None:
            self._evaluated.setdefault(self.at.step, {})[metric] = value
        if value is None or not self.at.step:
            return  # what nothing was learned for is no choice
        best, sign = self.at.best, -1 if metric == LOSS else 1
        if best is None or best["metric"] != metric or sign * value > sign * best["value"]:
            self.at.best, self._improved = {"step": self.at.step, "metric": metric, "value": value}, True

    def evaluate(self) -> float | None:
        """Accuracy of greedy answers to the fixed held-out prompts, or their mean reward: see ``heldout.figures``.

        Publishes first if the engine holds older weights. None, and no metric, where nothing can be generated, nothing
        is held out or every reward is missing.
        """
        if self.rollout is None or not len(self.heldout):
            return None
        if self._engine_version != self.at.version:
            self.sync_weights(self.policy)
        with span("evaluate"), self.store.scope():
            batch = self.collect(ask(self.chosen().tolist(), 1, EVALUATION_IDS), greedy=True)
            known = batch.select(~np.isnan(batch["reward"]))
            measure_parts(self.metrics, known, REWARD)
            found = figures(known, graded=self.at.graded)
            if not found:
                return None
        self.at.heldout = found
        self._evaluated.setdefault(self.at.step, {}).update(found)
        self._tell_heldout()
        return next(iter(found.values()))

    def _tell_heldout(self) -> None:
        for name, value in self.at.heldout.items():
            self.metrics.add(name, value)

    def chosen(self) -> np.ndarray:
        """The held-out prompts or pieces that every evaluation is about."""
        count = min(self.recipe.run.eval_prompts, len(self.heldout))
        return self.heldout.take(stream(self.recipe.seed, "heldout"), 0, count)

    # ---- the transaction ----

    def _goes_on(self) -> bool:
        if self.entered in self.at.finished:
            return False
        if self._over():
            self._leave()
            return False
        return True

    def _over(self) -> bool:
        """Whether the phase has come to its end."""
        at = self.at
        # A mean reward above 1 is no share of right answers, so it reaches no target.
        reached = is_supervised(at.phase) and self.recipe.supervised.until <= (at.accuracy_last or 0.0) <= 1
        return at.phase_step >= self.phase_steps or reached

    @contextmanager
    def _step(self) -> Iterator[int]:
        self._drawn, self._updated = {}, []
        with span("step", step=self.at.step + 1), self.store.scope():
            yield self.at.step
            self._flush()
            self.at.step += 1
            self.at.drawn |= self._drawn
            how, samples = self.recipe.algorithm, self.recipe.rollout.prompts * self.recipe.rollout.group
            self.at.weights = adapted(how, self.at.weights, self._updated, samples)
            for name in ("kl_coef", "entropy_coef"):
                if name in self.at.weights:
                    self.metrics.add(name, self.at.weights[name])
            self.at.phase_step += 1
            if self._due():
                self.evaluate_heldout()
            self._collect(self.at.step)
        self._commit()

    def _due(self) -> bool:
        if self.at.phase == VALUES:
            return False  # the policy is as it was
        every = self.recipe.supervised.check_every if is_supervised(self.at.phase) else self.recipe.run.eval_every
        return self.at.phase_step >= self.phase_steps or bool(every and self.at.phase_step % every == 0)

    def _record(self, batch: Batch) -> None:
        """Hand the trajectories to their writer, where there is one."""
        if self.roles.writer is not None:
            self.sample = self.roles.writer.add(batch, self.at.step + 1)

    def _warn(self, sampled: Batch) -> None:
        """Say what to try where nothing has been learned for long."""
        self.at.flat = hopeless.counted(self.at.flat, sampled, self.algorithm.estimator, self.recipe.rollout.group)
        if text := hopeless.warning(self.at.flat, sampled, self.recipe):
            self.directory.warn(self.at.step + 1, text)
            self.say(text)

    def _commit(self) -> None:
        at = self.at
        closed = self.metrics.close(
            step=at.step, phase=at.phase, phase_step=at.phase_step, phase_steps=self.phase_steps
        )
        record = self.directory.commit_step(closed)
        if self.at.phase_step == 1:
            self._tell_compile_time()
        evaluated, self._evaluated = self._evaluated, {}
        for step, measured in evaluated.items():
            notify(self.callbacks, "on_evaluation", self, step, measured)
        notify(self.callbacks, "on_step_end", self, at.step, record)
        self.saving.look()
        if self._stop.requested:
            self.secure()
            by = self._stop.by and f" by {self._stop.by}"
            raise Interrupted(
                f"stopped{by} after step {self.at.step}, everything is saved; the same command continues in "
                f"{self.directory.path}",
                key="stop",
            )
        if (self._improved or self.saving.due(self.at.step)) and not self._over():
            self.save()  # at its end the phase saves anyway

    def _tell_compile_time(self) -> None:
        for role, group in self.roles.items():
            if hasattr(group, "compile_seconds") and (seconds := group.compile_seconds()):
                self.say(f"{ROLES[role].label}: compiling took {seconds:.1f} s")

    def stop(self, why: str) -> None:
        """End the run after this step as Ctrl-C does; why: who or what asked, for the message."""
        self._stop.requested, self._stop.by = True, why

    def save(self) -> None:
        """Begin to make everything up to this step durable; training goes on while it is written."""
        with span("save"):
            self.directory.flush()
            self.saving.begin(self.at.step, self.state(), self.at.best, self.policy.mesh)
        self._improved = False

    def secure(self) -> None:
        """Everything up to this step is durable when this returns; StorageError if that cannot be had."""
        self.save()
        self.saving.finish()
        if self.saving.failed and self.saving.error is not None:
            raise self.saving.error

    def state(self) -> dict[str, Any]:
        """All that a checkpoint holds besides tensors, as JSON. Random numbers need no more: they are pure functions of
        the seed, a name and these positions. At a step's end no sample is on its way."""
        positions = {role: keeper.position() for role, keeper in self.roles.keepers().items()}
        return {
            "progress": asdict(self.at),
            "digest": self.directory.digest,
            "positions": {role: position for role, position in positions.items() if position},
            "events": {"attempt": self.directory.attempt, "step": self.at.step},
        }
