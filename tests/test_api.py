"""``tilth.train``: what it takes, what it refuses before anything is made, what it gives back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tilth
from tests.flows import tiny
from tilth import api
from tilth.core.errors import DataError, RecipeError, RewardError
from tilth.flows.readers import read_trajectories

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


def settings(folder, **sections):
    made = tiny.settings(folder, supervised={"steps": 0}, algorithm={"steps": 1}, **sections)
    return {name: value for name, value in made.items() if name != "data"}


def caught(monkeypatch):
    """What ``train`` hands on, with no run."""
    seen = {}
    monkeypatch.setattr(api, "run_recipe", lambda recipe, **rest: seen.update(rest, recipe=recipe))
    return seen


# ---- what is handed on ----


def test_settings_are_the_sections_and_keys_of_a_recipe(monkeypatch):
    seen = caught(monkeypatch)
    tilth.train(SUMS, len, observers=[], seed=7, model={"hidden": 32}, rollout={"stop": ["\n"]})
    recipe = seen["recipe"]
    assert (recipe.seed, recipe.model.hidden, recipe.rollout.stop) == (7, 32, ("\n",))
    assert recipe.algorithm.steps == 100  # whatever is not said has its default


def test_data_may_be_dictionaries_or_texts_and_any_iterable(monkeypatch):
    seen = caught(monkeypatch)
    tilth.train(({"prompt": p, "hint": i} for i, p in enumerate("ab")), len, observers=[])
    assert [(p.text, p.answer, p.info) for p in seen["prompts"]] == [("a", None, {"hint": 0}), ("b", None, {"hint": 1})]
    tilth.train(["1+1=", "2+2="], len, observers=[])
    assert [p.text for p in seen["prompts"]] == ["1+1=", "2+2="]


def test_data_may_have_columns_of_other_names(monkeypatch):
    seen = caught(monkeypatch)
    named = {"data.columns": {"prompt": "question", "answer": "solution"}}
    tilth.train([{"question": "1+1=", "solution": "2"}], len, observers=[], keys=named)
    assert (seen["prompts"][0].text, seen["prompts"][0].answer) == ("1+1=", "2")


def test_name_reward_and_observers_are_those_given(monkeypatch):
    seen, watcher = caught(monkeypatch), tiny.Recorder()
    tilth.train(SUMS, tiny.close_enough, name="mine", observers=(watcher,))
    assert seen["name"] == "mine" and seen["reward"] is tiny.close_enough and list(seen["observers"]) == [watcher]


def test_without_observers_the_terminal_watches(monkeypatch):
    from tilth.ui.live import Live

    seen = caught(monkeypatch)
    tilth.train(SUMS, len)
    assert seen["name"] == "train" and [type(o) for o in seen["observers"]] == [Live]
    tilth.train(SUMS, len, observers=[])
    assert seen["observers"] == []


# ---- what is refused, before a directory is made ----


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({"rollouts": {"group": 4}}, "did you mean rollout"),
        ({"rollout": {"grup": 4}}, r"rollout\.grup"),
        ({"rollout": {"group": 0}}, r"rollout\.group"),
        ({"model": {"hidden": 30, "heads": 4}}, r"model\.heads"),
        ({"seed": "one"}, "seed"),
    ],
)
def test_a_wrong_setting_is_told_as_in_a_recipe(tmp_path, wrong, says):
    with pytest.raises(RecipeError, match=says):
        tilth.train(SUMS, len, observers=[], **{"run": {"dir": str(tmp_path / "runs")}, **wrong})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "data, says",
    [
        ([], "empty"),
        ([{"question": "1+1="}], r"(dataset\[0\]|record 1): no column 'prompt'"),
        (["1+1=", 3], r"(dataset\[1\]|record 2)"),
        ([{"prompt": "1", "answer": 2}], "answer is 2"),
        ("tr.jsonl", r"data is 'tr.jsonl', one str.*data.source=tr.jsonl"),
        (Path("tr.jsonl"), "data.source=tr.jsonl"),
        (b"tr.jsonl", "one bytes; give a list of records"),
        ({"prompt": "1+1=", "answer": "2"}, r"one dict; give a list of such records"),
        (7, "of type int, not a list"),
    ],
)
def test_wrong_data_are_told_with_their_place(tmp_path, data, says):
    with pytest.raises(DataError, match=says):
        tilth.train(data, tiny.close_enough, observers=[], **settings(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reward, says", [(7, "neither a function"), (lambda prompt: 1.0, "prompt, completion, info")])
def test_a_reward_that_cannot_be_called_is_refused(tmp_path, reward, says):
    with pytest.raises(RewardError, match=says):
        tilth.train(SUMS, reward, observers=[], **settings(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_warm_up_needs_answers(tmp_path):
    how = settings(tmp_path) | {"supervised": {"steps": 1, "batch": 4}}
    with pytest.raises(DataError, match=r"has no answer.*supervised\.steps = 0"):
        tilth.train([s["prompt"] for s in SUMS], tiny.close_enough, observers=[], **how)


def test_a_source_has_no_place_beside_the_data():
    with pytest.raises(RecipeError, match=r"data\.source has no place beside"):
        tilth.train(SUMS, len, observers=[], keys={"data.source": "tr.jsonl"})


def test_prompts_of_data_heldout_are_those_held_out(monkeypatch, tmp_path):
    seen = caught(monkeypatch)
    (tmp_path / "te.jsonl").write_text('{"prompt": "7+7=", "answer": "14"}\n{"prompt": "1+1=", "answer": "2"}\n')
    tilth.train(SUMS, len, observers=[], keys={"data.heldout": str(tmp_path / "te.jsonl"), "data.holdout": 0.5})
    train, held = seen["prompts"].split(0.5)
    assert [p.text for p in held] == ["7+7=", "1+1="]
    assert [p.text for p in train] == [s["prompt"] for s in SUMS if s["prompt"] != "1+1="]
    with pytest.raises(DataError, match=r"none\.jsonl"):
        tilth.train(SUMS, len, observers=[], keys={"data.heldout": str(tmp_path / "none.jsonl")})


# ---- what comes back ----


def test_a_run_of_the_caller_s_data_and_a_lambda(tmp_path):
    result = tilth.train(
        SUMS, lambda prompt, completion, info: float(len(info["answer"])), observers=[], name="sums",
        **settings(tmp_path),
    )  # fmt: skip
    assert result.directory == tmp_path / "sums-001" and result.summary["state"] == "finished"
    assert result.accuracy == result.summary["accuracy_last"] and 1 <= result.accuracy <= 2
    rows = read_trajectories(result.directory).to_pylist()
    assert {r["prompt_text"] for r in rows} <= {s["prompt"] for s in SUMS}
    assert all(r["reward"] == len(r["answer"]) for r in rows)


@pytest.mark.slow
def test_a_finished_run_is_not_continued(tmp_path):
    def go():
        return tilth.train(SUMS, tiny.close_enough, observers=[], name="sums", **settings(tmp_path)).directory.name

    assert [go(), go()] == ["sums-001", "sums-002"]


def test_the_first_import_loads_no_torch_and_unknown_names_are_told():
    code = "import sys, tilth; tilth.train; assert 'torch' not in sys.modules; tilth.nothing"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "module 'tilth' has no attribute 'nothing'" in found.stderr


def test_keys_reach_the_sections_whose_names_are_taken(monkeypatch):
    seen = {}
    monkeypatch.setattr("tilth.api.run_recipe", lambda recipe, **rest: seen.update(recipe=recipe))
    keys = {"data.holdout": 0.25, "reward.timeout": 2.5, "seed": 9}
    tilth.train(SUMS, tiny.close_enough, observers=[], keys=keys, algorithm={"steps": 3})
    made = seen["recipe"]
    assert (made.data.holdout, made.reward.timeout, made.seed, made.algorithm.steps) == (0.25, 2.5, 9, 3)


def rewards_for_identity():
    """Pairs of functions: (what, one, another)."""

    def scaled(k):
        return lambda prompt, completion, info: k * len(completion)

    words = lambda p, c, i: float(c in {"aa", "bb", "cc", "dd"})  # noqa: E731
    return {
        "closure": (scaled(1.0), scaled(-1.0)),
        "constant": (lambda p, c, i: 1.0, lambda p, c, i: 2.0),
        "default": (lambda p, c, i, k=1: k, lambda p, c, i, k=2: k),
        "nested": (lambda p, c, i: max(map(lambda x: 1, c)), lambda p, c, i: max(map(lambda x: 2, c))),
        "set": (words, lambda p, c, i: float(c in {"aa", "bb", "cc", "xx"})),
    }


@pytest.mark.parametrize("what", ["closure", "constant", "default", "nested", "set"])
def test_another_reward_has_another_identity_and_the_same_the_same(what):
    one, another = rewards_for_identity()[what]
    again, _ = rewards_for_identity()[what]
    assert api._identity(one) == api._identity(again) != api._identity(another)


def test_identity_does_not_depend_on_the_process():
    code = (
        "from tests.test_api import rewards_for_identity as r; from tilth.api import _identity; "
        "print([_identity(one) for one, _ in r().values()])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1],
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1
