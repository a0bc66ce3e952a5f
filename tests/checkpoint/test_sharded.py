"""Many ranks write one checkpoint, and any layout is read into any other, bit for bit; every byte is written once."""

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.checkpoint.cases import layouts, meshes
from tests.checkpoint.hand import tile_sums
from tests.checkpoint.make import DTYPES, ranks_of, same, save_sharded, shares, tensor
from tests.errors import raises
from tilth.checkpoint import Group, Saver, begin_save, commit_save, open_checkpoint, save, state_layouts
from tilth.checkpoint.snapshot import views
from tilth.core.errors import CheckpointError
from tilth.core.layout import Box, Layout, Mesh, Replicate, Shard

quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def groups_in_two_layouts(draw):
    """Tensors, and two layouts of each of them: over one mesh to be saved, over another one to be loaded."""
    first, second = draw(meshes()), draw(meshes())
    tensors, saved, loaded = {}, {}, {}
    for i in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        tensors[f"t{i}"] = tensor(shape, draw(st.sampled_from(DTYPES)), str(i))
        saved[f"t{i}"], loaded[f"t{i}"] = draw(layouts(first, shape)), draw(layouts(second, shape))
    return tensors, saved, loaded


@quick
@given(groups_in_two_layouts(), st.booleans())
def test_saved_in_one_layout_loaded_in_another(tmp_path_factory, case, flat):
    tensors, saved, loaded = case
    path = save_sharded(tmp_path_factory.mktemp("root"), 3, {"g": tensors}, {"g": saved})
    checkpoint = open_checkpoint(path)
    checkpoint.verify()
    assert checkpoint.names("g") == list(tensors)
    for name, value in tensors.items():
        assert same(checkpoint.read("g", name), value)
        _check_entry(checkpoint.entry("g", name), value, path)
    into = {name: torch.empty_like(value) for name, value in tensors.items()}
    checkpoint.restore("g", into)
    assert all(same(into[name], value) for name, value in tensors.items())
    for rank in ranks_of(loaded):
        expected = shares(tensors, loaded, rank, flat)
        into = {name: torch.zeros_like(value) for name, value in expected.items()}
        checkpoint.restore("g", into, loaded, rank)
        assert all(same(into[name], value) for name, value in expected.items())
    stored = sum(value.numel() * value.itemsize for value in tensors.values())
    assert sum(box.nbytes for name in tensors for box in checkpoint.entry("g", name).boxes) == stored


def _check_entry(entry, value, path):
    """Every element in exactly one box, whose bytes are where the manifest says."""
    count = np.zeros(value.shape, int)
    for piece in entry.boxes:
        count[piece.box.slices] += 1
        raw = (path / piece.file).read_bytes()[piece.byte0 : piece.byte0 + piece.nbytes]
        assert raw == bytes(value[piece.box.slices].contiguous().view(-1).view(torch.uint8).tolist())
        assert piece.checksums == tile_sums(value[piece.box.slices])
    assert (count == 1).all()


def test_files_are_safetensors_of_boxes(tmp_path):
    mesh = Mesh(("fsdp",), (2,))
    whole = {"w": tensor((5, 3)), "b": tensor((4,), torch.bfloat16)}
    layouts = {"w": Layout(mesh, (Shard(0),), (5, 3)), "b": Layout(mesh, (Replicate(),), (4,))}
    path = save_sharded(tmp_path, 1, {"model": whole}, {"model": layouts}, {"seed": 4}, mesh)
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json", "model.rank0.safetensors", "model.rank1.safetensors",
    ]  # fmt: skip
    first, second = (load_file(path / f"model.rank{i}.safetensors") for i in range(2))
    assert set(first) == {"w[0:3,0:3]"} and set(second) == {"w[3:5,0:3]", "b"}  # rank 1 had less to write
    assert same(first["w[0:3,0:3]"], whole["w"][:3]) and same(second["b"], whole["b"])
    opened = open_checkpoint(path)
    assert opened.objects == {"seed": 4} and opened.step == 1
    assert Mesh.from_json(opened.manifest.layout["mesh"]) == mesh
    assert opened.manifest.total_bytes == sum(p.stat().st_size for p in path.glob("*.safetensors"))


