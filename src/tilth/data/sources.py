"""Prompts, pairs and documents of one source, read by one path; and sources joined."""

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from tilth.config.schema import MixtureSource
from tilth.core.errors import DataError
from tilth.data.cache import CacheEntry, FileState
from tilth.data.columns import Columns, Prompt, plain, to_document, to_prompt
from tilth.data.computed import Computed, Source, has_media
from tilth.data.given import Given, RandomAccess, place_of, read_at
from tilth.data.index import Index, Indexer, Prompts, Stored, keep, kept, sample_digest
from tilth.data.origin import Make, Material, RecordOrigin
from tilth.data.template import transcript

Read = Callable[[RecordOrigin], Source]
"""Function that reads a source as prompts, as pairs or as documents."""
Join = Callable[[Iterator[Prompt]], Iterator[Prompt]]


class Records(Computed):
    """Prompts of one source: in memory, or read on demand.

    Those of files are pickled as what reads them and their fingerprint, and read again on unpickling: ``DataError`` if
    the files differ there. Of those in a file of the cache that file is opened, where it is as it was.
    """

    def __init__(
        self,
        prompts: Prompts,
        index: Index | None = None,
        again: tuple[Read, RecordOrigin] | bytes | None = None,
        media: bool = False,
    ) -> None:
        """again: what reads it in another process, bytes if it has come from one. media: a prompt has media; ignored
        if an index says it."""
        self._prompts, self._again = prompts, again
        self.media = media if index is None else index.media
        self.left: Mapping[str, int] = {} if index is None else index.left
        """Reason -> records that are left out (``Index.left``)."""
        if index is not None:
            self.index = index

    def __reduce__(self) -> tuple[Any, ...]:
        if self._again is None:
            return Records, (self._prompts, None, None, self.media)
        sent = self._again
        if not isinstance(sent, bytes):
            read, origin = sent
            rooted = origin.part.model_copy(update={"source": os.path.abspath(origin.name)})
            data = origin.data.model_copy(update={"mixture": ()})  # of which ``part`` is all that it reads
            sent = pickle.dumps((read, replace(origin, part=rooted, data=data)))
        if isinstance(self._prompts, Stored):
            return _found, (self._prompts.entry.rooted(), self._prompts.state, sent, self.fingerprint())
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
        """Its index, made in one pass."""
        indexer = Indexer()
        for i in range(len(self)):
            indexer.add(self._prompts[i])
        return indexer.done()

    @cached_property
    def hashes(self) -> np.ndarray:
        return self.index.hashes

    def sizes(self) -> np.ndarray:
        return self.index.sizes

    def wholes(self) -> np.ndarray:
        """int64 [n]: bytes of each prompt's text and answer."""
        return self.index.wholes

    def digests(self) -> np.ndarray:
        """uint64 [n]: ``index.sample_digest`` of each prompt."""
        known = self.index.digests
        return known if len(known) else np.array([sample_digest(self.prompt(i)) for i in range(len(self))], np.uint64)

    def alphabet(self) -> str:
        return self.index.alphabet

    def fingerprint(self) -> str:
        """Digest of text, info, answer and turns of every prompt; of pairs, info holds the answers and margins."""
        return self.index.fingerprint


class OnDemand:
    """Prompts of a source by index (``given.RandomAccess``), made when they are asked for."""

    def __init__(self, data: RandomAccess, origin: RecordOrigin, make: Make, samples: Sequence[int], name: str) -> None:
        """samples: indices into data of the records that are prompts."""
        self._data, self._origin, self._make, self._samples, self._name = data, origin, make, samples, name

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> Prompt:
        sample = self._samples[index]
        record = read_at(self._data, sample, self._name)
        found = self._origin.prompt(record, place_of(self._name, sample + 1), sample, self._make, index)
        if found is None:
            message = f"{place_of(self._name, sample + 1)} is empty, and was not when the run began"
            raise DataError(message, key=f"{self._name}.changed")
        return found


# -- reading -----------------------------------------------------------------------------------------------------------


