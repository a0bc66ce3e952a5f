"""Records by value: whatever holds them, the same rows in the same order, and anything else refused by its type."""

import datetime
import decimal
import io
import json
import math
import sys

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.reading import pair_records, read_records
from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import DataError
from tilth.data.formats import source_files
from tilth.data.given import placed
from tilth.data.prompts import PromptSet
from tilth.data.sources import from_records

TURNS = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
ROWS = [
    {"prompt": "a", "answer": "1", "n": 1, "x": 0.5, "right": True, "tags": ["p", "q"], "chat": TURNS, "kind": "sum"},
    {"prompt": "b", "answer": None, "n": 2, "x": None, "right": False, "tags": [], "chat": None, "kind": None},
    {"prompt": "ü\n", "answer": "3", "n": 3, "x": -2.0, "right": True, "tags": None, "chat": TURNS[:1], "kind": "sum"},
]  # fmt: skip
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


def rows(data):
    return [record for _, record in placed(data)]


class Frame:
    """What pandas.DataFrame is asked for, with cells as pandas gives them: scalars and arrays of numpy, NaN."""

    def __init__(self, columns, index=None):
        self.cells, self.columns, self.pieces = columns, list(columns), []
        self.size = len(next(iter(columns.values()), ()))

    def __len__(self):
        return self.size

    def __iter__(self):  # as pandas does, and as no one wants
        return iter(self.columns)

    @property
    def iloc(self):
        frame = self

        class Pieces:
            def __getitem__(self, at):
                frame.pieces.append(range(*at.indices(len(frame))))
                return Frame({name: values[at] for name, values in frame.cells.items()})

        return Pieces()

    def to_dict(self, orient):
        assert orient == "records"
        return [dict(zip(self.columns, row)) for row in zip(*self.cells.values())]


class NaTType:
    """As pandas.NaT: equal to nothing."""

    def __eq__(self, other):
        return False


class Tables(dict):
    """As datasets.DatasetDict: a dict of splits."""


class Rows:
    """As datasets.Dataset: knows its columns, gives its rows."""

    column_names = ("prompt",)

    def __iter__(self):
        yield {"prompt": np.str_("a"), "n": np.int64(3), "x": np.array([1.5, 2.5])}


# ---- tables that are here whatever is installed ----


def test_cells_of_a_frame_become_plain_python():
    cells = {
        "prompt": ["a", "b"], "n": [np.int64(1), np.float64("nan")], "when": [datetime.date(2020, 1, 2), NaTType()],
        "chat": [np.array(TURNS, object), math.nan], "deep": [{"k": np.array([[1, 2]])}, None], 7: [b"raw", True],
        "cost": [decimal.Decimal("1.50"), np.bool_(False)],
    }  # fmt: skip
    found = rows(Frame(cells))
    assert found == [
        {"prompt": "a", "n": 1, "when": "2020-01-02", "chat": TURNS, "deep": {"k": [[1, 2]]}, "7": b"raw",
         "cost": "1.50"},
        {"prompt": "b", "n": None, "when": None, "chat": None, "deep": None, "7": True, "cost": False},
    ]  # fmt: skip
    assert type(found[0]["n"]) is int and type(found[0]["chat"]) is list and type(found[1]["cost"]) is bool


def test_a_frame_is_read_in_pieces_in_its_order():
    frame = Frame({"prompt": [f"p{i}" for i in range(2500)]})
    assert [r["prompt"] for r in rows(frame)] == frame.cells["prompt"]
    assert len(frame.pieces) > 1 and max(map(len, frame.pieces)) <= 1024
    assert [i for piece in frame.pieces for i in piece] == list(range(2500))


@pytest.mark.parametrize("make", [pa.table, pa.RecordBatch.from_pydict])
def test_arrow_tables(make):
    assert rows(make(COLUMNS)) == ROWS
    assert rows(pa.table({"prompt": ["a"], "t": pa.array([1], pa.timestamp("ns"))}))[0]["t"].startswith("1970-01-01")


def test_rows_of_a_dataset_are_made_plain():
    assert rows(Rows()) == [{"prompt": "a", "n": 3, "x": [1.5, 2.5]}]


# ---- the real ones ----


