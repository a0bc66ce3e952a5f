"""Ranks of one group that call different collectives: which call is wrong, with both call sites."""

from collections import Counter
from collections.abc import Collection, Mapping
from math import prod

from tilth.guard.flight_recorder import FlightDump, RecordedOp
from tilth.guard.verdict import Verdict

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
