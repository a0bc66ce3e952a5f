"""Read records of files: JSON lines, JSON, CSV, Parquet, Arrow, dataset directories of Hugging Face, and text.

Each comes with its place, such as ``train.jsonl:12`` (a line) or ``train.parquet row 3`` (from 1), for error messages.
Files are streamed, except a JSON list and a single document. Nothing is unpickled.
"""

import bz2
import csv
import difflib
import glob
import gzip
import io
import itertools
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from tilth.core.errors import DataError
from tilth.core.names import name_problem
from tilth.data.columns import RecordError
from tilth.data.hub import PREFIX, dataset_files
from tilth.data.sizes import PIECE, BoundedReader, Budget, batch_rows, check_parquet, pieces

Record = dict[str, Any]
Placed = tuple[str, Record]
Tried = tuple[str, Record | RecordError]

END_OF_TEXT = "<|endoftext|>"
"""Line of a text file that separates two documents."""

_VERSIONS = "_versions"
"""Folder of a dataset of Lance."""
_SCAN: Callable[[str, int], tuple[Any, int]] = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_LINE_ENDS = ("\n", "\r\n", "")
_BLOCK = 1 << 16
_LONGEST = 4096
"""Most characters of a path."""
_DAMAGE = EOFError, zlib.error, lzma.LZMAError, pa.ArrowInvalid
"""Errors of content that is cut off or changed."""


def source_files(source: str) -> list[Path]:
    """Return the files of a source in order. Raises ``DataError`` if there are none."""
    if source.startswith(PREFIX):
        return dataset_files(source)
    if source and (versions := Path(source) / _VERSIONS).is_dir():  # of Lance: each change is another version
        if not (manifests := [*versions.glob("*.manifest")]):
            message = f"{source!r} is a dataset of Lance without a version: no *.manifest is in {versions}"
            raise DataError(f"{message}; write it again", key=f"{Path(source).name}.lance")
        return [max(manifests, key=lambda file: (file.stat().st_mtime_ns, file.name))]
    saved = _saved(source)
    return find_files(source) if saved is None else saved


