"""Runs that learn adapters: what engines sample from, resuming, readers, layouts, and PEFT as an independent reader."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.errors import raises
from tests.flows import tiny
from tests.flows.test_resume_exact import benchmark
from tilth.checkpoint import latest, open_checkpoint
from tilth.checkpoint.directory import HELD
from tilth.core.errors import ModelError, RecipeError, ReplicaMismatch, WeightMismatch
from tilth.engines.engine import Engine
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.models.hf import load_weights
from tilth.models.peft import CONFIG, TENSORS, load_adapter
from tilth.plan.lora import is_adapter
from tilth.roles import state
from tilth.roles.state import Learner
from tilth.runs.export import write_model
from tilth.runs.models import MergedTensors, load_beginning, load_model
from tilth.runs.readers import read_metrics
from tilth.runs.signals import Interrupted

pytestmark = pytest.mark.usefixtures("two_layers")
LORA = {"rank": 4, "alpha": 8.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run that the others begin with."""
    short = {"supervised": {"steps": 2}, "algorithm": {"steps": 1}}
    return tiny.run(tiny.recipe(tmp_path_factory.mktemp("base"), **short)).directory


def adapted(folder, base, *, name="lora", stop=0, **sections):
    """A run with adapters of the policy; stop: interrupted in that step."""

    def interrupt(record):
        if record["step"] == stop:
            os.kill(os.getpid(), signal.SIGINT)

    short = {"supervised": {"steps": 3}, "algorithm": {"steps": 3}}
    sections = {"model": {"path": str(base)}, "policy": {"lora": LORA}, **short, **sections}
    made = tiny.recipe(folder, **sections)
    try:
        return tiny.run(made, name=name, callbacks=[tiny.Recorder(interrupt)]).directory
    except Interrupted:
        assert stop
        return folder / f"{name}-001"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, base):
    return adapted(tmp_path_factory.mktemp("lora"), base)


@pytest.fixture
def again(tmp_path, stopped):
    """A copy of a run that was interrupted in its fourth step, to go on with."""
    shutil.copytree(stopped, tmp_path / stopped.name)
    return tmp_path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, base):
    return adapted(tmp_path_factory.mktemp("stopped"), base, stop=4)


def stored(run):
    """Everything that a model of a run is computed with, and its newest checkpoint."""
    checkpoint = open_checkpoint(latest(run / "checkpoints"))
    own = {name: checkpoint.read("model", name) for name in checkpoint.names("model")}
    return dict(load_model(checkpoint.objects["base"]["path"]).tensors) | own, checkpoint


def test_only_adapters_are_learned(base, whole):
    begun, (ended, checkpoint) = load_model(base).tensors, stored(whole)
    assert all(torch.equal(tensor, begun[name]) for name, tensor in ended.items() if not is_adapter(name))
    adapters = {name for name in ended if is_adapter(name)}
    assert set(checkpoint.names("model")) == adapters
    assert len(adapters) == 2 * 7 * 2 and all(ended[name].any() for name in adapters)
    assert {name.partition(".")[2] for name in checkpoint.names("optimizer")} == adapters


def test_the_base_is_not_pruned(base, whole):
    """Checkpoints of adapters do not have it, so the run that made it may not remove it."""
    path = open_checkpoint(latest(whole / "checkpoints")).objects["base"]["path"]
    assert (Path(path) / HELD).read_text() == f"{whole.resolve()}\n"
    assert str(latest(base / "checkpoints").resolve()) == path


def test_engines_sample_from_merged_weights(whole):
    """The trainer adds small products to those of the base, an engine has the sum: they differ by rounding."""
    found = [record["mismatch/max"] for record in read_metrics(whole) if "mismatch/max" in record]
    assert found and 0 < max(found) < 1e-4


@pytest.mark.slow
def test_parity_is_to_the_bit(tmp_path, base):
    run = adapted(tmp_path, base, train={"parity": True, "threads": 1})
    found = [record["mismatch/max"] for record in read_metrics(run) if "mismatch/max" in record]
    assert found and max(found) == 0


def synced(run, name):
    return [record[name] for record in read_metrics(run) if name in record]


