"""The reference role: the policy as it was, which a KL penalty holds the policy to."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from tilth.cluster.protocol import transfer
from tilth.core.batch import Batch, Store
from tilth.parallel.sharded import Sharded
from tilth.roles.scoring import scored
from tilth.roles.state import Group, Groups, Saved, read_state, whole_tensors, write_state


class ReferenceWorker:
    """A frozen copy of the policy as it was when the phase began, for the KL penalty."""

    def __init__(self, sharded: Sharded, store: Store, *, temperature: float, micro_tokens: int, parity: bool) -> None:
        self.sharded = sharded
        self.grid = sharded.grid
        self.store = store
        self.temperature = temperature
        self.micro_tokens = micro_tokens
        self.parity = parity

    def receive(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over the policy's weights of now."""
        for name, tensor in weights:
            self.sharded.take(name, tensor)

    def live(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors out of the live storage; a collective call."""
        return whole_tensors(self.sharded)

    @transfer(split="rows", gather="rows")
    def logprobs(self, batch: Batch) -> Batch:
        """Add ``ref_logprobs``."""
        return scored(batch, self.store, self, self.temperature, "ref_logprobs", "reference")

    @transfer(split="all", gather="all")
    def save(self, folder: str) -> Saved:
        """Write this worker's part into a checkpoint that is being made."""
        return write_state(folder, self._groups(), self.grid)

    @transfer(split="all", gather="first")
    def load(self, path: str) -> None:
        """Go back to a checkpoint of any layout. CheckpointError."""
        read_state(path, self._groups(), self.sharded)

    def _groups(self) -> Groups:
        return {"reference": Group(dict(self.sharded.parameters), self.sharded.layouts)}
