"""Frames: however the bytes of a stream are cut, the same messages come out."""

import io
import os
import struct

from tilth.process.frames import drain, frame, read_frame, take_frames

BODIES = [b"", b"a", b"x" * 300]


def test_a_stream_that_is_cut_anywhere():
    sent = b"".join(map(frame, BODIES))
    assert sent == b"".join(struct.pack("<Q", len(body)) + body for body in BODIES)
    for cut in range(len(sent) + 1):
        received = bytearray(sent[:cut])
        first = list(take_frames(received))
        received += sent[cut:]
        assert first + list(take_frames(received)) == BODIES and not received
        whole = io.BytesIO(sent[:cut])
        read = [body for _ in BODIES if (body := read_frame(whole)) is not None]
        assert read == first


def test_what_a_pipe_holds_is_read_without_waiting():
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    received = bytearray()
    assert drain(reader, received) and not received
    os.write(writer, b"abc")
    assert drain(reader, received) and received == b"abc"
    os.close(writer)
    assert not drain(reader, received)
    os.close(reader)
