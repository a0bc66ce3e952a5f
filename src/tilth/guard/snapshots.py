"""Snapshots of a run in shared memory, from the controller's side: one at each committed step, two slots in turn.

On one machine an index beside the slots lists the complete ones, so that the next controller has them when this one is
killed.
"""

import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilth.checkpoint import Checkpoint, open_checkpoint
from tilth.checkpoint.manifest import Report
from tilth.checkpoint.saver import SLOTS, publish
from tilth.cluster.backends.base import Copied
from tilth.cluster.backends.ray_files import RayFiles
from tilth.cluster.controller.group import WorkerGroup
from tilth.config.errors import listed
from tilth.core.errors import CheckpointError, ReplicaMismatch, StorageError
from tilth.core.layout import Mesh
from tilth.guard.verdict import Verdict
from tilth.plan.backups import peers
from tilth.trace.spans import span


@dataclass(frozen=True)
class _Taken:
    """A complete snapshot."""

    step: int
    slot: int
    reports: list[Report]
    objects: Mapping[str, Any]
    mesh: Mesh

    def dump(self) -> dict[str, Any]:
        """Return it as JSON."""
        reports = [report.model_dump(mode="json") for report in self.reports]
        kept = {"step": self.step, "slot": self.slot, "objects": self.objects}
        return {**kept, "reports": reports, "mesh": self.mesh.to_json()}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "_Taken":
        """Return it from its JSON."""
        reports = [Report.model_validate(report) for report in values["reports"]]
        return cls(values["step"], values["slot"], reports, values["objects"], Mesh.from_json(values["mesh"]))


class Snapshots:
    """Newest states of a run in a folder of shared memory, which workers write and outlives them.

    They cost the copy of each role's state once a step, and twice its memory on the machine.
    """

    def __init__(self, folder: Path, files: RayFiles | None = None, workers: int = 1, writer: int = 0) -> None:
        """folder: empty, or with the snapshots of a controller that was killed; files: for copies on other nodes, if
        there are several; workers: of the run; writer: rank that writes rows of trajectories."""
        self.folder, self._index = folder, folder / "index.json"
        self.files, self.workers, self.writer = files, workers, writer
        self.copied = Copied(0, 0.0, "")
        """Copies of the last snapshot but one."""
        there = json.loads(self._index.read_bytes()) if self._index.exists() else {"taken": [], "holders": {}}
        self._taken = [_Taken.of(values) for values in there["taken"]]
        """Oldest first."""
        self._restored: Path | None = None
        self._published: _Taken | None = None
        """Snapshot that it was made of."""
        shutil.rmtree(self._root, ignore_errors=True)
        if files is not None and self._taken:
            self._resume(files, there["holders"])

    def _resume(self, files: RayFiles, holders: Mapping[str, Collection[str]]) -> None:
        """Go on with the files that a former controller's snapshots have on all nodes: the rows of trajectories that
        are in no file yet are on the writer's node, or a copy of them here if that node has none."""
        files.resume(holders)
        files.remove(self._root.name)
        files.begin({}, {self.spill.name: self.writer})

    @property
    def _root(self) -> Path:
        """Folder of the checkpoint that ``newest`` makes."""
        return self.folder / "restored"

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
        if self.files is not None:  # they read the slot that the step after it overwrites
            with span("snapshot.copies", step=step):
                self.copied = self.files.wait()
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
        for role in roles.values():
            role.mark(step)
        if self.files is not None:
            self._begin_copies(self.files, self._taken[-1], roles)
        self._unpublish()
        self._write_index()

    def _begin_copies(self, files: RayFiles, taken: _Taken, roles: Mapping[str, WorkerGroup]) -> None:
        """Begin to copy each rank's files to a node whose workers share no parallel group with it, if there is one."""
        machines = {rank: files.node(rank) for rank in range(self.workers)}
        places: dict[str, tuple[int, int]] = {}
        for role in roles.values():
            to = peers(role.mesh, machines)
            own = {report.file: report.rank for report in taken.reports if report.file and report.rank in to}
            places |= {f"slot-{taken.slot}/{file}": (rank, to[rank]) for file, rank in own.items()}
        files.begin(places, {self.spill.name: self.writer})

    def newest(self) -> Checkpoint | None:
        """Return the newest snapshot as a checkpoint; None if there is none that can be used."""
        if self._restored is not None and self._published is not None and self.files is not None:
            self._try(self._published)  # by now another node may be new
        while self._restored is None and self._taken:
            self._try(self._taken[-1])
            if self._restored is None:
                self._taken.pop()
        return None if self._restored is None else open_checkpoint(self._restored)

    def _try(self, taken: _Taken) -> None:
        """Make a checkpoint of a snapshot, on every node, if all of it is there."""
        made, self._restored = self._restored, None
        root, slot = self._root, self.folder / f"slot-{taken.slot}"
        root.mkdir(exist_ok=True)
        try:
            if self.files is not None:
                self._gather(self.files, taken)
            made = made or publish(root, taken.step, [slot], taken.reports, taken.objects, taken.mesh)
            if self.files is not None:
                self._share(self.files, made, slot)
        except (CheckpointError, StorageError):
            shutil.rmtree(root, ignore_errors=True)
            return
        self._restored, self._published = made, taken

    def _gather(self, files: RayFiles, taken: _Taken) -> None:
        """Give every node the files of a snapshot, and the writer its rows."""
        self.copied = files.wait()
        files.gather(f"slot-{taken.slot}/{name}" for name in sorted({report.file for report in taken.reports} - {""}))
        files.scatter(self.spill.name, [self.writer])

    def _share(self, files: RayFiles, published: Path, slot: Path) -> None:
        """Make the checkpoint on the other nodes too."""
        there = {path.name: path for path in published.iterdir()}
        links = {name: f"{slot.name}/{name}" for name in there if (slot / name).exists()}
        plain = {name: path.read_bytes() for name, path in there.items() if name not in links}
        files.share(str(published.relative_to(self.folder)), plain, links)

    def clear(self) -> None:
        """Forget all snapshots: the run goes back to an earlier state."""
        self._taken, self._restored, self._published = [], None, None
        self._write_index()

    def _write_index(self) -> None:
        """Write the index in one piece. StorageError without room: it then lists earlier snapshots, whose checksums
        tell whether they are still there."""
        holders = {} if self.files is None else self.files.holders()
        new = self._index.with_suffix(".new")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps({"taken": [taken.dump() for taken in self._taken], "holders": holders}))
            os.replace(new, self._index)
        except OSError as error:
            message = f"no room for the index of the snapshots in {self.folder}: {error.strerror}"
            raise StorageError(message, key="snapshot") from error

    def discard(self) -> None:
        """Forget the snapshot that ``newest`` returned, which could not be loaded: the next is the one before it."""
        self._taken = [taken for taken in self._taken if taken is not self._published]
        self._unpublish()

    def _unpublish(self) -> None:
        """Remove the checkpoint that was made of a snapshot."""
        if self._restored is not None:
            shutil.rmtree(self._restored.parent, ignore_errors=True)
            if self.files is not None:
                self.files.remove(self._restored.parent.name)
        self._restored = self._published = None


