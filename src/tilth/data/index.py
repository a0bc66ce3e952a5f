"""Index of a source, made in one pass, and items that are read on demand from a file beside it.

Only what opens or writes such a file imports pyarrow, which a process that gets an open one does without.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from json.encoder import c_make_encoder  # type: ignore[attr-defined]
from json.encoder import encode_basestring_ascii as _encode
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from tilth.core.errors import DataError
from tilth.core.media import MEDIA
from tilth.data.cache import CacheEntry, FileState, state_of
from tilth.data.columns import Pair, PlainJson, PlainPrompts, PlainTurns, Prompt, each_prompt, plain, record_key
from tilth.data.computed import mixed

IN_MEMORY = 1 << 18
"""Bytes of items of all sources up to which they stay in memory: to read them again takes about as long as to open a
file."""
OPEN = 128
"""Files of sources that a process has open at once, of those that it reads on demand."""
_BATCH = 1 << 20
_KINDS = {"hash": np.uint32, "size": np.int64, "whole": np.int64, "digest": np.uint64}
"""Columns of the file beside the items; the last one is there if digests were asked for."""
_TEXTS = 1 << 16
"""Bytes of texts that are taken into alphabet and digest at once."""
_NESTED = frozenset((dict, list))
_TEXT = b"\0"
"""Byte before an item's text, which JSON has in none of its own."""


class IndexColumns(NamedTuple):
    """Columns of n prompts."""

    hashes: np.ndarray
    """uint32 [n]: ``computed.text_hashes`` of keys."""
    sizes: np.ndarray
    """int64 [n]: bytes of each prompt's text."""
    wholes: np.ndarray
    """int64 [n]: bytes of the text with its answer, of pairs the longest one."""
    digests: np.ndarray
    """uint64 [n], ``sample_digest`` of each; [0] if nobody asked for them."""


@dataclass(frozen=True)
class Index:
    """Columns and figures of a source that split, order and check it without its items."""

    read: Callable[[], IndexColumns]
    """Makes the columns when the first of them is asked for: who reads items alone needs none."""
    alphabet: str
    fingerprint: str
    left: Mapping[str, int] = field(default_factory=dict)
    """Reason -> number of records left out for it."""
    media: bool = False
    """True if a prompt has media."""

    @cached_property
    def columns(self) -> IndexColumns:
        """Its columns, made once."""
        return self.read()


