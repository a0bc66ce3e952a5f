"""Prompts of sources, in memory or in a file of the cache, joined, and sets of them.

Imports neither what reads files nor what a recipe needs: a process that loads samples opens sources that others have
read.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from tilth.core.errors import DataError
from tilth.data.columns import Columns, Prompt
from tilth.data.computed import Computed, Source, has_media, mixed
from tilth.data.hub import PREFIX
from tilth.data.index import Index, Indexer, Prompts, Stored, sample_digest
from tilth.data.order import Order

if TYPE_CHECKING:
    from tilth.data.given import Given
    from tilth.data.origin import RecordOrigin

    Read = Callable[[RecordOrigin], Source]

_SAMPLE = np.uint32(0x9E3779B9)


class Records(Computed):
    """Prompts of one source: in memory, or read on demand.

    Few (``index.IN_MEMORY``) and those by value are pickled themselves. Others of files are pickled as what reads them
    and their fingerprint, and read again on unpickling: ``DataError`` if the files differ there. Of those in a file of
    the cache that file is opened, where it is as it was.
    """

    def __init__(
        self,
        prompts: Prompts,
        index: Index | None = None,
        again: tuple[Read, RecordOrigin] | bytes | None = None,
        media: bool = False,
        left: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """again: what reads it in another process, bytes if it has come from one. media: a prompt has media; left:
        reason -> records that are left out; both ignored if there is an index, which says it."""
        self._prompts, self._again = prompts, again
        self.media = media if index is None else index.media
        self.left = left if index is None else index.left
        if index is not None:
            self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        if self._again is None:
            return Records, (self._prompts, None, None, self.media)
        sent = self._again
        if not isinstance(sent, bytes):
            read, origin = sent
            place = origin.name if origin.name.startswith(PREFIX) else os.path.abspath(origin.name)
            rooted = origin.part.model_copy(update={"source": place})
            data = origin.data.model_copy(update={"mixture": ()})  # of which ``part`` is all that it reads
            sent = pickle.dumps((read, replace(origin, part=rooted, data=data)))
        if isinstance(self._prompts, Stored):
            return _found, (self._prompts, self.left, sent, self.fingerprint())
        return _reopened, (sent, self.fingerprint())

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, index: int) -> Prompt:
        return self._prompts[index]

    @property
    def on_demand(self) -> bool:
        """True if its prompts are not in memory."""
        return not isinstance(self._prompts, (list, tuple))

    @cached_property
    def index(self) -> Index:
        """Its index, made in one pass unless it is kept."""
        if isinstance(self._prompts, Stored):
            return self._prompts.index()
        indexer = Indexer()
        for i in range(len(self)):
            indexer.add(self._prompts[i])
        return indexer.done()

    @cached_property
    def hashes(self) -> np.ndarray:
        return self.index.columns.hashes

    def sizes(self) -> np.ndarray:
        return self.index.columns.sizes

    def wholes(self) -> np.ndarray:
        """int64 [n]: bytes of each prompt's text and answer."""
        return self.index.columns.wholes

    def digests(self) -> np.ndarray:
        """uint64 [n]: ``index.sample_digest`` of each prompt."""
        known = self.index.columns.digests
        return known if len(known) else np.array([sample_digest(self.prompt(i)) for i in range(len(self))], np.uint64)

    def alphabet(self) -> str:
        return self.index.alphabet

    def fingerprint(self) -> str:
        """Digest of text, info, answer and turns of every prompt; of pairs, info holds the answers and margins."""
        return self.index.fingerprint


def _found(prompts: Stored, left: Mapping[str, int], sent: bytes, fingerprint: str) -> Source:
    """Return the source with these prompts, or read it where their file is another one, or missing."""
    if prompts.entry.state() != prompts.state:
        return _reopened(sent, fingerprint)
    return Records(prompts, None, sent, left=left)


def _reopened(sent: bytes, fingerprint: str) -> Source:
    read, origin = pickle.loads(sent)  # which imports what a recipe needs
    found: Source = read(origin)
    if found.fingerprint() != fingerprint:
        message = f"{origin.name!r} is not what the run began with: it was changed since, or differs between machines"
        raise DataError(message, key=f"{os.path.basename(origin.name)}.fingerprint")
    return found


def described(left: Mapping[str, int]) -> str:
    """Describe what was left out of a source in one line."""
    counts = [f"{count:,} by {reason}" for reason, count in left.items() if count]
    first = next((reason for reason, count in left.items() if not count), "")
    return f"{', '.join(counts)} left out{f' ({first})' if first else ''}"


