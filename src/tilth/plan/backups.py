"""Peers that hold copies of each rank's state, so that no eviction takes every copy (ByteRobust, arXiv 2509.16293,
section 6)."""

import itertools
from collections import Counter
from collections.abc import Mapping

import numpy as np

from tilth.core.errors import ArgumentError
from tilth.core.layout import Mesh


def backup_ranks(mesh: Mesh, machines: Mapping[int, int]) -> dict[int, int]:
    """Return, for each rank of a mesh, the rank that holds a copy of its state. Each rank holds the copy of one other.

    machines: rank -> its machine. The peer is on another machine. The first of these that every rank can have:

    1. No parallel group touches both machines: all machines of any one group can be evicted.
    2. Owner and peer share no parallel group: all ranks of any one group can be lost.
    3. Neither, as in a mesh of one axis: a machine can be lost.

    ArgumentError if a machine has more than half of the ranks.
    """
    if missing := [rank for rank in mesh.ranks if rank not in machines]:
        raise ArgumentError(f"rank {missing[0]} has no machine", key="machines")
    _, where = np.unique([machines[rank] for rank in mesh.ranks], return_inverse=True)
    if 2 * np.bincount(where).max() > len(mesh):
        message = "a machine has more than half of the ranks, so not all of them have a peer elsewhere"
        raise ArgumentError(message, key="machines")
    together, shared = _groups(mesh, where)
    elsewhere = where[:, None] != where[None, :]
    for allowed in (~together[where][:, where], elsewhere & ~shared, elsewhere):
        found = _shift(mesh, allowed) or _matching(allowed)
        if found is not None:
            return {mesh.ranks[place]: mesh.ranks[peer] for place, peer in enumerate(found)}
    raise AssertionError("ranks of machines that have at most half of them can be matched")


def peers(mesh: Mesh, machines: Mapping[int, int]) -> dict[int, int]:
    """Return, for each rank of a mesh, the rank to whose machine a copy of its state goes; {} on one machine.

    machines: rank -> its machine, of all workers. As ``backup_ranks`` decides; where it cannot, since a machine has
    most of the ranks, the workers of other machines get copies in turn.
    """
    own = {rank: machines[rank] for rank in mesh.ranks}
    if 2 * max(Counter(own.values()).values()) <= len(mesh):
        return backup_ranks(mesh, own)
    found = {}
    for turn, rank in enumerate(mesh.ranks):
        if others := [other for other in sorted(machines) if machines[other] != own[rank]]:
            found[rank] = others[turn % len(others)]
    return found


def _groups(mesh: Mesh, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which machines, and which places of the mesh, are in one parallel group."""
    count = int(where.max()) + 1
    together, shared = np.eye(count, dtype=bool), np.eye(len(mesh), dtype=bool)
    place = {rank: i for i, rank in enumerate(mesh.ranks)}
    for name in mesh.names:
        if mesh.size(name) == 1:
            continue
        for group in mesh.groups(name):
            members = np.array([place[rank] for rank in group])
            touched = np.unique(where[members])
            shared[np.ix_(members, members)] = True
            together[np.ix_(touched, touched)] = True
    return together, shared


def _shift(mesh: Mesh, allowed: np.ndarray) -> list[int] | None:
    """Return peers at one distance in the mesh from their owners, half an axis first; None if no distance will do."""
    grid = np.arange(len(mesh)).reshape(mesh.sizes)
    choices = [sorted({0, size // 2, 1 % size, size - 1}, key=lambda s: (s == 0, s)) for size in mesh.sizes]
    halves = [[0, size // 2] for size in mesh.sizes]
    for shift in itertools.chain(itertools.product(*halves), itertools.product(*choices)):
        peers = np.roll(grid, [-s for s in shift], axis=tuple(range(len(shift)))).ravel()
        if allowed[grid.ravel(), peers].all():
            found: list[int] = peers.tolist()
            return found
    return None


def _matching(allowed: np.ndarray) -> list[int] | None:
    """Match each owner with a peer of its own by augmenting paths; None if they cannot all be matched."""
    count = len(allowed)
    owner_of = [-1] * count
    for first in range(count):
        came: dict[int, int] = {}
        queue, free = [first], -1
        while queue and free < 0:
            owner = queue.pop()
            for peer in np.flatnonzero(allowed[owner]).tolist():
                if peer in came:
                    continue
                came[peer] = owner
                if owner_of[peer] < 0:
                    free = peer
                    break
                queue.append(owner_of[peer])
        if free < 0:
            return None
        while free >= 0:  # turn the path around
            owner = came[free]
            before = next((peer for peer in range(count) if owner_of[peer] == owner), -1)
            owner_of[free], free = owner, before
    found = [0] * count
    for peer, owner in enumerate(owner_of):
        found[owner] = peer
    return found
