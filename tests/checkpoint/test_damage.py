"""Damage is named: every flipped bit, torn or missing file, foreign directory, and every tensor that does not fit."""

import json
import shutil

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint import hand
from tests.checkpoint.make import groups, same, save_step, shares, tensor
from tests.errors import raises
from tests.examples import examples
from tilth.checkpoint import latest, open_checkpoint, save
from tilth.core.errors import CheckpointError
from tilth.core.layout import Layout, Mesh, Shard

FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors"]


@pytest.fixture
def path(tmp_path):
    return save_step(tmp_path, 10)


def read_everything(path):
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    return checkpoint


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FILES), st.data())
def test_every_flipped_bit_is_seen(path, file, data):
    raw = (path / file).read_bytes()
    at, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(raw)
    changed[at] ^= 1 << bit
    (path / file).write_bytes(changed)
    try:
        with pytest.raises(CheckpointError) as caught:
            read_everything(path)
        assert caught.value.key.startswith(file.split(".")[0]) or file in str(caught.value)
    finally:
        (path / file).write_bytes(raw)


def flip(path, name, group="model", opened=None):
    piece = (opened or open_checkpoint(path)).entry(group, name).boxes[0]
    with open(path / piece.file, "r+b") as file:
        file.seek(piece.byte0 + 1)
        byte = file.read(1)[0]
        file.seek(piece.byte0 + 1)
        file.write(bytes([byte ^ 4]))


def test_a_corrupt_tensor_is_named_and_others_are_read(path):
    flip(path, "norm.weight")
    checkpoint = open_checkpoint(path)
    with raises(CheckpointError, "model/norm.weight.checksum") as caught:
        checkpoint.read("model", "norm.weight")
    assert "model.safetensors" in str(caught.value)
    with raises(CheckpointError, "model/norm.weight.checksum") as caught:
        checkpoint.verify()
    assert ";" not in str(caught.value)
    with raises(CheckpointError, "model/norm.weight.checksum"):
        checkpoint.restore("model", {name: torch.zeros_like(t) for name, t in groups()["model"].items()})
    assert same(checkpoint.read("model", "embed.weight"), groups("10")["model"]["embed.weight"])
    checkpoint.restore("optimizer", {name: torch.zeros_like(t) for name, t in groups()["optimizer"].items()})


def test_every_corrupt_tensor_is_named(path):
    flip(path, "norm.weight")
    flip(path, "m", "optimizer")
    with raises(CheckpointError, "model/norm.weight.checksum") as caught:
        open_checkpoint(path).verify()
    assert "optimizer/m" in str(caught.value)


def four_files(tmp_path, step=10, salt=""):
    """A model whose tensors four ranks hold in parts."""
    mesh = Mesh(("fsdp",), (4,))
    whole = {
        "model": {
            "w": tensor((8, 40), salt=salt),
            "v": tensor((64, 6), torch.bfloat16, salt),
            "b": tensor((4,), salt=salt),
        }
    }
    layouts = {name: Layout(mesh, (Shard(0),), tuple(t.shape)) for name, t in whole["model"].items()}
    return hand.write(tmp_path / f"step-{step:06d}", step, whole, {"model": layouts}), whole["model"], layouts


@pytest.mark.parametrize("name", ["w", "v", "b"])
@pytest.mark.parametrize("number", range(4))
def test_each_part_of_each_tensor_is_watched(tmp_path, name, number):
    path, whole, layouts = four_files(tmp_path)
    piece = open_checkpoint(path).entry("model", name).boxes[number]
    data = bytearray((path / piece.file).read_bytes())
    data[piece.byte0 + piece.nbytes - 1] ^= 128
    (path / piece.file).write_bytes(data)
    for attempt in (open_checkpoint(path).verify, lambda: open_checkpoint(path).read("model", name)):
        with raises(CheckpointError, f"model/{name}.checksum") as caught:
            attempt()
        assert str(caught.value).endswith(piece.file)
    for rank in range(4):
        into = shares(whole, layouts, rank)
        if rank == number:
            with raises(CheckpointError, f"model/{name}.checksum"):
                open_checkpoint(path).restore("model", into, layouts, rank)
        else:
            open_checkpoint(path).restore("model", into, layouts, rank)  # it needs none of the damaged part


