"""What is measured on what is held out: right answers, rewards, likelihood of texts, order of pairs."""

import math
from collections.abc import Sized
from typing import Protocol

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.controller.leases import LeasedStore
from tilth.config.schema import Recipe
from tilth.core.batch import Batch
from tilth.roles.experience import outcome
from tilth.runs.metrics import Metrics
from tilth.trace.spans import span

LOSS, PAIRS = "loss/heldout", "accuracy/pairs"
ACCURACY, REWARD = "accuracy/heldout", "reward/heldout"


class Measured(Protocol):
    """What of a run this looks at."""

    recipe: Recipe
    policy: WorkerGroup
    reference: WorkerGroup | None
    store: LeasedStore
    metrics: Metrics

    @property
    def heldout(self) -> Sized:
        """What is held out."""
        ...

    @property
    def loader(self) -> WorkerGroup:
        """What makes payload of it."""
        ...

    def chosen(self) -> np.ndarray:
        """What of it every evaluation is about: indices int64."""
        ...


def figures(known: Batch, *, graded: bool) -> dict[str, float]:
    """The mean outcome of answers, under the names that are true of it; none where nothing has an outcome.

    It is an accuracy if all outcomes are right or wrong, and not graded.
    """
    outcomes = outcome(known)[~np.isnan(outcome(known))]
    names = (REWARD,) if graded else (ACCURACY, REWARD)
    return dict.fromkeys(names, float(outcomes.mean(dtype=np.float64))) if len(outcomes) else {}


def is_graded(scored: Batch) -> bool:
    """Whether an answer is neither right (1) nor wrong (0)."""
    outcomes = outcome(scored)
    return not np.isin(outcomes[~np.isnan(outcomes)], (0.0, 1.0)).all()


def measure(run: Measured) -> tuple[str, float | None]:
    """The metric that tells how good the model is, and its value; None where nothing is held out."""
    if not len(run.heldout):
        return LOSS, None
    with span("evaluate"), run.store.scope():
        return (PAIRS, _order(run)) if run.recipe.flow_spec.learns == "pairs" else (LOSS, _likelihood(run))


def _likelihood(run: Measured) -> float:
    """Mean negative log-likelihood of what is held out, in nats per token.

    Of documents also in bits per byte: the same sum over the bytes of the text that those tokens stand for.
    """
    documents, loader = run.recipe.flow_spec.learns == "documents", run.loader
    batch = loader.documents(run.chosen(), heldout=True) if documents else loader.examples(run.chosen())
    found = run.policy.likelihood(batch)["loss"]
    run.metrics.add(LOSS, float(found))
    if documents and (size := int(batch["bytes"].sum())):
        run.metrics.add("bits_per_byte/heldout", float(found.total) / math.log(2) / size)
    return float(found)


def _order(run: Measured) -> float:
    """Share of the held-out pairs in which the chosen answer is ahead; their loss beside it."""
    batch = run.loader.pairs(run.chosen())
    if run.reference is not None:
        batch = run.reference.logprobs(batch)
    found = run.policy.prefers(batch, run.recipe.preference)
    run.metrics.add("loss/pairs", float(found["loss"]))
    run.metrics.add(PAIRS, float(found["rewards/accuracy"]))
    return float(found["rewards/accuracy"])
