"""What can be wrong with data, tokenizer, template or answers ends ``tilth run`` in one line, and makes no folder."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tilth.cli.main import app
from tilth.data.tokenizer import Tokenizer

SMALL = ["model.hidden=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "train.threads=1"]
GOOD = [{"question": f"{a} and {a}?", "answer": f"It is <<{a}+{a}={2 * a}>>{2 * a}.\n#### {2 * a}"} for a in range(40)]
PROMPT = "data.columns.prompt=question"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "good.jsonl", GOOD)
    return tmp_path


def write(path, records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))


def refused(recipe, *keys, source="good.jsonl"):
    """The one line that the command ends in."""
    small = SMALL[-1:] if any(key.startswith("model.path=") for key in keys) else SMALL
    result = CliRunner().invoke(app, ["run", recipe, f"data.source={source}", *keys, *small])
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def nothing_was_made(folder):
    return not (folder / "runs").exists()


@pytest.mark.parametrize("recipe", ["pretrain", "sft", "gsm8k-grpo"])
def test_no_such_file(folder, recipe):
    assert "'nowhere.jsonl'" in refused(recipe, source="nowhere.jsonl")
    assert "is neither a task nor a file" in refused(recipe, source="nowhere.jsonl")


@pytest.mark.parametrize("recipe", ["pretrain", "sft"])
def test_a_shipped_recipe_asks_for_data(folder, recipe):
    result = CliRunner().invoke(app, ["run", recipe])
    assert result.exit_code == 2 and "data.source = 'your-" in result.stderr


@pytest.mark.parametrize("recipe", ["pretrain", "sft", "gsm8k-grpo"])
def test_a_line_that_does_not_parse_is_named(folder, recipe):
    write(folder / "torn.jsonl", [*GOOD[:2], '{"question": "a', *GOOD[2:]])
    assert "torn.jsonl:3" in refused(recipe, PROMPT, source="torn.jsonl") and nothing_was_made(folder)


def test_a_column_that_is_not_there_is_named_with_those_that_are(folder):
    pq.write_table(pa.table({"problem": ["1+1"], "solution": ["2"]}), folder / "d.parquet")
    said = refused("sft", source="d.parquet")
    assert "d.parquet" in said and "'prompt'" in said and "'problem'" in said and "'solution'" in said
    assert nothing_was_made(folder)


@pytest.mark.parametrize("recipe", ["pretrain", "sft", "gsm8k-grpo"])
def test_an_empty_file(folder, recipe):
    (folder / "empty.jsonl").write_text("")
    assert "empty.jsonl" in refused(recipe, source="empty.jsonl") and nothing_was_made(folder)


def test_an_answer_without_a_number(folder):
    write(folder / "d.jsonl", [*GOOD[:3], {"question": "and?", "answer": "who knows"}])
    said = refused("gsm8k-grpo", source="d.jsonl")
    assert "d.jsonl:4" in said and "no number" in said and "who knows" in said and nothing_was_made(folder)


def test_a_record_without_an_answer(folder):
    write(folder / "d.jsonl", [*GOOD[:3], {"question": "and?"}])
    assert "d.jsonl:4 has no answer" in refused("sft", PROMPT, "data.holdout=0.3", source="d.jsonl")


def test_a_share_that_leaves_nothing_to_evaluate_on(folder):
    said = refused("sft", PROMPT, "data.holdout=0.0001")
    assert "leaves none to evaluate on; set a larger data.holdout, data.heldout=FILE, or data.holdout=0" in said
    write(folder / "d.jsonl", [*GOOD[:3], {"question": "and?"}])
    assert "d.jsonl:4 has no answer" in refused("sft", PROMPT, "data.holdout=0.0001", source="d.jsonl")


def test_a_sequence_longer_than_the_context(folder):
    write(folder / "d.jsonl", [*GOOD, {"question": "long " * 800, "answer": "#### 1"}])
    said = refused("sft", PROMPT, "data.tokenizer=bpe:300", "data.holdout=0.2", source="d.jsonl")
    assert "d.jsonl:41" in said and "model.context is 640" in said and nothing_was_made(folder)


def test_a_prompt_that_leaves_no_room_for_a_completion(folder):
    write(folder / "d.jsonl", [*GOOD, {"question": "long " * 400, "answer": "#### 1"}])
    said = refused("gsm8k-grpo", "data.tokenizer=bpe:300", "data.holdout=0.2", source="d.jsonl")
    assert "d.jsonl:41" in said and "384" in said and nothing_was_made(folder)


def test_a_template_that_is_not_prefix_stable(folder):
    turns = [
        {"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    ]
    write(folder / "d.jsonl", [{"messages": turns}] * 9)
    (folder / "odd.jinja").write_text(
        "{{ messages | length }}:{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    where = ["data.template=odd.jinja", "data.tokenizer=bpe:300", "data.holdout=0.0"]
    assert "not prefix-stable" in refused("sft", *where, source="d.jsonl") and nothing_was_made(folder)


def test_a_model_and_a_tokenizer_of_different_vocabulary(folder):
    run = ["run", "pretrain", "data.source=good.jsonl", 'data.columns.prompt="{question} "', "data.holdout=0.2", *SMALL]
    few = ["supervised.steps=1", "supervised.batch=4", "data.tokenizer=bpe:300", "run.name=small"]
    result = CliRunner().invoke(app, [*run, *few])
    assert result.exit_code == 0, result.stderr
    assert "held-out loss" in result.stdout and "bits per byte" in result.stdout and "best at step 1" in result.stdout
    Tokenizer.characters("xyz").save(folder / "other")
    said = refused("sft", PROMPT, "model.path=runs/small", "data.tokenizer=other", "data.holdout=0.2")
    assert "differ" in said and "leave data.tokenizer empty" in said
    said = refused("sft", PROMPT, "model.path=runs/small@7", "data.holdout=0.2")
    assert "no checkpoint of step 7" in said
    said = refused("sft", PROMPT, "model.path=runs/small", "model.context=2048", "data.holdout=0.2")
    assert "model.context = 2048" in said and "640" in said
    shown = CliRunner().invoke(app, ["show", "runs/small"]).stdout
    assert "held-out loss" in shown and "at step 1" in shown


@pytest.mark.parametrize("key, says", [
    ("data.tokenizer=bpe:many", "bpe:4096"), ("data.tokenizer=bpe:20", "too small"),
    ("data.tokenizer=nowhere", "nowhere"), ("reward.function=gsm9k", "gsm8k"),
])  # fmt: skip
def test_what_is_misspelt(folder, key, says):
    assert says in refused("sft", PROMPT, "data.holdout=0.2", key)


def test_weights_of_rewards(folder):
    keys = [PROMPT, "data.holdout=0.2", "data.tokenizer=bpe:300"]
    assert "style.py" in refused("sft", *keys, 'reward.function={gsm8k = 1.0, "style.py:brief" = 0.1}')
