"""Media of a sequence: items, such as images, whose embeddings take the places of those of its tokens.

An item is bytes, which nothing but the encoder that it names reads.
"""

import json
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from tilth.core.errors import DataError

if TYPE_CHECKING:
    import numpy as np  # else imported where it is used: verifiers, which read prompts, start without it

MEDIA = "media"
"""Payload column of media: ``pack_media`` of each sequence. Among the columns of a pass it is object [sequences]."""


class MediaItem(NamedTuple):
    """An image or the like in a sequence."""

    encoder: str
    """Name of the encoder that reads it (``tilth.encoder``)."""
    start: int
    """Its first position in the sequence."""
    length: int
    """Number of its positions; the tokens there have no effect."""
    data: bytes


Media = tuple[MediaItem, ...]


def pack_media(items: Media) -> "np.ndarray":
    """Return items as uint8 [n]; none as uint8 [0]."""
    import numpy as np

    head = json.dumps([[*item[:3], len(item.data)] for item in items]).encode()
    parts = [len(head).to_bytes(8, "little"), head, *(item.data for item in items)] if items else []
    return np.frombuffer(b"".join(parts), np.uint8)


def unpack_media(packed: "np.ndarray") -> Media:
    """Return the items of ``pack_media``."""
    raw, found = packed.tobytes(), list[MediaItem]()
    at = 8 + int.from_bytes(raw[:8], "little")
    for encoder, start, length, size in json.loads(raw[8:at] or b"[]"):
        found.append(MediaItem(encoder, start, length, raw[at : at + size]))
        at += size
    return tuple(found)


def check_media(items: Media, tokens: int, what: str) -> None:
    """Raise DataError unless items have data, and positions of their own among the first ``tokens``, in order."""
    end = 0
    for i, (_, start, length, data) in enumerate(items):
        if not (data and end <= start < start + length <= tokens):
            message = f"{what}: media item {i} has {len(data)} bytes, and {length} positions from {start} on"
            raise DataError(f"{message}; it must have some of both, in {end} to {tokens - 1}", key=f"media.{i}")
        end = start + length


def media_keys(tokens: "np.ndarray", items: Media) -> "np.ndarray":
    """Return ids by which a cache of prefixes knows the positions of a sequence, int64 [n]: hashes of an item, below 0,
    at its positions; else the tokens."""
    import numpy as np

    keys = tokens.copy() if items else tokens
    for encoder, start, length, data in items:
        words = blake2b(data, key=blake2b(f"{length} {encoder}".encode()).digest()).digest()
        keys[start : start + length] = np.resize(np.frombuffer(words, np.int64) | np.iinfo(np.int64).min, length)
    return keys
