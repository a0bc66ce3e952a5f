"""The input of a model beside its attention context."""

from typing import NamedTuple

from torch import Tensor


class ModelInput(NamedTuple):
    """Argument of a model's forward pass. It is a tuple, through which FSDP's hooks see the tensors."""

    ids: Tensor
    """Token ids, int64 [N]; of a part of a pipeline behind the first, the hidden states [N, hidden] before it."""
    positions: Tensor | None = None
    """Position of each token along each of k axes, for rotary embedding, int64 [N, k]; None: its place in its sequence,
    as the context has it."""
