"""Culprits of a hung job by the flight recorders of all ranks, without the ranks that only wait for them.

Ranks wait for each other: r waits for s if r has enqueued a collective to which s has not come, or a send or receive
whose other side is s. Culprits are those for whom others wait and who wait for nobody:

- A: its device stopped. It has enqueued collectives that a peer has completed, and it lags by more than one.
- B: its host stopped. Peers have enqueued a collective, it has not, and waits for nobody itself.
- C: it gave no dump. A rank that waits can give one; one that is stopped, dead or holds the GIL cannot.

Where nobody is left, or one number of a group has two calls, ranks called different collectives.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from tilth.guard.calls import broke_habit, ended, mismatch, unusual
from tilth.guard.flight_recorder import FlightDump, GroupProgress, RecordedOp
from tilth.guard.verdict import Kind, Verdict

LAG = 1
"""Collectives by which the record of a healthy device may be behind its peer's."""


@dataclass
class _Waits:
    """Edges of the graph, and for each the group and number waited for ("" for a send or receive)."""

    edges: dict[int, dict[int, tuple[str, int]]] = field(default_factory=dict)

    def add(self, rank: int, other: int, group: str = "", seq: int = 0) -> None:
        if other != rank:
            self.edges.setdefault(rank, {}).setdefault(other, (group, seq))

    def on(self, rank: int) -> list[int]:
        """Ranks that wait for this one."""
        return sorted(r for r, others in self.edges.items() if rank in others)

    def held_by(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that wait for one of these, directly or through others."""
        behind = dict[int, list[int]]()
        for rank, others in self.edges.items():
            for other in others:
                behind.setdefault(other, []).append(rank)
        found, todo = set[int](), list(ranks)
        while todo:
            more = set(behind.get(todo.pop(), ())) - found
            found |= more
            todo.extend(more)
        return sorted(found)

    def reached(self, rank: int) -> set[int]:
        """Ranks for which this one waits, directly or through others."""
        found, todo = set[int](), [rank]
        while todo:
            more = set(self.edges.get(todo.pop(), ())) - found
            found |= more
            todo.extend(more)
        return found


def localise(
    dumps: Mapping[int, FlightDump], silent: Collection[int] = (), hosts: Mapping[int, str] | None = None
) -> Verdict | None:
    """Return who holds up a job and by which rule; None if nobody waits for anybody.

    silent: ranks that gave no dump. hosts: what the stack of a rank's main thread shows, where it is known: "waits"
    (inside torch.distributed), "works" (elsewhere: what it has enqueued does not hold it up; on a CPU), "failed" (a
    collective raised an error, so it is a victim).
    """
    known = dict(sorted(dumps.items()))
    told = hosts or {}
    members = _members(known)
    if wrong := mismatch(known, members):
        return wrong
    waits = _waits(known, members, frozenset(silent), told)
    rules = {rank: "A" for rank in _devices(known, members, waits)}
    for rank in rules:
        waits.edges.pop(rank, None)
    if waits.edges or any(state == "failed" for state in told.values()):
        rules |= {rank: "C" for rank in silent}
    sinks = [r for r in known if r not in rules and not waits.edges.get(r) and waits.on(r) and told.get(r) != "failed"]
    idle = [r for r in sinks if told.get(r) == "works" or not any(op.pending for op in known[r].ops)]
    rules |= {rank: "B" for rank in idle or ([] if rules else sinks)}
    if set(rules.values()) == {"C"} and (wrong := ended(known, members, silent)):
        return wrong
    return _named(known, waits, rules) if rules else _circle(known, waits)


def _members(dumps: Mapping[int, FlightDump]) -> dict[str, tuple[int, ...]]:
    """Return name -> ranks of every group; those seen in it where nobody says."""
    found = dict[str, tuple[int, ...]]()
    for rank, dump in dumps.items():
        for name, group in dump.groups.items():
            seen = found.get(name, ())
            found[name] = group.ranks or (seen if rank in seen else (*seen, rank))
    return found


def _waits(
    dumps: Mapping[int, FlightDump],
    members: Mapping[str, tuple[int, ...]],
    silent: frozenset[int],
    hosts: Mapping[int, str],
) -> _Waits:
    waits = _Waits()
    for name in _collective_groups(dumps, members):
        late = dict[int, list[int]]()  # by number: most ranks of a large group wait in the same one
        for rank in members[name]:
            group = _of(dumps, rank, name)
            if group and group.enqueued > group.completed and hosts.get(rank) not in ("works", "failed"):
                first = group.completed + 1
                if first not in late:
                    late[first] = _late(dumps, members[name], name, first, silent)
                for other in late[first]:
                    waits.add(rank, other, name, first)
    for rank, dump in dumps.items():
        last = dump.ops[-1] if dump.ops else None
        if hosts.get(rank) == "failed" and last:
            for other in _late(dumps, members[last.group], last.group, last.seq, silent):
                waits.add(rank, other, last.group, last.seq)
        elif hosts.get(rank) != "works":
            for op in dump.ops:
                if op.p2p and op.pending and op.peer >= 0:
                    waits.add(rank, op.peer)
            if hosts.get(rank) == "waits" and not any(op.pending for op in dump.ops):  # gloo records no receive
                for other in {r for name in dump.groups for r in members[name]}:
                    waits.add(rank, other)
    return waits


def _collective_groups(dumps: Mapping[int, FlightDump], members: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return groups without unfinished sends and receives, which count on their own and only on two ranks."""
    mixed = {op.group for dump in dumps.values() for op in dump.ops if op.p2p and op.pending}
    return [name for name in members if name not in mixed]


def _of(dumps: Mapping[int, FlightDump], rank: int, name: str) -> GroupProgress | None:
    dump = dumps.get(rank)
    return dump.groups.get(name) if dump else None


def _late(
    dumps: Mapping[int, FlightDump], ranks: Iterable[int], name: str, seq: int, silent: frozenset[int]
) -> list[int]:
    """Return members that have not enqueued a collective, as far as is known, and silent ones."""
    late = []
    for rank in ranks:
        group = _of(dumps, rank, name)
        behind = group.enqueued < seq if group else rank in dumps and not dumps[rank].unnamed
        if rank in silent or behind:
            late.append(rank)
    return late


def _devices(dumps: Mapping[int, FlightDump], members: Mapping[str, tuple[int, ...]], waits: _Waits) -> list[int]:
    """Return ranks by rule A, without those whose device waits for another host since before."""
    found = set()
    for name in _collective_groups(dumps, members):
        states = {rank: group for rank in members[name] if (group := _of(dumps, rank, name))}
        most = max((group.completed for group in states.values()), default=0)
        for rank, group in states.items():
            held = [at for other, at in waits.edges.get(rank, {}).items() if other in dumps]
            if min(group.enqueued, most) > group.completed + LAG and not _held_before(dumps[rank], group, held):
                found.add(rank)
    return sorted(found)


def _held_before(dump: FlightDump, group: GroupProgress, held: list[tuple[str, int]]) -> bool:
    """True if the rank is held in another group by an operation enqueued before the one in which it lags."""
    numbers = {(op.group, op.seq): op.number for op in dump.ops if not op.p2p}
    mine = numbers.get((group.name, group.completed + 1))
    others = [numbers.get(at) for at in held]
    return mine is not None and any(number is not None and number < mine for number in others)


def _named(dumps: Mapping[int, FlightDump], waits: _Waits, rules: Mapping[int, str]) -> Verdict:
    ranks = tuple(sorted(rules))
    rows = {str(rank): _row(dumps, waits, rank, rules[rank]) for rank in ranks}
    strayed = [rank for rank in ranks if rules[rank] == "B" and broke_habit(dumps[rank])]
    straight = all(not broke_habit(dumps[r]) for rank in strayed for r in waits.on(rank) if r in dumps)
    kind: Kind = "collective" if strayed and straight and len(strayed) == len(ranks) else "hang"
    sentences = [str(row["sentence"]) for row in rows.values()]
    calls = [unusual(dumps[rank]) for rank in ranks] if kind == "collective" else []
    return Verdict(
        kind, ranks, "; ".join([*sentences, *calls]), {"culprits": rows, "wait": waits.held_by(ranks), "calls": calls}
    )


def _row(dumps: Mapping[int, FlightDump], waits: _Waits, rank: int, rule: str) -> dict[str, object]:
    """Return why a rank is a culprit: rule, collective, who waits where, its own last call."""
    on = waits.on(rank)
    name, seq = next((at for r in on if (at := waits.edges[r][rank])[0]), ("", 0))
    ops = {r: op for r in on if r in dumps and (op := _op(dumps[r], name, seq))}
    sites = sorted({op.site for op in ops.values() if op.site})
    last = dumps[rank].ops[-1] if rank in dumps and dumps[rank].ops else None
    what = f"{next(iter(ops.values())).op if ops else 'collective'} {seq} of group {_title(dumps, name)}"
    sentences = {
        "A": f"rank {rank} has enqueued collectives that its peers have completed: its device stopped",
        "B": f"rank {rank} waits for nobody" + (f" and has not come to {what}" if name else ""),
        "C": f"rank {rank} gave no dump" + (f"; {what} is not complete" if name else ""),
    }
    waiting = f"; rank{'s' * (len(on) > 1)} {_few(on)} wait{'s' * (len(on) == 1)}" if on else ""
    sentence = sentences[rule] + waiting + (f" at {sites[0]}" if sites else "")
    own = f"{last.op} {last.seq} of group {_title(dumps, last.group)} {last.site}".strip() if last else ""
    found = {"rule": rule, "group": name, "seq": seq, "waiting": on, "sites": sites, "last": own}
    return {**found, "sentence": sentence}


def _few(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _op(dump: FlightDump, group: str, seq: int) -> RecordedOp | None:
    return next((op for op in dump.ops if not op.p2p and (op.group, op.seq) == (group, seq)), None)


def _title(dumps: Mapping[int, FlightDump], name: str) -> str:
    group = next((dump.groups[name] for dump in dumps.values() if name in dump.groups), None)
    return f"{group.description or name} {list(group.ranks)}" if group else name


def _circle(dumps: Mapping[int, FlightDump], waits: _Waits) -> Verdict | None:
    """Return ranks that wait for each other in different collectives; None if nobody waits."""
    if not waits.edges:
        return None
    circle = [r for r in waits.edges if all(r in waits.reached(other) for other in waits.reached(r))]
    strayed = [rank for rank in circle if broke_habit(dumps[rank])]
    if not 0 < len(strayed) < len(circle):
        strayed = _skipped(dumps, waits, circle)
    named = strayed if 0 < len(strayed) < len(circle) else circle
    shown = [*named[:2], *(rank for rank in circle if rank not in named)][:4]
    places = [f"rank {rank} in {_place(dumps[rank], waits.edges[rank])}" for rank in shown]
    calls = "".join(f"; {text}" for rank in named if len(named) < len(circle) and (text := unusual(dumps[rank])))
    evidence = f"ranks wait for each other in different collectives: {', '.join(places)}{calls}"
    return Verdict("collective", tuple(named), evidence, {"circle": circle, "places": places})


def _skipped(dumps: Mapping[int, FlightDump], waits: _Waits, circle: list[int]) -> list[int]:
    """Return ranks that did not come to a collective that groups of the same description have completed."""
    states = [group for dump in dumps.values() for group in dump.groups.values()]
    done = dict[tuple[str, str], int]()  # description, name -> last collective that all its members completed
    for group in states:
        at = group.description, group.name
        done[at] = min(done.get(at, group.completed), group.completed)
    titles = {group.name: group.description for group in states}
    found = set()
    for rank in circle:
        for other, (name, seq) in waits.edges[rank].items():
            title = titles.get(name, "")
            if other in circle and any(t == title and n != name and last >= seq for (t, n), last in done.items()):
                found.add(other)
    return sorted(found)


def _place(dump: FlightDump, edges: Mapping[int, tuple[str, int]]) -> str:
    name, seq = next(iter(edges.values()))
    op = _op(dump, name, seq)
    return f"{op.op} {seq} of group {_title({0: dump}, name)} {op.site}".strip() if op else "a send or receive"
