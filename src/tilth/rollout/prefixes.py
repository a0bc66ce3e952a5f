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
from tilth.core.trajectory import Finish, Segment, Trajectory

FINISHES: tuple[Finish, ...] = ("stop", "length", "aborted", "error")
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
        """Return these trajectories of the end of a step. DataError names the first one that is not there."""
        found = dict(self._known) if step == self._step else {}
        if any(i not in found for i in ids):
            for path in [path for path, written in _files(self.folder) if written == step]:
                with np.load(path, allow_pickle=False) as file:
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
    """Return columns of rows, and columns of tokens one trajectory after the other."""
    texts = [np.frombuffer(t.text.encode(), np.uint8) for t in trajectories]
    media = [pack_media(t.media) for t in trajectories]
    spans = [np.array(t.versions, np.int64).reshape(-1, 2) for t in trajectories]
    rows = [(t.id, t.prompt, t.group, FINISHES.index(t.finish), t.prompt_length) for t in trajectories]
    sampling = [t.logprobs if t.sampling_logprobs is None else t.sampling_logprobs for t in trajectories]
    return _about_episodes(trajectories) | {
        "rows": np.array(rows, np.int64).reshape(-1, 5),
        "filtered": np.array([t.sampling_logprobs is not None for t in trajectories], bool),
        "lengths": np.array([len(t.tokens) for t in trajectories], np.int64),
        "tokens": _joined([t.tokens for t in trajectories], np.int64),
        "logprobs": _joined([t.logprobs for t in trajectories], np.float32),
        "sampling": _joined(sampling, np.float32),
        "spans": np.concatenate([np.zeros((0, 2), np.int64), *spans]),
        "span_counts": np.array([len(one) for one in spans], np.int64),
        "text": _joined(texts, np.uint8),
        "text_lengths": np.array([len(one) for one in texts], np.int64),
        "media": _joined(media, np.uint8),
        "media_lengths": np.array([len(one) for one in media], np.int64),
    }


def _about_episodes(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return what only episodes of several turns have: masks of their own, and facts beside them."""
    if not any(t.info for t in trajectories):
        return {}
    facts = [
        {"info": t.info, "reward": t.reward, "segments": t.segments, "turn_rewards": t.turn_rewards}
        for t in trajectories
    ]
    return {"mask": _joined([t.mask for t in trajectories], np.uint8), "facts": np.array([json.dumps(facts)])}


def _joined(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def _unpacked(file: dict[str, np.ndarray]) -> list[Trajectory]:
    tokens, logprobs, sampling = (_cut(file[name], file["lengths"]) for name in ("tokens", "logprobs", "sampling"))
    spans, texts = _cut(file["spans"], file["span_counts"]), _cut(file["text"], file["text_lengths"])
    media = _cut(file["media"], file["media_lengths"]) if "media" in file else [np.zeros(0, np.uint8)] * len(tokens)
    masks = _cut(file["mask"], file["lengths"]) if "mask" in file else None
    facts = json.loads(str(file["facts"][0])) if "facts" in file else [{}] * len(tokens)
    found = []
    for i, (id, prompt, group, finish, start) in enumerate(file["rows"].tolist()):
        mask = (np.arange(len(tokens[i])) >= start).astype(np.uint8) if masks is None else masks[i]
        t = Trajectory(id, prompt, group, tokens[i], mask, logprobs[i], sampling[i] if file["filtered"][i] else None)
        if facts[i]:
            t.segments = [Segment(*one) for one in facts[i]["segments"]]
            t.turn_rewards = [(at, reward) for at, reward in facts[i]["turn_rewards"]]
            t.info, t.reward = facts[i]["info"], facts[i]["reward"]
        t.versions = [(first, version) for first, version in spans[i].tolist()]
        t.finish, t.text, t.media = FINISHES[finish], texts[i].tobytes().decode(), unpack_media(media[i])
        found.append(t)
    return found


def _cut(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
