"""What bash offers at a tab, asked as bash asks; and the versions."""

import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tilth
from tilth.cli.main import app, keys
from tilth.config.keys import all_names
from tilth.config.load import names

TILTH = Path(sys.executable).parent / "tilth"


def bash(script, folder):
    return subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True)


def offered(folder, *lines):
    """What bash offers after each of these lines of words, the last one unfinished."""
    script = f'eval "$({TILTH} --show-completion)"; '
    for typed in lines:
        words = " ".join(f"'{word}'" for word in typed)
        script += f"COMP_WORDS=(tilth {words}); COMP_CWORD={len(typed)}; _tilth_completion {TILTH}; "
        script += 'echo "${COMPREPLY[*]}"; '
    asked = bash(script, folder)
    assert asked.returncode == 0 and not asked.stderr, asked.stderr
    return [line.split() for line in asked.stdout.splitlines()]


@pytest.fixture
def folder(tmp_path):
    for name in ("runs/one", "runs/other", "elsewhere/one"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").touch()
    (tmp_path / "runs/cache").mkdir()
    return tmp_path


def test_bash_is_offered_recipes_keys_and_runs(folder):
    recipes, overrides, runs = offered(folder, ["run", "sorting-"], ["run", "sft", "rollout.top"], ["show", ""])
    assert recipes == [name for name in names() if name.startswith("sorting-")]
    assert overrides == ["rollout.top_k=", "rollout.top_p="] and runs == ["runs/one", "runs/other"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["layout", "gsm"], ["gsm8k-grpo"]),
        (["data", "show", "ds"], []),
        (["run", "sft", "--allow", "policy.layout.t"], ["policy.layout.tp"]),
        (["generate", "runs/ot"], ["runs/other"]),
        (["ls", "elsewhere/"], ["elsewhere/one"]),
        (["top", "nowhere/"], []),
        (["run", "./"], []),
    ],
)
def test_what_is_offered(folder, monkeypatch, typed, expected):
    """Without the shell: the same protocol."""
    monkeypatch.chdir(folder)
    asked = {"_TILTH_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["tilth", *typed])}
    result = CliRunner().invoke(app, [], prog_name="tilth", env=asked | {"COMP_CWORD": str(len(typed))})
    assert result.output.split() == expected


def test_every_key_is_offered():
    assert keys("") == all_names()


def test_versions_are_told_without_torch():
    code = "import sys; from tilth.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True)
    assert told.stdout.split("\n")[:2] == [
        f"tilth {tilth.__version__}, torch {version('torch')}, Python {platform.python_version()}", "False"
    ]  # fmt: skip
