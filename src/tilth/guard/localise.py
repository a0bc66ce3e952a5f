"""Culprits of a hung job by the flight recorders of all ranks, without the ranks that only wait for them.

Ranks wait for each other: r waits for s if r has enqueued a collective to which s has not come, or a send or receive
whose other side is s. Culprits are those for whom others wait and who wait for nobody:

- A: its device stopped. It has enqueued collectives that a peer has completed, and it lags by more than one.
- B: its host stopped. Peers have enqueued a collective, it has not, and waits for nobody itself.
- C: it gave no dump. A rank that waits can give one; one that is stopped, dead or holds the GIL cannot.

Where nobody is left, or one number of a group has two calls, ranks called different collectives.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from tilth.config.errors import listed
from tilth.guard.flight_recorder import FlightDump, GroupProgress, RecordedOp
from tilth.guard.verdict import Kind, Verdict

FEW = 8
"""Most ranks in a sentence."""
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
        behind = defaultdict[int, list[int]](list)
        for rank, others in self.edges.items():
            for other in others:
                behind[other].append(rank)
        return sorted(_reached(behind, ranks))

    def reached(self, rank: int) -> set[int]:
        """Ranks for which this one waits, directly or through others."""
        return _reached(self.edges, [rank])


def _reached(edges: Mapping[int, Iterable[int]], ranks: Iterable[int]) -> set[int]:
    """Return the ranks to which edges lead from these, directly or through others."""
    found, todo = set[int](), list(ranks)
    while todo:
        more = set(edges.get(todo.pop(), ())) - found
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
    waiting = f"; rank{'s' * (len(on) > 1)} {listed(on, FEW)} wait{'s' * (len(on) == 1)}" if on else ""
    sentence = sentences[rule] + waiting + (f" at {sites[0]}" if sites else "")
    own = f"{last.op} {last.seq} of group {_title(dumps, last.group)} {last.site}".strip() if last else ""
    found = {"rule": rule, "group": name, "seq": seq, "waiting": on, "sites": sites, "last": own}
    return {**found, "sentence": sentence}


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


# ---- ranks of one group that call different collectives ----

EQUAL_SIZES = ("all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base")
"""Operations whose inputs have one size on all ranks; those of others (all_to_all, lists) may differ."""
CONTEXT, LONGEST = 4, 64
"""Fewest and most calls before one that predict it, in a training loop."""
RECENT = 16
"""Calls in which a rank that waits in a circle may have left its order."""

Signature = tuple[str, tuple[int, ...], tuple[str, ...]]
"""Operation, number of elements of each input, dtypes."""


def signature(op: RecordedOp) -> Signature:
    """Return what must be equal on all ranks."""
    sized = op.op in EQUAL_SIZES or (op.backend == "gloo" and op.op == "all_gather")
    return op.op, tuple(prod(shape) for shape in op.sizes) if sized else (), tuple(sorted(set(op.dtypes)))


def mismatch(dumps: Mapping[int, FlightDump], members: Mapping[str, tuple[int, ...]]) -> Verdict | None:
    """Return the first number of a group under which ranks made different calls; None if there is none."""
    calls = dict[tuple[str, int], dict[int, RecordedOp]]()
    for rank, dump in dumps.items():
        for op in dump.ops:
            if not op.p2p and rank in members.get(op.group, ()):
                calls.setdefault((op.group, op.seq), {})[rank] = op
    different = [at for at, ops in calls.items() if len({signature(op) for op in ops.values()}) > 1]
    if not different:
        return None
    first = min(different, key=lambda at: (min(op.created for op in calls[at].values()), at))
    return _different(dumps, calls, first)


def _different(
    dumps: Mapping[int, FlightDump], calls: Mapping[tuple[str, int], Mapping[int, RecordedOp]], at: tuple[str, int]
) -> Verdict:
    name, seq = at
    ops = calls[at]
    ranks = _strayed(dumps, ops) or _outvoted(dumps, calls, at) or tuple(sorted(ops))
    others = [rank for rank in sorted(ops) if rank not in ranks] or [
        rank for rank in sorted(ops) if signature(ops[rank]) != signature(ops[ranks[0]])
    ]
    right, wrong = ops[others[0]], ops[ranks[0]]
    group = dumps[others[0]].groups.get(name)
    title = group.description or name if group else name
    made_by = [f"rank {rank} calls {_call(op)}" for rank, op in ((ranks[0], wrong), (others[0], right))]
    evidence = f"collective {seq} of group {title}: {', '.join(made_by)}"
    sites = {str(rank): op.site for rank, op in sorted(ops.items())}
    made = {str(rank): _call(op) for rank, op in sorted(ops.items())}
    return Verdict("collective", ranks, evidence, {"group": name, "seq": seq, "calls": made, "sites": sites})


def _call(op: RecordedOp) -> str:
    return f"{op.op} of {[list(shape) for shape in op.sizes]} {', '.join(op.dtypes)}" + (
        f" at {op.site}" if op.site else ""
    )


def _strayed(dumps: Mapping[int, FlightDump], ops: Mapping[int, RecordedOp]) -> tuple[int, ...]:
    """Return ranks that left their own order of calls since their last common one, unless all did."""
    found = []
    for rank, op in ops.items():
        before = [o.number for o in dumps[rank].ops if o.group == op.group and not o.p2p and o.seq == op.seq - 1]
        if before and broke_habit(dumps[rank], before[0], op.number):
            found.append(rank)
    return tuple(sorted(found)) if len(found) < len(ops) else ()


def broke_habit(
    dump: FlightDump, after: int | None = None, until: int | None = None
) -> tuple[RecordedOp, RecordedOp] | None:
    """Return the first unusual call after ``after`` and up to ``until``, and the usual one; None if all are usual.

    after, until: numbers in the dump; default: the newest RECENT calls. A call is usual if it followed earlier on the
    calls before it, as many as were made in this order earlier, CONTEXT to LONGEST. A training loop repeats itself, so
    a missing or another call shows in the rank's own history, whatever others do.
    """
    ops = [op for op in dump.ops if not op.p2p]
    made = [(op.group, op.site, signature(op)) for op in ops]
    first = max(0, len(ops) - RECENT) if after is None else 0
    for i in range(max(1, first), len(ops)):
        if (after is None or ops[i].number > after) and (until is None or ops[i].number <= until):
            usual = _precedents(made, i)
            if usual and made[i] not in {made[j] for j in usual}:
                return ops[i], ops[usual[-1]]
    return None


def _precedents(made: list[tuple[str, str, Signature]], i: int) -> list[int]:
    """Return the calls that followed earlier on the longest known context of call i; none if that says too little."""
    found, longest = list[int](), CONTEXT
    for j in range(CONTEXT, i):
        length = 0
        while length < min(j, LONGEST) and made[j - 1 - length] == made[i - 1 - length]:
            length += 1
        if length > longest:
            found, longest = [], length
        if length == longest:
            found.append(j)
    return found if len(set(made[i - longest : i])) > 1 else []


def unusual(dump: FlightDump) -> str:
    """Return the rank's last unusual call and the usual one in words; "" if its calls are usual."""
    found = broke_habit(dump)
    return f"rank {dump.rank} calls {_call(found[0])}, where it called {_call(found[1])} until now" if found else ""


