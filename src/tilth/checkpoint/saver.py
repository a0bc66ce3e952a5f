"""Save without stalling: a ``Saver`` in every worker, a ``Commit`` in the controller.

A worker copies its values (the snapshot); a thread then computes checksums, writes, synchronises and reports while
training continues. A thread of the controller waits for the reports of all ranks and publishes the checkpoint. Each
report is a small file beside the data, so that no training message carries it.
"""

import json
import mmap
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tilth.checkpoint.directory import Attempt, complete, file_name, step_of
from tilth.checkpoint.manifest import FileEntry, Report, assemble, parse_report, raise_problems, report_of
from tilth.checkpoint.read import damaged_files
from tilth.checkpoint.snapshot import FileImage, Group, HostBuffer, RankPart, RankParts, check_tensor
from tilth.checkpoint.stages import StageError, failed, staged
from tilth.checkpoint.storage import Location, join, storage_of
from tilth.core.clock import utc_now
from tilth.core.errors import CheckpointError, StorageError, TilthError
from tilth.core.layout import Layout, Mesh
from tilth.trace.spans import span

T = TypeVar("T")

_FAILED = "failed."
_SOONEST, _LATEST = 0.005, 0.1  # bounds of the seconds between two polls of the reports
_PATIENCE = 0.1  # seconds between two polls, as a part of the time that has passed
_DEPTH = 200  # of nested objects: readers of JSON have a bound too, which depends on their own stack
_LARGE = 4 << 20  # bytes of a file that is hashed in a thread of its own


class Snapshot(NamedTuple):
    """Cost of a save for its caller."""

    nbytes: int  # that this rank will write
    waited: float  # seconds until the save before was on disk
    seconds: float  # of the copy and its preparation


class Saver:
    """Write the share of one process of each group. One save at a time; memory and plans are kept between saves."""

    def __init__(self) -> None:
        self._buffer = HostBuffer()
        self._parts = RankParts()
        self._written: Future[Any] | None = None

    def start(
        self, folder: Location, groups: Mapping[str, Group], rank: int, part: str = "", background: bool = True
    ) -> Snapshot:
        """Write and report this rank's part of these groups (``planning``) into a folder of ``begin_save``.

        Returns when the values are copied: the tensors may change from then on. A thread does the rest, unless
        ``background`` is False. part: for the files' names, ``GROUP.PART.safetensors`` ("": ``GROUP.safetensors``).

        Waits for the save before and raises its error, if it was not raised yet. CheckpointError, before anything is
        copied, for a tensor that cannot be stored or does not fit its layout; StorageError without memory for the copy.
        """
        begun = time.perf_counter()
        self.wait()
        free = time.perf_counter()
        work, nbytes = self._snapshot(Attempt.of(folder), groups, rank, part)
        taken = Snapshot(nbytes, free - begun, time.perf_counter() - free)
        if background:
            self._written = _in_background(work, f"tilth-save-{rank}")
        else:
            work()
        return taken

    def write(self, folder: Location, groups: Mapping[str, Group], rank: int, part: str = "") -> list[Report]:
        """Do all of ``start`` in the foreground; return the report of each group."""
        self.wait()
        return self._snapshot(Attempt.of(folder), groups, rank, part)[0]()

    def prepare(self, groups: Mapping[str, Group], rank: int) -> None:
        """Plan, and check that these can be saved, ahead of ``start``. CheckpointError."""
        for name, group in groups.items():
            self._part(name, group, rank).sources(group.tensors)

    def _snapshot(
        self, attempt: Attempt, groups: Mapping[str, Group], rank: int, part: str
    ) -> tuple[Callable[[], list[Report]], int]:
        """Copy the values; return the rest of the work, and the bytes."""
        _check_name("part", part or "_")
        parts = [self._part(name, group, rank) for name, group in groups.items()]
        sources = [part.sources(group.tensors) for part, group in zip(parts, groups.values())]
        pinned = any(values.device.type == "cuda" for of_part in sources for values in of_part)
        nbytes = sum(part.nbytes for part in parts)
        with _explained(attempt, rank), staged("snapshot", str(attempt.place), nbytes):
            images = self._buffer.images(parts, pinned)
            events = self._buffer.copy(zip(images, sources))
        return partial(_write, attempt, images, rank, part, events), nbytes

    def _part(self, name: str, group: Group, rank: int) -> RankPart:
        _check_name("group", name)
        return self._parts.of(name, group, rank)

    def wait(self) -> None:
        """Wait until the save is on disk and reported; raise its error, once."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def settle(self) -> str:
        """Wait for a save that is given up; return its error message, "" if it succeeded."""
        try:
            self.wait()
        except TilthError as error:
            return str(error)
        return ""

    def problem(self) -> str:
        """Return the error message of the save so far, "" if there is none. Does not wait."""
        error = self._written.exception() if self._written is not None and self._written.done() else None
        return "" if error is None else str(error)


def _check_name(kind: str, name: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise CheckpointError(f"{kind} {name!r}: a name of letters, digits, '-' and '_' is needed", key=kind)


def _in_background(work: Callable[[], T], name: str) -> "Future[T]":
    """Run ``work`` in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again by ``Future.result``
            future.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return future


