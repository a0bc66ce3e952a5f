"""Preference learning: policy (DPO) and reward model (Bradley-Terry) on pairs of chosen and rejected answers, and
scoring.

A pair's loss needs the scores of both its answers, whose tokens may lie in different micro-batches or on different
workers. Each update has two passes: one without a gradient computes all scores, gathered on every worker; the second
takes the gradient of a sum of log-probs (values) weighted by the derivatives of the loss by the scores. That is the
exact gradient of the loss of the whole batch, whatever the split.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tilth.rl as rl
from tilth.cluster.protocol import transfer
from tilth.config.schema import PreferenceConfig
from tilth.core.batch import Batch, Jagged, Store
from tilth.core.errors import TilthError
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel
from tilth.plan.batch import MicroBatchPlan
from tilth.rewards.functions import LARGEST
from tilth.rl.packing import Gather
from tilth.rl.preference import PreferenceResult
from tilth.roles.experience import OUTCOME, check_identity, of_pass, on_rows, row_names
from tilth.roles.objective import Scores, account, check_weight, forward, is_first_data_rank
from tilth.roles.policy import PolicyWorker
from tilth.roles.state import Learner
from tilth.training.engine import Loss, TrainEngine
from tilth.training.noise import WEIGHT
from tilth.training.packed import MicroBatch, packed_logprobs, packed_ratings

Metrics = dict[str, rl.Metric]
SLOPE, SHARE = "slope", "share"
CHOSEN = 1
"""Row column ``side`` of a chosen answer; of a rejected one it is 0."""


class PairError(TilthError):
    """Answers that are not pairs of a chosen and a rejected one: some are missing or repeated."""


@dataclass(frozen=True)
class PairTable:
    """Answers of all workers as pairs. Row columns [2m], sorted by pair, the rejected answer before the chosen one."""

    rows: dict[str, np.ndarray]

    @classmethod
    def of(cls, own: dict[str, np.ndarray], gather: Gather) -> "PairTable":
        """Gather every worker's answers: pair, side, prompt, score, reference, count, margin [n]; a collective call.

        PairError names a pair that is not one chosen and one rejected answer.
        """
        every = gather(own)
        order = np.lexsort((every["side"], every["pair"]))
        rows = {name: column[order] for name, column in every.items()}
        pair, side = rows["pair"], rows["side"]
        if len(pair) == 2 * len(np.unique(pair)) and not side[::2].any() and (side[1::2] == CHOSEN).all():
            return cls(rows)
        number, sides = next((n, two) for n in np.unique(pair) if (two := side[pair == n].tolist()) != [0, CHOSEN])
        raise PairError(
            f"pair {number} of the batch has {sides.count(CHOSEN)} chosen and {sides.count(0)} rejected answers, "
            "not one of each: a part of the batch is missing or was passed twice",
            key=f"pair.{number}",
        )

    def __len__(self) -> int:
        return len(self.rows["pair"]) // 2

    def sides(self, name: str) -> tuple[Tensor, Tensor]:
        """A column of the chosen and of the rejected answers: [m] each."""
        column = torch.from_numpy(np.ascontiguousarray(self.rows[name]))
        return column[CHOSEN::2], column[::2]

    @cached_property
    def weights(self) -> Tensor:
        """Weight of each pair, float64 [m]: see ``rl.pair_weights``."""
        return rl.pair_weights(self.sides("prompt")[0])

    def loss(self, how: PreferenceConfig) -> PreferenceResult:
        """Return the recipe's loss of all pairs."""
        chosen, rejected = self.sides("score")
        return rl.preference_loss(
            how.loss,
            chosen=chosen,
            rejected=rejected,
            counts=self.sides("count"),
            reference=self.sides("reference"),
            margins=self.sides("margin")[0],
            weights=self.weights,
            sft=how.sft,
            **how.options,
        )

    def of_rows(self, pair: np.ndarray, side: np.ndarray, chosen: Tensor, rejected: Tensor) -> np.ndarray:
        """Return values of pairs' sides [m] at the rows with these pairs and sides [n]: float64 [n]."""
        at = np.searchsorted(self.rows["pair"][::2], pair)
        return np.where(side == CHOSEN, chosen.numpy()[at], rejected.numpy()[at]) if len(self) else np.zeros(0)


