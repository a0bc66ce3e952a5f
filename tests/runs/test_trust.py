"""Opening a run executes no code of it that this user has not trained with."""

import json
import os
import py_compile
from importlib.util import cache_from_source
from pathlib import Path
from py_compile import PycInvalidationMode
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from tests.errors import raises
from tests.flows import tiny
from tilth.cli.eval import reward_of
from tilth.cli.main import EvalCommand, app
from tilth.config.plugins import forget
from tilth.core.errors import PluginError
from tilth.engines.options import EngineOptions
from tilth.launch import profiling
from tilth.runs import models as model
from tilth.runs.model_refs import Named
from tilth.runs.models import LoadedModel, make_engine
from tilth.runs.trust import TRUST, check_trust, load_code, load_named, remember

EVIL = "from pathlib import Path\nimport beside\nPath(__file__).with_name('executed').touch()\n"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A user who has trained with nothing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(TRUST, raising=False)
    yield
    forget([])


@pytest.fixture
def run(tmp_path):
    """A run of somebody else, whose recipe names a plugin of theirs."""
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "beside.py").write_text("")
    folder = tmp_path / "run"
    folder.mkdir()
    state = {"state": "finished", "recipe": "x", "started": "2026-01-01T00:00:00+00:00", "attempts": [], "digest": "x"}
    (folder / "run.json").write_text(json.dumps(state))
    (folder / "recipe.toml").write_text(f'plugins = ["{tmp_path / "evil.py"}"]\n')
    (folder / "metrics.jsonl").write_text('{"step": 1, "phase": "grpo", "seconds": 1.0}\n')
    return folder


def settings(run):
    return {"plugins": [str(run.parent / "evil.py")]}


@pytest.mark.parametrize(
    "command, code",
    [("top {} --once", 0), ("top {} --once --json", 0), ("show {}", 0), ("layout {}/recipe.toml", 2),
     ("data show {}/recipe.toml", 2), ("guard simulate {}/recipe.toml --trace x", 2)],
)  # fmt: skip
def test_a_command_that_looks_at_a_run_executes_nothing_of_it(run, command, code):
    result = CliRunner().invoke(app, command.format(run).split())
    assert result.exit_code == code, result.output
    assert code == 0 or "--trust" in result.stderr
    assert not (run.parent / "executed").exists()


@pytest.fixture
def trained(run, monkeypatch):
    """The run of somebody else with a checkpoint and a model of a family that only its plugin knows."""
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text('{"model_type": "theirs"}')
    monkeypatch.setattr(model, "find_checkpoint", lambda spec: Named(run / "checkpoints" / "1", "policy", run))
    return run


@pytest.mark.parametrize(
    "command",
    ["eval {}", "generate {} hello", "chat {}", "export {} {}/out", "serve {}",
     "guard replay {} --step 1", "trace capture {}"],
)  # fmt: skip
def test_a_command_that_would_use_the_code_of_a_run_refuses_it(trained, command, monkeypatch):
    monkeypatch.setattr(profiling, "running_attempt", lambda run: 1)
    result = CliRunner().invoke(app, command.format(trained, trained).split())
    assert result.exit_code == 2 and "--trust" in result.stderr, result.output
    assert not (trained.parent / "executed").exists()


@pytest.mark.parametrize("use", [lambda loaded: make_engine(loaded, EngineOptions(max_rows=1, max_length=8)),
                                 lambda loaded: reward_of(EvalCommand("run", reward=["exact"]), loaded)])  # fmt: skip
def test_a_model_of_a_known_family_leads_to_none_of_its_runs_code(run, use):
    named = settings(run) | {"rollout": {"engine": "vllm"}}
    with raises(PluginError, "--trust"):
        use(LoadedModel(None, {}, None, run, run, named))
    assert not (run.parent / "executed").exists()


def test_the_maker_of_a_run_is_not_asked(trained):
    remember(settings(trained))
    for command in ("layout {}/recipe.toml", "export {} {}/out"):
        result = CliRunner().invoke(app, command.format(trained, trained).split())
        assert "--trust" not in result.output
        assert (trained.parent / "executed").exists()
        (trained.parent / "executed").unlink()
        forget([])


def test_code_is_imported_when_its_user_says_so_and_then_always(run, monkeypatch):
    monkeypatch.setenv(TRUST, "")  # so that it is restored
    CliRunner().invoke(app, ["--trust", "layout", f"{run}/recipe.toml"])
    assert (run.parent / "executed").exists() and os.environ[TRUST]
    monkeypatch.delenv(TRUST)
    check_trust(run, settings(run))


def test_code_that_its_user_has_trained_with_is_trusted_wherever_it_lies_until_it_changes(run, tmp_path):
    with raises(PluginError, "--trust"):
        load_code(run, settings(run))
    remember(settings(run))
    check_trust(run, settings(run))
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("evil.py", "beside.py"):
        (moved / name).write_text((tmp_path / name).read_text())
    check_trust(run, {"plugins": [str(moved / "evil.py")]})
    (moved / "beside.py").write_text("x = 1\n")
    with raises(PluginError, "--trust"):
        check_trust(run, {"plugins": [str(moved / "evil.py")]})
    check_trust(run, settings(run))


