"""What is asked of the engine, and the state of one answer on its way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilth.core.errors import DataError
from tilth.core.trajectory import Finish, Segment, Trajectory
from tilth.rollout.blocks import BlockTable
from tilth.rollout.stops import StopStrings


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is chosen and where it ends. Raises DataError on impossible values.

    Filters act in this order on the softmax at ``temperature``: the ``top_k`` likeliest (0: all), of these the smallest
    set with mass ``top_p``, of these the tokens at least ``min_p`` times as likely as the likeliest. A token as likely
    as the last one kept is kept too. ``temperature`` 0 takes the likeliest token (filters change nothing); its
    log-probs are those at temperature 1.

    A completion ends with any of ``stop_tokens`` (the end token belongs to it), when its text contains one of the
    strings ``stop`` (all its tokens are kept, ``Trajectory.text`` ends before the string), or after ``max_tokens``.
    A special token may be such a string or stand in one, though a text is without it.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self.max_tokens > 0, "max_tokens", self.max_tokens, "positive")
        _check(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        _check(self.top_k >= 0, "top_k", self.top_k, "at least 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _check(
            not isinstance(self.stop, str) and all(self.stop),
            "stop",
            self.stop,
            "a tuple of strings that are not empty",
        )

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from another distribution than the softmax at ``temperature``."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def _check(good: bool, name: str, value: object, right: str) -> None:
    if not good:
        raise DataError(f"sampling {name} is {value!r}; it must be {right}", key=name)


@dataclass(frozen=True)
class Request:
    """One completion that is wanted. Samples of one group that stand side by side share the work on their prompt."""

    id: int
    """Unique among requests in flight; keys the random numbers, and becomes ``Trajectory.id``."""
    prompt: Sequence[int] | np.ndarray
    """Token ids, at least one."""
    params: SamplingParams = SamplingParams()
    group: int = 0
    prompt_index: int = 0
    """Index of the prompt in its dataset; becomes ``Trajectory.prompt``."""
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class SequenceState:
    """A trajectory in the making. Columns as in ``Trajectory``; while it decodes, the newest tokens are in its lane."""

    request: Request
    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    sampling: np.ndarray | None
    segments: list[Segment]
    """Those before the one that is being written."""
    versions: list[tuple[int, int]]
    end: int
    """Length in tokens at which it ends for want of room."""
    stops: StopStrings | None = None
    table: BlockTable = field(default_factory=BlockTable)
    order: int = -1
    """Rank of its admission; the highest is preempted first."""
    stale: bool = False
    """Whether its KV was made by other weights than those that generate now."""

    @classmethod
    def start(cls, request: Request) -> "SequenceState":
        """From the prompt."""
        tokens = np.asarray(request.prompt, np.int64)
        n = len(tokens)
        sampling = np.zeros(n, np.float32) if request.params.filtered else None
        end = n + request.params.max_tokens
        segments = [Segment("user", 0)]
        return cls(request, tokens, np.zeros(n, np.uint8), np.zeros(n, np.float32), sampling, segments, [], end)

    @classmethod
    def resume(cls, t: Trajectory, params: SamplingParams) -> "SequenceState":
        """From a partial trajectory: its last assistant segment, or a new one where another role spoke last.

        ``max_tokens`` counts the tokens that the segment has already.
        """
        *before, last = t.segments
        before, begin = (before, last.start) if last.role == "assistant" else (t.segments, len(t.tokens))
        request = Request(t.id, t.tokens[:begin], params, t.group, t.prompt, t.info)
        sampling = t.sampling_logprobs
        if params.filtered and sampling is None:
            sampling = t.logprobs
        end = begin + params.max_tokens
        return cls(request, t.tokens, t.mask, t.logprobs, sampling, list(before), list(t.versions), end)

    def append(self, tokens: np.ndarray, logprobs: np.ndarray, sampling: np.ndarray | None) -> None:
        """Add chosen tokens. Equal-length arrays, copied."""
        self.tokens = np.concatenate([self.tokens, tokens])
        self.mask = np.concatenate([self.mask, np.ones(len(tokens), np.uint8)])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        if self.sampling is not None:
            self.sampling = np.concatenate([self.sampling, logprobs if sampling is None else sampling])

    @property
    def completion(self) -> np.ndarray:
        """Tokens after the prompt."""
        return self.tokens[len(self.request.prompt) :]

    def stamp(self, version: int) -> None:
        """Tokens from here on are made by this version of the weights."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))

    def finish(self, reason: Finish, text: str) -> Trajectory:
        """The result. A version, or an assistant, that made no token leaves no span."""
        r = self.request
        segments = [*self.segments, Segment("assistant", len(r.prompt))] if len(self.completion) else self.segments
        versions = [span for span in self.versions if span[0] < len(self.tokens)]
        return Trajectory(
            id=r.id, prompt=r.prompt_index, group=r.group, tokens=self.tokens, mask=self.mask,
            logprobs=self.logprobs, sampling_logprobs=self.sampling, segments=segments, versions=versions,
            finish=reason, text=text, info=r.info,
        )  # fmt: skip
