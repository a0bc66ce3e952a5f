"""Runs with user code: the same weights as with the entries that it copies, in every backend."""

from pathlib import Path

import pytest

from tests.config.test_plugins import _nothing_left_behind, forget, write  # noqa: F401  (a fixture)
from tests.errors import raises
from tests.flows import tiny
from tilth.core.errors import PluginError, RecipeError, RewardError
from tilth.runs.models import load_model
from tilth.runs.signals import Interrupted

MINE = """
import tilth  # torch, too, would take a second of every process of rewards

@tilth.advantage("my_rloo")
def my_rloo(rewards, groups, *, scale: float = 1.0):
    found = rewards.clone()
    for group in groups.unique():
        own = groups == group
        n = int(own.sum())
        found[own] = scale * (rewards[own] - rewards[own].mean()) * n / max(n - 1, 1)
    return found

@tilth.policy_loss("my_clip")
def my_clip(logprobs, old_logprobs, advantages, *, clip: float = 0.2):
    ratio = (logprobs - old_logprobs).clamp(-20, 20).exp()
    return (-advantages * ratio).maximum(-advantages * ratio.clamp(1 - clip, 1 + clip))

@tilth.reward("my_reward")
def my_reward(prompt, completion, info):
    return sum(a == b for a, b in zip(completion, info["answer"])) / len(info["answer"]) + 0.1 * len(completion)

@tilth.flow("my_flow")
def my_flow(run):
    for batch in run.experience(group=run.recipe.rollout.group):
        batch = run.policy.advantages(run.logprobs(batch), run.algo)
        run.log_update(run.policy.update(batch, run.algo))
        run.sync_weights(run.policy)
"""
WARM = {"supervised": {"steps": 2}}
OWN = {**WARM, "flow": "my_flow", "reward": {"function": "my_reward"}}
OWN |= {
    "algorithm": {"advantage": "my_rloo", "loss": "my_clip", "options": {"clip": 0.2}, "drop_flat": False, "steps": 2}
}
THEIRS = {**WARM, "flow": "grpo"}
THEIRS |= {"algorithm": {"advantage": "rloo", "loss": "ppo_clip", "drop_flat": False, "steps": 2}}


def run(folder: Path, **sections):
    return tiny.run(tiny.recipe(folder, **sections), name="mine", reward=None)


def theirs(folder: Path, **sections):
    path = folder.parent / "mine.py"
    reward = {"reward": {"function": f"{path}:my_reward"}}
    return tiny.run(tiny.recipe(folder, **THEIRS, **reward, **sections), name="theirs", reward=None)


@pytest.fixture
def plugin(tmp_path):
    return str(write(tmp_path, MINE))


def test_everything_of_ones_own_equals_what_it_copies_to_the_last_bit(tmp_path, plugin):
    mine = run(tmp_path / "a", plugins=[plugin], **OWN)
    other = theirs(tmp_path / "b")
    assert tiny.weights(mine.directory) == tiny.weights(other.directory)


@pytest.mark.slow  # quickly with a family of one's own, below
@pytest.mark.dist
def test_workers_import_the_plugins_of_the_recipe(tmp_path, plugin):
    here = run(tmp_path / "a", plugins=[plugin], **OWN)
    there = run(tmp_path / "b", plugins=[plugin], cluster={"backend": "local", "workers": 1}, **OWN)
    assert tiny.weights(here.directory) == tiny.weights(there.directory)


def test_a_changed_plugin_is_refused_when_the_run_goes_on_and_can_be_allowed(tmp_path, plugin):
    named = {"run": {"name": "mine"}}
    run(tmp_path / "a", plugins=[plugin], **OWN, **named)
    more = {**OWN, "algorithm": {**OWN["algorithm"], "steps": 3}, **named}
    Path(plugin).write_text(MINE.replace("0.1 *", "0.2 *"))
    forget()
    recipe = tiny.recipe(tmp_path / "a", plugins=[plugin], **more)
    with raises(RecipeError, "plugins"):
        tiny.run(recipe, name="mine", reward=None, allow=["algorithm.steps", "reward"])
    result = tiny.run(recipe, name="mine", reward=None, allow=["algorithm.steps", "reward", "plugins"])
    assert result.summary["steps"] == 2 + 3


@pytest.mark.slow
def test_a_run_that_an_edited_plugin_does_not_resume_is_named(tmp_path, plugin):
    recipe = tiny.recipe(tmp_path / "a", plugins=[plugin], **OWN)
    stop, watcher = tiny.Recorder(), tiny.Recorder()
    stop.on_step_end = lambda run, step, metrics: run.stop("enough")
    with raises(Interrupted, "stop"):
        tiny.run(recipe, name="mine", reward=None, callbacks=[stop])
    Path(plugin).write_text(MINE.replace("scale * (", "0.5 * scale * ("))
    forget()
    recipe = tiny.recipe(tmp_path / "a", plugins=[plugin], **OWN)
    result = tiny.run(recipe, name="mine", reward=None, callbacks=[watcher])
    (line,) = (text for text in watcher.messages if "not resumed" in text)
    assert result.directory.name == "mine-002" and "mine-001 is not finished and not resumed: " in line
    assert "a plugin, or a file that it imports, has changed" in line and "--allow plugins" in line


