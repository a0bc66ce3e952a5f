"""Lossless difference of two arrays of words, small where most words are equal, as those of bf16 weights are between
two steps of an optimizer.

``now = before ^ x``: a mask of the words where x is not 0, one bit each, then these words of x byte by byte, the lowest
bytes first. Both are Huffman-coded (deflate without a search for matches): measured on updates by AdamW and Muon, that
takes less time than deflate with matches or lists of places, and about as many bytes.
"""

import struct
import zlib

import numpy as np

from tilth.core.errors import ArgumentError

_HEAD = struct.Struct("<BQ")
_WHOLE, _CHANGES = 0, 1


def encode_delta(before: np.ndarray, now: np.ndarray) -> bytes:
    """Return ``now`` as changes of ``before``, or whole where that is smaller. Both: unsigned words [n]."""
    changes = before ^ now
    changed = changes != 0
    mask = _coded(np.packbits(changed).tobytes())
    values = changes[changed].astype(_little(now.dtype))
    body = _coded(values.view(np.uint8).reshape(-1, now.itemsize).T.tobytes())
    if len(mask) + len(body) < now.nbytes:
        return _HEAD.pack(_CHANGES, len(mask)) + mask + body
    return whole_delta(now)


def whole_delta(now: np.ndarray) -> bytes:
    """Return an array as a delta that needs no ``before``."""
    return _HEAD.pack(_WHOLE, 0) + now.astype(_little(now.dtype), copy=False).tobytes()


def apply_delta(delta: bytes, before: np.ndarray | None, into: np.ndarray) -> None:
    """Write the array that a delta encodes; ``into`` may be ``before``, and before is None for whole ones alone.

    ArgumentError if these are no bytes of a delta of an array of this size; what ``into`` holds is then undefined.
    """
    kind, length = _HEAD.unpack_from(delta) if len(delta) >= _HEAD.size else (-1, 0)
    rest, word = memoryview(delta)[_HEAD.size :], _little(into.dtype)
    if kind == _WHOLE and len(rest) == into.nbytes:
        into[:] = np.frombuffer(rest, word)
    elif kind == _CHANGES and before is not None and length <= len(rest):
        mask = _decoded(rest[:length], -(-len(into) // 8))
        changed = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(into)).view(bool)
        planes = _decoded(rest[length:], int(changed.sum()) * into.itemsize)
        into[:] = before
        into[changed] ^= np.frombuffer(planes, np.uint8).reshape(into.itemsize, -1).T.copy().view(word)[:, 0]
    else:
        message = f"{len(delta)} bytes are no delta of {len(into)} words of {into.itemsize} bytes"
        raise ArgumentError(message, key="delta")


def _little(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("<")


def _coded(data: bytes) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()


def _decoded(data: memoryview, size: int) -> bytes:
    """Return the ``size`` bytes that were coded; ArgumentError if they are others."""
    coder = zlib.decompressobj(-15)
    try:
        found = coder.decompress(data, size + 1)  # a limit of 0 would be none
    except zlib.error as error:
        raise ArgumentError(f"bytes of a delta cannot be decoded: {error}", key="delta") from None
    if len(found) != size or not coder.eof or coder.unused_data:
        raise ArgumentError(f"bytes of a delta decode to {len(found)} bytes, not to {size}", key="delta")
    return found
