"""Journal of what environments said, so that a call of episodes that begins again gets the same answers."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from tilth.envs.process import Asked

KEPT = 4
"""Calls whose journals are kept."""


class ObservationJournal:
    """Journal of one call: a file with a line for each answer. It is named after what was asked, so that only the same
    call under the same weights finds it."""

    def __init__(self, folder: Path, episodes: Sequence[int], about: str) -> None:
        """about: what else tells calls apart, such as the version of the weights."""
        key = hashlib.blake2b(f"{list(episodes)} {about}".encode(), digest_size=8).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{key}.jsonl"
        self.known = self._read()
        for old in sorted(folder.glob("*.jsonl"), key=lambda file: file.stat().st_mtime)[:-KEPT]:
            old.unlink()
        self._file: IO[str] = open(self.path, "a")  # noqa: SIM115 - as long as the call

    def _read(self) -> dict[int, list[tuple[Asked, Any]]]:
        """Return episode -> its requests and answers, in order; a torn last line is left out and removed."""
        found: dict[int, list[tuple[Asked, Any]]] = {}
        for episode, op, argument, value in self._lines():
            found.setdefault(episode, []).append((Asked(episode, op, argument), value))
        return found

    def _lines(self) -> Iterator[list[Any]]:
        whole = 0
        if not self.path.exists():
            return
        for line in self.path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            yield json.loads(line)
        with open(self.path, "r+b") as file:
            file.truncate(whole)

    def write(self, asked: Asked, value: Any) -> None:
        """Write an answer before it is used."""
        self._file.write(json.dumps([*asked, value], default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
