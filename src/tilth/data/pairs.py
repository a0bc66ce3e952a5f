"""Pairs of answers to a prompt, one chosen over the other: from files, lists of records and tasks.

A prompt is one item of the data, with all its pairs: it is drawn, held out and weighed as a whole.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from tilth.config.plugins import task_names
from tilth.config.schema import DataConfig, Recipe
from tilth.config.tasks import task_of
from tilth.core.errors import DataError
from tilth.data.columns import Columns, Prompt, messages, plain, short, text_of, to_prompt, turn_of, value_of
from tilth.data.computed import Source
from tilth.data.examples import check_example
from tilth.data.formats import read_records
from tilth.data.given import Given, nothing_in, placed
from tilth.data.prompts import (
    ARGUMENTS,
    NOTHING,
    Brought,
    Key,
    PromptSet,
    apart,
    check_source,
    load_source,
    task_source,
)
from tilth.data.sources import Joined, Records
from tilth.data.template import Example, Template

_CHECKED = 20_000
"""Prompts whose pairs are tokenised before a run starts; of a larger set, the longest, and the shortest."""
_OPTIONAL: Literal["margin"] = "margin"
Side = Literal["chosen", "rejected"]
_SIDES: tuple[Side, Side] = ("chosen", "rejected")


class Pair(NamedTuple):
    """Two answers to a prompt. margin: by how much the chosen one is better, in units of the reward; 0: not said."""

    chosen: str
    rejected: str
    margin: float = 0.0
    where: str = ""
    """Place of its record; empty for a task's."""


class PairSource(Source, Protocol):
    """Prompts by index, each with at least one pair."""

    def pairs(self, index: int) -> tuple[Pair, ...]:
        """The pairs of the prompt at an index."""
        ...


class PairRecords(Records):
    """Prompts in memory with their pairs."""

    def __init__(self, prompts: Sequence[Prompt], pairs: Sequence[tuple[Pair, ...]]) -> None:
        super().__init__(prompts)
        self._pairs = pairs

    def pairs(self, index: int) -> tuple[Pair, ...]:
        """The pairs of the prompt at an index."""
        return self._pairs[index]

    def alphabet(self) -> str:
        """Of all prompts and answers."""
        answers = {c for pairs in self._pairs for pair in pairs for c in (*pair.chosen, *pair.rejected)}
        return "".join(sorted({*super().alphabet(), *answers}))

    def fingerprint(self) -> str:
        """Hash of everything that every prompt says; the answers and margins are in its info."""
        return f"pairs {super().fingerprint()}"


class TaskPairs:
    """A task's prompts; the right answer is chosen, a wrong one that looks right is rejected: one pair a prompt."""

    def __init__(self, name: str, task: Source, wrong: Callable[[Prompt], str]) -> None:
        self.name, self.task, self._wrong = name, task, wrong

    def __len__(self) -> int:
        return len(self.task)

    def prompt(self, index: int) -> Prompt:
        """The prompt at an index."""
        return self.task.prompt(index)

    def pairs(self, index: int) -> tuple[Pair, ...]:
        """The pair of the prompt at an index, a pure function of it."""
        prompt = self.prompt(index)
        return (Pair(prompt.answer or "", self._wrong(prompt)),)

    @property
    def hashes(self) -> np.ndarray:
        """Those of the task: flows that learn from it one after another hold the same prompts out."""
        return self.task.hashes

    def sizes(self) -> np.ndarray:
        """Bytes of each prompt's text."""
        return self.task.sizes()

    def alphabet(self) -> str:
        """Wrong answers have the signs of right ones."""
        return self.task.alphabet()

    def fingerprint(self) -> str:
        """The task, in pairs."""
        return f"pairs of {self.task.fingerprint()}"


class JoinedPairs(Joined):
    """Two sources of pairs as one."""

    first: PairSource
    second: PairSource

    def pairs(self, index: int) -> tuple[Pair, ...]:
        """The pairs of the prompt at an index."""
        border = len(self.first)
        return self.first.pairs(index) if index < border else self.second.pairs(index - border)


# -- reading -----------------------------------------------------------------------------------------------------------