class Indexer:
    """Make the index of prompts that come one after the other."""

    def __init__(self, *, digests: bool = False) -> None:
        """digests: make them too."""
        self.digests = digests
        self._crcs, self._digests = array("I"), array("Q")
        self._sizes, self._wholes = array("q"), array("q")
        self._texts, self._contents, self._waiting = list[bytes](), list[str](), 0
        self._alphabet: set[str] = set()
        self._ascii = b""
        """Characters of the alphabet that are one byte."""
        self._content = hashlib.blake2b(digest_size=8)
        self._pairs = self._media = False

    def add(self, found: Prompt | PlainPrompts) -> Prompt | PlainPrompts:
        """Add the next prompt, or the next ones, and return what was added."""
        if isinstance(found, Prompt):
            self._add_prompt(found)
        else:
            self._add_plain(found)
        return found

    def _add_plain(self, found: PlainPrompts) -> None:
        """Add each as ``_add_prompt`` would."""
        texts, answers = found.encoded
        keys = [text.strip() for text in found.texts]
        same = zip(texts, found.texts, keys)
        self._crcs.extend([zlib.crc32(data if key is text else key.encode()) for data, text, key in same])
        self._sizes.extend(map(len, texts))
        self._wholes.extend([len(text) + len(answer) for text, answer in zip(texts, answers)])
        self._texts += texts
        self._texts += answers
        made = _json_of(found)
        infos = [said if _is_sorted(info) else _digest(info) for info, said in zip(found.infos, made.infos)]
        self._contents += [
            f"[{text}, {info}, {answer}, {turns}]" if turns else f"[{text}, {info}]"
            for text, info, answer, turns in zip(made.texts, infos, made.answers, made.sorted_turns)
        ]
        if self.digests:
            ends = found.texts if found.documents else [turns and f"[{turns}, []]" for turns in made.sorted_turns]
            said = zip(found.texts, found.answers, ends)
            self._digests.extend([_text_digest(f"{text}\0{answer or ''}\0{end}") for text, answer, end in said])
        self._take_in()

    def _add_prompt(self, p: Prompt) -> None:
        text, answer, whole, key = p.text.encode(), (p.answer or "").encode(), p.whole.encode(), p.key
        self._crcs.append(zlib.crc32(text if key is p.text else key.encode()))
        self._sizes.append(len(text))
        self._texts += (text, answer) if whole == text else (text, answer, whole)
        longest = len(answer)
        if p.pairs:
            sides = [side.encode() for pair in p.pairs for side in pair[:2]]
            longest, self._pairs = max(map(len, sides)), True
            self._texts += sides
        self._wholes.append(len(whole) or len(text) + longest)
        self._media |= bool(p.media)
        content = [p.text, p.info, *([p.answer, p.messages] if p.messages else ()), *p.media]
        try:
            self._contents.append(_digest(content))
        except TypeError as error:  # of what has names of several kinds, or such as JSON lacks
            message = f"{p.name}: an object has names that are not all texts ({error}); name what it has by texts"
            raise DataError(message, key=record_key(p.name, "names")) from None
        if self.digests:
            self._digests.append(sample_digest(p))
        self._waiting += len(self._contents[-1]) + len(answer) + len(whole)
        if self._waiting > _TEXTS:
            self._take_in()

    def _take_in(self) -> None:
        """Add the texts that wait to the alphabet, and their contents to the digest."""
        others = b"".join(self._texts).translate(None, self._ascii)
        if others:
            points = np.frombuffer(others.decode().encode("utf-32-le"), np.uint32)
            found = np.zeros(int(points.max()) + 1, bool)
            found[points] = True
            self._alphabet.update(map(chr, np.flatnonzero(found)))
            self._ascii = "".join(filter(str.isascii, self._alphabet)).encode()
        self._content.update("".join(self._contents).encode())
        self._texts, self._contents, self._waiting = [], [], 0

    def done(self, left: Mapping[str, int] | None = None) -> Index:
        """Return the index. left: ``Index.left``."""
        self._take_in()
        found = self._content.hexdigest()
        columns = self.columns(0, len(self._crcs))
        content, alphabet = f"pairs {found}" if self._pairs else found, "".join(sorted(self._alphabet))
        return Index(lambda: columns, alphabet, content, dict(left or {}), self._media)

    def columns(self, start: int, stop: int) -> IndexColumns:
        """Return the columns of some of the prompts, as the file has them."""
        sizes = (np.array(column[start:stop], np.int64) for column in (self._sizes, self._wholes))
        crcs, digests = np.array(self._crcs[start:stop], np.uint32), np.array(self._digests[start:stop], np.uint64)
        return IndexColumns(mixed(crcs), next(sizes), next(sizes), digests)


def _said(p: Prompt) -> list[str]:
    return [p.text, p.answer or "", *(side for pair in p.pairs for side in pair[:2])]


def sample_digest(p: Prompt) -> int:
    """Return a number of 64 bits that equal samples have in common, whatever their other columns."""
    same = "\0".join([*_said(p), p.whole])
    if p.messages or p.tools or p.media:
        same += _digest([p.messages, p.tools, *p.media])
    return _text_digest(same)


def _text_digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _digestible(value: Any) -> Any:
    """Convert a value that JSON lacks: distinct values stay distinct, and equal in every process."""
    if hasattr(value, "tolist"):  # an array, whose repr leaves out what is in the middle
        return [str(getattr(value, "dtype", "")), value.tolist()]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if type(value).__repr__ is object.__repr__:  # which is an address
        return [type(value).__qualname__, getattr(value, "__dict__", None)]
    return repr(value)


def _encoder(default: Callable[[Any], Any], *, sort: bool) -> Callable[[Any], str]:
    """Return ``JSONEncoder(sort_keys=sort, default=default).encode``, which makes C's encoder anew for each value and
    takes twice the time."""
    how = None, default, _encode, None, ": ", ", ", sort, False, True
    encode = c_make_encoder(*how)
    return lambda value: "".join(encode(value, 0))


_digest = _encoder(_digestible, sort=True)
_plain_json = _encoder(plain, sort=False)