def _check_copies(name: str, role: WorkerGroup, digests: Mapping[int, Mapping[int, int]]) -> None:
    """Raise ReplicaMismatch with the ranks whose copies differ from the others'."""
    verdict = compare(digests, name)
    if verdict is None:
        return
    tensors = listed(differing(role.copies()), NAMED)
    error = ReplicaMismatch(f"{verdict.evidence}: {tensors}", key=f"{name}.copies")
    error.ranks = verdict.ranks
    raise error


# ---- copies that differ ----
#
# Silent corruption leaves no error. Copies that must be equal find it at the end of the step (``checkpoint.copies``):
# with three or more of them the odd one is named, with two nobody can tell which is right. Tensors that one rank alone
# holds have no copy to compare with.

NAMED = 4
"""Most tensors in the evidence."""


def compare(digests: Mapping[int, Mapping[int, int]], role: str = "") -> Verdict | None:
    """Return the verdict on copies that differ, or None. digests: rank -> its ``Copies.digests``."""
    odd, unsure = set[int](), list[set[int]]()
    for holders in {holders for own in digests.values() for holders in own}:
        found = {rank: own[holders] for rank, own in digests.items() if holders in own}
        (usual, most), *others = Counter(found.values()).most_common()
        if not others:
            continue
        if 2 * most > len(found):
            odd |= {rank for rank, digest in found.items() if digest != usual}
        else:
            unsure.append(set(found))
    if not odd and not unsure:
        return None
    open_ = [ranks for ranks in unsure if not ranks & odd]  # who differs elsewhere explains it
    ranks = tuple(sorted(odd.union(*open_)))
    listed = ", ".join(map(str, ranks))
    if open_:
        evidence = f"{role} copies on ranks {listed} differ, and there is no majority to tell which are right"
    else:
        evidence = f"{role} copies on rank{'s' if len(ranks) > 1 else ''} {listed} differ from those on most ranks"
    return Verdict("corruption", ranks, evidence.strip(), {"majority": not open_})


def differing(tensors: Iterable[Mapping[str, tuple[int, int]]]) -> list[str]:
    """Return the tensors of which copies differ, sorted. tensors: of each rank, as ``Copies.tensors`` has them."""
    seen: dict[tuple[str, int], set[int]] = {}
    for own in tensors:
        for name, (holders, value) in own.items():
            seen.setdefault((name, holders), set()).add(value)
    return sorted({name for (name, _), values in seen.items() if len(values) > 1})
