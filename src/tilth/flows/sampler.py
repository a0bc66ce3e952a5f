"""Experience of a step: draw prompts, generate answers, score them, keep those to learn from."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.controller.lazy import resolved
from tilth.config.schema import Recipe
from tilth.core.batch import Batch, concat
from tilth.core.errors import DataError, RecipeError, RewardError
from tilth.core.random import Stream, stream
from tilth.data.mixture import Mixture
from tilth.flows.generation import Generation, Scorers, apart
from tilth.flows.measured import is_graded, measure_engines, measure_groups, measure_rows
from tilth.flows.reward_shaping import Keep, check_parts, check_turn_rewards, first_groups, missing_prompts
from tilth.flows.roles import Roles
from tilth.rewards.process_pool import commonest
from tilth.rl.algorithm import Algorithm
from tilth.roles.experience import CARRIED, OUTCOME, samples_of
from tilth.roles.judge import GRADE
from tilth.roles.rollout import Ended, EngineCounts, ask
from tilth.runs.journal import Journal
from tilth.runs.metrics import Metrics
from tilth.runs.progress import StepProgress
from tilth.runs.readers import REWARD
from tilth.runs.state import RunState

T = TypeVar("T")


class Split(Protocol):
    """One side of the data, train or held out: prompts or pieces of documents, drawn by position."""

    def __len__(self) -> int: ...

    def take(self, stream: Stream, start: int, count: int) -> np.ndarray:
        """Return indices int64 [count] from position ``start`` of the stream's endless order; a pure function."""
        ...


class StepSamples(NamedTuple):
    """Samples of one step. kept: those to learn from; drawn: all of them, in the order of their ids."""

    kept: Batch
    drawn: Batch