def _encoded(p: Prompt) -> bytes:
    """Return a prompt of a file as JSON, ``_TEXT`` and its text; its info is plain. Raises ``DataError`` for media,
    which are bytes."""
    if p.media:
        message = f"{p.where}: its transform returns media, which no cache of files keeps; give tilth.train the records"
        raise DataError(message, key=record_key(p.where, MEDIA))
    whole = None if p.whole == p.text else p.whole
    found = _plain_json([p.answer, p.info, p.messages, p.where, p.pairs, p.tools, whole])
    return b"%b%b%b" % (found.encode(), _TEXT, p.text.encode())


def _is_sorted(info: Mapping[str, Any]) -> bool:
    """True if ``_digest`` of an info is its JSON."""
    if len(info) == 1 and type(info.get("answer")) is str:  # most of them
        return True
    return (len(info) == 1 or [*info] == sorted(info)) and _NESTED.isdisjoint(map(type, info.values()))


def _json_of(found: PlainPrompts) -> PlainJson:
    """Return the JSON of prompts, made once."""
    if found.json is None:
        rows = [
            _turns_json(answer, turns) if turns else (_encode(text), _encode_answer(answer), "[]", "")
            for text, answer, turns in zip(found.texts, found.answers, found.turns)
        ]
        texts, answers, turns, in_order = zip(*rows) if rows else ((), (), (), ())
        infos = [
            f'{{"answer": {said}}}'
            if len(info) == 1 and answer is not None and info.get("answer") is answer
            else _plain_json(info)
            for answer, info, said in zip(found.answers, found.infos, answers)
        ]
        found.json = PlainJson(texts, answers, infos, turns, in_order)
    return found.json


def _encode_answer(answer: str | None) -> str:
    return "null" if answer is None else _encode(answer)


def _turns_json(answer: str | None, turns: PlainTurns) -> tuple[str, str, str, str]:
    """Return the JSON of a conversation's text and answer, of its turns as they are stored, and with sorted keys."""
    said = [_encode(content) for _, content in turns]
    ends = turns[-1][0] == "assistant"
    asked = said[:-1] if ends else said
    text = asked[0] if len(asked) == 1 else '"' + "\\n\\n".join([one[1:-1] for one in asked]) + '"'
    stored = ", ".join([f'{{"role": "{turn[0]}", "content": {one}}}' for turn, one in zip(turns, said)])
    in_order = ", ".join([f'{{"content": {one}, "role": "{turn[0]}"}}' for turn, one in zip(turns, said)])
    return text, said[-1] if ends else _encode_answer(answer), f"[{stored}]", f"[{in_order}]"


def _all_encoded(found: Prompt | PlainPrompts) -> list[bytes]:
    """Return each prompt as ``_encoded`` does."""
    if isinstance(found, Prompt):
        return [_encoded(found)]
    rest, made = "[], [], " + ("null]" if found.documents else '""]') + _TEXT.decode(), _json_of(found)
    columns = zip(made.answers, made.infos, made.turns, map(_encode, found.places), found.encoded[0])
    return [
        f"[{answer}, {info}, {turns}, {where}, {rest}".encode() + text for answer, info, turns, where, text in columns
    ]


