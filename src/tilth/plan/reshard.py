"""Resharding of weights: which rank sends which box of which parameter to whom, as a pure function of layouts.

Training has p x t x d ranks (pipeline, tensor, data), generation p_g x t_g of each replica's p x t, so that a training
replica becomes p t / (p_g t_g) generation replicas, its micro-DP group. Generation groups are those of HybridFlow's
3D-HybridEngine (arXiv 2409.19256, section 5.3): they pick ranks at a stride, and then each rank's training shard is a
part of its generation shard, so that only the rest of it has to arrive.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from tilth.core.errors import ArgumentError
from tilth.core.layout import Box, Layout, Mesh, Shard

# ---- generation groups ----


class GenerationPlace(NamedTuple):
    """Coordinates of a rank in generation: its pipeline stage, replica of training, place in it, and tensor shard."""

    pp: int
    dp: int
    micro_dp: int
    tp: int


def generation_place(mesh: Mesh, rank: int, pp: int, tp: int) -> GenerationPlace:
    """Return where a rank of a training mesh generates, if each replica becomes engines of pp x tp ranks.

    gen_pp = i div (p / p_g), gen_tp = j div (t / t_g), micro_dp = (i mod p / p_g) (t / t_g) + j mod t / t_g, dp as in
    training. Shards along fsdp lie inside of those along tp and count as finer ones: j runs over both. ArgumentError
    unless p_g divides p and t_g divides t.
    """
    stages, parts = mesh.count("layers"), mesh.size("tp", *mesh.shards)
    if stages % pp or parts % tp:
        raise ArgumentError(
            f"{stages} stages x {parts} shards in training do not become engines of {pp} x {tp} ranks: both divide",
            key="tp" if parts % tp else "pp",
        )
    i, stride, inner = mesh.index(rank, *mesh.over("layers")), stages // pp, parts // tp
    j = mesh.coordinate("tp", rank) * mesh.size(*mesh.shards) + mesh.index(rank, *mesh.shards)
    micro = (i % stride) * inner + j % inner
    return GenerationPlace(i // stride, mesh.index(rank, *mesh.copies), micro, j // inner)


def generation_ranks(mesh: Mesh, pp: int = 1, tp: int = 1) -> tuple[int, ...]:
    """Return the ranks of a training mesh in the order of its generation mesh, row-major over pp, dp, tp.

    Engines of one rank have the mesh's own order. So have those that do not divide the shards of training, since no
    order keeps all shards.
    """
    if pp * tp == 1 or mesh.count("layers") % pp or mesh.size("tp", *mesh.shards) % tp:
        return mesh.ranks
    return tuple(sorted(mesh.ranks, key=lambda rank: generation_place(mesh, rank, pp, tp)))


# ---- moves ----


class Move(NamedTuple):
    """A box of a parameter, in its global index space, that ``target`` needs and takes from ``source``."""

    name: str
    box: Box
    source: int
    target: int
    hop: int = 0
    """0: the source holds it in the source layout. 1: it has got it in hop 0, and forwards it."""

    @property
    def local(self) -> bool:
        """True if the rank has what it needs."""
        return self.source == self.target


@dataclass(frozen=True)
class ReshardPlan:
    """Moves among ``ranks``, which exchange weights with nobody else."""

    ranks: tuple[int, ...]
    moves: tuple[Move, ...]

    @classmethod
    def of(
        cls, rank: int, source: Mesh, held: Mapping[str, Layout], target: Mesh, wanted: Mapping[str, Layout]
    ) -> "ReshardPlan":
        """Return the plan of the ranks around ``rank``; all of them get the same one.

        held: parameter -> layout over ``source`` or over some of its ranks (a pipeline stage); wanted: over ``target``.
        A target takes what it does not have from one replica of the source: its own, and ranks without a part of the
        source take turns. If more of these want a box than ranks hold it, each gets a slice, which it forwards to the
        others, so that no holder sends a box more than once. ArgumentError if no rank has an element that is wanted.
        """
        replica = _replicas(source, target)[rank]
        found = tuple(
            move
            for name, layout in wanted.items()
            for move in _moves(name, held[name], layout, replica.givers, replica.takers)
        )
        joined = _component(rank, [move for move in found if not move.local])
        return cls(joined, tuple(move for move in found if move.target in joined))

    def sent(self, rank: int, names: Sequence[str] | None = None, hop: int | None = None) -> list[Move]:
        """Return what a rank sends to others, in the order of ``ranks``; of all parameters and hops unless given."""
        return sorted((m for m in self._traveling(names, hop) if m.source == rank), key=lambda m: m.target)

    def received(self, rank: int, names: Sequence[str] | None = None, hop: int | None = None) -> list[Move]:
        """Return what a rank gets from others, in the order of ``ranks``."""
        return sorted((m for m in self._traveling(names, hop) if m.target == rank), key=lambda m: m.source)

    def kept(self, rank: int, names: Sequence[str] | None = None) -> Iterator[Move]:
        """Iterate over what a rank needs and has."""
        return (move for move in self._of(names) if move.target == rank and move.local)

    def hops(self, names: Sequence[str] | None = None) -> list[int]:
        """Return the hops in which any rank sends something of these parameters to another one."""
        return sorted({move.hop for move in self._traveling(names, None)})

    def elements(self, rank: int) -> int:
        """Count the elements that a rank gets from others."""
        return sum(move.box.numel for move in self.received(rank))

    def _traveling(self, names: Sequence[str] | None, hop: int | None) -> Iterator[Move]:
        return (move for move in self._of(names) if not move.local and hop in (None, move.hop))

    def _of(self, names: Sequence[str] | None) -> Iterator[Move]:
        chosen = self._by_name if names is None else names
        return (move for name in chosen for move in self._by_name.get(name, ()))

    @cached_property
    def _by_name(self) -> dict[str, list[Move]]:
        found: dict[str, list[Move]] = {}
        for move in self.moves:
            found.setdefault(move.name, []).append(move)
        return found


class _Replica(NamedTuple):
    """Ranks of one replica of the source, which together hold the whole model, and those that take it from there."""

    givers: tuple[int, ...]
    takers: tuple[int, ...]


@lru_cache(maxsize=8)
def _replicas(source: Mesh, target: Mesh) -> dict[int, _Replica]:
    """Return the replica that each rank belongs to; ranks without a part of the source take turns, in neighbours."""
    inside, needing = set(source.ranks), set(target.ranks)
    givers: dict[int, list[int]] = {}
    for rank in source.ranks:
        givers.setdefault(source.index(rank, *source.copies), []).append(rank)
    takers = {index: [rank for rank in found if rank in needing] for index, found in givers.items()}
    strangers = [rank for rank in target.ranks if rank not in inside]
    for place, rank in enumerate(strangers):
        takers[place * len(givers) // len(strangers)].append(rank)
    found = (_Replica(tuple(givers[index]), tuple(takers[index])) for index in givers)
    return {rank: replica for replica in found for rank in (*replica.givers, *replica.takers)}


def _tiles(held: Layout, givers: Sequence[int]) -> dict[Box, list[int]]:
    """Return box -> the ranks that hold it."""
    tiles: dict[Box, list[int]] = {}
    for giver in givers:
        for box in held.boxes(giver):
            tiles.setdefault(box, []).append(giver)
    return tiles


def _moves(name: str, held: Layout, wanted: Layout, givers: Sequence[int], takers: Sequence[int]) -> Iterator[Move]:
    """Yield the moves of one parameter within one replica of the source."""
    tiles = _tiles(held, givers)
    holders = len({giver for who in tiles.values() for giver in who})
    teams: dict[Box, list[int]] = {}
    for taker in takers:
        for box in wanted.boxes(taker) if taker not in givers else ():
            teams.setdefault(box, []).append(taker)
    for place, taker in enumerate(takers):
        for box in wanted.boxes(taker):
            team = teams.get(box, []) if taker not in givers else []
            if len(team) <= holders:
                yield from _taken(name, box, tiles, taker, place)
                continue
            for i, other in enumerate(team):
                (part,) = Shard(0).piece(box, i, len(team))
                if part.numel and other != taker:
                    yield Move(name, part, other, taker, hop=1)
                elif part.numel:
                    yield from _taken(name, part, tiles, taker, place)


def _taken(name: str, box: Box, tiles: Mapping[Box, Sequence[int]], taker: int, place: int) -> Iterator[Move]:
    """Yield the moves of one box from those who hold its tiles; place: of the taker among others, who share holders."""
    pieces = [(common, who) for tile, who in tiles.items() if (common := tile.intersect(box)) is not None]
    if sum(common.numel for common, _ in pieces) != box.numel:
        raise ArgumentError(f"{name}: no ranks hold {box}, each element once", key=name)
    for common, who in pieces:
        yield Move(name, common, taker if taker in who else who[place % len(who)], taker)


def _component(rank: int, moves: Sequence[Move]) -> tuple[int, ...]:
    """Return the ranks that exchange anything with this one, directly or through others, in ascending order."""
    near: dict[int, set[int]] = {}
    for move in moves:
        near.setdefault(move.source, set()).add(move.target)
        near.setdefault(move.target, set()).add(move.source)
    found, fresh = {rank}, {rank}
    while fresh:
        fresh = {other for one in fresh for other in near.get(one, ())} - found
        found |= fresh
    return tuple(sorted(found))


# ---- relays ----


class RelayPiece(NamedTuple):
    """A box of a parameter, in its global index space, that one rank of the source writes into a relay."""

    name: str
    box: Box
    writer: int


def relay_pieces(source: Mesh, held: Mapping[str, Layout], wanted: Mapping[str, Layout]) -> tuple[RelayPiece, ...]:
    """Return what a relay between these layouts holds: every box that some target wants once, cut as the ranks of the
    first replica of the source hold it. These take turns where several have the same.

    Targets then find each box that they want as pieces, none of which reaches beyond it. ArgumentError if no rank has
    an element that is wanted.
    """
    givers = [rank for rank in source.ranks if source.index(rank, *source.copies) == 0]
    found: list[RelayPiece] = []
    for name, layout in wanted.items():
        tiles = _tiles(held[name], givers)
        boxes = dict.fromkeys(box for rank in layout.mesh.ranks for box in layout.boxes(rank) if box.numel)
        for box in boxes:
            moves = _taken(name, box, tiles, -1, len(found))
            found += [RelayPiece(name, move.box, move.source) for move in moves]
    return tuple(found)
