"""Results that are still being made: the call has returned, the answer resolves when it is first read."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tilth.core.batch import Batch, Column, Lease


class LazyBatch(Batch):
    """A Batch whose rows wait for the workers on first access. Equal to a plain one in every other way.

    Reading raises what went wrong in the call: a TilthError with role, rank and method in front.
    """

    def __init__(self, resolve: Callable[[], Batch], leases: tuple[Lease, ...] = ()) -> None:
        self._resolve: Callable[[], Batch] | None = resolve
        self.leases = leases
        self._batch: Batch

    def wait(self) -> Batch:
        """The plain batch, when all its workers have answered."""
        if self._resolve is not None:
            self._batch, self._resolve = self._resolve(), None
        return self._batch

    @property
    def rows(self) -> dict[str, np.ndarray]:  # type: ignore[override]
        """Row columns; waits."""
        return self.wait().rows

    @property
    def payload(self) -> dict[str, Column]:  # type: ignore[override]
        """Payload columns; waits."""
        return self.wait().payload

    def __eq__(self, other: object) -> bool:
        return self.wait() == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._batch) if self._resolve is None else "LazyBatch(not resolved)"


class LazyMap(Mapping[Any, Any]):
    """A mapping (of metrics) that waits for the workers on first access."""

    def __init__(self, resolve: Callable[[], Mapping[Any, Any]]) -> None:
        self._resolve: Callable[[], Mapping[Any, Any]] | None = resolve
        self._map: Mapping[Any, Any]

    def wait(self) -> Mapping[Any, Any]:
        """The plain mapping, when all its workers have answered."""
        if self._resolve is not None:
            self._map, self._resolve = self._resolve(), None
        return self._map

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wait())

    def __len__(self) -> int:
        return len(self.wait())

    def __repr__(self) -> str:
        return repr(self._map) if self._resolve is None else "LazyMap(not resolved)"

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[Any, ...]]:
        return dict, (dict(self.wait()),)


def resolved(argument: Any) -> Any:
    """An argument of a call without laziness: waits where it must."""
    return argument.wait() if isinstance(argument, LazyBatch | LazyMap) else argument
