"""The manifest of a checkpoint maps boxes of tensors to bytes of files. It is JSON, never code.

``manifest.json`` starts with the XXH3 of everything behind its first line. A checksum covers every byte of every file:
those of tiles the data, those of files the safetensors headers. Tensors are columns with a number or more for each box,
since thousands of ranks make millions of boxes; a long column equal to one of an earlier tensor is that tensor's name.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import xxhash
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tilth.checkpoint.columns import Pieces, TensorTable, WrongField, json_object, rows_of
from tilth.checkpoint.planning import DTYPES, MOST, GroupPlan, TensorRow, plan_group, spec_table, specs_of, tiles
from tilth.core.errors import CheckpointError
from tilth.core.layout import MOST_RANKS, Box, Mesh, Shape
from tilth.core.names import name_problem

if TYPE_CHECKING:
    from tilth.checkpoint.storage import Storage

NAME = "manifest.json"
FORMAT = "tilth-checkpoint"
VERSION = 2

_FIRST_LINE = re.compile(rb'\{"checksum": "([0-9a-f]{16})",\n')
_DIGITS = b"0123456789abcdef"
_SHOWN = 20  # problems in one message


def _to_hex(checksums: Any) -> Any:
    """Return 64-bit integers as a text of 16 digits each: a quarter shorter than decimals, and copied, not parsed."""
    if isinstance(checksums, str):
        return checksums
    if not isinstance(checksums, list | tuple) or not all(type(c) is int and 0 <= c < 1 << 64 for c in checksums):
        raise ValueError("integers or a text of 16 digits each are needed")
    return np.array(checksums, ">u8").tobytes().hex()


def _check_digits(checksums: str) -> str:
    """Check the digits, faster than a pattern: manifests of large runs are mostly checksums."""
    if len(checksums) % 16 or not checksums.isascii() or checksums.encode().translate(None, _DIGITS):
        raise ValueError("16 digits of 0-9 and a-f for each checksum are needed")
    return checksums


def _check_file_name(name: str) -> str:
    if problem := name_problem(name):
        raise ValueError(problem)
    return name


FileName = Annotated[str, AfterValidator(_check_file_name)]
"""A file beside the manifest; any other path in a manifest could name any file of this machine."""
Bytes = Annotated[int, Field(ge=0, lt=MOST)]
Rank = Annotated[int, Field(ge=0, le=MOST_RANKS)]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Entry):
    """A data file: its group, sizes and checksums (xxh3_64)."""

    group: str
    nbytes: Bytes
    header_nbytes: Bytes
    header_checksum: int = Field(ge=0, lt=1 << 64)
    checksums: Annotated[str, BeforeValidator(_to_hex), AfterValidator(_check_digits)]
    """Checksums of all tiles in the order of their bytes, 16 hex digits each; may be given as integers."""

    @property
    def lines(self) -> Iterator[bytes]:
        """JSON, in parts."""
        yield json.dumps(self.model_dump(exclude={"checksums"}))[:-1].encode()
        yield b', "checksums": "'
        yield self.checksums.encode()
        yield b'"}'

    @property
    def tiles(self) -> int:
        """Number of checksums."""
        return len(self.checksums) // 16

    @cached_property
    def tile_checksums(self) -> np.ndarray:
        """uint64 [tiles]."""
        return np.frombuffer(bytes.fromhex(self.checksums), ">u8").astype(np.uint64)


class Piece(NamedTuple):
    """One box of a tensor: bytes ``byte0 .. byte0 + nbytes`` of a file, row-major."""

    offset: Shape
    size: Shape
    file: str
    byte0: int  # from the start of the file
    nbytes: int
    checksums: list[int]  # of its tiles, see ``planning.tiles``

    @property
    def box(self) -> Box:
        """Its place in the tensor."""
        return Box(self.offset, self.size)


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """A tensor: its global shape, the name of its dtype, and the B boxes of D dimensions that tile it, by offset."""

    shape: Shape
    dtype: str
    offset: np.ndarray  # int64 [B, D]
    size: np.ndarray  # int64 [B, D]
    _manifest: "Manifest"
    _row: TensorRow

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype as torch has it."""
        return DTYPES[self.dtype]

    def __len__(self) -> int:
        """Number of boxes."""
        return len(self.offset)

    def piece(self, i: int) -> Piece:
        """Return box ``i``; only the boxes that are read are made, of perhaps thousands."""
        manifest, row = self._manifest, self._row
        name = manifest.file_names[row.file[i]]
        file, size = manifest.files[name], tuple(row.size[i].tolist())
        itemsize, first = self.torch_dtype.itemsize, int(manifest.first_tiles[id(row)][i])
        sums = file.tile_checksums[first : first + tiles(size, itemsize).total].tolist()
        start = file.header_nbytes + int(row.byte0[i])
        return Piece(tuple(row.offset[i].tolist()), size, name, start, math.prod(size) * itemsize, sums)

    def meeting(self, box: Box) -> list[Piece]:
        """Return the boxes that have elements of a box."""
        hits = ((self.offset < box.stop) & (self.offset + self.size > box.offset)).all(1)
        return [self.piece(i) for i in np.flatnonzero(hits).tolist()]

    @cached_property
    def boxes(self) -> tuple[Piece, ...]:
        """All boxes."""
        return tuple(map(self.piece, range(len(self))))


