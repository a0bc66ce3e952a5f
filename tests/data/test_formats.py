"""The same records come out of every format; what cannot be read says which file, where and why, in one line."""

import base64
import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.reading import read_records
from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import DataError
from tilth.data.columns import plain
from tilth.data.formats import END_OF_TEXT, FORMATS, find_files, is_source, tried_records
from tilth.data.sizes import BATCH, batch_rows, pieces

RECORDS = [
    {"prompt": "2+2=", "answer": "4", "n": 1, "of": [1, 2], "more": {"a": "x"}},
    {"prompt": "wer\u2028 da?\r\n\x85", "answer": "ich\n", "n": 2, "of": [], "more": {"a": None}},
    {"prompt": "日本", "answer": None, "n": -3, "of": None, "more": None},
]


def write_lines(path, records, opened=open):
    with opened(path, "wb") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def write_stream(path, records, rows=1000):
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, rows)


def write_file(path, records):
    table = pa.Table.from_pylist(records)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, 2)


def write_dataset(folder, records, shards=1):
    """The layout of ``datasets.Dataset.save_to_disk``, as release 4 writes it: shards are Arrow streams."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    size = -(-len(records) // shards)
    for i, name in enumerate(names):
        write_stream(folder / name, records[i * size : (i + 1) * size])
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "0123456789abcdef",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    features = {"prompt": {"dtype": "string", "_type": "Value"}}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features, "citation": ""}))


def compressed(suffix):
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return openers.get(suffix, lambda path, mode: pa.CompressedOutputStream(str(path), "zstd"))


def read(source):
    return [record for _, record in read_records(str(source))]


def places(source):
    return [place for place, _ in read_records(str(source))]


def fails(source, key):
    with raises(DataError, key) as caught:
        list(read_records(str(source)))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


WRITERS = {
    "d.jsonl": write_lines,
    "d.ndjson": write_lines,
    "d.JSONL": write_lines,
    "lines.json": write_lines,
    "list.json": lambda path, records: path.write_text("\n " + json.dumps(records, indent=1)),
    "d.parquet": lambda path, records: pq.write_table(pa.Table.from_pylist(records), path, row_group_size=2),
    "d.arrow": write_file,
    "stream.arrow": lambda path, records: write_stream(path, records, 2),
    "d.feather": lambda path, records: pyarrow.feather.write_feather(pa.Table.from_pylist(records), path),
    "saved": write_dataset,
    "shards": lambda path, records: write_dataset(path, records, 3),
    **{f"d.jsonl{s}": lambda p, r, s=s: write_lines(p, r, compressed(s)) for s in (".gz", ".bz2", ".xz", ".zst")},
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_records_of_every_format(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path, RECORDS)
    assert is_source(str(path)) and read(path) == RECORDS


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet", "stream.arrow", "d.jsonl.zst"])
def test_more_rows_than_a_batch(tmp_path, name):
    records = [{"prompt": f"p{i}", "n": i} for i in range(5000)]
    WRITERS[name](tmp_path / name, records)
    assert read(tmp_path / name) == records


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def write_csv(path, rows, opened=open, **how):
    with opened(path, "wb") as file:
        text = io.StringIO(newline="")
        csv.writer(text, **{"delimiter": "\t" if ".tsv" in path.name else ","} | how).writerows(rows)
        file.write(text.getvalue().encode())


@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["d.csv", "d.CSV", "d.tsv", "d.csv.gz", "d.tsv.zst"]),
    st.lists(texts, min_size=2, max_size=4, unique=True).filter(lambda names: not set(";\t,|") & set(names[0])),
    st.data(),
)
def test_any_text_survives_csv(tmp_path, name, columns, data):
    rows = data.draw(st.lists(st.lists(texts, min_size=len(columns), max_size=len(columns)), max_size=6))
    how = {"quoting": data.draw(st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]))}
    path = tmp_path / name
    write_csv(path, [columns, *rows], compressed(path.suffix) if path.suffix in (".gz", ".zst") else open, **how)
    assert read(path) == [dict(zip(columns, row)) for row in rows]


def test_csv_as_others_write_it(tmp_path):
    path = tmp_path / "d.csv"
    path.write_bytes('\ufeffprompt,answer\r\n\r\n007,\r\n"two\nlines, ""said""",4\r\n\n5,6'.encode())
    assert list(read_records(str(path))) == [
        (f"{path}:3", {"prompt": "007", "answer": ""}),
        (f"{path}:4", {"prompt": 'two\nlines, "said"', "answer": "4"}),
        (f"{path}:7", {"prompt": "5", "answer": "6"}),
    ]
    path.write_text(f'prompt,answer\n"{"x" * 500_000}",1\n')
    assert len(read(path)[0]["prompt"]) == 500_000
    path.write_text("prompt,answer\n")
    assert read(path) == []