def read_prompts(origin: RecordOrigin) -> Source:
    """Return the prompts of a source. Raises ``DataError``."""
    material = origin.material()
    if not isinstance(material, Material):
        return material
    columns = {} if origin.is_task and not origin.part.columns else origin.columns
    make = partial(_prompt, columns=columns, files=not (origin.brought or origin.is_task))
    return gather(read_prompts, origin, material, make)


def _prompt(record: Any, where: str, number: int, columns: Columns, *, files: bool) -> Prompt:
    """Return the prompt of a record; the info of one in a file is plain."""
    if isinstance(record, str):
        return Prompt(number, record, where=where)
    prompt = to_prompt(record, number, where, columns)
    info = plain(prompt.info) if files else prompt.info
    return prompt if info is prompt.info else replace(prompt, info=info)


def read_documents(origin: RecordOrigin) -> Source:
    """Return the documents of a source (``Prompt.whole``): the column text, or prompt and answer joined.

    Conversations are rendered by the template. Empty documents are left out. Raises ``DataError``.
    """
    material = origin.material()
    if not isinstance(material, Material) or origin.is_task:
        task = read_prompts(origin)
        prompts = (task.prompt(i) for i in range(len(task)))
        return Records([replace(p, whole=p.document) for p in prompts], media=has_media(task))
    template = origin.part.template or origin.data.template
    render = transcript(template, origin.data.tokenizer) if template else None

    def make(record: Any, where: str, number: int) -> Prompt | None:
        if isinstance(record, str):
            return Prompt(number, record, where=where, whole=record) if record else None
        found = to_document(record, where, origin.columns, render)
        return Prompt(number, found.prompt or found.text, where=where, whole=found.text) if found.text else None

    return gather(read_documents, origin, material, make)


def gather(read: Read, origin: RecordOrigin, material: Material, make: Make, join: Join = iter) -> Records:
    """Return what ``make`` makes of the records of a source, kept beside the token cache if it is much.

    join: makes prompts of them, where several records are one. Raises ``DataError`` for a source without any.
    """
    coming = join(origin.prompts(material, make))
    files, digests = not (origin.brought or origin.is_task), origin.data.deduplicate
    if material.random is not None and join is iter:
        indexer = Indexer(digests=digests)
        for prompt in coming:
            indexer.add(prompt)
        prompts: Prompts = OnDemand(material.random, origin, make, material.samples, material.name)
        found = Records(prompts, indexer.done(material.left))
    elif files:
        how: dict[str, Any] = {"sources": len(origin.data.sources), "digests": digests}
        prompts, index = keep(coming, origin.entry(read.__name__), material.left, **how)
        found = Records(prompts, index, (read, origin))
    else:
        held = list(coming)
        found = Records(held, media=any(p.media for p in held))
        found.left = material.left
    if not len(found):
        raise origin.nothing(found.left, documents=read is read_documents)
    return found


def _found(entry: CacheEntry, state: FileState, sent: bytes, fingerprint: str) -> Source:
    """Return the source in an entry, or read it where there is another one, or none."""
    if entry.state() != state:
        return _reopened(sent, fingerprint)
    return Records(*kept(entry), sent)


def _reopened(sent: bytes, fingerprint: str) -> Source:
    read, origin = pickle.loads(sent)  # which imports what a recipe needs
    found: Source = read(origin)
    if found.fingerprint() != fingerprint:
        message = f"{origin.name!r} is not what the run began with: it was changed since, or differs between machines"
        raise DataError(message, key=f"{os.path.basename(origin.name)}.fingerprint")
    return found


def from_records(records: Given, columns: Columns | None = None, name: str = "data") -> Records:
    """Return the prompts of records by value, or of bare prompt texts; see ``given.placed``. Raises ``DataError``."""
    origin = RecordOrigin("data.source", MixtureSource(), columns=columns or {}, brought=(records,), argument=name)
    found = read_prompts(origin)
    assert isinstance(found, Records)
    return found


# -- several -----------------------------------------------------------------------------------------------------------


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
        """int64 [n]: bytes of each prompt's text and answer; of a task, whose answers are short, of its text."""
        return np.concatenate([p.wholes() if isinstance(p, Records) else p.sizes() for p in self.parts])

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
