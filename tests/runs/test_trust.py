"""Opening a run executes no code of it that this user has not trained with."""

import json
import os

import pytest
from typer.testing import CliRunner

from tests.errors import raises
from tilth.cli.main import app
from tilth.config.plugins import forget
from tilth.core.errors import PluginError
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


@pytest.mark.parametrize(
    "named",
    [
        {"reward": {"function": "evil.py:reward"}},
        {"reward": {"function": {"exact": 1.0, "os:system": 1.0}}},
        {"rollout": {"environment": "evil.py:Game"}},
        {"rollout": {"python": "/tmp/python"}},
        {"plugins": ["this"]},
    ],
)
def test_all_that_executes_code_counts(run, named):
    with raises(PluginError, "--trust"):
        check_trust(run, named)
    remember(named)
    check_trust(run, named)


def test_what_names_no_code_needs_no_trust(run):
    check_trust(run, {"plugins": [], "reward": {"function": "countdown:0.1"}, "rollout": {"environment": "calculator"}})
    assert load_named("addition-grpo").flow == "grpo"


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
