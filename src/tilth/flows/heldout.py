"""Measure a run: accuracy, rewards and losses on held-out data, probes of the engine, greedy baselines."""

import math
from collections.abc import Callable

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.controller.leases import LeasedStore
from tilth.config.schema import Recipe
from tilth.core.batch import Batch
from tilth.core.errors import DataError
from tilth.core.random import stream
from tilth.flows.generation import Generation
from tilth.flows.measured import figures, measure_parts, outcomes, uncertainty
from tilth.flows.roles import Roles
from tilth.flows.sampler import Sampler, Split
from tilth.flows.weight_sync import SyncBounds, check_mismatch
from tilth.rl.passk import wilson
from tilth.roles.rollout import ask
from tilth.runs.metrics import Metrics
from tilth.runs.readers import ACCURACY, REWARD
from tilth.runs.state import WARMUP, RunState, is_supervised
from tilth.trace.spans import span

LOSS, PAIRS = "loss/heldout", "accuracy/pairs"
EVALUATION_IDS = -(2**40)
PROBE_IDS = 2 * EVALUATION_IDS
BASELINE_IDS = 3 * EVALUATION_IDS
"""First trajectory ids of evaluations, probes and baselines. Training counts up from 0, so all four ranges are disjoint
and no sample takes another's random numbers."""
PROBES = 8
"""Prompts of a probe."""