@pytest.mark.parametrize(
    "content, key",
    [
        ("prompt,answer\n1,2\n3\n", "d.csv:3.values"),
        ("prompt,answer\n1,2,3\n", "d.csv:2.values"),
        ("prompt;answer\n1;2\n", "d.csv:1.separator"),
        ("prompt,answer,prompt\n", "d.csv:1.prompt"),
        ('prompt,answer\n1,"2\n3,4\n', "d.csv:3.csv"),
        ('prompt,answer\n1,"2"x\n', "d.csv:2.csv"),
        (b"prompt,answer\n1,\xff\n", "d.csv:2.utf8"),
    ],
)
def test_csv_that_is_none(tmp_path, content, key):
    (tmp_path / "d.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    fails(tmp_path / "d.csv", key)


@settings(deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.fixed_dictionaries({"prompt": texts, "x": st.integers(-(2**63), 2**63 - 1)}), min_size=1, max_size=9)
)
def test_any_text_survives(tmp_path, records):
    for name in ("d.jsonl", "d.parquet", "stream.arrow", "list.json"):
        WRITERS[name](tmp_path / name, records)
        assert read(tmp_path / name) == records


LINES = ['{"a": 1}', ' {"a": 1} ', '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1}\r', '{"a": 1}\r\r', '{"a": 1} {"b": 2}']
LINES += [
    '{"a": 1}x',
    '{"a": 1},',
    "[1]",
    "3",
    "null",
    '{"a": ',
    "",
    " ",
    '\ufeff{"a": 1}',
    '{"a": "\\ud800"}',
    "\x00",
    "[" * 9999,
]
LINES += [f'{{"a": {"9" * 9999}}}']


@settings(deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(LINES)))
def test_a_line_is_what_json_makes_of_it_alone(tmp_path, lines):
    (tmp_path / "d.jsonl").write_bytes("\n".join(["{}", *lines]).encode())
    expected = [{}]
    for line in filter(str.strip, lines):
        try:
            value = json.loads(line.rstrip("\r\n"))
        except (ValueError, RecursionError):
            value = None
        expected.append(value if isinstance(value, dict) else DataError)
    found = [record for _, record in tried_records(str(tmp_path / "d.jsonl"))]
    assert repr([DataError if isinstance(record, DataError) else record for record in found]) == repr(expected)


