"""Held-out prompts that the run before was trained on are counted and told."""

import json

import pytest
from typer.testing import CliRunner

from tilth.cli.main import app
from tilth.config.load import dump_toml, from_dict
from tilth.config.schema import DataConfig
from tilth.data.prompts import load_source
from tilth.flows.contamination import count_seen


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}?", "answer": str(i)}) + "\n" for i in range(100)))
    return str(path)


def before(folder, flow, **data):
    folder.mkdir(exist_ok=True)
    steps = {"supervised": {"steps": 1}} if flow != "grpo" else {}
    recipe = from_dict({"flow": flow, "data": data, **steps})
    (folder / "recipe.toml").write_text(dump_toml(recipe))
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder)})})


@pytest.mark.parametrize("flow", ["pretrain", "sft"])
def test_what_was_trained_on_is_counted(tmp_path, source, flow):
    columns = {"prompt": "{question}\n"}
    now = load_source(DataConfig(source=source, columns={"prompt": "question"})).split(0.3)[1]
    same = before(tmp_path / "a", flow, source=source, holdout=0.3, columns=columns)
    assert count_seen(same, now) == []
    all_of_it = before(tmp_path / "b", flow, source=source, holdout=0.0, columns=columns)
    (told,) = count_seen(all_of_it, now)
    assert told.startswith(f"{len(now)} of {len(now)} held-out prompts are among what {tmp_path}/b was trained on")
    step = all_of_it.model_copy(update={"model": all_of_it.model.model_copy(update={"path": f"{tmp_path}/b@best"})})
    assert count_seen(step, now) == [told]
    less = before(tmp_path / "c", flow, source=source, holdout=0.1, columns=columns)
    rest = len(now) - len(load_source(DataConfig(source=source, columns=columns)).split(0.1)[1])
    assert 0 < rest < len(now) and count_seen(less, now)[0].startswith(f"{rest} of {len(now)} ")


def test_a_task(tmp_path):
    now = load_source(DataConfig(digits=1)).split(0.3)[1]
    assert count_seen(before(tmp_path / "a", "grpo", source="addition", digits=1, holdout=0.3), now) == []
    assert count_seen(before(tmp_path / "a", "grpo", source="addition", digits=1, holdout=0.0), now)
    assert count_seen(before(tmp_path / "a", "grpo", source="addition", digits=2, holdout=0.0), now) == []


def test_data_that_is_gone_is_said_and_no_run_is_nothing(tmp_path, source):
    now = load_source(DataConfig(source=source, columns={"prompt": "question"})).split(0.3)[1]
    gone = before(tmp_path / "a", "sft", source=str(tmp_path / "gone.jsonl"))
    (told,) = count_seen(gone, now)
    assert told.startswith(f"not compared with what {tmp_path}/a was trained on: data.source")
    (told,) = count_seen(before(tmp_path / "a", "sft", source=""), now)
    assert told == f"not compared with what {tmp_path}/a was trained on: tilth.train was given its data"
    (tmp_path / "a" / "recipe.toml").unlink()
    assert count_seen(gone, now) == []


def test_a_run_tells_it(tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shape = ["model.hidden=16", "model.kv_heads=1", "model.layers=1", "model.heads=2"]
    keys = [f"data.source={source}", "data.columns.prompt=question"]
    keys += ["model.context=320", "supervised.steps=1", "supervised.epochs=0", "supervised.batch=4"]
    told = []
    for name, *more in (("a", "data.holdout=0", *shape), ("b", "data.holdout=0.2", "model.path=runs/a")):
        result = CliRunner().invoke(app, ["run", "sft", *keys, "data.tokenizer=characters", f"run.name={name}", *more])
        assert result.exit_code == 0, result.stderr
        told.append("held-out prompts are among what runs/a was trained on" in result.stdout)
    assert told == [False, True]
