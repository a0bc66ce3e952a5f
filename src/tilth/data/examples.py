"""Prompts as token ids: for generation, and with their answers for supervised learning."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tilth.core.errors import DataError
from tilth.data.prompts import PromptSet
from tilth.data.sources import Prompt
from tilth.data.tokenizer import Tokenizer

_CHECKED = 20_000
"""Prompts tokenised before a run starts; of a larger set, these are the longest."""


class Example(NamedTuple):
    """A supervised example. tokens: int64 [T]; mask: uint8 [T], 1 where the loss is taken."""

    tokens: np.ndarray
    mask: np.ndarray


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer, limit: int) -> list[np.ndarray]:
    """Token ids int64 of each prompt; ``DataError`` for one of more than ``limit`` tokens (context - max_tokens)."""
    rows = tokenizer.encode_all([p.text for p in prompts])
    for prompt, ids in zip(prompts, rows):
        if len(ids) > limit:
            raise DataError(
                f"prompt {prompt.index} has {len(ids)} tokens, but model.context less rollout.max_tokens "
                f"leaves room for {limit}"
            )
        if not ids:
            raise DataError(f"prompt {prompt.index} has no tokens")
    return [np.array(ids, np.int64) for ids in rows]


def check_prompts(prompts: PromptSet, tokenizer: Tokenizer, limit: int) -> int:
    """Tokens of the longest prompt, by tokenising the longest 20,000; raises as ``encode_prompts``."""
    return max(len(ids) for ids in encode_prompts(_checked(prompts), tokenizer, limit))


def check_examples(prompts: PromptSet, tokenizer: Tokenizer, context: int) -> None:
    """Raise as ``supervised`` before a run starts, by the same prompts as ``check_prompts``."""
    supervised(_checked(prompts), tokenizer, context)


def _checked(prompts: PromptSet) -> list[Prompt]:
    return list(prompts) if len(prompts) <= _CHECKED else prompts.longest(_CHECKED)


def supervised(prompts: Sequence[Prompt], tokenizer: Tokenizer, context: int) -> list[Example]:
    """Prompt, answer and end token of each, with the loss on answer and end token.

    Raises ``DataError`` for a prompt without an answer and for an example of more than ``context`` tokens.
    """
    for prompt in prompts:
        if prompt.answer is None:
            raise DataError(
                f"prompt {prompt.index} has no answer, which supervised steps need; or set supervised.steps = 0"
            )
    heads = tokenizer.encode_all([p.text for p in prompts])
    wholes = tokenizer.encode_all([p.text + (p.answer or "") for p in prompts])
    return [_example(p, head, whole, tokenizer, context) for p, head, whole in zip(prompts, heads, wholes)]


def _example(prompt: Prompt, head: list[int], whole: list[int], tokenizer: Tokenizer, context: int) -> Example:
    # The policy will continue the prompt's own tokens, so they must stand as they are: where a tokenizer merges across
    # the border, or ends a text with a token of its own, the answer is tokenised alone.
    continues = whole[: len(head)] == head and len(whole) > len(head)
    tail = whole[len(head) :] if continues else tokenizer.encode(prompt.answer or "", special=False)
    tokens = [*head, *tail, tokenizer.eos_id]
    if len(tokens) > context:
        raise DataError(f"prompt {prompt.index} with its answer has {len(tokens)} tokens; model.context is {context}")
    mask = np.zeros(len(tokens), np.uint8)
    mask[len(head) :] = 1
    return Example(np.array(tokens, np.int64), mask)