def _write(attempt: Attempt, images: Sequence[FileImage], rank: int, part: str, events: Sequence[Any]) -> list[Report]:
    """Make the files of the images durable and report them; report a failure too, where that is possible."""
    try:
        with _explained(attempt, rank), span("save.background", step=attempt.step):
            for event in events:
                event.synchronize()
            return [_write_image(attempt, image, rank, part) for image in images]
    except StorageError as error:
        with suppress(OSError):
            attempt.storage.put(f"{attempt.reports}/{_FAILED}{rank:05d}", str(error).encode(), durable=False)
        raise


def _write_image(attempt: Attempt, image: FileImage, rank: int, part: str) -> Report:
    group, file, entry = image.part.group, "", None
    if image.part.pieces:
        file = attempt.file(group, part)
        entry = _write_file(attempt, image, f"{attempt.folder}/{file}")
    report = report_of(attempt.name, group, rank, image.part.plan, file, entry)
    path = f"{attempt.reports}/{_report_name(group, rank)}"
    with staged("report", f"{attempt.root}/{path}"):
        attempt.storage.put(path, report.model_dump_json().encode(), durable=False)
    return report


def _write_file(attempt: Attempt, image: FileImage, path: str) -> FileEntry:
    """Hash and write a file; a large one is hashed while the disk writes."""
    checksum = partial(_checksum, image, f"{attempt.root}/{path}")
    if len(image.data) < _LARGE:
        entry = checksum()
        attempt.storage.write(path, image.chunks())
        return entry
    hashed = _in_background(checksum, "tilth-checksum")
    try:
        attempt.storage.write(path, image.chunks())
    finally:
        wait([hashed])
    return hashed.result()


def _checksum(image: FileImage, place: str) -> FileEntry:
    with staged("checksum", place, len(image.data)):
        return image.entry()


def _report_name(group: str, rank: int) -> str:
    return f"{group}.{rank:05d}.json"


@contextmanager
def _explained(attempt: Attempt, rank: int = -1) -> Iterator[None]:
    """Complete the error of a stage in one line: what failed, where, why, and what is intact."""
    try:
        yield
    except StageError as error:
        where = f"{error.path}, stage {error.stage}" + (f" of rank {rank}" if rank >= 0 else "")
        message = f"checkpoint of step {attempt.step}: cannot write {where}: {error.reason}; {_intact(attempt)}"
        key = error.key + (f".rank{rank}" if rank >= 0 else "")
        raise StageError(message, error.stage, error.path, error.reason, key=key) from error


def _intact(attempt: Attempt) -> str:
    try:
        there = complete(attempt.root)
    except OSError:
        return "what was there before is intact"
    others = [path for path in there if step_of(path) != attempt.step] or there
    return f"the checkpoint before it, {others[-1]}, is intact" if others else "there was none before it"


def begin_save(root: Location, step: int) -> Any:
    """Begin a save in the controller: make the folder for all ranks, return its path or URL.

    Removes leftovers of crashed saves, so only one save may be under way. StorageError if the folder cannot be made;
    CheckpointError for a step that is not an integer of at least 0.
    """
    if type(step) is not int or step < 0:
        raise CheckpointError(f"step = {step!r}: the step of a checkpoint is a whole number of at least 0", key="step")
    attempt = Attempt.new(root, step)
    try:
        with _explained(attempt), staged("begin", str(attempt.place)):
            attempt.begin()
    except BaseException:
        attempt.abandon()
        raise
    return attempt.place


