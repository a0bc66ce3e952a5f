"""Replicas read disjoint tensors and give them to each other: every byte is read once, and nobody waits in vain."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint import hand
from tests.checkpoint.make import DTYPES, same, shares, tensor
from tests.checkpoint.test_reading import flip
from tests.examples import examples
from tilth.checkpoint import read as replica_read
from tilth.checkpoint.read import Share, divided, open_checkpoint
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Layout, Mesh, Replicate, Shard
from tilth.parallel.dims import ParallelDims

HERE = "tests.checkpoint.test_replica_read:"
MESH = Mesh(("dp", "fsdp"), (2, 2))


class Table:
    """Threads in the place of processes: whoever is not answered within seconds fails."""

    def __init__(self, ranks):
        self.ranks, self.sent = tuple(ranks), 0
        self._barrier = threading.Barrier(len(self.ranks), timeout=10)
        self._data = None

    def share(self, rank):
        def broadcast(values, source):
            assert values.dtype == torch.uint8 and values.is_contiguous()
            if source == rank:
                self._data = values.clone()
                self.sent += values.nbytes
            self._barrier.wait()
            values.copy_(self._data)
            self._barrier.wait()

        return Share(self.ranks, rank, broadcast)

    def run(self, work):
        """``work(share, rank)`` on every rank at the same time: what came of it, or what was raised."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            futures = [pool.submit(work, self.share(rank), rank) for rank in self.ranks]
            return [future.exception() or future.result() for future in futures]


def group():
    """Large and small tensors of all kinds."""
    found = {f"w{i}": tensor((64, 40 + i), salt=str(i)) for i in range(9)}
    found |= {f"d{i}": tensor((i, 3), dtype, str(i)) for i, dtype in enumerate(DTYPES)}
    return found | {"s": tensor((), torch.int64), "large": tensor((300, 500))}


def over_fsdp(whole):
    """Rows over fsdp, copies over dp."""
    return {
        n: Layout(MESH, (Replicate(), Shard(0) if t.ndim else Replicate()), tuple(t.shape)) for n, t in whole.items()
    }


def alone(path, layouts, rank):
    """Bytes that one rank reads which restores by itself."""
    checkpoint = open_checkpoint(path)
    checkpoint.restore("g", shares(group(), layouts, rank), layouts, rank)
    return checkpoint.bytes_read


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return hand.write(tmp_path_factory.mktemp("root") / "step-000007", 7, {"g": group()})


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("message", [1000, 1 << 24])
def test_together_they_read_it_once(path, monkeypatch, replicas, message):
    monkeypatch.setattr(replica_read, "MESSAGE", message)
    whole, table = group(), Table(range(10, 10 + replicas))

    def restore(share, rank):
        checkpoint, into = open_checkpoint(path), {n: torch.zeros_like(t) for n, t in whole.items()}
        checkpoint.restore("g", into, share=share)
        return checkpoint.bytes_read, into

    found = table.run(restore)
    assert all(same(into[n], t) for _, into in found for n, t in whole.items())
    total = sum(t.nbytes for t in whole.values())
    assert sum(nbytes for nbytes, _ in found) == total == table.sent - replicas * replica_read._BOARD
    largest = max(t.nbytes for t in whole.values())
    assert max(n for n, _ in found) - min(n for n, _ in found) <= largest


def test_targets_of_other_strides_and_parts_of_a_layout(path):
    """Each rank of a replica shares with the one of the other replica that holds the same."""
    whole = group()
    layouts = over_fsdp(whole)
    for table in (Table((0, 2)), Table((1, 3))):

        def restore(share, rank):
            checkpoint, expected = open_checkpoint(path), shares(whole, layouts, rank)
            into = {n: torch.zeros_like(t.T).T if t.ndim == 2 else torch.zeros_like(t) for n, t in expected.items()}
            checkpoint.restore("g", into, layouts, rank, share)
            assert all(same(into[n], t) for n, t in expected.items())
            return checkpoint.bytes_read

        assert sum(table.run(restore)) == alone(path, layouts, table.ranks[0])


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 5))
@settings(max_examples=examples(60), deadline=None)
def test_the_division_is_even_and_the_same_everywhere(sizes, ranks):
    parts = {f"t{i}": [torch.empty(n, dtype=torch.uint8)] for i, n in enumerate(sizes)}
    owners = divided(parts, range(ranks))
    backwards = dict(reversed(parts.items()))
    assert owners == divided(backwards, range(ranks)) and owners.keys() == parts.keys()
    load = [sum(n for name, n in zip(parts, sizes) if owners[name] == rank) for rank in range(ranks)]
    assert max(load) - min(load) <= max(sizes, default=0)


# ---- what goes wrong on one goes wrong on all, at once ----


def attempt(path, whole=None, layouts=None, change=lambda rank, into: None, before=lambda rank, checkpoint: None):
    def restore(share, rank):
        checkpoint, into = open_checkpoint(path), {n: torch.zeros_like(t) for n, t in (whole or group()).items()}
        change(rank, into)
        before(rank, checkpoint)
        checkpoint.restore("g", into, layouts, rank, share)

    return restore


