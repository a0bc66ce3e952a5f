"""One episode of a policy: the unit of experience."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tilth.core.errors import TrajectoryError
from tilth.core.media import Media

Finish = Literal["stop", "length", "aborted", "error"]
Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)
OPENS = "opens"
"""Column of a batch's tokens, uint8 [N]: 1 where a further conversation of an episode begins (``Segment.opens``)."""


class Segment(NamedTuple):
    """Tokens of one role, from ``start`` up to the next segment."""

    role: Role
    start: int
    opens: bool = False
    """True if it opens a further conversation of the episode, which sees none of the tokens before it."""


class Likeliest(NamedTuple):
    """Likeliest tokens at n places, int64 [n, k], in descending order, with their log-probs, float32 [n, k]."""

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass
class Trajectory:
    """One episode of prompt, answers and tool results; T tokens, which are never re-tokenised.

    ``mask`` alone decides which tokens are trained. A single turn is one user segment and one assistant segment.
    TrajectoryError for fields that contradict each other.
    """

    id: int  # unique in a run; keys the random numbers of sampling
    prompt: int  # index in its dataset
    group: int  # shared by the samples of one occurrence of the prompt
    tokens: np.ndarray  # int64 [T]
    mask: np.ndarray  # uint8 [T]: 1 where the policy chose the token; only in assistant segments
    logprobs: np.ndarray
    """float32 [T]: log-prob of each chosen token under the behaviour policy at the sampling temperature, before
    top-k/top-p/min-p; 0 where the policy did not choose."""
    sampling_logprobs: np.ndarray | None = None
    """float32 [T]: log-prob under the filtered distribution that was sampled from; None without a filter."""
    segments: list[Segment] = field(default_factory=list)
    """In order, without gaps; default: a user segment up to the first chosen token, then an assistant segment."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first token, policy version) of each span of tokens that one version of the weights made."""
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    """(last token of a turn, its reward), in order, where the environment rewards single turns; ``reward`` has them in
    it."""
    reward: float | None = None  # None before scoring, and if the reward failed
    finish: Finish = "stop"
    text: str = ""  # the last assistant segment decoded, without the end token
    info: dict[str, Any] = field(default_factory=dict)
    routing: np.ndarray | None = None
    """uint8 or int16 [T, layers with experts * k]: experts that each token went through in the engine, layer after
    layer; the dtype's greatest value where they are not known (the last token). None: not recorded."""
    likeliest: Likeliest | None = None
    """Alternatives of each token that the policy chose, if the request asked for them."""
    media: Media = ()
    """Items of its prompt."""

    def __post_init__(self) -> None:
        sizes = {len(self.tokens), len(self.mask), len(self.logprobs)}
        sizes |= set() if self.routing is None else {len(self.routing)}
        self._check(len(sizes) == 1, "tokens", f"tokens, mask and logprobs have {sorted(sizes)} entries")
        if not self.segments:
            first = self.prompt_length
            found = [Segment("user", 0)] * (first > 0) + [Segment("assistant", first)] * (first < len(self.tokens))
            self.segments = found
        # Thousands a step: loops over a few segments take a third of the time of arrays.
        tokens, starts = len(self.tokens), [s.start for s in self.segments]
        ordered = not starts or (starts[0] == 0 and all(a < b for a, b in pairwise([*starts, tokens])))
        self._check(ordered, "segments", f"segments at {starts} do not tile {tokens} tokens")
        others = [(s.start, end) for s, end in zip(self.segments, [*starts[1:], tokens]) if s.role != "assistant"]
        outside = any(self.mask[start:end].any() for start, end in others)
        self._check(not outside, "mask", "the mask has a token outside of assistant segments")
        opens = any(self.mask[start] for start in self.opened)
        self._check(not opens, "mask", "the mask has the first token of a conversation")
        paid = [at for at, _ in self.turn_rewards]
        good = all(a < b for a, b in pairwise(paid)) and all(0 <= at < tokens and self.mask[at] for at in paid)
        self._check(good, "turn_rewards", f"rewards of turns at {paid} are not at chosen tokens in order")

    def _check(self, good: bool, field: str, message: str) -> None:
        if not good:
            raise TrajectoryError(f"trajectory {self.id}: {message}", key=field)

    @property
    def opened(self) -> list[int]:
        """First token of each conversation behind the first one."""
        return [segment.start for segment in self.segments if segment.opens]

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first one that the policy chose."""
        chosen = np.flatnonzero(self.mask)
        return int(chosen[0]) if len(chosen) else len(self.tokens)

    @property
    def completion_length(self) -> int:
        """Number of tokens that the policy chose."""
        return int(self.mask.sum())

    def token_rewards(self) -> np.ndarray:
        """Return the reward of each turn at its last token, float32 [T], 0 elsewhere."""
        found = np.zeros(len(self.tokens), np.float32)
        for at, reward in self.turn_rewards:
            found[at] = reward
        return found


def token_versions(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Return the policy version that chose each token of trajectories one after the other, int32 [N], 0 for others.

    TrajectoryError unless ``versions`` of each is in order and covers every token that was chosen.
    """
    spans, unknown, ends = list[tuple[int, int, int]](), np.iinfo(np.int32).min, [0]
    for row, t in enumerate(trajectories):
        spans.append((row, ends[-1], unknown))
        spans += [(row, ends[-1] + first, version) for first, version in t.versions]
        ends.append(ends[-1] + len(t.tokens))
    rows, first, version = np.array(spans, np.int64).reshape(-1, 3).T
    known, counts = version != unknown, np.diff(first, append=ends[-1])
    good = (counts >= 0) & ~((counts == 0) & known & np.append(known[1:], False))  # the next one is of the same row
    bad = rows[~good]
    if not len(bad):
        mask = np.concatenate([t.mask for t in trajectories]) if len(trajectories) else np.zeros(0, np.uint8)
        found = np.where(mask != 0, np.repeat(version, counts), 0)
        bad = np.searchsorted(ends, np.flatnonzero(found == unknown), "right") - 1
    if len(bad):
        t = trajectories[int(bad[0])]
        message = f"trajectory {t.id}: spans of versions {t.versions} do not cover each chosen token once"
        raise TrajectoryError(message, key="versions")
    return found.astype(np.int32)
