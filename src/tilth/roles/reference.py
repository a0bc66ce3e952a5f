"""Reference role: a frozen earlier policy, for the KL penalty."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from tilth.cluster.protocol import transfer
from tilth.core.batch import Batch, Store
from tilth.core.checksum import checksums
from tilth.parallel.sharded import ShardedModel
from tilth.plan.batch import MicroBatchPlan
from tilth.roles.objective import Scores, scored
from tilth.roles.state import Groups, Stateful, weights_group
from tilth.training.packed import packed_logprobs


class ReferenceWorker(Stateful, Scores):
    """Frozen copy of the policy at the start of the phase, for the KL penalty."""

    tolerance: float | None = 0.0

    def __init__(
        self, sharded: ShardedModel, store: Store, *, temperature: float, micro_tokens: int, parity: bool
    ) -> None:
        super().__init__(sharded)
        self.store, self.temperature, self.micro_tokens, self.parity = store, temperature, micro_tokens, parity

    def receive(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the policy's current weights."""
        with self._changing():
            for name, tensor in weights:
                self.sharded.load_part(name, tensor)

    def fingerprint(self) -> Mapping[str, int]:
        """Return the checksum of this rank's part of each tensor of the live storage."""
        return checksums(self.sharded.parameters.items())

    @transfer(split="plan", gather="rows", reads=True)
    def logprobs(self, batch: Batch, *, plan: MicroBatchPlan | None = None) -> Batch:
        """Add ``ref_logprobs``."""
        how: dict[str, Any] = {"op": "reference", "temperature": self.temperature, "plan": plan}
        return scored(batch, self.store, self, packed_logprobs, "ref_logprobs", **how)

    def groups(self) -> Groups:
        return {"reference": weights_group(self.sharded)}
