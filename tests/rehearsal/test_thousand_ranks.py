"""Training steps of 1,024 and 12,288 ranks, none of which exists: they agree, end, and send what formulas say."""

import random
from collections import Counter, defaultdict
from itertools import combinations

import numpy as np
import pytest

from tests.rehearsal.groups import Issue, Wait
from tests.rehearsal.order import MESSAGES, Deadlock, Disagreement, Ranks
from tests.rehearsal.worlds import WORLDS, World, hybrid, megascale
from tests.scripts import script
from tilth.plan.layout import layouts, update_layouts

QUICK = {"175B on 1,024, small batch": lambda: megascale(1024, 32), "7B on 1,024, in units": lambda: hybrid("7B", 1024)}
SLOW = [pytest.param(made, id=name, marks=pytest.mark.slow) for name, made in WORLDS.items()]
_made = {}


@pytest.fixture
def world(request):
    """A world, recorded once."""
    return _made.setdefault(request.param, request.param())


worlds = pytest.mark.parametrize(
    "world", [*(pytest.param(made, id=name) for name, made in QUICK.items()), *SLOW], indirect=True
)


@worlds
def test_all_ranks_begin_the_same_calls_and_reach_their_end(world):
    assert Ranks(world.mesh, world.program_of, world.place_of).run() > len(world.mesh)


@worlds
def test_other_ranks_of_a_class_do_what_its_first_one_does(world):
    others = [(one, rank) for one, (_, *ranks) in world.classes.items() for rank in ranks]
    for one, rank in random.Random(0).sample(others, 2):
        recorded, (first, known) = world.record(rank), world.programs[one]
        assert [named(world, rank, event) for event in recorded] == [named(world, first, event) for event in known]


def named(world, rank, event):
    """An event, with the number of a unit in place of its ranks."""
    if isinstance(event, Wait) or event.peer is None or not event.peer.unit:
        return event
    return event._replace(peer=(event.peer.place, world.units(rank).index(event.peer.unit)))


@worlds
def test_bytes_of_all_ranks_are_those_of_the_formulas(world):
    """Within a tenth: formulas leave out norms, numbers of each token, and the sums of the vocabulary."""
    formulas, found, wanted = script("layout_formulas.py"), defaultdict(float), defaultdict(float)
    for one, ranks in world.classes.items():
        first, program = world.programs[one]
        for axes, sent in sent_by(program):
            found[axes] += len(ranks) * sent
        for axes, sent in formulas.formula(step_of(world, formulas, first)).items():
            wanted[axes] += len(ranks) * sent
    assert wanted
    for axes, sent in wanted.items():
        assert found[axes] == pytest.approx(sent, rel=0.1), axes
    assert sum(sent for axes, sent in found.items() if axes not in wanted) < 0.02 * sum(wanted.values())


def sent_by(program):
    for event in program:
        if isinstance(event, Issue) and event.op != "receive":
            n, times = len(event.group.members), {"all_reduce": 2.0}.get(event.op, 1.0)
            yield "+".join(event.group.axes), event.nbytes * (1 if event.op == "send" else times * (n - 1) / n)


