"""Runs whose experience is episodes of several turns."""

import json
import string
import sys
from pathlib import Path

import pytest

from tests.config.test_plugins import forget, write
from tests.errors import raises
from tests.flows import tiny
from tilth.config.errors import RecipeError
from tilth.config.plugins import load_plugins
from tilth.core.errors import PluginError, RewardError
from tilth.data.examples import supervised
from tilth.data.template import TemplateError, make_template
from tilth.data.tokenizer import Tokenizer
from tilth.data.trajectories import read_trajectories
from tilth.envs.pool import EnvironmentPool
from tilth.envs.process import load_environment

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
    sections = {"supervised": {"steps": 2}, "algorithm": {"steps": 3}, **sections}
    return tiny.recipe(folder, plugins=plugins, rollout=rollout, model={"context": 32}, **sections)


def test_episodes_are_trained_on(tmp_path, capfd):
    recorder, text = tiny.Recorder(), PLUGIN.replace("self.said, self", 'print("begun")\n        self.said, self')
    text = text.replace('info["prompt"]', '"9+9="')
    result = tiny.run(recipe(tmp_path, text), reward=None, callbacks=[recorder])
    assert "begun" in (result.directory / "environments-0.log").read_text()
    assert "begun" not in "".join(capfd.readouterr())
    seen = [record for record in recorder.records if "reward/part/turns_seen" in record]
    assert max(record["reward/part/turns_seen"] for record in seen) > 1
    lines = [json.loads(line) for line in (result.directory / "rewards.jsonl").read_text().splitlines()]
    assert {(one["outcome"]["status"], one["outcome"]["reason"].partition(" at ")[0]) for one in lines} == {
        ("error", "ValueError: as asked")
    }
    for row in read_trajectories(result.directory).to_pylist():  # what the policy saw, not the record's prompt
        assert row["prompt_text"] == "9+9=" and len(row["text"]) >= sum(row["mask"])  # of one character each
    missing = {row["id"] for row in read_trajectories(result.directory).to_pylist() if row["reward"] is None}
    assert len(missing) == sum(record["reward/missing"] for record in seen) > 0
    assert {one["trajectory"] for one in lines if one["trajectory"] >= 0} == missing


@pytest.mark.slow
def test_a_run_that_begins_again_in_the_middle_is_the_same(tmp_path):
    whole = tiny.run(recipe(tmp_path), reward=None, name="whole")
    with pytest.raises(PluginError):
        tiny.run(recipe(tmp_path), reward=None, name="again", callbacks=[Falls(4)])
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


def test_tools_that_the_template_does_not_list_are_refused_before_the_run(tmp_path):
    """Not at the first episode, which comes after the warm-up."""
    tool = "    @tilth.tool\n    def look(self, number: int) -> int:\n        return number\n\n    def reward(self):"
    recorder, text = tiny.Recorder(), PLUGIN.replace("    def reward(self):", tool)
    with raises(TemplateError, "template.tools"):
        tiny.run(recipe(tmp_path, text), reward=None, callbacks=[recorder])
    assert not recorder.records


def test_an_environment_that_never_works_ends_the_run(tmp_path):
    with raises(RewardError, "reward.function"):
        tiny.run(recipe(tmp_path, PLUGIN.replace('endswith("7")', 'endswith("")')), reward=None)


PAYS = PLUGIN.replace(
    'return [{"role": "user", "content": "1+1="}], len(self.said) > 2',
    'return [{"role": "user", "content": "1+1="}], len(self.said) > 2, len(self.said) / 4',
)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"flow": "ppo", "algorithm": {"advantage": "gae"}}, marks=pytest.mark.slow),
        {"algorithm": {"advantage": "grpo_process", "steps": 3}},
    ],
)
def test_rewards_of_turns_are_trained_on_and_written(tmp_path, how):
    result = tiny.run(recipe(tmp_path, PAYS, **how), reward=None)
    rows = [row for row in read_trajectories(result.directory).to_pylist() if row["reward"] is not None]
    assert any(len(row["turn_rewards"]) > 1 for row in rows)
    for row in rows:
        assert row["turn_rewards"] == [(k + 1) / 4 for k in range(len(row["turn_rewards"]))]
        assert len(row["turn_rewards"]) == sum(s["role"] == "assistant" for s in row["segments"])


GAME = """
import gymnasium
from tilth.envs.adapters import GymnasiumEnvironment

class Letters(gymnasium.Env):
    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Text(20, charset="0123456789+=")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3
        return f"{seed}+", {}

    def step(self, action):
        self.left -= 1
        return action[::-1], len(set(action)) / 4, not self.left, False, {}

gymnasium.register("Letters-v0", entry_point=Letters)

class Digits(GymnasiumEnvironment):
    id = "Letters-v0"

    def _actions(self):
        return "1+1="  # a tokenizer of digits has no letters
"""