def load_pairs(data: DataConfig, brought: Brought = NOTHING) -> PromptSet:
    """The prompts of a recipe's ``[data]``, whose source has ``pairs``; those of ``data.heldout`` come last.

    Files have columns prompt, chosen, rejected and, where pairs are of different strength, margin. chosen and rejected
    are texts or lists of messages; as lists they may hold the prompt's turns themselves, and no prompt is needed then.
    Records of one prompt are pairs of one prompt. Raises ``DataError``.
    """
    source = _source("source", data, brought)
    return PromptSet(JoinedPairs(source, _source("heldout", data, brought)) if apart(data, brought) else source)


def recipe_prompts(recipe: Recipe, brought: Brought = NOTHING) -> PromptSet:
    """The prompts of a recipe's data as its flow reads them, with their pairs where it learns from those."""
    load = load_pairs if recipe.flow_spec.learns == "pairs" else load_source
    return load(recipe.data, brought)


def pair_records(records: Given, columns: Columns | None = None, name: str = "data") -> PairRecords:
    """From records by value, see ``given.placed``. Raises ``DataError`` with the place of one."""
    return _grouped(placed(records, name), columns or {}, nothing_in(records, name))


def _source(key: Key, data: DataConfig, brought: Brought) -> PairSource:
    name = getattr(data, key)
    if key in brought:
        return pair_records(brought[key], data.columns, ARGUMENTS[key])
    if name in task_names() and (wrong := task_of(name).wrong):
        return TaskPairs(name, task_source(name, data), wrong)
    if name in task_names():
        having = ", ".join(other for other in task_names() if task_of(other).wrong)
        raise DataError(f"data.{key} = {name} has no pairs of answers; tasks that have are {having}")
    check_source(key, name)
    return _grouped(read_records(name), data.columns, f"dataset {name!r} is empty")


def _grouped(records: Iterable[tuple[str, Any]], columns: Columns, empty: str) -> PairRecords:
    """Records of the same prompt as one item, at the place of the first. empty: the error where there is none."""
    prompts: list[Prompt] = []
    pairs: list[list[Pair]] = []
    known: dict[str, int] = {}
    for where, record in records:
        prompt, pair = to_pair(record, where, columns)
        at = known.setdefault(json.dumps([prompt.text, prompt.messages]), len(prompts))
        if at == len(prompts):
            prompts.append(replace(prompt, index=at))
            pairs.append([])
        pairs[at].append(pair)
    if not prompts:
        raise DataError(empty)
    told = [replace(p, info={**p.info, "pairs": [pair[:3] for pair in own]}) for p, own in zip(prompts, pairs)]
    return PairRecords(told, [tuple(own) for own in pairs])


