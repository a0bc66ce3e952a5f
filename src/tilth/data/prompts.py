"""A set of prompts: split by a hash of the text, drawn in an order that is a pure function of (seed, step)."""

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from tilth.config.plugins import task_names
from tilth.config.schema import DataConfig, Recipe
from tilth.config.tasks import task_of
from tilth.core.errors import DataError
from tilth.data.columns import Columns, Document, Prompt, to_document
from tilth.data.computed import Source, mixed, text_hashes
from tilth.data.formats import is_source, missing, read_records
from tilth.data.given import Given, nothing_in, placed
from tilth.data.order import Order
from tilth.data.sources import Joined, from_records, read_source
from tilth.data.template import transcript

__all__ = ["Prompt", "PromptSet", "load_documents", "load_source", "load_texts"]

_SAMPLE = np.uint32(0x9E3779B9)
Key = Literal["source", "heldout"]
RecordsByValue = Mapping[Key, Given]
"""Records that take the place of ``data.source`` or ``data.heldout``."""
NOTHING: RecordsByValue = {}
ARGUMENTS = {"source": "data", "heldout": "heldout"}
"""Names of these arguments of ``tilth.train``."""


class PromptSet(Order):
    """Some of the prompts of a source, named by their index there, so that an index means the same in every split.

    ``rows``: int64 [n], the indices, ascending.
    """

    def __init__(self, source: Source, rows: np.ndarray | None = None) -> None:
        super().__init__(np.arange(len(source), dtype=np.int64) if rows is None else rows)
        self.source = source

    def __reduce__(self) -> tuple[Any, ...]:
        whole = len(self.rows) == len(self.source)
        return PromptSet, (self.source, None if whole else self.rows)

    @classmethod
    def of(cls, records: Given, columns: Columns | None = None) -> "PromptSet":
        """Build from records with prompt, answer and other columns, or from bare texts. columns: ``data.columns``."""
        return cls(from_records(records, columns))

    def __getitem__(self, index: int | np.integer) -> Prompt:
        """Return the prompt with this index in the source, also one outside of this split."""
        return self.source.prompt(int(index))

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in self.rows)

    def split(self, holdout: float) -> tuple["PromptSet", "PromptSet"]:
        """Return (training, held out): a prompt is held out if the hash of its key is in this share of all hashes.

        Equal texts fall on one side, and neither order nor size of the dataset, nor white space around a text, moves
        a text to the other side: successive flows on one file hold out the same prompts.

        Of two joined sources the second is held out and ``holdout`` is ignored; prompts of the first whose key is in
        the second too are on neither side: see ``copies``.
        """
        if isinstance(self.source, Joined):
            held = self.rows >= len(self.source.first)
            train = ~held
            train[train] = ~self.source.copies[self.rows[train]]
            blame, key = "every prompt of data.source is in data.heldout too, which", "data.heldout"
        else:
            held = self.source.hashes[self.rows] < np.uint64(round(holdout * 2**32))
            train = ~held
            blame, key = f"data.holdout = {holdout}", "data.holdout"
        if not train.any():
            raise DataError(f"{blame} leaves none of {len(self)} prompts to train on", key=key)
        return PromptSet(self.source, self.rows[train]), PromptSet(self.source, self.rows[held])

    @property
    def copies(self) -> int:
        """Number of training prompts that are left out because ``data.heldout`` has them too."""
        return int(self.source.copies.sum()) if isinstance(self.source, Joined) else 0

    def subset(self, count: int) -> "PromptSet":
        """Return ``count`` prompts by a hash of their keys, in source order: a fixed sample, such as for evaluation.

        The hash differs from that of ``split``, so a sample of a whole source has its usual share of held-out prompts.
        """
        order = np.argsort(mixed(self.source.hashes[self.rows] ^ _SAMPLE), kind="stable")
        return PromptSet(self.source, np.sort(self.rows[order[:count]]))

    def spread(self, count: int) -> list[Prompt]:
        """Return ``count`` prompts, or all if there are fewer, at equal distances over the set."""
        places = np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64)
        return [self[i] for i in self.rows[places]]

    def common(self, other: "PromptSet") -> int:
        """Count the prompts of this set whose key is in another set."""
        mine, theirs = (side.source.hashes[side.rows] for side in (self, other))
        known = {other[i].key for i in other.rows[np.isin(theirs, mine)]}
        return sum(self[i].key in known for i in self.rows[np.isin(mine, theirs)])

    def fingerprint(self) -> str:
        """Digest of the source: its prompts, answers and other columns."""
        return self.source.fingerprint()

    def alphabet(self) -> str:
        """All characters of the source's prompts and answers, sorted."""
        return self.source.alphabet()

    def extremes(self, count: int) -> list[Prompt]:
        """Return the ``count`` longest prompts in bytes, and the shortest; the set must have more than ``count``."""
        order = np.argsort(-self.source.sizes()[self.rows], kind="stable")
        return [self[i] for i in self.rows[[*order[:count], order[-1]]]]


