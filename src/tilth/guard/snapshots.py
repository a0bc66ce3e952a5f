"""Snapshots of a run in shared memory, from the controller's side: one at each committed step, two slots in turn."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilth.checkpoint import Checkpoint, open_checkpoint
from tilth.checkpoint.manifest import Report
from tilth.checkpoint.memory import SLOTS, publish
from tilth.cluster.controller.group import WorkerGroup
from tilth.core.errors import CheckpointError, ReplicaMismatch, StorageError
from tilth.core.layout import Mesh
from tilth.guard.checksums import compare, differing, shortened
from tilth.trace.spans import span


@dataclass(frozen=True)
class _Taken:
    """A complete snapshot."""

    step: int
    slot: int
    reports: list[Report]
    objects: Mapping[str, Any]
    mesh: Mesh


class Snapshots:
    """Newest states of a run in a folder of shared memory, which workers write and outlives them.

    They cost the copy of each role's state once a step, and twice its memory on the machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._taken: list[_Taken] = []
        """Oldest first."""
        self._restored: Path | None = None

    @property
    def spill(self) -> Path:
        """Folder for rows of trajectories that are committed and in no file yet."""
        return self.folder / "trajectories"

    def take(self, roles: Mapping[str, WorkerGroup], step: int, objects: Mapping[str, Any], mesh: Mesh) -> None:
        """Take a snapshot of these roles at the end of a step. StorageError if there is no room, NonFiniteError
        for a state that is not finite; the last one stays.

        ReplicaMismatch if copies that must be equal differ: then too the last one stays, whose copies were equal.
        objects: as a checkpoint's, but for the roles' positions, which come with their states.
        """
        slot = (self._taken[-1].slot + 1) % SLOTS if self._taken else 0
        self._taken = [taken for taken in self._taken if taken.slot != slot]
        reports, positions = list[Report](), dict[str, Any]()
        with span("snapshot", step=step):
            for name, role in roles.items():
                found = role.snapshot(str(self.folder), slot)
                _check_copies(name, role, {rank: one.copies for rank, one in zip(role.mesh.ranks, found)})
                if problem := next((one.problem for one in found if one.problem), ""):
                    raise StorageError(problem, key="snapshot")
                reports += [report for one in found for report in one.reports]
                positions[name] = found[0].position
        positions = {role: position for role, position in positions.items() if position}
        self._taken.append(_Taken(step, slot, reports, {**objects, "positions": positions}, mesh))
        if self._restored is not None:
            shutil.rmtree(self._restored.parent, ignore_errors=True)
            self._restored = None

    def newest(self) -> Checkpoint | None:
        """Return the newest snapshot as a checkpoint; None if there is none that can be used."""
        while self._restored is None and self._taken:
            taken = self._taken.pop()
            root = self.folder / "restored"
            root.mkdir(exist_ok=True)
            try:
                slots = [self.folder / f"slot-{taken.slot}"]
                self._restored = publish(root, taken.step, slots, taken.reports, taken.objects, taken.mesh)
            except (CheckpointError, StorageError):
                continue
        return None if self._restored is None else open_checkpoint(self._restored)

    def clear(self) -> None:
        """Forget all snapshots: the run goes back to an earlier state."""
        self._taken, self._restored = [], None

    def discard(self) -> None:
        """Forget the snapshot that ``newest`` returned, which could not be loaded: it returns the one before it."""
        if self._restored is not None:
            shutil.rmtree(self._restored.parent, ignore_errors=True)
        self._restored = None


def _check_copies(name: str, role: WorkerGroup, digests: Mapping[int, Mapping[int, int]]) -> None:
    """Raise ReplicaMismatch with the ranks whose copies differ from the others'."""
    verdict = compare(digests, name)
    if verdict is None:
        return
    tensors = differing(role.copies())
    error = ReplicaMismatch(f"{verdict.evidence}: {shortened(tensors)}", key=f"{name}.copies")
    error.ranks = verdict.ranks
    raise error
