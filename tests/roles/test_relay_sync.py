"""Weights that go by a relay: what engines take is the policy's, bit for bit, without a collective."""

import tempfile
import time
from pathlib import Path

import pytest
import torch

from tests.roles.test_weight_sync import Case, mesh, parts, roles_of
from tilth.cluster.backends.inline import InlineStore
from tilth.cluster.backends.session_dir import SHARED_MEMORY
from tilth.cluster.worker.context import Context
from tilth.core.checksum import checksum
from tilth.core.errors import WeightMismatch
from tilth.core.layout import Mesh
from tilth.models.decoder import Decoder
from tilth.plan.layout import layouts
from tilth.roles.relay import Publication
from tilth.roles.relay_sync import RelaySyncWorker

CASES = {
    "whole": Case(((1, 1, 1), (0,)), ((1, 1, 1), (1,)), dtype=torch.bfloat16),
    "fsdp to three engines": Case(((1, 2, 1), (0, 1)), ((2, 1, 1), (2, 3)), tied=False),
    "tp to an engine over tp": Case(((1, 1, 2), (0, 1)), ((1, 1, 2), (2, 3)), tied=False),
    "dp to an engine over tp, bf16": Case(((2, 1, 1), (0, 1)), ((1, 1, 2), (2, 3)), dtype=torch.bfloat16),
    "experts": Case((("ep", 2), (0, 1)), (("ep", 2), (2, 3)), experts=True),
}
PATIENCE = 60.0


def worker_of(case: Case, rank: int, held: dict, folder: str, bucket: int) -> RelaySyncWorker:
    ranks = tuple(sorted({*case.source[1], *case.target[1]}))
    context = Context("weight_sync", Mesh(("to",), (len(ranks),), ranks), rank, len(ranks), InlineStore(), roles=held)
    source, target = mesh(case.source), mesh(case.target)
    given = layouts(case.config, source), {"rollout": parts(case, case.config)}, {"rollout": case.dtype}
    meshes, cpu = (source, {"rollout": target}), torch.device("cpu")
    return RelaySyncWorker(
        context, *given, *meshes, device=cpu, bucket=bucket, relays={"rollout": Path(folder) / "relay"}
    )


def pulled(worker: RelaySyncWorker, publication: Publication):
    """What this rank takes, once the policy's ranks have written it, at a time of their own."""
    end = time.monotonic() + PATIENCE
    while (newest := worker.relays["rollout"].newest) is None or newest.number < publication.number:
        assert time.monotonic() < end
        time.sleep(0.05)
    return worker.pull("rollout", publication)[worker.context.rank]


def relayed(rank: int, name: str, bucket: int, folder: str):
    """In each process: two versions, the second other than the first; what each receiver then holds."""
    case, found = CASES[name], []
    held = roles_of(case, rank)
    worker = worker_of(case, rank, held, folder, bucket)
    for version in (1, 2):
        publication = Publication(version, 10 * version)
        if "policy" in held:
            for parameter in held["policy"].engine.sharded.parameters.values():
                parameter.data.mul_(-1)
            found.append(worker.publish("rollout", publication))
        else:
            delivery, engine = pulled(worker, publication), held["rollout"].engine
            found.append((delivery.rank, delivery.received, delivery.taken, engine.version, engine.fingerprint()))
            Path(folder, f"{rank}-{version}").touch()
        end = time.monotonic() + PATIENCE
        while not all(Path(folder, f"{r}-{version}").exists() for r in case.target[1]):
            assert time.monotonic() < end
            time.sleep(0.05)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("bucket", [1, 10**9])
@pytest.mark.parametrize("name", CASES)
def test_every_engine_takes_the_policy_bit_for_bit(pool, name, bucket):
    case = CASES[name]
    model = Decoder(case.config)
    model.init_weights_(7)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        count = max(case.target[1]) + 1
        found = pool.run(count, "tests.roles.test_relay_sync:relayed", name=name, bucket=bucket, folder=folder)
    for version, sign in ((1, -1), (2, 1)):
        whole = {n: (sign * p.detach()).to(case.dtype) for n, p in model.named_parameters()}
        distinct = set()
        for rank in case.target[1]:
            boxes = {n: layout.boxes(rank)[0] for n, layout in parts(case, model.config).items()}
            distinct |= set(boxes.items())
            size = sum(box.numel for box in boxes.values()) * case.dtype.itemsize
            prints = {n: checksum(whole[n][box.slices]) for n, box in boxes.items()}
            assert found[rank][version - 1] == (rank, len(boxes), size, 10 * version, prints)
        written = sum(found[rank][version - 1] for rank in case.source[1])
        assert written == sum(box.numel for _, box in distinct) * case.dtype.itemsize


def lacking(rank: int, folder: str) -> list[str]:
    """Keys of the errors of the engine's rank, which asks for what is not there, or not yet."""
    case = CASES["whole"]
    worker, found = worker_of(case, rank, roles_of(case, rank), folder, 10**9), []
    for number in (1, 2):
        try:
            if rank:
                worker.pull("rollout", Publication(number, number))
        except WeightMismatch as error:
            found.append(error.key)
        if not rank and number == 1:
            worker.publish("rollout", Publication(1, 1))
            Path(folder, "written").touch()
        end = time.monotonic() + PATIENCE
        while not Path(folder, "written").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
    return found


@pytest.mark.dist
def test_a_publication_that_the_relay_lacks_is_an_error(pool, tmp_path):
    first, (*_, last) = pool.run(2, "tests.roles.test_relay_sync:lacking", folder=str(tmp_path))
    assert (first, last) == ([], "relay.missing")
