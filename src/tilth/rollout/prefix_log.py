"""Log of the tokens of samples in flight, from which they go on elsewhere: on another replica, after the death of
theirs, or after that of the controller.

Each rank appends to files of its own what its samples have drawn in a round, in one write; any rank reads those of all.
A file has one attempt of the run, since attempts that return to one step may draw its samples again, otherwise. Frames
have checksums, and one that is torn ends what is known of its sample. They outlive processes, but not a power cut.
"""

import json
import os
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from tilth.core.files import make_folder, writing
from tilth.core.trajectory import Finish, Trajectory
from tilth.engines.request import Request

_FRAME = struct.Struct("<qqIII")
"""Sample, number of tokens of its completion before these, bytes of the facts and of the columns, CRC-32 of both."""
_BEGUN = re.compile(r"attempt-(\d+)-from-(\d+)")


class DrawnTokens(NamedTuple):
    """Tokens int64 [n] of a request's completion behind its first ``start``, with log-probs float32 [n] and, through
    filters, those of the filtered distribution. versions: of the trajectory so far; finish: None while it is in
    flight."""

    request: Request
    start: int
    tokens: np.ndarray
    logprobs: np.ndarray
    sampling: np.ndarray | None
    versions: Sequence[tuple[int, int]]
    finish: Finish | None = None
    text: str = ""

    @classmethod
    def of(cls, request: Request, t: Trajectory, start: int, *, ended: bool) -> "DrawnTokens":
        """Return what a trajectory has behind its first ``start`` tokens. ended: with its end."""
        some = slice(len(request.prompt) + start, None)
        sampling = None if t.sampling_logprobs is None else t.sampling_logprobs[some]
        end = (t.finish, t.text) if ended else (None, "")
        return cls(request, start, t.tokens[some], t.logprobs[some], sampling, t.versions, *end)

    def encoded(self) -> bytes:
        """Return the frame."""
        facts = [_drawn_by(self.request), self.sampling is not None, self.versions, self.finish, self.text]
        head = json.dumps(facts).encode()
        sampling = b"" if self.sampling is None else self.sampling.astype(np.float32).tobytes()
        columns = self.tokens.astype(np.int64).tobytes() + self.logprobs.astype(np.float32).tobytes() + sampling
        numbers = self.request.id, self.start, len(head), len(columns)
        return _FRAME.pack(*numbers, zlib.crc32(head + columns)) + head + columns

    def after(self, end: int) -> "DrawnTokens":
        """Return what is behind the first ``end`` tokens of the completion."""
        some = slice(end - self.start, None)
        sampling = None if self.sampling is None else self.sampling[some]
        return self._replace(start=end, tokens=self.tokens[some], logprobs=self.logprobs[some], sampling=sampling)

    @classmethod
    def decoded(cls, request: Request, start: int, head: bytes, columns: bytes) -> "DrawnTokens | None":
        """Read the frame of a request; None for one of another prompt, or drawn in another way."""
        by, filtered, versions, finish, text = json.loads(head)
        if by != _drawn_by(request):
            return None
        n = len(columns) // (16 if filtered else 12)
        tokens, floats = np.frombuffer(columns, np.int64, n), np.frombuffer(columns, np.float32, offset=8 * n)
        spans = [(first, version) for first, version in versions]
        return cls(request, start, tokens, floats[:n], floats[n:] if filtered else None, spans, finish, text)


@dataclass
class _Frames:
    """Places of the frames of a file, by sample. end: of the last one that is known."""

    end: int = 0
    places: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


