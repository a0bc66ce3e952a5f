"""Pages of trajectories are those that a plain filter of the rows gives."""

import random
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.data.trajectories import conform, read_trajectories
from tilth.ui.web import search as searching
from tilth.ui.web.search import PAGE, Wanted, answers_to, group_of, newest_step, prompts_of, search


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Files of three ranges of steps; the first one as earlier versions wrote it, without lengths."""
    chance, root = random.Random(0), tmp_path_factory.mktemp("run")
    (root / "trajectories").mkdir()
    for first in (1, 3, 5):
        rows = []
        for step in (first, first + 1):
            for i in range(40):
                length = chance.randrange(1, 9)
                rows.append(
                    {"step": step, "id": step * 100 + i, "group": step * 10 + i // 4, "prompt": i // 4,
                     "length": length, "prompt_text": f"what is {i // 4}?",
                     "text": chance.choice(["Yes", "no", "Ähre"]) * length,
                     "reward": chance.choice([None, 0.0, 0.5, 0.7, 1.0]), "finish": chance.choice(["stop", "length"]),
                     "tokens": [1] * (2 + length), "mask": [0, 0] + [1] * length, "prompt_length": 2}
                )  # fmt: skip
        table = conform(pa.Table.from_pylist(rows))
        table = table.drop_columns("length") if first == 1 else table
        pq.write_table(table, root / "trajectories" / f"steps-{first:06d}-{first + 1:06d}.parquet", row_group_size=32)
    return root


spread = st.sampled_from([(None, None), (0.5, None), (None, 0.5), (0.2, 0.9), (0.7, 0.7), (2.0, None)])
searches = st.builds(
    Wanted, steps=st.sampled_from([(6, 6), (1, 6), (2, 3), (9, 12)]), reward=spread,
    length=st.sampled_from([(None, None), (3, None), (None, 4), (2, 5)]),
    finish=st.sampled_from(["", "stop", "error", "z"]),
    prompt=st.sampled_from([None, 3]), text=st.sampled_from(["", "yes", "is 2", "ähre", "?", "a"]),
    sort=st.sampled_from(["step", "reward", "length", "id"]), down=st.booleans(), page=st.sampled_from([0, 1]),
)  # fmt: skip


def inside(value, ends):
    low, high = ends
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def single(ends):
    """The numbers as files have rewards."""
    return tuple(None if end is None else float(np.float32(end)) for end in ends)


@settings(max_examples=examples(300), deadline=None)
@given(searches, st.sampled_from([0, 2000, 1 << 20]))
def test_it_finds_what_a_filter_of_all_rows_finds(run, wanted, kept_bytes):
    rows = [row | {"length": len(row["tokens"]) - 2} for row in read_trajectories(run).to_pylist()]
    kept = [
        row for row in rows
        if wanted.steps[0] <= row["step"] <= wanted.steps[1] and inside(row["reward"], single(wanted.reward))
        and inside(row["length"], wanted.length) and wanted.finish in ("", row["finish"])
        and wanted.prompt in (None, row["prompt"])
        and (wanted.text.lower() in row["text"].lower() or wanted.text.lower() in row["prompt_text"].lower())
    ]  # fmt: skip
    sign = -1 if wanted.down else 1
    order = [(row[wanted.sort] is None, sign * (row[wanted.sort] or 0), sign * row["step"], row["id"]) for row in kept]
    kept = [row["id"] for _, row in sorted(zip(order, kept), key=lambda pair: pair[0])]
    with mock.patch.object(searching, "KEPT", kept_bytes):
        found = search(run, wanted)
    assert found.notes == [] and (found.total == len(kept) or (found.more and wanted.text and wanted.sort == "step"))
    assert not found.more or (wanted.page + 1) * PAGE < found.total < len(kept)
    assert [row["id"] for row in found.rows] == kept[wanted.page * PAGE : (wanted.page + 1) * PAGE]
    texts = {row["id"]: row["text"] for row in rows}
    assert all(row["text"] == texts[row["id"]] for row in found.rows)


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.one_of(st.none(), st.text("aAbßé ", max_size=5)), max_size=12),
       st.text("abAé ", min_size=1, max_size=3), st.integers(0, 3), st.sampled_from([1, 61]))  # fmt: skip
def test_a_text_is_found_within_each_text_alone(texts, wanted, first, sampled):
    with mock.patch.object(searching, "SAMPLED", sampled):
        found = searching._said(pa.array(texts, pa.string())[first:], wanted)
    assert found.tolist() == [text is not None and wanted.lower() in text.lower() for text in texts[first:]]


def test_a_group_is_whole_and_the_best_comes_first(run):
    found = group_of(run, 6, 62)
    assert [row["id"] for row in found] and {row["group"] for row in found} == {62} and len(found) == 4
    rewards = [row["reward"] for row in found if row["reward"] is not None]
    assert rewards == sorted(rewards, reverse=True) and found[0]["tokens"]
    assert [row["id"] for row in group_of(run, 6, None, 605)] == [605]


def test_prompts_and_their_newest_answers(run):
    assert newest_step(run) == 6 and "what is 3?" in prompts_of(run)
    found = answers_to(run, "what is 3?")
    assert {row["step"] for row in found} == {6} and {row["prompt"] for row in found} == {3}
    assert answers_to(run, "never asked") == []


def test_a_file_that_cannot_be_read_is_named_and_left_out(run, tmp_path):
    folder = tmp_path / "trajectories"
    folder.mkdir()
    pq.write_table(pa.table({"step": [1], "id": [1]}), folder / "steps-000001-000001.parquet")
    (folder / "steps-000002-000002.parquet").write_bytes(b"torn")
    pq.write_table(pa.table({"step": ["x"], "id": [1]}), folder / "steps-000003-000003.parquet")
    found = search(tmp_path, Wanted((0, 9)))
    assert [row["id"] for row in found.rows] == [1] and found.rows[0]["length"] is None
    assert [note.split()[0] for note in found.notes] == ["steps-000002-000002.parquet", "steps-000003-000003.parquet"]


def test_columns_are_read_of_groups_of_rows_that_have_the_text(tmp_path, monkeypatch):
    (tmp_path / "trajectories").mkdir()
    path, read, reader = tmp_path / "trajectories" / "steps-000001-000001.parquet", [], searching.StoredFile._read
    texts = ["no", None, "no", "A needle", None, "no", "no", "no"]

    def written(texts):
        rows = [{"step": 1, "id": i, "text": text, "prompt_text": "p" if i else None} for i, text in enumerate(texts)]
        pq.write_table(conform(pa.Table.from_pylist(rows)), path, row_group_size=2)

    def reading(file, groups, names):
        read.append(([*groups], "text" in names, "reward" in names))
        return reader(file, groups, names)

    written(texts)
    monkeypatch.setattr(searching.StoredFile, "_read", reading)
    monkeypatch.setattr(searching, "BYTES", 30)
    assert [row["id"] for row in search(tmp_path, Wanted((1, 1), text="a NEEDLE")).rows] == [3]
    assert read == [([0, 1, 2, 3], True, False), ([1], False, False), ([1], False, True)]
    assert [row["id"] for row in search(tmp_path, Wanted((1, 1), text="a needle", sort="reward")).rows] == [3]
    assert not any(texts for _, texts, _ in read[3:])  # they are kept
    written([*texts, "another needle"])
    assert [row["id"] for row in search(tmp_path, Wanted((1, 1), text="needle")).rows] == [3, 8]


def test_a_search_in_the_order_of_steps_ends_with_a_full_page(tmp_path, monkeypatch):
    (tmp_path / "trajectories").mkdir()
    for step in range(1, 13):
        table = conform(pa.Table.from_pylist([{"step": step, "id": i, "text": "yes"} for i in range(30)]))
        pq.write_table(table, tmp_path / "trajectories" / f"steps-{step:06d}-{step:06d}.parquet")
    read, match = [], searching._match
    monkeypatch.setattr(searching, "_match", lambda path, *more: (read.append(path.name), match(path, *more))[1])
    monkeypatch.setattr(searching, "READERS", 1)
    for down in (False, True):
        found = search(tmp_path, Wanted((0, 99), text="YES", down=down))
        first = 12 if down else 1
        assert {row["step"] for row in found.rows} == {first, first + (-1 if down else 1)}
        assert (len(found.rows), found.total, found.more, found.notes, len(read)) == (PAGE, 60, True, [], 2)
        read.clear()
    assert search(tmp_path, Wanted((0, 99), text="yes", sort="id")).total == 360  # any file may have the least
    assert (found := search(tmp_path, Wanted((0, 99), text="yes", page=7))).total == 360 and not found.more


def test_groups_of_rows_are_left_out_by_what_their_statistics_say(tmp_path, monkeypatch):
    (tmp_path / "trajectories").mkdir()
    rows = [{"step": 1, "id": i, "finish": "error" if i == 5 else "stop", "reward": i / 10} for i in range(8)]
    path = tmp_path / "trajectories" / "steps-000001-000001.parquet"
    pq.write_table(conform(pa.Table.from_pylist(rows)), path, row_group_size=2)
    read, reader = [], searching.StoredFile._read
    monkeypatch.setattr(searching.StoredFile, "_read", lambda file, g, n: (read.append([*g]), reader(file, g, n))[1])
    assert [row["id"] for row in search(tmp_path, Wanted((1, 1), finish="error")).rows] == [5]
    assert [row["id"] for row in search(tmp_path, Wanted((1, 1), reward=(0.7, None))).rows] == [7]
    assert search(tmp_path, Wanted((1, 1), finish="nowhere")).total == 0
    assert {group for groups in read for group in groups} == {2, 3}


def test_a_value_that_cannot_be_kept_drops_none_that_are(monkeypatch):
    monkeypatch.setattr(searching, "KEPT", 100)
    monkeypatch.setattr(searching, "ENTRY", 0)
    monkeypatch.setattr(searching, "RESTS", -1.0)  # all rest at once
    kept = searching.Kept()
    for _ in range(2):
        kept.put("a", "first", 80)  # kept once
    kept.put("b", "large", 160)
    assert kept.get("a") == "first" and kept.get("b") is None
    kept.put("c", "other", 80)
    assert kept.get("a") is None and kept.get("c") == "other"
    monkeypatch.setattr(searching, "RESTS", 60.0)
    kept.put("d", "newer", 30)
    kept.put("e", "small", 20)
    assert kept.get("c") == "other" and kept.get("d") is None and kept.get("e") == "small"


def test_values_without_a_byte_are_no_more_than_their_entries_allow(monkeypatch):
    monkeypatch.setattr(searching, "KEPT", 10 * searching.ENTRY)
    monkeypatch.setattr(searching, "RESTS", -1.0)
    kept = searching.Kept()
    for i in range(30):
        kept.put(i, b"", 0)
    assert [i for i in range(30) if kept.get(i) is not None] == [*range(20, 30)]


def test_of_many_files_what_was_read_once_is_not_read_again(tmp_path, monkeypatch):
    """A cache of the newest so many files would have none of them the next time."""
    (tmp_path / "trajectories").mkdir()
    for step in range(1, 301):
        rows = [{"step": step, "id": i, "text": "yes"} for i in range(2)]
        pq.write_table(conform(pa.Table.from_pylist(rows)).select(["step", "id", "text"]),
                       tmp_path / "trajectories" / f"steps-{step:06d}-{step:06d}.parquet")  # fmt: skip
    monkeypatch.setattr(searching, "_KEPT", searching.Kept())
    read, reader = [], searching.pq.read_metadata
    monkeypatch.setattr(searching.pq, "read_metadata", lambda path: (read.append(path), reader(path))[1])
    for text, count in (("yes", 300), ("no", 300), ("yes", 300)):
        assert search(tmp_path, Wanted((0, 999), text=text, sort="id")).total == (600 if text == "yes" else 0)
        assert len(read) == count
