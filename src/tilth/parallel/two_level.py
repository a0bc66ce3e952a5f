"""Sums of gradients in two levels: 8 bits a value within a node, 4 bits between nodes (SDP4Bit, arXiv 2410.15526).

Of P = S N ranks, S neighbours are a node. For the part of rank (n', l'), rank (n, l) sends 8-bit codes to (n, l'),
which adds up those of its node and sends a 4-bit code of the sum to (n', l'): each value is rounded twice, however many
ranks there are. Values are rounded after a Hadamard transform H of blocks of 32, which spreads outliers; it is linear,
so it is undone once, in the sum, by H H = 32.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilth.config.open_sets import WEIGHT_CODES
from tilth.config.roles import resolve
from tilth.config.schema import CommConfig
from tilth.parallel.comm import Group
from tilth.parallel.compress import Compressor, Dither, compressor_of
from tilth.parallel.local import local_method
from tilth.parallel.quantise import BLOCK, transform
from tilth.parallel.reducer import End, GradientReducer, Pieces, split
from tilth.parallel.sync import Arrivals, Coder, CompressedReducer, exchanged


class TwoLevels:
    """Codes of both levels, without bias and without a residual."""

    def __init__(self, *, smooth: bool = True, group: int = 128) -> None:
        """smooth: transform blocks of 32; group: values with one scale."""
        self.smooth, self.within, self.across = smooth, Dither(bits=8, group=group), Dither(bits=4, group=group)


class TwoLevelReducer(CompressedReducer):
    """Sums of gradients within nodes, then between them."""

    def __init__(
        self,
        levels: TwoLevels,
        *,
        node_size: int,
        weights: Compressor | None = None,
        smallest: int = 65_536,
        seed: int = 0,
    ) -> None:
        """node_size: neighbouring data ranks of a node; other arguments: as of ``CompressedReducer``."""
        super().__init__(None, weights=weights, smallest=smallest, seed=seed)
        self.node_size, self.smooth = node_size, levels.smooth
        self._within = Coder(levels.within, seed, "within", feedback=False)
        self._across = Coder(levels.across, seed, "across", feedback=False)
        self._last = dict[str, tuple[Coder, range]]()
        """Key of a sum -> how its codes were made, and the ranks of the group that get them."""

    @property
    def _coders(self) -> list[Coder]:
        return [*super()._coders, self._within, self._across]

    @torch.no_grad()
    def code(self, whole: Tensor, group: Group, key: str, pieces: Pieces) -> None:
        rows, ranks, place = whole.view(len(pieces), -1), len(pieces), group.rank()
        size = math.gcd(self.node_size, ranks)  # a group may be a part of the data ranks
        node, local = divmod(place, size)
        self._transform(rows, pieces, 1.0)
        last = (self._within, range(ranks)) if size == ranks else (self._across, range(local, ranks, size))
        if 1 < size < ranks:
            found = self._summed_in_node(rows, group, pieces, range(node * size, node * size + size))
            rows.zero_()
            rows[local::size] = found
        coder, owners = self._last[key] = last
        own, given = [pieces[owner] for owner in owners], rows[owners.start :: owners.step]
        self._sent[key] = pieces, coder.pack(given, own, owners, place)
        self._transform(given, own, 1 / BLOCK)

    def _summed_in_node(self, rows: Tensor, group: Group, pieces: Pieces, node: range) -> Tensor:
        """Return the sums over a node of the rows for this rank and its counterparts on other nodes: [nodes, n]."""
        place, size, ranks = group.rank(), len(node), range(len(rows))
        codes = self._within.pack(rows, pieces, ranks, place, change=False)
        arrivals = exchanged([torch.cat(codes[local::size]) for local in range(size)], self._part(group, node))
        owners = ranks[place % size :: size]
        own = [pieces[owner] for owner in owners]
        lengths = [self._within.length(one, rows.dtype) for one in own]
        found = torch.zeros_like(rows[: len(owners)])
        arrived = [(node[sender], code) for sender, every in arrivals() for code in every.split(lengths)]
        senders, received = [sender for sender, _ in arrived], [code for _, code in arrived]
        self._within.unpack([*found] * size, received, own * size, [*owners] * size, senders)
        return found

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group, key: str) -> End:
        if key not in self._sent:  # of gradients that are never coded
            return super().reduce_scatter(out, whole, group, key)
        (pieces, codes), (coder, ranks), place = self._sent.pop(key), self._last.pop(key), group.rank()
        arrivals = exchanged(codes, self._part(group, ranks))
        return partial(self._unpack, coder, out, arrivals, ranks, pieces, place)

    @torch.no_grad()
    def _unpack(
        self, coder: Coder, out: Tensor, arrivals: Arrivals, senders: Sequence[int], pieces: Pieces, owner: int
    ) -> None:
        super()._unpack(coder, out, arrivals, senders, pieces, owner)
        self._transform(out[None], [pieces[owner]], 1 / BLOCK)

    def _part(self, group: Group, ranks: range) -> Group:
        """Return the group of these ranks of a group."""
        world = dist.get_process_group_ranks(group)
        found = group if len(ranks) == len(world) else self._grid.group_of(tuple(world[rank] for rank in ranks))
        assert found is not None  # several ranks
        return found

    def _transform(self, rows: Tensor, pieces: Pieces, factor: float) -> None:
        """Transform each block of the pieces that are compressed, in place; the last values of a piece stay."""
        every = [one for row, own in zip(rows, pieces) for one in split(row, own)] if self.smooth else []
        transform([part for part, piece in every if piece.name in self._within.names], factor)


def reducer_of(comm: CommConfig, seed: int) -> GradientReducer:
    """Return what sums gradients by the keys of ``policy.comm``. RecipeError, PluginError: see ``compressor_of``."""
    made = _made(comm, seed)
    made.bucket_bytes = comm.bucket_bytes
    return made


def _made(comm: CommConfig, seed: int) -> GradientReducer:
    if comm.exact:
        return GradientReducer()
    if comm.local != "none":
        return local_method(comm, seed)
    weights = None if comm.weights == "exact" else resolve(WEIGHT_CODES[comm.weights])()
    how: dict[str, Any] = {"weights": weights, "smallest": comm.smallest, "seed": seed}
    made = None if comm.gradients == "exact" else compressor_of(comm.gradients, comm.options)
    if isinstance(made, TwoLevels):
        return TwoLevelReducer(made, node_size=comm.node_size, **how)
    return CompressedReducer(made, feedback=comm.residual, two_way=comm.two_way, **how)