def test_engines_that_take_adapters_get_only_a_and_b(tmp_path, base, whole, monkeypatch):
    """The base travels once; the engine computes as the trainer, up to rounding."""
    update, taken = Engine.update_weights, []

    def counted(self, weights, version, keep_kv=False):
        taken.append(0)

        def each():
            for name, tensor in weights:
                taken[-1] += tensor.nbytes
                yield name, tensor

        update(self, each(), version, keep_kv)

    monkeypatch.setattr(Engine, "update_weights", counted)
    run = adapted(tmp_path, base, rollout={"adapters": "adapter"})
    size = {name: tensor.nbytes for name, tensor in stored(run)[0].items()}
    small, large = (sum(n for name, n in size.items() if is_adapter(name) == kind) for kind in (True, False))
    assert taken[0] == small + large and set(taken[1:]) == {small} and len(taken) > 3
    assert set(synced(whole, "sync/bytes")) == {large} and set(synced(run, "sync/bytes")) == {small}
    assert 0 < max(synced(run, "mismatch/max")) < 1e-4
    np.testing.assert_allclose(synced(run, "loss"), synced(whole, "loss"), rtol=2e-3, atol=2e-4)


@pytest.mark.slow
def test_parity_with_adapters_in_the_engine_is_to_the_bit(tmp_path, base):
    """In parity mode both compute with merged weights, each with its own."""
    more = {"rollout": {"adapters": "adapter"}, "train": {"parity": True, "threads": 1}}
    run = adapted(tmp_path, base, **more)
    assert max(synced(run, "mismatch/max")) == 0


def test_a_base_that_changes_in_the_engine_is_seen(tmp_path, base, monkeypatch):
    """It is not sent again, but its checksums are compared at every weight sync."""
    update, versions = Engine.update_weights, []

    def damaged(self, weights, version, keep_kv=False):
        update(self, weights, version, keep_kv)
        versions.append(version)
        if len(versions) == 2:
            dict(self.named_parameters())["model.layers.1.mlp.up_proj.weight"].view(-1)[3] += 1

    monkeypatch.setattr(Engine, "update_weights", damaged)
    with raises(WeightMismatch, "model.layers.1.mlp.up_proj.weight"):
        adapted(tmp_path, base, rollout={"adapters": "adapter"})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"tp": 2}, {"fsdp": 2}, {"pp": 2}, {"dp": 2}])
def test_layouts_send_adapters_alike(tmp_path, base, whole, layout):
    cluster = {"backend": "local", "workers": 2}
    more = {"rollout": {"adapters": "adapter"}, "policy": {"lora": LORA, "layout": layout}, "cluster": cluster}
    run = adapted(tmp_path, base, **more)
    assert 0 <= max(synced(run, "mismatch/max")) < 1e-4
    np.testing.assert_allclose(synced(run, "loss")[:6], synced(whole, "loss")[:6], rtol=2e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.dist
def test_a_relay_brings_engines_a_and_b_alone(tmp_path, base, whole):
    """Where they generate beside the policy; each version is compared with what they hold."""
    cluster = {"backend": "local", "pools": {"train": 1, "rollout": 1}}
    rollout = {"adapters": "adapter", "staleness": 1, "pool": "rollout"}
    run = adapted(tmp_path, base, rollout=rollout, cluster=cluster)
    small = sum(t.nbytes for name, t in stored(run)[0].items() if is_adapter(name))
    assert set(synced(run, "sync/bytes")) == {small} and max(synced(run, "staleness/max")) <= 1
    assert max(synced(run, "time/pull")) > 0


@pytest.mark.slow
def test_an_interrupted_run_goes_on_bit_for_bit(again, base, whole):
    assert benchmark().differences(adapted(again, base), whole) == []


def test_readers_see_merged_weights(base, whole):
    found, begun = load_model(whole).tensors, load_model(base).tensors
    assert isinstance(found, MergedTensors) and set(found) == set(begun)
    name, ended = "model.layers.1.mlp.down_proj.weight", stored(whole)[0]
    a, b = (ended[name.replace("weight", f"lora.{half}")] for half in "AB")
    torch.testing.assert_close(found[name], begun[name] + 2.0 * b @ a)
    assert torch.equal(found.part(name, (slice(2, 9), slice(5, 6))), found[name][2:9, 5:6])
    again = tiny.recipe(base.parent, model={"path": str(whole)})
    assert torch.equal(load_beginning(again).tensors[name], found[name])


# ---- the base, to which checkpoints refer ----


def test_a_base_that_is_gone_or_another_one_is_named(tmp_path, base):
    """By readers, which go on as soon as it is back."""
    own = tmp_path / "base"
    write_model(str(base), own)
    run = adapted(tmp_path / "runs", own, supervised={"steps": 1}, algorithm={"steps": 0})
    wanted = dict(load_model(run).tensors)
    own.rename(tmp_path / "elsewhere")
    with raises(ModelError, "base.path"):
        load_model(run)
    shutil.copytree(tmp_path / "elsewhere", own)
    weights = load_file(own / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, own / "model.safetensors", {"format": "pt"})
    with raises(ModelError, "base.weights"):
        load_model(run)
    shutil.rmtree(own)
    (tmp_path / "elsewhere").rename(own)
    found = load_model(run).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.slow
def test_checkpoints_that_hold_the_base_too_are_read_and_resumed(tmp_path, base, whole, monkeypatch):
    """Those of earlier versions."""
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "saved", Learner.groups)
        run = adapted(tmp_path, base, stop=5)
    checkpoint = open_checkpoint(latest(run / "checkpoints"))
    assert len(checkpoint.names("model")) == len(stored(whole)[0])
    assert set(load_model(run).tensors) == set(load_model(base).tensors)
    found = stored(adapted(tmp_path, base))[0]
    assert all(torch.equal(found[name], tensor) for name, tensor in stored(whole)[0].items())


