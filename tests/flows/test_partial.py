"""Completions that go on in the next step, under its weights."""

import numpy as np
import pytest

from tests.config.test_plugins import forget
from tests.errors import raises
from tests.flows import tiny
from tests.flows.test_episodes import PLUGIN, Falls
from tests.flows.test_episodes import recipe as played
from tilth.config.errors import RecipeError
from tilth.core.errors import PluginError
from tilth.data.trajectories import read_trajectories


def recipe(folder, *, partial=3, lr=None, **sections):
    sections = {k: dict(v) if isinstance(v, dict) else v for k, v in sections.items()}
    sections["rollout"] = {"partial": partial, "max_tokens": 8, "group": 2, **sections.get("rollout", {})}
    sections["algorithm"] = {"correction": "decoupled_token_is", **sections.get("algorithm", {})}
    sections["model"] = {"context": 24, **sections.get("model", {})}
    sections.setdefault("supervised", {"steps": 2})
    if lr is not None:
        sections["optimizer"] = {"lr": lr}
    return tiny.recipe(folder, **sections)


def rows(result):
    return {row["id"]: row for row in read_trajectories(result.directory).to_pylist()}


@pytest.mark.slow
def test_with_weights_that_stay_the_completions_are_those_of_one_piece(tmp_path):
    """Tokens and log-probs of each sample that both runs finish, and the limit in tokens."""
    still = {"lr": 0.0, "train": {"parity": True}}
    pieces = rows(tiny.run(recipe(tmp_path, **still), name="pieces"))
    whole = rows(tiny.run(recipe(tmp_path, partial=0, **still), name="whole"))
    both = pieces.keys() & whole.keys()
    long = [i for i in both if len(pieces[i]["tokens"]) - pieces[i]["prompt_length"] > 3]
    assert len(both) > 20 and len(long) > 5
    for i in both:
        assert pieces[i]["tokens"] == whole[i]["tokens"] and pieces[i]["logprobs"] == whole[i]["logprobs"]
        assert pieces[i]["reward"] == whole[i]["reward"] and pieces[i]["step"] >= whole[i]["step"]
    assert any(pieces[i]["step"] > whole[i]["step"] for i in long)


def test_groups_are_trained_whole_and_once(tmp_path):
    recorder = tiny.Recorder()
    result = tiny.run(recipe(tmp_path, algorithm={"steps": 4}), callbacks=[recorder])
    found = read_trajectories(result.directory).to_pylist()
    assert len({row["id"] for row in found}) == len(found)
    steps = {}
    for row in found:
        steps.setdefault(row["group"], []).append(row["step"])
    assert all(len(seen) == 2 and len(set(seen)) == 1 for seen in steps.values())
    assert sum(record.get("samples/carried", 0) for record in recorder.records) > 0


@pytest.mark.slow  # quickly in test_async_sampler.py
def test_a_run_that_falls_in_the_middle_is_the_same(tmp_path):
    made = recipe(tmp_path, algorithm={"steps": 3}, run={"save_every": 3})
    whole = tiny.run(made, name="whole")
    with pytest.raises(PluginError):
        tiny.run(made, name="again", callbacks=[Falls(4)])
    again = tiny.run(made, name="again")
    assert tiny.same(tiny.numbers(whole.directory), tiny.numbers(again.directory))
    assert tiny.weights(whole.directory) == tiny.weights(again.directory)
    assert np.array_equal(sorted(rows(whole)), sorted(rows(again)))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"partial": 8}, "rollout.max_tokens"),
        ({"algorithm": {"correction": ""}}, "algorithm.correction"),
        ({"algorithm": {"correction": "none"}}, "algorithm.correction"),
        ({"flow": "dapo", "algorithm": {"advantage": "grpo", "refill": 2}}, "algorithm.refill"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, sections, key):
    with raises(RecipeError, key):
        tiny.run(recipe(tmp_path, **sections))


def episodes(folder, *, partial, text=PLUGIN, lr=None, **rollout):
    """A recipe of episodes that pause after ``partial`` tokens of the policy in a step."""
    how = {"partial": partial, "group": 2, **rollout}
    more = {"optimizer": {"lr": lr}, "train": {"parity": True}} if lr is not None else {}
    return played(folder, text, rollout=how, algorithm={"correction": "decoupled_token_is"}, **more)


@pytest.fixture
def _plugins_forgotten():
    yield
    forget()


@pytest.mark.slow
@pytest.mark.usefixtures("_plugins_forgotten")
def test_episodes_pause_between_turns_and_are_those_of_one_piece(tmp_path):
    """Under weights that stay; a failed one too."""
    recorder = tiny.Recorder()
    pieces = tiny.run(episodes(tmp_path, partial=4, lr=0.0), reward=None, name="pieces", callbacks=[recorder])
    whole = tiny.run(episodes(tmp_path, partial=0, lr=0.0), reward=None, name="whole")
    assert sum(record.get("samples/carried", 0) for record in recorder.records) > 0
    found, same = rows(pieces), rows(whole)
    both = found.keys() & same.keys()
    later = [i for i in both if found[i]["step"] > same[i]["step"]]
    assert len(both) > 20 and len(later) > 5
    for i in both:
        for name in ("tokens", "logprobs", "mask", "reward", "segments", "finish"):
            assert found[i][name] == same[i][name], name
    assert any(len([s for s in found[i]["segments"] if s["role"] == "assistant"]) > 1 for i in later)


@pytest.mark.slow
@pytest.mark.usefixtures("_plugins_forgotten")
def test_a_run_of_paused_episodes_that_falls_is_the_same(tmp_path):
    whole = tiny.run(episodes(tmp_path, partial=4), reward=None, name="whole")
    with pytest.raises(PluginError):
        tiny.run(episodes(tmp_path, partial=4), reward=None, name="again", callbacks=[Falls(5)])
    again = tiny.run(episodes(tmp_path, partial=4), reward=None, name="again")
    assert tiny.same(tiny.numbers(whole.directory), tiny.numbers(again.directory))
    assert tiny.weights(whole.directory) == tiny.weights(again.directory)
