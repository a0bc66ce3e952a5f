"""The reward model role: a learned reward that scores what was generated, by the very tokens."""

import numpy as np

from tilth.cluster.protocol import transfer
from tilth.core.batch import Batch, Store
from tilth.parallel.sharded import ShardedModel
from tilth.rewards.functions import LARGEST
from tilth.roles.experience import OUTCOME, check_identity, on_rows
from tilth.roles.pairs import ratings

PART = "part/model"
"""Row column of what the reward model says."""


class RatingWorker:
    """A reward model that never changes: it is loaded from where the recipe says, also when a run goes on."""

    def __init__(self, sharded: ShardedModel, store: Store, *, weight: float, micro_tokens: int, parity: bool) -> None:
        """sharded: of a value model; weight: of its score in the reward."""
        self.sharded = sharded
        self.store = store
        self.weight = weight
        self.micro_tokens = micro_tokens
        self.parity = parity

    @transfer(split="rows", gather="rows")
    def rate(self, batch: Batch, *, alone: bool) -> Batch:
        """Add weight * score to the row column ``reward`` and the score as ``part/model``; NaN: missing.

        The score is the value after the last token that the policy chose, its end token or the last one before a cut.
        alone: there is no other reward, so that this is the ``outcome`` too. A reward that is missing stays so, and a
        score that is not finite makes it so, as does one that makes it too large (``rewards.LARGEST``).
        """
        with on_rows("score", batch):
            columns = batch.read(self.store, "tokens", "mask")
            check_identity(batch, columns["tokens"])
            found = ratings(self, columns["tokens"], columns["mask"].values)
            found = np.where(np.isfinite(found), found, np.nan)
            before = np.zeros(len(batch)) if alone else batch["reward"].astype(np.float64)
            total = before + self.weight * found.astype(np.float64)
            reward = np.where(np.abs(total) <= LARGEST, total, np.nan).astype(np.float32)
            said = {OUTCOME: reward.copy()} if alone else {}
            return batch.with_rows(reward=reward, **said, **{PART: found.astype(np.float32)})
