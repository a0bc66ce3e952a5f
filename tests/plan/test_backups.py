"""Placement of backups: whatever is evicted, a copy is left."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import ArgumentError
from tilth.core.layout import Mesh
from tilth.plan.backups import backup_ranks, peers

AXES = ("pp", "dp", "fsdp", "ep", "cp", "tp")


def groups(mesh):
    return [group for name in mesh.names if mesh.size(name) > 1 for group in mesh.groups(name)]


def copies(peers, evicted):
    """Owners of whose state no copy is left."""
    return [owner for owner, peer in peers.items() if owner in evicted and peer in evicted]


def machines_of(mesh, each):
    return {rank: place // each for place, rank in enumerate(mesh.ranks)}


def test_the_published_example():
    mesh = Mesh.of({"tp": 2, "pp": 4, "dp": 2})  # ranks 8, 9 and 2, 3 of the paper, in its order tp-dp-pp
    peers = backup_ranks(mesh, machines_of(mesh, 2))
    assert [peers[rank] for rank in (8, 9, 2, 3)] == [2, 3, 8, 9]


@settings(max_examples=examples(60), deadline=None)
@given(st.tuples(*(st.integers(1, 4) for _ in AXES)).filter(lambda s: 1 < s.count(1) < 5), st.data())
def test_evicting_any_group_leaves_a_copy_of_every_shard(sizes, data):
    mesh = Mesh.of(dict(zip(AXES, sizes)))
    inner = [n for n in range(1, len(mesh) // 2 + 1) if len(mesh) % n == 0]
    machines = machines_of(mesh, data.draw(st.sampled_from(inner)))
    peers = backup_ranks(mesh, machines)
    assert sorted(peers.values()) == sorted(mesh.ranks)
    assert all(machines[owner] != machines[peer] for owner, peer in peers.items())
    if not any(copies(peers, set(group)) for group in groups(mesh)):
        return
    # no placement could do better: some rank has no peer elsewhere that shares no group, or they cannot be matched
    from networkx import Graph, bipartite

    graph, shared = Graph(), {rank: {r for g in groups(mesh) if rank in g for r in g} for rank in mesh.ranks}
    graph.add_nodes_from([("o", rank) for rank in mesh.ranks])
    graph.add_edges_from(
        (("o", rank), ("p", peer))
        for rank in mesh.ranks
        for peer in mesh.ranks
        if machines[rank] != machines[peer] and peer not in shared[rank]
    )
    assert len(bipartite.maximum_matching(graph, [("o", rank) for rank in mesh.ranks])) // 2 < len(mesh)


@pytest.mark.parametrize(
    "sizes", [{"pp": 4, "dp": 4, "tp": 8}, {"pp": 3, "fsdp": 5, "tp": 4}, {"dp": 2, "pp": 2, "tp": 2}]
)
def test_all_machines_of_a_group_can_be_evicted(sizes):
    mesh = Mesh.of(sizes)
    machines = machines_of(mesh, sizes["tp"])
    peers = backup_ranks(mesh, machines)
    for group in groups(mesh):
        touched = {machines[rank] for rank in group}
        assert not copies(peers, {rank for rank in mesh.ranks if machines[rank] in touched})


def test_a_mesh_of_one_axis_has_its_neighbour_machine_and_loses_no_machine():
    mesh = Mesh.of({"fsdp": 12})
    machines = machines_of(mesh, 4)
    peers = backup_ranks(mesh, machines)
    for machine in range(3):
        assert not copies(peers, {rank for rank in mesh.ranks if machines[rank] == machine})


def test_backups_on_the_same_machine_would_be_seen():
    mesh = Mesh.of({"dp": 2, "tp": 2})
    assert copies({0: 1, 1: 0, 2: 3, 3: 2}, set(mesh.groups("tp")[0]))


def test_irregular_machines_are_matched():
    mesh = Mesh.of({"dp": 3, "tp": 2})
    peers = backup_ranks(mesh, dict(zip(range(6), (0, 0, 0, 1, 1, 1))))
    assert not any(copies(peers, set(group)) for group in groups(mesh))


def test_one_machine_and_a_rank_without_one():
    with raises(ArgumentError, "machines"):
        backup_ranks(Mesh.of({"dp": 4}), dict.fromkeys(range(4), 0))
    with raises(ArgumentError, "machines"):
        backup_ranks(Mesh.of({"dp": 4}), {0: 1})


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 8))
def test_each_rank_has_a_peer_on_another_machine_if_there_is_one(where, own):
    mesh, machines = Mesh.of({"dp": min(own, len(where))}), dict(enumerate(where))
    found = peers(mesh, machines)
    assert set(found) == {rank for rank in mesh.ranks if len(set(where)) > 1}
    assert all(machines[rank] != machines[peer] for rank, peer in found.items())


def test_even_machines_are_paired_as_before():
    mesh = Mesh.of({"dp": 2, "tp": 2})
    machines = machines_of(mesh, 2)
    assert peers(mesh, machines) == backup_ranks(mesh, machines)