class Joined(Computed):
    """Sources one after the other: those of a mixture, then the one that is held out, if there is one."""

    def __init__(self, parts: Sequence[Source], held: bool) -> None:
        self.parts, self.held = tuple(parts), held
        self.starts = np.cumsum([0, *map(len, parts)])
        """int64 [parts + 1]: first index of each part, then the number of all."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def border(self) -> int:
        """First index of what is held out by its source."""
        return int(self.starts[-2]) if self.held else len(self)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index, renumbered to it."""
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        found = self.part(number).prompt(index - int(self.starts[number]))
        return replace(found, index=index) if number else found

    def part(self, number: int) -> Source:
        """Return the source of this number."""
        return self.parts[number]

    @cached_property
    def hashes(self) -> np.ndarray:
        return np.concatenate([part.hashes for part in self.parts])

    def sizes(self) -> np.ndarray:
        return np.concatenate([part.sizes() for part in self.parts])

    def wholes(self) -> np.ndarray:
        """int64 [n]: ``wholes_of`` its parts."""
        return np.concatenate(list(map(wholes_of, self.parts)))

    def alphabet(self) -> str:
        return "".join(sorted({sign for part in self.parts for sign in part.alphabet()}))

    def fingerprint(self) -> str:
        *rest, last = [part.fingerprint() for part in self.parts]
        return ", ".join([*rest, f"held out: {last}" if self.held else last])

    @property
    def media(self) -> bool:
        return any(map(has_media, self.parts))

    @cached_property
    def copies(self) -> np.ndarray:
        """bool [border]: True for a prompt to train on whose key a prompt of the held-out source has too."""
        mine, theirs = self.hashes[: self.border], self.hashes[self.border :]
        common = np.isin(mine, theirs)
        rare = np.flatnonzero(np.isin(theirs, mine[common])) + self.border
        keys = {self.prompt(int(i)).key for i in rare}
        for i in np.flatnonzero(common):  # hashes may collide, so compare the few keys
            common[i] = self.prompt(int(i)).key in keys
        return common


def wholes_of(source: Source) -> np.ndarray:
    """int64 [n]: bytes of each prompt's text and answer; of a task, whose answers are short, of its text."""
    return source.wholes() if isinstance(source, (Records, Joined)) else source.sizes()


def parts_of(source: Source) -> tuple[Source, ...]:
    """Return the sources to train on of a set: of a mixture each, else the one."""
    if isinstance(source, Joined):
        return source.parts[:-1] if source.held else source.parts
    return (source,)


def first_of_equals(source: Source) -> np.ndarray:
    """Return bool [n]: False for a sample of files or records that an earlier one equals, in any source to train on."""
    first = np.ones(len(source), bool)
    places = [np.zeros(0, np.int64)]
    digests, start = [np.zeros(0, np.uint64)], 0
    for part in parts_of(source):
        if isinstance(part, Records):
            digests.append(part.digests())
            places.append(np.arange(start, start + len(part)))
        start += len(part)
    every = np.concatenate(places)
    _, kept = np.unique(np.concatenate(digests), return_index=True)
    first[every] = False
    first[every[kept]] = True
    return first


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
    def of(cls, records: Given, columns: Columns | None = None) -> PromptSet:
        """Build from records with prompt, answer and other columns, or from bare texts. columns: ``data.columns``."""
        from tilth.data.sources import from_records  # imports what reads files

        return cls(from_records(records, columns))

    def __getitem__(self, index: int | np.integer) -> Prompt:
        """Return the prompt with this index in the source, also one outside of this split."""
        return self.source.prompt(int(index))

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in self.rows)

    def split(self, holdout: float) -> tuple[PromptSet, PromptSet]:
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

    def subset(self, count: int) -> PromptSet:
        """Return ``count`` prompts by a hash of their keys, in source order: a fixed sample, such as for evaluation.

        The hash differs from that of ``split``, so a sample of a whole source has its usual share of held-out prompts.
        """
        order = np.argsort(mixed(self.source.hashes[self.rows] ^ _SAMPLE), kind="stable")
        return PromptSet(self.source, np.sort(self.rows[order[:count]]))

    def spread(self, count: int) -> list[Prompt]:
        """Return ``count`` prompts, or all if there are fewer, at equal distances over the set."""
        places = np.linspace(0, len(self) - 1, min(count, len(self))).astype(np.int64)
        return [self[i] for i in self.rows[places]]

    def common(self, other: PromptSet) -> int:
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
