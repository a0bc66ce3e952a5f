"""Dumps of PyTorch's flight recorder (the last collectives of each process group) as one plain table per rank.

Sources: files that NCCL's watchdog writes, ``torch._C._distributed_c10d._dump_fr_trace`` as pickle or JSON, ``dump``. A
pickle is decoded without unpickling, and every field is checked: any file at all gives a table or a DataError.
"""

import json
import pickletools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tilth.core.errors import DataError

LARGEST = 1 << 25
"""Bytes of a dump; the recorder's default of 2,000 operations with stacks takes about 2 MB."""
_VALUES = 1 << 23
"""Values of a dump, each use of a shared one counted: a pickle refers to a whole table in two bytes."""
_CHARACTERS = 32
"""Characters of a text that count as one value."""
_NAME = re.compile(r"(\d+)(\.json|\.pkl|\.pickle)?$")
_PEER = re.compile(r"(?:send \d+->|recv \d+<-)(\d+)$")
_WRAPPERS = ("/torch/", "/typing_extensions.py", "/contextlib.py")
"""Parts of the paths of frames between a collective and the code that called it."""


class RecordedOp(NamedTuple):
    """One operation of the recorder's ring; p2p: a send or receive."""

    group: str
    seq: int
    """Number of the collective in its group; of the send or receive, if it is one."""
    op: str
    """Name without the backend: "all_reduce", "_reduce_scatter_base", "send 0->3"."""
    p2p: bool
    peer: int
    """Other rank of a send or receive; -1: none, or unknown."""
    sizes: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    pending: bool
    frames: tuple[str, ...]
    """Stack, innermost first: "file:line in function"; () if not recorded."""
    created: int
    """ns since 1970."""
    number: int
    """Position among all operations of its process."""
    backend: str

    @property
    def site(self) -> str:
        """Innermost frame outside torch; "" if not recorded."""
        return outside(self.frames)


def outside(frames: Iterable[str]) -> str:
    """Return the innermost frame outside torch; "" if there is none. frames: as ``RecordedOp.frames``."""
    return next((f for f in frames if not any(part in f for part in _WRAPPERS)), "")


class GroupProgress(NamedTuple):
    """Last collectives of one rank in one group, by number in the group."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """Members; () if the dump does not say."""
    enqueued: int
    started: int
    completed: int


@dataclass(frozen=True)
class FlightDump:
    """One rank's dump."""

    rank: int
    version: str
    groups: Mapping[str, GroupProgress]
    ops: tuple[RecordedOp, ...]
    """In the order in which they were enqueued."""
    unnamed: tuple[int, ...] = ()
    """Local numbers of groups whose name cannot be found out; they are not in ``groups``."""


