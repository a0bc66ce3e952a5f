"""Base of sources whose prompts are computed from an index, such as a task's. Imports no torch."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from tilth.data.columns import Prompt

if TYPE_CHECKING:
    import numpy as np  # in functions otherwise: a reward process imports tasks but not numpy


class Source(Protocol):
    """Prompts by index, and columns that split and check them without building each prompt."""

    def __len__(self) -> int: ...

    def prompt(self, index: int) -> Prompt:
        """Return the prompt at an index in [0, len)."""
        ...

    @property
    def hashes(self) -> np.ndarray:
        """uint32 [n]: a hash of each prompt's key and of nothing else."""
        ...

    def sizes(self) -> np.ndarray:
        """int64 [n]: bytes of each prompt's text."""
        ...

    def alphabet(self) -> str:
        """All characters of prompts and answers, sorted."""
        ...

    def fingerprint(self) -> str:
        """Digest that differs between sources that differ in anything."""
        ...


def has_media(source: Source) -> bool:
    """True if a prompt of the source has media, as its attribute ``media`` says; a source without it has none."""
    return bool(getattr(source, "media", False))


def text_hashes(texts: Iterable[bytes]) -> np.ndarray:
    """uint32 [n]: CRC-32 of each text, then murmur3's finaliser, since a CRC is linear and texts are similar."""
    import numpy as np

    return mixed(np.fromiter(map(zlib.crc32, texts), np.uint32))


def mixed(h: np.ndarray) -> np.ndarray:
    """uint32 [n] -> uint32 [n]: the finaliser of murmur3, a bijection that spreads neighbouring numbers."""
    import numpy as np

    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return h ^ (h >> np.uint32(16))


def random_words(path: tuple[str | int, ...], start: int, count: int) -> np.ndarray:
    """int64 [count]: 32 random bits each, a pure function of path and place."""
    from tilth.core.random import stream  # lazily: processes that score import a task, and no torch

    return stream(0, *path).bits(start, count).numpy()


class Computed:
    """Base of a source: hashes of its texts; a pickle leaves out every cached column."""

    def texts(self) -> Iterable[str]:
        """Text of each prompt, in order."""
        raise NotImplementedError

    @cached_property
    def hashes(self) -> np.ndarray:
        """uint32 [n]: hash of each text."""
        return text_hashes(text.encode() for text in self.texts())

    def sizes(self) -> np.ndarray:
        """int64 [n]: bytes of each text."""
        import numpy as np

        return np.fromiter((len(text.encode()) for text in self.texts()), np.int64)

    def __getstate__(self) -> dict[str, Any]:
        kind = type(self)
        return {k: v for k, v in vars(self).items() if not isinstance(getattr(kind, k, None), cached_property)}