def test_a_game_of_gymnasium_is_trained_on(tmp_path):
    """The rewards of its steps are those of turns."""
    pytest.importorskip("gymnasium")
    result = tiny.run(brought(tmp_path, "digits", GAME).replaced("algorithm", steps=2), reward=None)
    rows = [row for row in read_trajectories(result.directory).to_pylist() if row["reward"] is not None]
    assert len({row["id"] for row in rows}) > 40 and any(len(row["turn_rewards"] or ()) > 2 for row in rows)
    assert all(sum(row["turn_rewards"] or ()) == row["reward"] for row in rows)


@pytest.mark.slow
def test_an_environment_of_verifiers_is_trained_on(tmp_path, monkeypatch):
    verifiers = pytest.importorskip("verifiers")
    if not hasattr(verifiers, "load_environment"):
        pytest.skip("this version of verifiers has no environments of its first kind")
    community = str(Path(__file__).parents[1] / "envs" / "community")
    monkeypatch.setattr(sys, "path", [community, *(p for p in sys.path if Path(p).name != "benchmarks")])
    result = tiny.run(brought(tmp_path, "verifiers:guess-word"), reward=None)
    rows = [row for row in read_trajectories(result.directory).to_pylist() if row["reward"] is not None]
    assert len(rows) > 100 and any(len([s for s in row["segments"] if s["role"] == "user"]) > 1 for row in rows)


def brought(folder, name, text=""):
    """A recipe of an environment that brings its records, as ``tilth env records`` writes them."""
    plugins = [str(write(folder, text))] if text else []
    load_plugins(plugins)
    kind = load_environment(name)
    records = [json.dumps(record) for record in kind.records(64)]
    (folder / "records.jsonl").write_text("\n".join(records))
    letters = sorted(set(string.printable) - set("\r\x0b\x0c"))
    Tokenizer.characters("".join(letters)).save(folder / "tokenizer.json")
    return tiny.recipe(
        folder, plugins=plugins, model={"context": 160}, supervised={"steps": 0},
        data={"source": str(folder / "records.jsonl"), "holdout": 0, "tokenizer": str(folder / "tokenizer.json")},
        rollout={"environment": name, "turns": 3, "stop": ["0", "1", "2", "3"], "max_tokens": 12},
    )  # fmt: skip


def test_an_estimator_that_reads_no_reward_refuses_those_of_turns(tmp_path):
    with raises(RecipeError, "algorithm.advantage.turn_rewards"):
        tiny.run(
            recipe(tmp_path, PAYS, algorithm={"advantage": "gdpo", "options": {"keys": ["turns_seen"]}}), reward=None
        )


# ---- transcripts with tools ----

SHELF = """
import tilth

class Shelf(tilth.Environment):
    @tilth.tool
    def look(self, shelf: int) -> str:
        "Look at a shelf."
        return "nut"

    def reward(self):
        return 1.0
"""
CALLED = [
    {"role": "user", "content": "Look at 2."},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": '{"shelf": 2}'}]},
    {"role": "tool", "content": "nut"},
    {"role": "assistant", "content": "A nut."},
]


def test_what_is_learnt_of_transcripts_begins_as_episodes_do(tmp_path):
    """A warm-up lists the tools of the environment; the run warns when no episode calls one all the same."""
    data = tmp_path / "talks.jsonl"
    turns = [[{**CALLED[0], "content": f"Look at 2 ({n})."}, *CALLED[1:]] for n in range(8)]
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in turns))
    said = {"source": str(data), "template": "chatml", "tokenizer": "bpe:300", "holdout": 0.4, "digits": 1}
    made = recipe(tmp_path, SHELF, data=said, rollout={"environment": "shelf", "max_tokens": 8})
    made = made.replaced("model", context=640).replaced("supervised", steps=1, batch=4, check_every=9)
    made = made.replaced("algorithm", steps=1).replaced("run", eval_every=0)
    recorder = Begins()
    result = tiny.run(made, reward=None, callbacks=[recorder])
    assert recorder.learnt and recorder.learnt == recorder.played
    assert all('"name": "look"' in text for text in recorder.learnt)
    assert "none of 24 answers calls a tool" in (result.directory / "log.txt").read_text()


class Begins(tiny.Recorder):
    """Sees how the conversations begin that are learnt and played, up to the policy's first turn."""

    def on_step_end(self, run, step, metrics):
        loader = tiny.worker(run.roles["loader"])
        examples = supervised(list(loader.prompts), loader.template, loader.context)
        starts = [example.tokens[: example.mask.argmax()] for example in examples]
        self.learnt = {loader.template.tokenizer.decode(ids, special=True) for ids in starts}
        pool = EnvironmentPool("shelf", plugins=run.recipe.plugins)
        template = make_template("chatml", loader.template.tokenizer)
        self.played = {self.text(template, pool, prompt) for prompt in loader.prompts}
        pool.close()

    def text(self, template, pool, prompt):
        pool.begin(prompt.index, json.loads(prompt.episode))
        (answer,) = pool.poll(20.0)
        ids = template.begin(answer.value["messages"], answer.value["tools"])
        return template.tokenizer.decode(ids, special=True)