def test_one_rank_that_is_alone_writes_what_save_writes(tmp_path):
    whole = {"w": tensor((5, 3)), "b": tensor((4,), torch.bfloat16), "s": tensor(())}
    path = save(tmp_path / "one", 1, {"model": whole}, {"a": 1})
    layouts = {name: Layout.single(value.shape) for name, value in whole.items()}
    folder = begin_save(tmp_path / "part", 1)
    entry = Saver().write(folder, {"model": Group(whole, layouts)}, 0)[0].model_dump(mode="json")
    assert (folder / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["files"] == {"model.safetensors": entry["entry"]} and entry["file"] == "model.safetensors"
    assert list(manifest["groups"]["model"]) == [name for name, _, _ in entry["table"]["specs"]] == list(whole)


def test_a_rank_with_nothing_to_write_makes_no_file(tmp_path):
    layouts = {"s": Layout(Mesh(("dp",), (3,)), (Replicate(),), ())}
    path = save_sharded(tmp_path, 1, {"g": {"s": tensor(())}}, {"g": layouts})
    assert sorted(p.name for p in path.iterdir()) == ["g.rank0.safetensors", "manifest.json"]


def test_groups_over_different_meshes(tmp_path):
    """A policy on ranks 0 to 3, a critic on 4 and 5, a tensor that only two ranks of the policy have."""
    policy, critic, stage = Mesh(("tp",), (4,)), Mesh(("dp",), (2,), (4, 5)), Mesh(("tp",), (2,), (2, 3))
    whole = {"policy": {"w": tensor((6, 4)), "head": tensor((7,))}, "critic": {"v": tensor((3,)), "u": tensor((9,))}}
    layouts = {
        "policy": {"w": Layout(policy, (Shard(1),), (6, 4)), "head": Layout(stage, (Shard(0),), (7,))},
        "critic": {n: Layout(critic, (Replicate(),), tuple(v.shape)) for n, v in whole["critic"].items()},
    }
    checkpoint = open_checkpoint(save_sharded(tmp_path, 1, whole, layouts))
    for group, tensors in whole.items():
        assert checkpoint.names(group) == list(tensors)
        for rank in ranks_of(layouts[group]):
            expected = shares(tensors, layouts[group], rank)
            into = {n: torch.zeros_like(v) for n, v in expected.items()}
            checkpoint.restore(group, into, layouts[group], rank)
            assert all(same(into[n], v) for n, v in expected.items())
    written = {p.name for p in checkpoint.path.glob("critic.*")}
    assert written == {"critic.rank4.safetensors", "critic.rank5.safetensors"}


# ---- the parts ----


@pytest.mark.parametrize(
    ("local", "boxes", "fits"),
    [
        (torch.zeros(2, 3), [Box((4, 0), (2, 3))], True),
        (torch.zeros(6), [Box((4, 0), (2, 3))], True),
        (torch.zeros(3, 2), [Box((4, 0), (2, 3))], False),
        (torch.zeros(5), [Box((1, 2), (1, 1)), Box((2, 0), (1, 4))], True),
        (torch.zeros(10)[::2], [Box((1, 2), (1, 1)), Box((2, 0), (2, 2))], True),
        (torch.zeros(6), [Box((1, 2), (1, 1)), Box((2, 0), (1, 4))], False),
        (torch.zeros(0, 4), [], True),
        (torch.zeros(0), [], True),
        (torch.zeros(1), [], False),
        (torch.zeros(()), [Box((), ())], True),
        (torch.zeros(1), [Box((), ())], True),
        (torch.zeros(3, 0), [Box((0, 0), (6, 0))], True),
    ],
)
def test_a_local_tensor_is_the_storage_of_its_boxes(local, boxes, fits):
    found = views(local, boxes)
    assert (found is not None) == fits
    for box, view in zip(boxes, found or ()):
        assert tuple(view.shape) == box.size
        view.fill_(1)
    if fits:
        assert int(local.sum()) == sum(b.numel for b in boxes)  # views, not copies


# ---- the optimizer ----


def test_layouts_of_optimizer_state():
    mesh = Mesh(("dp", "fsdp"), (2, 2))
    layouts = {"a.weight": Layout(mesh, (Replicate(), Shard(0)), (5, 3)), "b": Layout(mesh, (Replicate(),) * 2, (2,))}
    names = ["exp_avg.a.weight", "exp_avg_sq.a.weight", "step.a.weight", "momentum_buffer.b"]
    found = state_layouts(layouts, dict.fromkeys(names))
    assert list(found) == names
    assert found["exp_avg.a.weight"] == found["exp_avg_sq.a.weight"] == layouts["a.weight"]
    assert found["momentum_buffer.b"] == layouts["b"]
    assert found["step.a.weight"] == Layout(mesh, (Replicate(), Replicate()), ())
    with raises(CheckpointError, "step.c.layout"):
        state_layouts(layouts, ["step.c"])
    with raises(CheckpointError, "exp_inf.b.kind"):
        state_layouts(layouts, ["exp_inf.b"])
    with raises(CheckpointError, "b.layout"):
        state_layouts(layouts, ["b"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_real_optimizer_goes_from_one_process_to_four_and_back(tmp_path, name):
    from tests.parallel.layouts import CONFIG
    from tilth.config.schema import OptimizerConfig
    from tilth.training.optim import Optimizers

    parameters = {
        "model.layers.0.mlp.up_proj.weight": torch.nn.Parameter(tensor((6, 4)).nan_to_num(0, 1, 1).clamp(-1, 1)),
        "model.norm.weight": torch.nn.Parameter(torch.ones(5)),
    }
    optimizers = Optimizers(parameters, OptimizerConfig(name=name), CONFIG.table)
    for p in parameters.values():
        p.grad = torch.full_like(p, 0.5)
    optimizers.step(0.01)
    state = optimizers.state_tensors()
    mesh = Mesh(("fsdp", "tp"), (2, 2))
    layouts = {
        "model.layers.0.mlp.up_proj.weight": Layout(mesh, (Shard(0), Shard(1)), (6, 4), (1, 0)),
        "model.norm.weight": Layout(mesh, (Shard(0), Replicate()), (5,)),
    }
    one = open_checkpoint(save(tmp_path / "one", 1, {"optimizer": state}, {}))
    states = state_layouts(layouts, state)
    folder = begin_save(tmp_path / "four", 1)
    parts = []
    for rank in range(4):
        mine = {n: torch.zeros_like(t) for n, t in shares(state, states, rank).items()}
        one.restore("optimizer", mine, states, rank)
        parts += Saver().write(folder, {"optimizer": Group(mine, states)}, rank, str(rank))
    four = open_checkpoint(commit_save(folder, parts, {}, mesh))
    again = {n: torch.zeros_like(t) for n, t in state.items()}
    four.restore("optimizer", again)
    assert all(same(again[n], t) for n, t in state.items()) and any(float(t.abs().sum()) for t in state.values())
