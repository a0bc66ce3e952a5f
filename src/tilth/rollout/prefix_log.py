"""Log of the tokens of samples in flight, from which they go on elsewhere: on another replica, after the death of
theirs, or after that of the controller. A sample is an answer, or an episode, of which each turn is a request.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from tilth.core.files import make_folder, writing
from tilth.core.trajectory import Finish, Trajectory
from tilth.engines.protocol import GenerationEngine
from tilth.engines.request import Progress, Request, SamplingParams
from tilth.plan.repack import LiveRow

_FRAME = struct.Struct("<qqqIII")
"""Request, its group, number of tokens of its completion before these, bytes of the facts and of the columns, CRC-32 of
both."""
_BEGUN = re.compile(r"attempt-(\d+)-from-(\d+)")
_PART = re.compile(r"attempt-(\d+)-rank-(\d+)-part-(\d+)\.bin")


class DrawnTokens(NamedTuple):
    """Tokens int64 [n] of a request's completion behind its first ``start``, with log-probs float32 [n] and, through
    filters, those of the filtered distribution. versions: of the trajectory so far; finish: None while it is in
    flight; before: CRC-32 of the first ``start`` tokens, None: as earlier releases have logged it."""

    request: Request
    start: int
    tokens: np.ndarray
    logprobs: np.ndarray
    sampling: np.ndarray | None
    versions: Sequence[tuple[int, int]]
    finish: Finish | None = None
    text: str = ""
    before: int | None = None

    @classmethod
    def of(cls, request: Request, t: Trajectory, start: int, *, ended: bool) -> "DrawnTokens":
        """Return what a trajectory has behind its first ``start`` tokens. ended: with its end."""
        some = slice(len(request.prompt) + start, None)
        sampling = None if t.sampling_logprobs is None else t.sampling_logprobs[some]
        finish, text = (t.finish, t.text) if ended else (None, "")
        before = _crc(t.tokens[len(request.prompt) : some.start])
        return cls(request, start, t.tokens[some], t.logprobs[some], sampling, t.versions, finish, text, before)

    def encoded(self) -> bytes:
        """Return the frame."""
        facts = [_drawn_by(self.request), self.sampling is not None, self.versions, self.finish, self.text, self.before]
        head = json.dumps(facts).encode()
        sampling = b"" if self.sampling is None else self.sampling.astype(np.float32).tobytes()
        columns = self.tokens.astype(np.int64).tobytes() + self.logprobs.astype(np.float32).tobytes() + sampling
        numbers = self.request.id, self.request.group, self.start, len(head), len(columns)
        return _FRAME.pack(*numbers, zlib.crc32(head + columns)) + head + columns

    def after(self, end: int) -> "DrawnTokens":
        """Return what is behind the first ``end`` tokens of the completion."""
        some = slice(end - self.start, None)
        sampling = None if self.sampling is None else self.sampling[some]
        found = self._replace(start=end, tokens=self.tokens[some], logprobs=self.logprobs[some], sampling=sampling)
        return found._replace(before=self.until(end))

    def until(self, end: int) -> int | None:
        """Return the CRC-32 of the first ``end`` tokens of the completion; None if it is not known."""
        return None if self.before is None else _crc(self.tokens[: end - self.start], self.before)

    @classmethod
    def decoded(cls, request: Request, start: int, head: bytes, columns: bytes) -> "DrawnTokens | None":
        """Read the frame of a request; None for one of another prompt, or drawn in another way."""
        by, filtered, versions, finish, text, *more = json.loads(head)
        if by != _drawn_by(request):
            return None
        n = len(columns) // (16 if filtered else 12)
        tokens, floats = np.frombuffer(columns, np.int64, n), np.frombuffer(columns, np.float32, offset=8 * n)
        spans = [(first, version) for first, version in versions]
        return cls(request, start, tokens, floats[:n], floats[n:] if filtered else None, spans, finish, text, *more)


@dataclass
class _Frames:
    """Places of the frames of a file, by request. end: of the last one that is known; newest: its last group."""

    end: int = 0
    newest: int = -1
    places: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


class PrefixLog:
    """The log, as one rank writes it and reads those of all. A file is closed after each write, so that other machines
    see it on a shared disk."""

    def __init__(self, folder: Path, attempt: int, version: int, rank: int) -> None:
        """attempt: of the run, which counts up; version: of the policy that it begins with: what earlier attempts have
        drawn under later versions is void. StorageError."""
        self.folder, self.attempt, self.rank = folder, attempt, rank
        self._known: dict[Path, _Frames] = defaultdict(_Frames)
        with writing(folder):
            make_folder(folder)
            (folder / f"attempt-{attempt:06d}-from-{version}").touch()
            names = [_PART.fullmatch(name) for name in os.listdir(folder)]
        mine = [int(m[3]) for m in names if m and (int(m[1]), int(m[2])) == (attempt, rank)]
        self._part = 1 + max(mine, default=-1)
        """Behind those of a worker that was lost in this attempt, of which the last one may be torn."""

    def write(self, drawn: Sequence[DrawnTokens]) -> None:
        """Append what samples have drawn. StorageError."""
        if not drawn:
            return
        path = self.folder / f"attempt-{self.attempt:06d}-rank-{self.rank}-part-{self._part:06d}.bin"
        with writing(path), open(path, "ab") as file:
            file.write(b"".join(one.encoded() for one in drawn))

    def take(self, request: Request, version: int | None = None, least: int = 0) -> Trajectory | None:
        """Return what the newest attempt that knows a token of a request has of it, for one that asks for the same;
        None without a token. Its finish is "aborted" unless all of it is there. version: that must have drawn all of
        it, where a sample has one, so that one which has begun again under other weights is that of these; None: it
        may have several. least: the oldest that may have drawn some of it."""
        begun, parts = dict[int, int](), defaultdict[int, list[Path]](list)
        for name in sorted(os.listdir(self.folder)):
            if match := _BEGUN.fullmatch(name):  # of the version that the first phase of an attempt began with
                begun[int(match[1])] = min(int(match[2]), begun.get(int(match[1]), int(match[2])))
            elif match := _PART.fullmatch(name):
                parts[int(match[1])].append(self.folder / name)
        for attempt in sorted(begun, reverse=True):
            if frames := self._frames(request, parts[attempt]):
                drawn = _in_order(one for one in frames if version in (None, *_only(one)))
                if not drawn:
                    return None
                void = min((one for later, one in begun.items() if later > attempt), default=None)
                found = _joined(request, drawn, void)
                if found is None or found.versions[0][1] < least:
                    return None
                return found if version in (None, *_only(found)) else None
        return None

    def forget(self, below: int) -> None:
        """Drop the files of groups below this one alone, and write to a new one: this rank's, and those of earlier
        attempts, of which no rank has to be there any more. StorageError."""
        for name in sorted(os.listdir(self.folder)):
            match, path = _PART.fullmatch(name), self.folder / name
            mine = match is not None and (int(match[1]) < self.attempt or int(match[2]) == self.rank)
            if mine and self._scan(path).newest < below:
                del self._known[path]
                with writing(path):
                    path.unlink(missing_ok=True)
        self._part += 1

    def _scan(self, path: Path) -> _Frames:
        """Find the frames that are new in a file; none are left of one that another rank has dropped meanwhile."""
        known = self._known[path]
        with suppress(FileNotFoundError), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            while known.end + _FRAME.size <= size:
                file.seek(known.end)
                id, group, _, head, columns, _ = _FRAME.unpack(file.read(_FRAME.size))
                if (end := known.end + _FRAME.size + head + columns) > size:
                    break
                known.places[id].append(known.end)
                known.end, known.newest = end, max(group, known.newest)
        return known

    def _frames(self, request: Request, parts: Sequence[Path]) -> list[DrawnTokens]:
        """Return what files of an attempt have of a request, without what is torn."""
        found = list[DrawnTokens]()
        for path in parts:
            if places := self._scan(path).places.get(request.id):
                with suppress(FileNotFoundError), open(path, "rb") as file:
                    found += filter(None, (_frame(file, place, request) for place in places))
        return found


def _frame(file: BinaryIO, place: int, request: Request) -> DrawnTokens | None:
    """Read a frame; None if it is torn, or of another prompt, or drawn in another way."""
    file.seek(place)
    _, _, start, head, columns, checksum = _FRAME.unpack(file.read(_FRAME.size))
    data = file.read(head + columns)
    return DrawnTokens.decoded(request, start, data[:head], data[head:]) if zlib.crc32(data) == checksum else None


def _in_order(frames: Iterable[DrawnTokens]) -> list[DrawnTokens]:
    """Return frames of a request in order, up to what is missing, without those of another draw of it: one that went
    on before all of these files were seen here has other tokens from there on."""
    end, before, whole = 0, 0, list[DrawnTokens]()
    for one in sorted(frames, key=lambda one: (one.start, len(one.tokens), one.finish is not None)):
        # A sample that moved is there twice up to its move.
        if one.start <= end <= one.start + len(one.tokens) and one.until(end) in (None, before):
            whole.append(one.after(end))
            end, before = one.start + len(one.tokens), _crc(whole[-1].tokens, before)
    return whole


def _crc(tokens: np.ndarray, before: int = 0) -> int:
    """Return the CRC-32 of tokens behind those with this one."""
    return zlib.crc32(tokens.astype(np.int64).tobytes(), before)


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


def _only(t: Trajectory | DrawnTokens) -> list[int]:
    """Return the version that drew all of a trajectory up to here; none if there are several."""
    return [version for _, version in t.versions[:1]] if len(t.versions) == 1 else []


class FlightLog:
    """Requests in flight on an engine, answers and turns of episodes, and what the log has of each. Between two rounds
    the log has all that was drawn."""

    def __init__(
        self, log: PrefixLog, engine: GenerationEngine, *, one_version: bool = False, complete: bool = False
    ) -> None:
        """one_version: a sample goes on only under the version that it has (``rollout.inflight = "finish"``); complete:
        of a replay, which collects samples as the log has them, under any version, and without experts."""
        self.log, self.engine = log, engine
        self._one_version, self._complete = one_version and not complete, complete
        self.stops: Mapping[int, int] = {}
        """Request -> tokens with which it is left for now, those of its prompt among them."""
        self.still, self.peak = 0, 0
        """Requests that drew nothing in the last round; most tokens in flight since somebody set this to 0."""
        self._flying: dict[int, tuple[Request, int, int]] = {}
        """Request in flight -> itself, the number of tokens of its completion that the log has, and their CRC-32."""
        self._new: list[DrawnTokens] = []
        """What is to be written."""

    def begin(self, request: Request) -> None:
        """Note a request of which nothing is known."""
        self._flying[request.id] = request, 0, 0

    def take(self, request: Request, least: int = 0) -> Trajectory | None:
        """Note a request, unless the log has all of it, and return what the log has: see ``PrefixLog.take``."""
        self.flush()
        self.begin(request)
        only = self.engine.version if self._one_version else None
        found = self.log.take(request, only, 0 if self._complete else least)
        if found is not None:
            self._add(DrawnTokens.of(request, found, 0, ended=found.finish != "aborted"))
            if found.finish != "aborted":
                self.forget(request.id)
        return found

    def left(self, request: Request) -> SamplingParams | None:
        """Return how the rest of a request that was noted is drawn; None: nothing more of it for now."""
        most = self.stops.get(request.id, len(request.prompt) + request.params.max_tokens) - len(request.prompt)
        if most >= request.params.max_tokens:
            return request.params
        return replace(request.params, max_tokens=most) if most > self._flying[request.id][1] else None

    def end(self, t: Trajectory) -> bool:
        """Note what the engine has finished; True if it is only left for now."""
        request, count, _ = self._flying[t.id]
        left = t.finish == "length" and t.completion_length < request.params.max_tokens
        if t.routing is None or self._complete:  # else the rest is drawn again, as the log has no routing
            self._add(DrawnTokens.of(request, t, count, ended=not left))
        self.forget(t.id)
        return left

    def pause(self, stopped: Sequence[Trajectory]) -> None:
        """Log what requests have that are stopped for a while."""
        for t in stopped:
            request, count, _ = self._flying[t.id]
            self._add(DrawnTokens.of(request, t, count, ended=False))
        self.flush()

    def forget(self, id: int) -> None:
        """Forget a request, if it is in flight."""
        self._flying.pop(id, None)

    def write(self, progress: Mapping[int, Progress]) -> None:
        """Log what a round has drawn. StorageError."""
        for i, new in progress.items():
            request, count, before = self._flying[i]
            some = new.tokens, new.logprobs, new.sampling, new.versions
            self._add(DrawnTokens(request, count, *some, before=before))
        self.flush()
        self.still = len(self._flying.keys() - progress.keys())
        self.peak = max(self.peak, sum(row.tokens for row in self.rows()))

    def rows(self) -> Iterator[LiveRow]:
        """Yield what is in flight."""
        for i, (one, count, _) in self._flying.items():
            yield LiveRow(i, len(one.prompt) + count, one.params.max_tokens - count)

    def flush(self) -> None:
        """Write what was noted. StorageError."""
        if self.engine.reports:
            self.log.write(self._new)
        self._new = []

    def _add(self, drawn: DrawnTokens) -> None:
        """Note what is to be written of a request in flight."""
        self._new.append(drawn)
        end = drawn.start + len(drawn.tokens)
        self._flying[drawn.request.id] = drawn.request, end, drawn.until(end) or 0