def test_places(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('\ufeff{"prompt": "a"}\n\n  \n{"prompt": "b"}')
    assert list(read_records(str(path))) == [(f"{path}:1", {"prompt": "a"}), (f"{path}:4", {"prompt": "b"})]
    for name, said in (("d.parquet", "row 3"), ("stream.arrow", "row 3"), ("list.json", "item 3")):
        WRITERS[name](tmp_path / name, RECORDS)
        assert places(tmp_path / name)[2] == f"{tmp_path / name} {said}"


def test_lines_are_read_as_they_are_asked_for(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\nrubbish\n')
    stream = read_records(str(path))
    assert next(stream)[1] == {"prompt": "a"} and next(stream)[1] == {"prompt": "b"}
    with raises(DataError, "d.jsonl:3.json"):
        next(stream)


def test_several_compressed_parts_in_one_file(tmp_path):
    """As ``cat a.gz b.gz > c.gz`` makes."""
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        for name, record in (("a", RECORDS[0]), ("b", RECORDS[1])):
            write_lines(tmp_path / name, [record], compressed(suffix))
        whole = tmp_path / f"c.jsonl{suffix}"
        whole.write_bytes((tmp_path / "a").read_bytes() + (tmp_path / "b").read_bytes())
        assert read(whole) == RECORDS[:2], suffix


# -- types of tables ---------------------------------------------------------------------------------------------------


def test_values_of_tables_are_plain(tmp_path):
    moment = datetime.datetime(2024, 5, 6, 7, 8, 9)
    table = pa.table(
        {
            "time": pa.array([moment], pa.timestamp("ns")),
            "day": pa.array([moment.date()]),
            "bytes": pa.array([b"\xff\x00"]),
            "decimal": pa.array([1], pa.decimal128(5, 2)),
            "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8())),
            "when": pa.array([{"at": moment}]),
            "word": pa.array(["w"]).dictionary_encode(),
            "large": pa.array(["l"], pa.large_string()),
            "half": pa.array([0.5], pa.float32()),
        }
    )
    pq.write_table(table, tmp_path / "d.parquet")
    found = plain(read(tmp_path / "d.parquet")[0])
    assert json.loads(json.dumps(found)) == found
    assert found["time"].startswith("2024-05-06 07:08:09") and found["day"] == "2024-05-06"
    assert base64.b64decode(found["bytes"]) == b"\xff\x00" and found["decimal"] == "1.00"
    assert found["map"] == [["k", 1]] and found["when"] == {"at": "2024-05-06 07:08:09"}
    assert (found["word"], found["large"], found["half"]) == ("w", "l", 0.5)


# -- text --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["d.txt", "d.md", "README", "d.txt.gz", "d.txt.zst"])
def test_text_is_one_document(tmp_path, name):
    path, text = tmp_path / name, "one\r\n\ntwo <|endoftext|>\n"
    suffix = path.suffix if path.suffix in (".gz", ".zst") else ""
    with (compressed(suffix) if suffix else open)(path, "wb") as file:
        file.write(text.encode())
    assert list(read_records(str(path))) == [(f"{path}:1", {"text": text})]


def test_documents_of_a_text(tmp_path):
    path = tmp_path / "d.txt"
    path.write_bytes(b"one\nmore\n<|endoftext|>\r\n<|endoftext|>\n\n<|endoftext|>\ntwo\r\n<|endoftext|>\nthree\n")
    assert list(read_records(str(path))) == [
        (f"{path}:1", {"text": "one\nmore"}),
        (f"{path}:7", {"text": "two"}),
        (f"{path}:9", {"text": "three\n"}),
    ]


@settings(deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text("ab \n<|", min_size=1).filter(lambda t: t.strip()), min_size=1, max_size=5))
def test_documents_survive_a_file(tmp_path, documents):
    path = tmp_path / "d.txt"
    path.write_text(f"\n{END_OF_TEXT}\n".join(documents))
    assert [record["text"] for record in read(path)] == documents


# -- folders and patterns ----------------------------------------------------------------------------------------------


def test_folder_and_pattern_are_read_by_name(tmp_path):
    for name, record in (("b", 1), ("a", 0), ("c", 2)):
        write_lines(tmp_path / f"{name}.jsonl", RECORDS[record : record + 1])
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".hidden.json").write_text("no")
    (tmp_path / "picture.png").write_bytes(b"png")
    assert read(tmp_path) == RECORDS == read(tmp_path / "*.jsonl")
    assert read(tmp_path / "[ab].jsonl") == RECORDS[:2]
    assert [p.name for p in find_files(str(tmp_path))] == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_compressed_and_plain_lines_are_one_format(tmp_path):
    write_lines(tmp_path / "a.jsonl", RECORDS[:1])
    write_lines(tmp_path / "b.ndjson.gz", RECORDS[1:], gzip.open)
    assert read(tmp_path) == RECORDS


