"""Optimizers of one's own: the numbers of torch's, a plan and checkpoints that know their state, named errors."""

import pytest

from tests.config.test_plugins import _nothing_left_behind, write  # noqa: F401  (a fixture)
from tests.errors import raises
from tests.flows import tiny
from tilth.config.load import load_recipe
from tilth.core.errors import PluginError, RecipeError
from tilth.plan.memory import FP32, _optimizer
from tilth.runs.signals import Interrupted

MINE = """
import tilth, torch

@tilth.optimizer("my_adamw", state=("exp_avg", "exp_avg_sq"))
def my_adamw(parameters, section):
    groups = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, fused=True)

@tilth.optimizer("momentum", state=("momentum_buffer",))
def momentum(parameters, section):
    return torch.optim.SGD(parameters, lr=section.lr, momentum=0.9)

@tilth.optimizer("silent")
def silent(parameters, section):
    return torch.optim.RMSprop(parameters, lr=section.lr)

@tilth.optimizer("by_name")
def by_name(parameters, section, *, squares, named, table):
    class Signs(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            names, (found,) = squares({n: p.grad for n, p in named.items()})
            assert list(named.values()) == parameters and len(table) > 3
            for name, square in zip(names, found.tolist()):
                named[name].sub_(named[name].grad, alpha=self.param_groups[0]["lr"] / max(square, 1e-9) ** 0.5)

    return Signs(parameters, {"lr": section.lr})

@tilth.optimizer("old_words")
def old_words(named, table):
    assert isinstance(named, list) and table.lr
    return torch.optim.SGD(named, lr=table.lr)

@tilth.optimizer("nothing")
def nothing(parameters, section):
    return None

@tilth.optimizer("broken")
def broken(parameters, section):
    return torch.optim.AdamW(parameters, lr=section.learning_rate)
"""


SHORT = {"supervised": {"steps": 3}, "algorithm": {"steps": 3}}


@pytest.fixture
def plugins(tmp_path):
    return [str(write(tmp_path, MINE))]


def test_one_of_ones_own_equals_what_it_copies_to_the_last_bit(tmp_path, plugins):
    mine = tiny.run(tiny.recipe(tmp_path / "a", plugins=plugins, optimizer={"name": "my_adamw"}, **SHORT))
    theirs = tiny.run(tiny.recipe(tmp_path / "b", **SHORT))
    assert tiny.weights(mine.directory) == tiny.weights(theirs.directory)


@pytest.mark.parametrize("name", ["by_name", "old_words"])
def test_it_may_name_what_it_needs_and_its_first_two_arguments_have_any_names(tmp_path, plugins, name):
    found = tiny.run(tiny.recipe(tmp_path / "a", plugins=plugins, optimizer={"name": name, "lr": 1e-2}, **SHORT))
    assert found.summary["steps"] == 6


def test_its_state_is_kept_and_a_run_that_was_stopped_ends_as_if_it_was_not(tmp_path, plugins):
    def stop(record):
        if record["step"] == 5:
            raise Interrupted("now")

    def made(folder):
        return tiny.recipe(tmp_path / folder, plugins=plugins, optimizer={"name": "momentum", "lr": 1e-2}, **SHORT)

    whole = tiny.run(made("whole"))
    with pytest.raises(Interrupted):
        tiny.run(made("torn"), callbacks=[tiny.Recorder(stop)])
    again = tiny.run(made("torn"))
    assert again.summary["steps"] == 6 and tiny.weights(whole.directory) == tiny.weights(again.directory)


def test_the_memory_plan_goes_by_the_state_that_it_names(plugins):
    from types import SimpleNamespace

    cut = SimpleNamespace(learned=100, updated=100, blocks=60, adapters=0)
    asked = {
        "adamw": 200,
        "muon": 140,
        "lans": 200,
        "lamb": 200,
        "lars": 100,
        "adaalter": 200,
        "my_adamw": 200,
        "momentum": 100,
        "silent": 0,
    }
    for name, want in asked.items():
        recipe = load_recipe("addition-grpo", [f"plugins={plugins}".replace("'", '"'), f"optimizer.name={name}"])
        assert _optimizer(recipe, cut) == FP32 * want


@pytest.mark.parametrize(
    ("name", "key", "word"),
    [
        ("silent", ".state", "square_avg"),
        ("nothing", ".return", "NoneType"),
        ("broken", "", "learning_rate"),
    ],
)
def test_one_that_cannot_work_is_named_with_file_and_line(tmp_path, plugins, name, key, word):
    with raises(PluginError, name + key) as caught:
        tiny.run(tiny.recipe(tmp_path / "a", plugins=plugins, optimizer={"name": name}))
    assert word in str(caught.value) and "mine.py:" in str(caught.value)


def test_a_name_that_is_none_is_refused_with_those_there_are(tmp_path, plugins):
    with pytest.raises(RecipeError) as caught:
        tiny.recipe(tmp_path / "a", plugins=plugins, optimizer={"name": "momentumm"})
    assert "optimizer.name" in str(caught.value)


def test_the_name_of_one_that_comes_with_tilth_is_refused(tmp_path):
    path = write(tmp_path, "import tilth\n@tilth.optimizer('adamw')\ndef mine(parameters, section): pass\n")
    with pytest.raises(PluginError):
        tiny.recipe(tmp_path / "a", plugins=[str(path)])