def test_what_a_script_declares_works_here_and_is_refused_where_workers_could_not_import_it(tmp_path):
    space = {"__name__": "__main__"}
    exec(compile(MINE, "notebook", "exec"), space)
    here = {**WARM, "algorithm": {**OWN["algorithm"]}}
    tiny.run(tiny.recipe(tmp_path / "a", **here), name="mine")
    with raises(RecipeError, "algorithm.advantage"):
        tiny.run(tiny.recipe(tmp_path / "b", cluster={"backend": "local", "workers": 2}, **here), name="mine")


def test_an_estimator_that_fails_ends_the_run_with_its_line(tmp_path):
    text = MINE.replace("n = int(own.sum())", "n = int(own.missing())")
    path = write(tmp_path, text)
    with raises(PluginError, "my_rloo"):
        run(tmp_path / "a", plugins=[str(path)], **OWN)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ("pass", "flow.my_flow.steps"),
        pytest.param("next(run.experience(group=2))", "flow.my_flow.steps", marks=pytest.mark.slow),
        ("run.policy.updat()", "flow.my_flow"),
        pytest.param("yield", "flow.my_flow.steps", marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_fails_or_ends_early_is_named(tmp_path, body, key):
    text = f"import tilth\n@tilth.flow('my_flow')\ndef my_flow(run):\n    {body}\n"
    with raises(PluginError, key) as caught:
        tiny.run(tiny.recipe(tmp_path / "a", plugins=[str(write(tmp_path, text))], flow="my_flow", **WARM), name="x")
    assert "mine.py:" in str(caught.value)


def test_a_default_of_ones_own_lies_below_what_the_recipe_says(tmp_path):
    text = (
        MINE
        + """
@tilth.policy_loss("narrow")
def narrow(logprobs, *, clip_low: float = 0.05, clip_high: float = 0.07):
    return -logprobs

@tilth.advantage("short_sighted")
def short_sighted(rewards, *, gamma: float = 0.9):
    return rewards
"""
    )
    plugins = [str(write(tmp_path, text))]
    named = {"loss": "narrow", "advantage": "short_sighted"}
    own = tiny.recipe(tmp_path / "a", plugins=plugins, algorithm=named).algorithm
    assert (own.clip_low, own.clip_high, own.gamma) == (0.05, 0.07, 0.9)
    said = tiny.recipe(tmp_path / "a", plugins=plugins, algorithm={**named, "clip_low": 0.3, "gamma": 0.5}).algorithm
    assert (said.clip_low, said.clip_high, said.gamma) == (0.3, 0.07, 0.5)


@pytest.mark.slow
def test_a_loop_with_several_updates_takes_its_ratio_to_the_policy_before_them(tmp_path):
    text = MINE.replace("        run.log_update(", "        for _ in range(2): run.log_update(")
    mine = run(tmp_path / "a", plugins=[str(write(tmp_path, text))], **OWN)
    later = [row for row in tiny.numbers(mine.directory) if row["phase"] == "my_flow"]
    assert max(row["approx_kl_k3"] for row in later) > 0


@pytest.mark.slow
def test_a_run_goes_on_where_its_plugin_has_moved(tmp_path, plugin):
    named = {"run": {"name": "mine"}}
    first = tiny.run(tiny.recipe(tmp_path / "a", plugins=[plugin], **OWN, **named), reward=None, name="x")
    moved = tmp_path / "elsewhere" / "mine.py"
    moved.parent.mkdir()
    Path(plugin).rename(moved)
    forget()
    longer = {**OWN, "algorithm": {**OWN["algorithm"], "steps": 4}}
    recipe = tiny.recipe(tmp_path / "a", plugins=[str(moved)], **longer, **named)
    again = tiny.run(recipe, name="x", reward=None, allow=["algorithm.steps"])
    assert again.directory == first.directory and again.summary["steps"] == 6


def test_a_reward_that_nothing_has_is_named_with_those_of_plugins(tmp_path, plugin):
    with raises(RewardError, "my_rewrad"):
        run(tmp_path / "a", plugins=[plugin], reward={"function": "my_rewrad"})


def test_a_plugin_that_is_no_text_is_named(tmp_path):
    with raises(RecipeError, "plugins.0"):
        tiny.recipe(tmp_path, plugins=[3])
    assert tiny.recipe(tmp_path, plugins=[write(tmp_path, MINE)]).plugins == (str(tmp_path / "mine.py"),)


FAMILY = """
import tilth
from tilth.models.decoder import Layer, RMSNorm
from tilth.models.family import Family, norm

class Behind(Layer):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.behind = RMSNorm(config.rms_norm_eps)

    def leave(self, x, mixed, dropout):
        return self.behind(super().leave(x, mixed, dropout))

@tilth.family("behind")
def behind():
    table = Family("").table
    return Family("BehindForCausalLM", table=(*table[:-2], *norm("behind"), *table[-2:]), layer=Behind)
"""


@pytest.mark.dist
def test_a_family_of_ones_own_is_trained_kept_and_read_again(tmp_path):
    path = str(write(tmp_path, FAMILY))
    own = {**WARM, "plugins": [path], "model": {"family": "behind"}, "algorithm": {"steps": 2}}
    here = tiny.run(tiny.recipe(tmp_path / "a", **own), name="mine")
    local = {"cluster": {"backend": "local", "workers": 1}}
    there = tiny.run(tiny.recipe(tmp_path / "b", **own, **local), name="mine")
    assert tiny.weights(here.directory) == tiny.weights(there.directory)
    forget()
    loaded = load_model(here.directory)
    assert loaded.config.family == "behind" and "model.layers.0.behind.weight" in loaded.tensors
    with raises(RecipeError, "model.family"):
        tiny.recipe(tmp_path / "c", model={"family": "behin"})
