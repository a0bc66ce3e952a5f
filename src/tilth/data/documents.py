"""Cut whole texts into pieces of tokens, cached in a memory-mapped Arrow file: the data of flow ``pretrain``."""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tilth.core.batch import Jagged
from tilth.core.errors import DataError, StorageError
from tilth.core.files import make_folder, rename
from tilth.data.tokenizer import Tokenizer

_SCHEMA = pa.schema([("tokens", pa.list_(pa.int32()))])
_FORMAT = "tilth pieces 2"
_CHARACTERS = 1 << 20
"""Text tokenised at once, by all threads of ``tokenizers``; it bounds the memory of a build (200 bytes for each)."""
_DOCUMENTS = 4096
_PART = 1 << 17
_BORDER = re.compile(r"(?<=\n)(?=\S)|(?<=\S)(?= \S)")
"""Candidate places to cut a long text: where a line or a word begins."""
_TRIES = 16
_BESIDE = 256
"""Characters on each side of a border that a trial tokenises."""
_READ = 1 << 18


class Corpus:
    """Pieces of documents by index.

    A document is its token ids and the end token, cut into pieces of at most ``context`` tokens, in order; no token is
    lost or repeated. ``lengths``: int32 [n]; ``bytes``: of all documents as UTF-8; ``note``: one line about the build.
    """

    def __init__(self, file: Path, bytes: int = 0, note: str = "") -> None:
        self.bytes = bytes
        self.note = note
        self._file = file
        reader = pa.ipc.open_file(pa.memory_map(str(file)))
        lists = [reader.get_batch(i).column(0) for i in range(reader.num_record_batches)]
        self._offsets = [part.offsets.to_numpy() for part in lists]
        self._values = [part.values.to_numpy() for part in lists]
        self._first = np.cumsum([0, *(len(part) for part in lists)])
        self.lengths = np.concatenate([np.zeros(0, np.int32), *map(np.diff, self._offsets)]).astype(np.int32)

    @classmethod
    def build(cls, texts: Sequence[str], tokenizer: Tokenizer, context: int, folder: Path) -> "Corpus":
        """Tokenise the texts, or load the cache in ``folder`` of the same texts, tokenizer and context.

        A damaged cache is built again and reported in ``note``. Empty texts are left out. Raises ``DataError`` if
        there is no text, ``StorageError`` if the folder cannot be written.
        """
        if context < 2:
            message = f"pieces of {context} tokens have nothing to predict; context must be at least 2"
            raise DataError(message, key="context")
        if not any(texts):
            raise DataError("there is no text in the documents", key="texts")
        place = folder / f"pieces-{_key(texts, tokenizer, context)}"
        damage = _damage(place)
        if damage != "":
            _write(place, texts, tokenizer, context)
        corpus = cls(place / "pieces.arrow", _about(place)["bytes"], f"tokens from {place}")
        if damage != "":
            again = f"; what was in {place} is damaged ({damage}) and was built anew" if damage else ""
            corpus.note = f"tokenised {corpus.tokens_in_all:,} tokens of {corpus.bytes:,} bytes{again}"
        return corpus

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus, (self._file.resolve(), self.bytes, self.note)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokens_in_all(self) -> int:
        """Number of tokens in all pieces."""
        return int(self.lengths.sum(dtype=np.int64))

    def tokens(self, indices: Iterable[int] | np.ndarray) -> Jagged:
        """Return token ids int64 of the pieces at these indices, one row each."""
        return Jagged.of([self._piece(int(i)) for i in indices])

    def _piece(self, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"piece {index} of {len(self)}")
        part = int(np.searchsorted(self._first, index, side="right")) - 1
        at = index - self._first[part]
        start, stop = self._offsets[part][at : at + 2]
        piece: np.ndarray = self._values[part][start:stop].astype(np.int64)
        return piece


def _key(texts: Iterable[str], tokenizer: Tokenizer, context: int) -> str:
    found = hashlib.blake2b(f"{_FORMAT} {tokenizer.fingerprint()} {context}".encode(), digest_size=10)
    for text in texts:
        data = text.encode()
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


