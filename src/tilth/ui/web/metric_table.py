"""Metrics of a run as columns of numbers, read once and then by their new lines, in less memory than records take."""

import copy
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from tilth.runs.metrics import KEYS
from tilth.runs.readers import StepRecords
from tilth.ui import format
from tilth.ui.top import TAIL, end_at, parsed

BLOCK = 16 << 20
"""Bytes of a file that are read at once; a longer line is none of a step."""
FEW = 1 << 16
"""Bytes from which lines are read by Arrow, which takes a tenth of the time of Python but milliseconds to begin."""
RECENT = 100
"""Most new records that are kept whole."""
EVALUATED = ("reward/heldout", "accuracy/", "loss/heldout", "bits_per_byte/")
"""Beginnings of metrics that an evaluation measures."""
_WHOLE = ("step", "attempt", "phase_step", "phase_steps")
Record = dict[str, Any]


class MetricTable:
    """Numbers of the committed steps of a growing ``metrics.jsonl``, ascending by step; a later attempt's replace those
    of an earlier one. Lines that are no record of a step are counted in ``unread``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self._files = -1, 0
        self._clear()

    def _clear(self) -> None:
        self._at, self._rows, self._late, self.unread, self.nbytes, self._end = 0, 0, 0, 0, 0, b""
        self._columns: dict[str, np.ndarray] = {}
        self._phases: list[str] = []

    @property
    def version(self) -> tuple[int, int, int]:
        """Return the file, the bytes read, and the number of rows at or before an earlier step. Where only the bytes
        differ, steps were added behind the last one."""
        return (self._file << 10) + self._files % 1024, self._at, self._late

    def copy(self) -> Self:
        """Return a table that reads on while others read this one: they share the values of the rows so far."""
        found = copy.copy(self)
        found._columns, found._phases = self._columns.copy(), self._phases.copy()
        return found

    def new(self) -> tuple[list[Record], bool]:
        """Read on; return the newest records since the last call, and True if the file was replaced or removed."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            gone, self._file = self._file != -1, -1
            self._clear()
            return [], gone
        with file:
            found = os.fstat(file.fileno())
            again = found.st_ino != self._file or end_at(file, self._at) != self._end
            if again:
                self._clear()
                self._file, self._files = found.st_ino, self._files + 1
            records: list[Record] = []
            begin = file.seek(self._at)
            while block := file.read(BLOCK):
                whole = block[: block.rfind(b"\n") + 1]
                if not whole and len(block) < BLOCK:
                    break
                self.unread += not whole
                self._at += len(whole) or len(block)
                records = [*records, *self._take(whole)][-RECENT:]
                file.seek(self._at)
            self._end = end_at(file, self._at)
        if self._at - begin > BLOCK:
            pa.default_memory_pool().release_unused()
        self.nbytes = sum(column.nbytes for column in self._columns.values())
        return records, again

    def _take(self, lines: bytes) -> list[Record]:
        """Add lines; return the last records among them."""
        if len(lines) > FEW and self._take_table(lines):
            last = lines[max(len(lines) - TAIL, 0) :].splitlines()[-RECENT:]
            return [record for line in last if _is_step(record := parsed(line))]
        values = [parsed(line) for line in lines.splitlines()]
        records = [value for value in values if _is_step(value)]
        self.unread += len(values) - len(records)
        names = dict.fromkeys(name for record in records for name in record)
        self._add({name: [record.get(name) for record in records] for name in names}, len(records))
        return records[-RECENT:]

    def _take_table(self, lines: bytes) -> bool:
        """Add lines by Arrow; False if one of them is no record of a step, so that Python has to say which."""
        options = pj.ReadOptions(use_threads=False, block_size=4 << 20)
        try:
            table = pj.read_json(pa.BufferReader(lines), options)
        except pa.ArrowInvalid:
            return False
        if "step" not in table.column_names or table["step"].type != pa.int64() or table["step"].null_count:
            return False
        self._add({name: table[name] for name in table.column_names}, len(table))
        return True

    def _add(self, columns: dict[str, Sequence[Any] | pa.ChunkedArray], count: int) -> None:
        """Add ``count`` rows; columns of other values than numbers are left out, but for the phases."""
        begin, self._rows = self._rows, self._rows + count
        for name, values in columns.items():
            found = self._phase_codes(values) if name == "phase" else _numbers(values)
            if found is not None or name in self._columns:
                self._room(name, begin)[begin : self._rows] = np.nan if found is None else found
        for name in self._columns.keys() - columns.keys():
            self._room(name, begin)[begin : self._rows] = np.nan
        if not count:
            return
        steps = self._columns["step"][max(begin - 1, 0) : self._rows]
        late = int((steps[1:] <= np.maximum.accumulate(steps)[:-1]).sum())
        self._late += late
        if late:
            self._sort()

    def _room(self, name: str, begin: int) -> np.ndarray:
        """Return a column with room for the rows behind the first ``begin``; memory that no row has is not touched."""
        column = self._columns.get(name)
        if column is None or len(column) < self._rows:
            grown = np.empty(max(2 * begin, self._rows, 256))
            grown[:begin] = np.nan if column is None else column[:begin]
            self._columns[name] = column = grown
        return column

    def _phase_codes(self, values: Sequence[Any] | pa.ChunkedArray) -> np.ndarray:
        plain = values.to_pylist() if isinstance(values, pa.ChunkedArray) else values
        self._phases += [p for p in dict.fromkeys(plain) if isinstance(p, str) and p not in self._phases]
        codes = {name: float(i) for i, name in enumerate(self._phases)}
        return np.array([codes.get(p, np.nan) if isinstance(p, str) else np.nan for p in plain])

    def _sort(self) -> None:
        """Order rows by step, and keep the last of each."""
        steps = self._columns["step"][: self._rows]
        _, place = np.unique(steps[::-1], return_index=True)
        rows = self._rows - 1 - place
        self._columns = {name: column[rows] for name, column in self._columns.items()}
        self._rows = len(rows)

    def __len__(self) -> int:
        return self._rows

    @property
    def names(self) -> list[str]:
        """Return the metrics that any step has, sorted."""
        return sorted(self._columns.keys() - {*KEYS})

    def column(self, name: str) -> np.ndarray:
        """Return a metric of all steps: float64 [n], NaN where it was not measured."""
        return self._columns[name][: self._rows] if name in self._columns else np.full(self._rows, np.nan)

    def record(self, row: int) -> Record:
        """Return a step as a record: what was measured in it."""
        found: Record = {n: float(c[row]) for n, c in self._columns.items() if not np.isnan(c[row])}
        found |= {name: int(found[name]) for name in _WHOLE if name in found}
        return found | ({"phase": self._phases[int(found["phase"])]} if "phase" in found else {})

    def phase_ends(self) -> list[tuple[str, int]]:
        """Return each phase with the row of its last step, in the order of their first ones."""
        codes = self.column("phase")
        return [(self._phases[int(c)], int(np.flatnonzero(codes == c)[-1])) for c in _distinct(codes)]

    def phase_steps(self) -> dict[str, int]:
        """Return the title of each phase with the number of its steps."""
        codes = self.column("phase")
        counts = Counter(codes[~np.isnan(codes)].astype(int).tolist())
        return {format.phase_name(self._phases[int(c)]): counts[int(c)] for c in _distinct(codes)}

    def evaluated(self) -> np.ndarray:
        """Return the steps with an evaluation: bool [n]."""
        columns = [self.column(name) for name in self.names if name.startswith(EVALUATED)]
        return np.logical_or.reduce([~np.isnan(one) for one in columns] or [np.zeros(self._rows, bool)])

    def steps(self) -> StepRecords:
        """Return the steps as ``summarise`` reads them."""
        if not self._rows:
            return StepRecords([], lambda name, beside: [], list)
        wanted = np.zeros(self._rows, bool)
        wanted[[*range(min(2, self._rows)), -1, *(row for _, row in self.phase_ends())]] = True
        codes = self.column("phase")
        wanted[[int(np.flatnonzero(codes == c)[0]) for c in _distinct(codes)]] = True
        wanted |= self.evaluated()
        return StepRecords([self.record(int(row)) for row in np.flatnonzero(wanted)], self._pairs, lambda: self.names)

    def _pairs(self, name: str, beside: str) -> list[tuple[float, float | None]]:
        values, other = self.column(name), self.column(beside)
        rows = ~np.isnan(values)
        return [(v, None if w != w else w) for v, w in zip(values[rows].tolist(), other[rows].tolist())]


def _distinct(codes: np.ndarray) -> list[float]:
    """Return the distinct numbers in the order of their first places."""
    found, first = np.unique(codes[~np.isnan(codes)], return_index=True)
    return [float(code) for code in found[np.argsort(first)]]


def _is_step(value: Any) -> bool:
    """True for the record of a step."""
    if not (isinstance(value, dict) and type(value.get("step")) is int and abs(value["step"]) < 1 << 53):
        return False
    return all(isinstance(value.get(name), int | float | None) for name in (*_WHOLE, "seconds"))


def _numbers(values: Sequence[Any] | pa.ChunkedArray) -> np.ndarray | None:
    """Return float64 [n], NaN where there is no number; None if there is none at all."""
    if isinstance(values, pa.ChunkedArray):
        if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            return None
        return values.cast(pa.float64(), safe=False).to_numpy()
    if not any(type(v) in (int, float) for v in values):
        return None
    return np.array([_float(v) for v in values])


def _float(value: Any) -> float:
    try:
        return float(value) if type(value) in (int, float) else np.nan
    except OverflowError:  # of an integer
        return np.nan
