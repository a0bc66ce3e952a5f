"""A drafter in a process of its own, which guesses on while a pass verifies. Imports no torch.

As soon as a pass has its verdicts, the process gets a turn: what rows have said, and the rows whose next drafts are
wanted. The engine goes on, and looks for the drafts when it needs them. A draft is only a guess, so one that comes late
or never changes no completion: the pass goes on without it.

Messages are pickled; both ends are this program, and only they have the pipes.
"""

import math
import os
import pickle
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tilth.core.errors import TilthError
from tilth.engines.drafter import USUAL, Draft, Drafter, DraftError, Drawn
from tilth.engines.stats import Stats
from tilth.process.child import ChildPool, PipedChild, ready
from tilth.process.frames import drain, frame, take_frames
from tilth.process.restarts import RestartPolicy

PATIENCE = 0.25
"""Seconds that a pass waits for its drafts. Behind one that has waited in vain passes do not wait until the process has
answered all."""
SILENCE, START = 30.0, 600.0
"""Seconds in which a process answers a turn, then it is lost; and its first one, before which it loads a model."""
RESTARTS = RestartPolicy(fruitless=3)
"""A process that is lost is replaced three times in a row without a draft in between."""


class DraftTurn(NamedTuple):
    """Work of a drafter for a round: calls of its methods, in order, then ``propose``. Its reply is the round's number
    with the drafts, or with a TilthError."""

    round: int
    calls: list[tuple[str, tuple[Any, ...]]]
    rows: list[int]
    budget: list[int]
    least: float


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """Take turns until the pipe from the parent is closed, and let the drafter grow between them.

    The first message is a function that makes the drafter.
    """
    pipe, inbox = requests.fileno(), bytearray()
    os.set_blocking(pipe, False)
    drafter: Drafter | None = None
    going = True
    while going:
        growing = drafter is not None and drafter.grow()
        if not select.select([pipe], [], [], 0 if growing else None)[0]:
            continue
        going = drain(pipe, inbox)
        for body in take_frames(inbox):
            if drafter is None:
                drafter = pickle.loads(body)()
                continue
            replies.write(frame(pickle.dumps(taken(drafter, pickle.loads(body)), pickle.HIGHEST_PROTOCOL)))
            replies.flush()


def taken(drafter: Drafter, turn: DraftTurn) -> tuple[int, list[Draft] | TilthError]:
    """Return the reply to a turn."""
    try:
        for name, arguments in turn.calls:
            getattr(drafter, name)(*arguments)
        return turn.round, drafter.propose(turn.rows, turn.budget, turn.least)
    except TilthError as error:
        return turn.round, error


class DrafterProcess(PipedChild):
    """Process of a drafter, with the turns that it has not answered."""

    def __init__(self, greeting: bytes, output: int | None) -> None:
        super().__init__("tilth.engines.apart:main", [], greeting, output)
        self.turns = deque[tuple[DraftTurn, float]]()
        """With the time (time.monotonic) at which each was sent."""
        self.heard = -math.inf
        """Time of its newest answer."""

    def take(self, turn: DraftTurn) -> None:
        """Send a turn."""
        self.turns.append((turn, time.monotonic()))
        self.send(pickle.dumps(turn, pickle.HIGHEST_PROTOCOL))

    @property
    def silent(self) -> bool:
        """True if it has not answered a turn for too long."""
        limit = SILENCE if self.heard > -math.inf else START
        return bool(self.turns) and time.monotonic() > max(self.turns[0][1], self.heard) + limit


@dataclass(slots=True)
class _KnownRow:
    """A completion in flight, for a process that begins anew."""

    prompt: np.ndarray
    said: list[np.ndarray]
    drawn: Drawn
    asked: int = -1
    """Round in which its next draft is made; -1: in none."""
    draft: Draft | None = None
    """The next draft, once it has come."""


