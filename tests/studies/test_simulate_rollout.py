"""``tilth simulate rollout``: a row for each mode, lengths of files and runs, and what is wrong with them."""

import json

import pyarrow as pa
import pytest
from tilth_studies import simulate_rollout as study
from tilth_studies.asynchrony import modes
from tilth_studies.simulate_rollout import read_lengths, simulated
from typer.testing import CliRunner

from tests.errors import raises
from tilth.cli.main import app
from tilth.config.load import load_recipe
from tilth.core.errors import DataError, PlanError, RecipeError
from tilth.data.trajectories import TRAJECTORIES, TrajectoryFiles
from tilth.plan.devices import DEVICES

SMALL = ["data.digits=1", "rollout.prompts=4", "rollout.group=2"]


def call(*arguments):
    found = CliRunner().invoke(app, ["simulate", "rollout", *map(str, arguments)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("3\n4\n5\n30\n")
    return path


def test_a_row_for_each_mode(lengths):
    code, text = call("addition-grpo", "--gpus", 4, "--device-type", "h100", "--lengths", lengths, *SMALL)
    assert code == 0 and "4 lengths, 4 devices of type h100" in text
    for name in modes(study.STALENESS):
        assert f"\n{name} " in text
    assert max(map(len, text.splitlines()[1:])) <= 100


def test_numbers_are_those_of_the_simulation_and_come_again(lengths):
    words = ("addition-grpo", "--gpus", 4, "--device-type", "h100", "--lengths", lengths, "--json", *SMALL)
    code, text = call(*words)
    rows = json.loads(text)
    assert code == 0 and [row["mode"] for row in rows] == list(modes(study.STALENESS))
    assert rows[0]["generating"] == 4 and all(0 < row["generating"] < 4 for row in rows[1:])
    assert rows[0]["staleness"] == {"0": 1.0} and all(row["samples_per_minute"] > 0 for row in rows)
    assert call(*words)[1] == text and json.loads(call(*words, "seed=1")[1]) != rows


def test_a_faster_device_is_faster():
    recipe = load_recipe("addition-grpo", SMALL)
    fast, slow = (next(simulated(recipe, DEVICES[name], 4, [5])).outcome for name in ("h100", "cpu"))
    assert fast.samples_per_minute > slow.samples_per_minute


def test_lengths_of_a_run_are_those_of_its_completions(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    files = TrajectoryFiles(tmp_path / TRAJECTORIES)
    table = pa.table({"step": [1, 1], "id": [0, 1], "tokens": [[1, 2, 3, 4, 5], [1, 2]], "prompt_length": [2, 1]})
    files.add(table)
    files.commit(1)
    assert not files.flush()
    files.close()
    assert read_lengths(tmp_path) == [3, 1]


def test_lists_and_lines_are_one(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text("[7, 8,\n 9]")
    assert read_lengths(path) == [7, 8, 9]


@pytest.mark.parametrize(
    "text, key",
    [
        ("", "x.txt"),
        ("[]", "x.txt"),
        ("4\n-3\n", "x.txt.2"),
        ("4\n0\n", "x.txt.2"),
        ("4\n2.5\n", "x.txt.2"),
        ("true\n", "x.txt.1"),
        ("four\n", "x.txt"),
        ("[4, 5", "x.txt"),
        (None, "x.txt"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, key):
    if text is not None:
        (tmp_path / "x.txt").write_text(text)
    with raises(DataError, key):
        read_lengths(tmp_path / "x.txt")


def test_a_run_without_trajectories_is_named(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with raises(DataError, tmp_path.name):
        read_lengths(tmp_path)


def test_an_error_is_one_line(tmp_path):
    code, text = call("addition-grpo", "--gpus", 4, "--lengths", tmp_path / "none.txt")
    assert code == 2 and "none.txt" in text and text.count("\n") == 1


@pytest.mark.parametrize(
    "overrides, gpus, error, key",
    [
        (["flow=pretrain"], 4, RecipeError, "flow"),
        ([*SMALL, "cluster.backend=local", "cluster.workers=2", "rollout.layout.tp=2"], 2, RecipeError, "--gpus"),
        (SMALL, 4, PlanError, "limits.tokens"),
    ],
)
def test_recipes_that_cannot_be_simulated(overrides, gpus, error, key):
    with raises(error, key):
        list(simulated(load_recipe("addition-grpo", overrides), DEVICES["h100"], gpus, [5, 9_000_000]))