class Sampler:
    """Draw from the training data and turn prompts into scored samples.

    Its position, ``state.drawn``, counts what each stream has given out. A step moves it with ``commit``; until then
    ``rollback`` returns to the position before the step.
    """

    def __init__(
        self,
        recipe: Recipe,
        algorithm: Algorithm,
        roles: Roles,
        train: Split,
        state: RunState,
        metrics: Metrics,
        journal: Journal,
        reward_log: Path,
        say: Callable[[str], None],
        progress: StepProgress,
    ) -> None:
        """reward_log: the file that the reward function prints to; say: log a line and show it; progress: where it
        notes what it does."""
        self.recipe, self.algorithm, self.roles, self.train, self.state = recipe, algorithm, roles, train, state
        self.metrics, self.journal, self.say, self.progress = metrics, journal, say, progress
        self._reward_log: Path | None = reward_log
        self._drawn: dict[str, int] = {}
        self._then = np.zeros(0, np.int64)
        self._carried: list[tuple[int, int, int]] | None = None
        self.left = 0
        """Steps of the phase that are not done, with the one under way."""
        self._reward_worked = self._scores = False
        self._reported: set[str] = set()

    # ---- position ----

    def draw(self, source: str, count: int) -> np.ndarray:
        """Return the next ``count`` indices of the training data, int64, from the stream of this name."""
        order, start = stream(self.recipe.seed, source), self._advance(source, count)
        found = self.train.take(order, start, count)
        if isinstance(self.train, Mixture):
            for name, own in self.train.counts(found).items():
                self.metrics.add(f"mixture/{name}", float(own))
            for line in self.train.ends(order, start, count):
                self.say(line)
        if self.recipe.data.loaders or self.recipe.rollout.run_ahead:
            self._then = self._peek(source, self.recipe.rollout.prompts if source == "prompts" else count)
        return found

    def then(self) -> dict[str, np.ndarray]:
        """Return, once for each draw, the argument of the loader with the samples that the next one is going to draw.
        No position moves for it."""
        if not self.recipe.data.loaders:
            return {}
        found, self._then = self._then, self._then[:0]
        return {"then": found} if len(found) else {}

    def _ahead(self) -> Batch | None:
        """Return rows that ask for the next step's samples, with their prompts, for run-ahead; None without it."""
        found, self._then = self._then, self._then[:0]
        if not self.recipe.rollout.run_ahead or not len(found) or self.left <= 1:
            return None
        batch: Batch = self.roles["loader"].encode(ask(found.tolist(), self.recipe.rollout.group, 0))
        return batch

    def _peek(self, source: str, count: int) -> np.ndarray:
        """Return the indices behind what the step in progress has drawn; none if the data ends before that many."""
        try:
            return self.train.take(stream(self.recipe.seed, source), self._drawn[source], count)
        except DataError:  # a mixture that ends, which only a step that draws it may find
            return np.zeros(0, np.int64)

    def _advance(self, counter: str, count: int) -> int:
        """Return the counter's position and move it by ``count`` within the current step."""
        start = self._drawn.get(counter, self.state.drawn.get(counter, 0))
        self._drawn[counter] = start + count
        return start

    def position(self) -> dict[str, int]:
        """Return the position of each stream, with what the step in progress has drawn."""
        return self.state.drawn | self._drawn

    def commit(self) -> None:
        """Store the position after this step in the run's state."""
        self.state.drawn |= self._drawn
        self.state.carried = self.state.carried if self._carried is None else self._carried
        self.rollback()

    def rollback(self) -> None:
        """Return to the committed position."""
        self._drawn, self._carried, self._then = {}, None, self._then[:0]

    def leave_out(self, reason: str) -> None:
        """Forget the samples that the committed state would go on with."""
        self.state.carried = []

    # ---- samples ----

    def sample(self, group: int, keep: Keep | None = None, rounds: int = 0) -> StepSamples:
        """Sample ``group`` answers for each of the recipe's number of prompts.

        Samples without a reward and those that ``keep`` refuses are not among the kept. rounds: if > 0, sample further
        prompts up to this many times until enough groups are kept; surplus groups are dropped, latest first.
        """
        drawn, kept = list[Batch](), list[Batch]()
        prompts = wanted = self.recipe.rollout.prompts
        while wanted > 0 and len(drawn) < max(rounds, 1):
            drawn.append(self._next(wanted, group))
            kept.append(self._filter(drawn[-1], keep))
            wanted = missing_prompts(prompts, drawn, kept)
        found = first_groups(concat(kept), prompts)
        self.metrics.add("samples/rounds", float(len(drawn)))
        self.metrics.add("samples/trained", float(len(found)))
        return StepSamples(found, concat(drawn))

    def _next(self, count: int, group: int) -> Batch:
        """Return the scored samples of the next ``count`` prompts."""
        indices = self.draw("prompts", count)
        first = self._advance("samples", len(indices) * group)
        asked = ask(indices.tolist(), group, first)
        return self.generate_and_score(self._with_carried(asked) if self.recipe.rollout.partial else asked)

    def _with_carried(self, new: Batch) -> Batch:
        """Return rows that ask for the samples to go on with, and for new ones."""
        columns = np.array(self.state.carried, np.int64).reshape(-1, 3).T
        before = Batch({**dict(zip(("id", "group", "prompt"), columns)), CARRIED: np.ones(columns.shape[1], np.int8)})
        return concat([before, new.with_rows(**{CARRIED: np.zeros(len(new), np.int8)})])

    def _whole_groups(self, generation: Generation, asked: Batch) -> np.ndarray:
        """Generate ``rollout.partial`` tokens of each sample, again while no group is finished; return the ids of those
        that are.

        The others are carried to the next step.
        """
        generation.run(asked, since=self.state.step, ahead=self._ahead())
        while (going := self._going(generation, asked)).all():
            generation.resume()
        rest = asked.select(going)
        self._carried = list(zip(*(rest[name].tolist() for name in ("id", "group", "prompt"))))
        self.metrics.add("samples/carried", float(len(rest)))
        return asked["id"][~going]

    def _going(self, generation: Generation, asked: Batch) -> np.ndarray:
        """Return bool [n], True for samples of groups in which one has paused."""
        paused = [i for i, one in generation.ended.items() if one.paused]
        return np.isin(asked["group"], asked["group"][np.isin(asked["id"], paused)])

    def _filter(self, batch: Batch, keep: Keep | None) -> Batch:
        measure_rows(self.metrics, batch)
        if self.unscored:
            return batch.with_rows(reward=np.zeros(len(batch), np.float32))  # never read, but a missing one leaves out
        scored = batch.select(~np.isnan(batch["reward"]))
        kept = keep(scored) if keep is not None else np.ones(len(scored), bool)
        if keep is not None and len(scored):
            self.metrics.add("groups/flat", float(1 - kept.mean()), len(scored))
        if len(scored) and self.recipe.rollout.group > 1:
            measure_groups(self.metrics, scored)
        return scored.select(kept)

    def generate_and_score(self, asked: Batch, *, greedy: bool = False, prefix: str = "") -> Batch:
        """Generate an answer for each row of ``asked`` and score it.

        Rewards are written to the journal, or taken from it when the step runs again. prefix: of the metric that counts
        missing rewards; default: ``reward/heldout`` for greedy answers, else ``reward``.
        """
        rollout = self._engines()
        self.progress.at("evaluating" if greedy and not prefix else "generating", 0, len(asked))
        if self.recipe.rollout.environment:
            scored, ended = self._generated(rollout, asked, None, len(asked), greedy=greedy)
            failures = self._failed_episodes(scored, ended)
        else:
            scored, failures = self._answers(rollout, asked, greedy=greedy)
        self._measure_engines(rollout, counted=not greedy)
        return self._completed(scored, failures, prefix or (REWARD if greedy else "reward"))

    @property
    def unscored(self) -> bool:
        """True if nothing scores samples: the run learns from a teacher alone."""
        return self.roles.reward is None and self.roles.reward_model is None and not self.recipe.scores

    def _measure_engines(self, rollout: WorkerGroup, *, counted: bool = True) -> None:
        """Add what drafts saved and the KV caches held since the last call, if it is to be counted."""
        counts = rollout.engine_counts()
        measure_engines(self.metrics, counts if counted else [], drafts=self.recipe.rollout.speculate != "off")
        if any(EngineCounts(*count).lost for count in counts) and "drafter" not in self._reported:
            self._reported.add("drafter")
            self.say("a process of rollout.draft.apart was lost: completions stay what they are, with fewer drafts")

    def ask_engines(self, call: Callable[[WorkerGroup], T]) -> T | None:
        """Return what a call of the engines answers beside what they generate; None if they cannot."""
        return call(self._engines())

    def _engines(self) -> WorkerGroup:
        """Return the rollout role. RecipeError without one."""
        if self.roles.rollout is None:
            raise RecipeError(
                f"flow={self.recipe.flow} without a reward generates nothing; set reward.function",
                key="reward.function",
            )
        return self.roles.rollout

    def _completed(self, scored: Batch, failures: dict[int, dict[str, Any]], prefix: str) -> Batch:
        """Add what models make of samples that the reward function has scored, and count what is missing."""
        roles = self.roles
        if roles.reward_model is not None:
            scored = roles.reward_model.rate(scored, alone=roles.reward is None)
        if self.recipe.grades:
            scored = self._graded(scored)
        self.state.graded |= is_graded(scored)
        missing = 0.0 if self.unscored else float(np.isnan(scored["reward"]).sum())
        self.metrics.add(f"{prefix}/missing", missing)
        self.metrics.add("reward/timeout", float(sum(o["status"] == "timeout" for o in failures.values())))
        if self.recipe.flow_spec.samples:
            check_parts(self.algorithm, scored)
        return scored

    def _graded(self, batch: Batch) -> Batch:
        """Add the judge's scores to the rewards; report what it gave none for."""
        roles = self.roles
        assert roles.judge is not None
        alone = roles.reward is None and roles.reward_model is None and not self.recipe.rollout.environment
        self.progress.at("grading")
        known = roles.judge.settle(samples_of(batch))
        found = roles.judge.grade(roles["loader"].texts(batch), alone=alone, known=known)
        columns = {name: found[name] for name in ("reward", OUTCOME, GRADE)}
        failures = roles.judge.failures()
        if roles.reward is None:  # else the journal holds the function's outcomes of these samples
            self._note_missing(batch.with_rows(**columns), failures)
        self._report_failures(failures, len(batch), set())
        return batch.with_rows(**columns)

    def _answers(self, rollout: WorkerGroup, asked: Batch, *, greedy: bool) -> tuple[Batch, dict[int, dict[str, Any]]]:
        """Return generated answers with their rewards, and the outcomes of missing ones by trajectory id."""
        reward, rows = self.roles.reward, self._rewards_of_call(len(asked))
        batch, _ = self._generated(rollout, asked, reward, max(1, rows // 2), greedy=greedy)
        return (batch, {}) if reward is None else self._score(reward, batch, rows)

    def _rewards_of_call(self, count: int) -> int:
        """Return so few rows that a call of the reward ends within half of ``cluster.timeout`` even if every reward
        times out. count: of all rows."""
        how, limit = self.recipe.reward, self.recipe.cluster.timeout / 2
        inline = self.recipe.cluster.backend == "inline"
        return max(1, count if inline else how.workers * int(limit / how.timeout))

    def _generated(
        self, rollout: WorkerGroup, asked: Batch, reward: WorkerGroup | None, most: int, *, greedy: bool
    ) -> tuple[Batch, Mapping[int, Ended]]:
        """Return generated answers or episodes, and how each sample has ended. The reward scores ``most`` of what has
        finished at once."""
        asked = resolved(self._load(asked, **self.then()))
        scorers = self._scorers(rollout, reward, most)
        generation = Generation(rollout, scorers, lambda n: self.progress.at(self.progress.now.what, n, len(asked)))
        if CARRIED not in asked.rows:
            with self.alone():
                generation.run(asked, greedy=greedy, ahead=None if greedy else self._ahead())
                return generation.collect(asked["id"]), generation.ended
        batch = generation.collect(self._whole_groups(generation, asked))
        rollout.keep(self.state.step + 1, self.journal.oldest)
        return batch, generation.ended

    def _load(self, asked: Batch, **then: np.ndarray) -> Batch:
        """Return rows with what engines get: the tokens of prompts, or the records that begin episodes; lazy."""
        loader = self.roles["loader"]
        load = loader.begin if self.recipe.rollout.environment else loader.encode
        found: Batch = load(asked, **then)
        return found

    def _failed_episodes(self, scored: Batch, ended: Mapping[int, Ended]) -> dict[int, dict[str, Any]]:
        """Report the episodes of a batch that have no reward, and return why, by trajectory id."""
        ids = [i for i in scored["id"].tolist() if ended[i].failure is not None]
        failures = {i: dict(ended[i].failure or {}) for i in ids}
        self._note_missing(scored, failures)
        self._report_failures(failures, len(scored), set())
        check_turn_rewards(self.algorithm, scored)
        return failures

    def _scorers(self, rollout: WorkerGroup, reward: WorkerGroup | None, most: int) -> Scorers | None:
        """Return the roles that score what has finished while others are generated; None without any."""
        judge = self.roles.judge if self.recipe.grades else None
        scorers = Scorers(reward, judge, partial(self.journal.known, self.state.step), most)
        if not self._scores:  # roles that were kept may have samples of an attempt that has failed
            scorers.forget()
        self._scores = True
        if judge is not None and not apart(judge, rollout):
            scorers = scorers._replace(judge=None)
        return None if scorers.reward is None and scorers.judge is None else scorers

    # ---- beside training, where samples may be behind (``async_sampler``) ----

    def alone(self) -> AbstractContextManager[None]:
        """Return a block in which the engines generate nothing else."""
        return nullcontext()

    def generating(self) -> AbstractContextManager[None]:
        """Return a block in which the engines generate ahead; outside of it, from then on, only where a step waits."""
        return nullcontext()

    def published(self, version: int) -> None:
        """Note that the engines have the policy of this version."""

    def leave(self) -> None:
        """End what is in flight, at the end of a phase."""

    def halt(self) -> None:
        """End the rounds of the engines: the run ends, or returns to an earlier state. EngineError [replicas.mend] if
        another thread still replaces an engine's worker."""

    def _score(self, reward: WorkerGroup, batch: Batch, rows: int) -> tuple[Batch, dict[int, dict[str, Any]]]:
        """Return the scored batch, and the outcomes of missing rewards by trajectory id. rows: of one call."""
        parts, failures, replayed = list[Batch](), dict[int, dict[str, Any]](), set[int]()
        for start in range(0, max(len(batch), 1), rows):
            self.progress.at("scoring", start, len(batch))
            some = batch.select(np.arange(start, min(start + rows, len(batch))))
            known = self.journal.known(self.state.step, some)
            parts.append(reward.score(some, known=known))
            failures |= reward.failures()
            replayed |= known.keys()
        if self._reward_log is not None and self._reward_log.exists():
            self.say(f"the reward function's output is in {self._reward_log}")
            self._reward_log = None
        scored = concat(parts) if len(parts) > 1 else parts[0]
        self._report_failures(failures, len(scored), replayed)
        self.journal.write(self.state.step, scored, failures)
        return scored, failures

    def _note_missing(self, scored: Batch, failures: dict[int, dict[str, Any]]) -> None:
        """Write missing rewards with their reasons to the journal, which such a step never asks for outcomes."""
        missing = np.isin(scored["id"], np.array(list(failures), np.int64))
        self.journal.write(self.state.step, scored.select(missing & np.isnan(scored["reward"])), failures)

    def _report_failures(self, failures: dict[int, dict[str, Any]], asked: int, replayed: set[int]) -> None:
        """Log each new reason once; raise RewardError for a reward that has never worked."""
        if not failures:
            self._reward_worked |= asked > 0
            return
        reason = commonest(one["reason"] for one in failures.values())
        if 0 < asked - len(replayed) == len(failures.keys() - replayed) and not self._reward_worked:
            raise RewardError(
                f"all of the first {asked} rewards are missing; most often: {reason}", key="reward.function"
            )
        self._reward_worked |= len(failures) < asked
        if reason not in self._reported:
            self._reported.add(reason)
            self.say(f"{len(failures)} of {asked} rewards are missing and left out; most often: {reason}")