class PairLearner:
    """Base of roles that learn from pairs: a train engine and a score for each answer."""

    engine: TrainEngine
    store: Store
    grid: ParallelDims
    what: str
    """Attribute of a micro-batch that scores are sums of: logprobs or values."""

    def _scores(self, tokens: Jagged, mask: np.ndarray, plan: MicroBatchPlan | None = None) -> np.ndarray:
        """Return the score of each answer, float64 [n]; no gradient."""
        raise NotImplementedError

    def _slopes(self, tokens: Jagged, mask: np.ndarray, slopes: np.ndarray) -> np.ndarray:
        """Return the loss's derivatives by tokens, float32 [N], from those by the scores [n]."""
        raise NotImplementedError

    @transfer(split="plan", gather="merge", dropout=True)
    def pair_step(self, batch: Batch, how: PreferenceConfig, *, plan: MicroBatchPlan | None = None) -> Metrics:
        """Run one optimizer step of the preference loss on the whole batch of pairs."""
        with on_rows("update", batch) as spent:
            tokens, mask, table = self._read(batch, plan)
            found = table.loss(how)
            slopes = table.of_rows(batch["pair"], batch["side"], found.chosen, found.rejected)
            halves = table.of_rows(batch["pair"], batch["side"], table.weights / 2, table.weights / 2)
            per_token = {SLOPE: self._slopes(tokens, mask, slopes), SHARE: _at(_last(tokens, mask), halves, len(mask))}
            more: dict[str, Any] = {"starts": batch.rows.get("start"), "names": row_names(batch), "plan": plan}
            done = self.engine.update(tokens, mask, per_token, linear(self.what), entropy=False, **more)
            spent.set(flops=done.flops * 4 / 3)  # the scores took a forward pass more, a third of both
            check_weight(done.metrics, float(len(table) > 0), self.grid)
        return account(done, self.grid) | self._measured(found)

    @transfer(split="plan", gather="merge", reads=True)
    def pair_eval(self, batch: Batch, how: PreferenceConfig, *, plan: MicroBatchPlan | None = None) -> Metrics:
        """Return the metrics of ``pair_step`` without learning from the pairs."""
        return self._measured(self._read(batch, plan)[2].loss(how))

    def _read(self, batch: Batch, plan: MicroBatchPlan | None) -> tuple[Jagged, np.ndarray, PairTable]:
        columns = batch.read(self.store, "tokens", "mask", *(c for c in ("ref_logprobs",) if c in batch.payload))
        tokens, mask = columns["tokens"], columns["mask"].values
        check_identity(batch, tokens)
        own = {name: batch[name] for name in ("pair", "side", "prompt", "margin")}
        own["score"] = self._scores(tokens, mask, plan)
        own["count"] = _row_sums(mask, tokens)
        theirs = columns.get("ref_logprobs")
        own["reference"] = np.zeros(len(batch)) if theirs is None else _row_sums(theirs.values, tokens)
        return tokens, mask, PairTable.of(own, self.grid.gather_rows)

    def _measured(self, found: PreferenceResult) -> Metrics:
        """Return metrics of all pairs on the first data rank only."""
        if not is_first_data_rank(self.grid) or not len(found.losses):
            return {}
        numbers = {name: rl.Metric(float(m.total), float(m.count), m.reduction) for name, m in found.metrics.items()}
        return numbers | {
            "loss": rl.Metric(float(found.loss), 1, "mean"),
            "pairs": rl.Metric(len(found.losses), 1, "sum"),
        }


class PairPolicyWorker(PairLearner, PolicyWorker):
    """A policy that learns from pairs: the score of an answer is the sum of its tokens' log-probs."""

    what = "logprobs"

    def _scores(self, tokens: Jagged, mask: np.ndarray, plan: MicroBatchPlan | None = None) -> np.ndarray:
        return _row_sums(forward(self.engine, packed_logprobs, tokens, mask, plan=plan), tokens)

    def _slopes(self, tokens: Jagged, mask: np.ndarray, slopes: np.ndarray) -> np.ndarray:
        return (np.repeat(slopes, tokens.lengths) * (mask != 0)).astype(np.float32)


