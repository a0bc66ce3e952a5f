"""Samples of prompts as tokens: what the loader role, and its processes, make of the data. Imports no torch."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from tilth.core.errors import DataError
from tilth.data.computed import has_media
from tilth.data.examples import Encoded, encode_pairs, pairs_of, supervised
from tilth.data.records import PromptSet
from tilth.data.template import Template

Kind = Literal["examples", "pairs", "prompts", "begins", "episodes"]
"""Prompt and answer; all pairs of a prompt, the chosen side before the rejected one; prompt; beginning of an episode;
what begins an environment."""


class LoadedSample(NamedTuple):
    """Rows of one prompt."""

    rows: tuple[np.ndarray, ...]
    """Token ids int64 [T] of each row; of kind "episodes" one row of uint8, JSON (``Prompt.episode``)."""
    masks: tuple[np.ndarray, ...] = ()
    """uint8 [T] of each row, 1 where the loss is taken; of kinds with answers alone."""
    margins: tuple[float, ...] = ()
    """Margin of each pair."""

    @property
    def tokens(self) -> int:
        """Number of tokens in all rows."""
        return sum(map(len, self.rows))


def tokenised(
    kind: Kind, prompts: PromptSet, indices: Sequence[int], template: Template, context: int
) -> list[LoadedSample]:
    """Return the samples at these indices, in order; each depends on its own prompt alone.

    Raises the errors of the source, of the template, of ``supervised`` and ``encode_pairs``; ``DataError`` for media of
    a source that has none.
    """
    if kind == "pairs":
        encoded = iter(encode_pairs(prompts, indices, template, context))
        return [_paired([next(encoded) for _ in pairs_of(prompts, i)]) for i in indices]
    asked = [prompts[i] for i in indices]
    if kind == "episodes":
        return [LoadedSample((np.frombuffer(prompt.episode.encode(), np.uint8),)) for prompt in asked]
    if kind == "examples":
        found = [LoadedSample((one.tokens,), (one.mask,)) for one in supervised(asked, template, context)]
    elif kind == "begins":
        found = [_asked(template.begin(prompt.asked)) for prompt in asked]
    else:
        found = list(map(_asked, template.prompts(asked)))
    if not has_media(prompts.source) and any(prompt.media for prompt in asked):
        message = "a prompt has media, and its source no attribute media = True, which says so"
        raise DataError(f"{message}; set it", key="data.media")
    return found


def _asked(ids: Sequence[int]) -> LoadedSample:
    return LoadedSample((np.array(ids, np.int64),))


def _paired(pairs: Sequence[Encoded]) -> LoadedSample:
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    rows, masks = tuple(side.tokens for side in sides), tuple(side.mask for side in sides)
    return LoadedSample(rows, masks, tuple(pair.margin for pair in pairs))