def tried_records(source: str) -> Iterator[Tried]:
    """Yield (place, record or the error of one that cannot be read) of every record of a source, in order.

    A source is a file (``FORMATS``; JSON, CSV and text also as .gz, .bz2, .xz and .zst), a folder or a pattern of such
    files (sorted by name), a dataset of the hub (``hub.dataset_files``), a directory of Lance, or one of Hugging Face's
    ``save_to_disk``, of which ``DIRECTORY:SPLIT`` is one split
    and the bare name the split train. A record of a text file is ``{"text": document}``.

    Raises ``DataError`` in one line (place, problem, remedy) for everything that cannot be read.
    """
    files = source_files(source)
    for path in files:
        if len(files) > 1 and not path.stat().st_size:
            raise DataError(f"{str(path)!r} is empty, as after a copy that was cut off", key=f"{path.name}.empty")
        try:
            yield from _reader(path)(path)
        except (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
            damaged = "; write or copy it again, it is damaged" if _is_damage(error) else ""
            raise DataError(f"cannot read {str(path)!r}: {_first_line(error)}{damaged}", key=path.name) from None


def _is_damage(error: Exception) -> bool:
    """True if the content is at fault; pyarrow and gzip raise OSError for it, without a number of the system's."""
    return isinstance(error, _DAMAGE) or (isinstance(error, OSError) and error.errno is None)


def is_source(source: str) -> bool:
    """True if there is such a file, directory, split of a directory or pattern, or if it names a dataset of the hub."""
    if source.startswith(PREFIX):
        return True
    try:
        there = Path(source).exists() or _dataset(source)[0] is not None or bool(glob.glob(source, recursive=True))
    except OSError as error:  # a name that is too long, a folder without permission
        raise DataError(f"cannot read {source[:100]!r}: {_first_line(error)}", key="source") from None
    return there and source != ""


def is_file_name(text: str) -> bool:
    """True if a text is the name of an existing file of a known format."""
    return "." in text and len(text) < _LONGEST and os.path.isfile(text) and _format(Path(text)) is not None


def find_files(source: str) -> list[Path]:
    """Return the files of a source, sorted. Raises ``DataError`` if there are none, or several formats in a folder."""
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    if path.is_file():
        return [path]
    if path.exists():
        why = "is a pipe or a device, which cannot be read again from its beginning; write it to a file"
        raise DataError(f"{source!r} {why}", key=f"{path.name}.file")
    found = sorted(p for p in map(Path, glob.glob(source, recursive=True)) if p.is_file())
    if not found:
        raise DataError(f"there is no {source!r}{missing(source)}", key=path.name)
    return found


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# -- which files -------------------------------------------------------------------------------------------------------


def _reader(path: Path) -> Callable[[Path], Iterator[Tried]]:
    name = _format(path)
    if path.parent.name == _VERSIONS:
        return _lance
    if name is None:
        message = f"{str(path)!r} is of no known format; known are {', '.join(FORMATS)} and {_COMPRESSIBLE}"
        raise DataError(message, key=f"{path.name}.format")
    return FORMATS[name]


def _format(path: Path) -> str | None:
    """Suffix in ``FORMATS`` that names a file's format; a name without a suffix is text, an unknown one None."""
    suffixes = [s.lower() for s in path.suffixes[-2:]]
    compressed = bool(suffixes) and suffixes[-1] in _OPEN
    last = suffixes[-2:-1] if compressed else suffixes[-1:]
    name = last[0] if last else ".txt"
    return name if name in FORMATS and not (compressed and name in _BINARY) else None


def _folder(path: Path) -> list[Path]:
    """Files of a folder that share one format; text beside data (README.md) is left out, and a compressed file that
    cannot be read beside what it holds."""
    files = sorted(p for p in path.iterdir() if p.suffix and not p.name.startswith((".", "_")) and p.is_file())
    kinds: dict[str, list[Path]] = {}
    unread: dict[str, Path] = {}
    for file in files:
        held = path / file.stem
        if (name := _format(file)) is not None:
            kinds.setdefault(_GROUPS.get(name, name), []).append(file)
        elif file.suffix.lower() in _COMPRESSIONS and held.suffix.lower() in FORMATS and not held.is_file():
            name = held.suffix.lower()
            unread.setdefault(_GROUPS.get(name, name), file)
    data = [kind for kind in kinds if kind != ".txt"]
    for kind, file in unread.items():
        if kind != ".txt" or not data:
            message = f"{str(file)!r} would be left out: files that are read compressed are {_COMPRESSIBLE}"
            raise DataError(f"{message}; decompress it, or name the others by a pattern", key=f"{file.name}.format")
    data = data or list(kinds)
    if len(data) > 1:
        raise DataError(
            f"{str(path)!r} holds files of several formats ({', '.join(sorted(data))}); "
            f"name one of them by a pattern, such as {str(path / f'*{data[0]}')!r}",
            key=f"{path.name}.formats",
        )
    if not data:
        deeper = next((p for p in path.rglob("*") if p.is_file() and p.suffix and _format(p)), None)
        hint = f"; there are some deeper: {str(path / '**' / f'*{deeper.suffix}')!r}" if deeper else ""
        message = f"{str(path)!r} holds no file of a known format ({', '.join(FORMATS)}){hint}"
        raise DataError(message, key=f"{path.name}.format")
    return kinds[data[0]]


def missing(source: str) -> str:
    """Suggest the existing name nearest to one that does not exist, as a hint; "" if none is near."""
    path = Path(source)
    while not path.parent.is_dir():
        path = path.parent
    near = difflib.get_close_matches(path.name, sorted(p.name for p in path.parent.iterdir()), 1)
    return f"; did you mean {str(path.parent / near[0])!r}?" if near else ""


# -- lines and text ----------------------------------------------------------------------------------------------------


def _zstd(path: Path, mode: str) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(pa.input_stream(str(path), compression="zstd")))


