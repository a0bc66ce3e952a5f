"""Lazy results: the call has returned, and its answer is awaited when it is first read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from tilth.core.batch import Batch, Column, Lease

if TYPE_CHECKING:
    from tilth.cluster.controller.dispatch import PendingCall

T = TypeVar("T")


class _Lazy(Generic[T]):
    """Resolves once, at the first ``wait``. Raises there what failed in the call: a TilthError with role, rank,
    method."""

    def __init__(self, resolve: Callable[[], T]) -> None:
        self._resolve: Callable[[], T] | None = resolve
        self._value: T

    def wait(self) -> T:
        """Return the plain value, when all its workers have answered."""
        if self._resolve is not None:
            self._value, self._resolve = self._resolve(), None
        return self._value

    def __repr__(self) -> str:
        return repr(self._value) if self._resolve is None else f"{type(self).__name__}(not resolved)"


class LazyBatch(_Lazy[Batch], Batch):
    """A Batch that waits for the workers on first access and equals the plain one."""

    def __init__(self, resolve: Callable[[], Batch], leases: tuple[Lease, ...] = ()) -> None:
        super().__init__(resolve)
        self.leases = leases

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


class LazyMap(_Lazy[Mapping[Any, Any]], Mapping[Any, Any]):
    """A mapping (of metrics) that waits for the workers on first access. calls: that it waits for."""

    def __init__(self, resolve: Callable[[], Mapping[Any, Any]], calls: Sequence["PendingCall"] = ()) -> None:
        super().__init__(resolve)
        self.calls = calls

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wait())

    def __len__(self) -> int:
        return len(self.wait())

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[Any, ...]]:
        return dict, (dict(self.wait()),)


def resolved(argument: Any) -> Any:
    """Return an argument of a call without laziness, waiting if needed."""
    return argument.wait() if isinstance(argument, _Lazy) else argument
