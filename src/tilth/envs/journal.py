"""Journal of what environments said, so that episodes that begin again, or go on elsewhere, hear the same."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tilth.core.files import make_folder, writing
from tilth.core.lines import Lines, iterate_lines
from tilth.envs.process import Asked

KEPT = 4
"""Calls whose journals are kept."""
FORMAT = 2
"""Of the lines."""
PART = 1 << 20
"""Bytes of a part of an attempt's journal, beyond which ``end_part`` ends it."""
_PART = re.compile(r"attempt-(\d+)-rank-(\d+)-part-")
_END = re.compile(rb"\n\[(\d+)\]\n\Z")
Status = Literal["ok", "error", "timeout", "died", "differs"]


class Heard(NamedTuple):
    """Answer of an environment, and the request. value: None unless ``status`` is ok; then ``reason`` says why. An
    environment that failed while nothing was asked of it has a request without an op."""

    asked: Asked
    value: Any
    reason: str = ""
    status: Status = "ok"


class ObservationJournal:
    """A file with a line for each answer: episode, op, argument, value, place in the episode, reason and status. A line
    voids those of its episode at its place and behind it, which are of another course. That of an attempt is in parts,
    each of which ends with a line of its highest episode."""

    def __init__(self, path: Path, earlier: Iterable[Path] = (), complete: bool = False) -> None:
        """earlier: files for ``recall``, the oldest first. complete: nothing may be asked that they do not have."""
        make_folder(path.parent)
        self.path, self.complete, self.closed, self._earlier = path, complete, False, [*earlier]
        self._highest = math.inf if path.exists() else -1
        """Highest episode in the file; inf: unknown."""
        self._lines = Lines(path, text=True)
        self._highests = dict[Path, float]()
        """Highest episodes of other parts."""
        self._all: dict[int, list[Heard]] | None = None
        self.known: dict[int, list[Heard]] = {}
        """Episode -> its requests and answers, in order."""

    @classmethod
    def of_call(cls, folder: Path, episodes: Sequence[int], about: str) -> "ObservationJournal":
        """Open the journal of one call. It is named after what was asked, so that only the same call under the same
        weights finds it. about: what else tells calls apart, such as the version of the weights."""
        key = hashlib.blake2b(f"{FORMAT} {list(episodes)} {about}".encode(), digest_size=8).hexdigest()
        made = cls(folder / f"{key}.jsonl")
        made.known = _read([made.path])
        for old in sorted(folder.glob("*.jsonl"), key=lambda file: file.stat().st_mtime)[:-KEPT]:
            old.unlink()
        return made

    @classmethod
    def of_attempt(cls, folder: Path, attempt: int, rank: int, *, complete: bool = False) -> "ObservationJournal":
        """Open the journal of a rank in an attempt of an asynchronous run, whose episodes may have begun on any rank in
        earlier ones. attempt: counts up; complete: of a replay."""
        earlier = sorted(folder.glob("attempt-*.jsonl"))
        own = f"attempt-{attempt:06d}-rank-{rank}-part"
        newest = max(0, sum(path.name.startswith(own) for path in earlier) - 1)
        return cls(folder / f"{own}-{newest:06d}.jsonl", earlier, complete)

    def recall(self, episodes: Iterable[int], least: int) -> None:
        """Know what earlier files have of these episodes. least: lowest id of all for which this is called; parts that
        have no such episode are not read."""
        if self._all is None:
            self._all = _read(self._earlier, least)
        self.known |= {i: [*self._all[i]] for i in episodes if i in self._all}

    def write(self, place: int, heard: Heard) -> None:
        """Write an answer before it is used. place: number of answers that its episode had before. StorageError."""
        line = [*heard.asked, heard.value, place, heard.reason, heard.status]
        self._lines.append(json.dumps(line, default=str))
        self._highest = max(self._highest, heard.asked.episode)

    def end_part(self) -> None:
        """Go on in a new file once this one is long. Call it at a commit: who recalls the episodes that are in flight
        then need not read far behind it. StorageError."""
        if self.path.stat().st_size < PART:
            return
        if self._highest < math.inf:
            self._lines.append(json.dumps([self._highest]))
        self._lines.sync()
        self._lines.close()
        stem, _, number = self.path.stem.rpartition("-")
        self.path = self.path.with_name(f"{stem}-{int(number) + 1:06d}.jsonl")
        self._lines, self._highest = Lines(self.path, text=True), -1

    def forget(self, below: int, *, files: bool) -> None:
        """Forget episodes below this one, which are not asked for any more. files: drop the parts that have no others,
        this rank's and those of earlier attempts; False where a replay needs them. StorageError."""
        self._all = None if self._all is None else {i: heard for i, heard in self._all.items() if i >= below}
        if not files:
            return
        attempt, rank = map(int, _PART.findall(self.path.name)[0])
        for path in sorted(self.path.parent.glob("attempt-*.jsonl")):
            found = _PART.match(path.name)
            mine = found is not None and (int(found[1]) < attempt or int(found[2]) == rank)
            if mine and path != self.path and self._newest(path) < below:
                with writing(path):
                    path.unlink(missing_ok=True)

    def _newest(self, path: Path) -> float:
        """Return the highest episode of a part, which is read once where an attempt has left it without its end."""
        if path not in self._highests:
            found = _highest(path)
            self._highests[path] = found if found < math.inf else max(_read([path]), default=-1)
        return self._highests[path]

    def sync(self) -> None:
        """Flush all answers to disk. StorageError."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file; what the episodes say that wait for a later call is no part of it."""
        self.closed = True
        self._lines.close()


def _read(paths: Iterable[Path], least: int | None = None) -> dict[int, list[Heard]]:
    """Return episode -> what it was asked and answered, of episodes from ``least`` on. DataError."""
    found = dict[int, list[Heard]]()
    for path in paths:
        lines: Iterable[Any] = iterate_lines(path) if least is None or _highest(path) >= least else ()
        for episode, *rest in lines:
            if rest and (least is None or episode >= least):
                op, argument, value, place, reason, status = rest
                known = found.setdefault(episode, [])
                known[place:] = [Heard(Asked(episode, op, argument), value, reason, status)]
    return found


def _highest(path: Path) -> float:
    """Return the highest episode of a part that has been ended; inf for another file, which may have any; -1 for one
    that is not there."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 32))
            found = _END.search(file.read())
    except FileNotFoundError:  # another rank has dropped it
        return -1
    return int(found[1]) if found else math.inf
