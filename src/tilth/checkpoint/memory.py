"""Snapshots of a state in shared memory, as files of a checkpoint that outlive the process which wrote them.

At the end of each step a worker copies its state into one of two slots, which it uses in turn, and answers with what it
wrote. The controller keeps the answers; only when a state is needed does it make a checkpoint of the files, which any
layout can load (checkpoint at every step: ByteRobust, arXiv 2509.16293, section 6; Gemini, SOSP 2023). A worker that
dies while it copies leaves the other slot whole, and checksums are verified when a snapshot is loaded.
"""

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilth.checkpoint.directory import Attempt, file_name
from tilth.checkpoint.manifest import Report, report_of
from tilth.checkpoint.saver import begin_save, commit_save
from tilth.checkpoint.snapshot import FileImage, Group, HostBuffer, RankParts
from tilth.core.errors import StorageError
from tilth.core.layout import Mesh

SLOTS = 2


class MemorySaver:
    """Writer of one process's part of a role's state. Memory and plans are kept while names and shapes stay."""

    def __init__(self) -> None:
        self._buffer = HostBuffer()
        self._parts = RankParts()
        self._images: dict[tuple[int, str], FileImage] = {}

    def take(self, folder: Path, slot: int, groups: Mapping[str, Group], rank: int, part: str = "") -> list[Report]:
        """Copy this rank's part of these groups into a slot; return a report of each group. StorageError without room.

        folder: of the run, on this machine. part: for the files' names, as ``Saver.start`` has it.
        """
        place = folder / f"slot-{slot}"
        try:
            images = [self._image(place, slot, name, group, rank, part) for name, group in groups.items()]
        except OSError as error:
            message = f"no room for a snapshot in {folder}: {error.strerror or error}"
            raise StorageError(message, key="snapshot") from error
        sources = [image.part.sources(group.tensors) for image, group in zip(images, groups.values())]
        for event in self._buffer.copy(zip(images, sources)):
            event.synchronize()
        return [self._report(image, rank, part) for image in images]

    def _image(self, folder: Path, slot: int, name: str, group: Group, rank: int, part: str) -> FileImage:
        known, image = self._parts.of(name, group, rank), self._images.get((slot, name))
        if image is None or image.part is not known:
            image = self._images[slot, name] = FileImage(known, _mapped(folder / file_name(name, part), known.nbytes))
        return image

    def _report(self, image: FileImage, rank: int, part: str) -> Report:
        written = bool(image.part.pieces)
        file = file_name(image.part.group, part) if written else ""
        return report_of("", image.part.group, rank, image.part.plan, file, image.entry() if written else None)


def _mapped(path: Path, nbytes: int) -> torch.Tensor:
    """Return the bytes of a new file, for which room is reserved: a full disk is an error here, not a signal later."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(path, "x+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


def publish(
    root: Path, step: int, slots: Iterable[Path], reports: Sequence[Report], objects: Mapping[str, Any], mesh: Mesh
) -> Path:
    """Make a checkpoint under ``root`` of the files in these slots, without copying them; return its path.

    reports: of all ranks and groups. CheckpointError if they do not belong together, StorageError.
    """
    place = Path(begin_save(root, step))
    wanted = {report.file for report in reports if report.file}
    try:
        for slot in slots:
            for name in wanted.intersection(os.listdir(slot)):
                os.link(slot / name, place / name)
    except OSError as error:
        raise StorageError(f"a snapshot cannot be used: {error.strerror or error}", key="snapshot") from error
    named = [report.model_copy(update={"folder": Attempt.of(place).name}) for report in reports]
    return Path(commit_save(place, named, objects, mesh))
