"""Scoring of completions in the background, while others are generated."""

import threading
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from tilth.rewards.process_pool import Item, Outcome, RewardPool


class ScoringAhead:
    """Scores items in a thread of its own, first come first served. Outcomes are those of a later ``score``: a reward
    is a function of its item. An outcome waits until ``taking`` or ``forget``."""

    def __init__(self, pool: RewardPool) -> None:
        self.pool, self._most = pool, 1
        self._waiting: dict[Hashable, Item] = {}
        self._scoring: set[Hashable] = set()
        """Items of the pool's call, whose outcomes somebody wants."""
        self._outcomes: dict[Hashable, Outcome] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._held = False
        self._lock = threading.Lock()

    def begin(self, items: Mapping[Hashable, Item], most: int) -> None:
        """Score these items soon, and return at once. most: items of one call of the pool, so that ``taking`` waits no
        longer than for these."""
        with self._lock:
            self._waiting |= items
            self._most = most
            self._start()

    def forget(self, keys: Collection[Hashable]) -> None:
        """Drop these items and their outcomes."""
        with self._lock:
            for key in keys:
                self._waiting.pop(key, None)
                self._outcomes.pop(key, None)
            self._scoring -= {*keys}

    def forget_all(self) -> None:
        """Drop all items and outcomes, and what the pool has raised."""
        with self._lock:
            self._waiting, self._outcomes, self._scoring, self._error = {}, {}, set(), None

    def _start(self) -> None:
        """Start the thread if it has something to do. (Called with the lock.)"""
        if self._waiting and self._thread is None and self._error is None and not self._held:
            self._thread = threading.Thread(target=self._run, name="scoring-ahead", daemon=True)
            self._thread.start()

    @contextmanager
    def taking(self, keys: Sequence[Hashable]) -> Iterator[dict[Hashable, Outcome]]:
        """Give the block the outcomes of these items, and the pool: what is being scored has ended, and what waits goes
        on after the block, but for those of these items that were not begun. Raises what the pool raised."""
        with self._lock:
            self._held, thread = True, self._thread
            for key in keys:
                self._waiting.pop(key, None)
        try:
            if thread is not None:
                thread.join()
            if self._error is not None:
                raise self._error
            yield {key: self._outcomes.pop(key) for key in keys if key in self._outcomes}
        finally:
            with self._lock:
                self._held = False
                self._start()

    def _run(self) -> None:
        while True:
            with self._lock:
                keys = [] if self._held else list(self._waiting)[: self._most]
                if not keys:
                    self._thread = None
                    return
                items = [self._waiting.pop(key) for key in keys]
                self._scoring = {*keys}
            try:
                found = self.pool.score(items)
            except BaseException as error:  # noqa: BLE001 - ``taking`` raises it in the thread of the call
                with self._lock:
                    self._error, self._thread, self._waiting = error, None, {}
                return
            with self._lock:
                self._outcomes |= {key: one for key, one in zip(keys, found) if key in self._scoring}
                self._scoring = set()
