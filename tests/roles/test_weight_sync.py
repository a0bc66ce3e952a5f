"""The relay: what arrives is what was meant, whoever holds which part of it."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.errors import raises
from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.cluster.worker.context import Context
from tilth.config.schema import OptimizerConfig
from tilth.core.checksum import checksum
from tilth.core.errors import WeightMismatch
from tilth.core.layout import Mesh
from tilth.models.decoder import Decoder
from tilth.models.value import ValueModel
from tilth.parallel.dims import ParallelDims, leave
from tilth.parallel.sharded import shard
from tilth.plan.shape import parameter_shapes
from tilth.roles.critic import CriticWorker
from tilth.roles.policy import PolicyWorker
from tilth.roles.reference import ReferenceWorker
from tilth.roles.weight_sync import WeightSyncWorker, verify_weights
from tilth.training.engine import TrainEngine
from tilth.training.packed import appraise

NAMES = ("dp", "fsdp", "tp")
TIED = small.config()
UNTIED = small.config(tie_embeddings=False)


@dataclass(frozen=True)
class Case:
    """Meshes as (sizes, ranks), and what the target is."""

    source: tuple
    target: tuple
    role: str = "rollout"
    tied: bool = True
    dtype: torch.dtype = torch.float32


ALL, FIRST, SECOND = (0, 1), (0,), (1,)
CASES = {
    "colocated, fsdp": Case(((1, 2, 1), ALL), ((2, 1, 1), ALL)),
    "colocated, tp, bf16": Case(((1, 1, 2), ALL), ((2, 1, 1), ALL), dtype=torch.bfloat16),
    "colocated, dp": Case(((2, 1, 1), ALL), ((2, 1, 1), ALL), tied=False),
    "split": Case(((1, 1, 1), FIRST), ((1, 1, 1), SECOND)),
    "partly shared": Case(((1, 2, 1), ALL), ((1, 1, 1), SECOND), tied=False),
    "reference, fsdp to tp": Case(((1, 2, 1), ALL), ((1, 1, 2), ALL), "reference"),
    "critic, tp to fsdp": Case(((1, 1, 2), ALL), ((1, 2, 1), ALL), "critic", tied=False),
    "critic, elsewhere": Case(((1, 1, 1), SECOND), ((1, 1, 1), FIRST), "critic"),
}


def mesh(place) -> Mesh:
    return Mesh(NAMES, *place)


def roles_of(case: Case, rank: int) -> dict:
    """What this rank holds: a part of the policy, a receiver, both."""
    config, store, held = TIED if case.tied else UNTIED, InlineStore(), {}
    if rank in case.source[1]:
        policy = shard(lambda: Decoder(config), ParallelDims.of(mesh(case.source), rank))
        policy.init_(7)
        held["policy"] = PolicyWorker(TrainEngine(policy, OptimizerConfig(), total_steps=1, micro_tokens=64), store)
    if rank not in case.target[1]:
        return held
    grid = ParallelDims.of(mesh(case.target), rank)
    if case.role == "rollout":
        held["rollout"] = small.rollout(store, dtype=case.dtype, model=config)
    elif case.role == "reference":
        frozen = shard(lambda: Decoder(config).requires_grad_(False), grid)
        held["reference"] = ReferenceWorker(frozen, store, temperature=1.0, micro_tokens=64, parity=False)
    else:
        model = shard(lambda: ValueModel(Decoder(config)), grid)
        model.init_(3)
        engine = TrainEngine(model, OptimizerConfig(), total_steps=1, micro_tokens=64, scorer=appraise)
        held["critic"] = CriticWorker(engine, store)
    return held


def relay_of(case: Case, rank: int, held: dict, bucket: int) -> WeightSyncWorker:
    ranks = tuple(sorted({*case.source[1], *case.target[1]}))
    context = Context("relay", Mesh(("to",), (len(ranks),), ranks), rank, 2, InlineStore(), roles=held)
    config = TIED if case.tied else UNTIED
    targets, dtypes = {case.role: mesh(case.target)}, {case.role: case.dtype}
    cpu = torch.device("cpu")
    return WeightSyncWorker(
        context, parameter_shapes(config), dtypes, mesh(case.source), targets, device=cpu, bucket=bucket
    )


def relayed(rank: int, name: str, bucket: int) -> tuple:
    """In each process: relay twice (the second time nothing may be left of the first); what the receiver then holds."""
    case = CASES[name]
    held = roles_of(case, rank)
    relay = relay_of(case, rank, held, bucket)
    for version in (1, 2):
        delivery = relay.sync(case.role, version)
    receiver = held.get(case.role)
    return delivery, None if receiver is None else receiver.fingerprint()


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_every_receiver_holds_the_policy_bit_for_bit(pool, name):
    case = CASES[name]
    model = Decoder(TIED if case.tied else UNTIED)
    model.init_weights_(7)
    wanted = {n: checksum(p.detach().to(case.dtype)) for n, p in model.named_parameters()}
    if case.role == "critic":
        wanted.pop("lm_head.weight", None)
    for bucket in (1, 2000, 10**9):  # a tensor at a time, several, all
        for rank, (delivery, found) in enumerate(
            pool.run(2, "tests.roles.test_weight_sync:relayed", name=name, bucket=bucket)
        ):
            assert delivery.rank == rank
            assert found == (wanted if rank in case.target[1] else None)
            outside = not set(case.source[1]) >= set(case.target[1])
            assert bool(delivery.bytes) == outside


def broken(rank: int, name: str, damage: str) -> str:
    """The receiving engine harms one tensor; what each process is told."""
    case, tensor = CASES[name], "model.layers.1.mlp.up_proj.weight"
    held = roles_of(case, rank)
    if "rollout" in held:
        harm(held["rollout"], tensor, damage)
    try:
        relay_of(case, rank, held, 10**9).sync(case.role, 1)
    except WeightMismatch as error:
        return str(error)
    return ""


def harm(worker, tensor: str, damage: str) -> None:
    live, load = dict(worker.engine.named_parameters())[tensor], worker.engine.update_weights

    live.zero_()  # it is uninitialised, and could hold what lay there before: these very weights

    def damages(weights, version):
        before = live.clone()
        load(weights, version=version)
        if damage == "drop":
            live.copy_(before)
        elif damage == "permute":
            live.copy_(live.flip(0))
        else:
            live[0, 0] += 1e-6

    worker.engine.update_weights = damages


@pytest.mark.dist
@pytest.mark.parametrize("name", ["colocated, fsdp", "split"])
@pytest.mark.parametrize("damage", ["drop", "permute", "corrupt"])
def test_a_harmed_tensor_is_named_by_the_worker_that_holds_it(pool, name, damage):
    told = pool.run(2, "tests.roles.test_weight_sync:broken", name=name, damage=damage)
    for rank, said in enumerate(told):
        assert ("after the weight sync, model.layers.1.mlp.up_proj.weight in the rollout engine" in said) == (
            rank in CASES[name].target[1]
        )


# ---- devices ----


class Enough(Exception):
    """Ends a relay where nothing can be computed any more, since tensors have no values."""


class Looks:
    """A receiver that sees where the weights lie."""

    def receive(self, weights, version):
        self.found = {name: (tensor.device, tensor.shape) for name, tensor in weights}
        raise Enough

    tolerance = 0.0

    def fingerprint(self):
        return {}


@pytest.fixture
def gpus(monkeypatch):
    """This process as rank 1 of 2 in a world as on GPUs, with torch's stand-ins for both backends and for tensors.

    Holds the devices of what is broadcast; the operation itself would want a CUDA build.
    """
    sent = []
    monkeypatch.setattr("tilth.roles.weight_sync.broadcast", lambda x, source, group: sent.append(x.device))
    dist.init_process_group("cpu:fake,cuda:fake", rank=1, world_size=2, store=FakeStore())
    with FakeTensorMode():
        yield sent
    leave()


def test_weights_from_another_gpu_arrive_on_the_device_of_this_worker(gpus):
    case, looks, own = CASES["split"], Looks(), torch.device("cuda:1")
    context = Context("relay", Mesh(("to",), (2,), (0, 1)), 1, 2, InlineStore(), roles={"rollout": looks})
    shapes = parameter_shapes(TIED)
    meshes = mesh(case.source), {"rollout": mesh(case.target)}
    relay = WeightSyncWorker(context, shapes, {"rollout": torch.float32}, *meshes, device=own)
    with pytest.raises(Enough):
        relay.sync("rollout", 1)
    assert looks.found == {name: (own, torch.Size(shape)) for name, shape in shapes.items()}
    assert set(gpus) == {own}


# ---- the comparison ----


def test_equal_checksums_pass():
    verify_weights({"a": 1, "b": 2}, {"b": 2, "a": 1})


@pytest.mark.parametrize("received", [{"a": 1, "b": 3}, {"a": 1}, {"a": 1, "b": None}])
def test_a_wrong_or_missing_tensor_is_named(received):
    with raises(WeightMismatch, "b"):
        verify_weights({"a": 1, "b": 2}, received)


def test_an_extra_tensor_is_named():
    with raises(WeightMismatch, "extra"):
        verify_weights({"a": 1}, {"a": 1, "extra": 5})


def test_many_wrong_tensors_are_counted():
    expected = {f"t{i}": i for i in range(9)}
    with raises(WeightMismatch, "t0"):
        verify_weights(expected, {})
