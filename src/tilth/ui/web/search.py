"""Trajectories of a run by filters, a page at a time, so that a run of a million of them needs no memory."""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tilth.cluster.backends.capacity import core_share
from tilth.core.errors import DataError
from tilth.data.cache import FileState, file_state
from tilth.data.trajectories import COLUMNS, TRAJECTORIES, files_of

PAGE = 50
"""Rows of a page."""
SECONDS = 5.0
"""Seconds after which a search reads no further file."""
READERS = 4
"""Most files that a search reads at the same time, each on a core."""
KEPT, ENTRY, RESTS = 96 << 20, 1 << 10, 30.0
"""See ``Kept``; an entry takes about ``ENTRY`` bytes beside what it holds."""
BYTES, SAMPLED = 1 << 19, 61
"""Bytes of texts that are looked through at once, of which every 61st is counted to know rare ones."""
GROUP = 64
"""Most samples of a group that are shown."""
SHOWN = 400
"""Characters of a prompt and an answer in a table."""
SORTS = ("step", "reward", "length", "id")
FINISHES = ("stop", "length", "error", "env")
_TEXTS = ("prompt_text", "text")
_COLUMNS = ("step", "id", "group", "reward", "finish", "length", "answer", *_TEXTS)
"""Columns of a table of trajectories."""
Row = dict[str, Any]
Spread = tuple[float | None, float | None]


@dataclass(frozen=True)
class Wanted:
    """A search. steps, reward, length: least and greatest; text: part of prompt or answer; None, "": any."""

    steps: tuple[int, int]
    reward: Spread = (None, None)
    length: Spread = (None, None)
    finish: str = ""
    prompt: int | None = None
    text: str = ""
    sort: str = "step"
    down: bool = False
    page: int = 0

    @property
    def order(self) -> list[tuple[str, str]]:
        """Return the keys of the order."""
        order = "descending" if self.down else "ascending"
        return [(self.sort, order), ("step", order), ("id", "ascending")]

    @property
    def columns(self) -> set[str]:
        """Return the columns that decide which rows match, but for texts, and in which order."""
        asked = {"reward": self.reward != (None, None), "length": self.length != (None, None)}
        asked |= {"finish": bool(self.finish), "prompt": self.prompt is not None}
        return {"step", "id", self.sort, *(name for name, needed in asked.items() if needed)}

    def filter(self) -> pc.Expression:
        """Return the condition of a row, besides its text."""
        found = pc.field("step") >= self.steps[0]
        for name, (low, high) in self.ranges.items():
            found = found if low is None else found & (pc.field(name) >= low)
            found = found if high is None else found & (pc.field(name) <= high)
        return found

    @property
    def ranges(self) -> dict[str, tuple[Any, Any]]:
        """Return each column that a row is chosen by -> its least and its greatest value; None: any."""
        low, high = (None if end is None else pa.scalar(end, pa.float32()).as_py() for end in self.reward)
        found = {"step": self.steps, "reward": (low, high), "length": self.length}  # a reward of 0.7 is one in the file
        found |= {"finish": (self.finish, self.finish)} if self.finish else {}
        return found | ({} if self.prompt is None else {"prompt": (self.prompt, self.prompt)})


@dataclass(frozen=True)
class FoundRows:
    """A page of a search: its rows, how many there are on all pages, and notes on what could not be read.

    more: the search ended when the page was full, and ``total`` is of what it read.
    """

    rows: list[Row]
    total: int
    notes: list[str]
    more: bool = False


def newest_step(run: Path) -> int | None:
    """Return the last step whose trajectories are on disk."""
    files = files_of(run / TRAJECTORIES)
    return max(last for _, last, _ in files) if files else None


class Matches(NamedTuple):
    """Rows of a file that match: how many, the first ones in the order of the search, why it cannot be read."""

    number: int
    first: pa.Table | None
    note: str


