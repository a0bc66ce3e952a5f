"""Engine room of a training service: a bounded number of snapshots of clients' weights sample beside the base."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from tilth.config.schema import LoraConfig
from tilth.core.errors import CheckpointError
from tilth.serve.room import EngineRoom

LIVE = 32
"""Snapshots whose weights the engine holds at a time."""


class TrainRoom(EngineRoom):
    """Engine room that gives a worker which was started again its snapshots back."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._published = dict[str, tuple[str, LoraConfig]]()
        """Name -> folder and shape of each snapshot that the engine holds; the one used last is the last."""
        super().__init__(*args, factory="tilth.service.worker:train_worker", **more)

    async def publish(self, name: str, folder: Path, lora: LoraConfig, busy: Collection[str]) -> None:
        """Let the engine hold a snapshot, in place of those used longest ago. busy: names with requests."""
        held = self._published.pop(name, None)
        if held is None:
            await self.call("publish", name, str(folder), lora, idempotent=True)
        self._published[name] = str(folder), lora
        idle = [one for one in self._published if one not in busy and one != name]
        for old in idle[: max(len(self._published) - LIVE, 0)]:
            del self._published[old]
            await self.call("retract", old)

    def restore(self) -> None:
        for name, (folder, lora) in list(self._published.items()):
            try:
                self.group.publish(name, folder, lora)
            except CheckpointError:  # deleted since: the next request for it says so
                del self._published[name]
