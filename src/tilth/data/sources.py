"""Where prompts come from: files, lists of records, and two sources as one."""

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
from tilth.data.computed import Computed, Source, text_hashes
from tilth.data.formats import read_records
from tilth.data.given import Given, nothing_in, placed

_TOGETHER = 1024
"""Texts joined to be looked at at once."""


class Records(Computed):
    """Prompts in memory. Those that were read from ``files`` travel as a description, and are read again where they
    arrive: DataError if they are others there."""

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
        """The prompt at an index."""
        return self._prompts[index]

    @cached_property
    def hashes(self) -> np.ndarray:
        """Of all texts, without the white space around them: see ``Prompt.key``."""
        return text_hashes(p.key.encode() for p in self._prompts)

    def sizes(self) -> np.ndarray:
        """Bytes of all texts."""
        return np.array([len(p.text.encode()) for p in self._prompts], np.int64)

    def alphabet(self) -> str:
        """Of all prompts and answers."""
        found: set[str] = set()
        for start in range(0, len(self), _TOGETHER):
            found.update("".join(p.text + (p.answer or "") for p in self._prompts[start : start + _TOGETHER]))
        return "".join(sorted(found))

    def fingerprint(self) -> str:
        """Hash of everything that every prompt says."""
        found = hashlib.blake2b(digest_size=8)
        for p in self._prompts:
            said = [p.text, p.info, *([p.answer, p.messages] if p.messages else [])]
            found.update(json.dumps(said, sort_keys=True, default=_told).encode())
        return found.hexdigest()


def _told(value: Any) -> Any:
    """What JSON does not have, so that it is told from any other value, and alike in every process."""
    if hasattr(value, "tolist"):  # an array, whose repr leaves out what is in the middle
        return [str(getattr(value, "dtype", "")), value.tolist()]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if type(value).__repr__ is object.__repr__:  # which is an address
        return [type(value).__qualname__, getattr(value, "__dict__", None)]
    return repr(value)


def read_source(source: str, columns: Columns | None = None) -> Records:
    """The prompts of files, see ``formats.read_records`` and ``columns.to_prompt``. Raises ``DataError``."""
    prompts: list[Prompt] = []
    for where, record in read_records(source):
        prompt = to_prompt(record, len(prompts), where, columns or {})
        info = plain(prompt.info)
        prompts.append(prompt if info is prompt.info else replace(prompt, info=info))
    if not prompts:
        raise DataError(f"dataset {source!r} is empty")
    return Records(prompts, source, columns)


def _reopened(source: str, columns: Columns | None, fingerprint: str) -> Records:
    found = read_source(source, columns)
    if found.fingerprint() != fingerprint:
        raise DataError(f"{source!r} is not what the run began with: it was changed since, or differs between machines")
    return found


def from_records(records: Given, columns: Columns | None = None, name: str = "data") -> Records:
    """From records by value, or bare prompt texts: see ``given.placed``. Raises ``DataError`` with the place of one."""
    prompts = [
        Prompt(i, record, where=where) if isinstance(record, str) else to_prompt(record, i, where, columns or {})
        for i, (where, record) in enumerate(placed(records, name))
    ]
    if not prompts:
        raise DataError(nothing_in(records, name))
    return Records(prompts)


class Joined(Computed):
    """Two sources as one: the indices of the second come after those of the first."""

    def __init__(self, first: Source, second: Source) -> None:
        self.first = first
        self.second = second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def prompt(self, index: int) -> Prompt:
        """The prompt at an index, which it names itself by, too."""
        border = len(self.first)
        return self.first.prompt(index) if index < border else replace(self.second.prompt(index - border), index=index)

    @cached_property
    def hashes(self) -> np.ndarray:
        """Of both."""
        return np.concatenate([self.first.hashes, self.second.hashes])

    def sizes(self) -> np.ndarray:
        """Of both."""
        return np.concatenate([self.first.sizes(), self.second.sizes()])

    def alphabet(self) -> str:
        """Of both."""
        return "".join(sorted({*self.first.alphabet(), *self.second.alphabet()}))

    def fingerprint(self) -> str:
        """Of both, in this order."""
        return f"{self.first.fingerprint()}, held out: {self.second.fingerprint()}"

    @cached_property
    def copies(self) -> np.ndarray:
        """bool [len(first)]: whether a prompt of the first has the very key of a prompt of the second."""
        common = np.isin(self.first.hashes, self.second.hashes)
        rare = np.flatnonzero(np.isin(self.second.hashes, self.first.hashes[common]))
        keys = {self.second.prompt(int(i)).key for i in rare}
        for i in np.flatnonzero(common):  # of equal hash, few of which have unequal keys
            common[i] = self.first.prompt(int(i)).key in keys
        return common
