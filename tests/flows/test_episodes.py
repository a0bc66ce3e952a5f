"""Runs whose experience is episodes of several turns."""

import pytest

from tests.config.test_plugins import forget, write
from tests.errors import raises
from tests.flows import tiny
from tilth.config.errors import RecipeError
from tilth.core.errors import PluginError, RewardError
from tilth.data.trajectories import read_trajectories

PLUGIN = """
import tilth

class Echo(tilth.Environment):
    def reset(self, info):
        self.said, self.answer = [], info["answer"]
        return [{"role": "user", "content": info["prompt"]}]

    def step(self, message):
        self.said.append(message["content"])
        if info_fails(self.answer):
            raise ValueError("as asked")
        return [{"role": "user", "content": "1+1="}], len(self.said) > 2

    def reward(self):
        return {"reward": sum(len(said) for said in self.said) % 3, "turns_seen": len(self.said)}

def info_fails(answer):
    return answer.endswith("7")
"""


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    forget()


def recipe(folder, text=PLUGIN, **sections):
    folder.mkdir(exist_ok=True)
    rollout = {"environment": "echo", "turns": 4, "stop": ["0", "2", "4", "+", "="], **sections.pop("rollout", {})}
    plugins = [str(write(folder, text))]
    return tiny.recipe(folder, plugins=plugins, rollout=rollout, model={"context": 32}, **sections)


def test_episodes_are_trained_on(tmp_path):
    recorder = tiny.Recorder()
    tiny.run(recipe(tmp_path), reward=None, callbacks=[recorder])
    seen = [record for record in recorder.records if "reward/part/turns_seen" in record]
    assert max(record["reward/part/turns_seen"] for record in seen) > 1
    assert sum(record["reward/missing"] for record in seen) > 0


def test_a_run_that_begins_again_in_the_middle_is_the_same(tmp_path):
    whole = tiny.run(recipe(tmp_path), reward=None, name="whole")
    with pytest.raises(PluginError):
        tiny.run(recipe(tmp_path), reward=None, name="again", callbacks=[Falls(9)])
    again = tiny.run(recipe(tmp_path), reward=None, name="again")
    assert tiny.same(tiny.numbers(whole.directory), tiny.numbers(again.directory))
    assert tiny.weights(whole.directory) == tiny.weights(again.directory)


class Falls(tiny.Recorder):
    """Fails after a step."""

    def on_step_end(self, run, step, metrics):
        if step == self.step:
            raise RuntimeError("as asked")

    def __init__(self, step):
        super().__init__()
        self.step = step


@pytest.mark.parametrize(
    "sections, key",
    [
        ({"reward": {"function": "exact"}}, "reward.function"),
        ({"cluster": {"backend": "local", "workers": 2}, "rollout": {"layout": {"tp": 2}}}, "rollout.layout.tp"),
    ],
)
def test_what_does_not_go_together(tmp_path, sections, key):
    with raises(RecipeError, key):
        recipe(tmp_path, **sections)


def test_an_unknown_environment_is_named(tmp_path):
    with raises(PluginError, "rollout.environment"):
        tiny.run(recipe(tmp_path, rollout={"environment": "ekko"}), reward=None)


def test_an_environment_that_never_works_ends_the_run(tmp_path):
    with raises(RewardError, "reward.function"):
        tiny.run(recipe(tmp_path, PLUGIN.replace('endswith("7")', 'endswith("")')), reward=None)


PAYS = PLUGIN.replace(
    'return [{"role": "user", "content": "1+1="}], len(self.said) > 2',
    'return [{"role": "user", "content": "1+1="}], len(self.said) > 2, len(self.said) / 4',
)


@pytest.mark.parametrize(
    "how", [{"flow": "ppo", "algorithm": {"advantage": "gae"}}, {"algorithm": {"advantage": "grpo_process"}}]
)
def test_rewards_of_turns_are_trained_on_and_written(tmp_path, how):
    result = tiny.run(recipe(tmp_path, PAYS, **how), reward=None)
    rows = [row for row in read_trajectories(result.directory).to_pylist() if row["reward"] is not None]
    assert any(len(row["turn_rewards"]) > 1 for row in rows)
    for row in rows:
        assert row["turn_rewards"] == [(k + 1) / 4 for k in range(len(row["turn_rewards"]))]
        assert len(row["turn_rewards"]) == sum(s["role"] == "assistant" for s in row["segments"])


def test_an_estimator_that_reads_no_reward_refuses_those_of_turns(tmp_path):
    with raises(RecipeError, "algorithm.advantage.turn_rewards"):
        tiny.run(
            recipe(tmp_path, PAYS, algorithm={"advantage": "gdpo", "options": {"keys": ["turns_seen"]}}), reward=None
        )
