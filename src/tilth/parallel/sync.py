"""Compressed sums of gradients with error feedback (BytePS-Compress, arXiv 2105.07829).

Each rank sums a part of the gradients. For the part of rank r, rank i sends d_i = C(g_i + e_i) and keeps the residual
e_i' = g_i + e_i - d_i; rank r has s = sum_i d_i. Copies then gather all s, or with two ways D = C(s + E), and rank r
keeps E' = s + E - D. So over steps the sums of what was applied, of all e and of E are those of the gradients: nothing
is lost. Every rank applies the same bytes, the one that sent them too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache, partial
from itertools import groupby, islice
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tilth.core.errors import PluginError
from tilth.core.layout import Layout, Placement, Shard
from tilth.core.random import Stream, stream
from tilth.parallel.comm import Group, all_gather, all_to_all, reduce_scatter
from tilth.parallel.compress import Batched, Compressor, Dither
from tilth.parallel.dims import ParallelDims
from tilth.parallel.quantise import BLOCK, transform
from tilth.parallel.reducer import BUCKET, End, GradientPiece, GradientReducer, Pieces, split
from tilth.plan.layout import copied_along, is_coded
from tilth.plan.rules import Table, rule_of

GIVEN, SUMS, WEIGHTS = "residual.", "sum_residual.", "weight_residual."
"""Prefixes of tensors of the state: what this rank left out of its gradients, and of sums and updates that it sent."""
Arrivals = Callable[[], Iterable[tuple[int, Tensor]]]
"""Waits for codes that are on their way: senders and codes."""


class CodeForm(NamedTuple):
    """Elements and dtype of the codes of so many values, and the factor on what they stand for."""

    length: int
    dtype: torch.dtype
    factor: float


class CodedRuns(NamedTuple):
    """Neighbouring pieces of a row that are coded, or travel as they are, and their codes."""

    runs: Sequence[tuple[bool, slice, slice]]
    """True if they are coded; their elements; their part of all codes, or of its own length."""
    counts: Sequence[int]
    """Elements of each piece that is coded."""
    length: int
    """Length of all codes."""


def _few(row: Tensor, count: int) -> Iterator[slice]:
    """Yield slices of rows that are coded at once, of ``BUCKET`` bytes: fewer calls, and little memory beside them."""
    several = max(1, BUCKET // max(row.nbytes, 1))
    return (slice(at, at + several) for at in range(0, count, several))


class Coder:
    """Codes of rows of pieces: 0, or NaN if an element is not finite, then one piece after the other.

    They are bytes, or of a compressor whose codes are summed elements of the row's dtype.
    """

    def __init__(self, compressor: Compressor, seed: int, way: str, *, feedback: bool, shrinks: bool = True) -> None:
        """way: names random numbers and residuals. shrinks: with feedback, what an unbiased code stands for is
        multiplied by its delta."""
        self.compressor, self.seed, self.way, self.feedback = compressor, seed, way, feedback
        self._shrinks = shrinks and feedback and compressor.unbiased
        self.names = frozenset[str]()
        """Parameters whose pieces are compressed; others travel as they are."""
        self.device = torch.device("cpu")
        """Where parameters are."""
        self.left, self._after = dict[str, Tensor](), dict[str, Tensor]()
        """What earlier steps left out of a tensor, or of this rank's piece of it; after this step, if it is learned."""
        self.step = 0
        self._form, self._placed = cache(self._form_of), cache(self._placed_of)
        c, alone = compressor, (Batched.encode, Batched.decode)
        own = (type(c).encode, type(c).decode)  # of a plugin, which may change one that is shipped
        self._batched = c if isinstance(c, Batched) and own == alone else None

    def begin(self, step: int) -> None:
        """Begin a step, and forget what one left out that was not settled."""
        self.step = step
        self._after.clear()

    def settle(self, learned: bool) -> None:
        """Keep what this step left out, or what was left out before it."""
        self.left |= self._after if learned else {}
        self._after.clear()

    def pack(
        self, rows: Tensor, pieces: Pieces, owners: Sequence[int], sender: int = 0, *, change: bool = True
    ) -> list[Tensor]:
        """Return the codes of rows [k, n] of pieces from one rank to others, and change the rows to what they stand
        for. change: False leaves them, without feedback."""
        places = [self._places(own, rows.dtype) for own in pieces]
        flags = self._to_wire(rows.sum(1) * 0).split(self._length(1, rows.dtype))
        codes, found = list[Tensor](), list[Tensor]()
        for some in _few(rows[0], len(rows)):
            codes += self._encoded(rows[some], places[some], pieces[some], owners[some], sender, change)
        for row, place, flag, code in zip(rows, places, flags, codes):
            wire = [code[span] if coded else self._to_wire(row[where]) for coded, where, span in place.runs]
            found.append(torch.cat([flag, *wire]))
        return found

    def _encoded(
        self,
        rows: Tensor,
        places: Sequence[CodedRuns],
        pieces: Pieces,
        owners: Sequence[int],
        sender: int,
        change: bool,
    ) -> Sequence[Tensor]:
        """Return the codes of the pieces of each row that are coded, and change them to what these stand for."""
        spans = [(row, where) for row, place in zip(rows, places) for coded, where, _ in place.runs if coded]
        if not spans:
            return [rows[0][:0]] * len(rows)
        parts = [row[where] for row, where in spans]
        wanted = parts[0] if len(parts) == 1 else torch.cat(parts)
        several = [(piece, owner) for own, owner in zip(pieces, owners) for piece in own if self._codes(piece)]
        lefts = [self._of(self.left, piece).flatten() for piece, _ in several if piece.name in self.left]
        wanted = wanted + torch.cat(lefts) if lefts else wanted
        randoms = [self._random(piece, owner, sender) for piece, owner in several]
        counts = [count for place in places for count in place.counts]
        code = self._code_of(wanted.float(), counts, randoms)
        code = code.to(rows.dtype) if self.compressor.summable else code
        if change or lefts:
            made = self._decoded(code, counts, randoms).to(rows.dtype)
            for own, (piece, _) in zip((wanted - made).split(counts), several) if lefts else ():
                self._after.setdefault(piece.name, torch.empty_like(self.left[piece.name]))
                there = self._of(self._after, piece)
                there.copy_(own.view(there.shape))
            torch._foreach_copy_(parts, made.split([where.stop - where.start for _, where in spans]))
        return code.split([place.length for place in places])

    def _code_of(self, x: Tensor, counts: Sequence[int], randoms: Sequence[Stream]) -> Tensor:
        """Return the codes as they travel."""
        if self._batched is not None:
            return self._to_wire(self._batched.encode_all(x, counts, randoms))
        found = list[Tensor]()
        for own, count, random in zip(x.split([*counts]), counts, randoms):
            code, form = self.compressor.encode(own, random), self._form(count)
            if (code.numel(), code.dtype) != form[:2]:
                raise self._uneven(code, form)
            found.append(self._to_wire(code))
        return torch.cat(found)

    def unpack(
        self,
        rows: Sequence[Tensor],
        codes: Sequence[Tensor],
        pieces: Pieces,
        owners: Sequence[int],
        senders: Sequence[int],
    ) -> None:
        """Add what codes stand for to rows [n], one after the other: several may be for one row."""
        if len(several := [*_few(rows[0], len(rows))]) > 1:
            for some in several:
                self.unpack(rows[some], codes[some], pieces[some], owners[some], senders[some])
            return
        dtype, parts, wires, counts = rows[0].dtype, list[list[Tensor]](), list[Tensor](), list[int]()
        sizes = list[int]()
        first = self._length(1, dtype)
        flags = self._from_wire(torch.cat([code[:first] for code in codes]), dtype)
        if flags.device.type != "cpu" or flags.any():  # of other devices nobody waits for an answer
            for row, flag in zip(rows, flags):
                row += flag
        for row, code, own in zip(rows, codes, pieces):
            place, at = self._places(own, dtype), first
            counts += place.counts
            parts.append([])
            for coded, where, span in place.runs:
                wire, at = code[at : at + span.stop - span.start], at + span.stop - span.start
                if coded:
                    parts[-1].append(row[where])
                    sizes.append(where.stop - where.start)
                    wires.append(wire)
                else:
                    row[where] += self._from_wire(wire, dtype)
        if wires:
            named = zip(pieces, owners, senders)
            randoms = (self._random(one, *who) for own, *who in named for one in own if self._codes(one))
            made = iter(self._decoded(torch.cat(wires), counts, randoms).to(dtype).split(sizes))
            for coded_rows in filter(None, parts):
                torch._foreach_add_(coded_rows, [*islice(made, len(coded_rows))])

    def length(self, pieces: Sequence[GradientPiece], dtype: torch.dtype) -> int:
        """Return the length of the code of a row."""
        place = self._places(pieces, dtype)
        return self._length(1, dtype) + sum(span.stop - span.start for _, _, span in place.runs)

    def _codes(self, piece: GradientPiece) -> bool:
        return piece.numel > 0 and piece.name in self.names

    def _decoded(self, code: Tensor, counts: Sequence[int], randoms: Iterable[Stream]) -> Tensor:
        forms = [self._form(count) for count in counts]
        if self._batched is not None:
            found = self._batched.decode_all(self._from_wire(code, forms[0].dtype), counts)
        else:
            wires = code.split([self._length(form.length, form.dtype) for form in forms])
            codes = [self._from_wire(own, form.dtype) for own, form in zip(wires, forms)]
            found = torch.cat([self.compressor.decode(*one) for one in zip(codes, counts, randoms)])
        for own, count in zip(found.split([*counts]), counts) if self._shrinks else ():
            own *= self._form(count).factor
        return found

    def _of(self, tensors: Mapping[str, Tensor], piece: GradientPiece) -> Tensor:
        """Return the part of a piece, of tensors that are whole or this part."""
        whole = tensors[piece.name]
        return whole if whole.numel() == piece.numel else whole[piece.slices]

    def _random(self, piece: GradientPiece, owner: int, sender: int) -> Stream:
        """Return the random numbers of a sender for a piece in this step; those of codes that are summed are alike.

        They are equal along all other axes, where ranks with the same gradients must round alike."""
        who = 0 if self.compressor.summable else sender
        return stream(self.seed, self.way, self.step, owner, who, piece.name)

    def _to_wire(self, x: Tensor) -> Tensor:
        return x if self.compressor.summable else x.contiguous().view(torch.uint8)

    def _from_wire(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        if self.compressor.summable or dtype == torch.uint8:
            return code
        return code.clone().view(dtype)  # clone: at any address

    def _length(self, count: int, dtype: torch.dtype) -> int:
        return count if self.compressor.summable else count * dtype.itemsize

    def _places(self, pieces: Sequence[GradientPiece], dtype: torch.dtype) -> CodedRuns:
        return self._placed(self.names, dtype, tuple([(piece.name, piece.numel) for piece in pieces]))

    def _placed_of(self, names: Set[str], dtype: torch.dtype, pieces: Sequence[tuple[str, int]]) -> CodedRuns:
        found, counts, at, code = list[tuple[bool, slice, slice]](), list[int](), 0, 0
        for (coded, named), some in groupby(pieces, lambda one: (one[1] > 0 and one[0] in names, bool(one[0]))):
            sizes = [numel for _, numel in some]
            where, at = slice(at, at + sum(sizes)), at + sum(sizes)
            span = slice(0, self._length(sum(sizes), dtype))
            if coded:
                counts += sizes
                length = sum(self._length(form.length, form.dtype) for form in map(self._form, sizes))
                span, code = slice(code, code + length), code + length
            if named:
                found.append((coded, where, span))
        return CodedRuns(found, counts, code)

    def _form_of(self, count: int) -> CodeForm:
        code = self.compressor.encode(torch.zeros(count, device=self.device), stream(0, "form"))
        return CodeForm(code.numel(), code.dtype, self.compressor.delta(count) if self._shrinks else 1.0)

    def _uneven(self, code: Tensor, form: CodeForm) -> PluginError:
        name = type(self.compressor).__name__
        there, right = f"{code.numel()} {code.dtype}", "both must depend on the number of values alone"
        message = f"compressor {name}: a code of {there}, where that of zeros has {form.length} {form.dtype}; {right}"
        return PluginError(message, key=f"compressor.{name}.encode")


class CompressedReducer(GradientReducer):
    """Sums of compressed gradients. Norms, biases, routers, small tensors and gradients of which further ranks have
    parts travel as they are."""

    by_parts = True

    def __init__(
        self,
        compressor: Compressor | None,
        *,
        feedback: bool = True,
        two_way: bool = False,
        weights: Compressor | None = None,
        smallest: int = 65_536,
        seed: int = 0,
    ) -> None:
        """compressor: of gradients, weights: of updates of weights under ``zero = 1``; None: they are exact. smallest:
        elements of a tensor that is compressed; seed: of random numbers."""
        self.smallest, self.by_difference = smallest, weights is not None
        self._gradients = self._sums = self._weights = None
        if compressor is not None:
            self._gradients = Coder(compressor, seed, GIVEN, feedback=feedback)
            self._sums = Coder(compressor, seed, SUMS, feedback=feedback) if two_way else None
        if weights is not None:
            self._weights = Coder(weights, seed, WEIGHTS, feedback=True, shrinks=False)
        self._layouts = dict[str, Layout]()
        self._sent = dict[str, tuple[Pieces, list[Tensor]]]()
        """Key of a sum -> codes for each rank."""

    @property
    def _coders(self) -> list[Coder]:
        return [coder for coder in (self._gradients, self._sums, self._weights) if coder is not None]

    def bind(
        self,
        grid: ParallelDims,
        given: Mapping[str, Layout],
        updates: Mapping[str, Layout],
        table: Table,
        own: Mapping[str, Tensor],
    ) -> None:
        self._grid = grid
        names = [name for name, own in given.items() if is_coded(own, rule_of(table, name), self.smallest)]
        for coder in self._coders:
            coder.names, coder.device = frozenset(names), next((part.device for part in own.values()), coder.device)
            for name in names if coder.feedback else ():
                layout = given[name] if coder.way == GIVEN else updates[name]
                self._layouts[coder.way + name] = by_rank(layout) if coder.way == GIVEN else layout
                if layout.mesh.has(grid.rank):
                    size = [box.size for box in layout.boxes(grid.rank)] or [(0, *own[name].shape[1:])]
                    coder.left[name] = own[name].new_zeros(size[0])

    def state(self) -> Mapping[str, Tensor]:
        every = [(coder.way, name, left) for coder in self._coders for name, left in coder.left.items()]
        return {way + name: left[None] if way == GIVEN else left for way, name, left in every}

    def layouts(self) -> Mapping[str, Layout]:
        return self._layouts

    def begin(self, step: int) -> None:
        self._sent.clear()
        for coder in self._coders:
            coder.begin(step)

    def settle(self, learned: bool) -> None:
        for coder in self._coders:
            coder.settle(learned)

    @torch.no_grad()
    def code(self, whole: Tensor, group: Group, key: str, pieces: Pieces) -> None:
        if self._gradients is None:
            return
        rows, ranks = whole.view(len(pieces), -1), range(len(pieces))
        self._sent[key] = pieces, self._gradients.pack(rows, pieces, ranks, group.rank())

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group, key: str) -> End:
        if self._gradients is None or key not in self._sent:  # of gradients that are never coded
            return super().reduce_scatter(out, whole, group, key)
        pieces, codes = self._sent.pop(key)
        arrivals = (summed if self._gradients.compressor.summable else exchanged)(codes, group)
        return partial(self._unpack, self._gradients, out, arrivals, range(group.size()), pieces, group.rank())

    @torch.no_grad()
    def _unpack(
        self, coder: Coder, out: Tensor, arrivals: Arrivals, senders: Sequence[int], pieces: Pieces, owner: int
    ) -> None:
        """Fill the row of a rank with the sum of what codes on their way stand for."""
        out.zero_()
        found = [(code, senders[sender]) for sender, code in arrivals()]
        codes, count = [code for code, _ in found], len(found)
        coder.unpack([out] * count, codes, [pieces[owner]] * count, [owner] * count, [sender for _, sender in found])

    @torch.no_grad()
    def all_gather(self, out: Tensor, own: Tensor, group: Group, key: str, pieces: Pieces) -> None:
        if self._sums is None:
            return super().all_gather(out, own, group, key, pieces)
        gather_coded(self._sums, out.zero_().view(len(pieces), -1), own, group, pieces)

    def main(self, name: str, part: Tensor) -> Tensor:
        left = None if self._weights is None else self._weights.left.get(name)
        return super().main(name, part) if left is None else part + left

    @torch.no_grad()
    def gather_weights(self, out: Tensor, own: Tensor, group: Group, pieces: Pieces) -> None:
        """Add the coded updates to the weights that all ranks have; what codes leave out stays in ``main``."""
        if self._weights is None:
            return super().gather_weights(out, own, group, pieces)
        for row, of in zip(out, pieces):
            for part, piece in split(row, of):
                if piece.name not in self._weights.names:  # travels as it is
                    part.zero_()
        for (part, piece), (before, _) in zip(split(own, mine := pieces[group.rank()]), split(out[group.rank()], mine)):
            if piece.name in self._weights.names:
                part -= self.main(piece.name, before.view_as(self._weights.left[piece.name])).flatten()
        gather_coded(self._weights, out, own, group, pieces)


