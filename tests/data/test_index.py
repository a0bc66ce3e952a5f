"""Records that stay in a file: the same prompts, hashes and fingerprint as in memory; never a stale or damaged one."""

import json
import os
import pickle
import shutil
import tracemalloc
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.data.reading import load_texts
from tests.errors import raises
from tests.memory import start_tracing
from tilth.config.load import from_dict
from tilth.config.schema import DataConfig, MixtureSource
from tilth.core.errors import DataError
from tilth.data import cache, index, sources
from tilth.data.columns import PlainPrompts, Prompt
from tilth.data.origin import Home, RecordOrigin
from tilth.data.pairs import read_pairs
from tilth.data.prompts import Texts, load_source
from tilth.data.sources import read_documents, read_prompts

TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
RECORDS = {
    read_prompts: [{"prompt": f"p{i}\u00e9", "answer": str(i), "n": i, "x": [1, {"y": None}]} for i in range(30)]
    + [{"messages": TURNS, "tools": [{"name": "look"}]}],
    read_pairs: [{"prompt": f"p{i % 7}", "chosen": f"c{i}", "rejected": "r", "margin": 0.5} for i in range(30)],
    read_documents: [{"text": f"text {i}" + "\u20ac" * i} for i in range(30)] + [{"prompt": "a", "answer": "b"}],
}


@pytest.fixture(autouse=True)
def always_stored(monkeypatch):
    monkeypatch.setattr(index, "IN_MEMORY", 10)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig(source=str(path))


def whole(prompts):
    return [(p, p.where, [pair.where for pair in p.pairs]) for p in prompts]


@pytest.mark.parametrize("read", RECORDS, ids=lambda read: read.__name__)
def test_a_stored_source_is_the_one_in_memory(tmp_path, read):
    data = write(tmp_path / "d.jsonl", RECORDS[read])
    memory, stored = load_source(data, {}, read), load_source(data, {}, read, Home(str(tmp_path)))
    again = load_source(data, {}, read, Home(str(tmp_path)))
    assert stored.source.on_demand and again.source.on_demand and not memory.source.on_demand
    for found in (stored, again):
        assert whole(found) == whole(memory) and found.fingerprint() == memory.fingerprint()
        assert found.alphabet() == memory.alphabet()
        for column in ("hashes", "sizes", "wholes"):
            assert np.array_equal(
                getattr(found.source.index.columns, column), getattr(memory.source.index.columns, column)
            ), column
        assert [side.rows.tolist() for side in found.split(0.3)] == [side.rows.tolist() for side in memory.split(0.3)]


@pytest.mark.parametrize("size", [1, 700])
@pytest.mark.parametrize("digests", [False, True])
def test_records_of_several_batches(tmp_path, monkeypatch, size, digests):
    """A batch for each record, the last one empty, or for some."""
    monkeypatch.setattr(index, "_BATCH", size)
    data = write(tmp_path / "d.jsonl", RECORDS[read_prompts]).model_copy(update={"deduplicate": digests})
    memory, stored = load_source(data), load_source(data, home=Home(str(tmp_path)))
    again = load_source(data, home=Home(str(tmp_path)))
    assert whole(again) == whole(stored) == whole(memory)
    for column in ("hashes", "sizes", "wholes", "digests"):
        one, other = (getattr(found.source.index.columns, column) for found in (again, stored))
        assert np.array_equal(one, other) and len(one) == (len(again) if digests or column != "digests" else 0)


def test_tables_are_stored_with_their_values(tmp_path):
    table = pa.table(
        {"prompt": [b"a", b"b"], "x": [b"\xff", None], "y": [[1.5], []], "t": pa.array([1, 2], pa.date32())}
    )
    pq.write_table(table, tmp_path / "d.parquet")
    data = DataConfig(source=str(tmp_path / "d.parquet"))
    assert whole(load_source(data, home=Home(str(tmp_path)))) == whole(load_source(data))


def test_a_second_start_reads_no_record(tmp_path, monkeypatch):
    data, home = write(tmp_path / "d.jsonl", RECORDS[read_prompts]), Home(str(tmp_path))
    first = load_source(data, home=home)
    monkeypatch.setattr(sources, "to_prompt", None)  # would fail if it were called
    assert whole(load_source(data, home=home)) == whole(first)


def test_another_file_or_column_is_another_entry(tmp_path):
    file, home = tmp_path / "d.jsonl", Home(str(tmp_path))
    data = write(file, RECORDS[read_prompts][:30])
    one = load_source(data, home=home)
    other = load_source(data.model_copy(update={"columns": {"prompt": "answer"}}), home=home)
    assert [p.text for p in other][:3] == ["0", "1", "2"]
    shorter = load_source(write(file, RECORDS[read_prompts][:5]), home=home)
    assert len(shorter) == 5 and len(one) == 30 and one.fingerprint() != shorter.fingerprint()


