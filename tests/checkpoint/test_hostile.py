"""Manifests, reports and folders that somebody made up: a CheckpointError, and nothing outside is opened.

The checksum of a manifest says that it is whole, not who wrote it: here it is always right.
"""

import copy
import json
import os
import shutil
import sys
import tracemalloc
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint import hand
from tests.checkpoint.make import parts_of, same, tensor
from tests.errors import raises
from tests.memory import start_tracing
from tilth.checkpoint import begin_save, commit_save, newest_valid, open_checkpoint, quarantine, read_best
from tilth.checkpoint.manifest import parse_manifest, parse_report
from tilth.checkpoint.storage import storage_of
from tilth.core.errors import CheckpointError
from tilth.core.layout import Layout, Mesh, RaggedShard, Replicate, Shard

MESH = Mesh(("fsdp", "tp"), (2, 2))
MOST = 32 << 20
"""Bytes that a manifest of some KiB may make a reader allocate."""
SHAPES = {"w": (6, 4), "b": (5,), "none": (0, 3), "one": (), "wide": (40, 2048)}


def whole():
    model = {name: tensor(shape, torch.float32, name) for name, shape in SHAPES.items()}
    return {"model": model, "optimizer": {"step": tensor((), torch.int64), "m": tensor((4, 4), torch.bfloat16)}}


def layouts():
    split = {"w": (Shard(0), Shard(1)), "b": (RaggedShard((2, 3)), Replicate()), "wide": (Replicate(), Shard(1))}
    made = {
        group: {name: Layout(MESH, split.get(name, (Replicate(),) * 2), tuple(t.shape)) for name, t in tensors.items()}
        for group, tensors in whole().items()
    }
    made["optimizer"]["m"] = Layout(MESH, (Shard(0), Replicate()), (4, 4))
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of a checkpoint, beside it what nobody may open."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "secret").write_bytes(b"x" * 4096)
    return hand.write(root / "run" / "step-000010", 10, whole(), layouts(), {"progress": {"step": 10}})


def body_of(path):
    body = json.loads((path / "manifest.json").read_text())
    del body["checksum"]
    return body


def sealed(body):
    text = json.dumps(body)[1:].encode()
    return b'{"checksum": "%s",\n' % xxhash.xxh3_64_hexdigest(text).encode() + text


# ---- any change ----

ODD = st.sampled_from([
    None, True, False, -1, 0, 1, 2, 3, 7, 64, 255, 4096, 1 << 20, 1 << 31, 1 << 32, 1 << 40, (1 << 53) - 1, 1 << 53,
    (1 << 53) + 1, 1 << 61, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, 10**400, -(1 << 63), 0.0, 0.5, -0.0, 1e308,
    "", "0", ".", "..", "../secret", "/etc/passwd", "a/b", "\0", "\ud800", "x" * 300, "x" * 100_000, "é", "w", "b",
    "float64", "bool", "0" * 16, "manifest.json", [], {}, [[]], [0], [0, 0], [1 << 40], [0] * 5000, ["x" * 50_000] * 3,
    [[0, 1], [2, 3]], {"mesh": {}}, {"mesh": {"names": ["dp"], "sizes": [1 << 50]}}, {"names": ["a"], "sizes": [0]},
    {"names": ["dp", "tp"], "sizes": ["a", 1 << 40]}, {"shard": 1 << 70}, {"shard": 0, "copies": 0}, {"ragged": [1]},
    {"ragged": [-1, 1 << 70]}, [0, 1 << 60], [[0, 1 << 50]],
])  # fmt: skip


def places(value, found, path=()):
    """The paths of all values in a JSON value."""
    found.append(path)
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        places(item, found, (*path, key))
    return found


def at(body, path):
    for key in path:
        body = body[key]
    return body


