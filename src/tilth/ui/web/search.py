"""Trajectories of a run by filters, a page at a time, so that a run of a million of them needs no memory."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tilth.core.errors import DataError
from tilth.data.cache import FileState, file_state
from tilth.data.trajectories import COLUMNS, TRAJECTORIES, files_of

PAGE = 50
"""Rows of a page."""
SECONDS = 5.0
"""Seconds after which a search reads no further file."""
READERS = 2
"""Files that a search reads at the same time."""
FILES = 256
"""Files whose metadata are kept."""
ROWS = 4096
"""Texts that are looked through at once."""
GROUP = 64
"""Most samples of a group that are shown."""
SHOWN = 400
"""Characters of a prompt and an answer in a table."""
SORTS = ("step", "reward", "length", "id")
FINISHES = ("stop", "length", "error", "env")
_TEXTS = ("prompt_text", "text")
_COLUMNS = ("step", "id", "group", "prompt", "reward", "finish", "version", "length", "turn_rewards", "answer", *_TEXTS)
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

    @property
    def any_in_steps(self) -> bool:
        """Return True if all rows of the steps match, but for the text."""
        return (self.reward, self.length, self.finish, self.prompt) == ((None, None), (None, None), "", None)

    def filter(self) -> pc.Expression:
        """Return the condition of a row, besides its text."""
        step = pc.field("step")
        found = (step >= self.steps[0]) & (step <= self.steps[1])
        for name, (low, high) in (("reward", self.reward), ("length", self.length)):
            found = found if low is None else found & (pc.field(name) >= low)
            found = found if high is None else found & (pc.field(name) <= high)
        found = found & (pc.field("finish") == self.finish) if self.finish else found
        return found if self.prompt is None else found & (pc.field("prompt") == self.prompt)


@dataclass(frozen=True)
class FoundRows:
    """A page of a search: its rows, how many there are on all pages, and notes on what could not be read."""

    rows: list[Row]
    total: int
    notes: list[str]


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
    columns only of the groups of rows that have one of the page.
    """
    files = [path for first, last, path in files_of(run / TRAJECTORIES) if _meets(first, last, wanted.steps)]
    late, most = time.monotonic() + SECONDS, (wanted.page + 1) * PAGE
    with ThreadPoolExecutor(READERS, "search") as pool:
        found = [*pool.map(lambda path: None if time.monotonic() > late else _match(path, wanted, most), files)]
        read = [one for one in found if one is not None]
        notes = [one.note for one in read if one.note]
        if len(read) < len(files):
            notes.append(f"only {len(read)} of {len(files)} files are searched; narrow the steps")
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
        rows = _rows_at(files, places, pool, notes)
    del whole, tables, found
    pa.default_memory_pool().release_unused()
    return FoundRows(rows, sum(one.number for one in read), notes)


def _match(path: Path, wanted: Wanted, most: int) -> Matches:
    """Return the rows of a file that match, of which the first ``most`` are kept."""
    try:
        with _opened(path, ["prompt_text"] if wanted.text else []) as file:
            starts = _starts(file)
            steps = {g: span for g in range(file.num_row_groups) if _meets(*(span := _steps_of(file, g)), wanted.steps)}
            groups = [*steps]
            places = _rows_of(starts, groups)
            if wanted.text:
                texts = _columns_of(file, groups, _TEXTS)
                places = places[np.logical_or(*(_says(texts[name], wanted.text) for name in _TEXTS))]
                if not len(places):
                    return Matches(0, None, "")
                groups = np.unique(np.searchsorted(starts, places, "right") - 1).tolist()  # no others are read further
            rows = _rows_of(starts, groups)
            table = _columns_of(file, groups, wanted.columns).append_column("place", pa.array(rows))
            table = table if len(places) == len(rows) else table.filter(pa.array(np.isin(rows, places)))
            whole = all(wanted.steps[0] <= low and high <= wanted.steps[1] for low, high in steps.values())
            table = table if whole and wanted.any_in_steps else table.filter(wanted.filter())
            return Matches(len(table), _first(table.select([*{"step", "id", wanted.sort}, "place"]), wanted, most), "")
    except (pa.ArrowException, OSError) as error:
        if not path.exists():  # a resume has just dropped it
            return Matches(0, None, "")
        return Matches(0, None, f"{path.name} cannot be read and is left out: {str(error).splitlines()[0][:200]}")


