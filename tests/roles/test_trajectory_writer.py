"""The writer role, called directly: what is in a row, what is written when, and what the controller gets to see."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.roles import small
from tests.roles.test_experience import trajectory
from tilth.cluster.backends.inline import InlineStore, pickled_size
from tilth.core.trajectory import Segment
from tilth.data.prompts import PromptSet
from tilth.data.trajectories import COLUMNS, conform, read_trajectories
from tilth.roles.experience import put_like, to_batch
from tilth.roles.trajectory_writer import SHOWN, TrajectoryWriter


@pytest.fixture
def store():
    return InlineStore()


@pytest.fixture
def writer(store, tmp_path):
    made = TrajectoryWriter(small.PROMPTS, store)
    made.open(str(tmp_path / "trajectories"))
    return made


def added(store, batch, step, prompts=small.PROMPTS):
    """The table of a batch, and the sample that its writer answers."""
    made, kept = TrajectoryWriter(prompts, store), []
    made.files = type("Files", (), {"add": kept.append})
    sample = made.add(batch, step)
    return kept[0], sample


def scored(store):
    made = [
        trajectory(4, [1, 2], [3], "a", 0.25),
        trajectory(5, [1, 2], [4, 5, 6], "bü", None, "length"),
        trajectory(6, [1], [7], "", 1.0),
    ]
    nan = np.nan
    return to_batch(made, store).with_rows(**{
        "part/form": np.float32([0.5, nan, nan]), "part/style": np.float32([2, nan, 3])
    })  # fmt: skip


def test_a_row_tells_everything_of_its_trajectory(store):
    table, sample = added(store, scored(store), 9)
    rows = table.to_pylist()
    prompt = small.PROMPTS[7]
    assert rows[0] == {
        "step": 9, "id": 4, "group": 2, "prompt": 7, "prompt_text": prompt.text, "text": "a", "answer": prompt.answer,
        "tokens": [1, 2, 3], "mask": [0, 0, 1], "prompt_length": 2, "length": 1,
        "segments": [{"role": "user", "start": 0}, {"role": "assistant", "start": 2}],
        "conversations": None, "reward": 0.25, "parts": [("form", 0.5), ("style", 2.0)], "turn_rewards": None,
        "finish": "stop", "logprobs": [0.0, 0.0, -0.5], "version": 3,
    }  # fmt: skip
    assert [r["prompt_length"] for r in rows] == [2, 2, 1]
    assert rows[1]["tokens"] == [1, 2, 4, 5, 6] and rows[1]["text"] == "bü" and rows[1]["finish"] == "length"
    assert sample == {"prompt": prompt.text, "text": "a", "answer": prompt.answer, "reward": 0.25}


def test_what_is_missing_is_null_and_never_zero(store):
    table, _ = added(store, scored(store), 1)
    assert table["reward"].to_pylist() == [0.25, None, 1.0] and table["reward"].null_count == 1
    assert table["parts"].to_pylist() == [[("form", 0.5), ("style", 2.0)], [], [("style", 3.0)]]


def test_a_prompt_without_an_answer_has_none(store):
    prompts = PromptSet.of([f"{i}+1=" for i in range(8)])
    table, sample = added(store, scored(store), 1, prompts)
    assert table["answer"].to_pylist() == [None] * 3 and table["answer"].type == pa.string()
    assert sample["answer"] is None


def test_a_missing_reward_of_the_first_row_is_none_in_the_sample(store):
    _, sample = added(store, scored(store).select(np.array([1])), 1)
    assert sample["reward"] is None


def test_the_table_is_what_the_run_directory_keeps(store):
    table, _ = added(store, scored(store), 1)
    kept = conform(table)
    assert kept.schema == COLUMNS
    assert set(COLUMNS.names) - {"advantages", "trainer_logprobs"} == set(table.column_names)
    assert {c: kept[c].to_pylist() for c in table.column_names} == {c: table[c].to_pylist() for c in table.column_names}


def test_rows_may_be_selected_and_turned(store):
    table, sample = added(store, scored(store).select(np.array([2, 0])), 1)
    assert table["id"].to_pylist() == [6, 4] and table["tokens"].to_pylist() == [[1, 7], [1, 2, 3]]
    assert sample["reward"] == 1.0


def test_segments_and_mask_of_several_turns_are_in_the_row(store):
    one = trajectory(4, [1, 2], [3, 4, 5], "a", 0.5)
    spans = [Segment("user", 0), Segment("assistant", 2), Segment("tool", 3, opens=True), Segment("assistant", 4)]
    mask = np.array([0, 0, 1, 0, 1], np.uint8)
    table, _ = added(store, to_batch([replace(one, mask=mask, segments=spans)], store), 1)
    (row,) = table.to_pylist()
    assert row["mask"] == mask.tolist() and row["prompt_length"] == 2
    assert [(s["role"], s["start"]) for s in row["segments"]] == [one[:2] for one in spans]
    assert row["conversations"] == [0, 3]


# ---- what is written ----


def steps(folder):
    return read_trajectories(folder)["step"].to_pylist()


def test_only_committed_steps_are_written_and_each_once(store, writer, tmp_path):
    for step in (1, 2):
        writer.add(scored(store), step)
        writer.commit(step)
        writer.commit(step)
    writer.add(scored(store), 3)
    writer.flush()
    writer.flush()
    assert steps(tmp_path) == [1] * 3 + [2] * 3
    writer.add(scored(store), 3)  # the step runs again: what its first attempt left is part of neither
    writer.commit(4)
    writer.flush()
    assert steps(tmp_path) == [1] * 3 + [2] * 3


def test_a_rewind_drops_later_steps(store, writer, tmp_path):
    for step in (1, 2, 3):
        writer.add(scored(store), step)
        writer.commit(step)
    writer.flush()
    writer.rewind(2)
    assert steps(tmp_path) == [1] * 3 + [2] * 3


@pytest.mark.parametrize("tokens", [16, 65_536])
def test_what_it_answers_does_not_grow_with_the_tokens(store, writer, tokens):
    text = "x" * tokens
    batch = to_batch([trajectory(0, [1], list(range(tokens)), text, 1.0)], store)
    sample = writer.add(batch, 1)
    assert sample["text"] == text[:SHOWN] and pickled_size(sample) < 2 * SHOWN


def test_files_of_before_there_were_segments_are_read_with_none(store, writer, tmp_path):
    writer.add(scored(store), 1)
    writer.commit(1)
    writer.flush()
    (path,) = tmp_path.rglob("*.parquet")
    pq.write_table(pq.read_table(path).drop_columns(["mask", "segments"]), path)
    old = read_trajectories(tmp_path)
    assert old.schema == COLUMNS and old["mask"].null_count == old["segments"].null_count == 3
    assert old["tokens"].to_pylist() == [[1, 2, 3], [1, 2, 4, 5, 6], [1, 7]]


def test_rewards_of_turns_are_one_for_each_assistant_segment(store):
    segments = [Segment("user", 0), Segment("assistant", 1), Segment("tool", 3), Segment("assistant", 4)]
    one = replace(
        trajectory(4, [1], [3, 3, 3, 3, 3], "a", 1.0), mask=np.uint8([0, 1, 1, 0, 1, 1]), segments=segments,
        turn_rewards=[(2, 0.25), (5, -0.5)],
    )  # fmt: skip
    table, _ = added(store, to_batch([one, trajectory(5, [1], [3], "b", 0.0)], store, by_turn=True), 1)
    assert table["turn_rewards"].to_pylist() == [[0.25, -0.5], None]


def test_advantages_and_the_trainer_s_log_probs_are_those_of_the_ids_that_were_learned_from(store, writer, tmp_path):
    batch = scored(store)
    tokens = batch.read(store, "tokens")["tokens"]
    flat = np.arange(len(tokens.values), dtype=np.float32) + 1
    learned = put_like(put_like(batch, store, "advantages", flat, tokens), store, "old_logprobs", -flat, tokens)
    writer.add(batch, 1, learned.select(np.array([2, 0])))
    writer.commit(1)
    writer.flush()
    rows = {row["id"]: row for row in read_trajectories(tmp_path).to_pylist()}
    assert rows[4]["advantages"] == [0.0, 0.0, 3.0] and rows[4]["trainer_logprobs"] == [0.0, 0.0, -3.0]
    assert rows[6]["advantages"] == [0.0, 10.0] and rows[6]["trainer_logprobs"] == [0.0, -10.0]
    assert rows[5]["advantages"] is None and rows[5]["trainer_logprobs"] is None and rows[5]["text"] == "bü"


def test_what_an_algorithm_does_not_compute_is_null(store, writer, tmp_path):
    batch = scored(store)
    tokens = batch.read(store, "tokens")["tokens"]
    writer.add(batch, 1, put_like(batch, store, "advantages", np.ones(len(tokens.values), np.float32), tokens))
    writer.commit(1)
    writer.flush()
    found = read_trajectories(tmp_path)
    assert found["advantages"].null_count == 0 and found["trainer_logprobs"].null_count == 3
