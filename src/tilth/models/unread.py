"""Tensors by name that are read on access, one at a time: of files, of checkpoints, merged or side by side."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor


class Unread(Mapping[str, Tensor]):
    """Tensors of these names; a name and a shape are known without reading."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""

    @abstractmethod
    def part(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """Return a block of a tensor, reading only what it needs; without slices the whole."""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self.part(name, ())

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by name, without reading unread tensors."""
    shape_of = tensors.shape if isinstance(tensors, Unread) else (lambda name: tuple(tensors[name].shape))
    return {name: shape_of(name) for name in tensors}


def block(tensors: Mapping[str, Tensor], name: str, slices: tuple[slice, ...]) -> Tensor:
    """Return a block of a tensor, reading only that of an unread one."""
    return tensors.part(name, slices) if isinstance(tensors, Unread) else tensors[name][slices]
