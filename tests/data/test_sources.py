"""Prompts by index: read of JSONL; each mistake with its file and line."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tilth.core.errors import DataError
from tilth.data.sources import Prompt, from_records, read_source, text_hashes

# -- JSONL -----------------------------------------------------------------------------------------------------------


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
    ("line", "message"),
    [
        ("{", "d.jsonl:2: not JSON"),
        ("[1]", "d.jsonl:2: a list, not an object of columns"),
        (
            '{"question": "q", "answer": "a"}',
            "d.jsonl:2: no column 'prompt'; there is 'question', 'answer'; try data.columns.prompt=question",
        ),
        ("{}", "d.jsonl:2: no column 'prompt'; there is none"),
        ('{"prompt": 3}', "d.jsonl:2: prompt is 3, not a text"),
        ('{"prompt": ""}', "d.jsonl:2: prompt is '', not a text of at least one character"),
        ('{"prompt": "q", "answer": 7}', "d.jsonl:2: answer is 7, not a text"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path, line, message):
    with pytest.raises(DataError) as caught:
        read_source(write(tmp_path / "d.jsonl", {"prompt": "fine"}, line))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file(tmp_path, content):
    (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(DataError, match="is empty"):
        read_source(str(tmp_path / "d.jsonl"))


def test_one_empty_file_of_several(tmp_path):
    for name in ("a", "c"):
        write(tmp_path / f"{name}.jsonl", {"prompt": "fine"})
    (tmp_path / "b.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match=r"b\.jsonl' is empty, as after a copy"):
        read_source(str(tmp_path))


def test_unreadable_file(tmp_path):
    with pytest.raises(DataError, match=r"there is no .*none.jsonl"):
        read_source(str(tmp_path / "none.jsonl"))
    (tmp_path / "d.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"d.jsonl:1: not UTF-8"):
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
    ("records", "message"),
    [
        ([], "data is empty"),
        ([{"prompt": "a"}, {"text": "b"}], r"record 2: no column 'prompt'"),
        ([3], "a int"),
    ],
)
def test_mistakes_in_records(records, message):
    with pytest.raises(DataError, match=message):
        from_records(records)
