"""Snapshots of several nodes: which state is left when one is lost, and that it is whole."""

import shutil

import pytest

from tests.checkpoint.make import group_of
from tests.checkpoint.saving import layouts, whole
from tilth.checkpoint.saver import MemorySaver
from tilth.cluster.backends.base import Copied
from tilth.cluster.backends.ray_actors import Scratch
from tilth.core.errors import CheckpointError, StorageError
from tilth.core.layout import Mesh
from tilth.guard.snapshots import Snapshots
from tilth.roles.state import StateCopy

RANKS = 4
MESH = Mesh.of({"fsdp": RANKS})


class Nodes:
    """Folders of nodes, two ranks each, and one of the controller: copies happen in ``wait``."""

    def __init__(self, root):
        self.of = {rank: rank // 2 for rank in range(RANKS)}
        self.scratch = {home: Scratch(root / str(home)) for home in (0, 1, "controller")}
        for one in self.scratch.values():
            one.folder.mkdir()
        self.there, self.begun, self.mirrored = {}, {}, {}

    def node(self, rank):
        return self.of[rank]

    def begin(self, files, mirrored):
        self.begun = {name: (self.of[owner], self.of[peer]) for name, (owner, peer) in files.items()}
        self.mirrored = {folder: self.of[rank] for folder, rank in mirrored.items()}
        self.there |= {name: {source} for name, (source, _) in self.begun.items()}

    def holders(self):
        return {name: sorted(map(str, homes)) for name, homes in self.there.items()}

    def resume(self, holders):
        names = {str(home): home for home in self.scratch}
        self.there = {name: {names[home] for home in homes if home in names} for name, homes in holders.items()}

    def wait(self):
        nbytes, problem = 0, ""
        for name, (source, target) in self.begun.items():
            if source in self.scratch and target in self.scratch:
                nbytes += self.scratch[target].copy(name, self.scratch[source].read)
                self.there[name].add(target)
            else:
                problem = "a node is lost"
        self.begun = {}
        for folder, source in self.mirrored.items():
            if source in self.scratch:
                self._mirror(folder, source, "controller")
        return Copied(nbytes, 0.0, problem)

    def gather(self, files):
        for name in files:
            have = self.there[name] & self.scratch.keys()
            if not have:
                raise StorageError(name, key="snapshot")
            for home in self.scratch.keys() - have:
                self.scratch[home].copy(name, self.scratch[min(have, key=str)].read)
                self.there[name].add(home)

    def scatter(self, folder, ranks):
        for rank in ranks:
            self._mirror(folder, "controller", self.of[rank])

    def _mirror(self, folder, source, target):
        there = self.scratch[source]
        self.scratch[target].follow(folder, there.listing(folder), there.read)

    def share(self, folder, files, links):
        for home in self.scratch.keys() - {"controller"}:
            self.scratch[home].make(folder, files, links)

    def remove(self, folder):
        for home in self.scratch.keys() - {"controller"}:
            self.scratch[home].remove(folder)

    def lose(self, home, new="new"):
        """Lose a node; its ranks go to a new one."""
        shutil.rmtree(self.scratch.pop(home).folder)
        self.scratch[new] = Scratch(self.scratch["controller"].folder.parent / new)
        self.scratch[new].folder.mkdir()
        self.of = {rank: new if node == home else node for rank, node in self.of.items()}


class Role:
    mesh = MESH

    def __init__(self, nodes):
        self.nodes, self.step = nodes, 0
        self.savers = [MemorySaver() for _ in range(RANKS)]

    def mark(self, step):
        pass

    def snapshot(self, folder, slot):
        groups = [{"policy": group_of(whole(self.step), layouts(RANKS), rank)} for rank in range(RANKS)]
        places = [self.nodes.scratch[self.nodes.node(rank)].folder for rank in range(RANKS)]
        found = [self.savers[r].take(places[r], slot, groups[r], r, f"{r:05d}") for r in range(RANKS)]
        return [StateCopy(reports, {}) for reports in found]


@pytest.fixture
def job(tmp_path):
    """(nodes, snapshots of three steps)."""
    nodes = Nodes(tmp_path)
    snapshots, role = Snapshots(nodes.scratch["controller"].folder, nodes, RANKS, writer=3), Role(nodes)
    for role.step in (1, 2, 3):
        rows = {f"step-{step:06d}.arrow": bytes([step]) for step in range(1, role.step + 1)}
        nodes.scratch[1].make("trajectories", rows, {})
        snapshots.take({"policy": role}, role.step, {"progress": {"step": role.step}}, MESH)
    return nodes, snapshots, role


def assert_restored(nodes, snapshots, step):
    found = snapshots.newest()
    assert found.step == step
    found.verify()
    for home, one in nodes.scratch.items():
        names = {path.name: path.read_bytes() for path in (one.folder / "restored" / f"step-{step:06d}").iterdir()}
        expected = {path.name: path.read_bytes() for path in found.path.iterdir()}
        assert names == expected, home
    for name, value in whole(step).items():
        assert found.read("policy", name).numpy().tobytes() == value.numpy().tobytes()


@pytest.mark.parametrize("home", [0, 1])
def test_a_node_that_is_lost_once_its_copies_are_there_costs_no_step(job, home):
    nodes, snapshots, _ = job
    nodes.wait()
    nodes.lose(home)
    assert_restored(nodes, snapshots, 3)
    rows = nodes.scratch[nodes.of[3]].listing("trajectories")
    assert list(rows) == [f"step-{step:06d}.arrow" for step in (1, 2, 3)]
    role = Role(nodes)  # roles are made again, and the run goes on
    role.step = 4
    snapshots.take({"policy": role}, 4, {"progress": {"step": 4}}, MESH)
    assert not any((one.folder / "restored").exists() for one in nodes.scratch.values())
    assert_restored(nodes, snapshots, 4)


def inherited(nodes, snapshots):
    """The nodes and snapshots of the next controller: what it knows is in the folder of its own node."""
    after = Nodes.__new__(Nodes)
    after.of, after.scratch, after.there, after.begun, after.mirrored = nodes.of, nodes.scratch, {}, {}, {}
    return after, Snapshots(snapshots.folder, after, RANKS, writer=3)


def test_the_next_controller_goes_on_with_what_all_nodes_have(job):
    nodes, snapshots, _ = job
    shutil.rmtree(nodes.scratch["controller"].folder / "trajectories")
    after, found = inherited(nodes, snapshots)
    assert_restored(after, found, 3)
    assert len(after.scratch["controller"].listing("trajectories")) == 3
    role = Role(after)
    role.step = 4
    found.take({"policy": role}, 4, {"progress": {"step": 4}}, MESH)
    assert_restored(*inherited(after, found), 4)


def test_a_controller_and_a_node_lost_together_cost_one_more(job):
    nodes, snapshots, _ = job
    nodes.lose(1)
    assert_restored(*inherited(nodes, snapshots), 2)
    assert len(nodes.scratch["new"].listing("trajectories")) >= 2  # of the copy on the controller's node


def test_a_node_that_is_lost_before_costs_one_more(job):
    nodes, snapshots, _ = job
    nodes.lose(1)
    assert_restored(nodes, snapshots, 2)


def test_a_second_node_that_is_lost_while_the_first_is_replaced_costs_no_step(job):
    nodes, snapshots, _ = job
    nodes.wait()
    nodes.lose(0)
    assert_restored(nodes, snapshots, 3)
    nodes.lose(1, "newer")
    assert_restored(nodes, snapshots, 3)


def test_both_copies_lost_leave_the_disk(job):
    nodes, snapshots, _ = job
    nodes.wait()
    nodes.lose(0)
    shutil.rmtree(nodes.scratch.pop(1).folder)
    nodes.of = dict.fromkeys(range(RANKS), "new")
    assert snapshots.newest() is None


def test_a_copy_that_was_damaged_is_no_state(job):
    nodes, snapshots, _ = job
    nodes.wait()
    for path in nodes.scratch[0].folder.glob("slot-0/policy.0000[23]*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    nodes.lose(1)
    with pytest.raises(CheckpointError):
        snapshots.newest().verify()
    snapshots.discard()
    assert_restored(nodes, snapshots, 2)


def test_a_peer_is_on_another_node(job):
    nodes, snapshots, role = job
    begun = {}
    nodes.begin = lambda files, mirrored: begun.update(files)
    role.step = 4
    snapshots.take({"policy": role}, 4, {}, MESH)
    assert len(begun) == RANKS and all(nodes.of[owner] != nodes.of[peer] for owner, peer in begun.values())