def with_holdout(recipe: Recipe, prompts: PromptSet) -> Recipe:
    """Return the recipe with a share that holds prompts out, where its own holds none out and nobody has set it."""
    data, tried = recipe.data, [step / 10 for step in range(1, 10)]
    if apart(data, {}) or isinstance(prompts.source, Joined) or not data.holdout or "holdout" in data.model_fields_set:
        return recipe
    hashes = prompts.source.hashes[prompts.rows]
    counts = {share: int((hashes < np.uint64(round(share * 2**32))).sum()) for share in (data.holdout, *tried)}
    share = next((share for share, count in counts.items() if 0 < count < len(prompts)), data.holdout)
    if share == data.holdout:
        return recipe
    line = f"data.holdout = {share}, not {data.holdout}, which holds out none of {len(prompts)} prompts"
    return recipe.replaced("data", holdout=share).telling(line)


def load_source(
    data: DataConfig,
    brought: RecordsByValue = NOTHING,
    load: Callable[[Key, DataConfig, RecordsByValue], Source] | None = None,
) -> PromptSet:
    """Load the prompts of a recipe's ``[data]``, followed by those of ``data.heldout``. Raises ``DataError``.

    load: loads ``data.source`` or ``data.heldout``; by default prompts with answers.
    """
    load = load or _source
    source = load("source", data, brought)
    return PromptSet(Joined(source, load("heldout", data, brought)) if apart(data, brought) else source)


def apart(data: DataConfig, brought: RecordsByValue) -> bool:
    """True if held-out data has a separate source."""
    return bool(data.heldout) or "heldout" in brought


def load_texts(data: DataConfig, brought: RecordsByValue = NOTHING) -> tuple[list[str], list[str]]:
    """Load (training, held out) documents for pre-training: the column text, or prompt and answer joined.

    Held out is ``data.heldout``, and then none of its documents is trained on; else the share ``data.holdout`` of all
    hashes, like ``PromptSet.split``: by the prompt where there is one, so that later flows hold out the same records.
    Conversations are rendered by ``data.template``. Empty documents are skipped. Raises ``DataError``.
    """
    train, held = load_documents(data, brought)
    return [one.text for one in train], [one.text for one in held]


def load_documents(data: DataConfig, brought: RecordsByValue = NOTHING) -> tuple[list[Document], list[Document]]:
    """Load the documents of ``load_texts``, each with the key that decided on its side."""
    found = _documents("source", data, brought)
    if apart(data, brought):
        held = _documents("heldout", data, brought)
        unseen = {one.key for one in held}
        train = [one for one in found if one.key not in unseen]
        blame, key = "data.heldout has all of data.source too and", "data.heldout"
    else:
        sides = text_hashes(one.key.encode() for one in found) < np.uint64(round(data.holdout * 2**32))
        train, held = ([one for one, side in zip(found, sides) if side == want] for want in (False, True))
        blame, key = f"data.holdout = {data.holdout}", "data.holdout"
    if not train:
        raise DataError(f"{blame} leaves none of {len(found)} documents to train on", key=key)
    return train, held


def task_source(name: str, data: DataConfig) -> Source:
    """Build the prompts of a task. Raises ``DataError`` if a plugin's task returns no valid records."""
    made = task_of(name).make_prompts(data)
    return made if hasattr(made, "fingerprint") else from_records(made, name=f"task {name}")


def _source(key: Key, data: DataConfig, brought: RecordsByValue) -> Source:
    name = getattr(data, key)
    if key in brought:
        return from_records(brought[key], data.columns, ARGUMENTS[key])
    if name in task_names():
        return task_source(name, data)
    check_source(key, name)
    return read_source(name, data.columns)


def _documents(key: Key, data: DataConfig, brought: RecordsByValue) -> list[Document]:
    name = getattr(data, key)
    if key not in brought and name in task_names():
        task = task_source(name, data)
        prompts = (task.prompt(i) for i in range(len(task)))
        return [Document(prompt.text + (prompt.answer or ""), prompt.text) for prompt in prompts]
    if key not in brought:
        check_source(key, name)
    render = transcript(data.template, data.tokenizer) if data.template else None
    records = placed(brought[key], ARGUMENTS[key]) if key in brought else read_records(name)
    each = (
        Document(record) if isinstance(record, str) else to_document(record, where, data.columns, render)
        for where, record in records
    )
    found = [one for one in each if one.text]
    if not found and key in brought:
        raise nothing_in(brought[key], ARGUMENTS[key])
    if not found:
        raise DataError(f"data.{key} = {name!r} has no documents", key=f"data.{key}.documents")
    return found


def check_source(key: str, name: str) -> None:
    """Raise ``DataError`` unless this value of data.KEY is a source of files."""
    if is_source(name):
        return
    if not name:
        message = f"data.{key} is empty; name a task or a file (what tilth.train is given is not in its recipe)"
        raise DataError(message, key=f"data.{key}.empty")
    near = difflib.get_close_matches(name, task_names(), 1)
    hint = f"; did you mean the task {near[0]}?" if near else missing(name) or f"; tasks are {', '.join(task_names())}"
    message = f"data.{key} = {name!r} is neither a task nor a file {os.path.abspath(name)}{hint}"
    raise DataError(message, key=f"data.{key}")
