"""Growing columns of an episode's conversation: a turn appends what is new, and the end copies them out once."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from tilth.core.trajectory import Finish, Role, Segment, Trajectory


class TrajectoryBuffer:
    """Tokens of one conversation with the columns of ``Trajectory``, in arrays that double when they are full.

    Tokens that are there never change, so views of them stay valid.
    """

    def __init__(self) -> None:
        self.length = 0
        self.last = -1
        """Newest token that the policy chose; -1: none."""
        self.segments: list[Segment] = []
        self.versions: list[tuple[int, int]] = []
        self.rewards: list[tuple[int, float]] = []
        """(last token of a turn, its reward), where the environment gives one."""
        self.routing: np.ndarray | None = None
        self.text = ""
        self.finish: Finish = "stop"
        self.filtered = False
        """True if a turn was drawn through filters; ``sampling_logprobs`` are ``logprobs`` where none was."""
        dtypes = {"tokens": np.int64, "mask": np.uint8, "logprobs": np.float32, "sampling_logprobs": np.float32}
        self._columns = {name: np.zeros(0, dtype) for name, dtype in dtypes.items()}

    @classmethod
    def of(cls, t: Trajectory, rewards: Sequence[Sequence[Any]]) -> "TrajectoryBuffer":
        """Return the buffer of a conversation so far. rewards: (last token of a turn, its reward)."""
        made = cls()
        made.take(t)
        made.rewards = [(at, reward) for at, reward in rewards]
        return made

    @property
    def tokens(self) -> np.ndarray:
        """Tokens so far, int64 [length], a view."""
        return self._columns["tokens"][: self.length]

    def read(self, role: Role, ids: Sequence[int]) -> None:
        """Append a segment of tokens that the policy did not choose."""
        self.segments.append(Segment(role, self.length))
        self._append(tokens=np.asarray(ids, np.int64))

    def take(self, turn: Trajectory) -> None:
        """Append the policy's turn. turn: of a request whose prompt is all that is here; an empty buffer takes that
        too."""
        start, version = self.length, self.versions[-1][1] if self.versions else None
        new = Segment("assistant", start)
        self.segments += ([new] if len(turn.tokens) > start else []) if start else turn.segments
        self.versions += [span for span in turn.versions if span[1] != version]
        self.routing, self.text, self.finish = turn.routing, turn.text, turn.finish
        mask, logprobs = turn.mask[start:], turn.logprobs[start:]
        self.filtered |= turn.sampling_logprobs is not None
        if len(chosen := np.flatnonzero(mask)):
            self.last = start + int(chosen[-1])
        sampling = logprobs if turn.sampling_logprobs is None else turn.sampling_logprobs[start:]
        self._append(turn.tokens[start:], mask=mask, logprobs=logprobs, sampling_logprobs=sampling)

    def pay(self, reward: float) -> None:
        """Note the newest turn's reward at its last token; that of a turn without tokens goes to the one before."""
        if self.last >= 0 and reward:
            more = self.rewards.pop()[1] if self.rewards and self.rewards[-1][0] == self.last else 0.0
            self.rewards.append((self.last, more + reward))

    def columns(self, length: int) -> dict[str, np.ndarray]:
        """Return the first ``length`` numbers of each column of ``Trajectory``, views."""
        return {name: column[:length] for name, column in self._columns.items()}

    def _append(self, tokens: np.ndarray, **more: np.ndarray) -> None:
        """Append numbers to all columns, 0 to those without any."""
        end, new = self.length + len(tokens), {"tokens": tokens, **more}
        for name, column in self._columns.items():
            if end > len(column):
                grown = self._columns[name] = np.zeros(max(end, 2 * len(column)), column.dtype)
                grown[: self.length] = column[: self.length]
            if name in new:
                self._columns[name][self.length : end] = new[name]
        self.length = end


def joined(id: int, prompt: int, group: int, buffers: Sequence[TrajectoryBuffer], at: int, *, cut: bool) -> Trajectory:
    """Return the conversations of an episode one after another, with text and finish of conversation ``at``.

    cut: leave out what follows the policy's last token of each.
    """
    lengths = [one.last + 1 if cut else one.length for one in buffers]
    starts = np.cumsum([0, *lengths]).tolist()
    placed = list(zip(buffers, starts, lengths))
    columns = [one.columns(length) for one, _, length in placed]
    whole: dict[str, Any] = {name: np.concatenate([some[name] for some in columns]) for name in columns[0]}
    if not any(one.filtered for one in buffers):
        del whole["sampling_logprobs"]
    routing = [one.routing[:length] for one, _, length in placed if one.routing is not None]
    known = sum(map(len, routing)) == starts[-1]
    return Trajectory(
        id,
        prompt,
        group,
        **whole,
        segments=[
            Segment(s.role, s.start + start, start > 0 and s.start == 0)
            for one, start, length in placed
            for s in one.segments
            if s.start < length
        ],
        versions=[(t + start, version) for one, start, length in placed for t, version in one.versions if t < length],
        turn_rewards=[(t + start, reward) for one, start, _ in placed for t, reward in one.rewards],
        finish=buffers[at].finish,
        text=buffers[at].text,
        routing=np.concatenate(routing) if known and routing else None,
    )


def parted(t: Trajectory) -> list[Trajectory]:
    """Return the conversations of a trajectory that ``joined`` has made, without rewards of turns."""
    return [_slice(t, begin, end) for begin, end in pairwise([0, *t.opened, len(t.tokens)])]


def _slice(t: Trajectory, begin: int, end: int) -> Trajectory:
    some = slice(begin, end)
    return replace(
        t,
        tokens=t.tokens[some],
        mask=t.mask[some],
        logprobs=t.logprobs[some],
        sampling_logprobs=None if t.sampling_logprobs is None else t.sampling_logprobs[some],
        segments=[Segment(s.role, s.start - begin) for s in t.segments if begin <= s.start < end],
        versions=[(first - begin, version) for first, version in t.versions if begin <= first < end],
        turn_rewards=[],
        routing=None if t.routing is None else t.routing[some],
    )