class Prompts(Protocol):
    """Prompts by index: a list, or read on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt:
        """Return the prompt at an index in [0, len)."""
        ...


class _OpenFile:
    """A file that has this ``CacheEntry.state``. Raises ``FileNotFoundError``, also if it is another one now."""

    def __init__(self, file: Path, state: FileState) -> None:
        self.number = os.open(file, os.O_RDONLY)
        if state_of(os.fstat(self.number)) != state:
            raise FileNotFoundError(str(file))

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


_opened = lru_cache(maxsize=OPEN)(_OpenFile)


class Stored:
    """Prompts in an Arrow file, read on demand.

    The file is not mapped: around each page that is touched the kernel maps fifteen more, which would count as memory
    of a process that reads single items of hundreds of files.
    """

    def __init__(self, entry: CacheEntry, state: FileState, places: list[list[int]], first: np.ndarray) -> None:
        """places: in the file, of each batch's item ends int32 [rows + 1], of its items, and of its other columns.

        first: int64 [batches + 1], first prompt of each batch, then the number of all.
        """
        self.entry, self.state, self._places, self._first = entry, state, places, first

    @classmethod
    def opened(cls, entry: CacheEntry) -> Stored:
        """Open the file of an intact entry."""
        import pyarrow as pa

        state = entry.state()
        with pa.memory_map(str(entry.file)) as mapped:
            start, reader = mapped.read_buffer().address, pa.ipc.open_file(mapped)
            every = (reader.get_batch(i) for i in range(reader.num_record_batches))
            batches = [batch for batch in every if batch.num_rows]
            places = [
                [part.address - start for column in batch.columns for part in column.buffers()[1:]] for batch in batches
            ]
        return cls(entry, state, places, np.cumsum([0, *(batch.num_rows for batch in batches)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (self.entry.rooted(), self.state, self._places, self._first)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int, /) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        part = int(np.searchsorted(self._first, index, side="right")) - 1
        ends, items = self._places[part][:2]
        begin, end = np.frombuffer(self._read(ends + 4 * (index - int(self._first[part])), 8), np.int32).tolist()
        about, _, said = self._read(items + begin, end - begin).partition(_TEXT)
        text, (answer, info, messages, where, pairs, tools, whole) = said.decode(), json.loads(about.decode())
        found = tuple(Pair(*pair) for pair in pairs)
        whole = text if whole is None else whole
        return Prompt(index, text, answer, info, tuple(messages), where, found, tuple(tools), whole=whole)

    def _read(self, start: int, size: int) -> bytes:
        try:
            found = os.pread(_opened(self.entry.file, self.state).number, size, start)
        except FileNotFoundError:
            found = b""
        if len(found) < size:
            message = f"{self.entry.file} is not what it was when the run began; remove {self.entry.place} and resume"
            raise DataError(message, key=f"{self.entry.file.name}.changed")
        return found

    def index(self) -> Index:
        """Return the index, whose columns are read when they are asked for."""
        about = self.entry.about()
        return Index(self.columns, about["alphabet"], about["fingerprint"], about["left"])

    def columns(self) -> IndexColumns:
        """Return the columns of the index."""
        rows = np.diff(self._first).tolist()
        found = []
        for kind, *places in zip(_KINDS.values(), *(place[2:] for place in self._places)):
            sizes = (count * np.dtype(kind).itemsize for count in rows)
            found.append(np.frombuffer(b"".join(map(self._read, places, sizes)), kind))
        a, b, c, *d = found
        return IndexColumns(a, b, c, d[0] if d else np.zeros(0, np.uint64))


def keep(
    prompts: Iterable[Prompt | PlainPrompts],
    entry: CacheEntry | None,
    left: Mapping[str, int],
    *,
    sources: int = 1,
    digests: bool = False,
) -> tuple[Prompts, Index]:
    """Return prompts as they come and their index: in memory, or in the entry's file if they are many.

    An intact entry is read instead; it has digests if it was made with them. left: ``Index.left``, read at the end.
    sources: among which ``IN_MEMORY`` is divided. Raises ``StorageError``.
    """
    if entry is not None and entry.damage() == "":
        stored = Stored.opened(entry)
        return stored, stored.index()
    indexer, held, size = Indexer(digests=digests), list[Prompt | PlainPrompts](), 0
    coming = map(indexer.add, prompts)
    for found in coming:
        held.append(found)
        size += sum(len(prompt.document) for prompt in each_prompt([found]))
        if entry is not None and size > IN_MEMORY // sources:
            break
    else:
        return list(each_prompt(held)), indexer.done(left)
    with entry.writing("the index of the data") as (file, about):
        _write(file, chain(held, coming), indexer)
        index = indexer.done(left)
        about |= {"alphabet": index.alphabet, "fingerprint": index.fingerprint, "left": index.left}
    return Stored.opened(entry), index


def _write(file: Path, prompts: Iterable[Prompt | PlainPrompts], indexer: Indexer) -> None:
    """Write prompts that the indexer has seen when they come, a batch of them at a time."""
    import pyarrow as pa

    start, size, items = 0, 0, list[bytes]()
    fields = [("item", pa.binary()), *((name, pa.from_numpy_dtype(kind)) for name, kind in _KINDS.items())]
    schema = pa.schema(fields if indexer.digests else fields[:-1])
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:

        def flush() -> None:
            columns = indexer.columns(start, start + len(items))[: len(schema) - 1]
            writer.write_batch(pa.record_batch([pa.array(items, pa.binary()), *columns], schema=schema))

        for item in chain.from_iterable(map(_all_encoded, prompts)):
            items.append(item)
            size += len(item)
            if size > _BATCH:
                flush()
                start, size, items = start + len(items), 0, []
        flush()
