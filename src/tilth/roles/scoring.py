"""Log-probs of a batch under a model that may be spread over workers, as a payload column."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from tilth.core.batch import Batch, Jagged, Store
from tilth.parallel.sharded import ShardedModel
from tilth.roles.experience import on_rows, put_like
from tilth.training.packed import packed_logprobs

Found = TypeVar("Found")


class Scores(Protocol):
    """What scoring needs to know of its model."""

    sharded: ShardedModel
    micro_tokens: int
    parity: bool


def forward(owner: Scores, run: Callable[..., Found], tokens: Jagged, mask: np.ndarray, **more: Any) -> Found:
    """Run one of ``training.packed.packed_*`` with the owner's model, micro-batches and parity."""
    return run(owner.sharded, tokens, mask, max_tokens=owner.micro_tokens, parity=owner.parity, **more)


def scored(batch: Batch, store: Store, owner: Scores, temperature: float, column: str, op: str) -> Batch:
    """Add the log-probs of the chosen tokens under the owner's model as a payload column; ``op`` names its time."""
    with on_rows(op, batch):
        columns = batch.read(store, "tokens", "mask")
        tokens = columns["tokens"]
        values = forward(owner, packed_logprobs, tokens, columns["mask"].values, temperature=temperature)
        return put_like(batch, store, column, values, tokens)
