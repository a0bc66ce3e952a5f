"""The policy role: the model that learns, its gradients and its weights."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tilth.rl as rl
from tilth.cluster.protocol import transfer
from tilth.config.schema import Algorithm
from tilth.core.batch import Batch, Ragged, Store
from tilth.plan.flops import sequence_flops
from tilth.rl.registry import Kind
from tilth.roles.experience import check_identity, put_like
from tilth.roles.scoring import scored
from tilth.roles.shares import Everyone, Shares, alone, check_weight, everyone, leads
from tilth.roles.state import Learner
from tilth.trace.spans import span
from tilth.training.engine import Loss, TrainEngine, UpdateResult
from tilth.training.losses import negative_log_likelihood
from tilth.training.packed import Micro, packed_logprobs
from tilth.training.peak import measured_flops

Metrics = dict[str, rl.Metric]


class PolicyWorker(Learner):
    """A train engine behind batches: reads its columns from the store, leaves new ones there."""

    def __init__(self, engine: TrainEngine, store: Store, *, temperature: float = 1.0, norm_length: int = 1) -> None:
        """temperature: of sampling, so of log-probs too; norm_length: fixed length of Dr.GRPO's aggregation."""
        super().__init__(engine, "model", "optimizer")
        self.store = store
        self.temperature = temperature
        self.norm_length = norm_length

    @transfer(split="rows", gather="rows")
    def advantages(self, batch: Batch, how: Algorithm) -> Batch:
        """Add the payload column ``advantages`` from the row columns reward and group, and ``values`` where they are.

        An estimator that makes targets for a critic adds ``returns`` too.
        """
        with span("advantages"):
            columns = batch.read(self.store, *(c for c in ("tokens", "mask", "values") if c in batch.payload))
            found = rl.estimate(
                how.advantage,
                rewards=torch.from_numpy(batch["reward"].copy()),
                lengths=torch.from_numpy(columns["tokens"].lengths),
                mask=_tensor(columns["mask"].values),
                groups=torch.from_numpy(batch["group"].copy()),
                values=_tensor(columns["values"].values) if "values" in columns else None,
                **self._others(batch),
                **options("advantages", how.advantage, how),
            )
            if found.returns is not None:
                batch = put_like(batch, self.store, "returns", found.returns.numpy(), columns["tokens"])
            return put_like(batch, self.store, "advantages", found.advantages.numpy(), columns["tokens"])

    def _others(self, batch: Batch) -> dict[str, Any]:
        """How an estimator sees the rows of other workers, where there are any."""
        if self.grid.size("dp", "fsdp") == 1:
            return {}
        rows = torch.from_numpy(batch["row"].copy())
        return {"reduce": self.grid.sum, "gather": self.grid.gather_rows, "row": rows}

    @transfer(split="rows", gather="rows")
    def logprobs(self, batch: Batch) -> Batch:
        """Add ``old_logprobs``: the policy before any update on this batch; needed when it is used more than once."""
        return scored(batch, self.store, self.engine, self.temperature, "old_logprobs", "logprobs")

    @transfer(split="rows", gather="merge")
    def compare(self, batch: Batch) -> Metrics:
        """``mismatch/max``: the greatest difference between its log-probs and those that came with the samples."""
        columns = self.logprobs(batch).read(self.store, "old_logprobs", "rollout_logprobs", "mask")
        own, theirs, mask = (columns[c].values for c in ("old_logprobs", "rollout_logprobs", "mask"))
        apart = np.abs(own - theirs)[mask != 0]
        worst = float(apart.max()) if len(apart) else 0.0
        return {"mismatch/max": rl.Metric(worst, len(apart), "max")}

    @transfer(split="rows", gather="merge")
    def update(self, batch: Batch, how: Algorithm) -> Metrics:
        """One optimizer step of the policy loss on the whole batch; sums for the metrics."""
        names = [c for c in batch.payload if c not in ("text", "tokens", "values", "returns")]
        with span("update", tokens=int(batch["length"].sum())) as spent:
            columns = batch.read(self.store, "tokens", *names)
            tokens = columns.pop("tokens")
            check_identity(batch, tokens)
            per_token = {name: column.values for name, column in columns.items()}
            mask = per_token.pop("mask")
            loss, weight = policy_loss(how, mask, tokens, self.norm_length, everyone(self.grid))
            found = self.engine.update(
                tokens, mask, per_token, loss, temperature=self.temperature, starts=batch.rows.get("start")
            )
            spent.set(flops=self._flops(batch, found.computed))
            check_weight(found.metrics, weight, self.grid)
        return self._account(found)

    @transfer(split="rows", gather="merge")
    def imitate(self, batch: Batch) -> Metrics:
        """One optimizer step of supervised learning: mean negative log-likelihood of the tokens in the mask."""
        with span("update", tokens=int(batch["length"].sum())) as spent:
            columns = batch.read(self.store, "tokens", "mask")
            mask = columns["mask"].values
            learned = self.grid.sum(torch.tensor([mask.sum()], dtype=torch.float64))
            loss = negative_log_likelihood(float(learned))
            starts = batch.rows.get("start")
            found = self.engine.update(columns["tokens"], mask, {}, loss, entropy=False, starts=starts)
            spent.set(flops=self._flops(batch, found.computed))
        return self._account(found)

    @transfer(split="rows", gather="merge")
    def likelihood(self, batch: Batch) -> Metrics:
        """Negative log-likelihood (nats) of the tokens in the mask, as ``loss``: sum and count; no gradient."""
        columns = batch.read(self.store, "tokens", "mask")
        mask = columns["mask"].values
        found = packed_logprobs(
            self.engine.sharded,
            columns["tokens"],
            mask,
            max_tokens=self.engine.micro_tokens,
            parity=self.engine.parity,
        )
        return {"loss": rl.Metric(-float(found.sum(dtype=np.float64)), float(mask.sum(dtype=np.int64)), "mean")}

    def _flops(self, batch: Batch, computed: int) -> float:
        """Model FLOPs of the tokens that were computed, at the mean cost of the batch's tokens."""
        tokens = int(batch["length"].sum())
        return sequence_flops(self.engine.model.config, batch["length"]).both * computed / max(tokens, 1)

    def _account(self, found: UpdateResult) -> Metrics:
        padded = {"micro_batches/padded": rl.Metric(found.padded, 1, "sum")} if found.padded else {}
        return (
            found.metrics
            | padded
            | {
                "loss": rl.Metric(found.loss, 1, "mean"),
                "grad_norm": rl.Metric(found.grad_norm, 1, "mean"),
                "lr": rl.Metric(found.lr, 1, "mean"),
                "tokens/trained": rl.Metric(found.tokens, 1, "sum"),
                "steps/skipped": rl.Metric(float(found.skipped and leads(self.grid)), 1, "sum"),
            }
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and live parameters of a model that is whole in this process."""
        for name, parameter in self.engine.model.named_parameters():
            yield name, parameter.detach()

    @transfer(split="all", gather="all")
    def peak_flops(self) -> float:
        """What this worker's share of the machine can do, all workers measuring at once: FLOP/s."""
        return measured_flops(self.engine.device, self.engine.model.dtype)


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def options(kind: Kind, name: str, how: Algorithm) -> dict[str, Any]:
    """Those keys of the recipe's algorithm section that are options of this entry."""
    return {key: getattr(how, key) for key in rl.options(kind, name) if key in Algorithm.model_fields}


def policy_loss(
    how: Algorithm, mask: np.ndarray, tokens: Ragged, norm_length: int, everyone: Everyone = alone
) -> tuple[Loss, float]:
    """The recipe's loss with the denominator of the whole batch, and the weight that all of its tokens have in it."""
    shares = Shares.of(how.aggregation, mask, tokens, norm_length, everyone)

    def loss(micro: Micro) -> tuple[Tensor, Metrics]:
        found = rl.policy_loss(
            how.loss,
            logprobs=micro.logprobs,
            old_logprobs=micro.columns.get("old_logprobs", micro.logprobs.detach()),
            advantages=micro.columns["advantages"],
            mask=micro.mask,
            lengths=micro.lengths,
            ref_logprobs=micro.columns.get("ref_logprobs"),
            rollout_logprobs=micro.columns.get("rollout_logprobs"),
            aggregation=how.aggregation,
            denominator=shares.denominator,
            **shares.options,
            **options("losses", how.loss, how),
        )
        total = found.loss
        if how.entropy_coef:
            total = total - how.entropy_coef * shares.add_up(micro.entropy, micro)
        entropy = rl.Metric(float(micro.entropy.detach().sum()), float(micro.mask.sum()), "mean")
        return total, found.metrics | {"entropy": entropy} | shares.weight(micro)

    return loss, shares.whole