@st.composite
def changed(draw, body, under=()):
    """The body with up to three changes: a value is replaced, renamed, removed, doubled, or swapped with another."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        paths = [p for p in places(body, []) if p and (not under or p[0] in under)]
        if not paths:
            return body
        path = draw(st.sampled_from(paths))
        holder, key = at(body, path[:-1]), path[-1]
        how = draw(st.sampled_from(["odd", "odd", "odd", "near", "drop", "rename", "double", "swap"]))
        if how == "near" and type(holder[key]) is int:
            holder[key] += draw(st.sampled_from([-1, 1, 4, 1 << 32]))
        elif how == "drop":
            del holder[key]
        elif how == "rename" and isinstance(holder, dict):
            holder[str(draw(ODD))] = holder.pop(key)
        elif how == "double" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif how == "swap":
            other = draw(st.sampled_from(paths))
            if path[: len(other)] != other and other[: len(path)] != path:
                there = at(body, other[:-1])
                holder[key], there[other[-1]] = there[other[-1]], holder[key]
        else:
            holder[key] = copy.deepcopy(draw(ODD))
    return body


_opened: list[str] | None = None


def _hook(event, arguments):
    if event == "open" and _opened is not None and isinstance(arguments[0], str | bytes | os.PathLike):
        path, flags = Path(os.fsdecode(arguments[0])), arguments[2]
        real = path.parent.resolve() / path.name if flags & os.O_NOFOLLOW else path.resolve()  # a link is not opened
        _opened.append(str(real))


sys.addaudithook(_hook)


@contextmanager
def only_inside(folder):
    """No file outside of a folder may be opened meanwhile, whatever way it is named."""
    global _opened
    _opened = []
    try:
        yield
    finally:
        found, _opened = _opened, None
    inside = os.path.realpath(folder)
    strangers = [p for p in found if os.path.commonpath([inside, p]) != inside]
    assert not [p for p in strangers if not p.endswith((".py", ".pyc"))]


def read_all(path):
    """Every tensor that can be read, None for the others; CheckpointError is the only error."""
    checkpoint, found = open_checkpoint(path), {}
    for group in checkpoint.groups:
        for name in checkpoint.names(group):
            try:
                found[group, name] = checkpoint.read(group, name)
            except CheckpointError:
                found[group, name] = None
    try:
        checkpoint.verify()
    except CheckpointError:
        return found
    assert all(value is not None for value in found.values())
    return found


@settings(max_examples=5 * settings.default.max_examples)
@given(data=st.data())
def test_a_changed_manifest_is_read_or_refused(made, data):
    under = data.draw(st.sampled_from([(), ("groups",), ("files",), ("step", "saved", "layout", "files", "version")]))
    text = sealed(data.draw(changed(body_of(made), under)))
    before = (made / "manifest.json").read_bytes()
    start_tracing()
    try:
        with only_inside(made):
            (made / "manifest.json").write_bytes(text)
            found = read_all(made)
        if under and "groups" not in under:  # the tensors are the same, or there are none
            wanted = {(group, name): t for group, tensors in whole().items() for name, t in tensors.items()}
            assert found.keys() == wanted.keys()
            assert all(value is None or same(value, wanted[key]) for key, value in found.items())
    except CheckpointError as error:
        assert str(error).startswith(("checkpoint ", str(made)))
    finally:
        (made / "manifest.json").write_bytes(before)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST


def test_the_manifest_that_is_changed_can_be_read(made):
    """The property above is not that everything is refused."""
    with only_inside(made):
        found = read_all(made)
    for group, tensors in whole().items():
        assert all(same(found[group, name], value) for name, value in tensors.items())


@given(data=st.data())
def test_a_changed_manifest_in_a_store_is_read_or_refused(made, data):
    url = f"memory://{uuid.uuid4().hex}/step-000010"
    store = storage_of(url)
    for file in made.iterdir():
        store.put(file.name, file.read_bytes())
    store.put("manifest.json", sealed(data.draw(changed(body_of(made), ("files", "groups")))))
    try:
        read_all(url)
    except CheckpointError as error:
        assert str(error).startswith(("checkpoint ", url))
    finally:
        store.remove("")


@given(data=st.data())
def test_changed_reports_make_a_checkpoint_or_are_refused(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("reports")
    folder = begin_save(root, 3)
    parts = parts_of(folder, whole(), layouts())
    start_tracing()
    try:
        reports = [parse_report(json.dumps(part), "report") for part in data.draw(changed(parts))]
        read_all(commit_save(folder, reports, {}))
    except CheckpointError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        shutil.rmtree(root)
    assert peak < MOST


# ---- by name ----


def refused(made, tmp_path, change, key):
    """An open of a copy of the checkpoint whose manifest was changed."""
    path = Path(shutil.copytree(made, tmp_path / "step-000010"))
    body = body_of(path)
    change(body)
    (path / "manifest.json").write_bytes(sealed(body))
    with only_inside(path), raises(CheckpointError, key):
        open_checkpoint(path).verify()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", ".", "", "a/../../secret", "sub/file", "a\0b"])
def test_a_name_that_leads_out_of_the_folder_is_named(made, tmp_path, name):
    def change(body):
        body["files"] = {name if i == 0 else n: f for i, (n, f) in enumerate(body["files"].items())}

    refused(made, tmp_path, change, f"manifest.json.files.{name}.[key]")


@pytest.mark.parametrize("how", ["link", "hidden link", "pipe", "folder"])
def test_a_data_file_that_is_no_file_of_the_folder(made, tmp_path, how):
    path = Path(shutil.copytree(made, tmp_path / "step-000010"))
    file = path / "model.000.safetensors"
    file.rename(tmp_path / "elsewhere")
    if how == "folder":
        file.mkdir()
    elif how == "pipe":
        os.mkfifo(file)
    else:
        (path / "in").symlink_to(tmp_path)
        file.symlink_to(tmp_path / "elsewhere" if how == "link" else path / "in" / "elsewhere")
    with only_inside(path), raises(CheckpointError, "model.000.safetensors.type"):
        open_checkpoint(path)


@pytest.mark.parametrize("how", ["link", "pipe", "huge"])
def test_a_manifest_that_is_no_file_of_the_folder(made, tmp_path, how):
    path = Path(shutil.copytree(made, tmp_path / "step-000010"))
    file = path / "manifest.json"
    file.rename(tmp_path / "elsewhere")
    if how == "pipe":
        os.mkfifo(file)
    elif how == "link":
        file.symlink_to(tmp_path / "elsewhere")
    else:
        with open(file, "wb") as made_up:
            made_up.truncate(1 << 33)  # a hole: it takes no room on the disk
    with only_inside(path), raises(CheckpointError, "manifest.json"):
        open_checkpoint(path)


def test_a_file_behind_a_link_replaced_after_it_was_opened_is_not_read(made, tmp_path):
    path = Path(shutil.copytree(made, tmp_path / "step-000010"))
    checkpoint = open_checkpoint(path)
    file = path / "model.000.safetensors"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with only_inside(path), raises(CheckpointError, "model.000.safetensors"):
        checkpoint.read("model", "w")


def test_a_folder_behind_a_link_is_a_checkpoint(made, tmp_path):
    """The user's own arrangement: a disk that is large enough."""
    (tmp_path / "step-000010").symlink_to(made)
    assert same(open_checkpoint(tmp_path / "step-000010").read("model", "w"), whole()["model"]["w"])