def test_a_damaged_entry_is_built_anew(tmp_path):
    data, home = write(tmp_path / "d.jsonl", RECORDS[read_prompts]), Home(str(tmp_path))
    right = whole(load_source(data, home=home))
    (file,) = tmp_path.glob(".cache/records-*/records.arrow")
    file.write_bytes(file.read_bytes()[:-9])
    assert whole(load_source(data, home=home)) == right


def test_a_worker_opens_the_entry_and_not_the_source(tmp_path, monkeypatch):
    file = tmp_path / "d.jsonl"
    prompts = load_source(write(file, RECORDS[read_prompts] * 20), home=Home(str(tmp_path)))
    sent = pickle.dumps(prompts)
    monkeypatch.setattr(sources, "to_prompt", None)
    assert len(sent) < 2000 and whole(pickle.loads(sent)) == whole(prompts)
    monkeypatch.undo()
    write(file, RECORDS[read_prompts])  # the run goes on with what it began with
    assert whole(pickle.loads(pickle.dumps(pickle.loads(sent)))) == whole(prompts)
    shutil.rmtree(tmp_path / ".cache")  # as on another machine
    with raises(DataError, "d.jsonl.fingerprint"):
        pickle.loads(sent)


def test_a_file_of_the_cache_is_checked_where_its_state_differs(tmp_path, monkeypatch):
    data, home = write(tmp_path / "d.jsonl", RECORDS[read_prompts]), Home(str(tmp_path))
    right = whole(load_source(data, home=home))
    (file,) = tmp_path.glob(".cache/records-*/records.arrow")
    read = list[str]()
    monkeypatch.setattr(cache, "_checksum", lambda file, make=cache._checksum: read.append(file.name) or make(file))
    assert whole(load_source(data, home=home)) == right and not read
    file.touch()
    assert whole(load_source(data, home=home)) == right and read == ["records.arrow"]


def test_a_process_that_gets_a_source_reads_neither_its_whole_file_nor_its_index(tmp_path, monkeypatch):
    prompts = load_source(write(tmp_path / "d.jsonl", RECORDS[read_prompts] * 20), home=Home(str(tmp_path)))
    sent, whole_before = pickle.dumps(prompts), whole(prompts)
    monkeypatch.setattr(cache, "_checksum", None)
    monkeypatch.setattr(index.Stored, "columns", None)
    assert whole(pickle.loads(sent)) == whole_before


def test_a_file_of_the_cache_that_was_written_since_is_checked_again(tmp_path):
    prompts = load_source(write(tmp_path / "d.jsonl", RECORDS[read_prompts] * 20), home=Home(str(tmp_path)))
    sent, whole_before = pickle.dumps(prompts), whole(prompts)
    (file,) = tmp_path.glob(".cache/records-*/records.arrow")
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-9] + bytes(9))
    assert whole(pickle.loads(sent)) == whole_before and file.read_bytes() != content[:-9] + bytes(9)


def test_a_worker_reads_pairs_again_as_pairs(tmp_path, monkeypatch):
    monkeypatch.undo()
    prompts = load_source(write(tmp_path / "d.jsonl", RECORDS[read_pairs]), {}, read_pairs)
    assert whole(pickle.loads(pickle.dumps(prompts))) == whole(prompts)


def test_documents_on_demand(tmp_path):
    data = write(tmp_path / "d.jsonl", RECORDS[read_documents])
    found, lists = load_texts(data, home=Home(str(tmp_path))), load_texts(data)
    assert isinstance(found[0], Texts) and [list(side) for side in found] == [list(side) for side in lists]
    assert list(found[0][3:6]) == lists[0][3:6] and found[0][-1] == lists[0][-1]