class _Fields:
    """Reads checked fields of a decoded dump; DataError names source and field."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.budget = _VALUES

    def wrong(self, field: str, value: Any, wanted: str) -> DataError:
        plain = value is None or isinstance(value, str) or (isinstance(value, int | float) and abs(value) < 1e300)
        text = repr(value) if plain else f"a {type(value).__name__}"
        return DataError(f"{self.source}: {field}={text[:80]} is not {wanted}", key=f"{self.source}.{field}")

    def _count(self, n: int) -> None:
        self.budget -= n
        if self.budget < 0:
            raise DataError(f"{self.source}: has more than {_VALUES} values", key=self.source)

    def table(self, value: Any, field: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.wrong(field, value, "a table")
        self._count(1 + len(value))
        return {str(key): item for key, item in value.items()}

    def items(self, value: Any, field: str) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise self.wrong(field, value, "a list")
        self._count(1 + len(value))
        return list(value)

    def number(self, value: Any, field: str) -> int:
        """Return an integer, also from its text, which torch's JSON has."""
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,20}", value):
            return int(value)
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) >= 1 << 64:
            raise self.wrong(field, value, "an integer of 64 bits")
        return value

    def text(self, value: Any, field: str) -> str:
        if not isinstance(value, str):
            raise self.wrong(field, value, "a text")
        self._count(len(value) // _CHARACTERS)
        return value

    def flag(self, value: Any, field: str) -> bool:
        if not isinstance(value, bool):
            raise self.wrong(field, value, "true or false")
        return value

    def numbers(self, value: Any, field: str) -> tuple[int, ...]:
        return tuple(self.number(item, field) for item in self.items(value, field))

    def shapes(self, value: Any, field: str) -> tuple[tuple[int, ...], ...]:
        return tuple(self.numbers(item, field) for item in self.items(value, field))

    def ranks(self, value: Any, field: str) -> tuple[int, ...]:
        """Return the ranks of a group, which torch writes as text, "[0, 2]"."""
        if not isinstance(value, str):
            return self.numbers(value, field)
        if not re.fullmatch(r"\[[\d\s,]*\]", self.text(value, field)):
            raise self.wrong(field, value, "a list of ranks")
        self._count(value.count(","))
        inner = value[1:-1].strip()
        return self.numbers([text.strip() for text in inner.split(",")] if inner else [], field)


def parse(data: bytes, rank: int, source: str) -> FlightDump:
    """Return a dump, pickled or JSON, as a table; DataError names the source and the field. source: name in errors."""
    if len(data) > LARGEST:
        raise DataError(f"{source}: {len(data)} bytes; a dump has at most {LARGEST}", key=source)
    fields = _Fields(source)
    value = decode(data, source) if data[:1] == b"\x80" else _json(data, source)
    top = fields.table(value, "dump")
    for name in ("version", "pg_config", "pg_status", "entries"):
        if name not in top:
            raise DataError(f"{source}: {name} is missing; not a dump of the flight recorder", key=f"{source}.{name}")
    config = _config(fields, top["pg_config"])
    raw = [fields.table(entry, "entries") for entry in fields.items(top["entries"], "entries")]
    local = dict[int, tuple[str, str]]()
    ops = [_operation(fields, entry, config, local) for entry in raw]
    groups, unnamed = _progress(fields, top["pg_status"], config, local)
    ops.sort(key=lambda op: op.number)
    gloo = defaultdict[str, list[RecordedOp]](list)
    for op in ops:
        if op.backend == "gloo" and not op.p2p:
            gloo[op.group].append(op)
    groups = {name: _by_entries(group, gloo.get(name, ())) for name, group in groups.items()}
    return FlightDump(rank, fields.text(top["version"], "version"), groups, tuple(ops), unnamed)


def _json(data: bytes, source: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}: neither a pickle nor JSON: {error}", key=source) from None


def _config(fields: _Fields, value: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name -> (description, ranks)."""
    found = {}
    for name, config in fields.table(value, "pg_config").items():
        row = fields.table(config, "pg_config")
        ranks = fields.ranks(row.get("ranks"), "pg_config.ranks")
        if name:  # gloo has one group without a name
            found[name] = (fields.text(row.get("desc"), "pg_config.desc"), ranks)
    return found


def _operation(
    fields: _Fields,
    entry: dict[str, Any],
    config: Mapping[str, tuple[str, tuple[int, ...]]],
    local: dict[int, tuple[str, str]],
) -> RecordedOp:
    """Return one entry; adds local number -> (name, description) of its group to ``local``."""
    pair = [fields.text(part, "process_group") for part in fields.items(entry.get("process_group"), "process_group")]
    if len(pair) != 2:
        raise fields.wrong("process_group", pair, "a name and a description")
    name, pg_id = pair[0], fields.number(entry.get("pg_id"), "pg_id")
    if local.setdefault(pg_id, (pair[0], pair[1]))[0] != name:
        raise fields.wrong("pg_id", pg_id, f"the number of one group: {local[pg_id][0]!r} and {name!r}")
    backend, _, op = fields.text(entry.get("profiling_name"), "profiling_name").rpartition(":")
    p2p = fields.flag(entry.get("is_p2p"), "is_p2p")
    ranks, peer = config.get(name, ("", ()))[1], _PEER.search(op)
    place = int(peer[1]) if peer and len(peer[1]) < 10 else len(ranks)
    state = fields.text(entry.get("state"), "state")
    return RecordedOp(
        group=name,
        seq=fields.number(entry.get("p2p_seq_id" if p2p else "collective_seq_id"), "seq_id"),
        op=op,
        p2p=p2p,
        peer=ranks[place] if place < len(ranks) else -1,
        sizes=fields.shapes(entry.get("input_sizes"), "input_sizes"),
        outputs=fields.shapes(entry.get("output_sizes"), "output_sizes"),
        dtypes=tuple(fields.text(t, "input_dtypes") for t in fields.items(entry.get("input_dtypes"), "input_dtypes")),
        pending=state != "completed" and not fields.flag(entry.get("retired"), "retired"),
        frames=tuple(_frame(fields, frame) for frame in fields.items(entry.get("frames", ()), "frames")),
        created=fields.number(entry.get("time_created_ns"), "time_created_ns"),
        number=fields.number(entry.get("record_id"), "record_id"),
        backend=backend,
    )


def _frame(fields: _Fields, value: Any) -> str:
    row = fields.table(value, "frames")
    file, line = fields.text(row.get("filename"), "filename"), fields.number(row.get("line"), "line")
    return f"{file}:{line} in {fields.text(row.get('name'), 'name')}"


def _progress(
    fields: _Fields, value: Any, config: Mapping[str, tuple[str, tuple[int, ...]]], local: Mapping[int, tuple[str, str]]
) -> tuple[dict[str, GroupProgress], tuple[int, ...]]:
    """Return the state of each group, and the local numbers without a name.

    The status has local numbers, the configuration has names. An entry knows both; for the rest both, sorted as
    numbers, are in one order, the order of creation. It is used only if it agrees with every entry.
    """
    status = {fields.number(key, "pg_status"): row for key, row in fields.table(value, "pg_status").items()}
    names = {number: name for number, (name, _) in local.items()}
    if len(config) == len(status) and all(re.fullmatch(r"\d{1,18}", name) for name in config):
        ordered = dict(zip(sorted(status), sorted(config, key=int)))
        names = ordered if all(ordered.get(number) == name for number, name in names.items()) else names
    found, unnamed = {}, []
    for number, row in sorted(status.items()):
        if number not in names:
            unnamed.append(number)
            continue
        name, row = names[number], fields.table(row, "pg_status")
        description, ranks = config.get(name, (local.get(number, ("", ""))[1], ()))
        marks = (fields.number(row.get(f"last_{mark}_collective"), f"last_{mark}") for mark in _MARKS)
        found[name] = GroupProgress(name, description, ranks, *marks)
    return found, tuple(unnamed)


_MARKS = ("enqueued", "started", "completed")


def _by_entries(group: GroupProgress, ops: Collection[RecordedOp]) -> GroupProgress:
    """Return the state by the entries for gloo, whose status counts sends and receives among the collectives.

    ops: the group's collectives by gloo.
    """
    if not ops:
        return group
    last = max(op.seq for op in ops)
    return group._replace(enqueued=last, completed=min((op.seq - 1 for op in ops if op.pending), default=last))


def read_dumps(folder: Path) -> dict[int, FlightDump]:
    """Return rank -> dump of the files of a folder whose names end with the rank; DataError for none, or a bad one."""
    found = dict[int, FlightDump]()
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (name := _NAME.search(path.name)) and path.is_file():
            rank = int(name[1])
            if rank in found:
                raise DataError(f"{path}: a second dump of rank {rank}", key=path.name)
            with path.open("rb") as file:
                found[rank] = parse(file.read(LARGEST + 1), rank, path.name)
    if not found:
        raise DataError(f"{folder}: no file whose name ends with a rank, as NCCL writes them", key=str(folder))
    return found


def living_groups() -> dict[str, tuple[int, ...]]:
    """Return name -> ranks of every process group of this process."""
    from torch.distributed import distributed_c10d as c10d

    world = c10d._world  # no public name lists the groups of a process
    return {str(name): tuple(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}


def dump(last: int = 200, frames: bool = True) -> bytes:
    """Return this process's recorder as JSON, which ``parse`` reads; any thread may call it while others wait.

    Groups have their ranks, which gloo does not record. last: newest operations. frames: with their stacks, for which
    torch imports its compiler the first time (1 s, 80 MB).
    """
    from torch._C import _distributed_c10d as c10d  # where torch was built without it, there is nothing to dump

    recorded = getattr(c10d, "_dump_fr_trace")(includeStackTraces=frames)  # noqa: B009 - not in its types
    value = decode(recorded, "flight recorder")
    entries = sorted(value["entries"], key=lambda entry: entry["record_id"])[-last:]
    named = {e["process_group"][0]: e["process_group"][1] for e in value["entries"]}
    config = {key: row for key, row in value["pg_config"].items() if key}
    for name, ranks in living_groups().items():
        config.setdefault(name, {"name": name, "desc": named.get(name, ""), "ranks": str(list(ranks))})
    return json.dumps({**value, "pg_config": config, "entries": entries}).encode()


# ---- pickled plain values, decoded without unpickling: no class, no call, no import ----

MOST = 1 << 23
"""Operations of a pickle. Each may make a container of 64 bytes; 20,000 recorded collectives take about 2,000,000."""
_PLAIN = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT"})
_PLAIN |= {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARKED = frozenset({"LIST", "TUPLE", "DICT", "APPENDS", "SETITEMS"})
_PUT, _GET = frozenset({"PUT", "BINPUT", "LONG_BINPUT"}), frozenset({"GET", "BINGET", "LONG_BINGET"})


class _Machine:
    """Stack machine for the operations of a pickle that make plain values; ValueError for any other one."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _PLAIN:
            self.stack.append(argument)
        elif name in _PUT:
            self.memo[argument] = self._top()
        elif name in _GET:
            if argument not in self.memo:
                raise ValueError(f"refers to value {argument}, which is not there")
            self.stack.append(self.memo[argument])
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self._top()
        elif name in _MARKED:
            self._collect(name, self._since_mark())
        elif name in ("APPEND", "SETITEM"):
            self._collect(f"{name}S", self._take(1 if name == "APPEND" else 2))
        elif name in _TUPLES:
            self._collect("TUPLE", self._take(_TUPLES[name]))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"has the operation {name}, which plain values do not need")

    def _collect(self, name: str, items: list[Any]) -> None:
        """Make a container of these items, or add them to the one on top."""
        if name in ("LIST", "TUPLE"):
            self.stack.append(items if name == "LIST" else tuple(items))
            return
        if name == "DICT":
            self.stack.append({})
        target = self._top()
        if not isinstance(target, list if name == "APPENDS" else dict):
            raise ValueError(f"adds to a {type(target).__name__}")
        if isinstance(target, list):
            target.extend(items)
        elif len(items) % 2 or not all(_is_key(key) for key in items[::2]):
            raise ValueError("has a table whose keys are neither texts nor integers of 64 bits")
        else:
            target.update(zip(items[::2], items[1::2]))

    def _top(self) -> Any:
        return self._take(1, keep=True)[0]

    def _take(self, n: int, keep: bool = False) -> list[Any]:
        base = self.marks[-1] if self.marks else 0
        if len(self.stack) - base < n:
            raise ValueError("takes a value that is not there")
        taken = self.stack[-n:]
        if not keep:
            del self.stack[-n:]
        return taken

    def _since_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("takes values that are not there")
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken


def _is_key(value: Any) -> bool:
    """Return True for a text or a small integer: larger ones can be chosen to have one hash, and then cost squares."""
    return isinstance(value, str) or (isinstance(value, int) and abs(value) < 1 << 64)


def decode(data: bytes, source: str) -> Any:
    """Return the plain value of a pickle; DataError if it is cut, or needs anything but plain values.

    source: name of the file or process in the error, and its key. Values may share parts, even contain themselves: a
    reader that follows them must count.
    """
    machine = _Machine()
    try:
        for number, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if number >= MOST:
                raise ValueError(f"has more than {MOST} operations")
            machine.step(operation.name, argument)
        if len(machine.stack) != 1 or machine.marks:
            raise ValueError(f"ends with {len(machine.stack)} values instead of one")
    except (ValueError, OverflowError) as error:
        raise DataError(f"{source}: not a pickle of plain values: {error}", key=source) from None
    return machine.stack[0]
