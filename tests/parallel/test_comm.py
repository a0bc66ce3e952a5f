"""Where ranks meet: each collective is a span, members agree on its number, and nothing of a result changes."""

import ast
import threading
import unittest.mock
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilth
from tests.parallel.layouts import Case, train
from tilth.analysis.read import read_events
from tilth.config.code import parse
from tilth.core.layout import Mesh
from tilth.parallel import checksums, comm, fsdp
from tilth.parallel.dims import ParallelDims
from tilth.parallel.reducer import GradientReducer
from tilth.trace import recorder, span

HERE = "tests.parallel.test_comm:"
SOURCE = Path(tilth.__file__).parent
OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "alltoall_base_": ("all_to_all", 1),
}
"""Torch's operator -> how the trace calls it, and which argument is this rank's own tensor."""

PASSES = {"forward", "backward", "infer", "padding"}


def kept(op, args, group):
    """Bytes of an all-to-all that stay on the rank: its input has rows for itself too."""
    return args[4][group.rank()] * (args[1].nbytes // max(len(args[1]), 1)) if op == "all_to_all" else 0


class Operators(TorchDispatchMode):
    """What goes to process groups, as torch's dispatcher sees it: (operation, ranks, bytes) in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            op, own = OPERATORS[func.__name__.partition(".")[0]]
            group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
            ranks = ",".join(map(str, sorted(dist.get_process_group_ranks(group))))
            self.seen.append((op, ranks, sum(t.nbytes for t in tree_leaves(args[own])) - kept(op, args, group)))
        return func(*args, **(kwargs or {}))


def traced(rank: int, case: Case, folder: str | None, blind: bool = False) -> dict:
    """Two steps, recorded if there is a folder; blind: FSDP is left as torch has it."""
    watch = (lambda *given: None) if blind else fsdp.watch
    with unittest.mock.patch("tilth.parallel.fsdp.watch", watch), Operators() as operators:
        if folder is None:
            found = train(rank, case, 2)
        else:
            with recorder.to(folder, rank=rank), span("call", 7, where=("policy", f"at={rank}")):
                found = train(rank, case, 2)
    results = [(r.loss, r.grad_norm) for r in found["results"]]
    return {"seen": operators.seen, "results": results, "end": found["end"], "before": found["before"]}


def rows(folder) -> list[list[dict]]:
    """Events of each rank, in the order in which they began."""
    table = read_events(folder).sort_by("start").to_pylist()
    return [[e for e in table if e["rank"] == rank] for rank in sorted({e["rank"] for e in table})]


def communications(events: list[dict]) -> list[dict]:
    return [e for e in events if e["op"] in {op for op, _ in OPERATORS.values()}]


def check(pool, case: Case, folder) -> list[list[dict]]:
    """One layout: all that the contract says of its communications."""
    plain = pool.run(case.ranks, HERE + "traced", case=case, folder=None)
    found = pool.run(case.ranks, HERE + "traced", case=case, folder=str(folder))
    ranks = rows(folder)
    assert len(ranks) == case.ranks
    for rank, (events, got, without) in enumerate(zip(ranks, found, plain)):
        mine = communications(events)
        assert [(e["op"], e["detail"], e["bytes"]) for e in mine] == got["seen"] and len(mine) >= 4
        check_places(rank, events, mine)
        assert got["results"] == without["results"] and got["seen"] == without["seen"]
        assert all(torch.equal(t, without["end"][name]) for name, t in got["end"].items())
        assert np.array_equal(got["before"], without["before"])
    check_members(ranks)
    return ranks


def check_places(rank: int, events: list[dict], mine: list[dict], step: int = 7, role: str = "policy") -> None:
    """Step, role and place everywhere; the micro-batch of the pass that a communication is in."""
    by_id = {e["id"]: e for e in events}
    for e in mine:
        assert (e["step"], e["role"], e["place"]) == (step, role, f"at={rank}")
        around = by_id[e["parent"]]
        assert around["start"] <= e["start"] and e["start"] + e["duration"] <= around["start"] + around["duration"]
        assert (e["micro_batch"] >= 0) == (around["op"] in PASSES) and e["micro_batch"] == around["micro_batch"]


UNEVEN = ("all_to_all", "exchange")
"""Operations in which ranks send different amounts."""


def check_members(ranks: list[list[dict]]) -> None:
    """Every member of a group has the same communications under the same numbers, and no other has them."""
    told: dict[tuple, dict] = {}
    for rank, events in enumerate(ranks):
        for e in communications(events):
            assert rank in map(int, e["detail"].split(","))
            seen = told.setdefault((e["detail"], e["seq"]), {})
            assert rank not in seen
            seen[rank] = e["op"], None if e["op"] in UNEVEN else e["bytes"]
    for (detail, _), seen in told.items():
        assert sorted(seen) == sorted(map(int, detail.split(","))) and len(set(seen.values())) == 1


LAYOUTS = [
    pytest.param(Case(dp=2), marks=pytest.mark.slow),
    pytest.param(Case(fsdp=2, zero=2, rows=(3,)), marks=pytest.mark.slow),
    Case(fsdp=2, rows=(2,), checkpointing=True),
    pytest.param(Case(tp=2), marks=pytest.mark.slow),
    Case(tp=2, sp=True, tied=False),
]


@pytest.mark.dist
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_communication_of_a_layout_is_a_span(pool, tmp_path, case):
    ranks = check(pool, case, tmp_path)
    kinds = Counter(e["op"] for e in communications(ranks[0]))
    assert ("reduce_scatter" in kinds) == (case.fsdp > 1 or case.sp)
    inside = {e["micro_batch"] for e in communications(ranks[0])}
    assert (max(inside) > 0) == (case.dp == 1)  # copies speak once a step, all else in each pass


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Case(fsdp=2, tp=2), Case(fsdp=2, tp=2, sp=True, zero=2), Case(dp=2, fsdp=2), Case(dp=2, fsdp=2, zero=2)],
    ids=str,
)
def test_every_communication_of_four_ranks_is_a_span(pool, tmp_path, case):
    ranks = check(pool, case, tmp_path)
    details = {e["detail"] for e in communications(ranks[0])}
    assert details >= ({"0,1", "0,2"} if case.tp > 1 else {"0,1", "0,2", "0,1,2,3"})
    if case.dp > 1:
        check_copies(ranks)


def check_copies(ranks: list[list[dict]]) -> None:
    """The sum over copies, which torch issues after the scatter of a module, begins when that has ended."""
    for events in ranks:
        mine = [e for e in communications(events) if e["op"] in ("reduce_scatter", "all_reduce")]
        copies = [i for i, e in enumerate(mine) if e["op"] == "all_reduce" and e["detail"] in ("0,2", "1,3")]
        assert len(copies) == 2 * 3  # steps, modules
        for i in copies:
            before = mine[i - 1]
            assert before["op"] == "reduce_scatter" and before["parent"] == mine[i]["parent"]
            assert mine[i]["start"] >= before["start"] + before["duration"] and mine[i]["duration"] > 0
            assert mine[i]["bytes"] * 2 == before["bytes"]


def beside_training(rank: int, folder: str) -> list:
    """Weights go to a role on one of the workers of the policy, and two replicas give each other what they read."""
    from tests.roles.test_weight_sync import CASES, relay_of, roles_of
    from tilth.checkpoint.read import Share, together

    case, group = CASES["partly shared"], ParallelDims.of(Mesh(("dp",), (2,)), rank).group("dp")
    relay = relay_of(case, rank, roles_of(case, rank), 2000)
    share, parts = Share.of_group(group, (0, 1), rank), {"w": [torch.zeros(9, 5)], "b": [torch.zeros(3)]}
    with Operators() as operators, recorder.to(folder, rank=rank), span("call", 3, where=("relay", f"at={rank}")):
        relay.sync(case.role, 1)
        together(share, 1, parts, lambda mine: [parts[name][0].fill_(7.0) for name in mine])
    assert all((t == 7).all() for tensors in parts.values() for t in tensors)
    return operators.seen


@pytest.mark.dist
def test_publishing_and_restoring_are_told_too(pool, tmp_path):
    seen = pool.run(2, HERE + "beside_training", folder=str(tmp_path))
    ranks = rows(tmp_path)
    for rank, (events, wanted) in enumerate(zip(ranks, seen)):
        mine = communications(events)
        assert [(e["op"], e["detail"], e["bytes"]) for e in mine] == wanted
        check_places(rank, events, mine, step=3, role="relay")
        assert {"broadcast", "all_to_all"} <= {e["op"] for e in mine}
    check_members(ranks)


@pytest.mark.dist
def test_what_is_not_watched_would_be_missed(pool, tmp_path):
    (found, _) = pool.run(2, HERE + "traced", case=Case(fsdp=2), folder=str(tmp_path), blind=True)
    mine = [(e["op"], e["detail"], e["bytes"]) for e in communications(rows(tmp_path)[0])]
    lost = Counter(found["seen"]) - Counter(mine)
    assert {op for op, _, _ in lost} == {"all_gather", "reduce_scatter"} and lost.total() > 10


@pytest.mark.dist
def test_ranks_stand_in_ascending_order_and_groups_of_the_same_ranks_count_together(pool):
    for told in pool.run(2, HERE + "two_orders"):
        assert {detail for detail, _ in told} == {"0,1"}
        numbers = [n for _, n in told]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def two_orders(rank: int) -> list[tuple[str, int]]:
    groups = [ParallelDims.of(Mesh(("tp",), order and (2,), order), rank).group("tp") for order in ((0, 1), (1, 0))]
    told = []
    for group in (groups[0], groups[1], groups[1], groups[0]):
        with comm.communication("all_reduce", group, 4) as issued:
            x = torch.tensor([float(rank + 1)])
            dist.all_reduce(x, group=group)
        assert float(x) == 3.0
        told.append((issued.detail, issued.seq))
    return told


@pytest.mark.dist
def test_what_goes_wrong_ends_its_span(pool):
    assert pool.run(2, HERE + "wrong") == [True, True]


def wrong(rank: int) -> bool:
    """Torch refuses a tensor that is not contiguous, on each rank before it sends anything."""
    group = ParallelDims.of(Mesh(("dp",), (2,)), rank).group("dp")
    recorder.totals()
    with span("update") as outer:
        try:
            comm.broadcast(torch.zeros(4, 4).t(), 0, group)
        except (ValueError, RuntimeError):
            pass
        with span("forward") as after:
            pass
    return recorder.totals()["broadcast"].count == 1 and after.depth == outer.depth + 1


# Without processes


class Standing:
    """In the place of a process group."""

    def __init__(self, *ranks):
        self.ranks = ranks


@pytest.fixture
def standing(monkeypatch):
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(group.ranks))
    monkeypatch.setattr(comm, "_ranks", {})
    monkeypatch.setattr(comm, "_counts", {})


@given(issued=st.lists(st.sets(st.integers(0, 4), min_size=2).map(lambda s: tuple(sorted(s))), max_size=30))
def test_members_match_by_number_whatever_others_do(issued):
    """Each process sees only its own communications; the k-th of a group must be the k-th on all its members."""
    with unittest.mock.patch.object(dist, "get_process_group_ranks", lambda group: group.ranks):
        told: dict[tuple, set] = {}
        for rank in range(5):
            groups = {ranks: Standing(*ranks) for ranks in set(issued)}
            with unittest.mock.patch.multiple(comm, _ranks={}, _counts={}):
                for place, ranks in enumerate(issued):
                    if rank in ranks:
                        s = comm.communication("all_reduce", groups[ranks], 0)
                        told.setdefault((s.detail, s.seq), set()).add((place, rank))
    assert len(told) == len(issued)
    for (detail, _), seen in told.items():
        assert {rank for _, rank in seen} == set(map(int, detail.split(",")))
        assert len({place for place, _ in seen}) == 1


def test_a_new_world_counts_anew(standing):
    group = Standing(3, 1)
    first = [comm.communication("broadcast", group, 5) for _ in range(3)]
    assert [(s.op, s.detail, s.seq, s.bytes) for s in first] == [("broadcast", "1,3", i, 5) for i in range(3)]
    comm.forget()
    group.ranks = (2, 0)
    again = comm.communication("broadcast", group, 5)
    assert (again.detail, again.seq) == ("0,2", 0)


def test_a_backward_pass_lends_itself_to_other_threads(standing):
    """On a device torch runs what belongs to a backward pass in threads of its own."""
    told = []

    def issue():
        with comm.communication("reduce_scatter", Standing(0, 1), 8) as issued:
            told.append((issued.step, issued.micro_batch, issued.where, issued.depth))

    def elsewhere():
        thread = threading.Thread(target=issue)
        thread.start()
        thread.join()

    with span("call", 9, where=("policy", "dp=0")), span("backward", micro_batch=4) as backward:
        elsewhere()
        with comm.lent(backward):
            elsewhere()
            issue()
    assert told[0] == (-1, -1, ("", ""), 0)
    assert told[1:] == [(9, 4, ("policy", "dp=0"), 0), (9, 4, ("policy", "dp=0"), 2)]


def test_what_was_lent_is_given_back_when_a_pass_fails(standing):
    with span("call", 9), span("backward", micro_batch=4) as backward:
        with pytest.raises(ZeroDivisionError), comm.lent(backward):
            raise ZeroDivisionError
    assert comm.communication("all_reduce", Standing(0, 1), 8).step == -1


COLLECTIVES = {n for n in dir(dist) if n.startswith(("all_", "reduce", "broadcast", "gather", "scatter", "barrier"))}
COLLECTIVES |= {"send", "recv", "isend", "irecv", "batch_isend_irecv", "monitored_barrier"}


def direct(source: str) -> list[str]:
    """Collectives that a file takes from torch.distributed itself."""
    nodes = list(ast.walk(parse(source)))
    called = [n.attr for n in nodes if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "dist"]
    taken = [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("torch.distributed")]
    return [name for name in called + [a.name for n in taken for a in n.names] if name in COLLECTIVES]


def test_no_other_file_speaks_to_ranks():
    sources = {p.name: p.read_text() for p in SOURCE.rglob("*.py")}
    speak = {name: direct(text) for name, text in sources.items() if "torch.distributed" in text}
    assert len(speak.pop("comm.py")) >= 4 and len(speak) > 5
    assert {name: called for name, called in speak.items() if called} == {}


def test_one_that_did_would_be_seen():
    assert direct("import torch.distributed as dist\ndist.all_reduce(x)") == ["all_reduce"]
    assert direct("from torch.distributed import broadcast, init_process_group") == ["broadcast"]
    assert direct("def f(share): share.broadcast(x)") == []


@pytest.mark.parametrize("count", [checksums.FEW - 1, checksums.FEW, 100_003, 1 << 20])
@pytest.mark.parametrize("draw", [torch.randn, torch.rand])
def test_fast_sums_are_off_by_less_than_the_rounding_that_a_check_of_gradients_allows(count, draw):
    torch.manual_seed(count)
    rows = draw(2, count)
    allowed = 32 * torch.finfo(rows.dtype).eps * torch.linalg.vector_norm(rows.double(), dim=1)  # a half of ROUNDINGS
    assert ((checksums.exact_sums(rows) - rows.double().sum(1)).abs() < allowed).all()
    pieces = [rows[0, : count // 3].view(1, -1), rows[0, :0], rows[0, count // 3 :]]
    assert (checksums.exact_sum(pieces) - rows[0].double().sum()).abs() < allowed[0]


def meanwhile(rank: int) -> list[float]:
    """Rank 1 joins the collectives after a message that rank 0 sends between their starts and its wait."""
    grid = ParallelDims.of(Mesh(("dp",), (2,)), rank)
    group, channel = grid.group("dp"), grid.channel(0, 1, "test")
    x, sent, out = torch.full((3,), float(rank)), torch.arange(4.0) + 10 * rank, torch.empty(4)
    message = torch.ones(1)

    def start() -> list[comm.Collective]:
        return [comm.all_reduce(x, group), comm.all_to_all(out, sent, [2, 2], [2, 2], group)]

    if rank == 0:
        going = start()
        channel.send(message).wait()
    else:
        channel.receive(message, channel.post(message))
        going = start()
    for one in going:
        one.wait()
    return [*x.tolist(), *out.tolist()]


@pytest.mark.dist
def test_a_rank_works_between_the_start_of_a_collective_and_its_end(pool):
    assert pool.run(2, HERE + "meanwhile") == [[1, 1, 1, 0, 1, 10, 11], [1, 1, 1, 2, 3, 12, 13]]


def test_a_bucket_of_gradients_is_filled_while_the_one_before_is_summed():
    order = []

    class Reducer(GradientReducer):
        bucket_bytes = 8

        def all_reduce(self, x, group, key):
            order.append(f"start {key}")
            return SimpleNamespace(wait=lambda: (order.append(f"end {key}"), x.mul_(2)))

    grads = [torch.full((n,), float(n)) for n in (2, 1, 1, 3)]
    Reducer().sum_in_place(grads, object(), "copies")
    assert [g.tolist() for g in grads] == [[4, 4], [2], [2], [6, 6, 6]]
    assert order == [f"{what} copies.{i}" for what, i in (
        ("start", 0), ("start", 2), ("end", 0), ("start", 3), ("end", 2), ("end", 3)
    )]  # fmt: skip
