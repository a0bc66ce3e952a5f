"""What is different: against counting element by element with numpy, whatever the dtype, in blocks of any size."""

import json
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.make import DTYPES, tensor
from tests.cli.kept import add, call, flip, groups, make_run, objects, refused, said, shell, upload, weights
from tests.examples import examples
from tests.memory import start_tracing
from tests.roles import small
from tilth.cli import ckpt
from tilth.models.hf import save_pretrained
from tilth.runs.tensors import SourceTensor, TensorSource, blocks, compare, different, distances


def source(model: dict[str, torch.Tensor], read=None) -> TensorSource:
    """A source of tensors in memory."""
    tensors = {
        name: SourceTensor(tuple(one.shape), one.dtype, read or (lambda box, one=one: one[box.slices]))
        for name, one in model.items()
    }
    return TensorSource("given", {"model": tensors})


# ---- blocks ----


@given(st.lists(st.integers(0, 9), max_size=4).map(tuple), st.integers(1, 40))
def test_blocks_tile_a_tensor_in_order(shape, most):
    whole = np.arange(math.prod(shape)).reshape(shape)
    found = list(blocks(shape, most))
    assert np.array_equal(np.concatenate([whole[box.slices].reshape(-1) for box in found]), whole.reshape(-1))
    assert all(box.numel <= most for box in found)
    assert len(found) <= max(1, 2 * math.prod(shape) // most + math.prod(shape[:-1]) + 1)


# ---- one tensor ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_every_dtype(dtype):
    """Arbitrary bits, NaNs too: what counts is whether the bytes are the same."""
    a = tensor((6, 5), dtype, "a")
    assert not different(a, a.clone(), None).any()
    b = tensor((6, 5), dtype, "b")
    size = dtype.itemsize
    raw = [t.contiguous().view(-1).view(torch.uint8).numpy().reshape(30, size) for t in (a, b)]
    wanted = (raw[0] != raw[1]).any(-1).reshape(6, 5)
    assert np.array_equal(different(a, b, None).numpy(), wanted)
    most, relative = distances(a, a.clone())
    assert (most, relative) == (0.0, 0.0)
    distances(a, b)  # of every dtype


numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=12), st.sampled_from([0.0, 1e-3, 0.5]))
def test_values_against_counting(pairs, tolerance):
    """No outcome but by the rule: equal, both NaN, or apart by at most the tolerance."""

    def same(x: float, y: float) -> bool:
        return x == y or (math.isnan(x) and math.isnan(y)) or abs(x - y) <= tolerance

    a, b = (torch.tensor(column, dtype=torch.float32) for column in zip(*pairs))
    wanted = [not same(float(x), float(y)) for x, y in zip(a, b)]
    assert different(a, b, tolerance).tolist() == wanted
    apart = [abs(x - y) for x, y in pairs if x != y and not (math.isnan(x) and math.isnan(y))]
    if all(map(math.isfinite, apart)):
        scale = [max(abs(x), abs(y)) for x, y in pairs if x != y and not (math.isnan(x) and math.isnan(y))]
        most, relative = distances(a, b)
        assert most == max(apart, default=0.0)
        assert relative == pytest.approx(max((d / s for d, s in zip(apart, scale)), default=0.0))


def test_minus_zero_has_other_bits_and_the_same_value():
    a, b = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    assert different(a, b, None).tolist() == [True, False] and not different(a, b, 0.0).any()


def one(a: torch.Tensor, b: torch.Tensor, tolerance: float | None = None):
    found = compare(source({"x": a}), source({"x": b}), tolerance)
    return found.tensors[0] if found.tensors else None


