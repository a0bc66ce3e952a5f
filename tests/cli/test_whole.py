"""From the command line to a trained model and back: a run in miniature, and every command on its directory."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import forked
from tilth.cli.main import app

SMALL = [
    "model.hidden=32",
    "model.layers=1",
    "data.digits=1",
    "supervised.steps=4",
    "supervised.batch=16",
    "rollout.prompts=8",
    "run.eval_prompts=16",
    "run.save_every=2",
    "train.threads=1",
    "algorithm.drop_flat=false",
]
TILTH = [sys.executable, "-c", "from tilth.cli.main import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "COLUMNS": "200"}


def start(folder, *arguments):
    return subprocess.Popen(
        [*forked.python(), *TILTH[1:], *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def tilth(folder, *arguments):
    """A command in this process, which has imported what most of them need: exit code, output, errors."""
    with contextlib.chdir(folder):
        found = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(map(str, arguments)))
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the finished run runs/addition-grpo-001; what the run printed is in said.txt."""
    where = tmp_path_factory.mktemp("whole")
    process = start(where, "run", "addition-grpo", *SMALL, "algorithm.steps=3")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (where / "said.txt").write_text(out)
    return where


RUN = Path("runs/addition-grpo-001")
LOST = "nobody reads"
"""What the log says of a run whose output could not be written."""


def test_the_plan_comes_before_the_first_step_and_the_end_says_where_to_look(folder):
    said = (folder / "said.txt").read_text()
    assert said.index("new run in") < said.index("predicted memory") < said.index("report: ")
    assert f"report: {RUN}/report.html" in said and (folder / RUN / "report.html").stat().st_size > 1000
    assert LOST not in (folder / RUN / "log.txt").read_text()


def test_the_resolved_recipe_is_a_recipe_again(folder):
    from tilth.config.load import load_recipe

    recipe = load_recipe(str(folder / RUN / "recipe.toml"))
    assert recipe == load_recipe("addition-grpo", [*SMALL, "algorithm.steps=3"])


def test_show(folder):
    code, out, _ = tilth(folder, "show", RUN, "--json")
    found = json.loads(out)
    assert code == 0 and (found["state"], found["steps"], found["rewards_missing"]) == ("finished", 7, 0)
    assert found["mismatch_max"] < 1e-4 and found["memory_peak"] > 0 and found["memory_predicted"] > 0


def test_generate_and_export_say_the_same(folder):
    ask = ["3+4=", "--temperature", "0", "--max-tokens", "4", "--json", "--logprobs"]
    _, from_run, err = tilth(folder, "generate", RUN, *ask)
    assert from_run, err
    assert tilth(folder, "export", RUN, "out")[0] == 0
    _, from_export, _ = tilth(folder, "generate", "out", *ask)
    assert json.loads(from_run) == json.loads(from_export) and len(json.loads(from_run)["tokens"]) <= 4


def test_report_can_be_written_again(folder):
    (folder / RUN / "report.html").unlink()
    assert tilth(folder, "report", RUN)[:2] == (0, f"{RUN}/report.html\n")
    assert (folder / RUN / "report.html").is_file()


@pytest.mark.slow  # tests/runs/test_directory.py has it without a run
def test_a_finished_run_is_not_continued(folder):
    _, out, _ = tilth(folder, "run", "addition-grpo", *SMALL, "algorithm.steps=3")
    assert "new run in runs/addition-grpo-002" in out


def test_ctrl_c_saves_and_the_same_command_continues(tmp_path):
    command = ["run", "addition-grpo", *SMALL, "run.name=stopped"]
    process = start(tmp_path, *command, "algorithm.steps=2000")
    metrics = tmp_path / "runs/stopped/metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.is_file() and metrics.read_text().count("\n") > 6):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command continues in runs/stopped" in err
    steps = json.loads(tilth(tmp_path, "show", "runs/stopped", "--json")[1])
    assert steps["state"] == "interrupted" and steps["steps"] > 6

    code, _, err = tilth(tmp_path, *command, "algorithm.steps=3")
    assert code == 2 and "is another run: " in err  # other keys, other run

    process = start(tmp_path, *command, "algorithm.steps=2000")
    line = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert line == "continuing in runs/stopped\n"


def test_costs_of_its_work(folder):
    code, out, err = tilth(folder, "trace", "costs", "runs/addition-grpo-001", "--save", "costs.json", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert said == json.loads((folder / "costs.json").read_text())
    assert {("rollout", "decode"), ("rollout", "sample")} <= {(c["role"], c["op"]) for c in said["compute"]}
    assert said["about"]["recipe"] == "addition-grpo" and said["about"]["parameters"] > 0 and said["links"] == []
    code, out, _ = tilth(folder, "trace", "costs", "runs/addition-grpo-001")
    assert code == 0 and "rollout decode" in out