def test_pandas(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(COLUMNS, index=[5, 3, 3])
    frame["kind"] = frame["kind"].astype("category")
    assert rows(frame) == ROWS
    assert rows(frame.iloc[::-1]) == ROWS[::-1]
    more = pandas.DataFrame({"prompt": ["a", "b"], "t": pandas.to_datetime(["2020-01-02", None])})
    more["i"], more["s"] = pandas.array([1, None], dtype="Int64"), pandas.array(["q", pandas.NA], dtype="string")
    assert rows(more) == [
        {"prompt": "a", "t": "2020-01-02 00:00:00", "i": 1, "s": "q"}, {"prompt": "b", "t": None, "i": None, "s": None}
    ]  # fmt: skip
    frame.to_parquet(tmp_path / "f.parquet")
    assert rows(pandas.read_parquet(tmp_path / "f.parquet")) == ROWS  # lists come back as arrays
    assert rows(frame["prompt"]) == [r["prompt"] for r in ROWS]
    with raises(DataError, "data.columns"):
        rows(pandas.concat([frame, frame], axis=1))
    with raises(DataError, "record 1.prompt.missing"):
        from_records(pandas.DataFrame([["1+1=", "2"]]))
    assert from_records(pandas.DataFrame([["1+1=", "2"]]), {"prompt": "0", "answer": "1"}).prompt(0).answer == "2"


def test_polars():
    polars = pytest.importorskip("polars")
    assert rows(polars.DataFrame(COLUMNS)) == ROWS
    assert rows(polars.Series("prompt", ["a", "b"])) == ["a", "b"]
    with raises(DataError, "data.polars.LazyFrame") as caught:
        rows(polars.DataFrame(COLUMNS).lazy())
    assert ".collect()" in str(caught.value)


def test_datasets_of_hugging_face(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    assert rows(data) == ROWS
    assert rows(data.select([2, 0])) == [ROWS[2], ROWS[0]]
    assert rows(data.to_iterable_dataset()) == ROWS
    assert rows(data.with_format("numpy").select_columns(["prompt", "n"])) == [
        {"prompt": r["prompt"], "n": r["n"]} for r in ROWS
    ]
    assert rows(data.with_transform(lambda batch: {"prompt": [p + "!" for p in batch["prompt"]]}))[0] == {
        "prompt": "a!"
    }
    both = datasets.DatasetDict(train=data, test=data)
    with raises(DataError, "data.splits"):
        rows(both)
    with raises(DataError, "heldout.splits"):
        placed(datasets.IterableDatasetDict(train=data.to_iterable_dataset()), "heldout")


# ---- iterators and lists ----


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=5), min_size=1)))
def test_lists_iterators_and_files_of_records_say_the_same(records):
    made = [{**record, "prompt": f"p{i}"} for i, record in enumerate(records)]
    assert rows(made) == rows(iter(made)) == rows(tuple(made)) == rows({i: r for i, r in enumerate(made)}.values())
    if made:
        prints = {from_records(data).fingerprint() for data in (made, (r for r in made), map(dict, made))}
        assert prints == {from_records(json.loads(json.dumps(made))).fingerprint()}


def test_an_iterator_is_read_once_and_as_it_comes():
    taken = []

    def source():
        for i in range(3):
            taken.append(i)
            yield {"prompt": str(i)}

    found = placed(source())
    assert taken == [] and next(found) == ("record 1", {"prompt": "0"}) and taken == [0]
    used = source()
    assert len(PromptSet.of(used)) == 3
    with raises(DataError, "data.exhausted"):
        PromptSet.of(used)


def test_what_an_iterator_raises_is_its_own():
    def source():
        yield {"prompt": "a"}
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        PromptSet.of(source())


def test_pairs_come_from_tables_too():
    made = pair_records(Frame({"prompt": ["a"], "chosen": ["x"], "rejected": ["y"], "margin": [np.float32(0.5)]}))
    assert made.prompt(0).pairs[0][:3] == ("x", "y", 0.5)
    text = pair_records([{"prompt": "a", "chosen": "x", "rejected": "y", "margin": "0.5"}])
    assert text.prompt(0).pairs[0].margin == 0.5


# ---- what is refused ----

TWICE = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])