class RewardModelWorker(PairLearner, Learner):
    """A value model that learns what is better: the score of an answer is its value after its last token."""

    what = "values"

    def __init__(self, engine: TrainEngine, store: Store) -> None:
        """engine: of a value model, with the scorer ``rate``."""
        super().__init__(engine, "reward_model", "optimizer", based=True)
        self.store = store

    def _scores(self, tokens: Jagged, mask: np.ndarray, plan: MicroBatchPlan | None = None) -> np.ndarray:
        return ratings(self.engine, tokens, mask, plan=plan)

    def _slopes(self, tokens: Jagged, mask: np.ndarray, slopes: np.ndarray) -> np.ndarray:
        return _at(_last(tokens, mask), slopes, len(mask))


def ratings(owner: Scores, tokens: Jagged, mask: np.ndarray, **how: Any) -> np.ndarray:
    """Return the value after the last token in the mask of each sequence, float64 [n]; NaN if the mask has no token.

    owner: of a value model; how: ``plan`` and ``columns`` of ``packed_ratings``.
    """
    found = forward(owner, packed_ratings, tokens, mask, **how)
    last = _last(tokens, mask)
    return np.where(last >= 0, found[last].astype(np.float64) if len(found) else np.nan, np.nan)


def linear(what: str) -> Loss:
    """The sum of a micro-batch's numbers, each times its slope: the gradient of what the slopes are derivatives of."""

    def loss(micro: MicroBatch) -> tuple[Tensor, Metrics]:
        value = (getattr(micro, what) * micro.columns[SLOPE]).sum()
        return value, {WEIGHT: rl.Metric(float(micro.columns[SHARE].sum(dtype=torch.float64)), 1, "sum")}

    return loss


def _row_sums(values: np.ndarray, tokens: Jagged) -> np.ndarray:
    """Sum over each row of a column [N] that is 0 where it does not count: float64 [n]."""
    rows = zip(tokens.offsets, tokens.offsets[1:])
    return np.array([values[a:b].sum(dtype=np.float64) for a, b in rows], np.float64)


def _last(tokens: Jagged, mask: np.ndarray) -> np.ndarray:
    """Index of the last token in the mask of each row, int64 [n]; -1 where there is none."""
    places = np.where(mask != 0, np.arange(len(mask)), -1)
    return np.array([places[a:b].max(initial=-1) for a, b in zip(tokens.offsets, tokens.offsets[1:])], np.int64)


def _at(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Values [n] at their places, 0 elsewhere: float32 [size]."""
    found = np.zeros(size, np.float32)
    found[index[index >= 0]] = values[index >= 0]
    return found


PART = "part/model"
"""Row column of the reward model's score."""


class RatingWorker(Scores):
    """Frozen reward model, loaded from the recipe's path, also after a resume."""

    def __init__(self, sharded: ShardedModel, store: Store, *, weight: float, micro_tokens: int, parity: bool) -> None:
        """sharded: of a value model; weight: of its score in the reward."""
        self.sharded, self.store = sharded, store
        self.weight, self.micro_tokens, self.parity = weight, micro_tokens, parity

    @transfer(split="plan", gather="rows", reads=True)
    def rate(self, batch: Batch, *, alone: bool, plan: MicroBatchPlan | None = None) -> Batch:
        """Add weight * score to the row column ``reward`` and the score as ``part/model``; NaN: missing.

        The score is the value after the last token that the policy chose, its end token or the last one before a cut.
        alone: there is no other reward, so that this is the ``outcome`` too. A reward that is missing stays so, and a
        score that is not finite makes it so, as does one that makes it too large (``rewards.LARGEST``).
        """
        with on_rows("score", batch):
            columns = batch.read(self.store, "tokens", "mask")
            check_identity(batch, columns["tokens"])
            given = of_pass(batch, self.store, columns["tokens"])
            found = ratings(self, columns["tokens"], columns["mask"].values, plan=plan, columns=given)
            found = np.where(np.isfinite(found), found, np.nan)
            before = np.zeros(len(batch)) if alone else batch["reward"].astype(np.float64)
            total = before + self.weight * found.astype(np.float64)
            reward = np.where(np.abs(total) <= LARGEST, total, np.nan).astype(np.float32)
            outcome = {OUTCOME: reward.copy()} if alone else {}
            return batch.with_rows(reward=reward, **outcome, **{PART: found.astype(np.float32)})
