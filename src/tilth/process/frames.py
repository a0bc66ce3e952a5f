"""Messages over pipes and sockets: 8 bytes of length, then the body. Imports the standard library alone."""

import os
import struct
from collections.abc import Iterator
from typing import BinaryIO

_HEAD = struct.Struct("<Q")


def frame(body: bytes) -> bytes:
    """Return a message with this body."""
    return _HEAD.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the body of the next message; None at the end of the stream."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    size = _HEAD.unpack(head)[0]
    body = stream.read(size)
    return body if len(body) == size else None


def take_frames(received: bytearray) -> Iterator[bytes]:
    """Yield the bodies of the complete messages at the beginning of what was received, and remove them."""
    while len(received) >= _HEAD.size:
        end = _HEAD.size + _HEAD.unpack_from(received)[0]
        if len(received) < end:
            return
        body = bytes(received[_HEAD.size : end])
        del received[:end]
        yield body


def drain(fd: int, into: bytearray) -> bool:
    """Read what there is from a pipe that does not block; False at the end of the stream."""
    try:
        while received := os.read(fd, 1 << 20):
            into += received
    except BlockingIOError:
        return True
    return False