def to_pair(record: Any, where: str, columns: Columns) -> tuple[Prompt, Pair]:
    """The prompt, its answer the chosen one, and the pair that a record holds.

    Raises ``DataError`` with the place: a column that is missing, an answer that is null or not of the assistant, two
    prompts, two answers that are the same, a margin that is no number, a key that is nearly one of those.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: a {type(record).__name__}, not an object with chosen and rejected")
    _check_keys(record, where, columns)
    sides = {side: _side(record, side, where, columns) for side in _SIDES}
    prompt = _prompt(record, where, columns, sides)
    (_, chosen), (_, rejected) = sides["chosen"], sides["rejected"]
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same answer, {short(chosen)}")
    if prompt.answer is None:
        prompt.info["answer"] = chosen
    prompt = replace(prompt, answer=chosen, info=dict(plain(prompt.info)))
    return prompt, Pair(chosen, rejected, _margin(record, where, columns), where)


Turns = tuple[dict[str, str], ...]


def _side(record: Mapping[str, Any], side: Side, where: str, columns: Columns) -> tuple[Turns, str]:
    """The turns before an answer, as far as they stand there, and the answer."""
    name = columns.get(side, side)
    value = value_of(record, side, name, where)
    if value is None:
        raise DataError(f"{where}: {name} is null; a pair needs both a chosen and a rejected answer")
    if isinstance(value, (list, tuple)) and len(value) == 1:
        turns: Turns = (turn_of(value[0], f"{where}: {name}[0]"),)
    elif isinstance(value, (list, tuple, dict)):
        turns = messages(value, where, name)
    else:
        return (), text_of(value, where, name)
    if turns[-1]["role"] != "assistant":
        raise DataError(f"{where}: {name} ends with the {turns[-1]['role']}'s turn, not with the assistant's answer")
    return turns[:-1], turns[-1]["content"]


def _prompt(record: Mapping[str, Any], where: str, columns: Columns, sides: Mapping[Side, tuple[Turns, str]]) -> Prompt:
    """What both answers are given to: of its own column, or of the turns that both sides begin with."""
    used = {columns.get(role, role) for role in (*_SIDES, _OPTIONAL)}
    rest = {key: value for key, value in record.items() if key not in used}
    before = [turns for turns, _ in sides.values() if turns]
    if "prompt" not in columns and "prompt" not in record and len(before) == 2:
        found = to_prompt({**rest, "messages": list(before[0])}, 0, where, {"messages": "messages"})
    else:
        found = to_prompt(rest, 0, where, _without_answer(columns))
    for side, (turns, _) in sides.items():
        if turns and not _same(found, turns):
            raise DataError(
                f"{where}: prompt differs inside the pair: {side} answers {short(turns[-1]['content'])}, "
                f"not {short(found.messages[-1]['content'] if found.messages else found.text)}"
            )
    return replace(found, messages=before[0]) if before and not found.messages else found


def _without_answer(columns: Columns) -> Columns:
    return {role: name for role, name in columns.items() if role in ("prompt", "answer")}


def _same(prompt: Prompt, turns: Turns) -> bool:
    """Whether the turns before an answer are the prompt: all of its turns, or its text as the last one."""
    if prompt.messages:
        return list(prompt.messages) == list(turns)
    return turns[-1]["content"].strip() == prompt.key


def _margin(record: Mapping[str, Any], where: str, columns: Columns) -> float:
    name = columns.get(_OPTIONAL, _OPTIONAL)
    if _OPTIONAL not in columns and name not in record:
        return 0.0
    value = _number(value_of(record, _OPTIONAL, name, where))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"{where}: {name} is {short(value)}, not a number")
    return float(value)


def _number(value: Any) -> Any:
    """The number that a text spells: of CSV every value is a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_keys(record: Mapping[str, Any], where: str, columns: Columns) -> None:
    """A column that may be missing must not be missed for its spelling."""
    named = set(columns.values())
    if _OPTIONAL in record or _OPTIONAL in columns:
        return
    for key in difflib.get_close_matches(_OPTIONAL, [str(key) for key in record], 1, 0.75):
        if key not in named:
            raise DataError(f"{where}: unknown key {key!r}; did you mean {_OPTIONAL!r}? (or data.columns.margin={key})")


# -- tokens ------------------------------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """One pair as tokens; the masks are 1 on the answer and its end alone, whatever turns come before."""

    prompt: int
    margin: float
    chosen: Example
    rejected: Example


def pairs_of(prompts: PromptSet, index: int) -> tuple[Pair, ...]:
    """The pairs of a prompt; DataError for data that has none."""
    if not hasattr(prompts.source, "pairs"):
        raise DataError("the data has no pairs; give columns prompt, chosen and rejected")
    found: tuple[Pair, ...] = prompts.source.pairs(index)
    return found


def encode_pairs(prompts: PromptSet, indices: Iterable[int], template: Template, context: int) -> list[Encoded]:
    """All pairs of these prompts, in order. Raises ``DataError`` as ``check_example``, and what the template raises."""
    asked = [(prompts[int(i)], pair) for i in indices for pair in pairs_of(prompts, int(i))]
    answered = [_answered(prompt, pair, side) for prompt, pair in asked for side in _SIDES]
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
    """With the loss on the last turn alone: earlier ones are the same on both sides of a pair."""
    mask = example.mask.copy()
    others = np.flatnonzero(mask == 0)
    last = int(np.flatnonzero(mask)[-1])
    before = others[others < last]
    mask[: before[-1] if len(before) else 0] = 0
    return Example(example.tokens, mask)


def check_pairs(prompts: PromptSet, template: Template, context: int) -> int:
    """Tokens of the longest answer with its prompt, by tokenising the pairs of the longest 20,000 prompts, and of the
    shortest. Raises as ``encode_pairs``, and for a set without prompts."""
    longest = 0
    for chunk in _chunks(prompts):
        for one in encode_pairs(prompts, chunk, template, context):
            longest = max(longest, len(one.chosen.tokens), len(one.rejected.tokens))
    return longest


def _chunks(prompts: PromptSet, size: int = 1024) -> Iterator[list[int]]:
    indices = prompts.rows.tolist() if len(prompts) <= _CHECKED else [p.index for p in prompts.extremes(_CHECKED)]
    for start in range(0, len(indices), size):
        yield indices[start : start + size]
