"""Sources of prompts: files, records by value, and two sources joined."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from tilth.core.errors import DataError
from tilth.data.columns import Columns, Prompt, plain, to_prompt
from tilth.data.computed import Computed, Source, has_media, text_hashes
from tilth.data.formats import read_records
from tilth.data.given import Given, nothing_in, placed

_TOGETHER = 1024
"""Texts joined at once to collect their characters."""


class Records(Computed):
    """Prompts in memory.

    Prompts of ``files`` are pickled as path, columns and fingerprint, and read again on unpickling: ``DataError`` if
    the files differ there.
    """

    def __init__(self, prompts: Sequence[Prompt], files: str = "", columns: Columns | None = None) -> None:
        self._prompts = prompts
        self._files, self._columns = files, columns

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._files:
            return Records, (self._prompts,)
        return _reopened, (os.path.abspath(self._files), self._columns, self.fingerprint())

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, index: int) -> Prompt:
        return self._prompts[index]

    @cached_property
    def hashes(self) -> np.ndarray:
        return text_hashes(p.key.encode() for p in self._prompts)

    def sizes(self) -> np.ndarray:
        return np.array([len(p.text.encode()) for p in self._prompts], np.int64)

    @cached_property
    def media(self) -> bool:
        return any(p.media for p in self._prompts)

    def alphabet(self) -> str:
        found: set[str] = set()
        for start in range(0, len(self), _TOGETHER):
            some = self._prompts[start : start + _TOGETHER]
            found.update("".join(p.text + (p.answer or "") for p in some))
            found.update("".join(pair.chosen + pair.rejected for p in some for pair in p.pairs))
        return "".join(sorted(found))

    def fingerprint(self) -> str:
        """Digest of text, info, answer and turns of every prompt; of pairs, info holds the answers and margins."""
        found = hashlib.blake2b(digest_size=8)
        for p in self._prompts:
            content = [p.text, p.info, *([p.answer, p.messages] if p.messages else []), *p.media]
            found.update(json.dumps(content, sort_keys=True, default=_digestible).encode())
        return f"pairs {found.hexdigest()}" if any(p.pairs for p in self._prompts) else found.hexdigest()


def _digestible(value: Any) -> Any:
    """Convert a value that JSON lacks: distinct values stay distinct, and equal in every process."""
    if hasattr(value, "tolist"):  # an array, whose repr leaves out what is in the middle
        return [str(getattr(value, "dtype", "")), value.tolist()]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if type(value).__repr__ is object.__repr__:  # which is an address
        return [type(value).__qualname__, getattr(value, "__dict__", None)]
    return repr(value)


def read_source(source: str, columns: Columns | None = None) -> Records:
    """Return the prompts of files, read by ``formats.read_records`` and ``columns.to_prompt``. Raises ``DataError``."""
    prompts: list[Prompt] = []
    for where, record in read_records(source):
        prompt = to_prompt(record, len(prompts), where, columns or {})
        info = plain(prompt.info)
        prompts.append(prompt if info is prompt.info else replace(prompt, info=info))
    if not prompts:
        raise DataError(f"dataset {source!r} is empty", key=os.path.basename(source))
    return Records(prompts, source, columns)


def _reopened(source: str, columns: Columns | None, fingerprint: str) -> Records:
    found = read_source(source, columns)
    if found.fingerprint() != fingerprint:
        message = f"{source!r} is not what the run began with: it was changed since, or differs between machines"
        raise DataError(message, key=f"{os.path.basename(source)}.fingerprint")
    return found


def from_records(records: Given, columns: Columns | None = None, name: str = "data") -> Records:
    """Return the prompts of records by value, or of bare prompt texts; see ``given.placed``. Raises ``DataError``."""
    prompts = [
        Prompt(i, record, where=where) if isinstance(record, str) else to_prompt(record, i, where, columns or {})
        for i, (where, record) in enumerate(placed(records, name))
    ]
    if not prompts:
        raise nothing_in(records, name)
    return Records(prompts)


class Joined(Computed):
    """Two sources as one: the indices of the second follow those of the first."""

    def __init__(self, first: Source, second: Source) -> None:
        self.first = first
        self.second = second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index, renumbered to it."""
        border = len(self.first)
        return self.first.prompt(index) if index < border else replace(self.second.prompt(index - border), index=index)

    @cached_property
    def hashes(self) -> np.ndarray:
        return np.concatenate([self.first.hashes, self.second.hashes])

    def sizes(self) -> np.ndarray:
        return np.concatenate([self.first.sizes(), self.second.sizes()])

    def alphabet(self) -> str:
        return "".join(sorted({*self.first.alphabet(), *self.second.alphabet()}))

    def fingerprint(self) -> str:
        return f"{self.first.fingerprint()}, held out: {self.second.fingerprint()}"

    @property
    def media(self) -> bool:
        return has_media(self.first) or has_media(self.second)

    @cached_property
    def copies(self) -> np.ndarray:
        """bool [len(first)]: True for a prompt of the first source whose key a prompt of the second has too."""
        common = np.isin(self.first.hashes, self.second.hashes)
        rare = np.flatnonzero(np.isin(self.second.hashes, self.first.hashes[common]))
        keys = {self.second.prompt(int(i)).key for i in rare}
        for i in np.flatnonzero(common):  # hashes may collide, so compare the few keys
            common[i] = self.first.prompt(int(i)).key in keys
        return common
