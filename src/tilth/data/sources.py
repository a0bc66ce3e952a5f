"""Prompts, pairs and documents of one source, read by one path."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tilth.config.schema import MixtureSource
from tilth.core.errors import DataError
from tilth.data.columns import Columns, PlainPrompts, Prompt, each_prompt, plain, to_document, to_prompt
from tilth.data.computed import Source, has_media
from tilth.data.given import Given, RandomAccess, place_of, read_at
from tilth.data.index import Indexer, Prompts, keep
from tilth.data.origin import Make, Material, RecordOrigin
from tilth.data.records import Records
from tilth.data.template import transcript

Read = Callable[[RecordOrigin], Source]
"""Function that reads a source as prompts, as pairs or as documents."""
Join = Callable[[Iterator[Prompt]], Iterator[Prompt]]


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
    return gather(read_prompts, origin, material, make, PlainPrompts(columns))


def _prompt(record: Any, where: str, number: int, columns: Columns, *, files: bool) -> Prompt:
    """Return the prompt of a record; the info of one in a file is plain."""
    if isinstance(record, str):
        return Prompt(number, record, where=where)
    prompt = to_prompt(record, number, where, columns)
    info = plain(prompt.info, where) if files else prompt.info
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
    own = origin.part.template and origin.part in origin.data.mixture
    key = f"{origin.key}.template" if own else "data.template"
    render = transcript(template, origin.data.tokenizer, key) if template else None

    def make(record: Any, where: str, number: int) -> Prompt | None:
        if isinstance(record, str):
            return Prompt(number, record, where=where, whole=record) if record else None
        found = to_document(record, where, origin.columns, render)
        return Prompt(number, found.prompt or found.text, where=where, whole=found.text) if found.text else None

    return gather(read_documents, origin, material, make, PlainPrompts(origin.columns, documents=True))


def gather(
    read: Read,
    origin: RecordOrigin,
    material: Material,
    make: Make,
    plain: PlainPrompts | None = None,
    *,
    join: Join = iter,
) -> Records:
    """Return what ``make`` makes of the records of a source, kept beside the token cache if it is much.

    plain: holds together what would be indexed one by one. join: makes prompts of them, where several records are one.
    Raises ``DataError`` for a source without any.
    """
    files, digests = not (origin.brought or origin.is_task), origin.data.deduplicate
    entry = origin.entry(read.__name__) if files else None
    found_prompts = origin.prompts(material, make, plain if entry is not None else None)
    coming = found_prompts if join is iter else join(each_prompt(found_prompts))
    if material.random is not None and join is iter:
        indexer = Indexer(digests=digests)
        for prompt in coming:
            indexer.add(prompt)
        prompts: Prompts = OnDemand(material.random, origin, make, material.samples, material.name)
        found = Records(prompts, indexer.done(material.left))
    elif files:
        how: dict[str, Any] = {"sources": len(origin.data.sources), "digests": digests}
        prompts, index = keep(coming, entry, material.left, **how)
        few = entry is not None and isinstance(prompts, list)  # a process that gets them imports nothing that reads
        found = Records(prompts, index, None if few else (read, origin))
    else:
        held = list(each_prompt(coming))
        found = Records(held, media=any(p.media for p in held), left=material.left)
    if not len(found):
        raise origin.nothing(found.left, documents=read is read_documents)
    return found


def from_records(records: Given, columns: Columns | None = None, name: str = "data") -> Records:
    """Return the prompts of records by value, or of bare prompt texts; see ``given.placed``. Raises ``DataError``."""
    origin = RecordOrigin("data.source", MixtureSource(), columns=columns or {}, brought=(records,), argument=name)
    found = read_prompts(origin)
    assert isinstance(found, Records)
    return found
