"""Plugins: files and modules of a user's, imported once, whose errors name file and line."""

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import tilth
from tests.errors import raises
from tilth.config import plugins
from tilth.config.errors import PluginError, RecipeError
from tilth.config.flows import FLOWS
from tilth.config.load import digest, from_dict, load_recipe
from tilth.config.open_sets import OPTIMIZERS
from tilth.config.roles import ROLES
from tilth.config.tasks import task_of
from tilth.models.family import families


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    yield
    forget()


def forget() -> None:
    """Bring this process back to before any plugin was imported, as a new process is."""
    plugins.forget(())
    for kind, known in plugins._DECLARED.items():
        for declaration in known.values():  # of scripts, and of files that are no plugins
            sys.modules.pop(declaration.value.__module__, None) if "mine" in declaration.file else None
            plugins._TABLES.get(kind, {}).pop(declaration.name, None)
        known.clear()


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_plugin_is_imported_once_and_its_neighbours_are_found(tmp_path):
    write(tmp_path, "NUMBER = 7\n", "beside_the_plugin.py")
    path = write(tmp_path, "from beside_the_plugin import NUMBER\nseen = []\n")
    (first,) = plugins.load_plugins([str(path)])
    first.seen.append(1)
    (again,) = plugins.load_plugins([str(path)])
    assert again is first and again.seen == [1] and again.NUMBER == 7


def test_a_recipe_holds_whole_paths_so_that_workers_elsewhere_find_them(tmp_path, monkeypatch):
    write(tmp_path, "import tilth\n")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("addition-grpo", ['plugins=["mine.py"]'])
    assert recipe.plugins == (str(tmp_path / "mine.py"),)


def test_where_a_plugin_lies_does_not_make_another_run(tmp_path):
    paths = [write(tmp_path, "\n", name) for name in ("one.py", "two.py")]
    made = [from_dict({"plugins": [str(path)]}) for path in paths]
    assert digest(made[0]) == digest(made[1])


def test_a_plugin_can_be_a_module(tmp_path, monkeypatch):
    write(tmp_path, "import tilth\n@tilth.reward('said')\ndef said(p, c, i): return 1.0\n", "a_module_of_mine.py")
    monkeypatch.syspath_prepend(tmp_path)
    from_dict({"plugins": ["a_module_of_mine"]})
    assert plugins.declared("reward")["said"].spec == "a_module_of_mine:said"