def test_a_base_that_changes_in_memory_is_not_gone_on_with(again, base, monkeypatch):
    read = state.read_state

    def damaged(path, groups, sharded, *whole):
        found = read(path, groups, sharded, *whole)
        sharded.parameters["model.layers.1.mlp.up_proj.weight"].data.view(-1)[3] += 1
        return found

    monkeypatch.setattr(state, "read_state", damaged)
    with raises(ReplicaMismatch, "base"):
        adapted(again, base)


@pytest.mark.slow  # rows of tests/parallel/test_training.py have adapters
@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"fsdp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2}])
def test_layouts_learn_alike(tmp_path, base, whole, layout):
    cluster = {"backend": "local", "workers": 2}
    layouts = {"policy": {"lora": LORA, "layout": layout}, "cluster": cluster}
    found, wanted = read_metrics(adapted(tmp_path, base, **layouts)), read_metrics(whole)
    for key in ("loss", "grad_norm"):
        ours = [record[key] for record in found if key in record][:6]
        np.testing.assert_allclose(ours, [record[key] for record in wanted if key in record][:6], rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("flow", ["ppo", pytest.param("reward_model", marks=pytest.mark.slow)])
def test_value_models_learn_adapters_too(tmp_path, base, flow):
    if flow == "ppo":
        more = {
            "flow": "ppo",
            "algorithm": {"steps": 1, "advantage": "gae"},
            "critic": {"lora": {"rank": 2}, "steps": 1},
        }
        run = adapted(tmp_path, base, **more)
        names = open_checkpoint(latest(run / "checkpoints")).names("critic")
        assert sum(map(is_adapter, names)) == 28 and "score.weight" in names
        assert not any(map(is_adapter, load_model(run, "critic").tensors))
        return
    made = {"flow": flow, "model": {"path": str(base)}, "policy": {"lora": LORA}}
    run = tiny.run(tiny.recipe(tmp_path, **made), name=flow, reward=None).directory
    names = open_checkpoint(latest(run / "checkpoints")).names("reward_model")
    assert any(map(is_adapter, names)) and set(names) == {n for n in names if is_adapter(n) or n.startswith("score.")}
    found = load_model(run, "reward_model").tensors
    assert not any(map(is_adapter, found)) and "score.weight" in found and "lm_head.weight" not in found


# ---- PEFT ----


@pytest.fixture(scope="module")
def exported(tmp_path_factory, whole):
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    write_model(str(whole), folder, adapter=True)
    return folder


@pytest.mark.slow  # peft and transformers take longer to import than all other tests here
def test_peft_loads_it_and_has_the_logits(tmp_path, base, whole, exported):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers")
    write_model(str(base), tmp_path / "base")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager").double()
    other = peft.PeftModel.from_pretrained(plain, exported).double()
    loaded = load_model(whole)
    model = Decoder(loaded.config, torch.float64).double()
    load_weights(model, loaded.tensors)
    ids = torch.arange(3, 11)
    ours = model.logits(model(ids, PackedContext([8])))
    torch.testing.assert_close(ours, other(ids[None]).logits[0], rtol=1e-5, atol=1e-6)
    with other.disable_adapter():
        assert not torch.allclose(ours, other(ids[None]).logits[0], rtol=1e-4)


def test_a_run_begins_with_an_adapter(tmp_path, base, whole, exported):
    """Learned further from its own values, or merged."""
    ended, section = stored(whole)[0], {"path": str(base), "adapter": str(exported)}
    further = load_beginning(tiny.recipe(tmp_path, model=section, policy={"lora": LORA})).tensors
    assert all(torch.equal(further[name], ended[name]) for name in ended)
    merged = load_beginning(tiny.recipe(tmp_path, model=section)).tensors
    assert all(torch.equal(merged[name], load_model(whole).tensors[name]) for name in merged)
    run = adapted(tmp_path, base, model=section, algorithm={"steps": 0}, supervised={"steps": 1, "lr": 1e-9})
    begun = stored(run)[0]
    assert all(torch.allclose(begun[name], ended[name], atol=1e-6) for name in ended)


@pytest.mark.parametrize(
    "lora, key", [({"rank": 2}, "rank"), ({"alpha": 1.0}, "alpha"), ({"targets": ["q_proj"]}, "targets")]
)
def test_another_kind_of_adapter_is_refused(tmp_path, base, exported, lora, key):
    section = {"path": str(base), "adapter": str(exported)}
    with raises(RecipeError, f"policy.lora.{key}"):
        load_beginning(tiny.recipe(tmp_path, model=section, policy={"lora": {**LORA, **lora}}))


def changed(exported, folder, config=None, tensors=None):
    folder.mkdir()
    found = json.loads((exported / CONFIG).read_text()) | (config or {})
    (folder / CONFIG).write_text(json.dumps(found))
    own = load_file(exported / TENSORS)
    save_file(own if tensors is None else tensors(own), folder / TENSORS)
    return folder


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
OWN = "model.layers.0.self_attn.q_proj.lora.A"


@pytest.mark.parametrize(
    "config, tensors, key",
    [
        ({"use_dora": True}, None, f"{CONFIG}.use_dora"),
        ({"peft_type": "IA3"}, None, f"{CONFIG}.peft_type"),
        ({"modules_to_save": ["lm_head"]}, None, f"{CONFIG}.modules_to_save"),
        ({"r": "four"}, None, "changed.adapter"),
        ({}, lambda own: {k: v for k, v in own.items() if k != Q}, f"{OWN}.missing"),
        ({}, lambda own: own | {Q: torch.zeros(4, 99)}, f"{OWN}.shape"),
        (
            {},
            lambda own: own | {Q.replace("layers.0", "layers.7"): own[Q].clone()},
            f"{OWN.replace('.0.', '.7.')}.extra",
        ),
        ({}, lambda own: own | {"lm_head.weight": torch.zeros(2)}, "lm_head.weight"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, base, exported, config, tensors, key):
    folder = changed(exported, tmp_path / "changed", config, tensors)
    with raises(ModelError, key):
        load_adapter(folder, load_model(base).config)


def test_folders_without_an_adapter(tmp_path, base, whole):
    with raises(ModelError, CONFIG):
        load_adapter(tmp_path, load_model(base).config)
    with raises(ModelError, "--adapter"):
        write_model(str(base), tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()


# ---- recipes ----


@pytest.mark.parametrize(
    "sections, key",
    [
        ({"model": {}}, "policy.lora.rank"),
        ({"model": {}, "critic": {"lora": LORA}, "policy": {}}, "critic.lora.rank"),
        ({"train": {"ema": 0.9}}, "train.ema"),
        ({"policy": {"lora": {**LORA, "dropout": 0.1}}, "supervised": {"steps": 0}}, "policy.lora.dropout"),
        ({"policy": {"lora": {**LORA, "dropout": 0.1}}, "train": {"parity": True}}, "policy.lora.dropout"),
        ({"policy": {"lora": {**LORA, "dropout": 0.1}}, "train": {"compile": True}}, "policy.lora.dropout"),
        ({"policy": {"lora": {**LORA, "dropout": 0.1}, "layout": {"tp": 2, "sp": True}}}, "policy.lora.dropout"),
        ({"policy": {}, "rollout": {"adapters": "adapter"}}, "rollout.adapters"),
        ({"train": {"router_correction": 0.1}}, "train.router_correction"),
        ({"model": {"path": "x", "optimizer": True}}, "model.optimizer"),
        ({"model": {"adapter": "x"}, "policy": {}}, "model.adapter"),
        ({"policy": {"lora": {"rank": 4, "alpha": 0.0}}}, "policy.lora.alpha"),
        ({"policy": {"lora": {"rank": 4, "targets": []}}}, "policy.lora.targets"),
    ],
)
def test_what_contradicts_adapters_is_refused(tmp_path, sections, key):
    with raises(RecipeError, key):
        tiny.recipe(tmp_path, **{"model": {"path": "x"}, "policy": {"lora": LORA}, **sections})
