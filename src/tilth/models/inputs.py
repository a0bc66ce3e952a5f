"""The input of a model beside its attention context: tokens, positions and media."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilth.core.media import Media


class EncoderInput(NamedTuple):
    """Items of one encoder in a pass."""

    encoder: str
    items: list[Tensor]
    """Bytes of each, uint8 [n]."""
    counts: list[int]
    """Embeddings of each."""
    places: Tensor
    """Row of ``ModelInput.ids`` that each embedding takes the place of, int64 [sum of counts]; -1: outside of the
    pass."""


class ModelInput(NamedTuple):
    """Argument of a model's forward pass. It is a tuple, through which FSDP's hooks see the tensors."""

    ids: Tensor
    """Token ids, int64 [N]; of a part of a pipeline behind the first, the hidden states [N, hidden] before it."""
    positions: Tensor | None = None
    """Position of each token along each of k axes, for rotary embedding, int64 [N, k]; None: its place in its sequence,
    as the context has it."""
    media: tuple[EncoderInput, ...] = ()
    """Items whose embeddings take the places of tokens', by encoder."""


def place_media(sequences: Iterable[tuple[Media, int, int, int]], device: torch.device) -> tuple[EncoderInput, ...]:
    """Return the media of a pass.

    sequences: items of each sequence, the first of its positions that the pass computes, the end of these, and the row
    of ids that has the first.
    """
    found = dict[str, tuple[list[Tensor], list[np.ndarray]]]()
    for items, first, end, row in sequences:
        for item in items:
            at = item.start + np.arange(item.length)
            inside = (first <= at) & (at < end)
            if inside.any():
                data, places = found.setdefault(item.encoder, ([], []))
                data.append(torch.frombuffer(bytearray(item.data), dtype=torch.uint8).to(device))
                places.append(np.where(inside, at - first + row, -1))
    return tuple(
        EncoderInput(encoder, data, [len(at) for at in places], torch.from_numpy(np.concatenate(places)).to(device))
        for encoder, (data, places) in found.items()
    )
