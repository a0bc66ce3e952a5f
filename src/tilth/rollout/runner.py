"""Forward passes over the cache. One path serves decode (one token a row) and prefill chunks."""

from torch import Tensor

from tilth.models.decoder import Decoder
from tilth.rollout.cache import CachedContext, Slab
from tilth.rollout.sampling import Chosen, Rules, choose


class Runner:
    """The model and how its steps are run."""

    def __init__(self, model: Decoder, parity: bool) -> None:
        self.model = model
        self._parity = parity

    def forward_rows(self, slab: Slab, ids: Tensor, start: Tensor, length: int) -> Tensor:
        """New tokens ids int64 [B, C] of the first B rows from positions start [B]: hidden [B * C, hidden].

        length: slots of the slab to look at. A row with fewer than C tokens is padded at its end.
        """
        context = CachedContext(slab, start, ids.shape[1], length, self._parity)
        return self.model(ids.flatten(), context)

    def prefill(self, slab: Slab, ids: Tensor, start: Tensor, length: int, last: Tensor) -> Tensor:
        """Logits float32 [rows, V] after the tokens with these flat indices of [B * C] (perhaps none)."""
        return self.model.logits(self.forward_rows(slab, ids, start, length)[last])

    def decode(self, slab: Slab, ids: Tensor, start: Tensor, length: int, uniform: Tensor, rules: Rules) -> Chosen:
        """The next token of rows 0 .. B - 1, whose newest token ids [B] is at positions start [B]."""
        return choose(self.model.logits(self.forward_rows(slab, ids[:, None], start, length)), uniform, rules)
