"""Whose checkpoints are in a place outside the run's folder: of a copied run, a moved one, one from before the mark."""

import json
import shutil
import uuid
from pathlib import Path

import fsspec
import pytest

from tests.checkpoint import hand
from tests.errors import raises
from tests.flows import tiny
from tests.runs.test_identity import begun, given
from tilth.core.errors import CheckpointError, ModelError, StorageError
from tilth.runs.directory import RunDir
from tilth.runs.model_refs import MARK, original, root_of, take
from tilth.runs.readers import checkpoints_of


@pytest.fixture(params=["disk", "file", "memory"])
def store(request, tmp_path):
    """What ``run.checkpoints`` says."""
    if request.param == "memory":
        url = f"memory://{uuid.uuid4().hex}"
        yield url
        fsspec.filesystem("memory").rm(url, recursive=True)
    else:
        yield f"{'file://' if request.param == 'file' else ''}{tmp_path / 'store'}"


@pytest.fixture
def run(store, tmp_path):
    return begun(tmp_path / "runs", run={"checkpoints": store})


def go_on(path: Path, store: str) -> RunDir:
    """The run in this folder goes on."""
    recipe = tiny.recipe(path.parent, run={"checkpoints": store, "name": path.name})
    return RunDir.create(recipe, "demo", given("data1"))


def marked(place: str) -> str:
    files, root = fsspec.url_to_fs(place)
    return str(json.loads(files.cat_file(f"{root}/{MARK}"))["folder"])


def test_a_place_is_that_of_the_run_that_it_was_made_for(run, store):
    place = checkpoints_of(run)
    assert marked(place) == str(run.resolve()) and original(run, place) is None
    with go_on(run, store) as again:
        assert again.checkpoints == place


def test_a_copy_is_refused_with_what_to_do_and_changes_nothing(run, store):
    copy = run.with_name("copy")
    shutil.copytree(run, copy)
    place, before = checkpoints_of(run), (copy / "run.json").read_bytes()
    with raises(CheckpointError, "owner.json.folder"):
        go_on(copy, store)
    assert (copy / "run.json").read_bytes() == before and marked(place) == str(run.resolve())
    with raises(ModelError, "owner.json.folder"):
        root_of(copy)
    assert str(root_of(run)) == place
    with go_on(run, store) as again:  # nothing is the matter with the one that was copied
        assert again.checkpoints == place


def test_a_copy_with_a_copy_of_the_place_goes_on(tmp_path):
    store = str(tmp_path / "store")
    run = begun(tmp_path / "runs", run={"checkpoints": store})
    copy, place = run.with_name("copy"), f"{store}/another"
    shutil.copytree(run, copy)
    shutil.copytree(checkpoints_of(run), place)
    (copy / "run.json").write_text(json.dumps(json.loads((copy / "run.json").read_text()) | {"checkpoints": place}))
    with go_on(copy, store) as again:
        assert again.checkpoints == place and marked(place) == str(copy.resolve())
    assert marked(checkpoints_of(run)) == str(run.resolve())


def test_a_run_that_was_moved_takes_its_place_along(run, store):
    copy, moved, place = run.with_name("copy"), run.with_name("moved"), checkpoints_of(run)
    shutil.copytree(run, copy)
    run.rename(moved)
    assert str(root_of(moved)) == place
    with go_on(moved, store) as again:
        assert again.checkpoints == place and marked(place) == str(moved.resolve())
    with raises(CheckpointError, "owner.json.folder"):
        go_on(copy, store)


def test_another_run_where_the_owner_was_is_no_owner(run, store):
    moved, place = run.with_name("moved"), checkpoints_of(run)
    run.rename(moved)
    begun(run.parent, inputs="data2", run={"checkpoints": store, "name": run.name})
    with go_on(moved, store) as again:
        assert again.checkpoints == place and marked(place) == str(moved.resolve())
    moved.joinpath("run.json").write_text("{}")
    assert original(run, place) is None  # what is there is no run


def test_the_same_folder_by_another_name_is_no_copy(run, store, tmp_path):
    (tmp_path / "link").symlink_to(run.parent)
    with go_on(tmp_path / "link" / run.name, store):
        assert marked(checkpoints_of(run)) == str(run.resolve())


@pytest.mark.parametrize("said", [None, b"no json", b"[]"])
def test_a_place_from_before_the_mark_goes_on_and_gets_it(run, store, said):
    files, root = fsspec.url_to_fs(checkpoints_of(run))
    files.rm_file(f"{root}/{MARK}")
    files.pipe_file(f"{root}/{MARK if said else 'best.json'}", said or b"{}")
    assert original(run, checkpoints_of(run)) is None
    with go_on(run, store) as again:
        assert marked(again.checkpoints) == str(run.resolve())


def test_a_disk_that_is_not_mounted_is_not_written_to(tmp_path):
    store = tmp_path / "store"
    run = begun(tmp_path / "runs", run={"checkpoints": str(store)})
    shutil.rmtree(store)
    with go_on(run, str(store)):
        assert not store.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with raises(StorageError, "owner.json"):
        take(tmp_path, str(tmp_path / "file" / "place"), fresh=True)


# ---- where they are is not forgotten ----


@pytest.mark.parametrize("before", [True, False])
def test_one_that_was_made_just_before_a_kill_keeps_the_place(tmp_path, before):
    section = {"run": {"checkpoints": str(tmp_path / "first")}} if before else {}
    path = begun(tmp_path / "runs", **section)  # "saved" is not in run.json
    place = Path(checkpoints_of(path))
    hand.write(place / "step-000002", 2, {"model": {}}, objects={})
    for elsewhere in (str(tmp_path / "second"), "", f"file://{tmp_path}/third"):
        recipe = tiny.recipe(tmp_path / "runs", run={"checkpoints": elsewhere})
        with RunDir.create(recipe, "demo", given("data1")) as run:
            assert run.path == path and run.checkpoints == str(place)


def test_a_store_that_does_not_answer_where_some_may_be(tmp_path, monkeypatch):
    from tilth.runs import model_refs

    def away(place):
        raise OSError(5, "gone", str(place))

    begun(tmp_path / "runs", run={"checkpoints": str(tmp_path / "first")})
    monkeypatch.setattr(model_refs, "latest", away)
    with raises(StorageError, "checkpoints"):
        RunDir.create(tiny.recipe(tmp_path / "runs"), "demo", given("data1"))


def test_a_store_that_does_not_answer_is_one_line_of_who_only_looks(tmp_path, monkeypatch):
    run = begun(tmp_path / "runs", run={"checkpoints": str(tmp_path / "store")})

    def fails(self, path):
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr("tilth.checkpoint.storage.Local.read", fails)
    with raises(StorageError, Path(checkpoints_of(run)).name):
        root_of(run)