class ApartDrafter(Drafter):
    """A ``Drafter`` whose drafts another one makes in a process of its own.

    A process that dies or stays silent is replaced; the new one knows the rows in flight, and nothing that was said
    before. Where one after the other is lost, there are no drafts any more.
    """

    apart = True
    seconds = 5e-6
    """2.5 with 64 rows, 9 with 8, for messages (measured on a Xeon)."""

    def __init__(self, make: Callable[[], Drafter], counts: Callable[[], Stats]) -> None:
        """make: makes the drafter; pickled. counts: returns the engine's counts, in which it counts."""
        self._pool = ChildPool(partial(DrafterProcess, pickle.dumps(make)))
        self._counts = counts
        self._rows: dict[int, _KnownRow] = {}
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        """What the process has not been told."""
        self._round = self._fruitless = 0
        self._late = False
        """True while no pass waits: the process has not answered what one has waited for, or begins."""
        self._child: DrafterProcess | None = None
        self._start()

    @property
    def caught_up(self) -> bool:
        """True if there is a process and it has answered all that it was asked."""
        self._hear(0.0)
        return self._child is not None and not self._child.turns

    @property
    def pid(self) -> int | None:
        """Number of the process; None if there is none any more."""
        return None if self._child is None else self._child.pid

    def begin(self, row: int, prompt: np.ndarray, completion: np.ndarray, drawn: Drawn = USUAL) -> None:
        self._rows[row] = _KnownRow(prompt, [completion], drawn)
        self._tell("begin", row, prompt, completion, drawn)

    def accept(self, rows: Sequence[int], said: Sequence[np.ndarray]) -> None:
        for number, tokens in zip(rows, said, strict=True):
            row = self._rows[number]
            row.said.append(tokens)
            row.asked, row.draft = -1, None
        self._tell("accept", rows, said)

    def forget(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            self._tell("forget", row)

    def note(self, prompt: np.ndarray, completion: np.ndarray) -> None:
        self._tell("note", prompt, completion)

    def expect(self, rows: Sequence[int], budget: Sequence[int], least: float) -> None:
        """Ask for the next drafts of rows, unless the process is late."""
        if not self._late:
            self._ask(rows, budget, least)

    def sleep(self) -> None:
        """Let the process give its memory back, now and not with the next drafts."""
        self._hear(0.0)
        self._tell("sleep")
        if self._child is not None:
            self._ask([], [], 0.0)

    def propose(self, rows: Sequence[int], budget: Sequence[int], least: float) -> list[Draft]:
        """Return the drafts that were asked for, of other rows new ones; none if the process is late or lost."""
        self._hear(0.0)
        if not self._late:
            new = {row: most for row, most in zip(rows, budget, strict=True) if self._rows[row].asked < 0}
            if new:
                self._ask([*new], [*new.values()], least)
            self._wait([self._rows[row] for row in rows])
        self._counts().undrafted_passes += self._late
        return [_cut(self._rows[row].draft or Draft(), most) for row, most in zip(rows, budget, strict=True)]

    def _tell(self, name: str, *arguments: Any) -> None:
        if self._child is not None:
            self._calls.append((name, arguments))

    def _ask(self, rows: Sequence[int], budget: Sequence[int], least: float) -> None:
        """Send a turn."""
        assert self._child is not None
        for row in rows:
            if self._rows[row].asked >= 0:
                raise DraftError(
                    f"row {row} is asked for a draft in round {self._round}, and has one of round "
                    f"{self._rows[row].asked} without a verdict; accept() comes between two drafts",
                    key="draft.open",
                )
            self._rows[row].asked = self._round
        calls, self._calls = self._calls, []
        self._child.take(DraftTurn(self._round, calls, list(rows), list(budget), least))
        self._round += 1

    def _wait(self, rows: Sequence[_KnownRow]) -> None:
        """Wait for the drafts of rows that were asked for; ``_late`` if they do not come in time."""
        until = time.monotonic() + PATIENCE
        while not self._late and any(row.draft is None for row in rows):
            left = until - time.monotonic()
            self._late = left <= 0
            self._hear(max(0.0, left))

    def _hear(self, seconds: float) -> None:
        """Take in replies, and wait for the first one this long; replace a process that is lost."""
        child = self._child
        if child is None:
            return
        ready([child], seconds)
        alive = child.write() and child.read()
        for body in child.bodies():
            child.heard = time.monotonic()
            self._take(child.turns.popleft()[0], *pickle.loads(body))
        self._late &= bool(child.turns)
        if not alive or child.silent:
            self._lose(child)

    def _take(self, turn: DraftTurn, round: int, found: list[Draft] | TilthError) -> None:
        """Keep the drafts of rows that wait for those of this round. Raises the drafter's error."""
        if isinstance(found, TilthError):
            raise found
        if round != turn.round:
            raise DraftError(f"the drafter answers round {round}, where it owes {turn.round}", key="draft.round")
        for number, draft in zip(turn.rows, found, strict=True):
            row = self._rows.get(number)
            if row is not None and row.asked == round:
                row.draft = draft
                self._fruitless = 0

    def _lose(self, child: DrafterProcess) -> None:
        child.kill()
        self._pool.children.remove(child)
        self._counts().lost_drafters += 1
        self._fruitless += 1
        self._child, self._calls, self._late = None, [], True
        if RESTARTS.again(fruitless=self._fruitless):
            self._start()
        else:
            self._pool.close()

    def _start(self) -> None:
        """Start a process and tell it of the rows in flight; nothing waits until it has begun."""
        self._child, self._late = self._pool.start(), True
        for number, row in self._rows.items():
            row.asked, row.draft = -1, None
            self._tell("begin", number, row.prompt, np.concatenate(row.said), row.drawn)
        self._ask([], [], 0.0)


def _cut(draft: Draft, most: int) -> Draft:
    """Return the first tokens of a draft, which is a draft: each token comes behind the one that it follows."""
    return Draft(draft.tokens[:most], draft.parents[:most])
