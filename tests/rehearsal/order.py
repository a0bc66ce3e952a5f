"""Run the programs of all ranks of a mesh beside each other, by their events alone.

A collective ends when all members of its group have begun it, a message when both of its ranks have; in one group all
begin them in one order. A rank goes on behind a wait when that has ended. If all reach their end, no order of the
network's can make them wait for ever: what a rank does next depends on nothing but its own waits.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from tests.rehearsal.groups import Issue, Peer, Program
from tilth.core.layout import Mesh

MESSAGES = ("send", "receive")
Call = tuple[int, int]
"""Number of an order of calls, and of the call in it."""


class Disagreement(Exception):
    """Members of a group begin other calls, or one of them begins none."""


class Deadlock(Exception):
    """Ranks wait for each other for ever."""


class Ranks:
    """Programs of all ranks of a mesh."""

    def __init__(
        self, mesh: Mesh, program_of: Callable[[int], Program], place_of: Callable[[int, Peer], int] | None = None
    ) -> None:
        """place_of: place in the group that a peer of this rank has, if that is not the peer's own number."""
        self.mesh, self.program_of = mesh, program_of
        self.place_of = place_of or (lambda rank, peer: peer.place)
        self.begun = dict[Call, tuple[int, tuple[Any, ...], int]]()
        """Calls that have not ended: who has begun each first, what it was, and how many have."""
        self.ended, self.waiting = set[Call](), defaultdict[Call, list[int]](list)
        self._streams = dict[Any, int]()
        """Numbers of all (group, ends): where calls have one order."""

    def run(self) -> int:
        """Run all programs to their end; return the number of calls. Disagreement, Deadlock."""
        runs = {rank: _Run(self.program_of(rank)) for rank in self.mesh.ranks}
        left = deque(runs)
        while left:
            rank = left.popleft()
            one = runs[rank]
            while one.at < len(one.program):
                event = one.program[one.at]
                if isinstance(event, Issue):
                    message = event.op in MESSAGES
                    key = event.group, event.peer if message else None, message and event.op
                    stream = one.streams.get(key)
                    if stream is None:
                        stream = one.streams[key] = self._stream(rank, event)
                    number = one.numbers[stream] = one.numbers.get(stream, -1) + 1
                    one.calls[one.at] = call = stream, number
                    what = ("message", event.nbytes) if message else (event.op, event.nbytes, event.peer)
                    left.extend(self._begin(rank, call, what, 2 if message else len(event.group.members)))
                elif (call := one.calls[event.at]) not in self.ended:
                    self.waiting[call].append(rank)
                    break
                else:
                    del one.calls[event.at]
                one.at += 1
        self._check_end(runs)
        return len(self.ended)

    def _stream(self, rank: int, event: Issue) -> int:
        """Return the number of the order in which this rank begins this call, and others with it."""
        here, key = self.mesh.at(rank), event.group
        apart = tuple(at for name, at in here.items() if name not in key.axes)
        ends: tuple[int, ...] = ()
        if event.op in MESSAGES:
            assert event.peer is not None
            place, other = key.members.index(tuple(here[name] for name in key.axes)), self.place_of(rank, event.peer)
            ends = (place, other) if event.op == "send" else (other, place)
        return self._streams.setdefault((key, apart, ends), len(self._streams))

    def _begin(self, rank: int, call: Call, what: tuple[Any, ...], members: int) -> Sequence[int]:
        """Begin a call; return the ranks that go on because it has ended."""
        first, same, count = self.begun.get(call, (rank, what, 0))
        if what != same:
            raise Disagreement(f"{self._name(call)}: rank {first} begins {same}, rank {rank} begins {what}")
        if count + 1 < members:
            self.begun[call] = first, same, count + 1
            return ()
        self.begun.pop(call, None)
        self.ended.add(call)
        return self.waiting.pop(call, ())

    def _check_end(self, runs: "dict[int, _Run]") -> None:
        stuck = {rank: one for rank, one in runs.items() if one.at < len(one.program)}
        if stuck:
            waits = [f"rank {rank} for {self._name(one.calls[one.program[one.at].at])}" for rank, one in stuck.items()]
            raise Deadlock(f"{len(stuck)} ranks wait for ever: {'; '.join(waits[:4])}")
        for call, (rank, what, count) in self.begun.items():
            raise Disagreement(f"{self._name(call)}: {count} ranks, {rank} first, begin {what}, and others never do")

    def _name(self, call: Call) -> str:
        key, apart, ends = next(one for one, number in self._streams.items() if number == call[0])
        return f"call {call[1]} of {key.label}{'+'.join(key.axes)} at {apart} {ends}"


class _Run:
    """How far a rank has come."""

    def __init__(self, program: Program) -> None:
        self.program, self.at = program, 0
        self.streams, self.numbers, self.calls = dict[Any, int](), dict[int, int](), dict[int, Call]()