class Evaluator:
    """Evaluate the policy on the same held-out data each time, and track the best evaluation of the run."""

    def __init__(
        self,
        recipe: Recipe,
        roles: Roles,
        sampler: Sampler,
        heldout: Split,
        store: LeasedStore,
        state: RunState,
        metrics: Metrics,
        refresh: Callable[[], None],
    ) -> None:
        """refresh: sync the engine's weights if they are older than the policy's."""
        self.recipe, self.roles, self.sampler, self.heldout = recipe, roles, sampler, heldout
        self.store, self.state, self.metrics, self._refresh = store, state, metrics, refresh
        self.improved = False
        """The newest evaluation is the best one, and no checkpoint has it yet."""
        self._results: dict[int, dict[str, float]] = {}

    def evaluate_heldout(self) -> None:
        """Measure answers where there is a reward, and the loss in a supervised phase; update ``state.best``.

        Among equal evaluations the earliest is the best. An evaluation before the first step is never the best.
        """
        state = self.state
        state.accuracy_last = accuracy = self.evaluate()
        metric, value = ACCURACY, None
        if state.phase != WARMUP and is_supervised(state.phase):
            metric, value = self.measure()
        if self.roles.rollout is not None:
            metric, value = REWARD if state.graded else ACCURACY, accuracy
        elif value is not None:
            self._results.setdefault(state.step, {})[metric] = value
        if value is None or not state.step:
            return
        best, sign = state.best, -1 if metric == LOSS else 1
        if best is None or best["metric"] != metric or sign * value > sign * best["value"]:
            state.best, self.improved = {"step": state.step, "metric": metric, "value": value}, True

    def evaluate(self) -> float | None:
        """Return accuracy or mean reward of greedy answers to the held-out prompts: the first of ``figures``.

        None, and no metric, if nothing can be generated or scored, nothing is held out or every reward is missing.
        """
        if self.roles.rollout is None or not len(self.heldout) or self.sampler.unscored:
            return None
        self._refresh()
        with span("evaluate"), self.store.scope():
            batch = self.sampler.generate_and_score(ask(self.chosen().tolist(), 1, EVALUATION_IDS), greedy=True)
            known = batch.select(~np.isnan(batch["reward"]))
            measure_parts(self.metrics, known, REWARD)
            found = figures(known, graded=self.state.graded)
            if not found:
                return None
            self.state.outcomes = outcomes(known)
        found |= uncertainty(self.state.outcomes, self.state.outcomes_first, self.recipe.seed)
        self.state.heldout = found
        self._results.setdefault(self.state.step, {}).update(found)
        self.repeat()
        return next(iter(found.values()))

    def repeat(self) -> None:
        """Add the figures of the newest evaluation to the metrics of the current step."""
        for name, value in self.state.heldout.items():
            self.metrics.add(name, value)

    def results(self) -> dict[int, dict[str, float]]:
        """Return the evaluations since the last call: step -> metric -> value."""
        found, self._results = self._results, {}
        return found

    def chosen(self) -> np.ndarray:
        """Return the indices, int64, of the held-out prompts or pieces that every evaluation uses."""
        count = min(self.recipe.run.eval_prompts, len(self.heldout))
        return self.heldout.take(stream(self.recipe.seed, "heldout"), 0, count)

    # ---- without generation ----

    def measure(self) -> tuple[str, float | None]:
        """Return the metric that tells how good a supervised model is, and its value; None if nothing is held out."""
        if not len(self.heldout):
            return LOSS, None
        self.sampler.progress.at("evaluating")
        with span("evaluate"), self.store.scope():
            return (PAIRS, self._order()) if self.recipe.flow_spec.learns == "pairs" else (LOSS, self._likelihood())

    def _likelihood(self) -> float:
        """Return the mean negative log-likelihood in nats per token.

        For documents, also add bits per byte: the summed likelihood over the bytes of the text of those tokens.
        """
        documents, loader = self.recipe.flow_spec.learns == "documents", self.roles["loader"]
        batch = loader.documents(self.chosen(), heldout=True) if documents else loader.examples(self.chosen())
        found = self.roles.policy.likelihood(batch)["loss"]
        self.metrics.add(LOSS, float(found))
        if documents and (size := int(batch["bytes"].sum())):
            self.metrics.add("bits_per_byte/heldout", float(found.total) / math.log(2) / size)
        return float(found)

    def _order(self) -> float:
        """Return the share of pairs in which the chosen answer is ahead; add it and the loss of the pairs."""
        batch = self.roles["loader"].pairs(self.chosen())
        if self.roles.reference is not None:
            batch = self.roles.reference.logprobs(batch)
        found = self.roles.policy.pair_eval(batch, self.recipe.preference)
        self.metrics.add("loss/pairs", float(found["loss"]))
        right = found["rewards/accuracy"]
        self.metrics.add(PAIRS, float(right))
        own = wilson(float(right.total), round(float(right.count)))
        self.metrics.add(f"{PAIRS}/low", own.low)
        self.metrics.add(f"{PAIRS}/high", own.high)
        return float(right)

    # ---- beside training ----

    def probe(self, policy: WorkerGroup, bounds: SyncBounds) -> None:
        """Compare log-probs of engine and policy on answers to a few prompts; LogprobMismatch beyond the bound."""
        train = self.sampler.train
        if self.roles.rollout is None or not len(train):
            return
        with span("verify"), self.store.scope():
            indices = self._probes()
            asked = self.roles["loader"].encode(ask(indices.tolist(), 1, PROBE_IDS))
            generation = Generation(self.roles.rollout)
            with self.sampler.alone():
                generation.run(asked)
                found = generation.collect(asked["id"])
            check_mismatch(policy.compare(found), bounds, self.state.step - 1)

    def _probes(self) -> np.ndarray:
        """Return indices of a few prompts, fewer where a source of the mixture ends before that, int64."""
        train = self.sampler.train
        count = min(PROBES, len(train))
        while True:
            try:
                return train.take(stream(self.recipe.seed, "probe"), 0, count)
            except DataError:  # the run, which may draw less of it, is checked by its own streams
                if count == 1:
                    raise
                count //= 2

    def baselines(self, batch: Batch) -> Batch:
        """Add the row column ``baselines``: reward of the greedy answer to each row's prompt, NaN where missing."""
        prompts, place = np.unique(batch["prompt"], return_inverse=True)
        asked = ask(prompts.tolist(), 1, BASELINE_IDS)
        greedy = self.sampler.generate_and_score(asked, greedy=True, prefix="baseline")
        known = greedy["reward"][~np.isnan(greedy["reward"])]
        if len(known):
            self.metrics.add("baseline/mean", float(known.mean(dtype=np.float64)), len(known))
            self.metrics.add("tokens/baseline", float(greedy["completion"].sum()))
        return batch.with_rows(baselines=greedy["reward"][place])
