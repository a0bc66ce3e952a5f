"""Prompts by index: computed for the addition task, read for JSONL; each mistake with its file and line."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilth.core.errors import DataError
from tilth.data.sources import Addition, Prompt, from_records, read_source, text_hashes


def test_addition_of_three_digits():
    prompt = Addition(3).prompt(123456)
    assert prompt == Prompt(123456, "123+456=", "0579", {"answer": "0579"})
    assert Addition(3).prompt(999999).answer == "1998" and Addition(3).prompt(0).text == "000+000="


@given(st.integers(1, 9), st.data())
def test_index_and_pair_are_inverse(digits, data):
    task = Addition(digits)
    index = data.draw(st.integers(0, len(task) - 1))
    a, b = task.pair(index)
    prompt = task.prompt(index)
    assert task.index(a, b) == index and 0 <= min(a, b) and max(a, b) < 10**digits
    assert prompt.text == f"{str(a).zfill(digits)}+{str(b).zfill(digits)}="
    assert prompt.answer == str(a + b).zfill(digits + 1) and len(prompt.answer) == digits + 1


@pytest.mark.parametrize(("digits", "size"), [(1, 100), (2, 10_000), (3, 10**6), (4, 10**6), (9, 10**6)])
def test_size_and_spread(digits, size):
    task = Addition(digits)
    assert len(task) == size
    pairs = [task.pair(i) for i in range(0, size, 997 if size > 10_000 else 1)]
    assert len(set(pairs)) == len(pairs)
    for column in zip(*pairs):
        # every first digit and every last digit of both numbers is there
        assert {x // 10 ** (digits - 1) for x in column} == set(range(10))
        assert {x % 10 for x in column} == set(range(10))


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 9))
def test_hashes_are_those_of_the_texts(digits):
    task = Addition(digits)
    some = np.linspace(0, len(task) - 1, 100).astype(int)
    assert (task.hashes[some] == text_hashes(task.prompt(int(i)).text.encode() for i in some)).all()
    assert len(task.hashes) == len(task) == len(task.sizes())
    assert (task.sizes() == len(task.prompt(0).text)).all()


def test_hashes_of_alike_texts_are_uniform():
    hashes = Addition(3).hashes
    counts = np.bincount(hashes >> np.uint32(28), minlength=16)
    assert np.abs(counts / counts.mean() - 1).max() < 0.02  # five standard deviations of 62,500 are 2 %
    # and their low bits, and pairs that differ in one digit, which a bare CRC maps to one fixed difference
    assert abs((hashes & 1).mean() - 0.5) < 0.005
    assert len(np.unique(hashes[:-1] ^ hashes[1:])) > 900_000


def test_alphabet_of_addition_covers_it():
    task = Addition(2)
    assert set(task.alphabet()) == set("".join(task.prompt(i).text + task.prompt(i).answer for i in range(0, 10000, 7)))


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