@pytest.mark.parametrize(
    "wrong, kind, hint",
    [
        (7, "int", ""), (None, "NoneType", ""), (b"a.jsonl", "bytes", ""), ({"prompt": "a"}, "dict", ""),
        ({"a", "b"}, "set", "order"), (frozenset("ab"), "frozenset", "order"),
        (io.StringIO("a\nb"), "file", "open file"), (len, "builtin_function_or_method", "call it"),
        (lambda: [], "function", "call it"),
        (Tables(train=Rows(), test=Rows()), "splits", "data['train'], data['test'] as heldout"),
        (Tables(all=Rows()), "splits", "data['all']"), (np.float64(3), "numpy.float64", ""), (object(), "object", ""),
        (Frame({"prompt": ["a"], 1: [2], "1": [3]}), "columns", "'1'"),
        (TWICE, "columns", "'prompt'"), (ds.dataset(TWICE), "columns", "'prompt'"),
    ],
)  # fmt: skip
def test_what_holds_no_records_is_refused_by_its_type(wrong, kind, hint):
    with raises(DataError, f"data.{kind}") as caught:
        list(placed(wrong))
    assert hint in str(caught.value) and "\n" not in str(caught.value)


def test_names_of_files_in_a_list_are_not_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv", "notes.xyz"):
        (tmp_path / name).write_text("prompt\n1\n")
    with raises(DataError, "data.names"):
        rows(["a.csv"])
    for text in ("b.csv", "notes.xyz", "1+1=", "x." * 5000, "a\0.csv"):
        assert rows([text]) == [text]


# ---- the identity of what is given ----


class Thing:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize(
    "one, same, other",
    [
        (np.arange(3000.0), np.arange(3000.0), np.where(np.arange(3000) == 1500, -1.0, np.arange(3000.0))),
        (np.int64(3), np.int64(3), np.int64(4)),
        (Thing(1), Thing(1), Thing(2)),
        ({"b", "a"}, {"a", "b"}, {"a", "c"}),
        (decimal.Decimal("1.5"), decimal.Decimal("1.5"), decimal.Decimal("1.50")),
    ],
)
def test_other_values_beside_a_prompt_have_another_fingerprint(one, same, other):
    prints = [from_records([{"prompt": "a", "extra": value}]).fingerprint() for value in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("kind", [list, lambda value: {"a": value}])
def test_a_cell_that_is_nested_too_deep(kind):
    deep = 1
    for _ in range(5000):
        deep = kind((deep,)) if kind is list else kind(deep)
    with raises(DataError, "data.depth"):
        list(placed(Frame({"prompt": ["a"], "x": [deep]})))


# ---- other libraries, as they are ----

SUMS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(20)]


def of_datasets_stream(folder):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list(SUMS).to_iterable_dataset()


def of_grain(folder):
    return pytest.importorskip("grain").MapDataset.source(SUMS)


def of_grain_stream(folder):
    return pytest.importorskip("grain").MapDataset.source(SUMS).to_iter_dataset()


def of_lance(folder):
    lance = pytest.importorskip("lance")
    return lance.write_dataset(pa.Table.from_pylist(SUMS), str(folder / "sums.lance"))


def of_arrow_dataset(folder):
    pq.write_table(pa.Table.from_pylist(SUMS), folder / "sums.parquet")
    return ds.dataset(folder / "sums.parquet")


@pytest.mark.parametrize("make", [of_datasets_stream, of_grain, of_grain_stream, of_lance, of_arrow_dataset])
def test_a_source_of_another_library_is_read_as_it_is(tmp_path, make):
    assert [record for _, record in placed(make(tmp_path))] == SUMS


def test_a_directory_of_lance_is_a_source_whose_versions_differ(tmp_path):
    lance, place = pytest.importorskip("lance"), str(tmp_path / "sums.lance")
    lance.write_dataset(pa.Table.from_pylist(SUMS[:5]), place)
    before = source_files(place)
    assert [record for _, record in read_records(place)] == SUMS[:5]
    lance.write_dataset(pa.Table.from_pylist(SUMS[5:]), place, mode="append")
    assert [record for _, record in read_records(place)] == SUMS and source_files(place) != before


def test_a_directory_of_lance_without_its_library_names_it(tmp_path, monkeypatch):
    (tmp_path / "sums.lance" / "_versions").mkdir(parents=True)
    with raises(DataError, "sums.lance.lance"):  # it was not written to its end
        list(read_records(str(tmp_path / "sums.lance")))
    (tmp_path / "sums.lance" / "_versions" / "1.manifest").write_bytes(b"any")
    monkeypatch.setitem(sys.modules, "lance", None)
    with raises(DataError, "sums.lance.lance") as caught:
        list(read_records(str(tmp_path / "sums.lance")))
    assert "pip install pylance" in str(caught.value)