def test_files_of_equal_size_in_each_others_place(tmp_path):
    path, whole, _ = four_files(tmp_path)
    first, second = (path / f"model.{i:03d}.safetensors" for i in (1, 2))
    assert first.stat().st_size == second.stat().st_size
    first.rename(path / "away")
    second.rename(first)
    (path / "away").rename(second)
    lost = "; ".join(f"tensor model/{n} is corrupt in file {f.name}" for f in (first, second) for n in ("b", "w", "v"))
    headers = "; ".join(f"file {f.name}: the header is corrupt" for f in (first, second))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).verify()
    assert str(caught.value) == f"checkpoint {path}: {headers}; {lost}"
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).restore("model", {name: torch.zeros_like(t) for name, t in whole.items()})
    assert str(caught.value) == f"checkpoint {path}: {lost}"


def test_a_file_of_another_step(tmp_path):
    path, whole, _ = four_files(tmp_path)
    other, *_ = four_files(tmp_path, 11, "later")
    shutil.copy(other / "model.003.safetensors", path / "model.003.safetensors")
    for attempt in (open_checkpoint(path).verify, lambda: open_checkpoint(path).read("model", "v")):
        with pytest.raises(CheckpointError) as caught:
            attempt()
        assert "tensor model/v is corrupt in file model.003.safetensors" in str(caught.value)
    for name, value in whole.items():
        assert same(open_checkpoint(other).read("model", name), tensor(tuple(value.shape), value.dtype, "later"))


def test_the_manifest_of_another_checkpoint(tmp_path):
    """Of the same shapes and the same files: only the bits are others."""
    path, *_ = four_files(tmp_path)
    other, *_ = four_files(tmp_path / "other", salt="other")
    shutil.copy(other / "manifest.json", path / "manifest.json")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).verify()
    assert "tensor model/w is corrupt in file model.000.safetensors" in str(caught.value)


def reseal(path, change):
    """Rewrite the manifest as somebody would who knows the format."""
    table = json.loads((path / "manifest.json").read_text())
    del table["checksum"]
    change(table)
    body = json.dumps(table)[1:].encode()
    (path / "manifest.json").write_bytes(b'{"checksum": "%s",\n' % xxhash.xxh3_64_hexdigest(body).encode() + body)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda f: f.update(checksums=f["checksums"][:-16]), "checksums.count"),
        (lambda f: f.update(checksums=f["checksums"] * 2), "checksums.count"),
        (lambda f: f.update(nbytes=f["nbytes"] + 1), "nbytes.sum"),
    ],
)
def test_a_table_that_does_not_fit_together(path, change, field):
    reseal(path, lambda table: change(table["files"]["model.safetensors"]))
    with raises(CheckpointError, f"manifest.json.files.model.safetensors.{field}"):
        open_checkpoint(path)


def test_checksums_that_were_changed(path):
    def change(table):
        file = table["files"]["optimizer.safetensors"]
        file["checksums"] = "0" * len(file["checksums"])

    reseal(path, change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).verify()
    assert "tensor optimizer/step is corrupt in file optimizer.safetensors" in str(caught.value)


def test_a_corrupt_header_is_named(path):
    with open(path / "optimizer.safetensors", "r+b") as file:
        file.seek(20)
        file.write(b"?")
    with raises(CheckpointError, "optimizer.safetensors.header"):
        open_checkpoint(path).verify()


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file(path, file):
    (path / file).unlink()
    with raises(CheckpointError, file if file == "manifest.json" else f"{file}.missing"):
        open_checkpoint(path)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_truncated_file(path, file, length):
    raw = (path / file).read_bytes()
    (path / file).write_bytes(raw[:length])
    with raises(CheckpointError, "manifest.json.syntax" if file == "manifest.json" else f"{file}.nbytes"):
        open_checkpoint(path)
    (path / file).write_bytes(raw + b"x")
    with raises(CheckpointError, "manifest.json.syntax" if file == "manifest.json" else f"{file}.nbytes"):
        open_checkpoint(path)


def test_both_data_files_are_named(path):
    (path / FILES[1]).unlink()
    (path / FILES[2]).write_bytes(b"")
    with raises(CheckpointError, "model.safetensors.missing") as caught:
        open_checkpoint(path)
    assert "optimizer.safetensors" in str(caught.value)


