"""Factories of roles: each makes its role on the device of its own worker."""

from types import SimpleNamespace

import pytest
import torch

from tests.errors import raises
from tilth.cluster.backends.inline import InlineStore
from tilth.cluster.worker.context import Context
from tilth.config.load import from_dict
from tilth.core.errors import RecipeError
from tilth.core.layout import Mesh
from tilth.launch import workers
from tilth.models import parity
from tilth.models.config import DecoderConfig

CONFIG = DecoderConfig(vocab_size=8, hidden_size=8, intermediate_size=16, num_layers=1, num_heads=2)
MESH = Mesh(("dp",), (1,), (1,))


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that seems to have two; the devices that this process made its current one."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    return current


def context(local_rank: int) -> Context:
    return Context("weight_sync", MESH, 1, 1, InlineStore(), local_rank)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["auto", "cuda"])
@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_worker_works_on_its_own_gpu_whatever_torch_takes_by_default(two_gpus, name, local_rank):
    own = torch.device("cuda", local_rank)
    recipe = from_dict({"train": {"device": name}})
    assert workers.prepare(context(local_rank), recipe) == own
    assert two_gpus == [own]
    assert workers.weight_sync(context(local_rank), recipe, CONFIG, MESH, {"rollout": MESH}).device == own


def test_a_worker_without_a_gpu_of_its_own_is_refused(two_gpus):
    with raises(RecipeError, "cluster.workers"):
        workers.prepare(context(2), from_dict({"train": {"device": "cuda"}}))


def test_without_a_gpu_no_device_is_set(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: pytest.fail("there is none"))
    assert workers.prepare(context(1), from_dict({"train": {"device": "cpu"}})) == torch.device("cpu")


def test_activations_are_not_offloaded_from_a_cpu():
    recipe = from_dict({"train": {"device": "auto", "offload": 0.5}})
    with raises(RecipeError, "train.offload.device"):
        workers.shard_model(Context("policy", MESH, 1, 1, InlineStore(), 0), recipe, CONFIG)


@pytest.mark.parametrize("role", ["policy", "critic", "reference", "reward_model"])
def test_every_role_refuses_parity_that_this_machine_cannot_keep(monkeypatch, role):
    """Before weights are loaded: the model of ``reward.model`` has a shape, and none."""
    monkeypatch.setattr(parity, "reference", lambda shape: None)
    monkeypatch.setattr(workers, "load_model", lambda *spec: SimpleNamespace(config=CONFIG))
    recipe = from_dict({"train": {"parity": True}, "reward": {"model": "some"}})
    shape = () if role == "reward_model" else (CONFIG,)
    with raises(RecipeError, "train.parity"):
        getattr(workers, role)(Context(role, MESH, 1, 1, InlineStore(), 0), recipe, *shape)