def search(run: Path, wanted: Wanted) -> FoundRows:
    """Return a page of the trajectories that match.

    The columns that decide are read of all files, and of each the rows that may be on the page are kept; the other
    columns only of the groups of rows that have one of the page. For a text in the order of steps no more files are
    read than fill the page.
    """
    files = [one for one in files_of(run / TRAJECTORIES) if _meets(*one[:2], wanted.steps)]
    ends = bool(wanted.text) and wanted.sort == "step" and all(one[1] < other[0] for one, other in pairwise(files))
    paths = [path for _, _, path in (reversed(files) if ends and wanted.down else files)]
    late, most, numbers = time.monotonic() + SECONDS, (wanted.page + 1) * PAGE, list[int]()
    chosen = wanted.filter()  # 1 ms, as pyarrow looks for modules at each constant

    def match(path: Path) -> Matches | None:
        if time.monotonic() > late or (ends and sum(numbers) > most):  # files begin in their order
            return None
        one = _match(path, wanted, chosen, most)
        numbers.append(one.number)
        return one

    with ThreadPoolExecutor(min(core_share(1), READERS), "search") as pool:
        found = [*pool.map(match, paths)]
        read = [one for one in found if one is not None]
        notes, more = [one.note for one in read if one.note], len(read) < len(paths)
        if more and not (ends and sum(numbers) > most):
            notes.append(f"only {len(read)} of {len(paths)} files are searched; narrow the steps")
            more = False
        tables = [
            one.first.append_column("file", pa.array(np.full(len(one.first), number, np.int32)))
            for number, one in enumerate(found)
            if one is not None and one.first is not None
        ]
        if not tables:
            return FoundRows([], 0, notes)
        whole = pa.concat_tables(tables)
        page = whole.take(pc.sort_indices(whole, wanted.order)[most - PAGE : most]).select(["file", "place"])
        places = [(row["file"], row["place"]) for row in page.to_pylist()]
        rows = _rows_at(paths, places, pool, notes)
    del whole, tables, found
    pa.default_memory_pool().release_unused()
    return FoundRows(rows, sum(one.number for one in read), notes, more)


def _match(path: Path, wanted: Wanted, chosen: pc.Expression, most: int) -> Matches:
    """Return the rows of a file that match, of which the first ``most`` are kept."""
    try:
        file = _stored(path, state := file_state(path))
        ranges = wanted.ranges
        groups = [group for group in range(len(file.starts) - 1) if file.may_have(group, ranges)]
        if not groups:
            return Matches(0, None, "")
        places = file.rows_of(groups)
        if wanted.text:
            places = places[np.unpackbits(_saying(path, state, tuple(groups), wanted.text), count=len(places)) > 0]
            if not len(places):
                return Matches(0, None, "")
            groups = np.unique(np.searchsorted(file.starts, places, "right") - 1).tolist()  # no others are read further
        rows = file.rows_of(groups)
        table = file.columns(groups, wanted.columns).append_column("place", pa.array(rows))
        table = table if len(places) == len(rows) else table.take(pa.array(np.searchsorted(rows, places)))
        table = table.filter(chosen)
        return Matches(len(table), _first(table.select([*{"step", "id", wanted.sort}, "place"]), wanted, most), "")
    except (pa.ArrowException, OSError) as error:
        if not path.exists():  # a resume has just dropped it
            return Matches(0, None, "")
        return Matches(0, None, f"{path.name} cannot be read and is left out: {str(error).splitlines()[0][:200]}")


class Kept:
    """Values that searches have read from files, for the next searches: ``KEPT`` bytes at most. A value makes room for
    another one ``RESTS`` seconds after its last use, so that of a run that does not fit, what fits is kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[Any, tuple[float, int, Any]] = {}
        """Key -> when it was used, its bytes, the value; the newest use is the last."""
        self._nbytes = 0

    def get(self, key: Any) -> Any:
        """Return a value, or None."""
        with self._lock:
            if (found := self._values.pop(key, None)) is not None:
                self._values[key] = time.monotonic(), *found[1:]
            return found and found[2]

    def put(self, key: Any, value: Any, nbytes: int) -> None:
        """Keep a value, if there is room or others have not been used lately. nbytes: of it and of its key's parts."""
        nbytes += ENTRY
        if nbytes > KEPT:
            return
        with self._lock:
            self._drop(key)
            now = time.monotonic()
            while self._nbytes + nbytes > KEPT and (first := next(iter(self._values), None)) is not None:
                if now - self._values[first][0] <= RESTS:
                    return
                self._drop(first)
            self._values[key] = now, nbytes, value
            self._nbytes += nbytes

    def _drop(self, key: Any) -> None:
        self._nbytes -= self._values.pop(key, (0.0, 0, None))[1]


