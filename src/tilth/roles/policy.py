"""The policy role: the model that learns, its gradients and its weights."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

import tilth.rl as rl
from tilth.cluster.protocol import transfer
from tilth.config.schema import Algorithm
from tilth.core.batch import Batch, Ragged, Store
from tilth.core.checksum import checksum
from tilth.roles.experience import check_identity, put_like
from tilth.training.engine import Loss, TrainEngine, UpdateResult
from tilth.training.losses import negative_log_likelihood
from tilth.training.packed import Micro, packed_logprobs
from tilth.trace.spans import span

Sums = dict[str, float]


class PolicyWorker:
    """A train engine behind batches: reads its columns from the store, leaves new ones there."""

    def __init__(self, engine: TrainEngine, store: Store, *, temperature: float = 1.0) -> None:
        self.engine = engine
        self.store = store
        self.temperature = temperature
        self.version = 0

    @transfer(split="all", gather="first")
    def begin(self, lr: float, total_steps: int) -> None:
        """Start a phase: fresh optimizer state, its own peak learning rate and length of schedule."""
        self.engine.begin(lr, total_steps)

    @transfer(split="rows", gather="rows")
    def advantages(self, batch: Batch, how: Algorithm) -> Batch:
        """Add the payload column ``advantages`` from the row columns reward and group."""
        with span("advantages"):
            columns = batch.read(self.store, "tokens", "mask")
            found = rl.estimate(
                how.advantage,
                rewards=torch.from_numpy(batch["reward"].copy()),
                lengths=torch.from_numpy(columns["tokens"].lengths),
                mask=_tensor(columns["mask"].values),
                groups=torch.from_numpy(batch["group"].copy()),
                **rl.options(how.advantage, how.model_dump()),
            )
            return put_like(batch, self.store, "advantages", found.advantages.numpy(), columns["tokens"])

    @transfer(split="rows", gather="rows")
    def logprobs(self, batch: Batch) -> Batch:
        """Add ``old_logprobs``: the policy before any update on this batch; needed when it is used more than once."""
        with span("logprobs", tokens=int(batch["length"].sum())):
            columns = batch.read(self.store, "tokens", "mask")
            values = packed_logprobs(
                self.engine.model,
                columns["tokens"],
                columns["mask"].values,
                max_tokens=self.engine.micro_tokens,
                temperature=self.temperature,
                parity=self.engine.parity,
            )
            return put_like(batch, self.store, "old_logprobs", values, columns["tokens"])

    @transfer(split="rows", gather="sum")
    def update(self, batch: Batch, how: Algorithm) -> Sums:
        """One optimizer step of the policy loss on the whole batch; sums for the metrics."""
        names = [c for c in batch.payload if c not in ("text", "tokens")]
        with span("update", tokens=int(batch["length"].sum())):
            columns = batch.read(self.store, "tokens", *names)
            tokens = columns.pop("tokens")
            check_identity(batch, tokens)
            per_token = {name: column.values for name, column in columns.items()}
            mask = per_token.pop("mask")
            loss = policy_loss(how, mask, tokens)
            found = self.engine.update(tokens, mask, per_token, loss, temperature=self.temperature)
        return self._account(found)

    @transfer(split="rows", gather="sum")
    def imitate(self, batch: Batch) -> Sums:
        """One optimizer step of supervised learning: mean negative log-likelihood of the tokens in the mask."""
        with span("update", tokens=int(batch["length"].sum())):
            columns = batch.read(self.store, "tokens", "mask")
            mask = columns["mask"].values
            loss = negative_log_likelihood(float(mask.sum()))
            found = self.engine.update(columns["tokens"], mask, {}, loss, entropy=False)
        return self._account(found)

    def _account(self, found: UpdateResult) -> Sums:
        self.version += not found.skipped
        return found.sums | {
            "loss": found.loss,
            "grad_norm": found.grad_norm,
            "lr": found.lr,
            "tokens": float(found.tokens),
            "skipped": float(found.skipped),
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and live parameters."""
        for name, parameter in self.engine.model.named_parameters():
            yield name, parameter.detach()

    @transfer(split="all", gather="first")
    def checksums(self, dtype: torch.dtype) -> dict[str, int]:
        """Checksum of each parameter as an engine of this dtype must hold it."""
        return {name: checksum(tensor.to(dtype)) for name, tensor in self.weights()}


class ReferenceWorker:
    """A frozen copy of the first policy, for the KL penalty."""

    def __init__(self, policy: PolicyWorker, frozen: torch.nn.Module) -> None:
        self.policy = policy
        self.model = frozen.requires_grad_(False)

    @transfer(split="rows", gather="rows")
    def logprobs(self, batch: Batch) -> Batch:
        """Add ``ref_logprobs``."""
        engine, store = self.policy.engine, self.policy.store
        with span("reference", tokens=int(batch["length"].sum())):
            columns = batch.read(store, "tokens", "mask")
            values = packed_logprobs(
                self.model,  # type: ignore[arg-type]
                columns["tokens"],
                columns["mask"].values,
                max_tokens=engine.micro_tokens,
                temperature=self.policy.temperature,
                parity=engine.parity,
            )
            return put_like(batch, store, "ref_logprobs", values, columns["tokens"])


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def policy_loss(how: Algorithm, mask: np.ndarray, tokens: Ragged) -> Loss:
    """The recipe's loss with the denominator of this whole batch: policy term, KL penalty and entropy bonus."""
    lengths = _tensor(tokens.lengths)
    denominator = rl.denominator(how.aggregation, _tensor(mask), lengths)

    def aggregate(values: Tensor, micro: Micro) -> Tensor:
        return rl.aggregate(how.aggregation, values, micro.mask, micro.lengths, denominator)

    def loss(micro: Micro) -> tuple[Tensor, Sums]:
        columns = micro.columns
        old = columns.get("old_logprobs", micro.logprobs.detach())
        found = rl.policy_loss(
            how.loss,
            logprobs=micro.logprobs,
            old_logprobs=old,
            advantages=columns["advantages"],
            mask=micro.mask,
            lengths=micro.lengths,
            aggregation=how.aggregation,
            denominator=denominator,
            rollout_logprobs=columns.get("rollout_logprobs"),
            **rl.options(how.loss, how.model_dump()),
        )
        total, sums = found.loss, dict(found.metrics)
        sums["entropy"] = float(micro.entropy.detach().sum())
        if how.kl_coef:
            penalty = rl.kl_penalty(how.kl, micro.logprobs, columns["ref_logprobs"])
            sums["kl"] = float((penalty.detach() * micro.mask).sum())
            total = total + how.kl_coef * aggregate(penalty, micro)
        if how.entropy_coef:
            total = total - how.entropy_coef * aggregate(micro.entropy, micro)
        return total, sums

    return loss