class PrefixLog:
    """The log, as one rank writes it and reads those of all. A file is closed after each write, so that other machines
    see it on a shared disk."""

    def __init__(self, folder: Path, attempt: int, version: int, rank: int) -> None:
        """attempt: of the run, which counts up; version: of the policy that it begins with: what earlier attempts have
        drawn under later versions is void. StorageError."""
        self.folder, self.attempt, self.rank = folder, attempt, rank
        self._part = 0
        self._known: dict[Path, _Frames] = defaultdict(_Frames)
        with writing(folder):
            make_folder(folder)
            (folder / f"attempt-{attempt:06d}-from-{version}").touch()

    def write(self, drawn: Sequence[DrawnTokens]) -> None:
        """Append what samples have drawn. StorageError."""
        if not drawn:
            return
        path = self.folder / f"attempt-{self.attempt:06d}-rank-{self.rank}-part-{self._part:06d}.bin"
        with writing(path), open(path, "ab") as file:
            file.write(b"".join(one.encoded() for one in drawn))

    def take(self, request: Request) -> Trajectory | None:
        """Return what the newest attempt that knows a token of a sample has of it, for a request that asks for it; None
        without a token. Its finish is "aborted" unless all of it is there."""
        begun = dict[int, int]()  # attempt -> version that its first phase began with
        for match in filter(None, map(_BEGUN.fullmatch, os.listdir(self.folder))):
            begun[int(match[1])] = min(int(match[2]), begun.get(int(match[1]), int(match[2])))
        for attempt in sorted(begun, reverse=True):
            if drawn := self._read(request, attempt):
                void = min((version for later, version in begun.items() if later > attempt), default=None)
                return _joined(request, drawn, void)
        return None

    def forget(self, below: int) -> None:
        """Drop this rank's files of samples below this id alone, and write to a new one. StorageError."""
        for path in self._files(rf"\d+-rank-{self.rank}"):
            if max(self._scan(path).places, default=below - 1) < below:
                del self._known[path]
                with writing(path):
                    path.unlink(missing_ok=True)
        self._part += 1

    def _files(self, whose: str) -> list[Path]:
        """Return the files whose attempt and rank match a pattern."""
        name = re.compile(rf"attempt-{whose}-part-\d+\.bin")
        return [self.folder / one for one in sorted(os.listdir(self.folder)) if name.fullmatch(one)]

    def _scan(self, path: Path) -> _Frames:
        """Find the frames that are new in a file; none are left of one that another rank has dropped meanwhile."""
        known = self._known[path]
        with suppress(FileNotFoundError), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while known.end + _FRAME.size <= size:
                file.seek(known.end)
                id, _, head, columns, _ = _FRAME.unpack(file.read(_FRAME.size))
                if (end := known.end + _FRAME.size + head + columns) > size:
                    break
                known.places[id].append(known.end)
                known.end = end
        return known

    def _read(self, request: Request, attempt: int) -> list[DrawnTokens]:
        """Return what an attempt has of a sample, in order, up to what is missing or torn."""
        found = list[DrawnTokens]()
        for path in self._files(rf"{attempt:06d}-rank-\d+"):
            if places := self._scan(path).places.get(request.id):
                with suppress(FileNotFoundError), open(path, "rb") as file:
                    found += filter(None, (_frame(file, place, request) for place in places))
        end, whole = 0, list[DrawnTokens]()
        for one in sorted(found, key=lambda one: (one.start, len(one.tokens), one.finish is not None)):
            if one.start <= end <= one.start + len(one.tokens):  # a sample that moved is there twice up to its move
                whole.append(one.after(end))
                end = one.start + len(one.tokens)
        return whole


def _frame(file: BinaryIO, place: int, request: Request) -> DrawnTokens | None:
    """Read a frame; None if it is torn, or of another prompt, or drawn in another way."""
    file.seek(place)
    _, start, head, columns, checksum = _FRAME.unpack(file.read(_FRAME.size))
    data = file.read(head + columns)
    return DrawnTokens.decoded(request, start, data[:head], data[head:]) if zlib.crc32(data) == checksum else None


def _drawn_by(request: Request) -> int:
    """Return the CRC-32 of all that the tokens of a request depend on, but its id and the weights."""
    prompt = np.ascontiguousarray(request.prompt_keys, np.int64).tobytes()
    return zlib.crc32(repr(request.params).encode(), zlib.crc32(prompt))


def _joined(request: Request, drawn: Sequence[DrawnTokens], void: int | None) -> Trajectory | None:
    """Return the trajectory of tokens in order, up to the first of a version above ``void``; None without a token."""
    first, last = len(request.prompt), drawn[-1]
    tokens = np.concatenate([request.prompt, *(one.tokens for one in drawn)])
    end = min((at for at, version in last.versions if void is not None and version > void), default=len(tokens))
    if end <= first:
        return None
    zeros, some = np.zeros(first, np.float32), slice(end)
    sampling = [zeros, *(one.logprobs if one.sampling is None else one.sampling for one in drawn)]
    whole = last.finish is not None and end == len(tokens)
    return Trajectory(
        request.id,
        request.prompt_index,
        request.group,
        tokens[some].astype(np.int64),
        (np.arange(end) >= first).astype(np.uint8),
        np.concatenate([zeros, *(one.logprobs for one in drawn)])[some],
        np.concatenate(sampling)[some] if last.sampling is not None else None,
        versions=[span for span in last.versions if span[0] < end],
        finish=last.finish if whole and last.finish is not None else "aborted",
        text=last.text if whole else "",
        media=request.media,
    )
