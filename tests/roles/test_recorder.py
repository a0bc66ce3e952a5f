"""The recorder role, called directly: examples for supervised steps, and the table that people read."""

import numpy as np
import pyarrow as pa
import pytest

from tests.roles import small
from tests.roles.test_experience import trajectory
from tilth.cluster.inline import InlineStore
from tilth.core.errors import DataError
from tilth.data.prompts import PromptSet
from tilth.flows.trajectories import COLUMNS, conform
from tilth.roles.experience import check_identity, to_batch
from tilth.roles.recorder import RecorderWorker


@pytest.fixture
def store():
    return InlineStore()


def recorder(store, prompts=small.PROMPTS, context=small.CONTEXT):
    return RecorderWorker(prompts, small.TEMPLATE, context, store)


# ---- examples ----


def test_the_mask_is_one_on_the_answer_and_its_end(store):
    batch = recorder(store).examples(np.array([3, 99, 3]))
    read = batch.read(store, "tokens", "mask")
    for row, index in enumerate((3, 99, 3)):
        prompt, tokens, mask = small.PROMPTS[index], read["tokens"].row(row), read["mask"].row(row)
        assert small.TOKENIZER.decode(tokens[mask == 0]) == prompt.text
        assert small.TOKENIZER.decode(tokens[mask == 1][:-1]) == prompt.answer
        assert tokens[-1] == small.TOKENIZER.eos_id and mask[-1] == 1
        assert mask.tolist() == sorted(mask.tolist())
    assert batch["prompt"].tolist() == [3, 99, 3]
    assert batch["length"].tolist() == [len(read["tokens"].row(i)) for i in range(3)]


def test_examples_carry_the_identity_of_their_tokens(store):
    batch = recorder(store).examples([3, 4])
    check_identity(batch.with_rows(id=np.arange(2)), batch.read(store, "tokens")["tokens"])


def test_an_example_that_does_not_fit_or_has_no_answer_is_named(store):
    with pytest.raises(DataError, match=r"prompt 3 .* model.context is 5"):
        recorder(store, context=5).examples([3])
    with pytest.raises(DataError, match=r"record 1 has no answer"):
        recorder(store, PromptSet.of(["1+1="])).examples([0])


# ---- the table ----


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
    table, sample = recorder(store).table(scored(store), 9)
    rows = table.to_pylist()
    prompt = small.PROMPTS[7]
    assert rows[0] == {
        "step": 9, "id": 4, "group": 2, "prompt": 7, "prompt_text": prompt.text, "text": "a", "answer": prompt.answer,
        "tokens": [1, 2, 3], "mask": [0, 0, 1], "prompt_length": 2,
        "segments": [{"role": "user", "start": 0}, {"role": "assistant", "start": 2}],
        "reward": 0.25, "parts": [("form", 0.5), ("style", 2.0)],
        "finish": "stop", "logprobs": [0.0, 0.0, -0.5], "version": 3,
    }  # fmt: skip
    assert [r["prompt_length"] for r in rows] == [2, 2, 1]
    assert rows[1]["tokens"] == [1, 2, 4, 5, 6] and rows[1]["text"] == "bü" and rows[1]["finish"] == "length"
    assert sample == {"prompt": prompt.text, "text": "a", "answer": prompt.answer, "reward": 0.25}


def test_what_is_missing_is_null_and_never_zero(store):
    table, _ = recorder(store).table(scored(store), 1)
    assert table["reward"].to_pylist() == [0.25, None, 1.0] and table["reward"].null_count == 1
    assert table["parts"].to_pylist() == [[("form", 0.5), ("style", 2.0)], [], [("style", 3.0)]]


def test_a_prompt_without_an_answer_has_none(store):
    prompts = PromptSet.of([f"{i}+1=" for i in range(8)])
    table, sample = recorder(store, prompts).table(scored(store), 1)
    assert table["answer"].to_pylist() == [None] * 3 and table["answer"].type == pa.string()
    assert sample["answer"] is None


def test_a_missing_reward_of_the_first_row_is_none_in_the_sample(store):
    _, sample = recorder(store).table(scored(store).select(np.array([1])), 1)
    assert sample["reward"] is None


def test_the_table_is_what_the_run_directory_keeps(store):
    table, _ = recorder(store).table(scored(store), 1)
    kept = conform(table)
    assert kept.schema == COLUMNS
    assert set(COLUMNS.names) == set(table.column_names)
    assert {c: kept[c].to_pylist() for c in table.column_names} == {c: table[c].to_pylist() for c in table.column_names}


def test_rows_may_be_selected_and_turned(store):
    table, sample = recorder(store).table(scored(store).select(np.array([2, 0])), 1)
    assert table["id"].to_pylist() == [6, 4] and table["tokens"].to_pylist() == [[1, 7], [1, 2, 3]]
    assert sample["reward"] == 1.0