def _damage(place: Path) -> str | None:
    """Describe the damage of a cache: "" if it is intact, None if there is none."""
    if not place.exists():
        return None
    try:
        about = _about(place)
        if _checksum(place / "pieces.arrow") != about["checksum"]:
            return "its checksum differs"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return str(error) or type(error).__name__
    return ""


def _about(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "about.json").read_text())
    return found


def _checksum(file: Path) -> int:
    """CRC-32 of a file, at about a second per gigabyte."""
    found = 0
    with open(file, "rb") as opened:
        while block := opened.read(_READ):
            found = zlib.crc32(block, found)
    return found


def _write(place: Path, texts: Sequence[str], tokenizer: Tokenizer, context: int) -> None:
    """Write the pieces, then the file with their checksum: a build that was killed leaves no valid cache."""
    try:
        make_folder(place)
        file = place / f".pieces.{os.getpid()}"
        try:
            with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
                for ids in _documents(texts, tokenizer):
                    writer.write_batch(_pieces(ids, context))
            about = {"checksum": _checksum(file), "bytes": sum(len(text.encode()) for text in texts)}
            rename(file, place / "pieces.arrow")
        finally:
            file.unlink(missing_ok=True)
        temporary = place / f".about.{os.getpid()}"
        temporary.write_text(json.dumps(about))
        rename(temporary, place / "about.json")
    except OSError as error:
        message = f"cannot write the tokens of the documents to {place}: {error.strerror or error}"
        raise StorageError(message, key="pieces.arrow") from error


def _documents(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[np.ndarray]]:
    """Yield ids int32 of each document with its end token, a batch of documents at a time."""
    for batch in _batches(text for text in texts if text):
        rows = [_long(batch[0], tokenizer)] if len(batch[0]) > _CHARACTERS else tokenizer.encode_all(batch)
        yield [np.append(np.array(ids, np.int32), np.int32(tokenizer.eos_id)) for ids in rows]


def _long(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Tokenise a text part by part, or as a whole where it has no safe cut."""
    first, *parts = (text[a:b] for a, b in pairwise([*_cuts(text, tokenizer), len(text)]))
    rest = (ids for batch in _batches(parts) for ids in tokenizer.encode_all(batch, special=False))
    return np.concatenate([np.array(ids, np.int32) for ids in (tokenizer.encode(first), *rest)])


def _cuts(text: str, tokenizer: Tokenizer) -> list[int]:
    """Starts of parts of a text whose tokens, joined, are those of the text."""
    cuts = [0]
    while cuts[-1] + _PART < len(text):
        borders = (found.start() for found in islice(_BORDER.finditer(text, cuts[-1] + _PART), _TRIES))
        at = next((at for at in borders if _apart(text, at, tokenizer)), None)
        if at is None:
            break
        cuts.append(at)
    return cuts


def _apart(text: str, at: int, tokenizer: Tokenizer) -> bool:
    """True if the two sides of a border have the same tokens joined and alone."""
    left, right = text[max(at - _BESIDE, 0) : at], text[at : at + _BESIDE]
    both, one, other = tokenizer.encode_all([left + right, left, right], special=False)
    return both == one + other


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and (size + len(text) > _CHARACTERS or len(batch) == _DOCUMENTS):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _pieces(documents: Sequence[np.ndarray], context: int) -> pa.RecordBatch:
    lengths = [length for ids in documents for length in _lengths(len(ids), context)]
    values = np.concatenate(documents)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.record_batch([pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))], schema=_SCHEMA)


def _lengths(tokens: int, context: int) -> list[int]:
    """Lengths of a document's pieces; a last piece of one token, with nothing to predict, takes one from before."""
    full, rest = divmod(tokens, context)
    if rest == 1 and full and context > 2:
        return [*[context] * (full - 1), context - 1, 2]
    return [*[context] * full, *[rest] * bool(rest)]