def ended(
    dumps: Mapping[int, FlightDump], members: Mapping[str, tuple[int, ...]], silent: Collection[int]
) -> Verdict | None:
    """Return ranks whose unusual last call ended the process of another member of its group; None if there are none.

    gloo aborts the process that receives more bytes than it expects, so of a wrong shape only one side may be left.
    """
    strayed = [
        rank
        for rank, dump in dumps.items()
        if dump.ops and set(members.get(dump.ops[-1].group, ())) & set(silent) and broke_habit(dump)
    ]
    if not 0 < 2 * len(strayed) <= len(dumps):
        return None
    evidence = "; ".join(unusual(dumps[rank]) for rank in strayed)
    lost = ", ".join(str(rank) for rank in sorted(silent))
    return Verdict("collective", tuple(strayed), f"{evidence}; rank {lost} gave no dump", {"silent": sorted(silent)})


def aborted(dumps: Mapping[int, FlightDump], ends: Mapping[int, str]) -> Verdict | None:
    """Return the rank that called what nobody else did, where gloo has aborted a process; None if it is not known.

    ends: rank -> call site of an aborted process. A call is foreign if no other rank made one there, nor a rank that
    lives itself before.
    """
    made = {rank: [op.site for op in dump.ops if not op.p2p and op.site] for rank, dump in dumps.items()}
    last = {**{rank: sites[-1] for rank, sites in made.items() if sites}, **ends}
    foreign = [
        rank
        for rank, site in sorted(last.items())
        if not any(site in (sites[:-1] if one == rank else sites) for one, sites in made.items())
        and not any(site == end for one, end in ends.items() if one != rank)
    ]
    others = [rank for rank in sorted(last) if rank not in foreign]
    if len(foreign) != 1 or not others:
        return None
    calls = {str(rank): last[rank] for rank in (foreign[0], others[0])}
    lost = ", ".join(map(str, sorted(ends)))
    evidence = ", ".join(f"rank {rank} calls a collective at {site}" for rank, site in calls.items())
    details = {"calls": calls, "sites": {str(rank): site for rank, site in sorted(last.items())}}
    return Verdict("collective", tuple(foreign), f"{evidence}; gloo aborted rank {lost}", details)


def _outvoted(
    dumps: Mapping[int, FlightDump], calls: Mapping[tuple[str, int], Mapping[int, RecordedOp]], at: tuple[str, int]
) -> tuple[int, ...]:
    """Return ranks whose call is not the most frequent in the group, then in groups of its description; () if equal."""
    titles = {name: group.description for dump in dumps.values() for name, group in dump.groups.items()}
    title = titles.get(at[0], "")
    alike = [ops for (name, seq), ops in calls.items() if title and seq == at[1] and titles.get(name) == title]
    for voters in ([calls[at]], alike):
        votes = Counter(signature(op) for ops in voters for op in ops.values())
        most = votes.most_common(2)
        if len(most) > 1 and most[0][1] > most[1][1] and most[0][0] in {signature(op) for op in calls[at].values()}:
            return tuple(sorted(rank for rank, op in calls[at].items() if signature(op) != most[0][0]))
    return ()