def test_numbers_of_a_difference():
    a = torch.zeros(4, 5)
    b = a.clone()
    a[2, 3], b[3, 1] = 2.0, -0.5
    found = one(a, b)
    assert (found.kind, found.count, found.share, found.first) == ("values", 2, 0.1, [2, 3])
    assert (found.max_abs, found.max_rel) == (2.0, 1.0) and found.a == found.b == "float32 [4, 5]"
    assert one(a, b, 1.0).count == 1 and one(a, b, 2.0) is None
    assert one(torch.tensor(1.0), torch.tensor(1.5)).first == []


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_the_size_of_blocks_changes_nothing(most, monkeypatch):
    a, b = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(5, 4, 3)
    b[:2] = a[:2]
    b[2, 0] = a[2, 0]
    whole = one(a, b)
    monkeypatch.setattr("tilth.runs.tensors.BLOCK", most)
    assert one(a, b) == whole and whole.first == [2, 1, 0] and whole.count == 33


def test_not_finite_is_said():
    found = one(torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0]))
    assert (found.count, found.max_abs, found.first) == (1, None, [1])
    assert one(torch.tensor([math.inf, math.nan]), torch.tensor([math.inf, math.nan]), 0.0) is None
    assert one(torch.tensor([math.inf]), torch.tensor([-math.inf]), 1e9).max_abs is None
    json.dumps(found.__dict__, allow_nan=False)


def test_other_dtypes_are_compared_by_value():
    a = torch.tensor([1.0, 0.1])
    found = one(a, a.bfloat16())
    assert (found.kind, found.count, found.first) == ("dtype", 1, [1]) and found.b == "bfloat16 [2]"
    assert found.max_abs == abs(float(a[1]) - float(a.bfloat16()[1]))
    assert one(a, a.bfloat16(), 0.01).count == 0 and one(a, a.bfloat16(), 0.01).kind == "dtype"


def test_what_is_within_the_tolerance_is_not_called_the_same():
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.25, 3.0])
    found = compare(source({"x": a, "y": a}), source({"x": b, "y": a + 1}), 0.5)
    assert [one.name for one in found.tensors] == ["y"] and found.within == 0.25
    assert ckpt._lines(found)[-1].endswith("1 are within the tolerance (at most 0.25 apart)")
    none = compare(source({"x": a}), source({"x": a + 1}), 0.5)
    assert ckpt._lines(none)[-1].endswith("0 are within the tolerance")
    assert compare(source({"x": torch.zeros(0)}), source({"x": torch.zeros(0)}), 0.5).within == 0.0
    assert compare(source({"x": torch.tensor(math.inf)}), source({"x": torch.tensor(0.0)}), math.inf).within is None


def test_the_same_values_in_another_dtype():
    a = torch.tensor([1.0, 0.5])
    text = ckpt._lines(compare(source({"x": a, "y": a}), source({"x": a.bfloat16(), "y": a}), None))
    assert any("1 tensors have another dtype and the same values, as x" in str(line) for line in text)
    assert text[-1].endswith("1 are the same, 1 but for their dtype")


def test_memory_is_bounded(monkeypatch):
    """A tensor of 2^20 elements in blocks of 2^12: no more than those are alive at once."""

    def read(box):
        assert box.numel <= 2**12
        return torch.full(box.size, float(huge.numel()))

    huge = torch.zeros(1).expand(2**10, 2**10)
    monkeypatch.setattr("tilth.runs.tensors.BLOCK", 2**12)
    start_tracing()
    assert compare(source({"x": huge}, read), source({"x": huge}, read), None).equal
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


# ---- checkpoints ----


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "one")


def test_the_same_in_another_layout(tmp_path):
    whole = groups(3)
    one = add(tmp_path / "one", 4, whole=whole)
    four = add(tmp_path / "four", 4, whole=whole, layouts=True)
    result = call("ckpt", "diff", one, four)
    assert result.exit_code == 0 and result.stdout.endswith("are the same: no difference\n")
    found = said("ckpt", "diff", one, four)
    assert found["equal"] and found["compared"] == sum(map(len, whole.values())) and not found["tensors"]
    assert found["groups"] == {group: len(some) for group, some in whole.items()}
    assert found["bytes"] == 2 * sum(t.numel() * 4 for some in whole.values() for t in some.values())


