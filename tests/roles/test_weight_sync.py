"""The relay: what arrives is what was meant, whoever holds and whoever needs which part of it."""

import unittest.mock
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
from tilth.engines.protocol import EngineError
from tilth.models.config import DecoderConfig
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.parallel.comm import all_to_all
from tilth.parallel.dims import ParallelDims, leave
from tilth.parallel.sharded import shard
from tilth.plan.layout import layouts
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
EXPERTS = small.config(
    family="qwen3_moe", num_experts=4, experts_per_token=2, expert_size=8, expert_layers=(1,), qk_norm=True
)


@dataclass(frozen=True)
class Case:
    """Meshes as (sizes, ranks), and what the target is."""

    source: tuple
    target: tuple
    role: str = "rollout"
    tied: bool = True
    dtype: torch.dtype = torch.float32
    experts: bool = False

    @property
    def config(self) -> DecoderConfig:
        return EXPERTS if self.experts else TIED if self.tied else UNTIED


ALL, FIRST, SECOND = (0, 1), (0,), (1,)
CASES = {
    "colocated, fsdp": Case(((1, 2, 1), ALL), ((2, 1, 1), ALL)),
    "colocated, tp, bf16": Case(((1, 1, 2), ALL), ((2, 1, 1), ALL), dtype=torch.bfloat16),
    "colocated, dp": Case(((2, 1, 1), ALL), ((2, 1, 1), ALL), tied=False),
    "shared, tp to whole engines": Case(((1, 1, 2), ALL), ((2, 1, 1), ALL)),
    "shared, tp to an engine over tp": Case(((1, 1, 2), ALL), ((1, 1, 2), ALL), tied=False),
    "fsdp to an engine over tp": Case(((1, 2, 1), ALL), ((1, 1, 2), ALL)),
    "dp to an engine over tp, bf16": Case(((2, 1, 1), ALL), ((1, 1, 2), ALL), dtype=torch.bfloat16),
    "split": Case(((1, 1, 1), FIRST), ((1, 1, 1), SECOND)),
    "partly shared": Case(((1, 2, 1), ALL), ((1, 1, 1), SECOND), tied=False),
    "reference, fsdp to tp": Case(((1, 2, 1), ALL), ((1, 1, 2), ALL), "reference"),
    "critic, tp to fsdp": Case(((1, 1, 2), ALL), ((1, 2, 1), ALL), "critic", tied=False),
    "colocated, ep": Case((("ep", 2), ALL), (("dp", 2), ALL), experts=True),
    "ep to an engine over ep": Case((("ep", 2), ALL), (("ep", 2), ALL), experts=True),
    "reference, ep to fsdp": Case((("ep", 2), ALL), (("fsdp", 2), ALL), "reference", experts=True),
    "critic, elsewhere": Case(((1, 1, 1), SECOND), ((1, 1, 1), FIRST), "critic"),
}
FOUR = {
    "three engines elsewhere": Case(((1, 1, 1), FIRST), ((3, 1, 1), (1, 2, 3)), dtype=torch.bfloat16),
    "an engine over tp elsewhere": Case(((1, 2, 1), ALL), ((1, 1, 2), (2, 3)), tied=False),
    "fsdp to two engines over tp": Case(((1, 4, 1), (0, 1, 2, 3)), ((2, 1, 2), (0, 2, 1, 3))),
}
EVERY = CASES | FOUR


def mesh(place) -> Mesh:
    sizes, ranks = place
    return Mesh.of({sizes[0]: sizes[1]}, ranks) if isinstance(sizes[0], str) else Mesh(NAMES, sizes, ranks)


def roles_of(case: Case, rank: int) -> dict:
    """What this rank holds: a part of the policy, a receiver, both."""
    config, store, held = case.config, InlineStore(), {}
    if rank in case.source[1]:
        policy = shard(lambda: Decoder(config), ParallelDims.of(mesh(case.source), rank))
        policy.init_(7)
        held["policy"] = PolicyWorker(TrainEngine(policy, OptimizerConfig(), total_steps=1, micro_tokens=64), store)
    if rank not in case.target[1]:
        return held
    grid = ParallelDims.of(mesh(case.target), rank)
    if case.role == "rollout":
        held["rollout"] = small.rollout(store, dtype=case.dtype, model=config, dims=grid)
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
    config = case.config
    source, target, cpu = mesh(case.source), mesh(case.target), torch.device("cpu")
    wanted, dtypes = {case.role: parts(case, config)}, {case.role: case.dtype}
    return WeightSyncWorker(
        context, layouts(config, source), wanted, dtypes, source, {case.role: target}, device=cpu, bucket=bucket
    )


def parts(case: Case, config) -> dict:
    found = layouts(config, mesh(case.target), whole=case.role == "rollout")
    return {name: layout for name, layout in found.items() if case.role != "critic" or not name.startswith("lm_head")}


def relayed(rank: int, name: str, bucket: int) -> tuple:
    """In each process: relay twice (the second time nothing may be left of the first); what the receiver then holds."""
    case = EVERY[name]
    held = roles_of(case, rank)
    relay = relay_of(case, rank, held, bucket)
    places = []
    for version in (1, 2):
        delivery = relay.sync(case.role, version)
        shards = held["policy"].engine.sharded.parameters if "policy" in held else {}
        places.append({n: p.data_ptr() for n, p in shards.items()})
    assert places[0] == places[1]
    receiver = held.get(case.role)
    return delivery, None if receiver is None else receiver.fingerprint()


