"""The runs of a folder: how each stands, the newest first, and one that cannot be read among them."""

import json
import os
import shutil
import subprocess
import sys

import psutil
import pytest
from typer.testing import CliRunner

from tests.flows import tiny
from tilth.cli.main import app
from tilth.ui import format


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["ls", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs that are finished (two), whose process died, that failed, and one that nobody can read."""
    folder = tmp_path_factory.mktemp("all") / "runs"
    warm = {"supervised": {"steps": 1}}
    tiny.run(tiny.recipe(folder, algorithm={"steps": 2}, run={"name": "done"}, **warm), name="x")
    tiny.run(tiny.recipe(folder, flow="sft", run={"name": "answers"}, **warm), name="y")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name, changes in (
        ("killed", {"state": "running", "pid": dead.pid, "pid_started": 1.0, "host": os.uname().nodename}),
        ("failed", {"state": "failed", "error": "out of luck"}),
    ):
        shutil.copytree(folder / "done", folder / name)
        state = json.loads((folder / name / "run.json").read_text())
        (folder / name / "run.json").write_text(json.dumps(state | changes))
    (folder / "torn").mkdir()
    (folder / "torn" / "run.json").write_text("{")
    (folder / "not-a-run").mkdir()
    for number, name in enumerate(("torn", "failed", "killed", "answers", "done")):
        for file in (folder / name).glob("*.json*"):
            os.utime(file, (1e9 + number, 1e9 + number))
    return folder


def test_each_run_with_how_it_stands(runs):
    rows = {row["run"].rpartition("/")[2]: row for row in json.loads(call(runs, "--json", code=1).stdout)}
    assert list(rows) == ["done", "answers", "killed", "failed", "torn"]
    assert [row["state"] for row in rows.values()] == ["finished", "finished", "interrupted", "failed", "unreadable"]
    assert [row["flow"] for row in rows.values()] == ["grpo", "sft", "grpo", "grpo", None]
    done = rows["done"]
    shown = json.loads(CliRunner().invoke(app, ["show", str(runs / "done"), "--json"]).stdout)
    assert (done["step"], done["metric"], done["value"]) == (shown["steps"], "reward", shown["reward_heldout_last"])
    assert rows["failed"]["error"] == "out of luck" and "run.json" in rows["torn"]["error"]
    assert all(row["age"] > 1e8 for row in rows.values())


def test_a_run_in_a_long_step_gave_its_last_sign_of_life_then(runs, tmp_path, monkeypatch):
    shutil.copytree(runs / "done", tmp_path / "long")
    state = json.loads((tmp_path / "long" / "run.json").read_text())
    here = {"state": "running", "pid": os.getpid(), "pid_started": psutil.Process().create_time()}
    (tmp_path / "long" / "run.json").write_text(json.dumps(state | here | {"host": os.uname().nodename}))
    for file in (tmp_path / "long").glob("*.json*"):
        os.utime(file, (1e9, 1e9))
    monkeypatch.setattr("tilth.ui.signs.living", lambda state: [{"heartbeat_age": 3.0}])
    (row,) = json.loads(call(tmp_path, "--json").stdout)
    assert row["state"] == "running" and 3.0 <= row["age"] < 1e6


def test_for_people(runs):
    text = call(runs, code=1).stdout
    assert "interrupted" in text and "failed: out of luck" in text and "reward" in text and "days ago" in text


def test_the_default_is_the_folder_of_runs_and_a_run_is_a_folder_of_one(runs, monkeypatch):
    monkeypatch.chdir(runs.parent)
    assert call(code=1).stdout == call("runs", code=1).stdout
    assert [row["run"] for row in json.loads(call("runs/done", "--json").stdout)] == ["runs/done"]


def test_no_runs(tmp_path):
    assert "no runs" in call(tmp_path).stdout and json.loads(call(tmp_path, "--json").stdout) == []
    assert "none" in call(tmp_path / "none", code=2).stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (3599, "59 min"), (7200, "2 h"), (86_400, "1 day"), (9e5, "10 days")],
)
def test_ages(seconds, text):
    assert format.ago(seconds) == text