def test_folder_of_texts(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.md").write_text("two")
    assert read(tmp_path) == [{"text": "one"}, {"text": "two"}]


def test_folder_of_several_formats(tmp_path):
    for name in ("d.jsonl", "d.parquet"):
        WRITERS[name](tmp_path / name, RECORDS)
    assert "(.jsonl, .parquet)" in fails(tmp_path, f"{tmp_path.name}.formats")


UNREAD = ["lz4", "ZIP", "zstd", "lzma", "Z", "gzip", "tgz"]


@pytest.mark.parametrize("name", ["b.parquet.gz", *(f"b.jsonl.{suffix}" for suffix in UNREAD)])
def test_no_part_of_a_folder_is_left_out_for_its_compression(tmp_path, name):
    write_lines(tmp_path / "a.jsonl", RECORDS)
    (tmp_path / "a.jsonl.md5").write_text("about")
    assert read(tmp_path) == RECORDS
    (tmp_path / name).write_bytes(b"part")
    fails(tmp_path, f"{name}.format")


def test_a_file_that_is_there_compressed_too_and_text_beside_data_are_read_without_it(tmp_path):
    for name in ("a.jsonl", "b.JSONL"):
        write_lines(tmp_path / name, RECORDS)
    for name in ("a.jsonl.zip", "b.JSONL.7z", "README.md.zip", "notes.txt.zip"):
        (tmp_path / name).write_bytes(b"part")
    assert read(tmp_path) == RECORDS + RECORDS
    for name in ("a.jsonl", "b.JSONL"):
        (tmp_path / name).unlink()
        (tmp_path / f"{name[0]}.txt").write_text("one")
    fails(tmp_path, "README.md.zip.format")


def test_folder_of_nothing(tmp_path):
    fails(tmp_path, f"{tmp_path.name}.format")
    (tmp_path / "data" / "more").mkdir(parents=True)
    write_lines(tmp_path / "data" / "more" / "d.jsonl", RECORDS)
    assert fails(tmp_path, f"{tmp_path.name}.format").endswith(f"'{tmp_path}/**/*.jsonl'")
    assert read(tmp_path / "**" / "*.jsonl") == RECORDS  # the hint works


def test_a_name_with_the_signs_of_a_pattern(tmp_path):
    write_lines(tmp_path / "d[1].jsonl", RECORDS)
    assert read(tmp_path / "d[1].jsonl") == RECORDS


# -- directories of Hugging Face ---------------------------------------------------------------------------------------


def write_splits(folder, **splits):
    folder.mkdir()
    for name, records in splits.items():
        write_dataset(folder / name, records)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))


def test_splits(tmp_path):
    write_splits(tmp_path / "d", train=RECORDS[:2], test=RECORDS[:1])
    assert read(tmp_path / "d") == RECORDS[:2] == read(f"{tmp_path}/d:train") == read(tmp_path / "d" / "train")
    assert read(f"{tmp_path}/d:test") == RECORDS[:1] and is_source(f"{tmp_path}/d:test")
    assert fails(f"{tmp_path}/d:dev", "d.dev").endswith("there are 'train', 'test'")
    write_splits(tmp_path / "e", validation=RECORDS)
    assert fails(tmp_path / "e", "e.train").endswith("there are 'validation'")


