"""One episode of a policy: the unit of experience."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tilth.core.errors import TrajectoryError

Finish = Literal["stop", "length", "aborted", "error"]
Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)


class Segment(NamedTuple):
    """Tokens of one role in an episode, from ``start`` up to the next segment."""

    role: Role
    start: int


@dataclass
class Trajectory:
    """One episode: what the policy was given and what it made of it. Token ids are never re-tokenised.

    All per-token arrays have the length T of ``tokens``. ``mask`` alone says what is trained; a single turn is one
    user segment and one assistant segment. Raises TrajectoryError for parts that contradict each other.
    """

    id: int
    """Global id, unique in a run; keys the random numbers of sampling."""
    prompt: int
    """Index of the prompt in its dataset."""
    group: int
    """Id of this occurrence of the prompt; samples of one occurrence share it."""
    tokens: np.ndarray
    """int64 [T]."""
    mask: np.ndarray
    """uint8 [T], 1 where the policy chose the token; only in assistant segments."""
    logprobs: np.ndarray
    """float32 [T]: log-prob of each chosen token under the behaviour policy at the sampling temperature, before
    top-k/top-p/min-p; 0 where the policy did not choose."""
    sampling_logprobs: np.ndarray | None = None
    """float32 [T]: log-prob under the distribution that was really sampled from (after filters); None if no filter."""
    segments: list[Segment] = field(default_factory=list)
    """In order, without gaps; none given: a user segment up to the first chosen token, then an assistant segment."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first token index, policy version) for each span of tokens made by one version of the weights."""
    reward: float | None = None
    """None while not scored, or missing: a failed reward is missing, never 0."""
    finish: Finish = "stop"
    text: str = ""
    """The last assistant segment decoded, without the end token."""
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = {len(self.tokens), len(self.mask), len(self.logprobs)}
        self._check(len(sizes) == 1, "tokens", f"tokens, mask and logprobs have {sorted(sizes)} entries")
        if not self.segments:
            first = self.prompt_length
            found = [Segment("user", 0)] * (first > 0) + [Segment("assistant", first)] * (first < len(self.tokens))
            self.segments = found
        starts = np.array([s.start for s in self.segments], np.int64)
        spans = np.diff(starts, append=len(self.tokens))
        ordered = not len(starts) or (starts[0] == 0 and (spans > 0).all())
        tokens = len(self.tokens)
        self._check(bool(ordered), "segments", f"segments at {starts.tolist()} do not tile {tokens} tokens")
        spoken = np.repeat(np.array([s.role == "assistant" for s in self.segments], bool), spans)
        self._check(not self.mask[~spoken].any(), "mask", "the mask has a token outside of assistant segments")

    def _check(self, good: bool, field: str, what: str) -> None:
        if not good:
            raise TrajectoryError(f"trajectory {self.id}: {what}", key=field)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one that the policy chose."""
        chosen = np.flatnonzero(self.mask)
        return int(chosen[0]) if len(chosen) else len(self.tokens)

    @property
    def completion_length(self) -> int:
        """Number of tokens that the policy chose."""
        return int(self.mask.sum())

    def token_versions(self) -> np.ndarray:
        """Version of the policy that chose each token, int32 [T]; 0 where it chose none. TrajectoryError unless the
        spans of ``versions`` are in order and cover every chosen token."""
        starts = np.array([start for start, _ in self.versions], np.int64)
        span = np.searchsorted(starts, np.arange(len(self.tokens)), side="right") - 1
        covered = (np.diff(starts) > 0).all() and not np.any(self.mask[span < 0])
        self._check(bool(covered), "versions", f"spans of versions {self.versions} do not cover each chosen token once")
        versions = np.array([version for _, version in self.versions] or [0], np.int32)
        return np.where(self.mask != 0, versions[span], 0).astype(np.int32)