_KEPT = Kept()


class StoredFile:
    """A file of trajectories in one state. starts: the first row of each group of rows, and their number."""

    def __init__(self, path: Path, state: FileState) -> None:
        self._path, self._state, self._about = path, state, pq.read_metadata(path)
        self._schema = self._about.schema.to_arrow_schema()
        counts = [self._about.row_group(group).num_rows for group in range(self._about.num_row_groups)]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._bounds: dict[str, list[Spread]] = {}
        self.nbytes = 4 * self._about.serialized_size  # about what it takes once it is read

    def rows_of(self, groups: Sequence[int]) -> np.ndarray:
        """Return the places of the rows of groups of rows: int64 [n]."""
        spans = (np.arange(self.starts[g], self.starts[g + 1]) for g in groups)
        return np.concatenate([np.zeros(0, np.int64), *spans])

    def bounds(self, name: str) -> list[Any]:
        """Return the least and the greatest value of a column in each group of rows; None where it does not say."""
        if name not in self._bounds:
            groups = [self._about.row_group(group) for group in range(len(self.starts) - 1)]
            paths = [self._about.schema.column(place).path for place in range(self._about.num_columns)]
            known = [group.column(paths.index(name)).statistics if name in paths else None for group in groups]
            self._bounds[name] = [_ends(one, {"finish": str, "reward": float}.get(name, int)) for one in known]
        return self._bounds[name]

    def may_have(self, group: int, ranges: Mapping[str, tuple[Any, Any]]) -> bool:
        """Return False for a group of rows of which none can have all columns within their ranges."""
        return all(
            (low is None or most is None or most >= low) and (high is None or least is None or least <= high)
            for name, (low, high) in ranges.items()
            if (low, high) != (None, None)
            for least, most in [self.bounds(name)[group]]
        )

    def columns(self, groups: Sequence[int], names: Iterable[str]) -> pa.Table:
        """Return columns of groups of rows, null where the file has none; files of earlier versions have no lengths."""
        wanted, all_groups, found = [*names], len(groups) == len(self.starts) - 1, dict[str, pa.ChunkedArray]()
        for name in wanted:
            if (column := _KEPT.get((self._path, self._state, name))) is not None:
                spans = [] if all_groups else [(self.starts[group], self.starts[group + 1]) for group in groups]
                chunks = [chunk for begin, end in spans for chunk in column.slice(begin, end - begin).chunks]
                found[name] = column if all_groups else pa.chunked_array(chunks, column.type)
        absent = [name for name in wanted if name not in found]
        read = self._read(groups, absent) if absent else {}
        for name, column in read.items() if all_groups else ():
            read[name] = whole = pa.chunked_array([column.combine_chunks()], column.type)
            _KEPT.put((self._path, self._state, name), whole, whole.nbytes)
        return pa.table({name: found.get(name, read.get(name)) for name in wanted})

    def _read(self, groups: Sequence[int], wanted: Sequence[str]) -> dict[str, pa.ChunkedArray]:
        there = self._schema.names
        counted = "length" in wanted and "length" not in there and "tokens" in there
        read = [n for n in wanted if n in there] + (["tokens", "prompt_length"] if counted else [])
        repeating = [name for name in ("prompt_text",) if name in there]  # read as a dictionary
        with pq.ParquetFile(self._path, read_dictionary=repeating, metadata=self._about) as file:
            table = file.read_row_groups([*groups], columns=read, use_threads=False)
        found = {}
        for name in wanted:
            kind = COLUMNS.field(name).type
            if name == "length" and counted:
                found[name] = pc.subtract(pc.list_value_length(table["tokens"]), table["prompt_length"])
            elif name in there:
                dictionary = pa.types.is_dictionary(table[name].type)
                found[name] = table[name] if dictionary or table[name].type == kind else table[name].cast(kind)
            else:
                found[name] = pa.chunked_array([pa.nulls(len(table), kind)])
        return found