def exchanged(codes: Sequence[Tensor], group: Group) -> Arrivals:
    """Start to send a code to each rank of a group; what is returned waits for the senders and codes for this one."""
    sizes, count = [len(code) for code in codes], len(codes[group.rank()])
    received = codes[0].new_empty(len(codes) * count)
    going = all_to_all(received, torch.cat(list(codes)), [count] * len(codes), sizes, group)

    def arrived() -> Iterable[tuple[int, Tensor]]:
        going.wait()
        return enumerate(received.split(count))

    return arrived


def summed(codes: Sequence[Tensor], group: Group) -> Arrivals:
    """Start to send a code to each rank of a group; what is returned waits for the sum of those for this one, as if it
    had a single sender."""
    found = codes[0].new_empty(max(map(len, codes)))
    going = reduce_scatter(found, torch.cat([F.pad(code, (0, len(found) - len(code))) for code in codes]), group)

    def arrived() -> Iterable[tuple[int, Tensor]]:
        going.wait()
        return [(0, found)]

    return arrived


def gather_coded(coder: Coder, rows: Tensor, own: Tensor, group: Group, pieces: Pieces) -> None:
    """Add to each row [ranks, n] what its rank has coded of ``own`` [n]."""
    place = group.rank()
    (code,) = coder.pack(own[None], [pieces[place]], [place])
    length = max(coder.length(of, own.dtype) for of in pieces)
    every = code.new_empty(len(pieces) * length)
    all_gather(every, F.pad(code, (0, length - len(code))), group)
    coder.unpack(rows.unbind(), every.split(length), pieces, range(len(pieces)), [0] * len(pieces))


def by_rank(layout: Layout) -> Layout:
    """Return the layout of tensors like a parameter, of which each data rank has one of its own: [ranks, ...].

    layout: with copies on all data ranks.
    """
    axes, placements = copied_along(layout), list[Placement]()
    for name, own in zip(layout.mesh.names, layout.placements):
        moved = replace(own, dim=own.dim + 1) if isinstance(own, Shard) else own
        placements.append(Shard(0) if name in axes else moved)
    return replace(layout, placements=tuple(placements), shape=(layout.mesh.size(*axes), *layout.shape))


# ---- sums in two levels: 8 bits a value within a node, 4 bits between nodes (SDP4Bit, arXiv 2410.15526) ----
#
# Of P = S N ranks, S neighbours are a node. For the part of rank (n', l'), rank (n, l) sends 8-bit codes to (n, l'),
# which adds up those of its node and sends a 4-bit code of the sum to (n', l'): each value is rounded twice, however
# many ranks there are. Values are rounded after a Hadamard transform H of blocks of 32, which spreads outliers; it is
# linear, so it is undone once, in the sum, by H H = 32.


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