@pytest.mark.parametrize(
    ("plugin", "text", "key", "word"),
    [
        ("missing.py", "", "missing.py", "missing.py"),
        ("mine.py", "import tilth\n\nx = 1 / 0\n", "mine.py.import", "mine.py:3"),
        ("mine.py", "def broken(:\n", "mine.py.import", "line 1"),
        ("mine.py", "import sys\nsys.exit(3)\n", "mine.py.import", "SystemExit"),
        ("no_such_module_here", "", "no_such_module_here", "no_such_module_here"),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_named_with_its_line(tmp_path, plugin, text, key, word):
    if text:
        write(tmp_path, text)
    name = str(tmp_path / plugin) if plugin.endswith(".py") else plugin
    for _ in range(2):  # a failed import leaves nothing that would count as imported
        with raises(PluginError, key) as caught:
            from_dict({"plugins": [name]})
        assert word in str(caught.value)


def test_plugins_that_are_no_list_are_refused():
    with raises(RecipeError, "plugins"):
        from_dict({"plugins": "mine.py"})


def test_two_plugins_cannot_declare_one_name(tmp_path):
    text = "import tilth\n@tilth.advantage('twice')\ndef mine(rewards): return rewards\n"
    paths = [write(tmp_path, text, name) for name in ("one.py", "two.py")]
    with raises(PluginError, "advantage.twice") as caught:
        from_dict({"plugins": [str(path) for path in paths]})
    assert "two.py:2" in str(caught.value) and "one.py:2" in str(caught.value)


def test_a_cell_that_runs_again_replaces_what_it_declared():
    def cell(scale):
        @tilth.advantage("again")
        def mine(rewards):
            return scale * rewards

        return mine

    cell(1)
    later = cell(2)
    assert plugins.declared("advantage")["again"].value is later


@pytest.mark.parametrize("name", ["", "two words", "dotted.name", 3])
def test_a_name_is_one_word(name):
    with raises(PluginError, "@tilth.advantage"):
        tilth.advantage(name)


@pytest.mark.parametrize(
    ("declare", "key"),
    [
        (lambda: tilth.advantage(print), "@tilth.advantage"),
        (lambda: tilth.advantage("mine")(3), "advantage.mine"),
        (lambda: tilth.flow("mine", roles="judge"), "flow.mine.roles"),
        (lambda: tilth.flow("mine", learns="answer"), "flow.mine.learns"),
        (lambda: tilth.flow("mine")(lambda: None), "flow.mine.arguments"),
        (lambda: tilth.optimizer("mine", state="exp_avg"), "optimizer.mine.state"),
    ],
)
def test_what_a_decorator_cannot_use_is_named(declare, key):
    with raises(PluginError, key):
        declare()


def test_a_flow_that_comes_with_tilth_is_not_replaced():
    with raises(PluginError, "flow.grpo.shipped"):
        tilth.flow("grpo")


def test_a_flow_of_ones_own_is_a_value_of_flow_with_its_defaults(tmp_path):
    text = """
import tilth

@tilth.flow("mine_alone", title="Mine", defaults={"algorithm": {"advantage": "rloo"}})
def mine_alone(run):
    pass
"""
    path = write(tmp_path, text)
    recipe = from_dict({"plugins": [str(path)], "flow": "mine_alone"})
    assert recipe.algorithm.advantage == "rloo" and recipe.flow_spec.title == "Mine"
    with raises(RecipeError, "flow"):
        from_dict({"flow": "mine_alon"})


@pytest.mark.parametrize(
    "defaults",
    [
        {"algorithm": {"advantage": "rloo", "steps": 7}},
        {"algorithm.advantage": "rloo", "algorithm.steps": 7},
        {"algorithm": {"advantage": "rloo"}, "algorithm.steps": 7},
    ],
)
def test_defaults_of_a_flow_stand_in_sections_or_under_their_full_names(defaults):
    tilth.flow("mine_alone", defaults=defaults)(print)
    found = from_dict({"flow": "mine_alone", "algorithm": {"lam": 0.5}}, complete=False).algorithm
    assert (found.advantage, found.steps, found.lam) == ("rloo", 7, 0.5)


@pytest.mark.parametrize(
    "defaults",
    [{"advantage": "rloo"}, {"algorithm.advantag": "rloo"}, {"algorithm": "rloo"}, {"seed": 3}, {"x": {}, 3: 4}],
)
def test_a_default_of_a_flow_that_is_no_key_is_named(defaults):
    with raises(PluginError, "flow.mine_alone.defaults"):
        tilth.flow("mine_alone", defaults=defaults)


def test_a_process_that_gets_a_recipe_imports_its_plugins_and_one_that_only_scores_no_torch(tmp_path):
    path = write(tmp_path, "import tilth\n@tilth.advantage('far')\ndef far(rewards): return rewards\n")
    recipe = tmp_path / "recipe.pickle"
    recipe.write_bytes(pickle.dumps(from_dict({"plugins": [str(path)]})))
    code = (
        "import pickle, sys; from pathlib import Path; pickle.loads(Path(sys.argv[1]).read_bytes()); "
        "from tilth.config.plugins import declared; print(*declared('advantage'), 'torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(recipe)], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["far", "False"]


def test_a_plugin_that_changed_after_it_was_imported_is_named(tmp_path):
    (tmp_path / "ed.py").write_text("x = 1\n")
    plugins.load_plugins([str(tmp_path / "ed.py")])
    plugins.load_plugins([str(tmp_path / "ed.py")])
    (tmp_path / "ed.py").write_text("x = 2\n")
    with raises(PluginError, "ed.py.changed"):
        plugins.load_plugins([str(tmp_path / "ed.py")])


def test_a_helper_of_another_plugins_folder_is_not_taken_for_ones_own(tmp_path):
    for folder, number in (("a", 1), ("b", 2), ("c", 1)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, f"NUMBER = {number}\n", "helper_of_two.py")
        write(tmp_path / folder, "import through_two\n", f"mine_{folder}.py")
        write(tmp_path / folder, "from helper_of_two import NUMBER\n", "through_two.py")
    a, b, c = (str(tmp_path / folder / f"mine_{folder}.py") for folder in "abc")
    plugins.load_plugins([a, c])  # the same text is no conflict
    with raises(PluginError, "mine_b.py.helper_of_two") as caught:
        plugins.load_plugins([b])
    assert f"{tmp_path}/a/helper_of_two.py" in str(caught.value)
    plugins.forget([b])
    plugins.load_plugins([b])
    assert sys.modules["helper_of_two"].NUMBER == 2


def test_a_module_beside_a_plugin_that_only_a_computed_name_imports_is_told(tmp_path):
    beside = write(tmp_path, "", "computed_one.py")
    code = "from importlib import import_module\nimport tilth\n"
    load = "import_module('computed_' + 'one')\n"
    late = write(tmp_path, f"{code}@tilth.reward('late')\ndef late(): {load}", "late.py")
    at_once = write(tmp_path, f"{code}{load}", "at_once.py")
    with raises(PluginError, "at_once.py.import") as caught:
        plugins.load_plugins([str(at_once)])
    assert f"{beside} is found" in str(caught.value)
    plugins.load_plugins([str(late)])
    with raises(PluginError, "reward.late") as caught:
        plugins.call_declared(plugins.declared("reward")["late"])
    assert f"{beside} is found" in str(caught.value)


def test_a_package_beside_a_plugin_is_not_found_by_libraries_that_try_to_import_it(tmp_path):
    """What it imports is found: through other modules, of packages too, in any plugin's folder, in child processes."""
    for folder in ("a", "b", "b/own_pkg", "b/bare_dir", "a/a_dir"):
        (tmp_path / folder).mkdir()
    for folder in "ab":
        write(tmp_path / folder, "raise SystemExit\n", "not_installed.py")
    a = write(tmp_path / "a", "def later():\n    import through_b\n    return through_b\n", "mine_a.py")
    b = write(tmp_path / "b", "X = 1\n", "mine_b.py")
    write(tmp_path / "b", "from own_pkg import part\nimport bare_dir.leaf\n", "through_b.py")
    write(tmp_path / "b" / "own_pkg", "", "__init__.py")
    write(tmp_path / "b" / "own_pkg", "from . import other\n", "part.py")
    write(tmp_path / "b" / "own_pkg", "import helps_a\n", "other.py")
    write(tmp_path / "b" / "bare_dir", "", "leaf.py")
    write(tmp_path / "a", "", "helps_a.py")
    code = "import tilth.config.plugins, importlib.util as u; print([u.find_spec(n) is not None for n in NAMES])"
    names = ["not_installed", "a_dir", "through_b", "own_pkg", "helps_a", "bare_dir"]
    modules = plugins.load_plugins([str(a), str(b)])
    assert [importlib.util.find_spec(name) is not None for name in names] == [False, False, *[True] * 4]
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", code.replace("NAMES", str(names))],
        capture_output=True,
        env=around,
        check=True,
        text=True,
    )
    assert ran.stdout.strip() == "[False, False, True, True, True, True]"
    assert modules[0].later().part.other.helps_a.__file__ == str(tmp_path / "a" / "helps_a.py")
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]


def test_what_a_plugin_declares_goes_with_it_and_with_its_text(tmp_path):
    text = """
import tilth, helper_of_mine
@tilth.flow("mine_flow")
def loop(run): pass
@tilth.role("mine_role")
class Role: pass
@tilth.optimizer("mine_optimizer")
def optimizer(parameters, section): pass
"""
    write(tmp_path, "import tilth\n@tilth.reward('mine_reward')\ndef f(p, c, i): return 1.0\n", "helper_of_mine.py")
    path = str(write(tmp_path, text))

    def known():
        declared = {name for kind in plugins._DECLARED for name in plugins.declared(kind)}
        return declared | {name for table in (FLOWS, ROLES, OPTIMIZERS) for name in table if "mine" in name}

    (module,) = plugins.load_plugins([path])
    everything = {"mine_flow", "mine_role", "mine_optimizer", "mine_reward"}
    assert known() == everything and [d.name for d in plugins.declared_by("reward", [path])] == ["mine_reward"]
    plugins.forget([path])
    assert plugins.load_plugins([path]) == [module]
    write(tmp_path, text.replace("mine_flow", "mine_loop"))
    plugins.forget([path])
    plugins.load_plugins([path])
    assert known() == (everything - {"mine_flow"}) | {"mine_loop"}
    write(tmp_path, "", "helper_of_mine.py")
    plugins.forget([path])
    plugins.load_plugins([path])
    assert "mine_reward" not in known()
    plugins.forget([])
    assert known() == set() and not [place for place in sys.path if str(tmp_path) in place]


def test_a_later_call_of_train_does_not_know_the_plugins_of_an_earlier_one(tmp_path):
    path = write(tmp_path, "import tilth\n@tilth.flow('mine_flow')\ndef loop(run): pass\n")
    data, how = [{"prompt": "a", "answer": "b"}], {"flow": "mine_flow", "live": False}
    with raises(RecipeError, "algorithm.stepz"):
        tilth.train(data, "exact", plugins=[path], algorithm={"stepz": 1}, **how)
    with raises(RecipeError, "flow"):
        tilth.train(data, "exact", **how)


def test_a_declared_task_or_family_that_raises_is_named(tmp_path):
    text = (
        "import tilth\n@tilth.task('bad')\ndef bad(): 1 / 0\n@tilth.family('worse')\ndef worse(): raise KeyError('x')\n"
    )
    (tmp_path / "bad.py").write_text(text)
    plugins.load_plugins([str(tmp_path / "bad.py")])
    for call, key in ((lambda: task_of("bad"), "task.bad"), (families, "family.worse")):
        with raises(PluginError, key) as caught:
            call()
        assert "bad.py:" in str(caught.value)
