"""Drafters: they guess what completions say next. Imports no torch, so that a process of a drafter begins at once."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tilth.core.errors import TilthError


class DraftError(TilthError):
    """A draft was asked for, or judged, in a way that would change completions: a bug in Tilth or in a drafter."""


class Draft(NamedTuple):
    """Guessed tokens of a row: each follows another one, which comes before it, or the newest token of the row."""

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    """What each follows: i + 1 for token i, 0 for the newest of the row."""


class Drawn(NamedTuple):
    """Random numbers (``Request.draws``) and rules by which the tokens of a row are drawn."""

    stream: tuple[int, int] = (0, 0)
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


USUAL = Drawn()
"""At temperature 1, without filters."""


class Drafter(Protocol):
    """Guesses the next tokens of completions in flight, which are named by their requests.

    Guesses depend on calls alone, by no clock: ranks of one engine guess alike, and a run replays. Calls of ``grow``
    come between the others in a process apart, whose drafts depend on the time that there was for them.
    """

    apart: bool = False
    """True if it begins with drafts before they are asked for (``expect``)."""
    seconds: float = 0.0
    """That a guessed token takes in the engine's process, beside its position in a pass (see ``draft.price``)."""

    def begin(self, row: int, prompt: np.ndarray, completion: np.ndarray, drawn: Drawn = USUAL) -> None:
        """Take a row into flight with all that it has said; of a row in flight, take what it has said beside drafts,
        and drop the draft that has no verdict.

        prompt and completion: int64 [n].
        """

    def propose(self, rows: Sequence[int], budget: Sequence[int], least: float) -> list[Draft]:
        """Return a draft of each row, at most ``budget`` tokens of which each has at least this chance to be said.
        A row without a guess has an empty draft. Raises DraftError if a row's last draft has no verdict yet."""

    def accept(self, rows: Sequence[int], said: Sequence[np.ndarray]) -> None:
        """Take the verdicts: tokens that rows have said, int64 [at least 1] each, those of the draft that stand and one
        more."""

    def forget(self, row: int) -> None:
        """Take a row out of flight, if it is there; what it said may lead later drafts."""

    def note(self, prompt: np.ndarray, completion: np.ndarray) -> None:
        """Take what somebody else has said to a prompt, to lead later drafts. prompt and completion: int64 [n]."""

    def expect(self, rows: Sequence[int], budget: Sequence[int], least: float) -> None:
        """Take what the next ``propose`` of these rows is likely to ask for."""
        return

    def sleep(self) -> None:
        """Give memory back that ``propose`` takes again. Rows stay known; ``begin`` comes before their next drafts."""
        return

    def grow(self) -> bool:
        """Guess on, a little, from what is likely to be said next; False if there is nothing to do for now."""
        return False
