"""A run that can learn nothing says so while it goes on, once, with keys to try; one that can says nothing."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.flows import tiny
from tilth.config.load import load_recipe
from tilth.core.batch import Batch
from tilth.flows import step_log
from tilth.flows.step_log import PATIENCE, counted, uncalled, warning
from tilth.rl.algorithm import Algorithm
from tilth.ui.report import write_report

GRPO, PPO, DISTILL = (load_recipe("addition-grpo", [f"flow={flow}", *more]) for flow, *more in (
    ("grpo",), ("ppo", "algorithm.advantage=gae"), ("distill", "algorithm.advantage=distill", "reference.path=x"),
))  # fmt: skip


def rows_of(groups):
    rewards = np.array([value for group in groups for value in group], np.float32)
    return Batch(
        {
            "group": np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
            "reward": rewards,
            "outcome": rewards,
            "finish": np.zeros(len(rewards), np.int8),
        }
    )


def episode(recipe, *steps):
    """The state after steps, each a list of groups of rewards."""
    state = {}
    for groups in steps:
        state = counted(state, rows_of(groups), Algorithm.of(recipe).estimator, recipe.rollout.group)
    return state


values = st.sampled_from([0.0, 0.5, 1.0, np.nan])
batches = st.lists(st.lists(values, min_size=2, max_size=3), min_size=1, max_size=3)


def brute(steps, same):
    """Steps at the end of which each is flat by this rule; those without a reward do not count."""
    known = [[[v for v in g if v == v] for g in groups] for groups in steps]
    known = [groups for groups in known if any(groups)]
    return max((n for n in range(len(known) + 1) if same(known[len(known) - n :])), default=0)


@given(st.lists(batches, max_size=6))
def test_steps_without_a_difference_are_counted(steps):
    in_groups = brute(steps, lambda some: all(len(set(group)) <= 1 for groups in some for group in groups))
    assert episode(GRPO, *steps).get("steps", 0) == in_groups
    everywhere = brute(steps, lambda some: len({v for groups in some for group in groups for v in group}) <= 1)
    assert episode(PPO, *steps).get("steps", 0) == everywhere
    assert episode(DISTILL, *steps) == {}


def test_it_is_said_once_in_an_episode():
    state, said = {}, []
    for step in range(100):
        batch = rows_of([[0.0, 0.0 if step != 50 else 1.0]])
        state = counted(state, batch, Algorithm.of(GRPO).estimator, GRPO.rollout.group)
        said += [step] * bool(warning(state, batch, GRPO))
    assert said == [PATIENCE - 1, 50 + PATIENCE]


def test_every_key_that_it_names_is_one():
    flat = {"steps": float(PATIENCE), "low": 0.0, "high": 0.0}
    cold = load_recipe("addition-grpo", ["rollout.temperature=0.5", "supervised.steps=0"])
    for recipe in (GRPO, cold):
        for cut in (0, 1):
            batch = rows_of([[0.0, 0.0]]).with_rows(finish=np.array([cut, cut], np.int8))
            text = warning(flat, batch, recipe)
            for section, key in re.findall(r"\b(rollout|supervised|data)\.(\w+)", text):
                assert hasattr(getattr(recipe, section), key)
            assert ("max_tokens" in text) == bool(cut)
    right = rows_of([[1.0, 1.0]])
    assert "harder" in warning({**flat, "low": 1.0, "high": 1.0}, right, GRPO)


@pytest.mark.parametrize("how", ["nothing", pytest.param("prompts", marks=pytest.mark.slow)])
def test_a_hopeless_run_warns_in_terminal_log_and_report_and_goes_on(tmp_path, monkeypatch, how):
    monkeypatch.setattr(step_log, "PATIENCE", 4)
    reward = (lambda p, c, i: 0.0) if how == "nothing" else (lambda p, c, i: float(p < "5"))
    watcher = tiny.Recorder()
    recipe = tiny.recipe(tmp_path, algorithm={"steps": 5}, supervised={"steps": 2}, data={"holdout": 0.0})
    result = tiny.run(recipe, reward=reward, callbacks=[watcher])
    (said,) = [text for text in watcher.messages if "nothing can be learned" in text]
    assert ("every reward was 0" in said) == (how == "nothing") and "rollout.group" in said
    assert (result.directory / "log.txt").read_text().count(said) == 1
    assert result.summary["steps"] == 7 and result.summary["warnings"] == [{"step": 6, "text": said}]
    assert "nothing can be learned" in write_report(result.directory).read_text()


@pytest.mark.slow
def test_a_run_that_learns_is_silent_and_one_that_goes_on_counts_on(tmp_path, monkeypatch):
    monkeypatch.setattr(step_log, "PATIENCE", 6)
    silent = tiny.run(tiny.recipe(tmp_path / "a", algorithm={"steps": 7}, supervised={"steps": 1}))
    assert silent.summary["warnings"] == []

    def killed(record):
        if record["step"] == 6:
            raise KeyboardInterrupt

    given = {"algorithm": {"steps": 7}, "supervised": {"steps": 2}, "data": {"holdout": 0.0}, "run": {"save_every": 4}}
    recipe = tiny.recipe(tmp_path / "b", **given)
    zero = lambda p, c, i: 0.0  # noqa: E731 - the same function both times
    with pytest.raises(KeyboardInterrupt):
        tiny.run(recipe, reward=zero, callbacks=[tiny.Recorder(at_step=killed)])
    result = tiny.run(recipe, reward=zero)
    assert [said["step"] for said in result.summary["warnings"]] == [8]
    state = json.loads((result.directory / "run.json").read_text())
    assert len(state["attempts"]) == 2


@pytest.mark.parametrize(
    ("calls", "warns"), [([0, 0, 0], True), ([0, 1, 0], False), ([0, np.nan, 0], True), ([np.nan, np.nan], False)]
)
def test_prompts_whose_tools_no_answer_calls(calls, warns):
    one = rows_of([[0.0] * len(calls)])
    assert uncalled(one, "shop") == ""
    text = uncalled(one.with_rows(calls=np.array(calls, np.float32)), "shop")
    assert ("rollout.environment=shop" in text) == warns == (text != "")
    assert not warns or f"none of {int((~np.isnan(calls)).sum())} answers" in text
