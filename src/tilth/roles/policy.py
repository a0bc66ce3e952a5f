"""The policy role: the model that learns, its gradients and its weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tilth.rl as rl
from tilth.cluster.protocol import transfer
from tilth.config.errors import RecipeError
from tilth.core.batch import Batch, Jagged, Store
from tilth.core.random import stream
from tilth.plan.batch import MicroBatchPlan
from tilth.rl.algorithm import Algorithm
from tilth.rl.packing import Packing
from tilth.rl.rollout_correction import CorrectionRule, Corrector
from tilth.roles.experience import (
    CHUNK_TOKENS,
    NOT_BY_TOKEN,
    ROUTING,
    TURN_REWARDS,
    check_identity,
    is_right,
    media_of,
    of_pass,
    on_rows,
    put_like,
    put_mask,
    recorded_experts,
    row_names,
)
from tilth.roles.objective import RIGHT, Objective, account, check_weight, forward, gather_data_ranks, scored
from tilth.roles.state import Learner
from tilth.trace.spans import span
from tilth.training.engine import TrainEngine, UpdateResult, negative_log_likelihood
from tilth.training.packed import packed_logprobs, packed_squares

Metrics = dict[str, rl.Metric]


class PolicyWorker(Learner):
    """A train engine behind batches: reads its columns from the store, leaves new ones there."""

    def __init__(self, engine: TrainEngine, store: Store, *, temperature: float = 1.0) -> None:
        """temperature: of sampling, which log-probs share."""
        super().__init__(engine, "model", "optimizer", based=True)
        self.store, self.temperature = store, temperature
        self._corrections: Metrics = {}
        self._moved = False

    @transfer(split="rows", gather="rows")
    def advantages(self, batch: Batch, how: Algorithm) -> Batch:
        """Add the payload column ``advantages`` from the row columns reward and group, and ``values`` where they are.

        An estimator that makes targets for a critic adds ``returns`` too.
        """
        with span("advantages"):
            columns = batch.read(self.store, *(c for c in batch.payload if c not in NOT_BY_TOKEN))
            tokens = columns.pop("tokens")
            per_token = {name: _tensor(column.values) for name, column in columns.items()}
            lengths, mask = torch.from_numpy(tokens.lengths), per_token.pop("mask")
            if how.correction is not None and "weights" in how.estimator.takes:
                weights = self._correction(how.correction, {n: c.values for n, c in columns.items()}, tokens).weights
                per_token |= {} if weights is None else {"weights": weights}
            given = _columns(batch, how, per_token)
            found = rl.estimate(
                how.estimator,
                rewards=_rewards(batch, how, per_token, mask, lengths),
                lengths=lengths,
                mask=mask,
                groups=torch.from_numpy(batch["group"].copy()),
                **self._others(batch),
                **given,
            )
            if found.returns is not None:
                batch = put_like(batch, self.store, "returns", found.returns.numpy(), tokens)
            if not torch.equal(found.mask, mask != 0):  # rows that lack what the estimator needs are out of the loss
                columns["mask"] = Jagged(found.mask.numpy().astype(np.uint8), tokens.offsets)
                batch = put_mask(batch, self.store, "mask", columns["mask"].values, tokens)
            columns["advantages"] = Jagged(found.advantages.numpy(), tokens.offsets)
            batch = put_like(batch, self.store, "advantages", columns["advantages"].values, tokens)
            return self._corrected(batch, how, columns, tokens)

    def _corrected(self, batch: Batch, how: Algorithm, columns: Mapping[str, Jagged], tokens: Jagged) -> Batch:
        """Add the recipe's correction of the whole batch, once: ``weights`` and ``kept``, the mask without rejected
        tokens.

        The next update reports its metrics.
        """
        self._moved = False
        if how.correction is None:
            return batch
        found = self._correction(how.correction, {name: column.values for name, column in columns.items()}, tokens)
        self._corrections = dict(found.metrics)
        if found.weights is not None:
            batch = put_like(batch, self.store, "weights", found.weights.numpy(), tokens)
        return put_mask(batch, self.store, "kept", found.mask.numpy().astype(np.uint8), tokens)

    def _others(self, batch: Batch) -> dict[str, Any]:
        """Return the collectives of an estimator, if rows lie on several workers."""
        if self.grid.mesh.count("rows") == 1:
            return {}
        rows = torch.from_numpy(batch["row"].copy())
        return {"reduce": self._sum_rows, "gather": self.grid.gather_rows, "row": rows}

    def _sum_rows(self, vector: Tensor) -> Tensor:
        return self.grid.sum(vector, "rows")

    @transfer(split="plan", gather="rows", reads=True)
    def logprobs(self, batch: Batch, *, squares: bool = False, plan: MicroBatchPlan | None = None) -> Batch:
        """Add ``old_logprobs``: the policy before any update on this batch; needed when it is used more than once.

        squares: add ``sum_pi_squared`` too, at each token the sum over the vocabulary of squared probabilities.
        """
        run, names = (packed_squares, ["sum_pi_squared"]) if squares else (packed_logprobs, [])
        given: dict[str, Any] = {"temperature": self.temperature, "op": "logprobs", "plan": plan}
        if self.engine.experts.replay:
            given["routing"] = self._routing(batch)
        return scored(batch, self.store, self.engine, run, "old_logprobs", *names, **given)

    @transfer(split="plan", gather="merge", reads=True)
    def compare(self, batch: Batch, *, plan: MicroBatchPlan | None = None) -> Metrics:
        """Return ``mismatch/max``: the greatest difference between the policy's log-probs and those of the samples."""
        columns = self.logprobs(batch, plan=plan).read(self.store, "old_logprobs", "rollout_logprobs", "mask")
        own, theirs, mask = (columns[c].values for c in ("old_logprobs", "rollout_logprobs", "mask"))
        apart = np.abs(own - theirs)[mask != 0]
        worst = float(apart.max()) if len(apart) else 0.0
        return {"mismatch/max": rl.Metric(worst, len(apart), "max")}

    @transfer(split="plan", gather="merge", mask="kept")
    def update(self, batch: Batch, how: Algorithm, *, plan: MicroBatchPlan | None = None) -> Metrics:
        """Run one optimizer step of the policy loss on the whole batch; return sums for the metrics."""
        of_estimators = {"values", "returns", "sum_pi_squared", "versions", CHUNK_TOKENS, TURN_REWARDS}
        unused = {*NOT_BY_TOKEN, "tokens", *of_estimators}.difference(how.loss.needs)
        names = [c for c in batch.payload if c not in unused]
        with on_rows("update", batch) as spent:
            columns = batch.read(self.store, "tokens", *names)
            tokens = columns.pop("tokens")
            check_identity(batch, tokens)
            per_token = {name: column.values for name, column in columns.items()} | of_pass(batch, self.store, tokens)
            mask = per_token.pop("mask")
            mask = per_token.pop("kept", mask)
            if how.keys.nll_coef:
                per_token[RIGHT] = np.repeat(is_right(batch).astype(np.uint8), tokens.lengths)
            loss = Objective.of(
                how,
                mask,
                tokens,
                gather=gather_data_ranks(self.grid),
                thresholds=self._first_pass(batch, how, mask, tokens, per_token, plan),
                right=per_token.get(RIGHT),
            )
            done = self.engine.update(
                tokens,
                mask,
                per_token,
                loss,
                temperature=self.temperature,
                dropout=False,
                starts=batch.rows.get("start"),
                routing=self._routing(batch),
                names=row_names(batch),
                plan=plan,
            )
            spent.set(flops=done.flops)
            check_weight(done.metrics, loss.shared.whole, self.grid)
        measured, self._corrections = self._corrections, {}
        return self._compared(how, self._account(done)) | measured

    def _routing(self, batch: Batch) -> np.ndarray | None:
        """Return the experts that the engine chose, int64 [N, layers, k]; None if the batch has none, or none count.

        Raises RecipeError if they are to be replayed and are not there.
        """
        config = self.engine.model.config
        if config.num_experts and ROUTING in batch.payload:
            column = batch.read(self.store, ROUTING)[ROUTING]
            layers, chosen = len(config.expert_layers), config.experts_per_token
            return recorded_experts(column, layers, config.num_experts, chosen)
        if config.num_experts and self.engine.experts.replay:
            message = "train.routing = 'replay' needs choices of experts, which this generation engine does not record"
            raise RecipeError(
                f"{message}; use rollout.engine = 'native', or train.routing = 'own'", key="train.routing"
            )
        return None

    def _compared(self, how: Algorithm, metrics: Metrics) -> Metrics:
        """Drop the metrics of the mismatch if the policy was updated after the last weight sync."""
        moved, self._moved = self._moved, True
        if moved and how.bypass:
            return {name: metric for name, metric in metrics.items() if not name.startswith("mismatch/")}
        return metrics

    def _correction(self, rule: CorrectionRule, per_token: Mapping[str, np.ndarray], tokens: Jagged) -> rl.Correction:
        """Compute the correction; without advantages rejections by them are left out, which changes no weight."""
        names = ("old_logprobs", "advantages", "versions")
        known = {name: _tensor(per_token[name]) for name in names if name in per_token}
        if "advantages" not in known and isinstance(rule, Corrector):
            rule = rule.model_copy(update={"reject_negative": None, "second_moment": None})
        return rl.correct(
            rule,
            old_logprobs=known.get("old_logprobs"),
            rollout_logprobs=_tensor(per_token["rollout_logprobs"]),
            advantages=known.get("advantages"),
            versions=known.get("versions"),
            mask=_tensor(per_token["mask"]),
            lengths=torch.from_numpy(tokens.lengths),
            reduce=self._sum_rows,
        )

    def _first_pass(
        self,
        batch: Batch,
        how: Algorithm,
        mask: np.ndarray,
        tokens: Jagged,
        per_token: dict[str, np.ndarray],
        plan: MicroBatchPlan | None,
    ) -> dict[str, float] | None:
        """Run the loss's first pass over the whole batch, if it has one.

        Random numbers depend on the step and a token's place in the batch, so no layout changes them.
        """
        if not how.loss.first_pass:
            return None
        if "uniforms" in how.loss.needs:
            per_token["uniforms"] = self._uniforms(batch, tokens)
        replayed = self._routing(batch) if self.engine.experts.replay else None
        given: dict[str, Any] = {"temperature": self.temperature, "routing": replayed, "plan": plan}
        given["columns"] = of_pass(batch, self.store, tokens)
        now = forward(self.engine, packed_logprobs, tokens, mask, **given)
        uniforms = per_token.get("uniforms")
        return rl.thresholds(
            how.loss,
            logprobs=_tensor(now),
            old_logprobs=_tensor(per_token.get(how.ratio_to, now)),
            advantages=_tensor(per_token["advantages"]),
            mask=_tensor(mask),
            lengths=torch.from_numpy(tokens.lengths),
            uniforms=None if uniforms is None else _tensor(uniforms),
            reduce=self.grid.sum,
            gather=self.grid.gather_rows,
        )

    def _uniforms(self, batch: Batch, tokens: Jagged) -> np.ndarray:
        """Return random numbers in [0, 1), float32 [N]."""
        numbers = stream(self.engine.seed, "chosen", self.engine.updates)
        starts = batch.rows.get("start", tokens.offsets[:-1])
        parts = [numbers.uniform(int(s), int(n)).numpy() for s, n in zip(starts, tokens.lengths)]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)

    @transfer(split="plan", gather="merge", dropout=True)
    def sft_step(self, batch: Batch, *, plan: MicroBatchPlan | None = None) -> Metrics:
        """Run one supervised optimizer step: mean negative log-likelihood of the tokens in the mask."""
        with on_rows("update", batch) as spent:
            columns = batch.read(self.store, "tokens", "mask")
            mask = columns["mask"].values
            learned = self.grid.sum(torch.tensor([mask.sum()], dtype=torch.float64))
            loss = negative_log_likelihood(float(learned))
            more: dict[str, Any] = {"starts": batch.rows.get("start"), "names": row_names(batch), "plan": plan}
            media = media_of(batch, self.store)
            found = self.engine.update(columns["tokens"], mask, media, loss, entropy=False, **more)
            spent.set(flops=found.flops)
        return self._account(found)

    @transfer(split="plan", gather="merge", reads=True)
    def likelihood(self, batch: Batch, *, plan: MicroBatchPlan | None = None) -> Metrics:
        """Return the negative log-likelihood (nats) of the tokens in the mask as ``loss``; no gradient."""
        columns = batch.read(self.store, "tokens", "mask")
        mask = columns["mask"].values
        media = media_of(batch, self.store)
        with self.sharded.gradients.reducer.averaged():
            found = forward(self.engine, packed_logprobs, columns["tokens"], mask, columns=media, plan=plan)
        return {"loss": rl.Metric(-float(found.sum(dtype=np.float64)), float(mask.sum(dtype=np.int64)), "mean")}

    def _account(self, found: UpdateResult) -> Metrics:
        return account(found, self.grid) | {"loss": rl.Metric(found.loss, 1, "mean")}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and live parameters of a model that is whole in this process."""
        for name, parameter in self.engine.model.named_parameters():
            yield name, parameter.detach()


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


_COLUMN = {"logprobs": "old_logprobs"}
"""Columns with another name in a batch than in an estimator."""


def _columns(batch: Batch, how: Algorithm, per_token: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the columns that the estimator needs or takes: of tokens [N] and of rows [n]."""
    found: dict[str, Any] = {}
    for name in (*how.estimator.needs, *how.estimator.takes):
        if _COLUMN.get(name, name) in per_token:
            found[name] = per_token[_COLUMN.get(name, name)]
        elif name in batch.rows:
            found[name] = torch.from_numpy(batch[name].copy())
        elif name.startswith("part/"):  # no reward of this batch could be had
            found[name] = torch.full((len(batch),), torch.nan)
    return found


def _rewards(batch: Batch, how: Algorithm, columns: dict[str, Tensor], mask: Tensor, lengths: Tensor) -> Tensor:
    """Return rewards of rows; of tokens if turns have rewards of their own, or the recipe puts a KL penalty into
    them. The last token that counts gets what the turns of its row leave of the row's reward."""
    rewards, of_turns = torch.from_numpy(batch["reward"].copy()), columns.get(TURN_REWARDS)
    packing = Packing.of(lengths, mask)
    if of_turns is not None:
        rewards = rewards.double() - packing.sum(of_turns.double())
    if how.kl_in_reward:
        own, theirs = columns["old_logprobs"], columns["ref_logprobs"]
        rewards = rl.penalise(rewards, own, theirs, kl=how.keys.kl, coef=how.keys.kl_coef, mask=mask, lengths=lengths)
    elif of_turns is not None:
        alive = packing.counts > 0
        rewards = rewards.new_zeros(len(mask)).index_put((packing.ends[alive],), rewards[alive])
    return rewards if of_turns is None else rewards + of_turns.double()
