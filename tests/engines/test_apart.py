"""A drafter in a process of its own changes no token, whether it answers, is late, or is lost."""

import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import psutil
import pytest
import torch

from tests.engines.reference import make_engine
from tests.engines.test_engine import MODEL, REQUESTS
from tests.engines.test_speculation import same
from tests.errors import raises
from tilth.config.schema import DraftConfig
from tilth.core.layout import Mesh
from tilth.engines import apart
from tilth.engines import draft as drafting
from tilth.engines.apart import ApartDrafter, DraftTurn, taken
from tilth.engines.drafter import Draft, Drafter, DraftError
from tilth.engines.lockstep import check_divided
from tilth.engines.protocol import EngineError
from tilth.engines.stats import Stats
from tilth.engines.suffix import SuffixDrafter
from tilth.parallel.dims import ParallelDims
from tilth.process.child import ready
from tilth.process.restarts import RestartPolicy

DRAFT = DraftConfig(tokens=6, depth=4, apart=True)
SOME = REQUESTS[:16]
both = pytest.mark.parametrize("branches", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["chains", "trees"])


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Guesses pay from a small chance on, and a busy machine is no lost drafter."""
    monkeypatch.setattr(drafting, "FREE", {("cpu", torch.float32): 1000})
    monkeypatch.setattr(apart, "PATIENCE", 60.0)


@pytest.fixture(scope="module")
def plain():
    return make_engine(MODEL, parity=True).generate(SOME)


def drafted(**options):
    """An engine whose drafter is there, and the drafter."""
    engine = make_engine(MODEL, parity=True, draft=DRAFT, **options)
    drafter = engine._speculation._drafter
    up(drafter)
    return engine, drafter


def up(drafter):
    until = time.monotonic() + 60
    while not drafter.caught_up:
        assert time.monotonic() < until
        time.sleep(0.01)


def amid(engine, happens):
    """Completions of SOME, where something happens once all of them run."""
    engine.submit(SOME)
    found = []
    while engine.running < 8:
        found += engine.poll()
    found += engine.poll()
    happens()
    while engine.pending:
        found += engine.poll()
    return sorted(found, key=lambda t: t.id)


class Sleeper(Drafter):
    """A drafter that leaves a file when it sleeps."""

    def __init__(self, path):
        self.path = path

    def sleep(self):
        self.path.touch()

    def propose(self, rows, budget, least):
        return [Draft() for _ in rows]


@both
def test_tokens_are_those_of_plain_decoding(plain, branches):
    engine, drafter = drafted(branches=branches)
    same(engine.generate(SOME), plain)
    same(engine.generate(SOME), plain)
    stats = engine.stats()
    assert stats.accepted_tokens > 100 and stats.passes_per_token < 0.9
    assert stats.undrafted_passes == stats.lost_drafters == 0
    assert not drafter._rows
    process = psutil.Process(drafter.pid)
    drafter._pool.close()
    assert not process.is_running()


def test_a_killed_drafter_is_replaced(plain):
    engine, drafter = drafted()
    first = drafter.pid
    engine.generate(SOME)
    same(amid(engine, lambda: os.kill(first, signal.SIGKILL)), plain)
    assert engine.stats().lost_drafters == 1 and drafter.pid not in (first, None)
    assert engine.stats().undrafted_passes > 0
    up(drafter)
    engine.stats(reset=True)
    same(engine.generate(SOME), plain)
    assert engine.stats().accepted_tokens > 50 and not engine.stats().undrafted_passes


def test_drafters_that_are_lost_again_and_again_leave_plain_decoding(plain, monkeypatch):
    monkeypatch.setattr(apart, "RESTARTS", RestartPolicy(fruitless=0))
    engine, drafter = drafted()
    same(amid(engine, lambda: os.kill(drafter.pid, signal.SIGKILL)), plain)
    assert drafter.pid is None and not drafter.caught_up and engine.stats().lost_drafters == 1
    passes, missed = engine.stats().decode_passes, engine.stats().undrafted_passes
    same(engine.generate(SOME), plain)
    stats = engine.stats()
    assert stats.decode_passes - passes == stats.undrafted_passes - missed > 0
    assert not drafter._calls and not drafter._pool.children


def test_behind_a_stopped_drafter_one_pass_waits_and_drafts_come_again_once_it_goes_on(plain, monkeypatch):
    engine, drafter = drafted()
    waits = []

    def waited_for(children, seconds):
        waits.append(seconds)
        return ready(children, seconds)

    monkeypatch.setattr(apart, "ready", waited_for)
    monkeypatch.setattr(apart, "PATIENCE", 0.05)

    def stop():
        waits.clear()
        os.kill(drafter.pid, signal.SIGSTOP)

    same(amid(engine, stop), plain)
    waited = [seconds for seconds in waits if seconds]
    assert 0 < len(waited) < 10 and max(waited) <= 0.05, "select wakes for a full pipe, too"
    assert not any(waits[waits.index(waited[-1]) + 1 :]) and engine.stats().undrafted_passes > 10
    os.kill(drafter.pid, signal.SIGCONT)
    up(drafter)
    monkeypatch.setattr(apart, "PATIENCE", 60.0)
    engine.stats(reset=True)
    same(engine.generate(SOME), plain)
    assert engine.stats().accepted_tokens > 100 and engine.stats().lost_drafters == 0


def test_a_drafter_that_stays_silent_is_replaced(plain, monkeypatch):
    engine, drafter = drafted()
    monkeypatch.setattr(apart, "PATIENCE", 0.01)
    monkeypatch.setattr(apart, "SILENCE", 0.02)
    first = psutil.Process(drafter.pid)

    def stop():
        first.suspend()

    same(amid(engine, stop), plain)
    assert engine.stats().lost_drafters and not first.is_running()


# ---- the protocol ----


def drafter_of(row, text):
    drafter = SuffixDrafter(4)
    drafter.begin(row, np.array([9]), np.array(text))
    return drafter


def test_what_is_guessed_ahead_is_the_next_draft():
    """If all of a draft stands, and what was guessed behind it."""
    drafter, text = drafter_of(0, [*range(20), *range(20), 0]), [*range(20)] * 3
    (first,) = drafter.propose([0], [4], 0.001)
    assert first.tokens == [1, 2, 3, 4] and drafter.grow() and not drafter.grow()
    drafter.accept([0], [np.array(text[1:6])])
    drafter._grow = None
    (second,) = drafter.propose([0], [4], 0.001)
    assert second == Draft([6, 7, 8, 9], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("said", "asked"), [([1, 2, 7], (4, 0.001)), ([1, 2, 3, 4, 5], (3, 0.001)), ([1, 2, 3, 4, 5], (4, 0.002))]
)
def test_what_is_guessed_ahead_of_other_tokens_or_another_price_is_dropped(said, asked):
    grown, alone = (drafter_of(0, [*range(20), *range(20), 0]) for _ in range(2))
    for drafter in (grown, alone):
        drafter.propose([0], [4], 0.001)
        assert drafter is alone or drafter.grow()
        drafter.accept([0], [np.array(said)])
    most, least = asked
    assert grown.propose([0], [most], least) == alone.propose([0], [most], least)


def test_a_row_that_begins_again_has_no_open_draft():
    drafter = drafter_of(0, [1, 2, 1])
    drafter.propose([0], [4], 0.001)
    drafter.begin(0, np.array([9]), np.array([1, 2, 1, 2]))
    assert not drafter.grow() and drafter.propose([0], [1], 0.001)[0].tokens == [1]


def test_a_turn_tells_what_was_said_and_asks():
    reply = taken(drafter_of(0, [1, 2, 1]), DraftTurn(3, [("accept", ([0], [np.array([2])]))], [0], [2], 0.001))
    assert reply == (3, [Draft([1, 2], [0, 1])])


def test_a_drafter_gives_its_memory_back_before_the_next_drafts(tmp_path):
    drafter = ApartDrafter(partial(Sleeper, tmp_path / "slept"), Stats)
    drafter.sleep()
    up(drafter)
    assert (tmp_path / "slept").exists()
    drafter._pool.close()


def test_an_error_of_the_drafter_reaches_the_engine():
    drafter, counts = ApartDrafter(partial(SuffixDrafter, 4), Stats), DraftTurn(0, [], [], [], 0.0)
    inner = drafter_of(0, [1, 2, 1])
    inner.propose([0], [1], 0.001)
    number, error = pickle.loads(pickle.dumps(taken(inner, DraftTurn(0, [], [0], [1], 0.001))))
    with raises(DraftError, "draft.open"):
        drafter._take(counts, number, error)
    drafter._pool.close()


def test_a_replaced_drafter_knows_the_rows_in_flight():
    stats = Stats()
    drafter = ApartDrafter(partial(SuffixDrafter, 4), lambda: stats)
    up(drafter)
    drafter.begin(0, np.array([9]), np.array([1, 2]))
    drafter.propose([0], [2], 0.001)
    drafter.accept([0], [np.array([1])])
    drafter.expect([0], [2], 0.001)
    os.kill(drafter.pid, signal.SIGKILL)
    while not stats.lost_drafters:
        drafter._hear(60.0)
    assert drafter.propose([0], [2], 0.001) == [Draft()] and stats.undrafted_passes == 1
    up(drafter)
    assert drafter.propose([0], [2], 0.001) == [Draft([2, 1], [0, 1])]
    drafter._pool.close()


def test_rounds_and_verdicts_are_checked():
    drafter = ApartDrafter(partial(SuffixDrafter, 4), Stats)
    up(drafter)
    with raises(DraftError, "draft.round"):
        drafter._take(DraftTurn(4, [], [], [], 0.0), 5, [])
    drafter.begin(0, np.array([9]), np.array([1, 2, 1]))
    drafter.expect([0], [2], 0.001)
    with raises(DraftError, "draft.open"):
        drafter.expect([0], [2], 0.001)
    assert drafter.propose([0], [1], 0.001) == [Draft([2], [0])]  # of the two that were asked for
    drafter._pool.close()


def test_ranks_of_one_engine_guess_alike():
    dims = ParallelDims.of(Mesh.of({"tp": 2}), 0)
    with raises(EngineError, "draft.apart.tp"):
        check_divided(dims, compile=False, parity=False, apart=True)


def test_the_process_imports_no_torch():
    code = "import sys; from tilth.engines import apart, suffix; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