def commit_save(
    folder: Location,
    parts: Iterable[Report | Mapping[str, Any]],
    objects: Mapping[str, Any],
    layout: Mesh | None = None,
    expected: Mapping[str, Collection[int]] | None = None,
) -> Any:
    """End a save in the controller: check the ranks' reports, write the manifest, publish. Return path or URL.

    folder: of ``begin_save``. parts: the reports, in any order. layout: the mesh of the writers (default: their ranks
    as they are). expected: the ranks of each group (default: as in the reports). CheckpointError if a report is
    missing, there twice, of another plan or of another save. StorageError if writing fails. After either nothing of the
    attempt remains and earlier checkpoints are intact.
    """
    attempt = Attempt.of(folder)
    try:
        check_objects(objects)
        reports = [p if isinstance(p, Report) else parse_report(json.dumps(dict(p)), "a part") for p in parts]
        with _explained(attempt), staged("manifest", f"{attempt.final}/manifest.json") as timed:
            saved = utc_now("seconds")
            manifest = assemble(
                attempt.name, attempt.step, reports, objects, saved=saved, layout=layout, expected=expected
            )
            files = storage_of(join(attempt.root, attempt.folder))
            raise_problems(attempt.name, damaged_files(files, manifest).values())
            data = manifest.dump()
            timed.set(bytes=len(data))
            attempt.write_manifest(data)
        with _explained(attempt), staged("publish", str(attempt.final)):
            attempt.publish()
    except BaseException:
        attempt.abandon()
        raise
    return attempt.final


def abandon_save(folder: Location) -> None:
    """Remove a save that will not be committed; does nothing to a published checkpoint."""
    Attempt.of(folder).abandon()


class Commit:
    """Wait in a thread for the reports of all ranks and publish the checkpoint; begins at once."""

    def __init__(
        self,
        folder: Location,
        groups: Mapping[str, Collection[int]],
        objects: Mapping[str, Any],
        layout: Mesh | None = None,
        then: Callable[[Any], None] | None = None,
    ) -> None:
        """folder: of ``begin_save``. groups: the ranks that report each group. then: called with the path or URL of the
        published checkpoint, for retention and the record of the best; its failure is an error of this save, but the
        checkpoint stays."""
        check_objects(objects)
        self._attempt = Attempt.of(folder)
        self._groups, self._objects, self._layout, self._then = groups, objects, layout, then
        self._cancelled = Event()
        self._published = _in_background(self._work, "tilth-commit")

    def done(self) -> bool:
        """True if it has ended, with a checkpoint or an error."""
        return self._published.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Return the checkpoint's path or URL, or raise the error. TimeoutError after ``timeout`` seconds."""
        return self._published.result(timeout)

    def cancel(self) -> None:
        """Give the save up unless it is published; returns when nothing of it remains."""
        self._cancelled.set()
        self._published.exception()

    @property
    def error(self) -> BaseException | None:
        """The error of an ended save, else None."""
        return self._published.exception() if self._published.done() else None

    def _work(self) -> Any:
        with span("save.commit", step=self._attempt.step):
            try:
                reports = self._reports()
            except BaseException:
                self._attempt.abandon()
                raise
            final = commit_save(self._attempt.place, reports, self._objects, self._layout, self._groups)
            if self._then is not None:
                self._after(final)
            return final

    def _after(self, final: Any) -> None:
        """Run ``then``; its error states that the checkpoint itself is complete."""
        assert self._then is not None
        try:
            with staged("retention", str(final)):
                self._then(final)
        except StorageError as error:
            stage = error.stage if isinstance(error, StageError) else "retention"
            message = f"after the checkpoint of step {self._attempt.step}, which is complete: {error}"
            raise StageError(message, stage, str(final), str(error), key=error.key) from error

    def _reports(self) -> list[Report]:
        """Wait for all reports; raise the error of a rank that failed."""
        wanted = {_report_name(group, rank) for group, ranks in self._groups.items() for rank in ranks}
        found: dict[str, Report] = {}
        begun = time.perf_counter()
        with _explained(self._attempt):
            while True:
                found |= self._new_reports(wanted - found.keys())
                if len(found) == len(wanted):
                    return list(found.values())
                passed = time.perf_counter() - begun
                if self._cancelled.wait(min(max(_PATIENCE * passed, _SOONEST), _LATEST)):
                    found |= self._new_reports(wanted - found.keys())
                    raise self._given_up(sorted(wanted - found.keys()))

    def _new_reports(self, wanted: set[str]) -> dict[str, Report]:
        storage, folder = self._attempt.storage, self._attempt.reports
        try:
            there = storage.names(folder)
            for name in there:
                if name.startswith(_FAILED) and not name.endswith(".tmp"):
                    text = storage.read(f"{folder}/{name}").decode(errors="replace")
                    raise StorageError(text, key=f"rank{int(name.removeprefix(_FAILED))}")
            come = {name: storage.read(f"{folder}/{name}") for name in wanted.intersection(there)}
        except OSError as error:
            raise failed("report", str(error.filename or folder), error.strerror or str(error)) from error
        return {name: parse_report(data, f"{folder}/{name}") for name, data in come.items()}

    def _given_up(self, missing: Sequence[str]) -> StorageError:
        some = ", ".join(name.removesuffix(".json") for name in missing[:8]) + (", ..." if len(missing) > 8 else "")
        return StorageError(
            f"checkpoint of step {self._attempt.step} was given up in stage report: no report of {some} (group and "
            f"rank) had come; {_intact(self._attempt)}", key=",".join(missing[:1]),
        )  # fmt: skip


