"""Prompts as token ids, checked: for generation, and with their answers for supervised learning."""

import heapq
from collections.abc import Sequence

import numpy as np

from tilth.core.errors import DataError
from tilth.data.prompts import PromptSet
from tilth.data.sources import Joined, Prompt, Records
from tilth.data.template import Example, Template

__all__ = ["Example", "check_example", "check_examples", "check_prompts", "encode_prompts", "supervised"]

_CHECKED = 20_000
"""Prompts tokenised before a run starts; of a larger set, the longest, and the shortest: it may have no tokens."""


def encode_prompts(prompts: Sequence[Prompt], template: Template, limit: int) -> list[np.ndarray]:
    """Token ids int64 of each prompt; ``DataError`` for one of more than ``limit`` tokens (context - max_tokens)."""
    rows = template.prompts(prompts)
    for prompt, ids in zip(prompts, rows):
        if len(ids) > limit:
            raise DataError(
                f"{prompt.name} has {len(ids)} tokens, but model.context less rollout.max_tokens "
                f"leaves room for {limit}"
            )
        if not ids:
            raise DataError(f"{prompt.name} has no tokens")
    return [np.array(ids, np.int64) for ids in rows]


def check_prompts(prompts: PromptSet, template: Template, limit: int) -> int:
    """Tokens of the longest prompt, by tokenising the longest 20,000 and the shortest; raises as ``encode_prompts``."""
    return max(len(ids) for ids in encode_prompts(_checked(prompts), template, limit))


def check_examples(prompts: PromptSet, template: Template, context: int) -> int:
    """Tokens of the longest example, by tokenising the longest 20,000 and the shortest; raises as ``supervised``."""
    return max(len(e.tokens) for e in supervised(_checked(prompts, answers=True), template, context))


def _checked(prompts: PromptSet, answers: bool = False) -> list[Prompt]:
    if len(prompts) <= _CHECKED:
        return list(prompts)
    if answers and isinstance(prompts.source, (Records, Joined)):  # not a task, whose answers are short and many
        longest = heapq.nlargest(_CHECKED, prompts, key=lambda p: len(p.text) + len(p.answer or ""))
        return [*longest, min(prompts, key=lambda p: len(p.text))]
    return prompts.extremes(_CHECKED)


def supervised(prompts: Sequence[Prompt], template: Template, context: int) -> list[Example]:
    """Prompt, answer and end token of each, with the loss on what the policy would write.

    Raises ``DataError`` for a prompt without an answer, and as ``check_example``.
    """
    for prompt in prompts:
        if prompt.answer is None:
            raise DataError(f"{prompt.name} has no answer, which supervised steps need; or set supervised.steps = 0")
    found = template.examples(prompts)
    for prompt, example in zip(prompts, found):
        check_example(prompt, example, context)
    return found


def check_example(prompt: Prompt, example: Example, context: int) -> None:
    """Raise ``DataError`` for more than ``context`` tokens, and for an answer whose prompt has none."""
    if len(example.tokens) > context:
        raise DataError(f"{prompt.name} with its answer has {len(example.tokens)} tokens; model.context is {context}")
    if example.mask[0]:
        raise DataError(
            f"{prompt.name}: the prompt (data.columns.prompt) makes no tokens, so the answer's first token has none "
            "before it that it could be learned from; leave the record out, or take a tokenizer with a begin token"
        )
