"""Lifetime of payload: leases, and the controller's view of the store."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from tilth.cluster.controller.dispatch import Dispatch
from tilth.core.batch import Handle, Jagged, Lease, Store
from tilth.core.errors import PayloadLeak

PAYLOAD = "controller.payload"
"""Operation that counts columns which the controller itself puts or gets."""


class LeasedStore:
    """The store in the controller: counts the bytes that it puts and gets. Columns that a worker puts belong to the
    lease of the controller's call."""

    def __init__(self, store: Store, dispatch: Dispatch) -> None:
        self._store = store
        self._dispatch = dispatch
        self._numbers = count()
        self._open: dict[str, Lease] = {}

    def lease(self, name: str) -> Lease:
        """Create a lease, for ``under``. Its payload must be released before the cluster closes."""
        lease = Lease(name, str(next(self._numbers)), self.release)
        self._open[lease.key] = lease
        return lease

    @contextmanager
    def under(self, lease: Lease) -> Iterator[None]:
        """Let calls in the block put under this lease; the batches that they return share it."""
        before, self._dispatch.lease = self._dispatch.lease, lease
        try:
            yield
        finally:
            self._dispatch.lease = before

    @contextmanager
    def scope(self, name: str = "") -> Iterator[None]:
        """Release a new lease at the end of the block, after its calls have ended unless the block raises."""
        lease = self.lease(name)
        try:
            with self.under(lease):
                yield
            self._dispatch.drain(lease)
        finally:
            self._free(lease)

    def put(self, column: str, data: Jagged) -> Handle:
        """Put a column and count its bytes; the handle is its only name."""
        self._store.lease = "" if self._dispatch.lease is None else self._dispatch.lease.key
        handle = self._store.put(column, data)
        self._dispatch.traffic.add(PAYLOAD, sent=handle.nbytes)
        return handle

    def get(self, handle: Handle) -> Jagged:
        """Get a column and count its bytes."""
        found = self._store.get(handle)
        self._dispatch.traffic.add(PAYLOAD, received=handle.nbytes)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of payload held now."""
        return sum(self._store.held().values())

    def release(self, *leases: Lease) -> None:
        """Wait for the calls under these leases, then free their columns, all at once: a store looks at each of its
        columns for it."""
        for lease in leases:
            self._dispatch.drain(lease)
        self._free(*leases)

    def _free(self, *leases: Lease) -> None:
        keys = [lease.key for lease in leases]
        for key in keys:
            self._open.pop(key, None)
        self._store.release(*keys)

    def clear(self) -> None:
        """Free all payload, after a failure, when no call is in flight.

        Also that of leases which the failure has closed while calls under them still ran.
        """
        self._store.release(*{*self._open, *map(_lease_of, self._store.held())})
        self._open.clear()

    def check_released(self) -> None:
        """Raise PayloadLeak, which names the leases, if any column is still held."""
        held = self._store.held()
        if held:
            keys = set(map(_lease_of, held))
            owners = sorted(self._open[key].name if key in self._open else "" for key in keys)
            raise PayloadLeak(
                f"{len(held)} payload columns ({sum(held.values()):,} bytes) are still held at the end, by "
                f"{', '.join(repr(owner) if owner else 'no lease' for owner in owners)}: release the batches, or call "
                "inside a scope of the store",
                key=owners[0] or "payload",
            )


def _lease_of(key: str) -> str:
    """Return the key of the lease that a column belongs to."""
    return key.rpartition("/")[2].partition("~")[0]