def test_few_records_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.undo()
    prompts = load_source(write(tmp_path / "d.jsonl", RECORDS[read_prompts]), home=Home(str(tmp_path)))
    assert not prompts.source.on_demand and not (tmp_path / ".cache").exists()
    sent = pickle.dumps(prompts)  # by value: the file may be gone, and what reads it is not imported
    (tmp_path / "d.jsonl").unlink()
    assert whole(pickle.loads(sent)) == whole(prompts)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_sources_of_a_mixture_share_what_may_stay_in_memory(tmp_path, monkeypatch, count):
    monkeypatch.setattr(index, "IN_MEMORY", 200)
    record = {"prompt": "x" * 39, "answer": "y"}
    files = [str(write(tmp_path / f"{n}.jsonl", [record] * 2).source) for n in range(count)]
    parts = [{"name": f"s{n}", "source": file} for n, file in enumerate(files)]
    made = from_dict({"data": {"mixture": parts}, "reward": {"function": "exact"}}).data
    found = load_source(made, home=Home(str(tmp_path))).source
    stored = [part.on_demand for part in (found.parts if count > 1 else [found])]
    assert stored == [200 // count < 80] * count


@given(st.lists(st.text(max_size=20)))
def test_the_alphabet_is_that_of_all_texts(texts):
    indexer = index.Indexer()
    for i, text in enumerate(texts):
        indexer.add(Prompt(i, text, text[::-1] + "z"))
    assert indexer.done().alphabet == "".join(sorted({sign for text in texts for sign in text + "z"}))


def test_memory_is_not_that_of_the_records(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_BATCH", 1 << 14)
    data = write(tmp_path / "d.jsonl", [{"prompt": f"{i} " + "x" * 9000, "answer": "y"} for i in range(400)])
    start_tracing()
    try:
        prompts = load_source(data, home=Home(str(tmp_path)))
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(prompts) == 400 and now < 120_000 and peak < 1 << 20, (now, peak)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1), st.integers(1, 20))
def test_the_alphabet_has_every_character_once_however_many_texts_are_read_at_a_time(texts, most):
    indexer = index.Indexer()
    with patch.object(index, "_TEXTS", most):
        for number, text in enumerate(texts):
            indexer.add(Prompt(number, text, f"{text}!"))
    assert indexer.done().alphabet == "".join(sorted({"!", *"".join(texts)}))


def test_a_file_that_is_cut_off_while_it_is_read_is_named(tmp_path):
    prompts = load_source(write(tmp_path / "d.jsonl", RECORDS[read_prompts] * 20), home=Home(str(tmp_path)))
    (file,) = tmp_path.glob(".cache/records-*/records.arrow")
    os.truncate(file, 100)
    with raises(DataError, "records.arrow.changed"):
        prompts[0]


# ---- together ----

VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.floats(), st.booleans(), st.text(max_size=3), st.just(b"\xff")),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)
SAID = st.sampled_from(["", "x", "\x1c\u00e9", '"\\n\n', "\ud800"])
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": SAID},
    optional={"name": st.none() | SAID, "tool_calls": st.none() | st.just([{"name": "look"}])},
)
TURN_LISTS = st.lists(TURN, max_size=4) | st.tuples(SAID, SAID, SAID).map(
    lambda said: [{"role": role, "content": one} for role, one in zip(("system", "user", "assistant"), said)]
)
RECORD = st.dictionaries(
    st.sampled_from(["prompt", "answer", "text", "messages", "tools", "b", "a"]), VALUES | SAID | TURN_LISTS
)
COLUMNS = st.dictionaries(
    st.sampled_from(["prompt", "answer", "messages", "text"]), st.sampled_from(["prompt", "answer", "b", "{a}"])
)


@given(st.lists(RECORD, max_size=5), COLUMNS, st.sampled_from([read_prompts, read_documents]))
@example([{"prompt": "\ud800"}, {"prompt": "x", "answer": "\ud800"}, {"prompt": "\x1cx\u00e9"}], {}, read_prompts)
@example([{"prompt": "x", "b": "1", "a": "\ud800"}, {"prompt": "x", "answer": "null"}], {}, read_prompts)
@example([{"prompt": "x", "a": {"z": 1, "b": [b"\xff"]}}, {"prompt": "x", "a": {"z": 1, "b": []}}], {}, read_prompts)
@example([{"prompt": "x"}, {"prompt": "x", "b": None}], {"answer": "b"}, read_prompts)
@example([{"prompt": "x", "b": "y"}], {"messages": "b"}, read_prompts)
@example([{"text": "x", "prompt": "y"}, {"text": "x"}], {}, read_documents)
@example([{"b": TURNS, "a": 1}, {"messages": TURNS}, {"b": [*TURNS, TURNS[0]]}], {"messages": "b"}, read_prompts)
@example([{"prompt": TURNS[:1], "answer": None}, {"prompt": [*TURNS, TURNS[0]], "answer": "5"}], {}, read_prompts)
@example([{"messages": TURNS, "answer": "5"}, {"messages": TURNS, "answer": "\ud800"}], {}, read_prompts)
@example([{"prompt": None, "messages": TURNS}, {"messages": TURNS, "a": [1]}], {}, read_prompts)
def test_records_are_indexed_and_stored_together_as_one_by_one(found, columns, read):
    """A record that is taken gives the prompt of one that is read alone, and is none with an error or left out."""
    origin = RecordOrigin("data.source", MixtureSource(source=__file__), columns=columns)
    with patch.object(sources, "gather", lambda read, origin, material, make, plain: (make, plain)):
        make, together = read(origin)
    prompts = []
    for number, record in enumerate(found):
        if together.add(dict(record), f"d.jsonl:{number}", len(prompts)):
            prompts.append(make(record, f"d.jsonl:{number}", len(prompts)))  # raises for one that is not to be taken
    assert whole(together) == whole(prompts)
    one, other = (index.Indexer(digests=True) for _ in range(2))
    one.add(together)
    assert index._all_encoded(together) == [index._encoded(other.add(p)) for p in prompts]
    one, other = one.done(), other.done()
    assert (one.alphabet, one.fingerprint) == (other.alphabet, other.fingerprint)
    for column in ("hashes", "sizes", "wholes", "digests"):
        assert np.array_equal(getattr(one.columns, column), getattr(other.columns, column)), column


