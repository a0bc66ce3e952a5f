"""Journal of rewards, so that a step that runs again gets the rewards that it had.

    rewards.jsonl  one line for each missing reward, with its reason
    scores.jsonl   one line for each call, with its rewards; of steps since the last checkpoint but one

A reward may be random: a time-out, an error of a service, a judge that samples. An entry is replayed only for the same
sample and the same reward: it holds step, trajectory, a checksum of the token ids of prompt and completion, and the
identity of the reward (``identity.Identity.reward``).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilth.core.batch import Batch
from tilth.core.lines import Lines, iterate_lines
from tilth.core.write_queue import PROMPT, WriteQueue
from tilth.rewards.process_pool import CORRECT
from tilth.roles.experience import OUTCOME
from tilth.runs.files import to_json

PART = "part/"
Known = dict[tuple[int, int], dict[str, Any]]
"""(trajectory, checksum) -> fields of an ``Outcome``."""


class Journal:
    """Journal of one run while this process writes it."""

    def __init__(self, path: Path, reward: str, replay: bool = True, queue: WriteQueue | None = None) -> None:
        """reward: identity of the current reward. replay: False to ignore the entries on disk. queue: of ``Lines``."""
        self._reward, self._replay, self._queue = reward, replay, queue
        self._missing, self._scores = Lines(path / "rewards.jsonl", queue), Lines(path / "scores.jsonl", queue)
        self._known: dict[int, Known] = {}
        self.oldest = 0
        """Step that a resume may return to."""

    def known(self, step: int, batch: Batch) -> dict[int, dict[str, Any]]:
        """Return trajectory id -> fields of its outcome, for samples that an earlier attempt has scored."""
        known = self._known.get(step, {})
        return {row[0]: known[row] for row in _samples(batch) if row in known}

    def write(self, step: int, scored: Batch, failures: Mapping[int, dict[str, Any]]) -> None:
        """Write new outcomes durably, before they are used, unless the disk refuses them.

        scored: rows with ``reward``, ``outcome`` and parts; failures: trajectory id -> fields of the outcome of each
        missing reward.
        """
        known = self._known.setdefault(step, {})
        about = {"step": step, "reward": self._reward}
        lost = {row: failures[row[0]] for row in _samples(scored) if row not in known and row[0] in failures}
        if lost:
            entries = [about | {"trajectory": i, "checksum": c, "outcome": o} for (i, c), o in lost.items()]
            self._missing.append("\n".join(map(to_json, entries)), sync=True)
            known.update(lost)
        # An infinite reward is not JSON, so it is not stored but scored again.
        fresh = np.array([row not in known for row in _samples(scored)], bool) & np.isfinite(scored["reward"])
        if fresh.any():
            entry = about | _entry(scored.select(fresh))
            self._scores.append(to_json(entry), sync=True)
            known.update(_outcomes(entry))

    def forget(self, step: int) -> None:
        """Drop outcomes of earlier steps from memory once a step is committed."""
        for earlier in [s for s in self._known if s < step - 1]:
            del self._known[earlier]

    def rewind(self, step: int) -> None:
        """Read the outcomes of this step and later ones from disk. While some wait for it, those in memory count."""
        if self._queue is not None and self._queue.settle(PROMPT):
            self._known = {known: outcomes for known, outcomes in self._known.items() if known >= step}
            return
        self._known = {}
        if not self._replay:
            return
        for entry in iterate_lines(self._missing.path):
            if self._matches(entry, step):
                known = self._known.setdefault(entry["step"], {})
                known.setdefault((entry["trajectory"], entry["checksum"]), entry["outcome"])
        for entry in iterate_lines(self._scores.path):
            if self._matches(entry, step):
                self._known[entry["step"]] = _outcomes(entry) | self._known.get(entry["step"], {})

    def _matches(self, entry: Mapping[str, Any], step: int) -> bool:
        return entry.get("reward") == self._reward and bool(entry["step"] >= step)

    def trim(self, step: int) -> None:
        """Drop the scores of earlier steps from disk. Missing rewards stay, as a record of their reasons."""
        self.oldest = step
        self._scores.rewrite(lambda entry: bool(entry["step"] >= step))

    def close(self) -> None:
        """Close the files."""
        self._missing.close()
        self._scores.close()


def _samples(batch: Batch) -> list[tuple[int, int]]:
    """Return (trajectory, checksum) of each row."""
    return list(zip(batch["id"].tolist(), batch["identity"].tolist()))


def _entry(scored: Batch) -> dict[str, Any]:
    columns = {n: c.tolist() for n, c in scored.rows.items() if n in ("reward", OUTCOME) or n.startswith(PART)}
    return {"trajectory": scored["id"].tolist(), "checksum": scored["identity"].tolist(), "columns": columns}


def _outcomes(entry: Mapping[str, Any]) -> Known:
    """Return value and parts of each outcome of an entry, from which the reward role makes the same columns again.

    A null part was NaN, or the function did not return it. The difference matters for ``correct`` only: without it
    the verdict is the reward.
    """
    columns = entry["columns"]
    parts = {name.removeprefix(PART): values for name, values in columns.items() if name.startswith(PART)}
    found: Known = {}
    for row, sample in enumerate(zip(entry["trajectory"], entry["checksum"])):
        given = {name: math.nan if values[row] is None else values[row] for name, values in parts.items()}
        if math.isnan(given.get(CORRECT, 0.0)) and columns[OUTCOME][row] is not None:
            del given[CORRECT]
        found[sample] = {"value": columns["reward"][row], "parts": given}
    return found
