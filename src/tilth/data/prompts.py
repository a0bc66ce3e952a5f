"""A set of prompts: split by a hash of the text, drawn in an order that is a pure function of (seed, step)."""

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from tilth.config.schema import DataConfig, Recipe
from tilth.core.errors import DataError
from tilth.data.columns import Columns, Prompt
from tilth.data.computed import Source, mixed
from tilth.data.given import Given
from tilth.data.order import Order
from tilth.data.origin import NOTHING, Home, Key, RecordsByValue, apart, described, origins
from tilth.data.sources import (
    Joined,
    Read,
    Records,
    first_of_equals,
    from_records,
    parts_of,
    read_documents,
    read_prompts,
)

__all__ = ["Key", "Prompt", "PromptSet", "RecordsByValue", "load_source", "load_texts"]

_SAMPLE = np.uint32(0x9E3779B9)


class PromptSet(Order):
    """Some of the prompts of a source, named by their index there, so that an index means the same in every split.

    ``rows``: int64 [n], the indices, ascending. ``repeats``: number of samples left out that equal an earlier one.
    """

    def __init__(self, source: Source, rows: np.ndarray | None = None, repeats: int = 0) -> None:
        super().__init__(np.arange(len(source), dtype=np.int64) if rows is None else rows)
        self.source, self.repeats = source, repeats

    def __reduce__(self) -> tuple[Any, ...]:
        whole = len(self.rows) == len(self.source)
        return PromptSet, (self.source, None if whole else self.rows, self.repeats)

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

        Of sources joined with a held-out one this one is held out and ``holdout`` is ignored; prompts of the others
        whose key is in it too are on neither side: see ``copies``.
        """
        if isinstance(self.source, Joined) and self.source.held:
            held = self.rows >= self.source.border
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
        return int(self.source.copies.sum()) if isinstance(self.source, Joined) and self.source.held else 0

    @property
    def parts(self) -> list[np.ndarray]:
        """The rows of each source to train on, int64 indices."""
        borders = np.cumsum([0, *map(len, parts_of(self.source))])
        return np.split(self.rows, np.searchsorted(self.rows, borders))[1:-1]

    @property
    def starts(self) -> list[int]:
        """First index of each source to train on, and of the held-out one."""
        source = self.source
        return [int(start) for start in source.starts[:-1]] if isinstance(source, Joined) else [0]

    def left_out(self) -> Iterator[str]:
        """Yield a line on what each source, the copies in ``data.heldout`` and equal samples leave out."""
        for number, part in enumerate(parts_of(self.source), 1):
            if isinstance(part, Records) and part.left:
                yield f"source {number}: {described(part.left)}"
        if self.repeats:
            yield f"{self.repeats} samples equal an earlier one and are left out (data.deduplicate)"
        if self.copies:
            yield f"{self.copies} prompts are in data.heldout too, word for word, and are left out of training"

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

    def extremes(self, count: int, wholes: np.ndarray | None = None) -> list[Prompt]:
        """Return the ``count`` longest prompts in bytes, and the shortest; the set must have more than ``count``.

        wholes: int64 [source], sizes by which they are longest; by default those of their texts.
        """
        sizes = self.source.sizes()[self.rows]
        order = np.argsort(-(sizes if wholes is None else wholes[self.rows]), kind="stable")
        shortest = np.argsort(-sizes, kind="stable")[-1]
        return [self[i] for i in self.rows[[*order[:count], shortest]]]


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
    data: DataConfig, brought: RecordsByValue = NOTHING, read: Read = read_prompts, home: Home | None = None
) -> PromptSet:
    """Load the sources of a recipe's ``[data]``, followed by that of ``data.heldout``. Raises ``DataError``.

    read: reads one of them; by default as prompts with answers. home: where their index is kept.
    """
    parts = [read(origin) for origin in origins(data, brought, home or Home())]
    held = apart(data, brought)
    source = Joined(parts, held) if len(parts) > 1 else parts[0]
    if not data.deduplicate:
        return PromptSet(source)
    rows = np.flatnonzero(first_of_equals(source))
    return PromptSet(source, rows, len(source) - len(rows))


def load_texts(
    data: DataConfig, brought: RecordsByValue = NOTHING, home: Home | None = None
) -> tuple[Sequence[str], Sequence[str]]:
    """Load (training, held out) documents for pre-training, split like ``PromptSet.split``: by the prompt where there
    is one, so that later flows hold out the same records. Raises ``DataError``."""
    train, held = load_source(data, brought, read_documents, home).split(data.holdout)
    return texts_of(train), texts_of(held)


def texts_of(prompts: PromptSet) -> Sequence[str]:
    """Return the document of each prompt: a list, or read on demand if the prompts are."""
    if any(isinstance(part, Records) and part.on_demand for part in parts_of(prompts.source)):
        return Texts(prompts)
    return [prompt.document for prompt in prompts]


class Texts(Sequence[str]):
    """Documents of prompts, read on demand."""

    def __init__(self, prompts: PromptSet) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> "Texts": ...
    def __getitem__(self, index: int | slice) -> "str | Texts":
        if isinstance(index, slice):
            return Texts(PromptSet(self._prompts.source, self._prompts.rows[index]))
        return self._prompts[self._prompts.rows[index]].document