def test_what_was_put_where_a_mark_is_written_is_not_written_through(made, tmp_path):
    path = Path(shutil.copytree(made, tmp_path / "run" / "step-000010"))
    (prey := tmp_path / "prey").write_text("precious")
    (path / "DAMAGED.tmp").symlink_to(prey)
    aside = quarantine(path, "torn")
    assert prey.read_text() == "precious" and (aside / "DAMAGED").read_text() == "torn\n"


@pytest.mark.parametrize("text", [
    '{"step": 1', "[]", '{"step": "3"}', '{"step": -1}', '{"step": true}', '{"step": 1.5}', "[" * 100_000,
    '{"step": 1}', '{"step": 1, "metric": 3, "value": 1.0}', '{"step": 1, "metric": "m", "value": "high"}',
    '{"step": ' + "9" * 5000 + "}", "\ud800".encode("utf-8", "surrogatepass"),
])  # fmt: skip
def test_a_mark_of_the_best_that_is_none(tmp_path, text):
    (tmp_path / "best.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CheckpointError) as caught:
        read_best(tmp_path)
    assert caught.value.key in ("best.json", "best.json.step", "best.json.metric")


def test_a_hostile_newest_checkpoint_is_put_aside_and_the_one_before_it_taken(made, tmp_path):
    good = hand.write(tmp_path / "step-000009", 9, whole(), layouts())
    path = Path(shutil.copytree(made, tmp_path / "step-000010"))
    body = body_of(path)
    for tensor_ in body["groups"]["model"].values():
        tensor_["shape"] = [1 << 52] * len(tensor_["shape"])
    (path / "manifest.json").write_bytes(sealed(body))
    told = []
    assert newest_valid(tmp_path, told.append).path == good and "step-000010" in told[0]


@pytest.mark.parametrize("shape", [[1 << 52], [1 << 26, 1 << 26], [1 << 52, 0, 1 << 52]])
def test_sizes_that_no_file_has_take_no_memory(made, shape):
    field = "files.g.safetensors.checksums.count"
    """Its numbers agree: 2^52 bytes in one file of one tensor, whose tiles alone would fill a memory."""
    body = body_of(made)
    numel = 1
    for n in shape:
        numel *= n
    one = {"shape": shape, "dtype": "int8", "offset": [0] * len(shape), "size": shape, "file": [0], "byte0": [0]}
    file = {"group": "g", "nbytes": numel + 64, "header_nbytes": 64, "header_checksum": 0, "checksums": "0" * 16}
    body |= {"files": {"g.safetensors": file}, "groups": {"g": {"t": one}}, "total_bytes": numel + 64}
    start_tracing()
    try:
        with raises(CheckpointError, f"manifest.json.{field}"):
            parse_manifest(sealed(body), "m.json")
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST


def test_many_names_of_one_long_column_take_no_memory(made):
    """A column stands once in the text; a thousand tensors may name it, if they have bytes for their boxes."""
    body, boxes = body_of(made), 20_000
    columns = {"offset": [*range(boxes)], "size": [1] * boxes, "file": [0] * boxes, "byte0": [*range(boxes)]}
    group = {"t": {"shape": [boxes], "dtype": "int8", **columns}}
    group |= {f"t{i}": {"shape": [boxes], "dtype": "int8", **dict.fromkeys(columns, "t")} for i in range(2000)}
    text = sealed(body | {"groups": {"g": group}})
    start_tracing()
    try:
        with raises(CheckpointError, "manifest.json.groups.g.t.boxes.count"):
            parse_manifest(text, "m.json")
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST
