"""Journal of rewards, so that a sample that is scored again gets the reward that it had.

    rewards.jsonl  one line for each missing reward, with its reason
    scores.jsonl   one line for each call, with its rewards; of steps since the last checkpoint but one, or of all steps
                   of an asynchronous run, for its replay

A reward may be random: a time-out, an error of a service, a judge that samples. An entry is replayed only for the same
sample and the same reward: it holds the trajectory, a checksum of the token ids of prompt and completion, the step in
which it was scored, and the identity of the reward (``identity.Identity.reward``). The step counts for evaluations
only: their ids, below 0, come again, and those of training do not.
"""

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilth.core.batch import Batch
from tilth.core.lines import Lines, iterate_lines
from tilth.core.write_queue import PROMPT, WriteQueue
from tilth.rewards.process_pool import CORRECT
from tilth.roles.experience import OUTCOME, samples_of
from tilth.runs.files import to_json

PART = "part/"
Known = dict[tuple[int, int], dict[str, Any]]
"""(trajectory, checksum) -> fields of an ``Outcome``."""
Sample = tuple[int | None, int, int]
"""(step, trajectory, checksum); step: None of a sample of training."""
Scored = dict[Sample, tuple[int, dict[str, Any]]]
"""Sample -> step in which it was scored, fields of an ``Outcome``."""


class Journal:
    """Journal of one run while this process writes it."""

    def __init__(self, path: Path, reward: str, replay: bool = True, queue: WriteQueue | None = None) -> None:
        """reward: identity of the current reward. replay: False to ignore the entries on disk. queue: of ``Lines``."""
        self._reward, self._replay, self._queue = reward, replay, queue
        self._missing, self._scores = Lines(path / "rewards.jsonl", queue), Lines(path / "scores.jsonl", queue)
        self._known, self._replayed = Scored(), Scored()
        self.oldest = 0
        """Step that a resume may return to."""
        self.waits: Callable[[int], bool] | None = None
        """Of an asynchronous run: True for a trajectory that a step may still learn from, which keeps its outcome."""

    def known(self, step: int, batch: Batch) -> dict[int, dict[str, Any]]:
        """Return trajectory id -> fields of its outcome, for samples that were scored before."""
        known = ChainMap(self._known, self._replayed)
        samples = [_sample(step, row) for row in samples_of(batch)]
        return {sample[1]: known[sample][1] for sample in samples if sample in known}

    def write(self, step: int, scored: Batch, failures: Mapping[int, dict[str, Any]]) -> None:
        """Write new outcomes durably, before they are used, unless the disk refuses them.

        scored: rows with ``reward``, ``outcome`` and parts; failures: trajectory id -> fields of the outcome of each
        missing reward.
        """
        about = {"step": step, "reward": self._reward}
        known = self.known(step, scored)
        lost = {row: failures[row[0]] for row in samples_of(scored) if row[0] not in known and row[0] in failures}
        if lost:
            entries = [about | {"trajectory": i, "checksum": c, "outcome": o} for (i, c), o in lost.items()]
            self._missing.append("\n".join(map(to_json, entries)), sync=True)
            _add(self._known, step, lost)
        # An infinite reward is not JSON, so it is not stored but scored again.
        new = ~np.isin(scored["id"], np.array([*known, *failures], np.int64)) & np.isfinite(scored["reward"])
        if new.any():
            entry = about | _entry(scored.select(new))
            self._scores.append(to_json(entry), sync=True)
            _add(self._known, step, _outcomes(entry))

    def forget(self, step: int) -> None:
        """Drop outcomes of earlier steps from memory once a step is committed."""
        self._known = {s: known for s, known in self._known.items() if known[0] >= step - 1 or self._waits(s[1])}

    def _waits(self, id: int) -> bool:
        return self.waits is not None and id >= 0 and self.waits(id)

    def rewind(self, step: int) -> None:
        """Read the outcomes of this step and later ones from disk, and those of trajectories that wait. While some wait
        to be written, those in memory count."""
        if self._queue is not None and self._queue.settle(PROMPT):
            self._known = {s: known for s, known in self._known.items() if known[0] >= step or self._waits(s[1])}
            return
        self._known = {}
        if not self._replay:
            return
        for entry in self._entries(self._missing.path, self._scores.path):
            some = {row: one for row, one in _outcomes(entry).items() if entry["step"] >= step or self._waits(row[0])}
            _add(self._known, entry["step"], some)

    def replay(self, run: Path) -> None:
        """Take the outcomes of trajectories of training from the journal of another run, which this one repeats."""
        for entry in self._entries(run / self._missing.path.name, run / self._scores.path.name):
            _add(self._replayed, entry["step"], {row: one for row, one in _outcomes(entry).items() if row[0] >= 0})

    def _entries(self, *paths: Path) -> Iterator[dict[str, Any]]:
        """Yield the entries of the current reward."""
        for path in paths:
            yield from (entry for entry in iterate_lines(path) if entry.get("reward") == self._reward)

    def trim(self, step: int) -> None:
        """Drop the scores of earlier steps from disk, unless a replay needs them. Missing rewards stay, as a record of
        their reasons."""
        self.oldest = step
        if self.waits is None:
            self._scores.rewrite(lambda entry: bool(entry["step"] >= step))

    def close(self) -> None:
        """Close the files."""
        self._missing.close()
        self._scores.close()


def _sample(step: int, row: tuple[int, int]) -> Sample:
    return (step if row[0] < 0 else None, *row)


def _add(known: Scored, step: int, outcomes: Known) -> None:
    """Add outcomes of samples that have none."""
    for row, outcome in outcomes.items():
        known.setdefault(_sample(step, row), (step, outcome))


def _entry(scored: Batch) -> dict[str, Any]:
    columns = {n: c.tolist() for n, c in scored.rows.items() if n in ("reward", OUTCOME) or n.startswith(PART)}
    return {"trajectory": scored["id"].tolist(), "checksum": scored["identity"].tolist(), "columns": columns}


def _outcomes(entry: Mapping[str, Any]) -> Known:
    """Return the outcome of a missing reward; else value and parts of each one of an entry, from which the reward role
    makes the same columns again.

    A null part was NaN, or the function did not return it. The difference matters for ``correct`` only: without it
    the verdict is the reward.
    """
    if "outcome" in entry:
        return {(entry["trajectory"], entry["checksum"]): entry["outcome"]}
    columns = entry["columns"]
    parts = {name.removeprefix(PART): values for name, values in columns.items() if name.startswith(PART)}
    found: Known = {}
    for row, sample in enumerate(zip(entry["trajectory"], entry["checksum"])):
        given = {name: math.nan if values[row] is None else values[row] for name, values in parts.items()}
        if math.isnan(given.get(CORRECT, 0.0)) and columns[OUTCOME][row] is not None:
            del given[CORRECT]
        found[sample] = {"value": columns["reward"][row], "parts": given}
    return found
