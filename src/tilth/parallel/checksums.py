"""Checksums of gradients: of what ranks give to a sum, and of what one rank alone holds."""

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from tilth.parallel.comm import Group

_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> integers of that size."""
SUMMED = 1024
"""Neighbours that are added up in the tensor's dtype, before float64."""
FEW = 1 << 13
"""Elements that are so few that they are added up in float64 at once."""


class GivenSums:
    """Sums of the gradients that this rank has given to reduce-scatters in a step, for each rank that gets them.

    The shard that a rank gets has the sum of what all ranks gave for it, but for rounding (checksums of algorithm-based
    fault tolerance: Huang and Abraham, 1984).
    """

    def __init__(
        self,
        group: Group,
        names: Sequence[str] = (),
        place: int = 0,
        places: int = 1,
        every: int = 1,
        tolerance: float = 0.0,
    ) -> None:
        """names: parameters whose gradients are given; place: of this group, where several hold different parts of
        them; every: number of steps of which one is looked at; tolerance: of the ``GradientReducer``."""
        self.group, self.names, self.place, self.places, self.every = group, list(names), place, places, every
        self.tolerance = tolerance
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self.looks = step % self.every == 0
        self.sums: Tensor | None = None
        """float64 [ranks + 1]: for each rank of the group; the norm of what was given, times the error of one
        element: its dtype's epsilon and the tolerance."""

    def add(self, given: Tensor) -> None:
        """Add a rank's contribution, whose equal parts go to the ranks of the group in order."""
        if not self.looks:
            return
        parts = exact_sums(given.view(self.group.size(), -1))
        scale = _size(given).double() * (torch.finfo(given.dtype).eps + self.tolerance)
        found = torch.cat([parts, scale[None]])
        self.sums = found if self.sums is None else self.sums + found

    def placed(self) -> Tensor:
        """Return the sums where those of this group lie among those of all: float64 [places * (ranks + 1)]."""
        found = torch.zeros(self.places, self.group.size() + 1, dtype=torch.float64)
        if self.sums is not None:
            found = found.to(self.sums.device)
            found[self.place] = self.sums
        return found.flatten()

    def own(self, placed: Tensor) -> tuple[float, float]:
        """Return what all ranks gave for this rank's shard, and its error. placed: its sum over ranks."""
        *parts, scale = placed.view(self.places, -1)[self.place].tolist()
        return parts[self.group.rank()], scale


def _size(x: Tensor) -> Tensor:
    """Estimate the L2 norm of contiguous x by every fourth group of neighbours, for a bound far above the rounding."""
    count = x.numel() // (4 * SUMMED)
    if count * SUMMED < FEW:
        return torch.linalg.vector_norm(x)
    some = x.view(-1)[: count * 4 * SUMMED].view(-1, 4, SUMMED)[:, 0]
    return 2 * torch.linalg.vector_norm(torch.linalg.vector_norm(some, dim=1))


def exact_sums(rows: Tensor) -> Tensor:
    """Return the sum of each row of contiguous [rows, n] in float64: float64 [rows]. Neighbours are added up before
    (torch adds them in pairs), which is several times as fast."""
    count = rows.shape[1]
    if count % SUMMED == 0:  # of two dimensions torch adds up neighbours faster than of three
        return rows.view(-1, SUMMED).sum(1).view(len(rows), -1).sum(1, dtype=torch.float64)
    if count < FEW:
        return rows.sum(1, dtype=torch.float64)
    whole = count // SUMMED * SUMMED
    found = rows[:, :whole].unflatten(1, (-1, SUMMED)).sum(2).sum(1, dtype=torch.float64)
    return found + rows[:, whole:].sum(1, dtype=torch.float64)


def exact_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of all elements of some tensors in float64, as ``exact_sums``: float64 []."""
    parts = [tensors[0].new_zeros(1)]  # all others may be empty
    for flat in (tensor.reshape(-1) for tensor in tensors):
        whole = len(flat) // SUMMED * SUMMED
        parts += [flat[:whole].view(-1, SUMMED).sum(1)] if whole else []
        parts += [flat[whole:].sum()[None]] if whole < len(flat) else []
    return torch.cat(parts).sum(dtype=torch.float64)


class GradientDigests:
    """Digests of gradients as backward passes leave them, one integer for each: any bit that flips changes it.

    What the program changes afterwards is left out, as a sum over ranks: torch counts such changes, not those of a
    memory that flips bits.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], every: int = 1) -> None:
        """every: number of steps of which one is looked at."""
        self.every, self._looks = every, True
        self._left = dict[str, tuple[Tensor, int, Tensor]]()
        """Gradient, its version, and its digest."""
        for name, p in parameters:
            p.register_post_accumulate_grad_hook(partial(self._take, name))

    def begin(self, step: int) -> None:
        """Begin a step: forget all gradients."""
        self._looks = step % self.every == 0
        self._left.clear()

    def _take(self, name: str, p: Tensor) -> None:
        if self._looks and p.grad is not None and p.grad.numel():
            self._left[name] = p.grad, p.grad._version, digest(p.grad)

    def changed(self) -> str:
        """Return the name of a gradient that has other bits than when it was left, "" if none has; forget all."""
        left = [(name, now, then) for name, (now, version, then) in self._left.items() if now._version == version]
        self._left.clear()
        if not left:
            return ""
        differ = torch.stack([digest(now) - then for _, now, then in left]).tolist()
        return next((name for (name, _, _), other in zip(left, differ) if other), "")


def digest(x: Tensor) -> Tensor:
    """Return the sum of the bits of x as integers, without their carry: int64 []."""
    whole = _WHOLE[x.element_size()]
    return x.detach().view(whole).sum(dtype=whole).to(torch.int64)
