"""What is saved is read back bit for bit, whole, in boxes, by us and by the libraries that others use."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from xxhash import xxh3_64_intdigest

from tests.checkpoint import hand
from tests.checkpoint.hand import raw
from tests.checkpoint.make import DTYPES, groups, same, save_step, tensor
from tests.errors import raises
from tests.examples import examples
from tilth.checkpoint import latest, open_checkpoint, prune, save
from tilth.checkpoint.saver import Saver, begin_save
from tilth.checkpoint.snapshot import Group
from tilth.core.errors import CheckpointError
from tilth.core.layout import Box, Layout, Mesh

quick = settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5,), (3, 4), (2, 3, 5)])
def test_every_dtype_and_shape(tmp_path, dtype, shape):
    saved = tensor(shape, dtype)
    checkpoint = open_checkpoint(save(tmp_path, 1, {"g": {"x": saved, "other": torch.ones(3, dtype=torch.int8)}}, {}))
    assert same(checkpoint.read("g", "x"), saved)
    target = torch.zeros(shape, dtype=dtype)
    checkpoint.restore("g", {"x": target, "other": torch.zeros(3, dtype=torch.int8)})
    assert same(target, saved)
    checkpoint.verify()


@quick
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12),
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)),
        max_size=6,
    )
)
def test_any_group(tmp_path, contents):
    saved = {name: tensor(tuple(shape), dtype, name) for name, (shape, dtype) in contents.items()}
    checkpoint = open_checkpoint(save(tmp_path, 1, {"g": saved}, {}))
    assert checkpoint.names("g") == list(saved)
    assert all(same(checkpoint.read("g", name), value) for name, value in saved.items())
    checkpoint.verify()


def test_several_groups_and_objects(tmp_path):
    objects = {"step": 3, "nested": {"a": [1, 2.5, "ä", None, True]}, "nan": math.nan, "big": 2**70, "": {}}
    path = save(tmp_path, 3, groups(), objects)
    assert path == tmp_path / "step-000003"
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "model.safetensors", "optimizer.safetensors"]
    checkpoint = open_checkpoint(path)
    assert checkpoint.step == 3 and checkpoint.groups == ["model", "optimizer"]
    assert math.isnan(checkpoint.objects.pop("nan")) and math.isnan(objects.pop("nan"))
    assert checkpoint.objects == objects
    for group, tensors in groups().items():
        assert all(same(checkpoint.read(group, name), value) for name, value in tensors.items())


def test_the_manifest_says_where_every_byte_is(tmp_path):
    path = save(tmp_path, 7, groups(), {}, Mesh(("dp",), (1,)))
    table = json.loads((path / "manifest.json").read_text())
    assert table["version"] == 2 and table["step"] == 7
    assert table["layout"] == {"mesh": {"names": ["dp"], "sizes": [1]}}
    assert table["total_bytes"] == sum(p.stat().st_size for p in path.glob("*.safetensors"))
    files, seen = list(table["files"].items()), Counter()
    for group, tensors in groups().items():
        for name, value in tensors.items():
            entry = table["groups"][group][name]
            assert entry["shape"] == list(value.shape) and f"torch.{entry['dtype']}" == str(value.dtype)
            assert entry["offset"] == [0] * value.ndim and entry["size"] == list(value.shape)
            (number,), (start,) = entry["file"], entry["byte0"]
            file, of = files[number]
            start += of["header_nbytes"]
            data = raw(value)
            assert (path / file).read_bytes()[start : start + len(data)] == data
            assert of["group"] == group and f"{xxh3_64_intdigest(data):016x}" in of["checksums"]
            seen[file] += len(data)
    for file, of in files:
        header = (path / file).read_bytes()[: of["header_nbytes"]]
        assert of["nbytes"] == len(header) + seen[file] and of["header_checksum"] == xxh3_64_intdigest(header)


def test_what_is_saved_is_what_is_written_by_hand(tmp_path):
    """Another implementation of the format, from the plan on, makes the same files."""
    whole = {
        "g": {"a": tensor((300, 512)), "b": tensor((7,), torch.bfloat16), "c": tensor((3, 5, 64, 128)), "s": tensor(())}
    }
    path = save(tmp_path / "saved", 5, whole, {"a": 1})
    other = hand.write(tmp_path / "hand" / path.name, 5, whole, objects={"a": 1})
    tables = [json.loads((p / "manifest.json").read_text()) for p in (path, other)]
    for table in tables:
        del table["saved"], table["checksum"]
    assert tables[0] == tables[1]
    assert (path / "g.safetensors").read_bytes() == (other / "g.safetensors").read_bytes()


def test_the_default_layout_is_one_process(tmp_path):
    mesh = open_checkpoint(save_step(tmp_path, 1)).manifest.layout["mesh"]
    assert Mesh.from_json(mesh) == Mesh(("world",), (1,))


def test_safetensors_reads_the_files(tmp_path):
    saved = {str(dtype): tensor((3, 5), dtype) for dtype in DTYPES}
    path = save(tmp_path, 1, {"model": saved}, {}) / "model.safetensors"
    loaded = load_file(path)
    assert loaded.keys() == saved.keys()
    assert all(same(loaded[name], value) for name, value in saved.items())
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert torch.equal(opened.get_slice("torch.int16")[1:2], saved["torch.int16"][1:2])


def test_transformers_reads_a_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    path = save(tmp_path, 1, {"model": model.state_dict()}, {})
    config.save_pretrained(path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert all(same(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


def test_views_parameters_and_shared_tensors(tmp_path):
    base = tensor((6, 4))
    parameter = torch.nn.Parameter(base.clone())
    saved = {"transposed": base.t(), "slice": base[1::2, ::3], "parameter": parameter, "again": parameter}
    checkpoint = open_checkpoint(save(tmp_path, 1, {"g": saved}, {}))
    assert all(same(checkpoint.read("g", name), value.detach()) for name, value in saved.items())


def test_restore_into_views_and_parameters(tmp_path):
    saved = {"a": tensor((4, 6)), "b": tensor((5,))}
    checkpoint = open_checkpoint(save(tmp_path, 1, {"g": saved}, {}))
    parameter = torch.nn.Parameter(torch.zeros(5))
    before = torch.zeros(6, 4)
    checkpoint.restore("g", {"a": before.t(), "b": parameter})
    assert same(before.t(), saved["a"]) and same(parameter.detach(), saved["b"])
    assert parameter.requires_grad and parameter.is_leaf


def test_what_is_read_is_a_copy(tmp_path):
    path = save_step(tmp_path, 1)
    raw = (path / "model.safetensors").read_bytes()
    checkpoint = open_checkpoint(path)
    checkpoint.read("model", "norm.weight").zero_()
    checkpoint.read("model", "norm.weight", Box((1,), (2,))).zero_()
    assert (path / "model.safetensors").read_bytes() == raw
    assert same(checkpoint.read("model", "norm.weight"), groups("1")["model"]["norm.weight"])


@quick
@given(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(DTYPES), st.data())
def test_a_box_is_the_slice_of_the_whole(tmp_path, shape, dtype, data):
    saved = tensor(tuple(shape), dtype)
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    box = Box(offset, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset)))
    checkpoint = open_checkpoint(save(tmp_path, 1, {"g": {"x": saved}}, {}))
    assert same(checkpoint.read("g", "x", box), saved[box.slices])


@pytest.mark.parametrize("box", [Box((0,), (1,)), Box((0, 3), (1, 2)), Box((-1, 0), (1, 1)), Box((4, 0), (4, 4))])
def test_a_box_outside_of_the_tensor(tmp_path, box):
    checkpoint = open_checkpoint(save(tmp_path, 1, {"g": {"x": tensor((4, 4))}}, {}))
    with raises(CheckpointError, "box"):
        checkpoint.read("g", "x", box)


def test_latest_and_prune(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "none") is None and prune(tmp_path / "none", 1) == []
    paths = [save_step(tmp_path, step) for step in (5, 100, 20, 1_000_000, 999_999)]
    assert latest(tmp_path) == tmp_path / "step-1000000" == paths[3]
    assert prune(tmp_path, 2) == [tmp_path / f"step-{s:06d}" for s in (5, 20, 100)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1000000", "step-999999"]
    assert prune(tmp_path, 0) == [tmp_path / "step-999999"]
    assert latest(str(tmp_path)) == paths[3]


def test_foreign_files_under_the_root_are_left_alone(tmp_path):
    (tmp_path / "step-000900").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-12").mkdir()
    path = save_step(tmp_path, 3)
    assert latest(tmp_path) == path
    prune(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-000003", "step-000900", "step-12"]


def test_a_step_saved_again_is_replaced(tmp_path):
    save(tmp_path, 4, groups("old"), {"attempt": 1})
    path = save(tmp_path, 4, groups("new"), {"attempt": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"]
    checkpoint = open_checkpoint(path)
    assert checkpoint.objects == {"attempt": 2}
    assert same(checkpoint.read("model", "norm.weight"), groups("new")["model"]["norm.weight"])


def deep(levels: int):
    """So many mappings in one another."""
    found = {}
    for _ in range(levels - 1):
        found = {"a": found}
    return found


def test_objects_as_deep_as_they_may_be(tmp_path):
    assert open_checkpoint(save(tmp_path, 1, {}, deep(200))).objects == deep(200)


@pytest.mark.parametrize(
    ("objects", "key"),
    [
        ({"a": {1: 2}}, "objects.a.1"),
        ({"a": [0, {"b": {2, 3}}]}, "objects.a[1].b"),
        ({"a": np.float32(1)}, "objects.a"),
        ({"a": torch.ones(1)}, "objects.a"),
        ([1], "objects"),
        ({"a": deep(3000)}, "objects.depth"),
        ({"a": deep(200)}, "objects.depth"),
    ],
)
def test_objects_that_json_would_change(tmp_path, objects, key):
    with raises(CheckpointError, key):
        save(tmp_path / "root", 1, {}, objects)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("saved", "key"),
    [
        ({"../g": {}}, "group"),
        ({"g": {"x": torch.ones(2, dtype=torch.complex128)}}, "g/x.dtype"),
        ({"g": {"x": torch.eye(2).to_sparse()}}, "g/x.dtype"),
        ({"g": {"x": torch.empty(2, device="meta")}}, "g/x.dtype"),
        ({"g": {"x": [1]}}, "g/x.type"),
        ({"g": {"x": None}}, "g/x.type"),
        ({"g": {"x": torch.nested.nested_tensor([torch.ones(2)])}}, "g/x.nested"),
        ({"g": {"x\ud800": torch.ones(2)}}, "g/'x\\ud800'.name"),
        ({"g": {1: torch.ones(2)}}, "g/1.name"),
        ({"g": [torch.ones(2)]}, "groups.g"),
        ([torch.ones(2)], "groups"),
        ({1: {}}, "group"),
    ],
)
def test_what_cannot_be_stored(tmp_path, saved, key):
    with raises(CheckpointError, key):
        save(tmp_path / "root", 1, saved, {})
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, True])
def test_what_is_no_step(tmp_path, step):
    with raises(CheckpointError, "step"):
        save(tmp_path / "root", step, {"g": {}}, {})
    assert not (tmp_path / "root").exists()


def test_what_is_no_tensor_is_refused_on_every_rank(tmp_path):
    folder, group = begin_save(tmp_path, 1), Group({"x": [1]}, {"x": Layout.single((1,))})
    with raises(CheckpointError, "g/x.type"):
        Saver().start(folder, {"g": group}, 0)
    assert [p.name for p in folder.rglob("*")] == [".reports"]


def test_nothing_is_pickled(tmp_path):
    for file in save_step(tmp_path, 1).iterdir():
        assert file.suffix in (".json", ".safetensors")
