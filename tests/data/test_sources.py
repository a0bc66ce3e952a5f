"""Prompts by index: read of JSONL; each mistake with its file and line."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.errors import raises
from tilth.config.schema import DataConfig
from tilth.core.errors import DataError
from tilth.data.computed import text_hashes
from tilth.data.prompts import load_source
from tilth.data.sources import Prompt, from_records

# -- JSONL -----------------------------------------------------------------------------------------------------------


def read_source(path):
    return load_source(DataConfig(source=path)).source


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_jsonl(tmp_path):
    path = write(
        tmp_path / "d.jsonl",
        {"prompt": "2+2=", "answer": "4", "level": 1},
        "",
        {"prompt": "wer\u2028da?", "x": [1]},
        "",
    )
    source = read_source(path)
    assert [source.prompt(i) for i in range(len(source))] == [
        Prompt(0, "2+2=", "4", {"answer": "4", "level": 1}),
        Prompt(1, "wer\u2028da?", None, {"x": [1]}),
    ]
    assert source.alphabet() == "".join(sorted(set("2+2=4wer\u2028da?")))
    assert source.sizes().tolist() == [4, 9]
    assert (source.hashes == text_hashes([b"2+2=", "wer\u2028da?".encode()])).all()


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", "json"),
        ("[1]", "type"),
        ('{"question": "q", "answer": "a"}', "prompt.missing"),
        ("{}", "prompt.missing"),
        ('{"prompt": 3}', "prompt.type"),
        ('{"prompt": ""}', "prompt.empty"),
        ('{"prompt": "q", "answer": 7}', "answer.type"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, line, field):
    with raises(DataError, f"d.jsonl:2.{field}") as caught:
        read_source(write(tmp_path / "d.jsonl", {"prompt": "fine"}, line))
    assert str(caught.value).startswith(f"{tmp_path}/d.jsonl:2: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file(tmp_path, content):
    (tmp_path / "d.jsonl").write_text(content)
    with raises(DataError, "d.jsonl"):
        read_source(str(tmp_path / "d.jsonl"))


def test_one_empty_file_of_several(tmp_path):
    for name in ("a", "c"):
        write(tmp_path / f"{name}.jsonl", {"prompt": "fine"})
    (tmp_path / "b.jsonl").write_bytes(b"")
    with raises(DataError, "b.jsonl.empty"):
        read_source(str(tmp_path))


def test_unreadable_file(tmp_path):
    with raises(DataError, "data.source"):
        read_source(str(tmp_path / "none.jsonl"))
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe")
    with raises(DataError, "d.jsonl:1.utf8"):
        read_source(str(tmp_path / "d.jsonl"))


# -- lists -----------------------------------------------------------------------------------------------------------


def test_records_are_as_jsonl(tmp_path):
    records = [{"prompt": "a", "answer": "b", "n": 1}, {"prompt": "c"}]
    file = read_source(write(tmp_path / "d.jsonl", *records))
    memory = from_records(records)
    assert [memory.prompt(i) for i in range(2)] == [file.prompt(i) for i in range(2)]


def test_bare_texts():
    assert from_records(["a", "b"]).prompt(1) == Prompt(1, "b")


def test_records_with_columns_and_whatever_objects():
    mark = object()
    found = from_records([{"q": "a", "r": "b", "mark": mark}], {"prompt": "q", "answer": "r"}).prompt(0)
    assert (found.text, found.answer) == ("a", "b") and found.info["mark"] is mark


def test_info_of_files_is_plain(tmp_path):
    pq.write_table(pa.table({"prompt": [b"a"], "x": [b"\xff"], "y": [[1]]}), tmp_path / "d.parquet")
    assert read_source(str(tmp_path / "d.parquet")).prompt(0) == Prompt(0, "a", None, {"x": "/w==", "y": [1]})


@pytest.mark.parametrize(
    ("records", "key"),
    [([], "data"), ([{"prompt": "a"}, {"text": "b"}], "record 2.prompt.missing"), ([3], "record 1.type")],
)
def test_mistakes_in_records(records, key):
    with raises(DataError, key):
        from_records(records)


@pytest.mark.parametrize("deep", ["[" * 900 + "]" * 900, '{"a":' * 800 + "1" + "}" * 800])
def test_a_value_that_json_reads_and_nothing_else_follows_is_a_named_error(tmp_path, deep):
    (tmp_path / "d.jsonl").write_text(f'{{"prompt": "a", "answer": "b", "x": {deep}}}\n')
    with raises(DataError, "d.jsonl:1.depth"):
        read_source(str(tmp_path / "d.jsonl"))