def check_objects(objects: Any) -> None:
    """Raise a CheckpointError unless objects are a mapping that JSON preserves."""
    if not isinstance(objects, Mapping):
        message = f"objects is a {type(objects).__name__}; it must be a mapping of names to values"
        raise CheckpointError(message, key="objects")
    _check_json(objects, "objects", _DEPTH)


def _check_json(value: Any, place: str, depth: int) -> None:
    """Refuse keys that JSON would turn into text, and types that it lacks."""
    if not depth:
        raise CheckpointError(f"{place[:60]}...: objects are nested more than {_DEPTH} deep", key="objects.depth")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                message = f"{place}: key {key!r} is a {type(key).__name__}; JSON has only text keys"
                raise CheckpointError(message, key=f"{place}.{key}")
            _check_json(item, f"{place}.{key}", depth - 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _check_json(item, f"{place}[{i}]", depth - 1)
    elif not (value is None or type(value) in (bool, int, float, str)):
        raise CheckpointError(f"{place}: a {type(value).__name__} cannot be stored as JSON", key=place)


Groups = Mapping[str, Mapping[str, Tensor]]


def save(root: Location, step: int, groups: Groups, objects: Mapping[str, Any], layout: Mesh | None = None) -> Any:
    """Write ``root/step-000100``: one safetensors file per group and ``manifest.json``. Return its path or URL.

    Returns when everything is on disk. Removes leftovers of crashed saves under ``root`` first, so only one process at
    a time may write there. Replaces a checkpoint of the same step. layout: the mesh of the writers (default: one
    process). StorageError if writing fails: nothing of the attempt remains and earlier checkpoints are intact.
    CheckpointError, before anything is written, if something cannot be stored.
    """
    check_objects(objects)
    _check_mapping("groups", groups, "groups")
    single = {name: _whole_group(name, tensors) for name, tensors in groups.items()}
    saver = Saver()
    saver.prepare(single, 0)
    folder = begin_save(root, step)
    try:
        reports = saver.write(folder, single, 0)
    except BaseException:
        abandon_save(folder)
        raise
    return commit_save(folder, reports, objects, layout, dict.fromkeys(groups, (0,)))


def _whole_group(name: str, tensors: Mapping[str, Tensor]) -> Group:
    """Return the group of one process, which holds whole tensors."""
    _check_mapping(f"groups.{name}", tensors, "tensors")
    layouts = {}
    for tensor, values in tensors.items():
        check_tensor(name, tensor, values)
        layouts[tensor] = Layout.single(tuple(values.shape))
    return Group(tensors, layouts)


def _check_mapping(name: str, value: Any, of: str) -> None:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} is a {type(value).__name__}; it must be a mapping of names to {of}", key=name)


# ---- snapshots in shared memory, as files of a checkpoint that outlive the process which wrote them ----
#
# At the end of each step a worker copies its state into one of two slots, which it uses in turn, and answers with what
# it wrote. The controller keeps the answers; only when a state is needed does it make a checkpoint of the files, which
# any layout can load (checkpoint at every step: ByteRobust, arXiv 2509.16293, section 6; Gemini, SOSP 2023). A worker
# that dies while it copies leaves the other slot whole, and checksums are verified when a snapshot is loaded.

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