class _Head(_Entry):
    """The manifest before its columns are checked."""

    format: Literal["tilth-checkpoint"]
    version: Literal[2]
    step: int = Field(ge=0, lt=MOST)
    saved: str
    layout: dict[str, Any]
    files: dict[FileName, FileEntry]
    groups: dict[str, dict[str, Any]]
    objects: dict[str, Any]
    total_bytes: int


@dataclass(frozen=True, eq=False)
class Manifest:
    """The whole table. Made by ``assemble`` and ``load_manifest``, which check it."""

    step: int
    saved: str  # time, UTC, ISO 8601
    layout: dict[str, Any]  # "mesh": the mesh of the writers
    files: dict[str, FileEntry]
    tables: Mapping[str, TensorTable]
    objects: dict[str, Any]  # JSON of the controller
    total_bytes: int  # of all data files

    @cached_property
    def file_names(self) -> list[str]:
        """Files in order; columns hold indices of these."""
        return list(self.files)

    @cached_property
    def groups(self) -> dict[str, dict[str, TensorEntry]]:
        """Tensors by group and name, in the order in which they were saved."""
        return {
            group: {name: TensorEntry(*row[:4], self, row) for name, row in table.rows.items()}
            for group, table in self.tables.items()
        }

    def entry(self, group: str, name: str) -> TensorEntry:
        """Return a tensor; KeyError."""
        return self.groups[group][name]

    @cached_property
    def first_tiles(self) -> dict[int, np.ndarray]:
        """By id of a row of a table: index of each box's first tile in its file, int64 [B]."""
        rows = [row for table in self.tables.values() for row in table.rows.values()]
        cuts = np.cumsum([len(row.file) for row in rows])[:-1]
        return dict(zip(map(id, rows), np.split(self.pieces.first_tile, cuts)))

    @cached_property
    def pieces(self) -> Pieces:
        """Boxes of all tensors."""
        return Pieces.of([row for table in self.tables.values() for row in table.rows.values()])

    def dump(self) -> bytes:
        """Return the contents of ``manifest.json``: one line for each file and each tensor."""
        parts = list(self._parts())
        hasher = xxhash.xxh3_64()
        for part in parts:
            hasher.update(part)
        return b"".join([b'{"checksum": "%s",\n' % hasher.hexdigest().encode(), *parts])

    def _parts(self) -> Iterator[bytes]:
        yield f'"format": "{FORMAT}", "version": {VERSION}, "step": {self.step}, '.encode()
        yield f'"saved": {json.dumps(self.saved)},\n"layout": {json.dumps(self.layout)},\n"files": '.encode()
        yield from json_object({name: entry.lines for name, entry in self.files.items()})
        yield b',\n"groups": '
        yield from json_object({group: table.text for group, table in self.tables.items()})
        yield f',\n"objects": {json.dumps(self.objects)},\n"total_bytes": {self.total_bytes}}}\n'.encode()