def test_shards_in_the_order_of_the_state_and_no_other_file(tmp_path):
    write_dataset(tmp_path / "d", RECORDS, 3)
    write_stream(tmp_path / "d" / "cache-1.arrow", RECORDS)
    state = json.loads((tmp_path / "d" / "state.json").read_text())
    state["_data_files"].reverse()
    (tmp_path / "d" / "state.json").write_text(json.dumps(state))
    assert read(tmp_path / "d") == RECORDS[::-1]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"_data_files": None}, "state.json._data_files.type"),
        ({"_data_files": [3]}, "state.json._data_files"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "gone.arrow"),
        ({"_data_files": [{"filename": "../other/data.arrow"}]}, "state.json._data_files.filename"),
        ({"_data_files": [{"filename": "/etc/hostname"}]}, "state.json._data_files.filename"),
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "state.json._indices_data_files"),
    ],
)
def test_broken_state(tmp_path, change, key):
    write_dataset(tmp_path / "d", RECORDS)
    state = json.loads((tmp_path / "d" / "state.json").read_text())
    (tmp_path / "d" / "state.json").write_text(json.dumps(state | change))
    fails(tmp_path / "d", key)


def test_unfinished_directory(tmp_path):
    write_splits(tmp_path / "d", train=RECORDS)
    (tmp_path / "d" / "train" / "state.json").unlink()
    fails(tmp_path / "d", "state.json")
    (tmp_path / "d" / "dataset_dict.json").write_text("{")
    fails(tmp_path / "d", "dataset_dict.json.json")


def test_what_the_library_itself_writes(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the library datasets is not installed (it is no dependency)")
    rows = [{**r, "more": {"a": "x"}} for r in RECORDS]
    made = datasets.Dataset.from_list(rows)
    made.save_to_disk(str(tmp_path / "one"), num_shards=2)
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(str(tmp_path / "two"))
    assert read(tmp_path / "one") == rows == read(tmp_path / "two") == list(made)
    assert read(f"{tmp_path}/two:test") == rows[:1]


# -- what cannot be read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "key", "detail"),
    [
        ("d.jsonl", b'{"a": 1}\n{"a": }\n', "d.jsonl:2.json", "at column 7"),
        ("d.jsonl", b'{"a": "x"\r\n{"a": 1}\n', "d.jsonl:1.json", "at column 10"),
        ("d.jsonl", b"[1]\n", "d.jsonl:1.type", "a list, not an object of columns"),
        ("d.jsonl", b"null\n", "d.jsonl:1.type", "null, not an object of columns"),
        ("d.jsonl", b'{"a": 1}\n\xff\xfe\n', "d.jsonl:2.utf8", "at byte 0"),
        ("d.jsonl", b"[" * 100_000, "d.jsonl:1.json.limit", ""),
        ("d.jsonl", b'{"a": ' + b"9" * 5000 + b"}", "d.jsonl:1.json.limit", ""),
        ("d.json", b'[{"a": 1}\n{"a": 2}]', "d.json.json", "at line 2 column 1"),
        ("d.json", b'[{"a": 1}, 2]', "d.json item 2.type", "a number, not an object of columns"),
        ("d.json", b'"text"', "d.json.type", "a text, not a list of objects"),
        ("d.txt", b"fine\n\xe4\n", "d.txt:2.utf8", ""),
        ("d.parquet", b"", "d.parquet", ""),
        ("d.parquet", b"PAR1 and then rubbish", "d.parquet", ""),
        ("d.arrow", b"ARROW1 and then rubbish", "d.arrow", ""),
        ("d.arrow", b"rubbish" * 9, "d.arrow", ""),
        ("d.arrow", b"", "d.arrow", ""),
        ("d.feather", b"FEA1 rubbish", "d.feather.version", ""),
        ("d.jsonl.gz", b"rubbish", "d.jsonl.gz", ""),
        ("d.jsonl.bz2", b"rubbish", "d.jsonl.bz2", ""),
        ("d.jsonl.xz", b"rubbish", "d.jsonl.xz", ""),
        ("d.jsonl.zst", b"rubbish", "d.jsonl.zst", ""),
        ("d.xlsx", b"a,b\n", "d.xlsx.format", ""),
        ("d.pkl", b"\x80", "d.pkl.format", ""),
        ("d.parquet.gz", b"\x1f\x8b", "d.parquet.gz.format", ""),
    ],
)
def test_unreadable(tmp_path, name, content, key, detail):
    (tmp_path / name).write_bytes(content)
    assert fails(tmp_path / name, key).endswith(detail)


