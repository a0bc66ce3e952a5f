"""A set of prompts: split by hash of the text, and drawn from in an order that is a pure function of (seed, step)."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilth.config.schema import Data
from tilth.core.errors import DataError
from tilth.core.random import Stream, stream
from tilth.data.sources import Addition, Prompt, Source, from_records, read_jsonl

__all__ = ["Prompt", "PromptSet", "load_source"]

TASKS = {"addition": lambda data: Addition(data.digits)}


class PromptSet:
    """Some of the prompts of a source, named by their index there, so that an index means the same in every split.

    ``rows``: int64 [n], the indices, ascending.
    """

    def __init__(self, source: Source, rows: np.ndarray | None = None) -> None:
        self.source = source
        self.rows = np.arange(len(source), dtype=np.int64) if rows is None else rows
        self._orders: dict[tuple[Stream, int], np.ndarray] = {}

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any] | str]) -> "PromptSet":
        """From dictionaries with prompt, answer and whatever else, or from bare texts."""
        return cls(from_records(records))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int | np.integer) -> Prompt:
        """The prompt with this index in the source, whether or not it belongs to this split."""
        return self.source.prompt(int(index))

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in self.rows)

    def split(self, holdout: float) -> tuple["PromptSet", "PromptSet"]:
        """(training, held out): a prompt is held out if the hash of its text falls into this share of all hashes.

        Equal texts fall on one side, and neither order nor size of the dataset moves a text to the other.
        """
        held = self.source.hashes[self.rows] < np.uint64(round(holdout * 2**32))
        if held.all():
            raise DataError(f"data.holdout = {holdout} leaves none of {len(self)} prompts to train on")
        return PromptSet(self.source, self.rows[~held]), PromptSet(self.source, self.rows[held])

    def subset(self, count: int) -> "PromptSet":
        """The ``count`` prompts of least hash, in source order: a fixed sample, such as for evaluation."""
        order = np.argsort(self.source.hashes[self.rows], kind="stable")
        return PromptSet(self.source, np.sort(self.rows[order[:count]]))

    def draw(self, stream: Stream, step: int, count: int) -> np.ndarray:
        """Indices int64 [count] of the prompts of a step (from 0): see ``take``."""
        return self.take(stream, step * count, count)

    def take(self, stream: Stream, start: int, count: int) -> np.ndarray:
        """Indices ``start`` to ``start + count`` of an endless sequence: one permutation of the set after another.

        A pure function of the set, the stream and the numbers: nothing has to be remembered for a resume.
        """
        epochs, places = np.divmod(np.arange(start, start + count), len(self))
        parts = [self.rows[self._order(stream, int(e))[places[epochs == e]]] for e in np.unique(epochs)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def fingerprint(self) -> str:
        """Tells this source from any other one: its prompts, answers and what else it says of them."""
        return self.source.fingerprint()

    def alphabet(self) -> str:
        """All characters of the source's prompts and answers, sorted."""
        return self.source.alphabet()

    def longest(self, count: int) -> list[Prompt]:
        """The ``count`` prompts of most bytes."""
        order = np.argsort(-self.source.sizes()[self.rows], kind="stable")
        return [self[i] for i in self.rows[order[:count]]]

    def _order(self, base: Stream, epoch: int) -> np.ndarray:
        if (base, epoch) not in self._orders:
            self._orders = dict(list(self._orders.items())[-3:])  # few are in use at a time; any can be made again
            permutation = stream(base.seed, base.id, "epoch", epoch).permutation(len(self))
            self._orders[base, epoch] = np.asarray(permutation, dtype=np.int64)
        return self._orders[base, epoch]


def load_source(data: Data) -> PromptSet:
    """The prompts of a recipe's ``[data]``: a task by name, or a JSONL file. Raises ``DataError``."""
    if data.source in TASKS:
        return PromptSet(TASKS[data.source](data))
    if not Path(data.source).is_file():
        near = difflib.get_close_matches(data.source, TASKS, 1)
        hint = f"did you mean the task {near[0]}?" if near else f"tasks are {', '.join(TASKS)}"
        raise DataError(f"data.source = {data.source!r} is neither a task nor a file; {hint}")
    return PromptSet(read_jsonl(data.source))
