"""Engine client of a training service: snapshots sample beside the base on worker 0, models train on all workers."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.config.schema import LoraConfig
from tilth.core.errors import CheckpointError
from tilth.core.layout import Mesh
from tilth.engines.client import EngineClient
from tilth.plan.packing import divide
from tilth.serve.tinker.losses import TOKENS
from tilth.serve.tinker.trained import SequenceScores
from tilth.serve.tinker.wire import Datum

LIVE = 32
"""Snapshots whose weights the engine holds at a time."""
SCORES = 8
"""Sequences that wait for their scores at a time: enough to keep its worker busy, and few before a training call."""


class TrainClient(EngineClient):
    """Engine client with a second role, "train", on all workers. A bounded number of snapshots samples beside the base;
    workers that were started again get them back."""

    def __init__(self, *args: Any, source: str, mesh: Mesh, **more: Any) -> None:
        """source: reference of the base model; mesh: of the role "train"."""
        self._published = dict[str, tuple[str, LoraConfig]]()
        """Name -> folder and shape of each snapshot that the engine holds; the one used last is the last."""
        self._publishing, self._scoring = asyncio.Lock(), asyncio.Semaphore(SCORES)
        super().__init__(*args, factory="tilth.serve.tinker.worker:sample_worker", source=source, **more)
        try:
            self.learners = self.cluster.group(
                "train", "tilth.serve.tinker.worker:train_worker", {"source": source}, mesh
            )
        except BaseException:  # an interrupt too: no process may be left
            self.close(0.0)
            raise

    def group_of(self, method: str) -> WorkerGroup:
        return self.learners if method in self.learners.methods else self.group

    async def forward_backward(
        self, model: str, data: Sequence[Datum], loss: str, options: Mapping[str, float | str], forward_only: bool
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Run passes over data, dealt over the workers by tokens; return log-probs of each datum, float32, and sums."""
        ranks, found, sums = self.learners.world_size, dict[int, np.ndarray](), dict[str, float]()
        mesh = self.learners.mesh
        parts = divide([datum.columns[TOKENS].size for datum in data], None, mesh.count("rows"))
        place = [mesh.index(rank, *mesh.over("rows")) for rank in mesh.ranks]  # ranks along tp have the same rows
        alike = [[one] * ranks for one in (model, loss, dict(options), forward_only)]
        answers = await self.call("forward_backward", [[data[row] for row in parts[own]] for own in place], *alike)
        for number, rows in enumerate(parts):
            logprobs, added = answers[place.index(number)]
            found |= zip(rows.tolist(), logprobs)
            sums = {name: sums.get(name, 0.0) + value for name, value in added.items()}
        return [found[row] for row in range(len(data))], sums

    async def publish(self, name: str, folder: Path, lora: LoraConfig, busy: Collection[str]) -> None:
        """Let the engine hold a snapshot, in place of those used longest ago. busy: names with requests."""
        async with self._publishing:  # of all requests for a new snapshot the first one publishes it
            held = self._published.pop(name, None)
            if held is None:
                await self.call("publish", name, str(folder), lora, idempotent=True)
            self._published[name] = str(folder), lora
            idle = [one for one in self._published if one not in busy and one != name]
            for old in idle[: max(len(self._published) - LIVE, 0)]:
                del self._published[old]
                await self.call("retract", old)

    async def score(
        self, name: str, tokens: np.ndarray, topk: int = 0, targets: np.ndarray | None = None
    ) -> SequenceScores:
        """Return log-probs of a sequence under a snapshot, or the base (""), however many wait for theirs."""
        async with self._scoring:
            return await self.call("score_tokens", name, tokens, topk, targets, idempotent=True)

    def restore(self) -> None:
        for name, (folder, lora) in list(self._published.items()):
            try:
                self.group.publish(name, folder, lora)
            except CheckpointError:  # deleted since: the next request for it says so
                del self._published[name]