LONG = pa.DictionaryArray.from_arrays(pa.array([0] * 300), pa.array(["x" * 30_000]))
REPEATED = {
    "d.parquet": (pa.table({"prompt": LONG}), "prompt"),
    "d.feather": (pa.table({"prompt": LONG}), "prompt"),
    "lists.parquet": (pa.table({"z": pa.array([np.zeros(1_000_000)])}), "z.list.element"),
    "lists.feather": (pa.table({"z": pa.ListArray.from_arrays(list(range(0, 301, 10)), LONG)}), "z"),
    "rows.parquet": (pa.table({"z": pa.nulls(1_000_000, pa.int32())}), "z"),
    "runs.feather": (pa.table({"z": pa.RunEndEncodedArray.from_arrays([1_000_000], [1])}), "z"),
    "views.feather": (pa.table({"z": pa.ListViewArray.from_arrays([0] * 100, [10**4] * 100, [0] * 10**4)}), "z"),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_table_that_decodes_to_far_more_than_its_file(tmp_path, name, monkeypatch):
    monkeypatch.setattr("tilth.data.sizes.PIECE", 1 << 20)
    (table, column), path = REPEATED[name], tmp_path / name
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="zstd")
    else:
        pyarrow.feather.write_feather(table, path, compression="zstd", chunksize=1_000_000)
    fails(path, f"{name}.{column}")


def test_rows_of_a_dictionary_are_decoded_in_pieces(tmp_path):
    texts = pa.array(["".join(map(chr, np.random.default_rng(i).integers(32, 127, 1_000_000))) for i in range(2)])
    repeated = pa.DictionaryArray.from_arrays(pa.array([0, 1, None] * 100), texts)
    pq.write_table(pa.table({"prompt": repeated}), tmp_path / "d.parquet")
    with pq.ParquetFile(tmp_path / "d.parquet") as file:
        assert batch_rows(tmp_path / "d.parquet", file) == BATCH // (2 * (1_000_000 + 4))
    batch = pa.RecordBatch.from_arrays([repeated], ["prompt"])
    cut = list(pieces(batch))
    assert [piece.num_rows for piece in cut] == [100, 101, 99] and sum(map(len, cut)) == 300
    assert [len(row["prompt"] or "") for row in read(tmp_path / "d.parquet")] == [1_000_000, 1_000_000, 0] * 100


