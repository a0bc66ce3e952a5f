"""The newest valid checkpoint: damaged ones are put aside with their reasons. On disk and behind URLs."""

import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from tests.checkpoint import hand
from tests.checkpoint.make import same, tensor
from tests.errors import raises
from tilth.checkpoint.directory import complete, latest
from tilth.checkpoint.read import newest_valid, open_checkpoint
from tilth.checkpoint.storage import join
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Box


def contents(step):
    return {"model": {"w": tensor((40, 16), salt=str(step)), "b": tensor((3,), torch.bfloat16, str(step))}}


@pytest.fixture(params=["disk", "memory", "file"])
def root(request, tmp_path):
    """Three checkpoints, under a path or a URL."""
    for step in (1, 2, 3):
        hand.write(tmp_path / f"step-{step:06d}", step, contents(step), objects={"step": step})
    if request.param == "disk":
        return tmp_path
    if request.param == "file":
        return f"file://{tmp_path}"
    url = f"memory://{uuid.uuid4().hex}"
    files, place = fsspec.url_to_fs(url)
    files.put(str(tmp_path) + "/", place + "/", recursive=True)
    return url


def change(root, step, file="model.safetensors", at=-1):
    """Flip a bit; of what is behind a URL, too."""
    files, place = fsspec.url_to_fs(f"{root}/step-{step:06d}/{file}")
    data = bytearray(files.cat_file(place))
    data[at] ^= 1
    files.pipe_file(place, bytes(data))


def remove(root, step, file):
    files, place = fsspec.url_to_fs(f"{root}/step-{step:06d}/{file}")
    files.rm_file(place)


def taken(root):
    said = []
    checkpoint = newest_valid(root, said.append)
    for name, value in contents(checkpoint.step)["model"].items():
        assert same(checkpoint.read("model", name), value)
    assert checkpoint.objects == {"step": checkpoint.step}
    return checkpoint.step, said


def test_the_newest_if_nothing_is_wrong(root):
    assert taken(root) == (3, [])
    assert open_checkpoint(latest(root)).step == 3


def test_reading_behind_a_url_is_as_on_disk(root):
    checkpoint = open_checkpoint(join(root, "step-000002"))
    whole = contents(2)["model"]
    assert checkpoint.names("model") == list(whole) and checkpoint.step == 2
    assert same(checkpoint.read("model", "w", Box((3, 2), (9, 5))), whole["w"][3:12, 2:7])
    into = {name: torch.zeros_like(value) for name, value in whole.items()}
    checkpoint.restore("model", into)
    assert all(same(into[n], t) for n, t in whole.items())
    checkpoint.verify()
    assert checkpoint.bytes_read > 2 * sum(t.nbytes for t in whole.values())


def test_a_damaged_one_is_put_aside_and_told_with_file_and_tensor(root):
    change(root, 3)
    step, said = taken(root)
    assert step == 2 and len(said) == 1
    assert "step-000003: tensor model/b is corrupt in file model.safetensors; it is put aside" in said[0]
    assert ("step-000003.damaged" in said[0]) == isinstance(root, Path)
    assert len(complete(root)) == 2 and open_checkpoint(latest(root)).step == 2
    assert taken(root) == (2, [])  # it is not looked at again


def test_one_that_is_not_wanted_is_passed_over_and_stays_as_it_is(root):
    def check(checkpoint):
        if checkpoint.step == 3:
            raise CheckpointError("step 3 is another's")

    for _ in range(2):
        said = []
        assert newest_valid(root, said.append, check).step == 2
        assert said == ["step 3 is another's; it is passed over"]
    assert taken(root) == (3, [])


@pytest.mark.parametrize("what", ["model.safetensors", "manifest.json"])
def test_what_is_missing_or_no_manifest(root, what):
    if what == "manifest.json":
        change(root, 3, what, 200)
    else:
        remove(root, 3, what)
    step, said = taken(root)
    assert step == 2 and what in said[0]


def test_none_is_left(root):
    for step in (1, 2, 3):
        change(root, step)
    said = []
    with raises(CheckpointError, "root"):
        newest_valid(root, said.append)
    assert [f"step-{step:06d}" in line for step, line in zip((3, 2, 1), said)] == [True] * 3
    assert complete(root) == []


def test_there_never_was_one(tmp_path):
    with raises(CheckpointError, "root"):
        newest_valid(tmp_path / "none", print)


def test_a_disk_that_fails_puts_nothing_aside(tmp_path, monkeypatch):
    from tilth.checkpoint import storage

    hand.write(tmp_path / "step-000001", 1, contents(1))

    def fail(self, offset, into):
        raise OSError(5, "Input/output error", str(self.path))

    monkeypatch.setattr(storage._LocalRanges, "read_into", fail)
    with raises(StorageError, "model.safetensors"):
        newest_valid(tmp_path, print)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_client_that_is_not_there():
    with raises(StorageError, "root"):
        open_checkpoint("nosuch://bucket/step-000001")
