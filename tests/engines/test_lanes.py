"""Lanes: rows come, grow, move and go; their state and their cache stay together."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.reference import CONFIG
from tests.examples import examples
from tilth.engines.cache import KVCache
from tilth.engines.lanes import LengthBucket
from tilth.engines.request import Request, SamplingParams, SequenceState
from tilth.engines.stops import StopStrings
from tilth.plan.kernels import KEYS, limit_for, round_up, slots_for


def new_slab():
    return KVCache(CONFIG, torch.float32, torch.device("cpu"))


def draw(requests, starts, count):
    """A number that says whose it is and of which position."""
    return np.array(
        [[i * 1000 + s + k for k in range(count)] for i, s in zip((r.id for r in requests), starts)], np.float32
    )


def answer(i, length, more=50, **params):
    return SequenceState.start(Request(i, np.full(length, i), SamplingParams(max_tokens=more, **params)))


def staged(answers):
    """A slab whose row r, token t holds id * 1000 + t."""
    slab = new_slab()
    slab.layout(len(answers), max(len(a.tokens) for a in answers))
    for tensor in [*slab.keys, *slab.values]:
        for row, a in enumerate(answers):
            tensor[row] = a.request.id * 1000.0 + torch.arange(slab.capacity)[:, None]
    return slab


def place(lane, answers):
    lane.place(answers, staged(answers), range(len(answers)), draw)


def step(lane):
    """Decode without a model: KV of the newest token is written, the token after position p is p + 1."""
    rows = lane.compact()
    at = lane.columns.position[:rows].copy()
    for tensor in [*lane.slab.keys, *lane.slab.values]:
        for row in np.flatnonzero(lane.columns.live[:rows]):
            tensor[row, :, at[row]] = lane.answer(row).request.id * 1000.0 + at[row]
    return lane.advance(
        at[:, None] + 1, -at[:, None].astype(np.float32), None, lane.columns.live[: len(at)].astype(int)
    )


def verify(lane):
    for row in lane.rows:
        a, p = lane.answers[row], lane.columns.position[row]
        i = a.request.id
        for tensor in [*lane.slab.keys, *lane.slab.values]:
            assert torch.equal(tensor[row, 0, :p, 0], i * 1000.0 + torch.arange(p))
        last = min(a.end, lane.limit)
        wanted = i * 1000 + np.arange(p + 1, last)
        assert np.array_equal(lane.columns.uniform[row, p + 1 : last], wanted)
        assert lane.columns.end[row] == a.end
    assert not lane.columns.position[~lane.columns.live].any()


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_random_comings_and_goings(data):
    lane, other, ids = LengthBucket(32, new_slab(), 40), LengthBucket(64, new_slab(), 40), iter(range(1, 10_000))
    for _ in range(data.draw(st.integers(1, 25))):
        live = int(lane.columns.live.sum())
        if live < 30 and data.draw(st.booleans()):
            lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=10))
            new = [answer(next(ids), n) for n in lengths]
            for a in new:
                a.stops = StopStrings(("x",), None) if len(a.tokens) == 7 else None
            place(lane, new)
        ended = step(lane)
        verify(lane)
        want = round_up(int(lane.columns.live.sum()), 8)
        assert (lane.rows < want).all()
        for row in ended:
            lane.take(row)
        for row in lane.rows:
            if data.draw(st.integers(0, 9)) == 0:
                kept, p = lane.answers[row], int(lane.columns.position[row])
                start = len(kept.tokens)
                taken = lane.take(row)
                assert taken is kept and len(taken.tokens) == p + 1
                assert taken.tokens[start:].tolist() == list(range(start, p + 1))
                assert taken.logprobs[start:].tolist() == [-t for t in range(start - 1, p)]
        grown = lane.outgrown()
        if len(grown):
            other.adopt(lane, grown, draw)
        verify(other)
        assert not len(lane.outgrown())
        assert lane.watched == {r for r in lane.rows if lane.answers[r].stops}
        if len(other.rows) > 20:
            for row in other.rows:
                other.take(row)


def test_holes_are_filled_before_rows_move():
    lane = LengthBucket(64, new_slab(), 64)
    place(lane, [answer(i, 5) for i in range(1, 17)])
    step(lane)
    moves = []
    lane.slab.copy = lambda *args: moves.append(args)
    for row in (0, 3, 9):
        lane.take(row)
    assert lane.compact() == 16 and not moves  # 13 rows: 16 are computed anyway
    del lane.slab.copy
    place(lane, [answer(20, 5)])
    assert lane.answer(0).request.id == 20
    for row in (1, 2, 4, 5, 6):
        lane.take(row)
    assert lane.compact() == 16  # 9 rows
    lane.take(7)
    assert lane.compact() == 8
    assert sorted(lane.answer(r).request.id for r in lane.rows) == [9, 11, 12, 13, 14, 15, 16, 20]
    lane.take(7)
    assert lane.compact() == 7  # holes behind the last row do not decode
    verify(lane)


def test_ends():
    lane = LengthBucket(64, new_slab(), 8)
    place(lane, [answer(1, 4, more=3), answer(2, 4, stop_tokens=(5, 7)), answer(3, 9, stop_tokens=(9,))])
    ended = []
    for _ in range(3):
        ended.append(step(lane).tolist())
        for row in ended[-1]:
            lane.take(row)
    assert ended == [[2], [1], [0]]


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 300, 499])
def test_a_lane_has_room_for_the_next_token(length):
    limit = limit_for(length, 500)
    assert length < limit or limit == 512
    assert limit in (128, 256, 512)


def test_slots():
    sizes = [slots_for(n) for n in range(1, 5000)]
    assert all(s >= n and s % KEYS == 0 for n, s in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert all(s - n < max(16, 0.35 * n) for n, s in enumerate(sizes, 1))


def test_shape_follows_the_longest_row():
    lane = LengthBucket(256, new_slab(), 8)
    place(lane, [answer(1, 20, more=200), answer(2, 3)])
    assert (lane.slab.rows, lane.slab.capacity) == (8, 32)
    for _ in range(100):
        for row in step(lane):
            lane.take(row)
    assert lane.slab.capacity == slots_for(120)
    verify(lane)
    lane.take(0)
    place(lane, [answer(3, 5)])
    assert lane.slab.capacity == 16
