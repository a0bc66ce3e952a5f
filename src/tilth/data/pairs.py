"""Pairs of answers to a prompt, one chosen over the other: from files, lists of records and tasks.

A prompt is one item of the data, with all its pairs: it is drawn, held out and weighted as a whole.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tilth.config.plugins import task_names
from tilth.config.schema import ColumnRole, Recipe
from tilth.config.tasks import task_of
from tilth.core.errors import DataError
from tilth.data.columns import (
    Columns,
    Pair,
    Prompt,
    RecordError,
    messages,
    plain,
    short,
    text_of,
    to_prompt,
    turn_of,
    value_of,
)
from tilth.data.computed import Source
from tilth.data.examples import SIDES, Side, checked_prompts, encode_pairs
from tilth.data.origin import NOTHING, Home, Material, RecordOrigin, RecordsByValue
from tilth.data.prompts import load_source
from tilth.data.records import PromptSet
from tilth.data.sources import Read, gather, read_documents, read_prompts
from tilth.data.template import Template

_TOGETHER = 1024
"""Prompts whose pairs are tokenised at once."""


class TaskPairs:
    """Prompts of a task with one pair each: the right answer is chosen, a plausible wrong one rejected.

    Hashes are those of the task, so successive flows on it hold out the same prompts. Wrong answers have the
    characters of right ones.
    """

    def __init__(self, task: Source, wrong: Callable[[Prompt], str]) -> None:
        self.task, self._wrong = task, wrong

    def __len__(self) -> int:
        return len(self.task)

    def prompt(self, index: int) -> Prompt:
        prompt = self.task.prompt(index)
        return replace(prompt, pairs=(Pair(prompt.answer or "", self._wrong(prompt)),))

    @property
    def hashes(self) -> np.ndarray:
        return self.task.hashes

    def sizes(self) -> np.ndarray:
        return self.task.sizes()

    def alphabet(self) -> str:
        return self.task.alphabet()

    def fingerprint(self) -> str:
        return f"pairs of {self.task.fingerprint()}"


# -- reading -----------------------------------------------------------------------------------------------------------


def recipe_prompts(recipe: Recipe, brought: RecordsByValue = NOTHING) -> PromptSet:
    """Load the data of a recipe: pairs if its flow learns from pairs, documents if from documents, else prompts."""
    readers: dict[str, Read] = {"documents": read_documents, "pairs": read_pairs}
    read = readers.get(recipe.flow_spec.learns, read_prompts)
    return load_source(recipe.data, brought, read, Home(str(Path(recipe.run.dir).resolve()), recipe.seed))


def read_pairs(origin: RecordOrigin) -> Source:
    """Return the prompts of a source with their pairs.

    Records have columns prompt, chosen, rejected and, where pairs differ in strength, margin. chosen and rejected are
    texts or lists of messages; lists may hold the prompt's turns themselves, and then no prompt is needed.
    Records of one prompt are pairs of one prompt. Raises ``DataError``.
    """
    if not origin.is_task:
        material = origin.material()
        assert isinstance(material, Material)
        return gather(read_pairs, origin, material, partial(_paired, columns=origin.columns), join=_grouped)
    if wrong := task_of(origin.name).wrong:
        return TaskPairs(read_prompts(origin), wrong)
    having = ", ".join(other for other in task_names() if task_of(other).wrong)
    message = f"{origin.key} = {origin.name} has no pairs of answers; tasks that have are {having}"
    raise DataError(message, key=f"{origin.key}.pairs")


def _paired(record: Any, where: str, number: int, columns: Columns) -> Prompt:
    prompt, pair = to_pair(record, where, columns)
    return replace(prompt, pairs=(pair,))


def _grouped(records: Iterable[Prompt]) -> Iterator[Prompt]:
    """Merge records of the same prompt into one item, at the place of the first."""
    prompts: list[Prompt] = []
    pairs: list[list[Pair]] = []
    known: dict[str, int] = {}
    for prompt in records:
        at = known.setdefault(json.dumps([prompt.text, prompt.messages, prompt.tools]), len(prompts))
        if at == len(prompts):
            prompts.append(replace(prompt, index=at))
            pairs.append([])
        pairs[at] += prompt.pairs
    for p, mine in zip(prompts, pairs):
        yield replace(p, info={**p.info, "pairs": [list(pair[:3]) for pair in mine]}, pairs=tuple(mine))


def to_pair(record: Any, where: str, columns: Columns) -> tuple[Prompt, Pair]:
    """Return the prompt of a record, with the chosen answer as its answer, and the pair.

    Raises ``DataError`` with the place for a missing column, an answer that is null or not the assistant's, two
    prompts, two equal answers, a margin that is no number, and a misspelt margin.
    """
    if not isinstance(record, Mapping):
        raise RecordError.at(f"a {type(record).__name__}, not an object with chosen and rejected", where, key="type")
    _check_margin_spelling(record, where, columns)
    sides = {side: _side(record, side, where, columns) for side in SIDES}
    prompt = _prompt(record, where, columns, sides)
    (_, chosen), (_, rejected) = sides["chosen"], sides["rejected"]
    if chosen == rejected:
        message = f"chosen and rejected are the same answer, {short(chosen)}"
        raise RecordError.at(message, where, key="rejected.same")
    if prompt.answer is None:
        prompt.info["answer"] = chosen
    prompt = replace(prompt, answer=chosen, info=dict(plain(prompt.info, where)))
    return prompt, Pair(chosen, rejected, _margin(record, where, columns), where)


Turns = tuple[dict[str, Any], ...]


def _side(record: Mapping[str, Any], side: Side, where: str, columns: Columns) -> tuple[Turns, str]:
    """Turns before an answer, if the column has turns, and the answer."""
    name = columns.get(side, side)
    value = value_of(record, side, name, where)
    if value is None:
        message = f"{name} is null; a pair needs both a chosen and a rejected answer"
        raise RecordError.at(message, where, key=f"{name}.null")
    if isinstance(value, (list, tuple)) and len(value) == 1:
        turns: Turns = (turn_of(value[0], where, f"{name}[0]"),)
    elif isinstance(value, (list, tuple, dict)):
        turns = messages(value, where, name)
    else:
        return (), text_of(value, where, name)
    if turns[-1]["role"] != "assistant":
        message = f"{name} ends with the {turns[-1]['role']}'s turn, not with the assistant's answer"
        raise RecordError.at(message, where, key=f"{name}.last")
    if turns[-1].get("tool_calls"):
        message = f"{name} ends with tool_calls, but the answers of a pair are texts; write the call into content"
        raise RecordError.at(message, where, key=f"{name}.tool_calls")
    return turns[:-1], turns[-1]["content"]


def _prompt(record: Mapping[str, Any], where: str, columns: Columns, sides: Mapping[Side, tuple[Turns, str]]) -> Prompt:
    """Prompt of the two answers: its own column, or the turns that the two sides begin with."""
    used = {columns.get(role, role) for role in (*SIDES, "margin")}
    rest = {key: value for key, value in record.items() if key not in used}
    before = [turns for turns, _ in sides.values() if turns]
    if "prompt" not in columns and "prompt" not in record and len(before) == 2:
        asked = {**rest, "messages": list(before[0])}
        found = to_prompt(asked, 0, where, {**_only(columns, "tools"), "messages": "messages"})
    else:
        found = to_prompt(rest, 0, where, _only(columns, "prompt", "answer", "tools"))
    for side, (turns, _) in sides.items():
        if turns and not _same(found, turns):
            last = short(found.messages[-1]["content"] if found.messages else found.text)
            message = f"prompt differs inside the pair: {side} answers {short(turns[-1]['content'])}, not {last}"
            raise RecordError.at(message, where, key=f"{side}.prompt")
    return replace(found, messages=before[0]) if before and not found.messages else found


def _only(columns: Columns, *roles: str) -> dict[ColumnRole, str]:
    return {role: name for role, name in columns.items() if role in roles}


def _same(prompt: Prompt, turns: Turns) -> bool:
    """True if the turns before an answer are the prompt: all of its turns, or its text as the last one."""
    if prompt.messages:
        return list(prompt.messages) == list(turns)
    return turns[-1]["content"].strip() == prompt.key


def _margin(record: Mapping[str, Any], where: str, columns: Columns) -> float:
    """Margin of a pair; a text is parsed, since every value of a CSV file is a text."""
    name = columns.get("margin", "margin")
    if "margin" not in columns and name not in record:
        return 0.0
    value = value_of(record, "margin", name, where)
    try:
        margin = float(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        margin = math.nan
    if not math.isfinite(margin):
        raise RecordError.at(f"{name} is {short(value)}, not a number", where, key=f"{name}.type")
    return margin


def _check_margin_spelling(record: Mapping[str, Any], where: str, columns: Columns) -> None:
    """Raise for a column that is nearly ``margin``: the optional column must not be missed for its spelling."""
    if "margin" in record or "margin" in columns:
        return
    for key in difflib.get_close_matches("margin", [str(key) for key in record], 1, 0.75):
        if key not in columns.values():
            message = f"unknown key {key!r}; did you mean 'margin'? (or data.columns.margin={key})"
            raise RecordError.at(message, where, key=key)


def check_pairs(prompts: PromptSet, template: Template, context: int) -> int:
    """Return the tokens of the longest answer with its prompt, from the 20,000 prompts that are longest with their
    longest answer, and the shortest.

    Raises the errors of ``encode_pairs``, and for a set without prompts.
    """
    indices = [prompt.index for prompt in checked_prompts(prompts, answers=True)]
    chunks = (indices[start : start + _TOGETHER] for start in range(0, len(indices), _TOGETHER))
    encoded = (one for chunk in chunks for one in encode_pairs(prompts, chunk, template, context))
    return max((max(len(one.chosen.tokens), len(one.rejected.tokens)) for one in encoded), default=0)
