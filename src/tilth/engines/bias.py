"""Changes of a completion's logits before a token is drawn: biases, penalties, no end before some tokens."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tilth.engines.request import SamplingParams


class LogitBias:
    """Addends of the logits of one completion, as OpenAI and vLLM define them.

    To each token its ``logit_bias``, minus ``presence_penalty`` if the completion has it, minus ``frequency_penalty``
    for each time; minus infinity to ``stop_tokens`` while the completion has fewer than ``min_tokens``.
    """

    def __init__(self, params: "SamplingParams", vocabulary: int) -> None:
        self._params, self._left = params, params.min_tokens
        self._fixed, self._counts = np.zeros(vocabulary, np.float32), np.zeros(vocabulary, np.float32)
        for token, value in params.logit_bias:
            self._fixed[token] = value

    def push(self, ids: Iterable[int]) -> bool:
        """Add the next tokens; False, since no completion ends by them."""
        for id in ids:
            self._counts[id] += 1
            self._left -= 1
        return False

    def change(self) -> np.ndarray:
        """Return what is added to the logits at the sampling temperature, float32 [vocabulary]."""
        p = self._params
        found = self._fixed - p.frequency_penalty * self._counts - p.presence_penalty * (self._counts > 0)
        found = (found / (p.temperature or 1.0)).astype(np.float32)
        if self._left > 0:
            found[list(p.stop_tokens)] = -np.inf
        return found
