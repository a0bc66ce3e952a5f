"""Encode prompts as token ids and check their length: for generation, with answers, or with pairs of answers; and the
samples that the loader role, and its processes, make of the data. Imports no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from tilth.core.errors import DataError
from tilth.core.media import check_media
from tilth.data.cache import CacheEntry
from tilth.data.columns import SYNONYMS, Pair, Prompt, RecordError, record_key
from tilth.data.computed import has_media
from tilth.data.records import PromptSet, wholes_of
from tilth.data.template import Example, Template

_CHECKED = 20_000
"""Prompts tokenised before a run starts; of a larger set, the longest, and the shortest: it may have no tokens."""

_AT_ONCE = 500
Side = Literal["chosen", "rejected"]
SIDES: tuple[Side, Side] = ("chosen", "rejected")


def encode_prompts(prompts: Sequence[Prompt], template: Template, limit: int) -> list[np.ndarray]:
    """Return token ids int64 of each prompt.

    limit: model.context - rollout.max_tokens. Raises ``DataError`` for a prompt of no tokens, or of more than limit.
    """
    rows = template.prompts(prompts)
    for prompt, ids in zip(prompts, rows):
        if len(ids) > limit:
            message = f"{prompt.name} has {len(ids)} tokens, but model.context less rollout.max_tokens leaves {limit}"
            raise DataError(message, key=record_key(prompt.name, "tokens"))
        if not ids:
            raise DataError(f"{prompt.name} has no tokens", key=record_key(prompt.name, "empty"))
        check_media(prompt.media, len(ids), prompt.name)
    return [np.array(ids, np.int64) for ids in rows]


def check_prompts(prompts: PromptSet, template: Template, limit: int) -> int:
    """Return the tokens of the longest prompt, from the longest 20,000 and the shortest.

    Raises the errors of ``encode_prompts``.
    """
    return max(len(ids) for ids in encode_prompts(checked_prompts(prompts), template, limit))


def check_examples(prompts: PromptSet, template: Template, context: int) -> int:
    """Return the tokens of the longest example, from the longest 20,000 and the shortest.

    Raises the errors of ``supervised``.
    """
    checked = checked_prompts(prompts, answers=True)
    parts = (checked[i : i + _AT_ONCE] for i in range(0, len(checked), _AT_ONCE))  # conversations take much memory
    return max(len(e.tokens) for part in parts for e in supervised(part, template, context))


def checked_prompts(prompts: PromptSet, answers: bool = False) -> list[Prompt]:
    """Return the prompts to tokenise before a run starts: all, or the longest 20,000 and the shortest.

    answers: measure a record's prompt with its answer, the longest one of pairs.
    """
    if len(prompts) <= _CHECKED:
        return list(prompts)
    return prompts.extremes(_CHECKED, wholes_of(prompts.source) if answers else None)


def token_lengths(prompts: PromptSet, template: Template, entry: CacheEntry, *, answers: bool) -> np.ndarray:
    """Return the tokens of each sample by index in its source, template and special tokens included: int64 [source].

    answers: of examples, and of both sides of a prompt's pairs; else of prompts. entry: where they are kept, which
    depends on all of this; 0 for indices that are not in the set. Raises the errors of the template and
    ``StorageError``.
    """
    if entry.damage() != "":
        found = np.zeros(len(prompts.source), np.int64)
        for start in range(0, len(prompts), _AT_ONCE):
            rows = prompts.rows[start : start + _AT_ONCE]
            found[rows] = _lengths([prompts[i] for i in rows], template, answers=answers)
        with entry.writing("the lengths of the data") as (file, _), open(file, "wb") as opened:
            np.save(opened, found)
    return np.asarray(np.load(entry.file))


def _lengths(prompts: Sequence[Prompt], template: Template, *, answers: bool) -> list[int]:
    if not answers:
        return [len(ids) for ids in template.prompts(prompts)]
    sides = [[replace(p, answer=side) for pair in p.pairs for side in pair[:2]] or [p] for p in prompts]
    lengths = iter([len(e.tokens) for e in template.examples([one for own in sides for one in own])])
    return [sum(next(lengths) for _ in own) for own in sides]


def supervised(prompts: Sequence[Prompt], template: Template, context: int) -> list[Example]:
    """Return prompt, answer and end token of each, with the loss on the tokens the policy would generate.

    Raises ``DataError`` for a prompt without an answer, and the errors of ``check_example``.
    """
    for prompt in prompts:
        if prompt.answer is None:
            like = next((name for name in SYNONYMS["answer"] if isinstance(prompt.info.get(name), str)), "")
            hint = f"if it is in the column {like}, set data.columns.answer={like}; " if like else ""
            message = f"{prompt.name} has no answer, which supervised steps need; {hint}or set supervised.steps = 0"
            raise DataError(message, key=record_key(prompt.name, "answer"))
    found = template.examples(prompts)
    for prompt, example in zip(prompts, found):
        check_example(prompt, example, context)
    return found


def check_example(prompt: Prompt, example: Example, context: int) -> None:
    """Raise ``DataError`` for more than ``context`` tokens, and for an answer whose prompt has none."""
    if len(example.tokens) > context:
        found = f"{prompt.name} with its answer has {len(example.tokens)} tokens"
        message = f"{found}; model.context is {context}: raise it, or leave the record out"
        raise DataError(message, key=record_key(prompt.name, "tokens"))
    if example.mask[0]:
        raise RecordError.at(
            "the prompt (data.columns.prompt) has no tokens, so nothing predicts the answer's first token; leave the "
            "record out, or use a tokenizer with a begin token",
            prompt.name,
            key="empty",
        )
    check_media(prompt.media, int(example.mask.argmax()) or len(example.tokens), prompt.name)


# -- pairs -------------------------------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """One pair as tokens; the masks are 1 on the answer and its end alone, whatever turns come before."""

    prompt: int
    margin: float
    chosen: Example
    rejected: Example


def pairs_of(prompts: PromptSet, index: int) -> tuple[Pair, ...]:
    """Return the pairs of a prompt; ``DataError`` for data without pairs."""
    found = prompts[index].pairs
    if not found:
        raise DataError("the data has no pairs; give columns prompt, chosen and rejected", key="pairs")
    return found


def encode_pairs(prompts: PromptSet, indices: Iterable[int], template: Template, context: int) -> list[Encoded]:
    """Encode all pairs of these prompts, in order. Raises the errors of ``check_example`` and of the template."""
    asked = [(prompts[int(i)], pair) for i in indices for pair in pairs_of(prompts, int(i))]
    answered = [_answered(prompt, pair, side) for prompt, pair in asked for side in SIDES]
    examples = [answer_only(example) for example in template.examples(answered)]
    for prompt, example in zip(answered, examples):
        check_example(prompt, example, context)
    sides = iter(examples)
    return [Encoded(prompt.index, pair.margin, next(sides), next(sides)) for prompt, pair in asked]


def _answered(prompt: Prompt, pair: Pair, side: Side) -> Prompt:
    answer = pair.chosen if side == "chosen" else pair.rejected
    turns = prompt.messages
    if turns and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    return replace(prompt, answer=answer, messages=turns, where=f"{pair.where or prompt.name}, {side}")


def answer_only(example: Example) -> Example:
    """Restrict the loss to the last turn: earlier ones are equal on the two sides of a pair."""
    mask = example.mask.copy()
    others = np.flatnonzero(mask == 0)
    last = int(np.flatnonzero(mask)[-1])
    before = others[others < last]
    mask[: before[-1] if len(before) else 0] = 0
    return Example(example.tokens, mask)


# ---- samples of prompts ----

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