class _Streams(io.RawIOBase):
    """Decompressed bytes of streams, as many as a file has. ``bz2.open`` and ``lzma.open`` end at what follows a stream
    and is none, so that a damaged head drops all streams behind it."""

    def __init__(self, path: Path, new: Callable[[], Any]) -> None:
        self._file, self._new = path.open("rb"), new
        self._decoder = new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = b""
        while not found:
            given = b""
            if self._decoder.eof:
                given = self._decoder.unused_data.lstrip(b"\0")  # streams may be padded
                while not given and (block := self._file.read(_BLOCK)):
                    given = block.lstrip(b"\0")
                if not given:
                    return 0
                self._decoder = self._new()
            elif self._decoder.needs_input and not (given := self._file.read(_BLOCK)):
                raise EOFError("the file ends before its compressed stream does")
            found = self._decoder.decompress(given, len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        self._file.close()
        super().close()


def _bz2(path: Path, mode: str) -> BinaryIO:
    return cast(BinaryIO, _Streams(path, bz2.BZ2Decompressor))


def _xz(path: Path, mode: str) -> BinaryIO:
    return cast(BinaryIO, _Streams(path, lzma.LZMADecompressor))


_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": _bz2, ".xz": _xz, ".zst": _zstd}
_COMPRESSIONS = {*_OPEN, ".gzip", ".tgz", ".z", ".lzma", ".zstd", ".lz4", ".br", ".zip", ".7z", ".snappy", ".lzo"}
"""Suffixes of compressed files, read or not."""
_COMPRESSIBLE = "JSON, CSV or text with " + ", ".join(_OPEN)


def _opened(path: Path) -> BinaryIO:
    """Open a file for its bytes, decompressed within its budget."""
    opener = _OPEN.get(path.suffix.lower())
    if opener is None:
        return path.open("rb")
    return io.BufferedReader(BoundedReader(opener(path, "rb"), path), 1 << 20)


def _tried_lines(path: Path) -> Iterator[tuple[int, str | RecordError]]:
    """Yield number (from 1) and text of each line, split at newlines only: JSON texts hold other line ends."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                message = f"not UTF-8: {error.reason} at byte {error.start}"
                yield number, RecordError.at(message, f"{path}:{number}", key="utf8")


def _sound(lines: Iterable[tuple[int, str | RecordError]]) -> Iterator[tuple[int, str]]:
    """Yield lines; raise the error of one that is none."""
    for number, line in lines:
        if isinstance(line, RecordError):
            raise line
        yield number, line


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    return _sound(_tried_lines(path))


def _json_lines(path: Path) -> Iterator[Tried]:
    """One object a line; blank lines are skipped."""
    yield from _objects(path, _tried_lines(path))


def _objects(path: Path, lines: Iterable[tuple[int, str | RecordError]]) -> Iterator[Tried]:
    name = str(path)
    for number, line in lines:
        where = f"{name}:{number}"
        if isinstance(line, RecordError):
            yield where, line
            continue
        try:
            found, end = _SCAN(line, 0)  # at half the time of ``json.loads``, which reads whatever else there is
            sound = type(found) is dict and line[end:] in _LINE_ENDS
        except (StopIteration, ValueError, RecursionError):
            sound = False
        if sound:
            yield where, found
        elif line.strip():
            yield where, _or_error(_object, line.rstrip("\r\n"), where)


def _object(line: str, where: str) -> Record:
    return _record(_parse(line, where), where)


def _or_error(read: Callable[..., Record], *args: Any) -> Record | RecordError:
    """Return a record, or the error of one that cannot be read, after which others can."""
    try:
        return read(*args)
    except RecordError as error:
        return error


def _json(path: Path) -> Iterator[Tried]:
    """A list of objects, or one object a line: many files with this suffix hold lines."""
    lines = itertools.dropwhile(lambda line: isinstance(line[1], str) and not line[1].strip(), _tried_lines(path))
    head = list(itertools.islice(lines, 1))
    if not head or isinstance(head[0][1], RecordError) or head[0][1].lstrip().startswith("{"):
        yield from _objects(path, itertools.chain(head, lines))
        return
    whole = _parse("".join(line for _, line in _sound(itertools.chain(head, lines))), str(path))
    if not isinstance(whole, list):
        raise RecordError.at(f"{_kind(whole)}, not a list of objects", str(path), key="type")
    for number, value in enumerate(whole, 1):
        where = f"{path} item {number}"
        yield where, _or_error(_record, value, where)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise RecordError.at(f"not JSON: {error.msg} at {place}", where, key="json") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        raise RecordError.at(f"not JSON that can be read: {_first_line(error)}", where, key="json.limit") from None


def _record(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise RecordError.at(f"{_kind(value)}, not an object of columns", where, key="type")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _text(path: Path) -> Iterator[Placed]:
    """Documents between lines of ``END_OF_TEXT``, without the newline before such a line; empty ones are skipped."""
    start, parts = 1, list[str]()
    for number, line in _lines(path):
        if line.rstrip("\r\n") == END_OF_TEXT:
            yield from _document(path, start, "".join(parts).removesuffix("\n").removesuffix("\r"))
            start, parts = number + 1, []
        else:
            parts.append(line)
    yield from _document(path, start, "".join(parts))


def _document(path: Path, start: int, text: str) -> Iterator[Placed]:
    if text.strip():
        yield f"{path}:{start}", {"text": text}


# -- comma-separated values --------------------------------------------------------------------------------------------


def _csv(path: Path) -> Iterator[Tried]:
    """Rows under a header of column names; every value is a text, and a quoted one may span lines."""
    separator = "\t" if ".tsv" in (suffix.lower() for suffix in path.suffixes[-2:]) else ","
    csv.field_size_limit(PIECE)  # of the whole process; by default 128 KiB, less than many a document
    rows = csv.reader((line for _, line in _lines(path)), delimiter=separator, strict=True)
    names, number = list[str](), 1
    try:
        for row in rows:
            where, number = f"{path}:{number}", rows.line_num + 1
            if names and row:
                yield where, _or_error(_named, names, row, where)
            elif row:
                names = _header(row, separator, where)
    except csv.Error as error:
        raise RecordError.at(f"not CSV: {error}", f"{path}:{rows.line_num}", key="csv") from None


def _header(names: list[str], separator: str, where: str) -> list[str]:
    other = next((sign for sign in ";\t,|" if sign in names[0]), None)
    if len(names) == 1 and other:
        message = f"one column, {names[0][:60]!r}; its values must be separated by {separator!r}"
        raise RecordError.at(message, where, key="separator")
    _check_names(names, where)
    return names


def _check_names(names: list[str], where: str) -> None:
    """Raise ``RecordError`` for a column that is there twice: a record has one of each name."""
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise RecordError.at(f"the column {twice!r} is there twice", where, key=twice)


def _named(names: list[str], row: list[str], where: str) -> Record:
    if len(row) != len(names):
        raise RecordError.at(f"{len(row)} values in a row, not {len(names)} as in the header", where, key="values")
    return dict(zip(names, row))


# -- tables ------------------------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Iterator[Placed]:
    with pq.ParquetFile(path) as file:
        check_parquet(path, file)
        yield from _rows(path, file.schema_arrow, file.iter_batches(batch_rows(path, file)))


def _lance(path: Path) -> Iterator[Placed]:
    """Rows of the newest version of a dataset, a manifest of which is given."""
    folder = path.parent.parent
    try:
        import lance
    except ImportError as error:
        message = (
            f"{str(folder)!r} is a dataset of Lance, whose library cannot be imported: {error}; pip install pylance"
        )
        raise DataError(message, key=f"{folder.name}.lance") from None
    for number, row in enumerate(rows_of(lance.dataset(str(folder)).to_batches()), 1):
        yield f"{folder} row {number}", row


def _arrow(path: Path) -> Iterator[Placed]:
    """Arrow IPC: the file format (Feather too), which begins with a magic word, or the stream format."""
    with pa.memory_map(str(path)) as mapped:
        magic = mapped.read(6)
        mapped.seek(0)
        if magic[:4] == b"FEA1":
            message = f"{str(path)!r} is Feather of version 1, which is no Arrow file; write it as version 2"
            raise DataError(message, key=f"{path.name}.version")
        if magic == b"ARROW1":
            file = pa.ipc.open_file(mapped)
            yield from _rows(path, file.schema, (file.get_batch(i) for i in range(file.num_record_batches)))
        else:
            stream = pa.ipc.open_stream(mapped)
            yield from _rows(path, stream.schema, stream)


def _rows(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[Placed]:
    _check_names(schema.names, str(path))
    for number, row in enumerate(rows_of(batches, Budget(path)), 1):
        yield f"{path} row {number}", row


def rows_of(batches: Iterable[pa.RecordBatch], budget: Budget | None = None) -> Iterator[Record]:
    """Yield every row as a dictionary, dates and times as texts. budget: of the file that has the rows."""
    for batch in batches:
        batch.validate(full=True)  # offsets and UTF-8, which a damaged file may have wrong and nothing else checks
        for piece in pieces(batch, budget):
            yield from _as_text(piece).to_pylist()


def _as_text(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Convert dates and times to texts: Python has no type for nanoseconds. Dictionaries become their values."""
    for i, field in enumerate(batch.schema):
        if pa.types.is_dictionary(field.type):
            batch = batch.set_column(i, field.name, batch.column(i).dictionary_decode())
    for i, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type) or pa.types.is_date(field.type) or pa.types.is_time(field.type):
            batch = batch.set_column(i, field.name, batch.column(i).cast(pa.string()))
    return batch


