"""A relay shows complete versions alone, bit for bit, whoever dies, whatever changes, however often it is written."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import forked
from tests.errors import raises
from tests.examples import examples
from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.cluster.backends.session_dir import SHARED_MEMORY, SessionDir
from tilth.core.checksum import checksum
from tilth.core.errors import ArgumentError, StorageError, WeightMismatch
from tilth.core.layout import Mesh
from tilth.parallel.reshard import parts_of
from tilth.plan.layout import layouts
from tilth.plan.reshard import relay_pieces
from tilth.roles import relay
from tilth.roles.relay import TRIES, Publication, Relay

CONFIG = small.config(tie_embeddings=False)
ONE = Mesh.of({})
ENGINE = Mesh(("dp",), (1,), (9,))
NAME = "model.layers.1.mlp.up_proj.weight"


@dataclass
class Holder:
    """A receiver that keeps what it takes."""

    tolerance: float | None = 0
    version: int = -1
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def receive(self, weights, version):
        self.held |= {name: tensor.clone() for name, tensor in weights}
        self.version = version

    def fingerprint(self):
        return {name: checksum(tensor) for name, tensor in self.held.items() if tensor.numel()}


def weights(seed, dtype=torch.float32, config=CONFIG):
    """Whole parameters of a version."""
    shapes = {name: layout.shape for name, layout in layouts(config, ONE).items()}
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=chance).to(dtype) for name, shape in shapes.items()}


class World:
    """A source, a target and their relay. Each call opens it again, as another process does."""

    def __init__(self, folder, source=ONE, target=ENGINE, dtype=torch.float32, config=CONFIG, name="relay"):
        self.path, self.source, self.target, self.dtype = Path(folder) / name, source, target, dtype
        self.held, self.wanted = layouts(config, source), layouts(config, target)
        self.pieces = relay_pieces(source, self.held, self.wanted)

    def open(self) -> Relay:
        return Relay(self.path, self.pieces, self.dtype)

    def publish(self, whole, number, version=None, ranks=None, **more):
        relay = self.open()
        for rank in relay.writers if ranks is None else ranks:
            own = {n: t[self.held[n].boxes(rank)[0].slices] for n, t in whole.items() if self.held[n].boxes(rank)}
            parts = parts_of(own, self.held, rank)
            stream = ({name: part} for name, part in parts.items())
            relay.publish(stream, Publication(number, number if version is None else version), rank, **more)
        relay.close()

    def pull(self, rank=None, have=None, into=None):
        holder, relay = into or Holder(), self.open()
        rank = self.target.ranks[0] if rank is None else rank
        found = relay.pull(holder, self.wanted, rank, have)
        relay.close()
        return found, holder


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as path:
        yield Path(path)


@pytest.fixture
def world(folder):
    return World(folder)


def same(holder, whole):
    assert holder.held.keys() == whole.keys()
    assert all(torch.equal(holder.held[name], whole[name]) for name in whole)


# ---- what is written is what is read ----

sizes = st.sampled_from([1, 2])


@settings(max_examples=examples(25), deadline=None)
@given(sizes, sizes, sizes, sizes, st.integers(1, 2), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_every_rank_of_an_engine_gets_its_boxes_bit_for_bit(dp, fsdp, tp, engine_tp, engines, dtype, data):
    source = Mesh(("dp", "fsdp", "tp"), (dp, fsdp, tp))
    target = Mesh(("dp", "tp"), (engines, engine_tp), tuple(range(20, 20 + engines * engine_tp)))
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        world = World(folder, source, target, dtype)
        for number in range(1, data.draw(st.integers(1, 3)) + 1):
            whole = weights(number)
            world.publish(whole, number, version=10 * number)
            for rank in target.ranks:
                found, holder = world.pull(rank)
                assert found == Publication(number, 10 * number) and holder.version == 10 * number
                same(holder, {n: t[world.wanted[n].boxes(rank)[0].slices].to(dtype) for n, t in whole.items()})


def test_an_engine_generates_with_what_it_pulls(folder):
    config = small.config()
    world, policy = World(folder, config=config), small.policy()
    whole = {name: tensor.detach() for name, tensor in policy.engine.sharded.parameters.items()}
    world.publish(whole, 1, version=7)
    pulled, plain = small.rollout(InlineStore()), small.rollout(InlineStore())
    assert world.pull(into=pulled)[0] == Publication(1, 7)
    plain.receive(policy.weights(), 7)
    for worker in (pulled, plain):
        found = small.generated(worker, small.asked(worker.store, [3, 8], 2, 0))
        worker.said = found.read(worker.store, "tokens")["tokens"].values.tolist(), found["version"].tolist()
    assert pulled.said == plain.said


def test_nothing_is_there_before_the_first_version_and_nothing_is_pulled_twice(world):
    assert world.pull() == (None, Holder())
    world.publish(weights(1), 1)
    first, _ = world.pull()
    assert world.pull(have=first) == (first, Holder())
    world.publish(weights(2), 2)
    again, holder = world.pull(have=first)
    assert again.number == 2
    same(holder, weights(2))


def test_a_version_that_is_written_again_is_another_publication(world):
    """A run that goes back to a checkpoint has other weights of the same version."""
    world.publish(weights(1), 1, version=5)
    first, _ = world.pull()
    world.publish(weights(2), 2, version=5)
    second, holder = world.pull(have=first)
    assert second == Publication(2, 5)
    same(holder, weights(2))


def test_a_version_is_there_once_all_have_written_it(folder):
    world = World(folder, Mesh(("fsdp",), (2,)))
    world.publish(weights(1), 1)
    world.publish(weights(2), 2, ranks=[1])
    found, holder = world.pull()
    assert found.number == 1
    same(holder, weights(1))
    world.publish(weights(2), 2, ranks=[0])
    assert world.pull()[0].number == 2


def test_an_attempt_that_failed_does_not_count_for_the_next(folder):
    """One writer has written version 2; both write other weights as version 2 in the next attempt."""
    world = World(folder, Mesh(("fsdp",), (2,)))
    world.publish(weights(1), 1, version=1)
    world.publish(weights(8), 2, version=2, ranks=[1])
    world.publish(weights(2), 3, version=2, ranks=[0])
    assert world.pull()[0] == Publication(1, 1)
    world.publish(weights(2), 3, version=2, ranks=[1])
    found, holder = world.pull()
    assert found == Publication(3, 2)
    same(holder, weights(2))


def test_names_that_are_kept_stay_and_others_must_come(world):
    for number in (1, 2):
        world.publish(weights(number), number)
    some = {NAME: weights(3)[NAME]}
    rest = weights(2).keys() - some.keys()
    for number in (3, 4, 5):
        world.publish(some, number, keeps=rest)
        _, holder = world.pull()
        same(holder, weights(2) | some)
    with raises(ArgumentError, NAME):
        world.publish({n: weights(6)[n] for n in rest}, 6)
    same(world.pull()[1], weights(2) | some)


def test_a_name_that_is_kept_is_copied_over_what_a_lost_writer_left(world):
    """It had set the checksum of a piece, and not copied its bits."""
    for number in (1, 2):
        world.publish(weights(number), number)
    relay = world.open()
    relay._set_stamp(0, 0, None)
    relay._sums_of(0)[:] = relay._sums_of(1)
    world.publish({NAME: weights(2)[NAME]}, 3, keeps=weights(2).keys())
    found, holder = world.pull()
    assert found.number == 3
    same(holder, weights(2))


def test_no_version_is_where_one_is_being_written(world):
    """From before its first bit on."""
    for number in (1, 2):
        world.publish(weights(number), number)
    relay, seen = world.open(), []

    def own():
        for name, part in parts_of(weights(3), world.held, 0).items():
            seen.append((relay._find(0), relay.newest.number))
            yield {name: part}

    relay.publish(own(), Publication(3, 3), 0)
    assert set(seen) == {(None, 2)} and relay.newest.number == 3


def test_nothing_can_be_kept_before_the_first_version(world):
    with raises(ArgumentError, NAME):
        world.publish({n: t for n, t in weights(1).items() if n != NAME}, 1, keeps=[NAME])
    assert world.pull()[0] is None


def test_numbers_grow(world):
    world.publish(weights(1), 4)
    with raises(ArgumentError, "publication.number"):
        world.publish(weights(2), 4)


# ---- what goes wrong ----


def test_a_changed_bit_is_named(world):
    world.publish(weights(1), 1)
    relay = world.open()
    piece = next(i for i, piece in enumerate(relay.pieces) if piece.name == NAME)
    relay._bytes(0, piece)[5] ^= 4
    with raises(WeightMismatch, NAME):
        world.pull()


def test_changed_checksums_hide_a_version(world):
    """The version before is still there for who has nothing, and who has the hidden one keeps it."""
    for number in (1, 2):
        world.publish(weights(number), number)
    have, _ = world.pull()
    relay = world.open()
    relay._sums_of(1)[3] ^= np.uint64(1)
    assert world.pull(have=have) == (have, Holder())
    found, holder = world.pull()
    assert found.number == 1
    same(holder, weights(1))
    world.publish(weights(3), 3)
    assert world.pull(have=have)[0].number == 3


def test_a_receiver_that_harms_a_tensor_is_named(world):
    class Harms(Holder):
        def receive(self, given, version):
            super().receive(given, version)
            self.held[NAME][0, 0] += 1e-6

    world.publish(weights(1), 1)
    with raises(WeightMismatch, NAME):
        world.pull(into=Harms())


class Overtaken(Holder):
    """While it takes a version, newer ones are written."""

    def __init__(self, world, times, **more):
        super().__init__(**more)
        self.world, self.times, self.number = world, times, world.open().newest.number

    def receive(self, given, version):
        def slow():
            for place, (name, tensor) in enumerate(given):
                yield name, tensor
                if place == 2 and self.times:
                    self.times -= 1
                    for _ in range(2):
                        self.number += 1
                        self.world.publish(weights(self.number), self.number)

        super().receive(slow(), version)


@pytest.mark.parametrize("tolerance", [0, None])
def test_a_reader_that_is_overtaken_takes_the_newer_version_whole(world, tolerance):
    world.publish(weights(1), 1)
    found, holder = world.pull(into=Overtaken(world, 2, tolerance=tolerance))
    assert found.number == holder.version == 5
    same(holder, weights(5))


def test_a_reader_that_is_always_overtaken_gives_up_by_name(world):
    world.publish(weights(1), 1)
    holder = Overtaken(world, 10**9)
    with raises(WeightMismatch, "relay.torn"):
        world.pull(into=holder)
    assert holder.number == 1 + 2 * TRIES


def test_a_reader_of_a_version_that_is_lost_meanwhile_takes_the_one_before_whole(world):
    """It has taken a part of the version that is lost over the one that it had."""
    world.publish(weights(1), 1)
    have, holder = world.pull()
    world.publish(weights(2), 2)

    def receive(given, version):
        for place, (name, tensor) in enumerate(given):
            holder.held[name] = tensor
            if place == 2:
                relay = world.open()
                relay._sums_of(1)[:] = 0
                relay._data[relay._starts[5] + 64 + relay._slot :] = 0

    holder.receive = receive
    assert world.pull(have=have, into=holder)[0] == have
    same(holder, weights(1))


def test_one_version_during_a_pull_does_not_disturb_it(world):
    world.publish(weights(1), 1)

    class Once(Overtaken):
        def receive(self, given, version):
            world.publish(weights(2), 2)
            Holder.receive(self, given, version)

    found, holder = world.pull(into=Once(world, 0))
    assert found.number == 1
    same(holder, weights(1))


def test_a_removed_relay_is_an_error(world):
    world.publish(weights(1), 1)
    reader = world.open()
    world.open().remove()
    with raises(StorageError, "weight_sync.relay"):
        reader.pull(Holder(), world.wanted, 9)


def test_a_relay_of_other_pieces_is_an_error(world):
    world.publish(weights(1), 1)
    with raises(WeightMismatch, "relay.pieces"):
        Relay(world.path, world.pieces[1:], torch.float32)
    with raises(WeightMismatch, "relay.pieces"):
        Relay(world.path, world.pieces, torch.bfloat16)


def test_a_full_disk_is_an_error_and_leaves_nothing(world, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with raises(StorageError, "relay"):
        world.open()
    assert not list(world.path.parent.iterdir())


def test_any_number_may_open_it_at_once(folder):
    for turn in range(10):
        world, found = World(folder, name=f"relay-{turn}"), []
        threads = [threading.Thread(target=lambda w=world: found.append(w.open())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len({os.fstat(relay._file).st_ino for relay in found}) == 1 and len(found) == 8
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_many_that_open_it_at_once_reserve_its_memory_once(world, monkeypatch):
    reserve, reserved = os.posix_fallocate, []

    def slow(file, *given):
        reserved.append(given)
        time.sleep(0.1)
        reserve(file, *given)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    threads = [threading.Thread(target=world.open) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(reserved) == 1 and [path.name for path in world.path.parent.iterdir()] == ["relay"]


def test_a_process_that_never_ends_making_it_is_an_error(world, monkeypatch):
    monkeypatch.setattr(relay, "_locked", partial(relay._locked, limit=0.05))
    holder = os.open(world.path.parent, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with raises(StorageError, "relay"):
        world.open()
    os.close(holder)
    world.open()


def test_its_memory_is_two_versions(world):
    world.publish(weights(1), 1)
    whole = sum(t.nbytes for t in weights(1).values())
    assert world.open().nbytes == whole
    assert 2 * whole <= world.path.stat().st_size <= 2 * whole + 2 * 64 * (len(world.pieces) + 3) + 64 + 16 * 99
    assert world.path.stat().st_blocks * 512 >= 2 * whole


# ---- deaths ----

fork = multiprocessing.get_context("fork")


def dies_writing(world, number, at):
    """Kill this process before the given piece of a version."""
    relay, parts = world.open(), parts_of(weights(number), world.held, 0)

    def own():
        for place, (name, part) in enumerate(parts.items()):
            if place == at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield {name: part}

    relay.publish(own(), Publication(number, number), 0)


@pytest.mark.dist
@pytest.mark.parametrize("at", [0, 1, 9])
def test_a_writer_that_is_killed_leaves_the_version_before(world, at):
    for number in (1, 2):
        world.publish(weights(number), number)
    child = fork.Process(target=dies_writing, args=(world, 3, at))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    found, holder = world.pull()
    assert found.number == 2
    same(holder, weights(2))
    world.publish(weights(3), 4, version=3)
    found, holder = world.pull(have=found)
    assert found == Publication(4, 3)
    same(holder, weights(3))


def dies_reading(world):
    def killed(given, version):
        next(iter(given))
        os.kill(os.getpid(), signal.SIGKILL)

    holder = Holder()
    holder.receive = killed
    world.pull(into=holder)


@pytest.mark.dist
def test_a_reader_that_is_killed_disturbs_nobody(world):
    world.publish(weights(1), 1)
    child = fork.Process(target=dies_reading, args=(world,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    for number in (2, 3):
        world.publish(weights(number), number)
        same(world.pull()[1], weights(number))


SESSION = """
import os, signal, sys, torch
from pathlib import Path
from tests.roles.test_relay import World, weights
from tilth.cluster.backends.session_dir import SessionDir
session = SessionDir.create()
World(session.payload).publish(weights(1), 1)
print(session.payload / "relay", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.dist
def test_the_next_session_removes_the_relay_of_one_that_was_killed():
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    done = subprocess.run([*forked.python(), "-c", SESSION], env=env, capture_output=True, text=True, timeout=100)
    path = Path(done.stdout.strip())
    assert done.returncode == -signal.SIGKILL and path.is_file(), done.stderr
    SessionDir.create().remove()
    assert not path.exists()


def writes(world, count):
    for number in range(1, count + 1):
        world.publish({n: torch.full_like(t, number) for n, t in weights(0).items()}, number)


@pytest.mark.dist
def test_readers_beside_a_writer_see_whole_versions_in_order(world):
    writer, wrong, seen = fork.Process(target=writes, args=(world, 60)), [], [[], []]

    def reads(numbers):
        have, relay = None, world.open()
        while have is None or have.number < 60:
            holder = Holder()
            try:
                have = relay.pull(holder, world.wanted, 9, have)
            except WeightMismatch as error:  # versions come as fast as they can be written
                if error.key != "relay.torn":
                    wrong.append(error)
                    return
                continue
            found = {float(value) for tensor in holder.held.values() for value in tensor.unique()}
            if holder.held and found != {float(have.number)}:
                wrong.append((have, found))
            numbers += [have.number] if holder.held else []

    writer.start()
    readers = [threading.Thread(target=reads, args=(numbers,), daemon=True) for numbers in seen]
    for reader in readers:
        reader.start()
    for one in (writer, *readers):
        one.join(100)
    assert not wrong and writer.exitcode == 0
    assert all(numbers[-1] == 60 and numbers == sorted(set(numbers)) for numbers in seen)


def test_weights_that_a_receiver_has_for_good_are_compared_and_not_taken(world):
    """As with adapters, whose base an engine takes once."""
    world.publish(weights(1), 1)
    relay, taken, leaves = world.open(), [], weights(1).keys() - {NAME}
    have, holder = world.pull()
    receive = holder.receive

    def counted(given, version):
        receive(((taken.append(n) or n, t) for n, t in given), version)

    holder.receive = counted
    world.publish(weights(1) | {NAME: weights(2)[NAME]}, 2)
    have = relay.pull(holder, world.wanted, 9, have, leaves=leaves)
    assert have.number == 2 and taken == [NAME]
    same(holder, weights(1) | {NAME: weights(2)[NAME]})
    name = min(leaves)
    holder.held[name].view(-1)[0] += 1
    world.publish(weights(1), 3)
    with raises(WeightMismatch, name):
        relay.pull(holder, world.wanted, 9, have, leaves=leaves)


# ---- relays of other nodes ----


class Nodes:
    """Relays of the same weights on two nodes; the policy's ranks are on the first, or one on each."""

    def __init__(self, folder, source=ONE, spread=False, dtype=torch.bfloat16):
        self.each = [World(folder / name, source, ENGINE, dtype) for name in ("near", "far")]
        for world in self.each:
            world.path.parent.mkdir()
        self.spread = spread

    def publish(self, whole, number, since, keeps=()):
        """Write a version, bring it to the other node, or both ways; return its bytes on the way."""
        packed, publication = {}, Publication(number, 10 * number)
        for rank in self.each[0].open().writers:
            world = self.each[rank if self.spread else 0]
            world.publish(whole, number, 10 * number, ranks=[rank], keeps=keeps)
            packed[rank] = world.open().pack(publication, rank, since, keeps)
        for world in self.each if self.spread else self.each[1:]:
            world.open().unpack(publication, since, {rank: partial(packed.get, rank) for rank in packed})
        return sum(one.values.nbytes for one in packed.values())


def changed(whole, seed, share=0.01):
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.where(torch.rand(t.shape, generator=chance) < share, -t, t) for name, t in whole.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spread", [False, True])
def test_a_relay_of_another_node_has_the_same_bits_after_whole_versions_and_changes(folder, spread, dtype):
    nodes, whole = Nodes(folder, Mesh(("fsdp",), (2,)), spread, dtype), weights(0)
    size, since = nodes.each[0].open().nbytes, 0
    for number in (1, 2, 5, 6, 7):
        sent = nodes.publish(whole, number, since if number != 6 else 0)
        assert size < sent < 1.2 * size if number in (1, 6) else sent < 0.2 * size
        for world in nodes.each:
            found, holder = world.pull()
            assert found == Publication(number, 10 * number)
            same(holder, {name: tensor.to(dtype) for name, tensor in whole.items()})
        whole, since = changed(whole, number), number


def test_changes_of_another_version_than_the_newest_are_refused(folder):
    nodes, whole = Nodes(folder), weights(0)
    nodes.publish(whole, 1, 0)
    near, far = (world.open() for world in nodes.each)
    nodes.each[0].publish(changed(whole, 1), 2)
    with raises(WeightMismatch, "relay.since"):
        near.pack(Publication(2, 2), 0, 7)
    packed = near.pack(Publication(2, 2), 0, 1)
    nodes.each[0].publish(changed(whole, 2), 3)
    later = near.pack(Publication(3, 3), 0, 2)
    with raises(WeightMismatch, "relay.since"):
        far.unpack(Publication(3, 3), 2, {0: lambda: later})
    assert far.newest == Publication(1, 10)
    far.unpack(Publication(2, 2), 1, {0: lambda: packed})
    far.unpack(Publication(3, 3), 2, {0: lambda: later})
    same(nodes.each[1].pull()[1], {n: t.bfloat16() for n, t in changed(whole, 2).items()})


@pytest.mark.parametrize("spread", [False, True])
def test_names_that_are_kept_do_not_travel(folder, spread):
    """As the base of adapters, which a relay of another node must have."""
    nodes, whole = Nodes(folder, Mesh(("fsdp",), (2,)), spread), weights(0)
    keeps = whole.keys() - {NAME}
    nodes.publish(whole, 1, 0)
    for number, since in ((2, 0), (3, 2), (4, 3)):
        whole = {n: t if n in keeps else -t * number for n, t in whole.items()}
        assert 0 < nodes.publish({NAME: whole[NAME]}, number, since, keeps) < 0.3 * nodes.each[0].open().nbytes
        for world in nodes.each:
            same(world.pull()[1], {n: t.bfloat16() for n, t in whole.items()})
    fresh = World(folder, Mesh(("fsdp",), (2,)), ENGINE, torch.bfloat16, name="fresh").open()
    near = nodes.each[0].open()
    with raises(WeightMismatch, "relay.since"):
        fresh.unpack(Publication(4, 40), 0, {0: lambda: near.pack(Publication(4, 40), 0, 0, keeps)})


@pytest.mark.parametrize("at", [0, 20, -1])
def test_changes_that_arrive_damaged_are_a_named_error(folder, at):
    nodes, whole = Nodes(folder), weights(0)
    nodes.publish(whole, 1, 0)
    nodes.each[0].publish(changed(whole, 1), 2)
    near, far = (world.open() for world in nodes.each)
    packed = near.pack(Publication(2, 2), 0, 1)
    place = [piece.name for piece in near.pieces].index(NAME) + 1
    packed.row(place)[at] ^= 1
    with raises(WeightMismatch, NAME):
        far.unpack(Publication(2, 2), 1, {0: lambda: packed})
        nodes.each[1].pull()


def test_the_relays_of_two_nodes_have_ids_of_their_own(folder):
    nodes = Nodes(folder)
    near, far = ([world.open().id for _ in range(2)] for world in nodes.each)
    assert near[0] == near[1] != far[0] == far[1]