def copied(run, folder, *, neighbour=""):
    """Code of the run in another folder, with another neighbour."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evil.py").write_text(EVIL)
    (folder / "beside.py").write_text(neighbour)
    return folder / "evil.py"


def linked(run, tmp_path):
    shown, hidden = copied(run, tmp_path / "shown"), copied(run, tmp_path / "hidden", neighbour="x = 1\n")
    shown.unlink()
    shown.symlink_to(hidden)
    return [shown]


def alone(run, tmp_path):
    """Code without its neighbour, that its user trusts."""
    found = copied(run, tmp_path / "alone")
    found.with_name("beside.py").unlink()
    remember({"plugins": [str(found)]})
    return found


def through_another(run, tmp_path):
    """Its neighbour is found in the folder of another plugin."""
    found = alone(run, tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "other.py").write_text("")
    (tmp_path / "other" / "beside.py").write_text("x = 1\n")
    remember({"plugins": [str(tmp_path / "other" / "other.py")]})
    return [tmp_path / "other" / "other.py", found]


def as_if_installed(run, tmp_path):
    alone(run, tmp_path)
    return [copied(run, tmp_path / "site-packages", neighbour="x = 1\n")]


def of_a_package_in_another_folder(run, tmp_path):
    """A module of a package lies beside its plugin, and another one of that name in the folder that comes first."""
    for folder, module in (("good", "x = 1\n"), ("first", "x = 2\n"), ("second", "x = 1\n")):
        (tmp_path / folder / "pkg").mkdir(parents=True)
        (tmp_path / folder / "pkg" / "__init__.py").write_text("")
        (tmp_path / folder / "pkg" / "sub.py").write_text(module)
        (tmp_path / folder / "a.py").write_text("")
        (tmp_path / folder / "b.py").write_text("import pkg.sub\n")
    remember({"plugins": [str(tmp_path / "good" / name) for name in ("a.py", "b.py")]})
    return [tmp_path / "first" / "a.py", tmp_path / "second" / "b.py"]


@pytest.mark.parametrize("plugins", [linked, through_another, as_if_installed, of_a_package_in_another_folder])
def test_code_is_what_python_would_import(run, tmp_path, plugins):
    remember(settings(run))
    with raises(PluginError, "--trust"):
        check_trust(run, {"plugins": [str(name) for name in plugins(run, tmp_path)]})


def test_bytecode_beside_code_that_is_trusted_is_not_executed(run, tmp_path):
    (tmp_path / "other.py").write_text("from pathlib import Path\nPath(__file__).with_name('hidden').touch()\n")
    cache, unchecked = cache_from_source(str(tmp_path / "beside.py")), PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(tmp_path / "other.py"), cache, str(tmp_path / "beside.py"), invalidation_mode=unchecked)
    remember(settings(run))
    load_code(run, settings(run))
    assert (tmp_path / "executed").exists() and not (tmp_path / "hidden").exists()


def test_a_folder_that_a_run_could_bring_along_holds_no_trust(run, monkeypatch):
    remember(settings(run))
    monkeypatch.chdir(run.parent)
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(run / "home"))
    with raises(PluginError, "--trust"):
        check_trust(run, settings(run))


def test_code_in_the_home_of_its_user_is_there(run, monkeypatch):
    monkeypatch.setenv("HOME", str(run.parent))
    remember({"reward": {"function": "~/evil.py:reward"}})
    check_trust(run, {"reward": {"function": "~/evil.py:reward"}})


@pytest.mark.parametrize(
    "named",
    [
        {"reward": {"function": "evil.py:reward"}},
        {"reward": {"function": {"exact": 1.0, "os:system": 1.0}}},
        {"rollout": {"environment": "evil.py:Game"}},
        {"rollout": {"python": "/tmp/python"}},
        {"rollout": {"engine": "vllm", "options": {"worker_extension_cls": "evil.Worker"}}},
        {"plugins": ["this"]},
    ],
)
def test_all_that_executes_code_counts(run, named, monkeypatch):
    monkeypatch.chdir(run.parent)
    with raises(PluginError, "--trust"):
        check_trust(run, named)
    remember(named)
    check_trust(run, named)


def test_what_names_no_code_needs_no_trust(run):
    check_trust(run, {"plugins": [], "reward": {"function": "countdown:0.1"}, "rollout": {"environment": "calculator"}})
    assert load_named("addition-grpo").flow == "grpo"


@pytest.mark.parametrize("home", ["file", "none"])
def test_a_home_that_cannot_be_written_to_is_a_warning_and_no_error(run, tmp_path, monkeypatch, home):
    monkeypatch.delenv("XDG_STATE_HOME")
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    if home == "none":
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError))
    assert "--trust" in remember(settings(run)) and not remember({"plugins": []})
    with raises(PluginError, "--trust"):
        check_trust(run, settings(run))


def test_a_run_ends_with_that_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    (tmp_path / "mine.py").write_text("")
    recipe = tiny.recipe(tmp_path, flow="sft", supervised={"steps": 1}, plugins=[str(tmp_path / "mine.py")])
    lines = (tiny.run(recipe).directory / "log.txt").read_text().splitlines()
    assert [number for number, line in enumerate(lines) if "--trust" in line] == [len(lines) - 1]


HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m"


@pytest.mark.parametrize("command", ["show {}", "ls {}/..", "top {} --once"])
def test_no_text_of_a_run_controls_the_terminal(run, command):
    state = json.loads((run / "run.json").read_text())
    state |= {"state": "failed", "recipe": f"x{HOSTILE}", "error": HOSTILE}
    (run / "run.json").write_text(json.dumps(state))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "phase": f"p{HOSTILE}", "seconds": 1.0}) + "\n")
    result = CliRunner().invoke(app, command.format(run).split())
    assert result.exit_code == 0 and not set(result.output) & {"\x1b", "\x07", "\x9b"}, repr(result.output)
    assert "\ufffd" in result.output


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{"plugins": ["lost.py"]}, {"reward": {"function": "lost.py:score"}}, {"rollout": {"environment": "lost.py:Game"}}],
)
def test_code_that_is_gone_is_named_before_trust_is_asked_for(run, monkeypatch, trusted, settings):
    if trusted:
        monkeypatch.setenv(TRUST, "1")
    with raises(PluginError, "lost.py.gone"):
        check_trust(run, settings)
