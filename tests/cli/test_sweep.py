"""``tilth sweep``: what it prints of its runs, and a whole one."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tilth.cli.main import app
from tilth.config.load import load_recipe
from tilth.launch.sweep import plan_sweep
from tilth.runs.directory import RunDir
from tilth.runs.readers import read_metrics, read_state

RATES = "optimizer.lr=1e-4,3e-4"


def sweep(*words):
    found = CliRunner().invoke(app, ["sweep", "addition-grpo", *words])
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture
def trained(tmp_path):
    """Runs of a sweep as their processes leave them: with the second rate the accuracy is higher."""
    words = [RATES, "run.name=rates", f"run.dir={tmp_path}"]
    leave(words)
    return [*words, "--seeds", "3"]


def leave(words, inputs=None):
    for run in plan_sweep("addition-grpo", words, 3).runs:
        if (run.path / "run.json").exists():
            continue
        with RunDir.create(load_recipe("addition-grpo", run.overrides), "addition-grpo", inputs=inputs) as directory:
            for step in (1, 2):
                accuracy = 0.1 * step + 0.01 * run.seed + 0.3 * run.values["optimizer.lr"].endswith("3")
                held = {"accuracy/heldout": accuracy, "reward/heldout": accuracy}
                directory.commit_step({"step": step, "phase": "grpo", **held})
            directory.end("finished")


def test_finished_runs_are_compared_with_intervals_over_seeds_the_best_first(trained):
    code, out, err = sweep(*trained)
    assert code == 0 and "rates: 6 runs, 6 finished" in err
    rows = [line.split() for line in out.splitlines() if "accuracy/heldout" in line]
    assert [row[0] for row in rows] == ["0.0003", "0.0001"]
    assert rows[1][1:] == ["3", "accuracy/heldout", *"21.0 % ± 2.5 % 21.0 % ± 2.5 %".split()]
    assert "/compare?sweep=rates" in out


def test_json_has_runs_and_settings(trained):
    code, out, _ = sweep(*trained, "--json")
    found = json.loads(out)
    assert code == 0 and (found["sweep"], found["recipe"]) == ("rates", "addition-grpo")
    assert [run["state"] for run in found["runs"]] == ["finished"] * 6
    best = found["settings"][0]
    assert best["values"] == {"optimizer.lr": 3e-4} and best["seeds"] == [0, 1, 2]
    assert best["final"] == {"mean": pytest.approx(0.51), "half": pytest.approx(4.303 * 0.01 / 3**0.5)}


def test_runs_whose_data_have_changed_are_not_averaged(trained, tmp_path):
    shutil.rmtree(tmp_path / "rates-lr0.0001-seed2")
    leave(trained[:-2], {"data": "another"})
    code, out, _ = sweep(*trained)
    rows = [line.split() for line in out.splitlines() if "accuracy/heldout" in line]
    assert code == 0 and [row[:2] for row in rows] == [["0.0003", "3"], ["0.0001", "1"], ["0.0001", "2"]]
    assert "values with several rows" in out


def test_runs_without_an_evaluation_leave_nothing_to_compare(tmp_path):
    words = ["run.name=rates of mine", f"run.dir={tmp_path}"]
    for run in plan_sweep("addition-grpo", words, 2).runs:
        with RunDir.create(load_recipe("addition-grpo", run.overrides), "addition-grpo") as directory:
            directory.end("finished")
    code, out, _ = sweep(*words, "--seeds", "2")
    assert code == 0 and out.startswith("nothing to compare") and "/compare?sweep=rates%20of%20mine" in out


def test_bad_input_ends_in_a_line(tmp_path):
    code, out, err = sweep("optimizer.lr=1e-4,", f"run.dir={tmp_path}")
    assert (code, out) == (2, "") and err.startswith("error: optimizer.lr=1e-4,: ") and err.count("\n") == 1
    code, out, err = sweep(RATES, "--parallel", "4096", f"run.dir={tmp_path}")
    assert (code, out) == (2, "") and "--parallel 4096" in err and not [*tmp_path.iterdir()]


SMALL = (
    "model.hidden=16 model.layers=1 model.heads=2 model.kv_heads=1 data.digits=1 supervised.steps=0 run.eval_prompts=8 "
    "rollout.prompts=2 rollout.group=2 algorithm.steps=3 run.save_every=1 train.threads=1"
)


def _second(stream):
    stream.readline()
    return stream.readline()


@pytest.mark.slow
def test_a_sweep_trains_what_one_that_was_killed_has_left(tmp_path):
    command = [sys.executable, "-m", "tilth", "sweep", "addition-grpo", *SMALL.split(), "run.name=few"]
    command += [f"run.dir={tmp_path}", "--seeds", "2"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert re.match(r"1 of 2 .*few-seed0  finished", _second(first.stderr))
    first.kill()
    first.wait()
    ended = (tmp_path / "few-seed0" / "run.json").stat().st_mtime_ns
    second = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "few-seed0" / "run.json").stat().st_mtime_ns == ended
    for seed in (0, 1):
        assert read_state(tmp_path / f"few-seed{seed}")["sweep"] == "few"
        assert len(read_metrics(tmp_path / f"few-seed{seed}")) == 3
