"""The policy role: the model that learns, its gradients and its weights."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tilth.rl as rl
from tilth.cluster.protocol import transfer
from tilth.config.schema import Algorithm
from tilth.core.batch import Batch, Ragged, Store
from tilth.core.checksum import checksum
from tilth.models.decoder import Decoder
from tilth.plan.flops import sequence_flops
from tilth.rl.registry import Kind
from tilth.roles.experience import check_identity, put_like
from tilth.roles.shares import Shares, check_weight
from tilth.trace.spans import span
from tilth.training.engine import Loss, TrainEngine, UpdateResult
from tilth.training.losses import negative_log_likelihood
from tilth.training.packed import Micro, packed_logprobs

Metrics = dict[str, rl.Metric]


class PolicyWorker:
    """A train engine behind batches: reads its columns from the store, leaves new ones there."""

    def __init__(self, engine: TrainEngine, store: Store, *, temperature: float = 1.0, norm_length: int = 1) -> None:
        """temperature: of sampling, so of log-probs too; norm_length: fixed length of Dr.GRPO's aggregation."""
        self.engine = engine
        self.store = store
        self.temperature = temperature
        self.norm_length = norm_length

    @transfer(split="all", gather="first")
    def begin(self, lr: float, total_steps: int) -> None:
        """Start a phase: fresh optimizer state, its own peak learning rate and length of schedule."""
        self.engine.begin(lr, total_steps)

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
                **options("advantages", how.advantage, how),
            )
            if found.returns is not None:
                batch = put_like(batch, self.store, "returns", found.returns.numpy(), columns["tokens"])
            return put_like(batch, self.store, "advantages", found.advantages.numpy(), columns["tokens"])

    @transfer(split="rows", gather="rows")
    def logprobs(self, batch: Batch) -> Batch:
        """Add ``old_logprobs``: the policy before any update on this batch; needed when it is used more than once."""
        return self.scored(batch, self.engine.model, "old_logprobs", "logprobs")

    def scored(self, batch: Batch, model: Decoder, column: str, op: str) -> Batch:
        """Add the log-probs of the chosen tokens under ``model`` as a payload column; ``op`` names its time."""
        with span(op, tokens=int(batch["length"].sum())):
            columns = batch.read(self.store, "tokens", "mask")
            values = packed_logprobs(
                model,
                columns["tokens"],
                columns["mask"].values,
                max_tokens=self.engine.micro_tokens,
                temperature=self.temperature,
                parity=self.engine.parity,
            )
            return put_like(batch, self.store, column, values, columns["tokens"])

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
            loss, weight = policy_loss(how, mask, tokens, self.norm_length)
            found = self.engine.update(tokens, mask, per_token, loss, temperature=self.temperature)
            spent.set(flops=self._flops(batch, found.computed))
            check_weight(found.metrics, weight)
        return self._account(found)

    @transfer(split="rows", gather="merge")
    def imitate(self, batch: Batch) -> Metrics:
        """One optimizer step of supervised learning: mean negative log-likelihood of the tokens in the mask."""
        with span("update", tokens=int(batch["length"].sum())) as spent:
            columns = batch.read(self.store, "tokens", "mask")
            mask = columns["mask"].values
            loss = negative_log_likelihood(float(mask.sum()))
            found = self.engine.update(columns["tokens"], mask, {}, loss, entropy=False)
            spent.set(flops=self._flops(batch, found.computed))
        return self._account(found)

    @transfer(split="rows", gather="merge")
    def likelihood(self, batch: Batch) -> Metrics:
        """Negative log-likelihood (nats) of the tokens in the mask, as ``loss``: sum and count; no gradient."""
        columns = batch.read(self.store, "tokens", "mask")
        mask = columns["mask"].values
        found = packed_logprobs(
            self.engine.model, columns["tokens"], mask, max_tokens=self.engine.micro_tokens, parity=self.engine.parity
        )
        return {"loss": rl.Metric(-float(found.sum(dtype=np.float64)), float(mask.sum(dtype=np.int64)), "mean")}

    def _flops(self, batch: Batch, computed: int) -> float:
        """Model FLOPs of the tokens that were computed, at the mean cost of the batch's tokens."""
        tokens = int(batch["length"].sum())
        return sequence_flops(self.engine.model.config, batch["length"]).both * computed / max(tokens, 1)

    def _account(self, found: UpdateResult) -> Metrics:
        return found.metrics | {
            "loss": rl.Metric(found.loss, 1, "mean"),
            "grad_norm": rl.Metric(found.grad_norm, 1, "mean"),
            "lr": rl.Metric(found.lr, 1, "mean"),
            "tokens/trained": rl.Metric(found.tokens, 1, "sum"),
            "steps/skipped": rl.Metric(float(found.skipped), 1, "sum"),
        }

    @transfer(split="all", gather="first")
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and live parameters."""
        for name, parameter in self.engine.model.named_parameters():
            yield name, parameter.detach()

    @transfer(split="all", gather="first")
    def compile_seconds(self) -> float:
        """Time that torch.compile and the first pass took; 0 if nothing was compiled."""
        return self.engine.compile_seconds

    @transfer(split="all", gather="first")
    def checksums(self, dtype: torch.dtype) -> dict[str, int]:
        """Checksum of each parameter as an engine of this dtype must hold it."""
        return {name: checksum(tensor.to(dtype)) for name, tensor in self.weights()}


class ReferenceWorker:
    """A frozen copy of the policy as it was when the phase began, for the KL penalty."""

    def __init__(self, policy: PolicyWorker) -> None:
        self.policy = policy
        self.model = copy.deepcopy(policy.engine.model).requires_grad_(False)

    @transfer(split="all", gather="first")
    def follow(self) -> None:
        """Take over the policy's weights of now."""
        self.model.load_state_dict(self.policy.engine.model.state_dict())

    @transfer(split="rows", gather="rows")
    def logprobs(self, batch: Batch) -> Batch:
        """Add ``ref_logprobs``."""
        return self.policy.scored(batch, self.model, "ref_logprobs", "reference")


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def options(kind: Kind, name: str, how: Algorithm) -> dict[str, Any]:
    """Those keys of the recipe's algorithm section that are options of this entry."""
    return {key: getattr(how, key) for key in rl.options(kind, name) if key in Algorithm.model_fields}


def policy_loss(how: Algorithm, mask: np.ndarray, tokens: Ragged, norm_length: int) -> tuple[Loss, float]:
    """The recipe's loss with the denominator of this whole batch, and the weight that all of its tokens have in it."""
    shares = Shares.of(how.aggregation, mask, tokens, norm_length)

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