def load_manifest(storage: "Storage", folder: str) -> Manifest:
    """Read and check ``manifest.json`` of a folder; CheckpointError."""
    place = f"{storage.where}/{folder}".rstrip("/")
    try:
        data = storage.read(f"{folder}/{NAME}".lstrip("/"))
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or error
        raise CheckpointError(f"{place} is not a complete checkpoint: {NAME}: {reason}", key=NAME) from error
    return parse_manifest(data, f"{place}/{NAME}")


def parse_manifest(data: bytes, path: str) -> Manifest:
    """Parse a manifest; CheckpointError with the first field that is wrong."""
    first = _FIRST_LINE.match(data)
    sound = first is not None and xxhash.xxh3_64_hexdigest(memoryview(data)[first.end() :]).encode() == first[1]
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is corrupt: not readable as JSON ({error})", key=f"{NAME}.syntax") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a Tilth checkpoint", key=f"{NAME}.format")
    if body.get("version") != VERSION:
        message = f"{path} has format version {body.get('version')}; this Tilth reads version {VERSION}"
        raise CheckpointError(message, key=f"{NAME}.version")
    if not sound:
        raise CheckpointError(f"{path} is corrupt: its checksum does not match its contents", key=f"{NAME}.checksum")
    del body["checksum"]
    try:
        return _checked(body)
    except WrongField as error:
        message = f"{path} is not a valid manifest: {error.field}: {error}"
        raise CheckpointError(message, key=f"{NAME}.{error.key}") from error
    except ValidationError as error:
        field, problem = _first_error(error)
        raise CheckpointError(f"{path} is not a valid manifest: {field}: {problem}", key=f"{NAME}.{field}") from error


def _checked(body: Mapping[str, Any]) -> Manifest:
    """Return the manifest in a JSON object; ValidationError or WrongField for the first field that is wrong."""
    head = _Head(**body)
    manifest = Manifest(head.step, head.saved, head.layout, head.files, _tables(head), head.objects, head.total_bytes)
    for problem in _contradictions(manifest):
        raise problem
    return manifest


def _first_error(error: ValidationError) -> tuple[str, str]:
    """Return the dotted place of the first wrong field, and its message."""
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])), first["msg"]


def _tables(head: _Head) -> dict[str, TensorTable]:
    """Return the tensors of each group. Each box has a checksum or more, unless its tensor is empty. WrongField."""
    boxes = sum(entry.tiles for entry in head.files.values()) + sum(map(len, head.groups.values()))
    tables: dict[str, TensorTable] = {}
    for group, tensors in head.groups.items():
        tables[group] = TensorTable(rows_of(group, tensors, len(head.files), boxes))
        boxes -= sum(len(row.file) for row in tables[group].rows.values())
    return tables


