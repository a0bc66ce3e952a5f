"""Critic role: the value model, its gradients and its position."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tilth.rl as rl
from tilth.cluster.protocol import transfer
from tilth.core.batch import Batch, Jagged, Store
from tilth.core.checksum import checksum
from tilth.core.errors import ModelError
from tilth.models.converters import HEAD, OUTPUT, ValueModel
from tilth.plan.batch import MicroBatchPlan
from tilth.plan.lora import is_adapter
from tilth.rl.aggregation import Aggregation
from tilth.rl.algorithm import Algorithm
from tilth.roles.experience import check_identity, of_pass, on_rows, row_names
from tilth.roles.objective import (
    Gather,
    alone,
    check_weight,
    count_not_finite,
    gather_data_ranks,
    global_denominator,
    is_first_data_rank,
    scored,
)
from tilth.roles.state import Learner
from tilth.training.engine import Loss, TrainEngine, UpdateResult
from tilth.training.packed import MicroBatch, packed_values

Metrics = dict[str, rl.Metric]


class CriticWorker(Learner):
    """Train engine of a value model behind batches."""

    tolerance: float | None = 0.0

    def __init__(self, engine: TrainEngine, store: Store, *, clip: float = 0.0) -> None:
        """engine: with the scorer ``appraise``; clip: bound on the change of a value in an update, 0: none."""
        if not isinstance(engine.model, ValueModel):
            raise TypeError(f"a critic's engine trains a ValueModel, not a {type(engine.model).__name__}")
        self.model: ValueModel = engine.model
        super().__init__(engine, "critic", "critic_optimizer")
        self.store, self.clip = store, clip

    def receive(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Start as a copy of the policy with these weights, every value 0. ModelError names what does not fit."""
        with self._changing():
            self._copy(weights)

    def _copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        sharded = self.engine.sharded
        missing = {name for name in sharded.layouts if not name.startswith(HEAD) and not is_adapter(name)}
        for name, tensor in weights:
            if not name.startswith(OUTPUT):
                sharded.load_part(name, tensor)
                missing.discard(name)
        if missing:
            raise ModelError(
                f"{min(missing)} is missing in the weights that the value model should begin with", key=min(missing)
            )
        for name in sharded.layouts:
            if name.startswith(HEAD):
                sharded.load_full(name, torch.zeros(sharded.layouts[name].shape))

    def fingerprint(self) -> Mapping[str, int]:
        """Return the checksum of this rank's part of each tensor of the live body."""
        parts = self.engine.sharded.parameters
        return {n: checksum(tensor) for n, tensor in parts.items() if not n.startswith(HEAD) and not is_adapter(n)}

    @transfer(split="plan", gather="rows", reads=True)
    def values(self, batch: Batch, *, plan: MicroBatchPlan | None = None) -> Batch:
        """Add ``values``: of the state before each token of the mask, before any update on this batch."""
        return scored(batch, self.store, self.engine, packed_values, "values", op="values", plan=plan)

    @transfer(split="plan", gather="merge")
    def update(self, batch: Batch, how: Algorithm, *, plan: MicroBatchPlan | None = None) -> Metrics:
        """Run one optimizer step of the value loss towards ``returns``, aggregated as the recipe's policy loss."""
        with on_rows("critic", batch) as spent:
            columns = batch.read(self.store, "tokens", "mask", "values", "returns")
            tokens = columns.pop("tokens")
            check_identity(batch, tokens)
            per_token = {name: column.values for name, column in columns.items()} | of_pass(batch, self.store, tokens)
            mask = per_token.pop("mask")
            loss, whole = value_loss(how.aggregation, mask, tokens, self.clip, gather_data_ranks(self.grid))
            starts = batch.rows.get("start")
            more: dict[str, Any] = {"starts": starts, "names": row_names(batch), "plan": plan}
            found = self.engine.update(tokens, mask, per_token, loss, entropy=False, dropout=False, **more)
            spent.set(flops=found.flops)
            check_weight(found.metrics, whole, self.grid)
        return self._account(found)

    def _account(self, found: UpdateResult) -> Metrics:
        own = {f"value/{name}" if name.startswith("experts/") else name: m for name, m in found.metrics.items()}
        return own | {
            "value/grad_norm": rl.Metric(found.grad_norm, 1, "mean"),
            "value/lr": rl.Metric(found.lr, 1, "mean"),
            "value/skipped": rl.Metric(float(found.skipped and is_first_data_rank(self.grid)), 1, "sum"),
            **count_not_finite(found, self.grid),
        }


def value_loss(
    aggregation: Aggregation, mask: np.ndarray, tokens: Jagged, clip: float, gather: Gather = alone
) -> tuple[Loss, float]:
    """Return the value loss with the denominator of the whole batch, and the weight of all its tokens in it."""
    shared = global_denominator(aggregation, mask, tokens, gather)

    def loss(micro: MicroBatch) -> tuple[Tensor, Metrics]:
        found = rl.value_loss(
            micro.values,
            micro.columns["values"],
            micro.columns["returns"],
            micro.mask,
            micro.lengths,
            clip=clip,
            aggregation=aggregation,
            denominator=shared.denominator,
        )
        return found.loss, found.metrics | shared.weight(micro)

    return loss, shared.whole