def step_of(world, formulas, rank):
    plan, rows = world.plan.ranks[world.part(rank)].learn, world.plan.rows[world.part(rank)]
    at, lengths = world.part(rank) % world.mesh.units, world.batch[0].lengths[rows]
    units = tuple((int(m.lengths.sum()), len(m.ranks), m.ranks.index(at)) for m in plan if m.several)
    alone = sum(int(lengths[m.rows].sum()) for m in plan if not m.several)
    computed = alone + sum(tokens // ranks for tokens, ranks, _ in units) if world.mesh.units > 1 else -1
    how = (world.config, 4, world.modes, len(plan), lengths, 0, {}, units, computed)
    return formulas.Step(world.mesh, rank, *how)


@worlds
def test_boxes_of_all_ranks_are_each_parameter_and_each_update_whole(world):
    whole = world.modes.get("zero") == 1
    held = layouts(world.config, world.mesh, schedule=world.modes.get("schedule", "1f1b"), whole=whole)
    updates = update_layouts(held, world.config.table) if whole else {}
    for layout in {id(one): one for one in (*held.values(), *updates.values())}.values():
        boxes = [box for rank in layout.mesh.ranks for box in layout.boxes(rank)]
        times = np.zeros(layout.shape, int)
        for box in boxes:
            times[box.slices] += 1
        copies = sum(box.numel for box in boxes) // times.size
        assert copies > 0 and (times == copies).all(), layout
        assert layout not in updates.values() or copies * len(set(boxes)) == len(boxes)


@worlds
def test_the_real_model_fits_every_rank_by_the_plan(world):
    if world.real is None:
        pytest.skip("stands for no model")
    stages = {world.mesh.coordinate("pp", ranks[0]): ranks[0] for ranks in world.classes.values()}
    peaks = [world.peak(rank) for rank in stages.values()]
    assert 5e9 < min(peaks) <= max(peaks) < world.real.device.memory


# ---- that a fault is seen ----

SMALL = World({"pp": 2, "dp": 2, "tp": 2}, {"sp": True, "schedule": "interleaved", "zero": 1}, layers=4, tied=True)
UNITS = World({"pp": 2, "hdp": 4, "tp": 2}, {"sp": True}, gangs=(3,))


def run(world, programs):
    return Ranks(
        world.mesh, programs.__getitem__, lambda rank, peer: peer.unit[peer.place] if peer.unit else peer.place
    ).run()


@pytest.mark.parametrize("world", [SMALL, UNITS], ids=["pipeline", "units"])
def test_ranks_of_a_small_world_that_are_recorded_one_by_one_agree(world):
    ordered = sorted(world.mesh.ranks, key=lambda rank: -world.mesh.coordinate("pp", rank))
    programs = {rank: world.record(rank) for rank in ordered}
    assert run(world, programs) == Ranks(world.mesh, world.program_of, world.place_of).run()


def wrong(program):
    """Programs that skip a call, change its size, or exchange two neighbours of a group that differ."""
    places = [at for at, event in enumerate(program) if isinstance(event, Issue)]
    for at in places:
        kept = [i for i, event in enumerate(program) if i != at and event != Wait(at)]
        events = (program[i] for i in kept)
        yield "skip", [Wait(kept.index(e.at)) if isinstance(e, Wait) else e for e in events]
        yield "resize", [*program[:at], program[at]._replace(nbytes=program[at].nbytes + 4), *program[at + 1 :]]
    for at, other in combinations(places, 2):
        one, two = program[at], program[other]
        between = [e.group for e in program[at + 1 : other] if isinstance(e, Issue)]
        same = (one.op in MESSAGES) == (two.op in MESSAGES) and one.group is two.group and one.group not in between
        if same and one != two:
            yield "reorder", [{at: two, other: one}.get(i, e) for i, e in enumerate(program)]


def test_a_rank_that_skips_resizes_or_reorders_any_call_is_seen():
    whole, seen = {rank: SMALL.program_of(rank) for rank in SMALL.mesh.ranks}, Counter()
    for how, program in wrong(whole[5]):
        seen[how] += 1
        with pytest.raises((Disagreement, Deadlock)):
            run(SMALL, {**whole, 5: program})
    assert seen["skip"] == seen["resize"] > 50 and seen["reorder"] > 10


def test_ranks_that_connect_in_the_order_of_their_passes_are_seen(monkeypatch):
    """Where one stage greets the next one before that listens."""
    programs = {}
    for rank in sorted(SMALL.mesh.ranks, key=lambda rank: -SMALL.mesh.coordinate("pp", rank)):
        with monkeypatch.context() as changed:
            if rank == 5:
                changed.setattr("tilth.parallel.pipeline.sorted", lambda links: sorted(links)[::-1], raising=False)
            programs[rank] = SMALL.record(rank)
    with pytest.raises(Deadlock):
        run(SMALL, programs)
