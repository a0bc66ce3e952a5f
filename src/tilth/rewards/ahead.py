"""Scoring of completions in the background, while others are generated."""

import threading
from collections.abc import Hashable, Mapping

from tilth.rewards.process_pool import Item, Outcome, RewardPool


class ScoringAhead:
    """Scores items in a thread of its own, first come first served. Outcomes are those of a later ``score``: a reward
    is a function of its item.

    most: items of one call of the pool, so that ``settle`` waits no longer than for these.
    """

    def __init__(self, pool: RewardPool, most: int) -> None:
        self.pool, self.most = pool, most
        self._waiting: dict[Hashable, Item] = {}
        self._outcomes: dict[Hashable, Outcome] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def begin(self, items: Mapping[Hashable, Item]) -> None:
        """Score these items soon, and return at once."""
        with self._lock:
            self._waiting |= items
            if self._waiting and self._thread is None and self._error is None:
                self._thread = threading.Thread(target=self._run, name="scoring-ahead", daemon=True)
                self._thread.start()

    def drop(self) -> None:
        """Begin nothing more."""
        with self._lock:
            self._waiting = {}

    def settle(self) -> dict[Hashable, Outcome]:
        """Begin nothing more, wait for what is being scored, and return all outcomes. Raises what the pool raised."""
        with self._lock:
            self._waiting, thread = {}, self._thread
        if thread is not None:
            thread.join()
        if self._error is not None:
            raise self._error
        return self._outcomes

    def _run(self) -> None:
        while True:
            with self._lock:
                keys = list(self._waiting)[: self.most]
                if not keys:
                    self._thread = None
                    return
                items = [self._waiting.pop(key) for key in keys]
            try:
                found = self.pool.score(items)
            except BaseException as error:  # noqa: BLE001 - ``settle`` raises it in the thread of the call
                with self._lock:
                    self._error, self._thread, self._waiting = error, None, {}
                return
            with self._lock:
                self._outcomes |= dict(zip(keys, found))