@pytest.mark.parametrize("suffix", [".bz2", ".xz", ".zst"])
def test_text_that_decodes_to_far_more_than_its_file(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr("tilth.data.sizes.PIECE", 1 << 20)
    path = tmp_path / f"d.jsonl{suffix}"
    with compressed(suffix)(path, "wb") as file:
        for _ in range(2):
            file.write(b" " * 999_999 + b"\n")
    fails(path, f"{path.name}.size")


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.data.sizes.BATCH", 1 << 20)
    write_lines(tmp_path / "d.jsonl.gz", [{"prompt": "x" * (2 << 20)}], gzip.open)
    fails(tmp_path / "d.jsonl.gz", "d.jsonl.gz.line")


def test_a_quote_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.data.formats.PIECE", 1 << 20)
    (tmp_path / "d.csv").write_bytes(b'prompt\n"' + b"x,y\n" * (1 << 19))
    fails(tmp_path / "d.csv", f"d.csv:{(1 << 18) + 2}.csv")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_cut_off(tmp_path, suffix):
    path = tmp_path / f"d.jsonl{suffix}"
    write_lines(path, [{"prompt": f"{i * i}"} for i in range(5000)], compressed(suffix))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    fails(path, path.name)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_damaged_stream_behind_others(tmp_path, suffix):
    """As parallel compressors write files: nothing may end the records where a stream does."""
    path = tmp_path / f"d.jsonl{suffix}"
    streams = []
    for record in RECORDS:
        write_lines(path, [record], compressed(suffix))
        streams.append(path.read_bytes())
    path.write_bytes(b"".join(streams))
    assert read(path) == RECORDS
    for head in (b"?", b"\0"):
        path.write_bytes(streams[0] + head + streams[1][1:] + streams[2])
        fails(path, path.name)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_padding_between_streams(tmp_path, suffix):
    path = tmp_path / f"d.jsonl{suffix}"
    write_lines(path, RECORDS, compressed(suffix))
    path.write_bytes((path.read_bytes() + bytes(1 << 18)) * 2)
    assert read(path) == RECORDS * 2


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow", "stream.arrow"])
def test_a_column_that_a_table_has_twice(tmp_path, name):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"])
    if name == "d.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        open_ipc = pa.ipc.new_file if name == "d.arrow" else pa.ipc.new_stream
        with open_ipc(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    fails(tmp_path / name, f"{name}.prompt")


@pytest.mark.parametrize("name", ["d.parquet", "d.arrow", "stream.arrow"])
def test_cut_off_table(tmp_path, name):
    WRITERS[name](tmp_path / name, [{"prompt": f"{i * i}"} for i in range(5000)])
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    fails(tmp_path / name, name)


@settings(deadline=None, max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["d.jsonl.gz", "d.jsonl.zst", "d.parquet", "stream.arrow", "d.arrow"]), st.data())
def test_damage_is_a_data_error_or_other_data_but_no_other_exception(tmp_path, name, data):
    path = tmp_path / name
    WRITERS[name](path, RECORDS)
    content = bytearray(path.read_bytes())
    for _ in range(3):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        read(path)
    except DataError as error:
        assert "\n" not in str(error)


def test_missing(tmp_path):
    write_lines(tmp_path / "train.jsonl", RECORDS)
    assert fails(tmp_path / "trian.jsonl", "trian.jsonl").endswith(f"did you mean '{tmp_path / 'train.jsonl'}'?")
    assert fails(tmp_path / "no" / "where" / "x.jsonl", "x.jsonl").endswith("x.jsonl'")
    fails(tmp_path / "*.parquet", "*.parquet")
    assert not is_source(str(tmp_path / "trian.jsonl")) and not is_source(f"{tmp_path}:train")


def test_names_that_the_system_refuses():
    with raises(DataError, "source"):
        is_source("x" * 5000)
    assert not is_source("") and not is_source("a\0b")


def test_invalid_text_in_a_table(tmp_path):
    array = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")])
    pq.write_table(pa.table({"prompt": array}), tmp_path / "d.parquet")
    assert "Invalid UTF8" in fails(tmp_path / "d.parquet", "d.parquet")


def test_invalid_column_name(tmp_path):
    write_file(tmp_path / "d.arrow", [{"prompt": "a"}])
    (tmp_path / "d.arrow").write_bytes((tmp_path / "d.arrow").read_bytes().replace(b"prompt", b"prom\xff\xfe"))
    fails(tmp_path / "d.arrow", "d.arrow")


def test_a_directory_where_a_file_is_meant(tmp_path):
    (tmp_path / "d.jsonl").mkdir()
    fails(tmp_path / "d.jsonl", "d.jsonl.format")


def test_every_format_has_a_writer_here():
    assert {".text", ".txt", ".md", ".csv", ".tsv"} | {
        "." + n.split(".")[1].lower() for n in WRITERS if "." in n
    } == set(FORMATS)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "q.jsonl")
    for source in (tmp_path / "q.jsonl", "/dev/zero"):
        with raises(DataError, f"{Path(source).name}.file"):
            find_files(str(source))
