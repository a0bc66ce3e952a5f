"""Journal of what environments said, so that a call of episodes that begins again gets the same answers."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tilth.core.files import make_folder
from tilth.core.lines import Lines, iterate_lines
from tilth.envs.process import Asked

KEPT = 4
"""Calls whose journals are kept."""


class ObservationJournal:
    """Journal of one call: a file with a line for each answer. It is named after what was asked, so that only the same
    call under the same weights finds it."""

    def __init__(self, folder: Path, episodes: Sequence[int], about: str) -> None:
        """about: what else tells calls apart, such as the version of the weights."""
        key = hashlib.blake2b(f"{list(episodes)} {about}".encode(), digest_size=8).hexdigest()
        make_folder(folder)
        self.path = folder / f"{key}.jsonl"
        self._lines = Lines(self.path, text=True)
        self.known: dict[int, list[tuple[Asked, Any]]] = {}
        """Episode -> its requests and answers, in order."""
        lines: Iterable[Any] = iterate_lines(self.path)
        for episode, op, argument, value in lines:
            self.known.setdefault(episode, []).append((Asked(episode, op, argument), value))
        for old in sorted(folder.glob("*.jsonl"), key=lambda file: file.stat().st_mtime)[:-KEPT]:
            old.unlink()

    def write(self, asked: Asked, value: Any) -> None:
        """Write an answer before it is used. StorageError."""
        self._lines.append(json.dumps([*asked, value], default=str))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