def _stored(path: Path, state: FileState) -> StoredFile:
    """Return a file, whose metadata are read anew where it was written."""
    if (found := _KEPT.get((path, state))) is None:
        found = StoredFile(path, state)
        _KEPT.put((path, state), found, found.nbytes)
    return found  # type: ignore[no-any-return]


def _saying(path: Path, state: FileState, groups: tuple[int, ...], text: str) -> np.ndarray:
    """Return which rows of groups of rows have a text in prompt or answer, as bits. Other pages and orders ask too."""
    key = path, state, groups, text
    if (found := _KEPT.get(key)) is None:
        texts = _stored(path, state).columns(groups, _TEXTS)
        found = np.packbits(np.logical_or(*(_says(texts[name], text) for name in _TEXTS)))
        _KEPT.put(key, found, found.nbytes + 4 * len(text) + 8 * len(groups))
    return found  # type: ignore[no-any-return]


def _ends(known: pq.Statistics | None, kind: type) -> tuple[Any, Any]:
    """Return the least and the greatest value that statistics have; None where they do not say."""
    if known is None or not known.has_min_max or not isinstance(known.min, kind):
        return None, None
    return known.min, known.max


def _says(column: pa.ChunkedArray, text: str) -> np.ndarray:
    """Return where a text has another one in it, in capitals or not; a text that repeats is looked at once."""
    found = []
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type):
            said = np.append(_says(pa.chunked_array([chunk.dictionary]), text), False)  # the last one is of nulls
            indices = chunk.indices.fill_null(-1) if chunk.null_count else chunk.indices
            found.append(said[indices.to_numpy()] if said.any() else np.zeros(len(chunk), bool))
        else:
            rows = max(len(chunk) * BYTES // max(chunk.nbytes, 1), 1)
            found += [_said(chunk[at : at + rows], text) for at in range(0, len(chunk), rows)]
    return np.concatenate([np.zeros(0, bool), *found])


def _said(texts: pa.StringArray, text: str) -> np.ndarray:
    """Return where texts have another one in them, in capitals or not: its rarest bytes are looked for first, in all
    texts at once, which numpy does beside other threads."""
    if text.lower() != text.upper():
        if not text.isascii():
            found = pc.match_substring(texts, text, ignore_case=True)
            return found.fill_null(False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
        texts, text = pc.ascii_lower(texts), text.lower()
    found, wanted = np.zeros(len(texts), bool), np.frombuffer(text.encode(), np.uint8)
    ends = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    said = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[ends[0] : ends[-1]]
    rare = np.argsort(np.bincount(said[::SAMPLED], minlength=256)[wanted], kind="stable").tolist()
    count = max(len(said) - len(wanted) + 1, 0)
    first, second = (said[place : place + count] == wanted[place] for place in (rare[0], rare[min(1, len(rare) - 1)]))
    at = np.flatnonzero(first & second)
    for place in rare[2:]:
        at = at[said[at + place] == wanted[place]]
    rows = np.searchsorted(ends, at + ends[0], "right") - 1
    found[rows[at + ends[0] + len(wanted) <= ends[rows + 1]]] = True  # others are of two texts
    return found & texts.is_valid().to_numpy(zero_copy_only=False) if texts.null_count else found


def _first(table: pa.Table, wanted: Wanted, most: int) -> pa.Table:
    """Return the first rows in the order of the search, in any order."""
    if len(table) <= most:
        return table
    column = table[wanted.sort]
    known = table.filter(pc.is_valid(column)) if column.null_count else table  # nulls come last
    if len(known) >= most:
        return known.take(pc.select_k_unstable(known, most, wanted.order))
    return table.take(pc.sort_indices(table, wanted.order)[:most])


def _rows_at(
    files: Sequence[Path], places: Sequence[tuple[int, int]], pool: ThreadPoolExecutor, notes: list[str]
) -> list[Row]:
    """Return rows by (file, place), with texts cut to what a table shows; a note for a file that is gone."""
    found: dict[tuple[int, int], Row] = {}

    def read(number: int) -> str:
        mine = np.asarray([place for file, place in places if file == number])
        try:
            file = _stored(files[number], file_state(files[number]))
            groups = np.searchsorted(file.starts, mine, "right") - 1
            for group in np.unique(groups).tolist():
                here = mine[groups == group]
                table = file.columns([group], _COLUMNS).take(pa.array(here - file.starts[group]))
                for name in (*_TEXTS, "answer"):
                    short = pc.utf8_slice_codeunits(table[name].cast(pa.string()), 0, SHOWN)
                    table = table.set_column(table.column_names.index(name), name, short)
                found.update(zip(((number, place) for place in here.tolist()), table.to_pylist()))
        except (pa.ArrowException, OSError) as error:
            return f"{files[number].name} cannot be read: {str(error).splitlines()[0][:200]}"
        return ""

    notes += [note for note in pool.map(read, sorted({file for file, _ in places})) if note]
    return [found[place] for place in places if place in found]


def group_of(run: Path, step: int, group: int | None, one: int | None = None) -> list[Row]:
    """Return the samples of a group at a step, whole, or the one with this id; the best first."""
    here = pc.field("step") == step
    here = here & (pc.field("group") == group if group is not None else pc.field("id") == one)
    found: list[Row] = []
    for first, last, path in files_of(run / TRAJECTORIES):
        if first <= step <= last and path.exists():
            try:
                found += _scanner(path, {n: pc.field(n) for n in COLUMNS.names}, here).head(GROUP).to_pylist()
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{path.name} cannot be read: {error}", key=path.name) from error
    return sorted(found[:GROUP], key=lambda row: (row["reward"] is None, -(row["reward"] or 0.0), row["id"]))


def kept_of(run: Path, step: int) -> int:
    """Return how many samples of a step are on disk."""
    wanted, files = Wanted((step, step)), files_of(run / TRAJECTORIES)
    chosen = wanted.filter()
    there = [path for first, last, path in files if _meets(first, last, wanted.steps)]
    return sum(_match(path, wanted, chosen, 1).number for path in there)


def prompts_of(run: Path, most: int = 500) -> list[str]:
    """Return prompts of the newest file of trajectories, each once."""
    for _, _, path in files_of(run / TRAJECTORIES)[-1:]:
        try:
            found = _scanner(path, {"prompt_text": pc.field("prompt_text")}, pc.scalar(True)).to_table()["prompt_text"]
        except (pa.ArrowException, OSError):
            continue
        return [prompt for prompt in pc.unique(found).to_pylist() if prompt][:most]
    return []


def answers_to(run: Path, prompt: str, most: int = 4) -> list[Row]:
    """Return the newest samples of a prompt, the best first."""
    for _, _, path in reversed(files_of(run / TRAJECTORIES)[-8:]):
        try:
            table = _scanner(path, {n: pc.field(n) for n in COLUMNS.names}, pc.field("prompt_text") == prompt).head(
                GROUP
            )
        except (pa.ArrowException, OSError):
            continue
        if len(table):
            rows = [row for row in table.to_pylist() if row["step"] == pc.max(table["step"]).as_py()]
            return sorted(rows, key=lambda row: -(row["reward"] or 0.0))[:most]
    return []


def _meets(first: int, last: int, steps: tuple[int, int]) -> bool:
    return first <= steps[1] and last >= steps[0]


def _scanner(path: Path, columns: dict[str, pc.Expression], wanted: pc.Expression) -> ds.Scanner:
    data = ds.dataset(path, schema=COLUMNS, format="parquet")
    return data.scanner(columns=columns, filter=wanted, use_threads=False, batch_readahead=1, fragment_readahead=1)
