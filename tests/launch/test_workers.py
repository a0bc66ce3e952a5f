"""Factories of roles: each makes its role on the device of its own worker."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from tests.errors import raises
from tilth.cluster.backends.inline import InlineStore
from tilth.cluster.worker.context import Context
from tilth.config.load import from_dict
from tilth.config.parts import LayoutConfig
from tilth.core.errors import RecipeError
from tilth.core.layout import Mesh
from tilth.data.tokenizer import Tokenizer
from tilth.engines import engine as engine_module
from tilth.launch import workers
from tilth.models import parity
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.plan.memory import kv_tokens
from tilth.plan.shape import sequence_flops

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


@pytest.mark.parametrize("share", [0.5, "auto"])
def test_activations_are_not_offloaded_from_a_cpu(share):
    recipe = from_dict({"train": {"device": "auto", "offload": share}})
    with raises(RecipeError, "train.offload.device"):
        workers.shard_model(Context("policy", MESH, 1, 1, InlineStore(), 0), recipe, CONFIG)


def test_what_moves_to_the_host_is_decided_by_sizes_rates_and_memory(monkeypatch):
    monkeypatch.setattr(workers, "measured_flops", lambda device, dtype: 1e9)
    monkeypatch.setattr(workers, "host_bandwidth", lambda device: 1e6)
    config = replace(CONFIG, num_layers=5)
    recipe = from_dict({"train": {"device": "auto", "offload": "auto", "micro_tokens": 1000}})
    sharded = ShardedModel.alone(Decoder(config))
    engine = workers.train_engine(recipe, sharded, recipe.optimizer)
    limits = pickle.loads(pickle.dumps(engine.limits)).offload
    assert (limits.layers, limits.rates.bandwidth) == (5, 1e6) and 0 < limits.rates.host < psutil.virtual_memory().total
    lengths = np.array([10, 500])
    whole = [sequence_flops(config, n).forward - 2 * n * 8 * 8 for n in lengths]  # without the head
    assert limits.work(lengths) == pytest.approx(np.array(whole) / 5) and limits.rates.flops == 1e9
    assert 8 * 4 * 2 < limits.per_token < 8 * 4 * 100 and sharded.model.offload is not None
    assert [engine.limits.moved(n) for n in (1000, 2000)] == [0.0, pytest.approx(5 / 6)]
    plain = workers.train_engine(
        recipe.replaced("train", offload=0.0), ShardedModel.alone(Decoder(config)), recipe.optimizer
    )
    assert plain.limits.offload == 0 and plain.model.offload is None


@pytest.mark.dist
def test_a_layer_s_bytes_are_those_of_the_role_s_own_layout(pool):
    """Not of the policy's: a critic without ``sp`` keeps the inputs of its norms whole."""
    found = pool.run(2, "tests.launch.test_workers:bytes_of_layers")
    assert found[0] == found[1]
    for of_policy in found[0]:
        assert of_policy == found[0][0] and of_policy[0] < of_policy[1]


def bytes_of_layers(rank):
    """Bytes of a token with ``sp`` and without, each beside a policy with and without."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "measured_flops", lambda device, dtype: 1e9)
        patch.setattr(workers, "host_bandwidth", lambda device: 1e6)
        for policy in (True, False):
            recipe = from_dict({"train": {"precision": "bf16"}}).replaced(
                "policy", layout=LayoutConfig(tp=2, sp=policy)
            )
            grids = [(ParallelDims.of(Mesh.of({"tp": 2}), rank), sp) for sp in (True, False)]
            models = [shard(lambda: Decoder(CONFIG), grid, sp=sp) for grid, sp in grids]
            found.append([workers.offload_limits(recipe, model).per_token for model in models])
    return found


@pytest.mark.parametrize("role", ["policy", "critic", "reference", "reward_model"])
def test_every_role_refuses_parity_that_this_machine_cannot_keep(monkeypatch, role):
    """Before weights are loaded: the model of ``reward.model`` has a shape, and none."""
    monkeypatch.setattr(parity, "reference", lambda shape: None)
    monkeypatch.setattr(workers, "load_model", lambda *spec: SimpleNamespace(config=CONFIG))
    recipe = from_dict({"train": {"parity": True}, "reward": {"model": "some"}})
    more = {"reward_model": (), "reference": (CONFIG, None)}.get(role, (CONFIG,))
    with raises(RecipeError, "train.parity"):
        getattr(workers, role)(Context(role, MESH, 1, 1, InlineStore(), 0), recipe, *more)


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "slots"])
def test_an_automatic_cache_holds_max_rows_whole_sequences(monkeypatch, paged):
    monkeypatch.setattr(engine_module, "pages_serve", lambda *_: paged)
    section = {"model": {"context": 300}, "rollout": {"max_tokens": 100, "max_rows": 64}}
    recipe, tokenizer = from_dict(section | {"train": {"device": "cpu"}}), Tokenizer.characters("abcdefg")
    blocks = workers.rollout(context(0), recipe, CONFIG, tokenizer).engine._blocks
    assert blocks.num_blocks == 64 * blocks.blocks_for(300)
    device = {"device": "cuda", "precision": "bf16"} if paged else {"device": "cpu"}
    assert kv_tokens(from_dict(section | {"train": device})) == blocks.num_blocks * (256 if paged else 16)