def test_two_steps(run):
    found = said("ckpt", "diff", f"{run}@2", f"{run}@4")
    a, b = groups(2), groups(4)
    wanted = [(group, name) for group in a for name in a[group] if not torch.equal(a[group][name], b[group][name])]
    assert [(one["group"], one["name"]) for one in found["tensors"]] == wanted and not found["equal"]
    for one in found["tensors"]:
        x, y = (t[one["group"]][one["name"]].double().numpy() for t in (a, b))
        assert one["count"] == (x != y).sum() and one["share"] == (x != y).mean()
        assert one["max_abs"] == np.abs(x - y).max() and one["first"] == np.argwhere(x != y)[0].tolist()
        with np.errstate(invalid="ignore"):
            assert one["max_rel"] == pytest.approx(np.nanmax(np.abs(x - y) / np.maximum(np.abs(x), np.abs(y))))
    assert found["objects"] == [
        {"key": "progress.step", "a": 2, "b": 4, "there": "both"},
        {"key": "order", "a": [2] * 300, "b": [4] * 300, "there": "both"},
    ]
    result = call("ckpt", "diff", f"{run}@2", f"{run}@4")
    assert result.exit_code == 1 and "progress.step" in result.stdout and "2 values beside them differ" in result.stdout
    assert call("ckpt", "diff", f"{run}@2", f"{run}@4", "--tolerance", 1e9).exit_code == 1  # the objects


def test_the_number_of_the_attempt_is_no_difference(tmp_path):
    """A run that was stopped and went on has the same state as one that was not."""
    whole, plain = {"model": weights(2)}, objects(2)
    first = add(tmp_path / "a", 2, whole=whole, said=plain | {"events": {"attempt": 1, "step": 2}})
    second = add(tmp_path / "b", 2, whole=whole, said=plain | {"events": {"attempt": 2, "step": 2}})
    assert said("ckpt", "diff", first, second)["equal"] and call("ckpt", "diff", first, second).exit_code == 0
    empty = add(tmp_path / "c", 2, whole=whole, said={})
    alone = add(tmp_path / "d", 2, whole=whole, said={"events": {"attempt": 1, "step": 2}})
    assert said("ckpt", "diff", empty, alone)["equal"]
    assert "events" in call("ckpt", "diff", "--help").stdout


def test_one_value_is_one(tmp_path):
    a = add(tmp_path / "a", 2, whole={"model": weights(2)}, said={"x": 1, "events": {"attempt": 1}})
    b = add(tmp_path / "b", 2, whole={"model": weights(2)}, said={"x": 2, "events": {"attempt": 2}})
    assert call("ckpt", "diff", a, b).stdout.endswith("; 1 value beside them differs\n")
    assert [change["key"] for change in said("ckpt", "diff", a, b)["objects"]] == ["x"]


def test_tensors_and_groups_that_only_one_has(tmp_path):
    whole = groups(3)
    less = {group: dict(tensors) for group, tensors in whole.items() if group != "critic"}
    name = list(whole["model"])[3]
    del less["model"][name]
    less["model"]["more"] = torch.zeros(2)
    shaped = next(iter(whole["ema"]))
    less["ema"][shaped] = torch.zeros(3)
    a, b = add(tmp_path / "a", 2, whole=whole), add(tmp_path / "b", 2, whole=less, said={"new": 1, "digest": "abc"})
    found = said("ckpt", "diff", a, b)
    kinds = {(one["group"], one["name"]): one["kind"] for one in found["tensors"]}
    assert kinds == {
        ("model", name): "only in a",
        ("model", "more"): "only in b",
        ("ema", shaped): "shape",
        **{("critic", n): "only in a" for n in whole["critic"]},
    }
    assert found["tensors"][0]["name"] == name  # in the order in which they were saved
    assert {one["key"]: one["there"] for one in found["objects"]} == {
        "new": "b", **dict.fromkeys(["progress.step", "progress.phase", "progress.finished", "order"], "a")
    }  # fmt: skip
    text = call("ckpt", "diff", a, b).stdout
    assert "only in a" in text and "float32 [3]" in text and "–" in text


