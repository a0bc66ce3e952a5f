"""Digests of tensors that several ranks hold, which must be equal bit for bit, and of tensors that wait for a step.

Two ranks hold copies of a tensor where its layout gives them the same boxes. Gradients and messages need no digests of
their own: one that differs on one rank makes its weights or its optimizer state differ after the next step. What one
rank alone holds has no copy, but nothing writes to it from the snapshot at the end of a step until the next update:
``AtRest`` compares these two moments.
"""

from collections.abc import Mapping

import numpy as np
import torch
import xxhash
from torch import Tensor

from tilth.checkpoint.snapshot import FileImage, Group
from tilth.checkpoint.tile_reader import tile_checksums
from tilth.core.checksum import checksum
from tilth.core.layout import Layout


class Copies:
    """Digests of one rank. Who holds copies is computed once for each layout."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._holders: dict[Layout, int] = {}

    def digests(self, groups: Mapping[str, Group]) -> dict[int, int]:
        """Return set of ranks -> digest of all tensors that exactly these ranks hold; none of tensors without copies.

        A set of ranks is named by a hash, so that its name has the same length for any number of them.
        """
        found: dict[int, xxhash.xxh3_64] = {}
        for name, value, holders in self._held(groups):
            hasher = found.setdefault(holders, xxhash.xxh3_64())
            hasher.update(f"{name}\0{value}\0".encode())
        return {holders: hasher.intdigest() for holders, hasher in found.items()}

    def tensors(self, groups: Mapping[str, Group]) -> dict[str, tuple[int, int]]:
        """Return tensor -> hash of the set of its holders, and checksum, to name the tensors that differ."""
        return {name: (holders, value) for name, value, holders in self._held(groups)}

    def _held(self, groups: Mapping[str, Group]) -> list[tuple[str, int, int]]:
        """Return name, checksum and hash of the holders of each tensor with copies, by name."""
        found = []
        for title, group in groups.items():
            for name, tensor in group.tensors.items():
                holders = self.holders(group.layouts[name])
                if holders and tensor.numel():
                    found.append((f"{title}/{name}", bits(tensor), holders))
        return sorted(found)

    def holders(self, layout: Layout) -> int:
        """Return a hash of the ranks that hold the same part as this one; 0 if it is alone."""
        if layout not in self._holders:
            own = layout.boxes(self.rank)
            ranks = [rank for rank in layout.mesh.ranks if layout.boxes(rank) == own]
            named = xxhash.xxh3_64_intdigest(np.array(ranks, np.int64).tobytes())
            self._holders[layout] = named if len(ranks) > 1 else 0
        return self._holders[layout]


class AtRest:
    """Checksums of the tensors that this rank alone holds, from a snapshot until the next change of the state.

    On a CPU they are those of the snapshot's file, which are computed anyway, so they cost one reading of the tensors.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._sums: dict[str, list[list[int] | None]] = {}
        """By group: for each piece of its image, or None if other ranks have copies."""
        self._images: Mapping[str, FileImage] = {}

    def remember(self, groups: Mapping[str, Group], images: Mapping[str, FileImage]) -> None:
        """Remember a state whose snapshot has these images by group."""
        self._images = images
        for name, image in images.items():
            sources, layouts = image.part.sources(groups[name].tensors), groups[name].layouts
            self._sums[name] = [
                None if self._copies.holders(layouts[piece.name]) else sums if _on_cpu(source) else [bits(source)]
                for piece, source, sums in zip(image.part.pieces, sources, image.sums, strict=True)
            ]

    def changed(self, groups: Mapping[str, Group]) -> list[str]:
        """Return the tensors that have changed since; none if nothing is remembered."""
        found = []
        for name, sums in self._sums.items():
            image = self._images[name]
            sources = image.part.sources(groups[name].tensors)
            for piece, source, before in zip(image.part.pieces, sources, sums, strict=True):
                if before is not None and before != (_tile_sums(source) if _on_cpu(source) else [bits(source)]):
                    found.append(f"{name}/{piece.name}")
        return found

    def forget(self) -> None:
        """Expect the state to change."""
        self._sums, self._images = {}, {}


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _tile_sums(tensor: Tensor) -> list[int]:
    """Return the checksums that a file has of this piece."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return tile_checksums(data, tensor.shape, tensor.element_size())


def bits(tensor: Tensor) -> int:
    """Return a checksum of the bits of a tensor, to compare with one of a tensor on the same kind of device."""
    if tensor.device.type != "cpu":
        return checksum(tensor)
    return xxhash.xxh3_64_intdigest(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