def _opened(path: Path, repeating: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a file; columns that repeat are read as dictionaries."""
    about, names = _about(path, file_state(path))
    return pq.ParquetFile(path, read_dictionary=[name for name in repeating if name in names], metadata=about)


@lru_cache(FILES)
def _about(path: Path, state: FileState) -> tuple[pq.FileMetaData, list[str]]:
    """Return the metadata and the columns of a file, read anew where it was written."""
    about = pq.read_metadata(path)
    return about, about.schema.to_arrow_schema().names


def _starts(file: pq.ParquetFile) -> np.ndarray:
    """Return the first row of each group of rows, and their number."""
    counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _rows_of(starts: np.ndarray, groups: Sequence[int]) -> np.ndarray:
    """Return the places of the rows of groups of rows: int64 [n]."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(starts[g], starts[g + 1]) for g in groups)])


def _steps_of(file: pq.ParquetFile, group: int) -> tuple[Any, Any]:
    """Return the least and the greatest step of a group of rows; the widest where it does not say."""
    first = file.metadata.row_group(group).column(0)
    known = first.statistics if first.path_in_schema == "step" else None
    if known is None or not known.has_min_max or not isinstance(known.min, int):
        return -1, 1 << 62
    return known.min, known.max


def _columns_of(file: pq.ParquetFile, groups: Sequence[int], names: Iterable[str]) -> pa.Table:
    """Return columns of groups of rows, null where the file has none; files of earlier versions have no lengths."""
    there, wanted = file.schema_arrow.names, [*names]
    counted = "length" in wanted and "length" not in there and "tokens" in there
    read = [n for n in wanted if n in there] + (["tokens", "prompt_length"] if counted else [])
    table = file.read_row_groups([*groups], columns=read, use_threads=False)
    found = {}
    for name in wanted:
        kind = COLUMNS.field(name).type
        if name == "length" and counted:
            found[name] = pc.subtract(pc.list_value_length(table["tokens"]), table["prompt_length"])
        elif name in there:
            dictionary = pa.types.is_dictionary(table[name].type)
            found[name] = table[name] if dictionary else table[name].cast(kind)
        else:
            found[name] = pa.nulls(len(table), kind)
    return pa.table(found)


def _says(column: pa.ChunkedArray, text: str) -> np.ndarray:
    """Return where a text has another one in it, in capitals or not; a text that repeats is looked at once."""
    found = []
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type):
            said = np.append(_says(pa.chunked_array([chunk.dictionary]), text), False)  # the last one is of nulls
            found.append(said[chunk.indices.fill_null(-1).to_numpy()] if said.any() else np.zeros(len(chunk), bool))
        else:
            found += [_said(chunk[at : at + ROWS], text) for at in range(0, len(chunk), ROWS)]
    return np.concatenate([np.zeros(0, bool), *found])


def _said(texts: pa.StringArray, text: str) -> np.ndarray:
    """Return where texts have another one in them, in capitals or not."""
    if text.lower() != text.upper() and not text.isascii():
        found = pc.match_substring(texts, text, ignore_case=True)
    else:
        if text.lower() != text.upper():
            texts, text = pc.ascii_lower(texts), text.lower()
        begin, end = np.frombuffer(texts.buffers()[1], np.int32)[[texts.offset, texts.offset + len(texts)]].tolist()
        values = texts.buffers()[2]
        if text.encode() not in (values[begin:end].to_pybytes() if values else b""):  # half the time of a match
            return np.zeros(len(texts), bool)
        found = pc.match_substring(texts, text)
    return found.fill_null(False).to_numpy(zero_copy_only=False)


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
            with _opened(files[number]) as file:
                starts = _starts(file)
                groups = np.searchsorted(starts, mine, "right") - 1
                for group in np.unique(groups).tolist():
                    here = mine[groups == group]
                    table = _columns_of(file, [group], _COLUMNS).take(pa.array(here - starts[group]))
                    for name in (*_TEXTS, "answer"):
                        short = pc.utf8_slice_codeunits(table[name], 0, SHOWN)
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
