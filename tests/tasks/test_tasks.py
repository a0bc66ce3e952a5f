"""A task that Tilth does not know, declared here and nowhere else: all that follows from it."""

import itertools

import pytest

import tilth
from tests.config.test_plugins import forget, write
from tests.data.reading import load_pairs
from tests.errors import raises
from tests.flows import tiny
from tilth.config.errors import PluginError, RecipeError
from tilth.config.load import from_dict
from tilth.config.plugins import shipped_tasks, task_names
from tilth.config.tasks import Task, task_of
from tilth.core.errors import DataError, RewardError
from tilth.data.examples import pairs_of
from tilth.data.prompts import load_source
from tilth.rewards.functions import load_reward, of_plugins

PLUGIN = """
import tilth
from tilth.config.tasks import Task

def prompts(digits, *, count: int = 40):
    return [{"prompt": f"{i:0{digits + 1}}=", "answer": f"{i:0{digits + 1}}"[::-1]} for i in range(count)]

def reward(prompt, completion, info):
    return {"reward": float(completion == info["answer"]), "seen": 1.0}

@tilth.task("mirror")
def mirror():
    return Task(prompts, reward, lambda prompt: prompt.text[:-1])
"""


def right(prompt, completion, info):
    return 1.0


def empty():
    return Task(lambda: [], right)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    forget()


def recipe(folder, *, cluster=None, **data):
    plugin = write(folder, PLUGIN)
    sections = {"cluster": cluster} if cluster else {}
    return tiny.recipe(folder, plugins=[str(plugin)], data={"source": "mirror", **data}, **sections)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run in this process, and what it records."""
    recorder, folder = tiny.Recorder(), tmp_path_factory.mktemp("alone")
    result = tiny.run(recipe(folder, options={"count": 30}), reward=None, callbacks=[recorder])
    forget()  # the test that asks first declares it in another file
    return result, recorder.records


def test_an_invented_task_trains_and_is_evaluated(alone):
    result, records = alone
    assert len(records) == 6 + 6 and 0 <= result.accuracy <= 1
    seen = [value for key, value in records[-1].items() if key.endswith("/seen")]
    assert seen and set(seen) == {1.0}


@pytest.mark.slow  # workers import a plugin quickly in tests/flows/test_plugins.py
@pytest.mark.parametrize(
    "backend",
    [pytest.param("local", marks=pytest.mark.dist), pytest.param("ray", marks=[pytest.mark.dist, pytest.mark.ray])],
)
def test_an_invented_task_trains_on_workers_as_in_one_process(alone, tmp_path, backend):
    if backend == "ray":
        pytest.importorskip("ray")
    there = tiny.run(recipe(tmp_path, options={"count": 30}, cluster={"backend": backend, "workers": 1}), reward=None)
    assert tiny.weights(alone[0].directory) == tiny.weights(there.directory)


def test_what_is_derived_of_its_name(tmp_path):
    data = recipe(tmp_path).data
    assert task_names() == [*shipped_tasks(), "mirror"]
    prompts = load_source(data)
    assert len(prompts) == 40 and prompts[12].text == "12=" and prompts[12].answer == "21"
    assert len(load_source(recipe(tmp_path, options={"count": 7}).data)) == 7
    function = load_reward(of_plugins("mirror"))
    assert function(prompts[12].text, "21", prompts[12].info)["reward"] == 1.0
    assert of_plugins("mirror").endswith("mine.py:mirror")
    (pair,) = pairs_of(load_pairs(data), 12)
    assert (pair.chosen, pair.rejected) == ("21", "12")


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"options": {"cuont": 3}}, "data.options.cuont"),
        ({"options": {"count": "many"}}, "data.options.count.type"),
        ({"source": "addition", "options": {"count": 3}}, "data.options.count"),
        ({"source": "some.jsonl", "options": {"count": 3}}, "data.options.count"),
    ],
)
def test_an_option_that_is_none(tmp_path, data, key):
    with raises(RecipeError, key):
        recipe(tmp_path, **data)


def test_prompts_ask_for_keys_that_there_are():
    tilth.task("odd")(lambda: Task(lambda digit: [], lambda p, c, i: 0.0))
    with raises(RecipeError, "task.odd.digit"):
        from_dict({"data": {"source": "odd"}})


def test_a_name_is_taken_once():
    with raises(PluginError, "task.addition.shipped"):
        tilth.task("addition")
    tilth.reward("twice")(right)
    with raises(PluginError, "task.twice"):
        tilth.task("twice")(empty)
    tilth.task("gsm8k")(empty)
    with raises(RewardError, "task.gsm8k"):
        of_plugins("gsm8k")


def test_what_is_no_task():
    tilth.task("nothing")(lambda: None)
    with raises(PluginError, "task.nothing"):
        task_of("nothing")
    tilth.task("empty")(empty)
    with pytest.raises(DataError) as caught:
        load_source(from_dict({"data": {"source": "empty"}}).data)
    assert "empty" in str(caught.value)


@pytest.mark.parametrize("name", shipped_tasks())
def test_a_task_of_tilth_answers_its_own_prompts(name):
    task, prompts = task_of(name), load_source(from_dict({"data": {"source": name, "digits": 1}}).data)
    for prompt in itertools.islice(prompts, 0, 50, 4):
        graded = task.reward(prompt.text, prompt.answer, prompt.info)
        assert (graded if isinstance(graded, float) else graded["correct"]) == 1.0
        assert task.reward.check({"prompt": prompt.text, **prompt.info}) == ""
        assert task.wrong is None or task.wrong(prompt) != prompt.answer