def test_damage_is_told_to_all(tmp_path):
    path = hand.write(tmp_path / "step-000007", 7, {"g": group()})
    file = flip(open_checkpoint(path), "w3", (1, 1))
    told = Table(range(3)).run(attempt(path))
    assert all(isinstance(error, CheckpointError) for error in told)
    own = [str(error) for error in told if "which reads for" not in str(error)]
    assert own == [f"checkpoint {path}: tensor g/w3 is corrupt in file {file}"]
    others = [str(error) for error in told if "which reads for" in str(error)]
    assert len(others) == 2 and all(own[0] in text and "rank " in text for text in others)


def test_a_store_that_fails_on_one_rank(path):
    def break_it(rank, checkpoint):
        if rank == 1:
            checkpoint._storage = Broken()

    class Broken:
        remote, gap, where = False, 0, "nowhere"

        def ranges(self, name):
            raise OSError(5, "Input/output error", name)

    first, second = Table((0, 1)).run(attempt(path, before=break_it))
    assert isinstance(second, StorageError) and "g.safetensors: Input/output error" in str(second)
    assert isinstance(first, CheckpointError)
    assert str(first) == f"rank 1, which reads for rank 0 too: {second}"


def test_targets_that_do_not_fit_on_one_rank(path):
    def wrong(rank, into):
        if rank == 2:
            into["w0"] = torch.zeros(3)

    told = Table((0, 2, 5)).run(attempt(path, change=wrong))
    assert all(isinstance(e, CheckpointError) and "g/w0 has shape (64, 40), expected (3,)" in str(e) for e in told)
    assert str(told[0]).startswith("rank 2, which reads for rank 0 too: ") and str(told[1]).startswith("checkpoint ")


def test_ranks_that_want_different_parts(path):
    whole = group()
    mesh = Mesh(("fsdp",), (2,))
    layouts = {n: Layout(mesh, (Shard(0) if t.ndim else Replicate(),), tuple(t.shape)) for n, t in whole.items()}

    def restore(share, rank):
        into = shares(whole, layouts, rank)
        open_checkpoint(path).restore("g", into, layouts, rank, share)

    told = Table((0, 1)).run(restore)
    assert [str(e) for e in told] == [
        "rank 1 restores other parts than rank 0", "rank 0 restores other parts than rank 1",
    ]  # fmt: skip


def test_checkpoints_of_different_steps(path, tmp_path):
    other = hand.write(tmp_path / "step-000008", 8, {"g": group()})

    def restore(share, rank):
        attempt(other if rank else path)(share, rank)

    assert all("restores other parts" in str(e) for e in Table((0, 1)).run(restore))


def test_a_checkpoint_that_one_rank_cannot_open(path, tmp_path):
    found = Table((0, 1, 2)).run(lambda share, rank: open_checkpoint(path if rank else tmp_path / "none", share))
    assert str(found[0]) == f"{tmp_path}/none is not a checkpoint: no such directory"
    assert [str(e) for e in found[1:]] == [f"rank 0, which reads for rank {i} too: {found[0]}" for i in (1, 2)]
    found = Table((0, 1, 2)).run(lambda share, rank: open_checkpoint(path, share))
    assert [checkpoint.step for checkpoint in found] == [7, 7, 7]


def test_an_end_that_nobody_foresaw(path):
    def end(rank, checkpoint):
        if rank == 1:
            checkpoint._fetch = lambda wants: 1 / 0

    first, second = Table((0, 1)).run(attempt(path, before=end))
    assert isinstance(second, ZeroDivisionError)
    assert isinstance(first, CheckpointError) and "rank 1" in str(first) and "it ended before" in str(first)


# ---- real processes ----


@pytest.mark.dist
def test_process_groups(pool, path):
    found = pool.run(4, HERE + "restore_in_a_process", path=str(path))
    fine, nbytes = zip(*found)
    needed = [alone(path, over_fsdp(group()), rank) for rank in range(2)]
    assert all(fine) and [nbytes[0] + nbytes[2], nbytes[1] + nbytes[3]] == needed
    assert all(n > 0 for n in nbytes)


def restore_in_a_process(rank, path):
    grid, whole = ParallelDims.of(MESH, rank), group()
    layouts = over_fsdp(whole)
    share = Share.of_group(grid.group("dp"), grid.ranks("dp"), rank)
    expected = shares(whole, layouts, rank)
    into = {n: torch.zeros_like(t) for n, t in expected.items()}
    checkpoint = open_checkpoint(path, share)
    checkpoint.restore("g", into, layouts, rank, share)
    return all(same(into[n], t) for n, t in expected.items()), checkpoint.bytes_read


@pytest.mark.dist
def test_a_failure_of_one_process_ends_the_others(pool, tmp_path):
    path = hand.write(tmp_path / "step-000007", 7, {"g": group()})
    flip(open_checkpoint(path), "w3", (40, 1))
    told = pool.run(2, HERE + "fail_in_a_process", timeout=20.0, path=str(path))
    assert all("tensor g/w3 is corrupt in file g.safetensors" in text for text in told)
    assert sum("which reads for" in text for text in told) == 1


def fail_in_a_process(rank, path):
    grid = ParallelDims.of(Mesh(("dp",), (2,)), rank)
    into = {n: torch.zeros_like(t) for n, t in group().items()}
    try:
        open_checkpoint(path).restore("g", into, share=Share.of_group(grid.group("dp"), grid.ranks("dp"), rank))
    except CheckpointError as error:
        return str(error)