def test_a_store_and_a_disk(run):
    url = upload(run / "checkpoints", "memory://diff/checkpoints")
    assert said("ckpt", "diff", f"{url}@4", f"{run}@4")["equal"]
    assert said("ckpt", "diff", url, f"{url}/step-000006")["equal"]


# ---- Hugging Face ----


@pytest.mark.parametrize("shard_bytes", [10**9, 8000])
def test_weights_of_a_directory(run, tmp_path, shard_bytes):
    save_pretrained(tmp_path / "out", small.config(), weights(4), shard_bytes=shard_bytes)
    found = said("ckpt", "diff", f"{run}@4", tmp_path / "out")
    assert found["equal"] and found["compared"] == len(weights(4))
    assert found["left_out"] == ["optimizer", "ema", "critic"]
    assert "not compared, since a Hugging Face" in call("ckpt", "diff", tmp_path / "out", f"{run}@4").stdout
    assert not said("ckpt", "diff", f"{run}@2", tmp_path / "out")["equal"]
    assert said("ckpt", "diff", tmp_path / "out", tmp_path / "out")["equal"]


def test_the_average_against_a_directory(run, tmp_path):
    save_pretrained(tmp_path / "out", small.config(), groups(6)["ema"], dtype=torch.bfloat16)
    found = said("ckpt", "diff", f"{run}@ema", tmp_path / "out", "--tolerance", 0.01)
    assert not found["equal"] and found["left_out"] == []
    assert {(one["kind"], one["count"]) for one in found["tensors"]} == {("dtype", 0)}
    wanted = max(float((t.bfloat16().float() - t).abs().max()) for t in groups(6)["ema"].values())
    assert found["tolerance"] == 0.01 and found["within"] == wanted > 0
    assert max(one["max_abs"] for one in found["tensors"]) == wanted
    text = call("ckpt", "diff", f"{run}@ema", tmp_path / "out", "--tolerance", 0.01).stdout
    apart = f"within the tolerance (at most {wanted:.3g} apart)"
    assert f"24 tensors have another dtype and values {apart}" in text and "float32 / bfloat16" in text
    assert f"24 are {apart}\n" in text and "the same" not in text and "elements" not in text


def test_more_than_a_screen(tmp_path):
    whole = {"model": {f"layer{i:02}": torch.full((2,), float(i)) for i in range(60)}}
    other = {"model": {name: tensor + 1 for name, tensor in whole["model"].items()}}
    a, b = add(tmp_path / "a", 2, whole=whole, said={}), add(tmp_path / "b", 2, whole=other, said={})
    text = call("ckpt", "diff", a, b).stdout
    assert "layer19" in text and "layer20" not in text and "and 40 more; --json has all" in text
    assert "model: 60 of 60 tensors differ, at most by 1\n" in text
    assert len(said("ckpt", "diff", a, b)["tensors"]) == 60


# ---- what cannot be ----


def test_damage_is_named(tmp_path):
    run = make_run(tmp_path / "run")
    name = flip(run / "checkpoints" / "step-000006", "optimizer")
    error = refused("ckpt", "diff", run, f"{run}@4")
    assert f"tensor optimizer/{name} is corrupt" in error and "tilth ckpt verify" in error


def test_what_is_not_there(run, tmp_path):
    assert "keeps no checkpoint of step 3" in refused("ckpt", "diff", run, f"{run}@3")
    assert "no model directory" in refused("ckpt", "diff", run, tmp_path / "nowhere")
    assert "has no checkpoint yet" in refused("ckpt", "diff", run, shell(tmp_path / "empty"))
    assert "--tolerance -1.0" in refused("ckpt", "diff", run, run, "--tolerance", -1)
    assert "--tolerance nan" in refused("ckpt", "diff", run, run, "--tolerance", "nan")
    add(tmp_path / "plain", 2, whole={"model": weights(2)}, said=objects(2))
    assert "has no group ema" in refused("ckpt", "diff", f"{tmp_path}/plain@ema", run)
