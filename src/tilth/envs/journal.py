"""Journal of what environments said, so that episodes that begin again, or go on elsewhere, hear the same."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tilth.core.files import make_folder
from tilth.core.lines import Lines, iterate_lines
from tilth.envs.process import Asked

KEPT = 4
"""Calls whose journals are kept."""
FORMAT = 2
"""Of the lines."""
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
    voids those of its episode at its place and behind it, which are of another course."""

    def __init__(self, path: Path, earlier: Iterable[Path] = (), complete: bool = False) -> None:
        """earlier: files for ``recall``, the oldest first. complete: nothing may be asked that they do not have."""
        make_folder(path.parent)
        self.path, self.complete, self.closed, self._earlier = path, complete, False, [*earlier]
        self._lines = Lines(path, text=True)
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
        return cls(folder / f"attempt-{attempt:06d}-rank-{rank}.jsonl", earlier, complete)

    def recall(self, episodes: Iterable[int], least: int) -> None:
        """Know what earlier files have of these episodes. least: lowest id of all for which this is called."""
        if self._all is None:
            self._all = _read(self._earlier, least)
        self.known |= {i: [*self._all[i]] for i in episodes if i in self._all}

    def write(self, place: int, heard: Heard) -> None:
        """Write an answer before it is used. place: number of answers that its episode had before. StorageError."""
        line = [*heard.asked, heard.value, place, heard.reason, heard.status]
        self._lines.append(json.dumps(line, default=str))

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
        lines: Iterable[Any] = iterate_lines(path)
        for episode, op, argument, value, place, reason, status in lines:
            if least is None or episode >= least:
                known = found.setdefault(episode, [])
                known[place:] = [Heard(Asked(episode, op, argument), value, reason, status)]
    return found