def _contradictions(manifest: Manifest) -> Iterator[WrongField]:
    """Yield contradictions between files and tensors."""
    try:
        Mesh.from_json(manifest.layout["mesh"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        yield WrongField(f"{type(error).__name__}: {error}", key="layout.mesh")
    named = [(f"{group}.{name}", row) for group, table in manifest.tables.items() for name, row in table.rows.items()]
    pieces = manifest.pieces
    files = list(manifest.files.items())
    at = pieces.gap()
    if at >= 0:
        owner = np.searchsorted(np.cumsum([len(row.file) for _, row in named]), at, side="right")
        name = files[pieces.file[at]][0]
        message = f"{pieces.byte0[at]} of file {name} is not where the piece before it ends"
        yield WrongField(message, key=f"groups.{named[owner][0]}.byte0", fault="gap")
    counts = np.bincount(pieces.file, pieces.tiles, len(files)).astype(np.int64)
    ends = np.bincount(pieces.file, pieces.nbytes, len(files)).astype(np.int64)
    for (name, entry), count, end in zip(files, counts.tolist(), ends.tolist()):
        if entry.nbytes != entry.header_nbytes + end:
            message = f"{entry.nbytes}, its tensors and header need {entry.header_nbytes + end}"
            yield WrongField(message, key=f"files.{name}.nbytes", fault="sum")
        if entry.tiles != count:
            yield WrongField(
                f"there are {entry.tiles}, its tensors need {count}", key=f"files.{name}.checksums", fault="count"
            )
    total = sum(entry.nbytes for entry in manifest.files.values())
    if total != manifest.total_bytes:
        yield WrongField(f"{manifest.total_bytes}, the files have {total}", key="total_bytes", fault="sum")


class Report(_Entry):
    """A worker's report to the controller, as JSON: what one rank wrote of one group in one save."""

    folder: str  # name of the temporary folder, which identifies the save
    group: str
    rank: Rank
    ranks: tuple[tuple[Rank, Rank], ...]  # all ranks that hold some of the group, as intervals [start, stop)
    digest: str  # of the plan that it followed
    file: FileName | Literal[""]  # empty: nothing to write
    entry: FileEntry | None
    table: dict[str, Any] | None  # ``spec_table`` of all tensors, in the report of the lowest rank


def report_of(
    folder: str, group: str, rank: int, plan: GroupPlan, file: str = "", entry: FileEntry | None = None
) -> Report:
    """Return the report of a rank that followed this plan; ``file`` and ``entry`` if it wrote something."""
    ranks = plan.ranks or (rank,)
    table = spec_table(plan.specs) if rank == ranks[0] else None
    return Report(
        folder=folder, group=group, rank=rank, ranks=intervals(ranks), digest=plan.digest, file=file, entry=entry,
        table=table,
    )  # fmt: skip


def parse_report(data: bytes | str, where: str) -> Report:
    """Parse a report; CheckpointError with ``where`` and the first field that is wrong."""
    try:
        return Report.model_validate_json(data)
    except ValidationError as error:
        field, message = _first_error(error)
        message = f"{where} is not a report of a rank: {field}: {message}"
        raise CheckpointError(message, key=f"report.{field}".rstrip(".")) from error


def intervals(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return numbers as the fewest intervals [start, stop)."""
    found: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        start = found.pop()[0] if found and found[-1][1] == rank else rank
        found.append((start, rank + 1))
    return tuple(found)


def assemble(
    folder: str, step: int, reports: Iterable[Report], objects: Mapping[str, Any], *, saved: str,
    layout: Mesh | None = None, expected: Mapping[str, Collection[int]] | None = None,
) -> Manifest:  # fmt: skip
    """Make the manifest of a save from the reports of all ranks, in any order.

    expected: the ranks of each group, groups in order (default: those that the reports name). layout: the mesh of the
    writers (default: their ranks as they are). The plan is made again from the table of the lowest rank, so that a
    report holds only sizes and checksums. CheckpointError unless there is exactly one report of each rank, all of this
    save and of one plan, with the files of that plan.
    """
    reports = list(reports)
    raise_problems(folder, _foreign_reports(folder, reports))
    groups: dict[str, list[Report]] = {group: [] for group in expected or {}}
    for report in reports:
        groups.setdefault(report.group, []).append(report)
    files: dict[str, FileEntry] = {}
    tables: dict[str, TensorTable] = {}
    for group, members in groups.items():
        members.sort(key=lambda report: report.rank)
        raise_problems(folder, _wrong_ranks(group, members, None if expected is None else expected.get(group, ())))
        plan = _common_plan(folder, members)
        for report in members:
            if report.entry and files.setdefault(report.file, report.entry) is not report.entry:
                message = f"checkpoint {folder}: two ranks wrote a file {report.file}"
                raise CheckpointError(message, key=f"{report.file}.writers")
        raise_problems(folder, _wrong_files(plan, members))
        tables[group] = _planned_table(plan, len(files) - sum(plan.writes))
    mesh = layout or _world(reports)
    total = sum(entry.nbytes for entry in files.values())
    return Manifest(step, saved, {"mesh": mesh.to_json()}, files, tables, dict(objects), total)


def raise_problems(place: object, problems: Iterable[CheckpointError]) -> None:
    """Raise a CheckpointError of one line if there are any: the first ``_SHOWN`` of them, with the key of the first."""
    found = list(problems)
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise CheckpointError(f"checkpoint {place}: {'; '.join(map(str, found[:_SHOWN]))}{more}", key=found[0].key)


def _rank_of(report: Report) -> str:
    return f"rank {report.rank} of group {report.group}"


def _world(reports: Sequence[Report]) -> Mesh:
    ranks = tuple(sorted({report.rank for report in reports})) or (0,)
    return Mesh(("world",), (len(ranks),), ranks)


def _foreign_reports(folder: str, reports: Iterable[Report]) -> Iterator[CheckpointError]:
    """Yield reports of another save."""
    for report in reports:
        if report.folder != folder:
            message = f"the report of {_rank_of(report)} was written for {report.folder}"
            yield CheckpointError(message, key=f"{report.group}.rank{report.rank}.folder")


def _wrong_ranks(group: str, reports: Sequence[Report], expected: Collection[int] | None) -> Iterator[CheckpointError]:
    there = Counter(report.rank for report in reports)
    named = {rank for interval in {i for report in reports for i in report.ranks} for rank in range(*interval)}
    if not reports and not expected:
        yield CheckpointError(f"group {group} has no ranks", key=f"{group}.ranks")
    for rank in sorted(named.union(expected or ()) - there.keys()):
        yield CheckpointError(f"group {group} has no part of rank {rank}", key=f"{group}.rank{rank}.missing")
    for rank, count in there.items():
        if count > 1:
            yield CheckpointError(f"group {group} has {count} parts of rank {rank}", key=f"{group}.rank{rank}.twice")
        if expected is not None and rank not in expected:
            message = f"group {group} has a part of rank {rank}, of which none was expected"
            yield CheckpointError(message, key=f"{group}.rank{rank}.unexpected")


def _common_plan(folder: str, reports: Sequence[Report]) -> GroupPlan:
    """Return the plan that all of these followed; sorted by rank."""
    first = reports[0]
    if first.table is None:
        message = f"checkpoint {folder}: the report of {_rank_of(first)} has no table of its tensors"
        raise CheckpointError(message, key=f"{first.group}.rank{first.rank}.table")
    plan = plan_group(specs_of(first.table))
    raise_problems(folder, _wrong_plans(plan, reports))
    return plan


def _wrong_plans(plan: GroupPlan, reports: Sequence[Report]) -> Iterator[CheckpointError]:
    """Yield ranks that followed another plan than the first one, or that are in no mesh of it."""
    for report in reports:
        if report.digest != plan.digest:
            message = (
                f"the plan of {_rank_of(report)} is {report.digest}, that of rank {reports[0].rank} is {plan.digest}: "
                "names, shapes, dtypes or layouts differ between them"
            )
            yield CheckpointError(message, key=f"{report.group}.rank{report.rank}.digest")
    known = set(plan.ranks) or {report.rank for report in reports}
    for report in reports:
        if report.rank not in known:
            yield CheckpointError(
                f"{_rank_of(report)} is in no mesh of it", key=f"{report.group}.rank{report.rank}.mesh"
            )


def _wrong_files(plan: GroupPlan, reports: Sequence[Report]) -> Iterator[CheckpointError]:
    """Yield files of these ranks, sorted, that are not as planned."""
    planned = zip(reports, plan.writes, plan.nbytes, plan.tiles)
    for report, writes, nbytes, count in planned:
        entry, file, key = report.entry, report.file, f"{report.group}.rank{report.rank}.file"
        if entry is None or not file:
            if writes:
                yield CheckpointError(
                    f"{_rank_of(report)} wrote no file; it has {nbytes} bytes to write", key=f"{key}.missing"
                )
        elif not writes:
            yield CheckpointError(f"{_rank_of(report)} wrote {file}; it has nothing to write", key=f"{key}.unexpected")
        elif entry.group != report.group:
            yield CheckpointError(
                f"file {file} of {_rank_of(report)} names the group {entry.group}", key=f"{file}.group"
            )
        elif entry.nbytes - entry.header_nbytes != nbytes:
            message = f"file {file} has {entry.nbytes - entry.header_nbytes} bytes of data, planned are {nbytes}"
            yield CheckpointError(message, key=f"{file}.nbytes")
        elif entry.tiles != count:
            message = f"file {file} has {entry.tiles} checksums, planned are {count}"
            yield CheckpointError(message, key=f"{file}.checksums")


@lru_cache(maxsize=8)
def _planned_table(plan: GroupPlan, files: int) -> TensorTable:
    """Return the tensors of a plan, whose files come behind ``files`` others; its text is made once."""
    return TensorTable(plan.rows(files + np.cumsum(plan.writes) - 1))
