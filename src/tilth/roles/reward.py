"""Reward role: scores completions in a pool of processes; a failed call is a missing reward, counted and reported."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tilth.cluster.protocol import control, transfer
from tilth.core.batch import Batch, Store
from tilth.data.prompts import PromptSet
from tilth.rewards.ahead import ScoringAhead
from tilth.rewards.process_pool import Outcome, RewardPool
from tilth.roles.experience import OUTCOME, samples_of, texts
from tilth.trace.spans import span


class RewardWorker:
    """Pool of processes, and the prompts that the rewards need."""

    def __init__(self, pool: RewardPool, prompts: PromptSet, store: Store) -> None:
        self.pool, self.prompts, self.store = pool, prompts, store
        self.outcomes: dict[int, Outcome] = {}
        self._ahead = ScoringAhead(pool)

    @transfer(split="all", gather="first", patient=True)
    def ready(self) -> None:
        """Wait until every process of the pool has loaded the function. RewardError if one fails."""
        self.pool.ready()

    @transfer(split="all", gather="first")
    def print_to(self, path: str) -> None:
        """Append what the function prints to this file."""
        self.pool.print_to(Path(path))

    @control
    def begin(self, items: list[list[Any]], most: int) -> None:
        """Score samples (id, prompt, checksum of the ids, text) in the background, at most ``most`` at once."""
        asked = [(int(i), int(checksum), self.prompts[int(p)], text) for i, p, checksum, text in items]
        self._ahead.begin({(i, checksum): (i, p.text, text, p.info) for i, checksum, p, text in asked}, most)

    @control
    def forget(self, samples: list[list[int]] | None = None) -> None:
        """Drop samples (id, checksum) of ``begin`` that nobody asks ``score`` for any more; None: all."""
        if samples is None:
            self._ahead.forget_all()
        else:
            self._ahead.forget([(i, checksum) for i, checksum in samples])

    @transfer(split="rows", gather="rows", patient=True)
    def score(self, batch: Batch, *, known: dict[int, dict[str, Any]] | None = None) -> Batch:
        """Fill in the row columns ``reward`` (NaN: missing) and ``outcome``, and each part of the reward.

        known: journaled outcomes by id, not tried again, as are those that ``begin`` has brought for these very tokens.
        """
        completions = texts(batch.read(self.store, "text")["text"])
        asked = [self.prompts[int(p)] for p in batch["prompt"]]
        items = [
            (int(i), prompt.text, completion, prompt.info)
            for i, prompt, completion in zip(batch["id"], asked, completions)
        ]
        with span("score", tokens=int(batch["completion"].sum())), self._ahead.taking(samples_of(batch)) as ahead:
            found = {i: ahead[i, checksum] for i, checksum in samples_of(batch) if (i, checksum) in ahead}
            journaled = found | {i: Outcome(**o) for i, o in (known or {}).items()}
            self.outcomes = dict(zip(batch["id"].tolist(), self.pool.score(items, known=journaled)))
        values = [np.nan if o.value is None else o.value for o in self.outcomes.values()]
        verdicts = [o.verdict for o in self.outcomes.values()]
        columns = {"reward": np.array(values, np.float32), OUTCOME: np.array(verdicts, np.float32)}
        return batch.with_rows(**columns, **self._parts())

    def _parts(self) -> dict[str, np.ndarray]:
        """Return a row column ``part/<name>`` for each named part of any outcome, NaN where it is missing."""
        names = sorted({name for o in self.outcomes.values() for name in o.parts})
        return {
            f"part/{name}": np.array([o.parts.get(name, np.nan) for o in self.outcomes.values()], np.float32)
            for name in names
        }

    @transfer(split="all", gather="merge")
    def failures(self) -> dict[int, dict[str, Any]]:
        """Return outcomes without a value of the last call, by trajectory id: for the journal and the counts."""
        return {i: asdict(o) for i, o in self.outcomes.items() if o.value is None}