@pytest.mark.dist
@pytest.mark.parametrize("bucket", [1, 2000, 10**9], ids=["a tensor at a time", "several", "all"])
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in FOUR)])
def test_every_receiver_holds_the_policy_bit_for_bit(pool, name, bucket):
    case = EVERY[name]
    ranks = max((*case.source[1], *case.target[1])) + 1
    model = Decoder(case.config)
    model.init_weights_(7)
    whole = {n: p.detach().to(case.dtype) for n, p in model.named_parameters()}
    boxes = {rank: {n: w.boxes(rank) for n, w in parts(case, model.config).items()} for rank in case.target[1]}
    wanted = {r: {n: checksum(whole[n][b.slices]) for n, (b,) in found.items()} for r, found in boxes.items()}
    for rank, (delivery, found) in enumerate(
        pool.run(ranks, "tests.roles.test_weight_sync:relayed", name=name, bucket=bucket)
    ):
        assert delivery.rank == rank
        assert found == wanted.get(rank)
        assert delivery.bytes == received(case, rank, model)
        copied = ("o_proj.weight", "down_proj.weight")  # slices along columns
        lying = [n for n in whole if case.target[0] == (1, 1, 2) or not n.endswith(copied)]
        assert delivery.shared == (len(lying) if name.startswith("shared") else 0)


def received(case: Case, rank: int, model: Decoder) -> int:
    """Bytes that a rank needs and has no part of, by brute force on every element."""
    if rank not in case.target[1]:
        return 0
    needed, count = parts(case, model.config), 0
    held = layouts(model.config, mesh(case.source))
    for name, layout in needed.items():
        have, need = torch.zeros(layout.shape, dtype=bool), torch.zeros(layout.shape, dtype=bool)
        for box in held[name].boxes(rank) if rank in case.source[1] else ():
            have[box.slices] = True
        for box in layout.boxes(rank):
            need[box.slices] = True
        count += int((need & ~have).sum())
    return count * case.dtype.itemsize


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
@pytest.mark.parametrize("name", ["colocated, fsdp", "split", "shared, tp to whole engines"])
@pytest.mark.parametrize("damage", ["drop", "permute", "corrupt"])
def test_a_harmed_tensor_is_named_by_the_worker_that_holds_it(pool, name, damage):
    told = pool.run(2, "tests.roles.test_weight_sync:broken", name=name, damage=damage)
    for rank, said in enumerate(told):
        assert ("after the weight sync, model.layers.1.mlp.up_proj.weight in the rollout engine" in said) == (
            rank in CASES[name].target[1]
        )


def spoiled(rank: int, name: str) -> str:
    """One bit of what arrives changes on its way; the key of the error of each process."""
    case = CASES[name]
    held = roles_of(case, rank)

    def spoils(out, x, received, sent, group):
        going = all_to_all(out, x, received, sent, group)
        going.wait()
        if out.dtype == torch.float32 and len(out) and rank == 1:
            out[-1] += 1e-3
        return going

    with unittest.mock.patch("tilth.parallel.reshard.all_to_all", spoils):
        try:
            relay_of(case, rank, held, 10**9).sync(case.role, 1)
        except WeightMismatch as error:
            return error.key
    return ""


@pytest.mark.dist
@pytest.mark.parametrize("name", ["colocated, fsdp", "split", "shared, tp to whole engines"])
def test_what_changes_on_its_way_is_named_where_it_arrives(pool, name):
    first, second = pool.run(2, "tests.roles.test_weight_sync:spoiled", name=name)
    assert first == "" and second.startswith("model.")


def stale(rank: int) -> list[str]:
    """Generate after an update without a weight sync, then after one."""
    case = CASES["shared, tp to whole engines"]
    held = roles_of(case, rank)
    relay, speaker, policy = relay_of(case, rank, held, 10**9), held["rollout"], held["policy"]
    relay.sync("rollout", 1)
    asked, found = small.asked(speaker.store, [3], 2, 0), []
    small.generated(speaker, asked)
    policy.engine.updates += 1
    try:
        small.generated(speaker, asked)
    except EngineError as error:
        found.append(error.key)
    relay.sync("rollout", 2)
    return [*found, *map(str, set(small.generated(speaker, asked)["version"]))]


@pytest.mark.dist
def test_an_engine_that_shares_memory_does_not_generate_with_half_updated_weights(pool):
    assert pool.run(2, "tests.roles.test_weight_sync:stale") == [["rollout.stale", "2"]] * 2


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

    def noted(out, x, *more):
        sent.extend((out.device, x.device))
        return unittest.mock.Mock()

    monkeypatch.setattr("tilth.parallel.reshard.all_to_all", noted)
    for module in ("tilth.parallel.reshard", "tilth.roles.weight_sync"):  # tensors have no values
        monkeypatch.setattr(f"{module}.checksum", lambda tensor: 0)
    monkeypatch.setattr("tilth.parallel.reshard.Resharder.damaged", lambda *given: [])
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, values: to)
    dist.init_process_group("cpu:fake,cuda:fake", rank=1, world_size=2, store=FakeStore())
    with FakeTensorMode():
        yield sent
    leave()


def test_weights_from_another_gpu_arrive_on_the_device_of_this_worker(gpus):
    case, looks, own = CASES["split"], Looks(), torch.device("cuda:1")
    context = Context("relay", Mesh(("to",), (2,), (0, 1)), 1, 2, InlineStore(), roles={"rollout": looks})
    shapes, source, target = parameter_shapes(TIED), mesh(case.source), mesh(case.target)
    held, wanted = layouts(TIED, source), {"rollout": layouts(TIED, target)}
    relay = WeightSyncWorker(context, held, wanted, {"rollout": torch.float32}, source, {"rollout": target}, device=own)
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
