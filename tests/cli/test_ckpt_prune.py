"""Which checkpoints go: the old ones as the run's recipe says or as asked, never the last good one, never the best."""

import shutil
from pathlib import Path

import pytest

from tests.cli.kept import add, bare, call, make_run, names, objects, own, place_of, refused, said, upload
from tilth.checkpoint import mark_best
from tilth.checkpoint.directory import complete, quarantine
from tilth.runs.files import Lock


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "runs" / "one", best=2)


def test_prune_keeps_as_the_run_does(run):
    add(run / "checkpoints", 8)
    dry = said("ckpt", "prune", run, "--dry-run")
    assert names(run) == ["best.json", *(f"step-00000{i}" for i in (2, 4, 6, 8))]
    done = said("ckpt", "prune", run)
    assert dry == {**done, "dry_run": True} and not done["dry_run"]
    assert [row["step"] for row in done["removed"]] == [4]  # 2 is the best
    assert done["bytes"] == done["removed"][0]["bytes"] > 0
    assert names(run) == ["best.json", *(f"step-00000{i}" for i in (2, 6, 8))]
    assert done["kept"] == [str(path) for path in complete(run / "checkpoints")]


def test_prune_as_asked(run):
    assert [row["step"] for row in said("ckpt", "prune", run, "--keep", 1, "--every", 4, "--dry-run")["removed"]] == []
    assert [row["step"] for row in said("ckpt", "prune", run, "--keep", 1)["removed"]] == [4]
    text = call("ckpt", "prune", run, "--keep", 1).stdout
    assert text == "0 of 2, 0 bytes freed; 2 stay\n"


def test_every_nth_as_the_recipe_says(run):
    (run / "recipe.toml").write_text("[run]\nkeep = 1\nkeep_every = 4\n")
    mark_best(run / "checkpoints", None)
    assert [row["step"] for row in said("ckpt", "prune", run)["removed"]] == [2]


def test_prune_says_what_goes(run):
    text = call("ckpt", "prune", run, "--keep", 1, "--dry-run").stdout.splitlines()
    assert text[0].startswith(f"would remove {run}/checkpoints/step-000004 (complete, ") and "would be freed" in text[1]


def test_what_is_damaged_goes_when_asked(run):
    root = run / "checkpoints"
    quarantine(root / "step-000006", "bits")
    (root / "step-000008.tmp-abc").mkdir()
    assert said("ckpt", "prune", run)["removed"] == []
    assert [(r["step"], r["state"]) for r in said("ckpt", "prune", run, "--damaged")["removed"]] == [
        (6, "damaged"),
        (8, "unfinished"),
    ]
    assert names(run) == ["best.json", "step-000002", "step-000004"]


def test_a_step_without_a_manifest_goes_as_damaged(run):
    add(run / "checkpoints", 8)
    for step in (4, 8):
        bare(run, step)
    assert [(r["step"], r["state"]) for r in said("ckpt", "prune", run, "--keep", 1)["removed"]] == [(4, "damaged")]
    assert [(r["step"], r["state"]) for r in said("ckpt", "prune", run, "--damaged")["removed"]] == [(8, "damaged")]
    assert names(run) == ["best.json", "step-000002", "step-000006"]


def cut_off(root: Path) -> None:
    """A save that is under way, or was: who looks cannot know."""
    (root / "step-000008.tmp-abc").mkdir()
    (root / "step-000008.tmp-abc" / "model.safetensors").write_bytes(b"1234")


def test_what_may_be_a_save_under_way_stays_where_no_run_is_known(run, tmp_path, url):
    """No lock would tell of the process that is at it; what is damaged goes."""
    away = tmp_path / "elsewhere"
    cut_off(run / "checkpoints")
    quarantine(place_of(run, 2), "bits")
    shutil.copytree(run / "checkpoints", away)
    upload(run / "checkpoints", url)
    for where in (away, url):
        assert "unfinished and left: 1;" in call("ckpt", "prune", where, "--keep", 9, "--damaged", "--dry-run").stdout
        found = said("ckpt", "prune", where, "--keep", 9, "--damaged")["removed"]
        assert [(row["step"], row["state"]) for row in found] == [(2, "damaged")]
        assert [row["state"] for row in said("ckpt", "ls", where)] == ["complete", "complete", "unfinished"]
    assert "left" not in call("ckpt", "prune", run, "--damaged").stdout
    assert names(run) == ["best.json", "step-000004", "step-000006"]


