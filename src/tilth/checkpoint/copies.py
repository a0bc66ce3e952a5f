"""Digests of the tensors of a rank: copies on several ranks must have equal ones, and none changes between updates.

Two ranks hold copies of a tensor where its layout gives them the same boxes. Gradients and messages need no digests of
their own: one that differs on one rank makes its weights or its optimizer state differ after the next step. What one
rank alone holds has no copy, but nothing writes to it from the end of an update to the next one: ``AtRest`` compares
its digests in between.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
import xxhash
from torch import Tensor

from tilth.checkpoint.snapshot import Group
from tilth.core.layout import Layout

LEAST = 1 << 22
"""Bytes that a look at tensors at rest may read in any case."""
COST, LOOKS = 0.004, 3
"""Share of the work of an update that may be spent on such looks; looks from one update to the next: after it, at the
snapshot, before the next one."""
WORK_OF_A_BYTE = {"cpu": 12.0, "cuda": 160.0}
"""FLOPs of a matrix product that take as long as the digest of a byte, by kind of device."""
SLOWEST = max(WORK_OF_A_BYTE.values())


class Copies:
    """Digests of one rank that others must have too. Who holds copies is computed once for each layout."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._holders: dict[Layout, int] = {}
        self._newest: dict[tuple[str, str], tuple[Layout, int]] = {}
        """Tensor -> its layout at the last look, and the hash of its holders: to hash a layout takes longer."""

    def digests(self, groups: Mapping[str, Group]) -> dict[int, int]:
        """Return set of ranks -> digest of all tensors that exactly these ranks hold; none of tensors without copies.

        A set of ranks is named by a hash, so that its name has the same length for any number of them.
        """
        found: dict[int, xxhash.xxh3_64] = {}
        for name, (holders, value) in sorted(self.tensors(groups).items()):
            hasher = found.setdefault(holders, xxhash.xxh3_64())
            hasher.update(f"{name}\0{value}\0".encode())
        return {holders: hasher.intdigest() for holders, hasher in found.items()}

    def tensors(self, groups: Mapping[str, Group]) -> dict[str, tuple[int, int]]:
        """Return tensor with copies -> hash of the set of its holders, and digest, to name the tensors that differ."""
        held = self.split(groups)[0]
        found = digests({name: tensor for name, (_, tensor) in held.items()})
        return {name: (held[name][0], value) for name, value in found.items()}

    def split(self, groups: Mapping[str, Group]) -> tuple[dict[str, tuple[int, Tensor]], dict[str, Tensor]]:
        """Return the tensors with copies, with the hash of their holders, and those that this rank alone holds."""
        held, alone = dict[str, tuple[int, Tensor]](), dict[str, Tensor]()
        for title, group in groups.items():
            for name, tensor in group.tensors.items():
                if not tensor.numel():
                    continue
                if holders := self.holding(title, name, group.layouts[name]):
                    held[f"{title}/{name}"] = holders, tensor
                else:
                    alone[f"{title}/{name}"] = tensor
        return held, alone

    def holding(self, title: str, name: str, layout: Layout) -> int:
        """Return ``holders`` of a tensor of a group."""
        newest = self._newest.get((title, name))
        if newest is None or newest[0] is not layout:
            newest = self._newest[title, name] = layout, self.holders(layout)
        return newest[1]

    def holders(self, layout: Layout) -> int:
        """Return a hash of the ranks that hold the same part as this one; 0 if it is alone."""
        if layout not in self._holders:
            own = layout.boxes(self.rank)
            ranks = [rank for rank in layout.mesh.ranks if layout.boxes(rank) == own]
            named = xxhash.xxh3_64_intdigest(np.array(ranks, np.int64).tobytes())
            self._holders[layout] = named if len(ranks) > 1 else 0
        return self._holders[layout]


class AtRest:
    """Digests of tensors that this rank alone holds, while nothing may write to them.

    If reading all of them would cost more than ``COST`` of an update, those of other tensors are taken after each
    update, in turn.
    """

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._tensors: dict[str, Tensor] = {}
        self._digests: dict[str, int] = {}
        self._next = 0
        """Number of the tensor with which the next look begins."""

    def remember(self, groups: Mapping[str, Group], flops: float = math.inf) -> None:
        """Remember the present digests. flops: work of the update before; infinite: of all tensors."""
        self._tensors = self._some(groups, flops)
        self._digests = digests(self._tensors)

    def _some(self, groups: Mapping[str, Group], flops: float) -> dict[str, Tensor]:
        """Return the tensors without copies whose turn it is."""
        names, found, spent = [(t, n) for t, group in groups.items() for n in group.tensors], dict[str, Tensor](), 0
        for title, name in [*names[self._next :], *names[: self._next]]:
            tensor = groups[title].tensors[name]
            if spent >= max(LEAST, COST * flops / (LOOKS * WORK_OF_A_BYTE.get(tensor.device.type, SLOWEST))):
                break
            self._next += 1
            if tensor.numel() and not self._copies.holding(title, name, groups[title].layouts[name]):
                found[f"{title}/{name}"] = tensor
                spent += tensor.nbytes
        self._next %= max(1, len(names))
        return found

    def changed(self) -> list[str]:
        """Return the tensors that are not as remembered."""
        return sorted(name for name, value in digests(self._tensors).items() if value != self._digests[name])

    def forget(self) -> None:
        """Expect the tensors to change."""
        self._tensors, self._digests = {}, {}

    @contextmanager
    def changing(self, groups: Callable[[], Mapping[str, Group]]) -> Iterator[None]:
        """Expect the tensors to change in the block, and not afterwards."""
        self.forget()
        yield
        self.remember(groups())


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digest of the bits of each tensor, to compare with one of a tensor on the same kind of device."""
    far = {name: _word_sum(t) for name, t in tensors.items() if t.device.type != "cpu"}
    found = dict(zip(far, torch.stack(list(far.values())).tolist())) if far else {}  # one wait for the device
    return {name: found[name] if name in found else bits(t) for name, t in tensors.items()}


def bits(tensor: Tensor) -> int:
    """Return a hash of the bits of a tensor on the CPU."""
    return xxhash.xxh3_64_intdigest(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def _word_sum(tensor: Tensor) -> Tensor:
    """Return the sum of the 64-bit words of a tensor modulo 2**64, int64 []: any one word that changes changes it. It
    reads each byte once, where a device has no xxh3; words that change places do not change it."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data, whole = data.clone() if data.storage_offset() % 8 else data, len(data) // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum()
