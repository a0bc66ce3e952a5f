"""Where the pieces of a tensor lie: a shard is a box (offset, size) of the global index space."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """An axis-aligned block of a tensor: ``offset[d] <= index[d] < offset[d] + size[d]``."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """The box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)
