"""Trajectories of a run by filters, a page at a time, so that a run of a million of them needs no memory."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from tilth.core.errors import DataError
from tilth.data.trajectories import COLUMNS, TRAJECTORIES, files_of

PAGE = 50
"""Rows of a page."""
MOST = 2_000_000
"""Rows that a search finds at most."""
SECONDS = 5.0
"""Seconds after which a search reads no further file."""
GROUP = 64
"""Most samples of a group that are shown."""
SHOWN = 400
"""Characters of a prompt and an answer in a table."""
SORTS = ("step", "reward", "length", "id")
FINISHES = ("stop", "length", "error", "env")
_KEYS = ("step", "id", "group", "prompt", "reward", "finish", "version")
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

    def filter(self, length: pc.Expression) -> pc.Expression:
        """Return the condition of a row."""
        step = pc.field("step")
        found = (step >= self.steps[0]) & (step <= self.steps[1])
        for field, (low, high) in ((pc.field("reward"), self.reward), (length, self.length)):
            found = found if low is None else found & (field >= low)
            found = found if high is None else found & (field <= high)
        found = found & (pc.field("finish") == self.finish) if self.finish else found
        found = found if self.prompt is None else found & (pc.field("prompt") == self.prompt)
        if not self.text:
            return found
        said, asked = (pc.match_substring(pc.field(n), self.text, ignore_case=True) for n in ("text", "prompt_text"))
        return found & (said | asked)


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


def search(run: Path, wanted: Wanted) -> FoundRows:
    """Return a page of the trajectories that match."""
    files = [path for first, last, path in files_of(run / TRAJECTORIES) if _meets(first, last, wanted.steps)]
    tables, notes, rows, late = [], list[str](), 0, time.monotonic() + SECONDS
    for number, path in enumerate(files):
        if rows >= MOST or time.monotonic() > late:
            notes.append(f"only {number} of {len(files)} files are searched; narrow the steps")
            break
        for table in _read(path, [*_KEYS], wanted, notes):
            tables.append(table.append_column("file", pa.array([number] * len(table), pa.int32())))
            rows += len(table)
    whole = pa.concat_tables(tables) if tables else pa.table({"step": []})
    if not len(whole):
        return FoundRows([], 0, notes)
    order = "descending" if wanted.down else "ascending"
    place = pc.sort_indices(whole, [(wanted.sort, order), ("step", order), ("id", "ascending")])
    page = whole.take(place[wanted.page * PAGE : (wanted.page + 1) * PAGE]).to_pylist()
    texts: dict[tuple[int, int], Row] = {}
    for number in {row["file"] for row in page}:
        ids = [row["id"] for row in page if row["file"] == number]
        texts |= {(row["step"], row["id"]): row for row in _texts(files[number], ids, notes)}
    del whole, place, tables
    pa.default_memory_pool().release_unused()
    return FoundRows([row | texts.get((row["step"], row["id"]), {}) for row in page], rows, notes)


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
    files = files_of(run / TRAJECTORIES)
    notes = list[str]()
    wanted = Wanted((0, 1 << 31))
    tables = [t for _, _, path in files[-1:] for t in _read(path, ["prompt_text"], wanted, notes)]
    return list(dict.fromkeys(p for t in tables for p in t["prompt_text"].to_pylist() if p))[:most]


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


def _length(names: Sequence[str]) -> pc.Expression:
    """Return the tokens that the policy chose; files of earlier versions have no such column."""
    if "length" in names or "tokens" not in names:
        return pc.field("length")
    return pc.list_value_length(pc.field("tokens")) - pc.field("prompt_length")


def _scanner(path: Path, columns: dict[str, pc.Expression], wanted: pc.Expression) -> ds.Scanner:
    data = ds.dataset(path, schema=COLUMNS, format="parquet")
    return data.scanner(columns=columns, filter=wanted, use_threads=False, batch_readahead=1, fragment_readahead=1)


def _read(path: Path, names: list[str], wanted: Wanted, notes: list[str]) -> Iterator[pa.Table]:
    """Yield the rows of a file that match; a note if it cannot be read."""
    try:
        there = ds.dataset(path, format="parquet").schema.names
        length = _length(there)
        columns = {name: pc.field(name) for name in names} | {"length": length}
        yield _scanner(path, columns, wanted.filter(length)).head(MOST)
    except (pa.ArrowException, OSError) as error:
        if path.exists():  # else a resume has just dropped it
            notes.append(f"{path.name} cannot be read and is left out: {str(error).splitlines()[0][:200]}")


def _texts(path: Path, ids: list[int], notes: list[str]) -> list[Row]:
    """Return prompt, answer and turns of some rows, cut to what a table shows."""
    columns = {name: pc.field(name) for name in ("step", "id", "turn_rewards")}
    columns |= {n: pc.utf8_slice_codeunits(pc.field(n), 0, SHOWN) for n in ("prompt_text", "text", "answer")}
    try:
        table = _scanner(path, columns, pc.field("id").isin(ids)).to_table()
    except (pa.ArrowException, OSError) as error:
        notes.append(f"{path.name} cannot be read: {str(error).splitlines()[0][:200]}")
        return []
    return list(table.to_pylist())
