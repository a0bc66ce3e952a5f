"""Log-probs of a batch under a model that may be spread over workers, as a payload column."""

from typing import Protocol

from tilth.core.batch import Batch, Store
from tilth.parallel.sharded import Sharded
from tilth.roles.experience import on_rows, put_like
from tilth.training.packed import packed_logprobs


class Scores(Protocol):
    """What scoring needs to know of its model."""

    sharded: Sharded
    micro_tokens: int
    parity: bool


def scored(batch: Batch, store: Store, owner: Scores, temperature: float, column: str, op: str) -> Batch:
    """Add the log-probs of the chosen tokens under the owner's model as a payload column; ``op`` names its time."""
    with on_rows(op, batch):
        columns = batch.read(store, "tokens", "mask")
        values = packed_logprobs(
            owner.sharded,
            columns["tokens"],
            columns["mask"].values,
            max_tokens=owner.micro_tokens,
            temperature=temperature,
            parity=owner.parity,
        )
        return put_like(batch, store, column, values, columns["tokens"])