def test_a_file_that_goes_and_others_that_are_damaged_are_all_told(path):
    checkpoint = open_checkpoint(path)
    (path / FILES[1]).unlink()
    flip(path, "m", "optimizer", opened=checkpoint)
    with raises(CheckpointError, "model.safetensors.missing") as caught:
        checkpoint.verify()
    assert "tensor optimizer/m" in str(caught.value)


def test_a_file_that_goes_while_it_is_open(path):
    checkpoint = open_checkpoint(path)
    (path / FILES[1]).unlink()
    with raises(CheckpointError, "model.safetensors"):
        checkpoint.read("model", "norm.weight")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "other"}', "\xff\x00", "null", "3"])
def test_a_foreign_manifest(path, text):
    (path / "manifest.json").write_bytes(text.encode("latin-1"))
    with raises(CheckpointError, f"manifest.json.{'syntax' if text in ('', '{', chr(255) + chr(0)) else 'format'}"):
        open_checkpoint(path)


def test_a_foreign_directory(tmp_path):
    with raises(CheckpointError, "path"):
        open_checkpoint(tmp_path / "none")
    with raises(CheckpointError, "manifest.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "file").write_text("x")
    with raises(CheckpointError, "path"):
        open_checkpoint(tmp_path / "file")


def test_the_manifest_of_another_step(path):
    moved = path.rename(path.with_name("step-000011"))
    with raises(CheckpointError, "path.step"):
        open_checkpoint(moved)
    copied = shutil.copytree(moved, path.with_name("best"))
    assert open_checkpoint(copied).step == 10


def test_data_of_another_step(tmp_path, path):
    other = save_step(tmp_path, 11)
    shutil.copy(other / FILES[1], path / FILES[1])
    with raises(CheckpointError, "model/norm.weight.checksum") as caught:
        open_checkpoint(path).verify()
    assert "model/embed.weight" in str(caught.value)


def test_another_version(path):
    reseal(path, lambda table: table.update(version=1))
    with raises(CheckpointError, "manifest.json.version"):
        open_checkpoint(path)


def test_a_damaged_newest_checkpoint_is_not_passed_over(tmp_path, path):
    newest = save_step(tmp_path, 11)
    (newest / FILES[1]).unlink()
    assert latest(tmp_path) == newest
    with raises(CheckpointError, f"{FILES[1]}.missing") as caught:
        open_checkpoint(newest)
    assert "step-000011" in str(caught.value)


def targets(**changes):
    into = {name: torch.zeros_like(t) for name, t in groups()["model"].items()}
    into.update({k: v for k, v in changes.items() if v is not None})
    return into


@pytest.mark.parametrize(
    ("into", "key"),
    [
        (targets(new=torch.zeros(1)), "model/new.missing"),
        ({"embed.weight": torch.zeros(7, 4, dtype=torch.bfloat16)}, "model/norm.weight.extra"),
        (targets() | {"norm.weight": torch.zeros(6)}, "model/norm.weight.shape"),
        (
            targets() | {"norm.weight": torch.zeros(5, dtype=torch.float64)},
            "model/norm.weight.dtype",
        ),
        (
            {"a": torch.zeros(1), "norm.weight": torch.zeros(1)},
            "model/a.missing",
        ),
    ],
)
def test_restore_is_strict(path, into, key):
    with raises(CheckpointError, key) as caught:
        open_checkpoint(path).restore("model", into)
    assert "\n" not in str(caught.value) and str(caught.value).count(";") == (2 if "a" in into else 0)
    assert all(not t.any() for t in into.values())


def test_many_problems_stay_one_readable_line(path):
    into = {f"layer{i:03d}": torch.zeros(1) for i in range(100)}
    with raises(CheckpointError, "model/layer000.missing") as caught:
        open_checkpoint(path).restore("model", into)
    assert str(caught.value).endswith("; and 82 more") and "layer019" in str(caught.value)


def test_unknown_names(path):
    checkpoint = open_checkpoint(path)
    with raises(CheckpointError, "critic"):
        checkpoint.names("critic")
    with raises(CheckpointError, "model/x"):
        checkpoint.read("model", "x")
    with raises(CheckpointError, "x"):
        open_checkpoint(save(path.parent, 99, {}, {})).restore("x", {})