FORMATS: dict[str, Callable[[Path], Iterator[Tried]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
    ".txt": _text,
    ".text": _text,
    ".md": _text,
}
"""Suffix -> reader."""

_BINARY = {".parquet", ".arrow", ".feather"}
_GROUPS = {".ndjson": ".jsonl", ".feather": ".arrow", ".text": ".txt", ".md": ".txt"}
"""Suffixes of the same format."""


# -- directories of Hugging Face ---------------------------------------------------------------------------------------


def _dataset(source: str) -> tuple[Path | None, str]:
    """(directory, split) if ``save_to_disk`` wrote the source: a ``Dataset``, or a ``DatasetDict`` with splits."""
    path = Path(source)
    if (path / "state.json").is_file():
        return path, ""
    if (path / "dataset_dict.json").is_file():
        return path, "train"
    head, _, split = source.rpartition(":")
    if head and split and not path.exists() and (Path(head) / "dataset_dict.json").is_file():
        return Path(head), split
    return None, ""


def _saved(source: str) -> list[Path] | None:
    """Shards of a saved dataset, in the order of its state; None for any other source."""
    path, split = _dataset(source)
    if path is None:
        return None
    if split:
        splits = _list(path / "dataset_dict.json", "splits")
        if split not in splits:
            message = f"{str(path)!r} has no split {split!r}; there are {', '.join(map(repr, splits)) or 'none'}"
            raise DataError(message, key=f"{path.name}.{split}")
        path = path / split
    state = path / "state.json"
    if not state.is_file():
        message = f"{str(path)!r} has no state.json, so it is no dataset that was saved to its end"
        raise DataError(message, key="state.json")
    if _list(state, "_indices_data_files", []):
        message = f"{str(path)!r} has a table of indices, as old versions of datasets wrote; save it again"
        raise DataError(message, key="state.json._indices_data_files")
    return [_shard(file, state) for file in _list(state, "_data_files")]


def _shard(file: Any, state: Path) -> Path:
    name = file.get("filename") if isinstance(file, dict) else None
    if not isinstance(name, str):
        raise RecordError.at(
            f"_data_files holds {file!r}, not an object with a filename", str(state), key="_data_files"
        )
    if problem := name_problem(name, folders=True):
        raise RecordError.at(f"a filename of _data_files: {problem}", str(state), key="_data_files.filename")
    path = state.parent / name
    if not path.is_file():
        raise DataError(f"{str(path)!r} is missing, which {state} names", key=path.name)
    return path


def _list(path: Path, key: str, default: list[Any] | None = None) -> list[Any]:
    """List at a key of a JSON file."""
    try:
        found = _parse(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {str(path)!r}: {_first_line(error)}", key=path.name) from None
    value = found.get(key, default) if isinstance(found, dict) else None
    if value is None and default is not None:
        return default
    if not isinstance(value, list):
        raise RecordError.at(f"{key!r} is {value!r}, not a list", str(path), key=f"{key}.type")
    return value
