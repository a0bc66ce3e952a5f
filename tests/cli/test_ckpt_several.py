"""A run that is broken, or whose checkpoints are lost: it is said, and hides no other."""

import json
from pathlib import Path

import pytest

from tests.cli.kept import call, make_run, refused, said, shell


@pytest.fixture
def runs(tmp_path):
    for name in ("a", "b", "c"):
        make_run(tmp_path / "w" / name, (2, 4), best=2)
    return tmp_path / "w"


def damage(run: Path, file: str) -> None:
    (run / file).write_text("" if file == "run.json" else "garbage")


BROKEN = {
    "run.json": "cannot read {run}/run.json: Expecting value",
    "checkpoints/best.json": "{run}/checkpoints/best.json cannot be read: Expecting value",
}


ONCE = ["run.json", pytest.param("checkpoints/best.json", marks=pytest.mark.slow)]


@pytest.mark.parametrize("file", ONCE)
def test_a_broken_run_hides_no_other(file, runs):
    damage(runs / "b", file)
    result = call("ckpt", "ls", runs)
    reason = BROKEN[file].format(run=runs / "b")
    assert result.exit_code == 1 and result.stdout.count("saved (UTC)") == 2
    flat = " ".join(result.stdout.split())
    assert f"{runs / 'b'} {reason}" in flat and f"{runs / 'a'} step" in flat and f"{runs / 'c'} step" in flat
    rows = said("ckpt", "ls", runs)
    assert [(Path(row["run"]).name, row["step"], row["state"]) for row in rows] == [
        *(("a", step, "complete") for step in (2, 4)),
        ("b", None, "missing"),
        *(("c", step, "complete") for step in (2, 4)),
    ]
    assert rows[2]["reason"].startswith(reason) and rows[2]["checkpoint"] == str(runs / "b" / "checkpoints")
    assert rows[2].keys() == rows[0].keys() and call("ckpt", "ls", runs, "--json").exit_code == 1
    assert reason in refused("ckpt", "ls", runs / "b")


def test_a_run_that_cannot_be_read_is_neither_verified_nor_pruned(runs):
    damage(runs / "c", "run.json")
    for command in (["verify"], ["prune", "--keep", 1]):
        assert BROKEN["run.json"].format(run=runs / "c") in refused("ckpt", *command, runs)
    assert [row["step"] for row in said("ckpt", "ls", runs / "a")] == [2, 4]  # before any of the others was looked at


def test_prune_refuses_where_the_best_is_unknown_and_says_how_to_go_on(runs):
    run = runs / "a"
    file = run / "checkpoints" / "best.json"
    damage(run, "checkpoints/best.json")
    assert f"remove {file}, then none is the best" in refused("ckpt", "prune", run, "--keep", 1)
    assert refused("ckpt", "prune", run, "--keep", 1, "--dry-run")
    file.unlink()
    assert [row["step"] for row in said("ckpt", "prune", run, "--keep", 1)["removed"]] == [2]


def test_checkpoints_that_are_lost_are_not_such_as_never_were(tmp_path):
    run = shell(tmp_path / "w" / "a")
    assert "no checkpoint yet" in call("ckpt", "ls", run).stdout
    assert "has no checkpoint yet" in refused("ckpt", "show", run)
    (run / "run.json").write_text(json.dumps({"state": "finished", "digest": "0", "saved": 16}))
    told = f"there is no valid checkpoint in {run}/checkpoints, but this run saved one of step 16 there"
    for where in (run, run.parent):
        result = call("ckpt", "ls", where)
        assert result.exit_code == 1 and told in " ".join(result.stdout.split()) and "yet" not in result.stdout
        [row] = said("ckpt", "ls", where)
        assert row["reason"].startswith(told) and (row["state"], row["step"]) == ("missing", None)
    for command in ("show", "verify"):
        assert told in refused("ckpt", command, run)
    for which in ("@best", "@16", "@ema"):
        assert told in refused("ckpt", "show", f"{run}{which}")
