"""Cut whole texts into pieces of tokens, cached in memory-mapped Arrow files: the data of flow ``pretrain``."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from tilth.core.batch import Jagged
from tilth.core.errors import DataError
from tilth.data.cache import CacheEntry
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
Packing = Literal["fit", "concat", "none"]


class Corpus:
    """Pieces of documents by index.

    A document is its token ids and the end token, cut into pieces of at most ``context`` tokens, in order; no token is
    lost or repeated. ``lengths``: int32 [n]; ``bytes``: of all documents as UTF-8; ``note``: one line about the build.
    """

    def __init__(self, files: Sequence[Path], bytes: int = 0, note: str = "") -> None:
        self.bytes = bytes
        self.note = note
        self._files = files
        readers = [pa.ipc.open_file(pa.memory_map(str(file))) for file in files]
        lists = [reader.get_batch(i).column(0) for reader in readers for i in range(reader.num_record_batches)]
        self._offsets = [part.offsets.to_numpy() for part in lists]
        self._values = [part.values.to_numpy() for part in lists]
        self._first = np.cumsum([0, *(len(part) for part in lists)])
        self.lengths = np.concatenate([np.zeros(0, np.int32), *map(np.diff, self._offsets)]).astype(np.int32)

    @classmethod
    def build(
        cls, texts: Sequence[str], tokenizer: Tokenizer, context: int, folder: Path, packing: Packing = "fit"
    ) -> "Corpus":
        """Tokenise the texts, or load the cache in ``folder`` of the same texts, tokenizer, context and packing.

        packing: "concat" cuts all documents, joined, into pieces of ``context`` tokens, and a last one or two shorter.

        A damaged cache is built again and reported in ``note``. Empty texts are left out. Raises ``DataError`` if
        there is no text, ``StorageError`` if the folder cannot be written.
        """
        if context < 2:
            message = f"pieces of {context} tokens have nothing to predict; context must be at least 2"
            raise DataError(message, key="context")
        if not any(texts):
            raise DataError("there is no text in the documents", key="texts")
        entry = CacheEntry(folder / f"pieces-{_key(texts, tokenizer, context, packing)}", "pieces.arrow")
        damage = entry.damage()
        if damage != "":
            with entry.writing("the tokens of the documents") as (file, about):
                about["bytes"] = _write(file, texts, tokenizer, context, packing)
        corpus = cls([entry.file], entry.about()["bytes"], f"tokens from {entry.place}")
        if damage != "":
            again = f"; what was in {entry.place} is damaged ({damage}) and was built anew" if damage else ""
            corpus.note = f"tokenised {corpus.tokens_in_all:,} tokens of {corpus.bytes:,} bytes{again}"
        return corpus

    @classmethod
    def joined(cls, corpora: Sequence["Corpus"]) -> "Corpus":
        """Return the pieces of several sources, those of each behind those of the one before."""
        files = [file for corpus in corpora for file in corpus._files]
        return cls(files, sum(corpus.bytes for corpus in corpora), "; ".join(corpus.note for corpus in corpora))

    def __reduce__(self) -> tuple[Any, ...]:
        return Corpus, ([file.resolve() for file in self._files], self.bytes, self.note)

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


def _key(texts: Iterable[str], tokenizer: Tokenizer, context: int, packing: Packing) -> str:
    how = f"{_FORMAT} {tokenizer.fingerprint()} {context}" + (" concat 2" if packing == "concat" else "")
    found = hashlib.blake2b(how.encode(), digest_size=10)
    for text in texts:
        data = text.encode()
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()


def _write(file: Path, texts: Sequence[str], tokenizer: Tokenizer, context: int, packing: Packing) -> int:
    """Write the pieces; return the bytes of the texts."""
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        rest = np.zeros(0, np.int32)
        for ids in _documents(texts, tokenizer):
            if packing == "concat":
                joined = np.concatenate([rest, *ids])
                full = max(len(joined) // context - 1, 0) * context  # the last one may give a token to a rest of one
                ids, rest = [joined[:full]], joined[full:]
            writer.write_batch(_pieces(ids, context))
        writer.write_batch(_pieces([rest], context))
    return sum(len(text.encode()) for text in texts)


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


def piece_lengths(texts: Iterable[str], tokenizer: Tokenizer, context: int, packing: Packing = "fit") -> np.ndarray:
    """Return the tokens of each piece of these texts, int64 [n], as ``Corpus.build`` cuts them."""
    sizes = [len(ids) for documents in _documents(texts, tokenizer) for ids in documents]
    whole = [sum(sizes)] if packing == "concat" else sizes
    return np.array([length for size in whole for length in _lengths(size, context)], np.int64)


def _lengths(tokens: int, context: int) -> list[int]:
    """Lengths of a document's pieces; a last piece of one token, with nothing to predict, takes one from before."""
    full, rest = divmod(tokens, context)
    if rest == 1 and full and context > 2:
        return [*[context] * (full - 1), context - 1, 2]
    return [*[context] * full, *[rest] * bool(rest)]