@pytest.mark.parametrize("read", [read_prompts, read_documents], ids=lambda read: read.__name__)
def test_plain_records_are_taken_together_and_others_keep_their_place(tmp_path, monkeypatch, read):
    taken, add = [], index.Indexer.add
    monkeypatch.setattr(index.Indexer, "add", lambda self, found: taken.append(found) or add(self, found))
    name = "prompt" if read is read_prompts else "text"
    other = {"messages": TURNS, "tools": []} if read is read_prompts else {"prompt": "7"}
    found = [other if i == 7 else {name: f"{i}"} for i in range(10)] + [{"prompt": "", "text": ""}]
    data = write(tmp_path / "d.jsonl", found)
    mixed = data.model_copy(update={"mixture": (MixtureSource(name="a", source=data.source, on_error="skip"),)})
    prompts = load_source(mixed, {}, read, Home(str(tmp_path)))
    assert [p.text for p in prompts] == ["2+2?" if i == 7 and "messages" in other else str(i) for i in range(10)]
    assert [p.index for p in prompts] == list(range(10))
    assert [len(one) if isinstance(one, PlainPrompts) else 1 for one in taken] == [7, 1, 2]


@pytest.mark.parametrize("levels", [30, 40, 800])
def test_a_nested_value_is_stored_or_refused_as_in_memory(tmp_path, levels):
    (tmp_path / "d.jsonl").write_text(f'{{"prompt": "a", "x": {"[" * levels + "]" * levels}}}\n' * 2)
    data, home = DataConfig(source=str(tmp_path / "d.jsonl")), Home(str(tmp_path))
    if levels == 800:
        with raises(DataError, "d.jsonl:1.depth"):
            load_source(data, home=home)
        return
    memory, stored = load_source(data), load_source(data, home=home)
    assert whole(stored) == whole(memory) and stored.fingerprint() == memory.fingerprint()


# ---- equal samples ----


@pytest.fixture
def digested(monkeypatch):
    """The texts of samples whose digest is made."""
    found, make = list[str](), index._text_digest
    monkeypatch.setattr(index, "_text_digest", lambda said: found.append(said.split("\0")[0]) or make(said))
    return found


@pytest.mark.parametrize("read", [read_prompts, read_documents], ids=lambda read: read.__name__)
def test_digests_are_made_for_deduplication_alone_and_once(tmp_path, digested, read):
    data, home = write(tmp_path / "d.jsonl", RECORDS[read] + RECORDS[read][3:5]), Home(str(tmp_path))
    plain = load_source(data, {}, read, home)
    assert digested == [] and len(plain) > len(RECORDS[read])
    data = data.model_copy(update={"deduplicate": True})
    found, memory = load_source(data, {}, read, home), load_source(data, {}, read)
    assert digested == 2 * [p.text for p in plain]
    again = load_source(data, {}, read, home)
    assert len(digested) == 2 * len(plain) and again.source.on_demand
    for other in (found, again, memory):
        assert other.rows.tolist() == list(range(len(RECORDS[read]))) and other.repeats == 2
        assert other.fingerprint() == plain.fingerprint()
        assert np.array_equal(other.source.digests(), plain.source.digests())


def test_equal_samples_are_trained_on_once(tmp_path):
    one = write(
        tmp_path / "a.jsonl", [{"prompt": p, "answer": a, "id": i} for i, (p, a) in enumerate(["xy", "xz", "xy"])]
    )
    write(tmp_path / "b.jsonl", [{"prompt": "x", "answer": "y"}, {"prompt": "w", "answer": "y"}])
    mixture = [{"name": n, "source": str(tmp_path / f"{n}.jsonl")} for n in "ab"]
    both = from_dict({"data": {"mixture": mixture, "deduplicate": True}, "reward": {"function": "exact"}}).data
    assert load_source(one.model_copy(update={"deduplicate": True})).rows.tolist() == [0, 1]
    assert load_source(both).rows.tolist() == [0, 1, 4]
    assert [rows.tolist() for rows in load_source(both).parts] == [[0, 1], [4]]
    assert load_source(one).rows.tolist() == [0, 1, 2]
