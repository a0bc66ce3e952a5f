"""One episode of a policy: the unit of experience."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Finish = Literal["stop", "length", "aborted", "error"]


@dataclass
class Trajectory:
    """One episode: a prompt and what the policy made of it. Token ids are the truth and are never re-tokenised.

    All per-token arrays have the length T of ``tokens`` (prompt and completion together), so that a multi-turn
    episode is the same type with more runs in ``loss_mask``.
    """

    id: int
    """Global id, unique in a run; keys the random numbers of sampling."""
    prompt: int
    """Index of the prompt in its dataset."""
    group: int
    """Id of this occurrence of the prompt; samples of one occurrence share it."""
    tokens: np.ndarray
    """int64 [T]."""
    loss_mask: np.ndarray
    """uint8 [T], 1 where the policy chose the token."""
    logprobs: np.ndarray
    """float32 [T]: log-prob of each chosen token under the behaviour policy at the sampling temperature, before
    top-k/top-p/min-p; 0 where the policy did not choose."""
    sampling_logprobs: np.ndarray | None = None
    """float32 [T]: log-prob under the distribution that was really sampled from (after filters); None if no filter."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(first token index, policy version) for each span of tokens made by one version of the weights."""
    reward: float | None = None
    """None while not scored, or missing: a failed reward is missing, never 0."""
    finish: Finish = "stop"
    text: str = ""
    """The completion decoded, without the end token."""
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one that the policy chose."""
        chosen = np.flatnonzero(self.loss_mask)
        return int(chosen[0]) if len(chosen) else len(self.tokens)

    @property
    def completion_length(self) -> int:
        """Number of tokens that the policy chose."""
        return int(self.loss_mask.sum())