@pytest.mark.parametrize("how", ["inside", "deeper", "link", "relative"])
def test_the_lock_of_the_run_that_a_folder_lies_in_is_taken(how, run, tmp_path, monkeypatch):
    own = run / "checkpoints"
    if how == "deeper":
        (run / "kept").mkdir()
        where = own.rename(run / "kept" / "here")
    elif how == "link":
        own.rename(tmp_path / "disk")
        own.symlink_to(tmp_path / "disk")
        where = own
    else:
        monkeypatch.chdir(run if how == "relative" else tmp_path)
        where = Path("checkpoints") if how == "relative" else own
    cut_off(where)
    lock = Lock(run / "run.lock")
    try:
        assert "is being written by process" in refused("ckpt", "prune", where, "--damaged")
    finally:
        lock.release()
    assert [row["step"] for row in said("ckpt", "prune", where, "--damaged")["removed"]] == [8]


def test_one_that_opens_stays(run):
    """The newest is torn: by its name it would be the one that is kept."""
    root = run / "checkpoints"
    mark_best(root, None)
    (root / "step-000006" / "model.safetensors").unlink()
    assert [row["step"] for row in said("ckpt", "prune", run, "--keep", 1)["removed"]] == [2]
    assert [row["step"] for row in said("ckpt", "prune", run, "--keep", 1, "--damaged")["removed"]] == [6]
    assert names(run) == ["step-000004"]
    (root / "step-000004" / "model.000.safetensors").unlink()
    assert said("ckpt", "prune", run, "--damaged")["removed"] == [] and names(run) == ["step-000004"]


def cut_short(run: Path, step: int) -> None:
    file = next(iter(sorted(place_of(run, step).glob("model*"))))
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("keep, torn, goes, damaged", [(1, (6,), [], [6]), (2, (6, 8), [], [6, 8]), (1, (4,), [4], [])])
def test_what_is_damaged_is_not_counted(keep, torn, goes, damaged, run):
    """Also where the best would be left; as what has no manifest it goes when it is older than all that are kept."""
    add(run / "checkpoints", 8) if 8 in torn else None
    for step in torn:
        cut_short(run, step)
    asked = ["ckpt", "prune", run, "--keep", keep]
    assert [row["step"] for row in said(*asked)["removed"]] == goes
    assert [row["step"] for row in said(*asked, "--damaged")["removed"]] == damaged
    assert place_of(run, 2).exists() and not any(row["state"] == "damaged" for row in said("ckpt", "ls", run))


def test_where_all_are_damaged_nothing_goes_unasked(run):
    for step in (2, 4, 6):
        cut_short(run, step)
    assert said("ckpt", "prune", run, "--keep", 1)["removed"] == []
    assert [row["step"] for row in said("ckpt", "prune", run, "--keep", 1, "--damaged")["removed"]] == [2, 4]


def test_what_another_run_made_is_not_the_one_that_stays(run):
    mark_best(run / "checkpoints", None)
    own(run, "abc")
    add(run / "checkpoints", 8, said=objects(8) | {"digest": "other"})
    assert [row["step"] for row in said("ckpt", "prune", run, "--keep", 1)["removed"]] == [2, 4]
    assert [row["step"] for row in said("ckpt", "ls", run)] == [6, 8]


def test_what_another_run_made_is_not_counted_either(run):
    """The best is this run's own and stays, so it is not that none would."""
    own(run, "abc")
    add(run / "checkpoints", 8, said=objects(8) | {"digest": "other"})
    assert [row["step"] for row in said("ckpt", "prune", run, "--keep", 1)["removed"]] == [4]
    assert [row["step"] for row in said("ckpt", "ls", run)] == [2, 6, 8]


def test_prune_of_a_run_that_is_being_written(run):
    lock = Lock(run / "run.lock")
    try:
        assert "is being written by process" in refused("ckpt", "prune", run, "--keep", 1)
        assert "is being written by process" in refused("ckpt", "prune", run / "checkpoints", "--keep", 1)
        assert said("ckpt", "prune", run, "--keep", 1, "--dry-run")["removed"]  # only looks
    finally:
        lock.release()
    assert len(names(run)) == 4
    assert [row["step"] for row in said("ckpt", "prune", run, "--keep", 1)["removed"]] == [4]


def test_prune_of_a_folder_wants_a_number(run, tmp_path, url):
    shutil.copytree(run / "checkpoints", tmp_path / "elsewhere")
    assert "--keep N" in refused("ckpt", "prune", tmp_path / "elsewhere")
    assert "is one checkpoint" in refused("ckpt", "prune", run / "checkpoints" / "step-000002")
    assert [r["step"] for r in said("ckpt", "prune", tmp_path / "elsewhere", "--keep", 1)["removed"]] == [4]
    upload(run / "checkpoints", url)
    assert [r["step"] for r in said("ckpt", "prune", url, "--keep", 1)["removed"]] == [4]
    assert [row["step"] for row in said("ckpt", "ls", url)] == [2, 6]


def test_prune_of_several_runs(run, tmp_path):
    make_run(tmp_path / "runs" / "two", (8, 10, 12))
    found = said("ckpt", "prune", tmp_path / "runs", "--keep", 1)
    assert [(Path(row["run"]).name, row["step"]) for row in found["removed"]] == [("one", 4), ("two", 8), ("two", 10)]
