"""Norms of each layer's weights and gradients: where a model grows, and where its gradient comes from."""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_NAMES = {"embed_tokens": "embedding", "lm_head": "head"}


def layer_of(parameter: str) -> str:
    """The layer that a parameter belongs to: its number, or embedding, norm (the final one), head."""
    inside = _LAYER.search(parameter)
    if inside:
        return inside[1]
    module = parameter.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    return _NAMES.get(module, module)


class LayerNorms:
    """L2 norms by layer of tensors that belong to these parameters: one pass over them, one wait for the device."""

    def __init__(self, parameters: Sequence[str]) -> None:
        layers = [layer_of(name) for name in parameters]
        self.names = list(dict.fromkeys(layers))
        self._slot = dict(zip(parameters, map(self.names.index, layers)))

    def measure(
        self, tensors: Mapping[str, Tensor], squares_of: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    ) -> dict[str, float]:
        """Layer -> norm of all of its tensors together; a layer without any is left out.

        squares_of: squared norms float64 [len(tensors)] of the whole tensors, where these are this rank's part of them.
        """
        if not tensors:
            return {}
        if squares_of is None:
            squares = torch.stack(torch._foreach_norm(list(tensors.values()))).double().square()
        else:
            squares = squares_of(tensors)
        slots = torch.tensor([self._slot[name] for name in tensors], device=squares.device)
        found = torch.zeros(len(self.names), dtype=torch.float64, device=squares.device)
        norms = found.index_add_(0, slots, squares).sqrt().tolist()
        return {self.names[slot]: norms[slot] for slot in sorted({self._slot[name] for name in tensors})}
