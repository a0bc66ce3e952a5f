"""Pool of prefixes: trajectories that are in flight where a step is committed, finished ones that wait among them.

Each rank writes its own into a file per step, so that a step that runs again finds those of the step before, whatever
rank its rows are on then.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilth.core.errors import DataError
from tilth.core.files import atomic_write, make_folder, writing
from tilth.core.media import pack_media, unpack_media
from tilth.core.trajectory import Segment, Trajectory

FACTS = ("id", "prompt", "group", "segments", "versions", "turn_rewards", "reward", "finish", "text", "info")
_NAME = re.compile(r"step-(\d+)-rank-(\d+)\.npz")


class PrefixPool:
    """Trajectories by id, as they were at the end of a step: the newest in memory, and all in a folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._step, self._known = -1, dict[int, Trajectory]()

    def keep(self, step: int, trajectories: Sequence[Trajectory], oldest: int) -> None:
        """Keep these as of the end of this step, durably, and drop those of steps before ``oldest``. StorageError."""
        with writing(self.folder):
            make_folder(self.folder)
        with (
            atomic_write(self.folder / f"step-{step:06d}-rank-{self.rank}.npz") as temporary,
            open(temporary, "wb") as file,
        ):
            np.savez(file, **_packed(trajectories))
        self._step, self._known = step, {t.id: t for t in trajectories}
        _drop(path for path, written in _files(self.folder) if written < oldest)

    def take(self, step: int, ids: Sequence[int]) -> dict[int, Trajectory]:
        """Return these trajectories of the end of a step. DataError names the first one that is not there, or a file
        of an older version."""
        found = dict(self._known) if step == self._step else {}
        if any(i not in found for i in ids):
            for path in [path for path, written in _files(self.folder) if written == step]:
                with np.load(path, allow_pickle=False) as file:
                    if "tokens_lengths" not in file:
                        message = f"{path} is of an older version of Tilth, whose trajectories in flight this cannot"
                        raise DataError(f"{message} read; go on with that version", key="prefixes.version")
                    found |= {t.id: t for t in _unpacked(dict(file))}
        if missing := [i for i in ids if i not in found]:
            raise DataError(
                f"trajectory {missing[0]} was in flight at the end of step {step}, and {self.folder} does not have it; "
                "continue from an earlier checkpoint",
                key=f"prefixes.{missing[0]}",
            )
        return {i: found[i] for i in ids}


def rewind(folder: Path, step: int) -> None:
    """Drop what was kept after this step, which was not committed or is run again. StorageError."""
    _drop(path for path, written in _files(folder) if written > step)


def _drop(paths: Iterator[Path]) -> None:
    for path in paths:
        with writing(path):
            path.unlink(missing_ok=True)  # another rank may have been faster


def _files(folder: Path) -> list[tuple[Path, int]]:
    """Return the files of all ranks, and their steps."""
    named = [(path, _NAME.fullmatch(path.name)) for path in sorted(folder.glob("step-*.npz"))]
    return [(path, int(match[1])) for path, match in named if match]


def _packed(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return columns of all trajectories, one after the other, with the lengths of each, and their facts as JSON."""
    facts = [{name: getattr(t, name) for name in FACTS} for t in trajectories]
    packed: dict[str, Any] = {"facts": np.frombuffer(json.dumps(facts, default=np.generic.item).encode(), np.uint8)}
    unfiltered = np.zeros(0, np.float32)
    columns: dict[str, list[np.ndarray]] = {
        "tokens": [t.tokens.astype(np.int64) for t in trajectories],
        "mask": [t.mask.astype(np.uint8) for t in trajectories],
        "logprobs": [t.logprobs.astype(np.float32) for t in trajectories],
        "sampling": [unfiltered if t.sampling_logprobs is None else t.sampling_logprobs for t in trajectories],
        "media": [pack_media(t.media) for t in trajectories],
    }
    for name, parts in columns.items():
        packed[name] = np.concatenate(parts) if parts else unfiltered
        packed[f"{name}_lengths"] = np.array([len(one) for one in parts], np.int64)
    return packed


def _unpacked(file: dict[str, np.ndarray]) -> list[Trajectory]:
    names = ("tokens", "mask", "logprobs", "sampling", "media")
    columns = [np.split(file[name], np.cumsum(file[f"{name}_lengths"])[:-1]) for name in names]
    found = []
    for facts, tokens, mask, logprobs, sampling, media in zip(json.loads(file["facts"].tobytes()), *columns):
        facts["segments"] = [Segment(*one) for one in facts["segments"]]
        facts |= {name: [tuple(one) for one in facts[name]] for name in ("versions", "turn_rewards")}
        own = {"tokens": tokens, "mask": mask, "logprobs": logprobs, "media": unpack_media(media)}
        found.append(Trajectory(**facts, **own, sampling_logprobs=sampling if len(sampling) else None))
    return found
