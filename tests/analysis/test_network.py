"""Transfers apart from waiting, links with a known truth, and other networks."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilth_studies.other_network import ROOM, assumed, parse_bandwidth, parse_seconds, retimed

from tests.errors import raises
from tests.examples import examples
from tilth.analysis.events import from_table
from tilth.analysis.network import links, meetings, wire
from tilth.core.errors import DataError
from tilth.trace.writer import EVENTS

LATENCY, BANDWIDTH = 20e-6, 1e9


def table(rows):
    """Events out of dicts; what a row does not say is 0, -1 or empty."""
    usual = {
        "attempt": 1, "parent": -1, "depth": 0, "detail": "", "seq": -1, "role": "policy", "place": "", "step": 1,
        "micro_batch": -1, "tokens": 0, "squares": 0, "bytes": 0, "flops": 0.0, "thread": "MainThread",
    }  # fmt: skip
    full = [usual | {"id": i} | row for i, row in enumerate(rows)]
    return from_table(pa.table({f.name: pa.array([r.get(f.name) for r in full], f.type) for f in EVENTS}))


def met(op, seq, arrivals, took, *, nbytes=0, step=1, detail=None):
    """One communication: each rank arrives (ns), and leaves ``took`` ns after the last."""
    detail = detail or ",".join(map(str, range(len(arrivals))))
    return [
        {"op": op, "rank": r, "seq": seq, "detail": detail, "start": a, "duration": max(arrivals) + took - a,
         "bytes": nbytes, "step": step}
        for r, a in enumerate(arrivals)
    ]  # fmt: skip


def run(ops=("all_reduce",), ranks=2, steps=10, noise=0.0, seed=0, sizes=(8, 1_000, 300_000)):
    """Communications over a link of LATENCY and BANDWIDTH, with random arrivals."""
    draw, rows, seq = np.random.default_rng(seed), [], 0
    for step in range(1, steps + 1):
        for op in ops:
            for size in sizes:
                messages, moved = wire(op, ranks, size)
                took = (messages * LATENCY + moved / BANDWIDTH) * draw.lognormal(0, noise)
                arrivals = (draw.integers(0, 10**6, ranks) + seq * 10**7).tolist()
                rows += met(op, seq, arrivals, round(took * 1e9), nbytes=size, step=step)
                seq += 1
    return table(rows)


@pytest.mark.parametrize(
    ("op", "ranks", "messages", "moved"),
    [
        ("all_reduce", 4, 6, 1.5), ("reduce_scatter", 4, 3, 0.75), ("all_gather", 4, 3, 3), ("broadcast", 4, 3, 1),
        ("send", 2, 1, 1), ("receive", 2, 1, 1), ("all_reduce", 1, 0, 0), ("all_gather", 1, 0, 0),
        ("broadcast", 1, 0, 0),
    ],
)  # fmt: skip
def test_bytes_on_the_wire_of_rings(op, ranks, messages, moved):
    found = wire(op, ranks, np.array([100.0, 0.0]))
    assert found[0] == messages and found[1].tolist() == [100 * moved, 0]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_an_all_reduce_is_a_scatter_and_a_gather(ranks):
    whole, part = 840.0, 840.0 / ranks
    scatter, gather = wire("reduce_scatter", ranks, whole), wire("all_gather", ranks, part)
    both = wire("all_reduce", ranks, whole)
    assert both[0] == scatter[0] + gather[0] and both[1] == pytest.approx(scatter[1] + gather[1])


def test_bytes_of_what_is_no_communication():
    with raises(DataError, "forward"):
        wire("forward", 2, 1.0)


def test_waiting_is_no_transfer():
    events = table(met("all_reduce", 0, [0, 700], 50) + met("all_reduce", 1, [2000, 1000], 30))
    found = meetings(events)
    assert found.transfer.tolist() == [50, 50, 30, 30] and found.ranks.tolist() == [2] * 4
    assert len(set(found.number.tolist())) == 2


def test_a_member_that_left_before_the_last_came_moved_nothing():
    """A send into a buffer; or clocks that differ."""
    rows = met("all_reduce", 0, [0, 700], 50)
    rows[0] |= {"op": "send", "detail": "0>1", "duration": 10}
    rows[1] |= {"op": "receive", "detail": "0>1"}
    found = meetings(table(rows))
    assert found.transfer.tolist() == [0, 50] and len(set(found.number.tolist())) == 1


def test_only_whole_meetings_count():
    lonely = met("all_reduce", 1, [5000, 6000], 30)[:1]
    twice = met("all_reduce", 2, [7000, 7000], 30) + met("all_reduce", 2, [8000, 8000], 30)
    nameless = [{"op": "broadcast", "rank": 0, "start": 9000, "duration": 5, "detail": "world", "seq": 0}]
    unnumbered = [{"op": "broadcast", "rank": 0, "start": 9500, "duration": 5, "detail": "0"}]
    other = [{"op": "call", "rank": 0, "start": 9900, "duration": 5, "detail": "0,1", "seq": 0}]
    events = table(met("all_reduce", 0, [0, 700], 50) + lonely + twice + nameless + unnumbered + other)
    found = meetings(events)
    assert found.rows.tolist() == [0, 1]
    after = retimed(events, latency=1.0, bandwidth=1.0)
    assert after[:2].tolist() == [2 * 10**9] * 2 and after[2:].tolist() == events.duration[2:].tolist()


def test_groups_of_different_ranks_with_equal_numbers_are_apart():
    rows = met("all_reduce", 0, [0, 100], 50, detail="0,1") + [
        r | {"rank": r["rank"] + 2} for r in met("all_reduce", 0, [10, 900], 70, detail="2,3")
    ]
    assert sorted(meetings(table(rows)).transfer.tolist()) == [50, 50, 70, 70]


def test_a_run_without_communications():
    events = table([{"op": "forward", "rank": 0, "start": 0, "duration": 5}])
    assert links(events) == [] and len(meetings(events).rows) == 0
    assert retimed(events, latency=1.0).tolist() == [5]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_link_of_exact_transfers(ranks):
    ops = ("all_gather", "all_reduce", "broadcast", "reduce_scatter")
    found = links(run(ops, ranks))
    assert [(k.op, k.ranks, k.separate, k.least, k.greatest) for k in found] == [
        (op, ranks, True, 8, 300_000) for op in ops
    ]
    for link in found:
        assert link.latency == pytest.approx(LATENCY, rel=1e-3)
        assert link.bandwidth == pytest.approx(BANDWIDTH, rel=1e-3)
        assert link.error.p90 < 1e-3 and link.error.held_out and link.error.count == 2 * 3 * ranks  # steps 5, 10


def test_the_link_of_noisy_transfers_with_stalls():
    events = run(noise=0.1, steps=60)
    stalled = np.random.default_rng(3).random(len(events)) < 0.1
    events = replace(events, duration=events.duration + 10**8 * stalled)
    (link,) = links(events)
    assert link.latency == pytest.approx(LATENCY, rel=0.1)
    assert link.bandwidth == pytest.approx(BANDWIDTH, rel=0.1)
    assert link.error.median < 0.15


def test_one_size_tells_no_latency():
    (link,) = links(run(sizes=(100_000,)))
    assert not link.separate and link.latency == 0
    assert float(link.seconds(100_000)) == pytest.approx(2 * LATENCY + 1e5 / BANDWIDTH, rel=1e-3)


def test_what_one_size_does_not_tell_is_named():
    """4 KB whose time is software's: as of bandwidth it becomes any times as fast, so somebody must say so."""
    one, several, packets = run(sizes=(4096, 5000)), run(sizes=(4096, 10**6)), run(sizes=(8, 300))
    assert assumed(one, bandwidth=1e12) == ("all_reduce among 2 ranks: 4,096 to 5,000 bytes",)
    assert assumed(one, latency=1e-6) == assumed(one, bandwidth=1e12) == assumed(one, None, 1e12, np.arange(3))
    assert assumed(one) == assumed(one, 1e-6, 1e12) == () == assumed(one, None, 1e12, np.array([99]))
    assert assumed(several, bandwidth=1e12) == () == assumed(packets, bandwidth=1e12)
    mixed = run(("all_reduce", "all_gather"), ranks=4, sizes=(4096,))
    assert [text.split(":")[0] for text in assumed(mixed, bandwidth=1e9)] == [
        "all_reduce among 4 ranks", "all_gather among 4 ranks",
    ]  # fmt: skip


def test_a_packet_tells_no_bandwidth():
    (link,) = links(run(sizes=(8, 300), noise=0.3, steps=40))
    assert not link.separate and link.bandwidth == float("inf")
    assert link.latency == pytest.approx(LATENCY + 7.5e-8, rel=0.1)
    assert (links(run(sizes=(8, 3000)))[0].separate, link.least, link.greatest) == (True, 8, 300)


def test_nothing_but_messages_without_content():
    (link,) = links(run(sizes=(0,)))
    assert link.latency == pytest.approx(LATENCY) and link.bandwidth == float("inf")


def test_the_same_network_gives_the_recorded_transfers():
    events = run(noise=0.5)
    (link,) = links(events)
    transfers = retimed(events)
    assert transfers.tolist() == meetings(events).transfer.tolist()
    same = retimed(events, link.latency, link.bandwidth)
    assert np.abs(same - transfers).max() <= 1


def test_another_network_of_exact_transfers():
    events = run(("all_reduce", "all_gather"), 3)
    latency, bandwidth = 5e-6, 1e7
    expected = np.zeros(len(events))
    for op in ("all_reduce", "all_gather"):
        mine = events.op.is_(op)
        messages, moved = wire(op, 3, events.bytes[mine])
        expected[mine] = 1e9 * (messages * latency + moved / bandwidth)
    np.testing.assert_allclose(retimed(events, latency, bandwidth), expected, rtol=2e-3)


def test_a_network_that_changes_in_the_run():
    """Steps 6 to 10 are ten times as slow. What is typical is asked of them, or of the others."""
    slow = run(steps=10)
    later = slow.step > 5
    factor = np.where(later, 10, 1)
    transfers = retimed(slow)
    events = replace(slow, duration=slow.duration + (factor - 1) * transfers)
    (link,) = links(slow)
    back = retimed(events, link.latency, link.bandwidth, steps=np.arange(6, 11))
    np.testing.assert_allclose(back[later], transfers[later], rtol=1e-2)
    same = retimed(events, link.latency, link.bandwidth, steps=np.arange(1, 6))
    np.testing.assert_allclose(same[~later], transfers[~later], rtol=1e-2)
    assert (same[later] > 5 * transfers[later]).all()  # delays, by the measure of the others
    assert retimed(events, 1.0, 1.0, steps=np.array([99])).tolist() == retimed(events).tolist()  # none of them


def test_one_of_both_leaves_the_other_as_it_was():
    events = run()
    small = events.bytes == 8
    slower = retimed(events, bandwidth=BANDWIDTH / 100)
    np.testing.assert_allclose(slower[small], retimed(events)[small], rtol=0.05)
    np.testing.assert_allclose(slower[events.bytes == 300_000], 2e4 * 2 * 0.5 * 3000 / 2 + 2 * LATENCY * 1e9, rtol=0.05)
    quick = retimed(events, latency=0.0)
    np.testing.assert_allclose(quick[small], 8, atol=2)


def test_noise_of_a_fast_link_is_not_that_of_a_slow_one():
    """What came beside the transfer comes beside the longer one too, and is not multiplied."""
    events = run(noise=0.5, sizes=(8, 300_000), steps=40)
    (link,) = links(events)
    before, after = retimed(events), retimed(events, bandwidth=link.bandwidth / 100)
    more = 1e9 * 99 * wire("all_reduce", 2, events.bytes)[1] / link.bandwidth
    np.testing.assert_allclose(after, before + more, atol=2)
    back = retimed(replace(events, duration=events.duration + after - before), bandwidth=link.bandwidth)
    assert np.median(np.abs(back - before) / before) < 0.5


def test_a_stall_stays_one():
    """A tenth of a second is no matter of the bandwidth."""
    events = run(steps=40)
    rows = np.flatnonzero(events.bytes == 300_000)[:2]
    stalled = np.isin(np.arange(len(events)), rows)
    events = replace(events, duration=events.duration + 10**8 * stalled)
    after = retimed(events, bandwidth=BANDWIDTH * 10)[rows]
    usual = retimed(events)[np.flatnonzero(events.bytes == 300_000)[2]]
    assert (after > 0.99 * (10**8 - ROOM * usual)).all() and (after < 10**8).all()


@settings(max_examples=examples(20), deadline=None)
@given(st.floats(0, 1e-3), st.floats(1e5, 1e12), st.floats(1, 100), st.integers(0, 10))
def test_a_worse_network_takes_no_less(latency, bandwidth, factor, seed):
    events = run(noise=0.4, steps=4, seed=seed)
    now = retimed(events, latency, bandwidth)
    assert (now >= 0).all()
    assert (retimed(events, latency * factor, bandwidth) >= now).all()
    assert (retimed(events, latency, bandwidth / factor) >= now).all()


@pytest.mark.parametrize(("latency", "bandwidth"), [(-1e-6, None), (float("nan"), None), (None, 0.0), (None, -1.0)])
def test_networks_that_are_none(latency, bandwidth):
    with raises(DataError, "bandwidth" if latency is None else "latency"):
        retimed(run(steps=1), latency, bandwidth)


@pytest.mark.parametrize(
    ("text", "value"),
    [("10Gbit", 1.25e9), ("10 Gbit/s", 1.25e9), ("25Gbps", 3.125e9), ("1.25GB/s", 1.25e9), ("800MiB", 800 * 2**20),
     ("56kbit", 7e3), ("8bit", 1.0), ("2Tbit/s", 2.5e11)],
)  # fmt: skip
def test_bandwidths(text, value):
    assert parse_bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "10", "10G", "0Gbit", "-1Gbit", "1.2.3Gbit", "10gbit", ".Gbit", "10 Gbit/h"])
def test_bandwidths_that_are_none(text):
    with raises(DataError, "bandwidth"):
        parse_bandwidth(text)


@pytest.mark.parametrize(("text", "value"), [("50us", 5e-5), ("0.2 ms", 2e-4), ("3ns", 3e-9), ("1s", 1.0), ("0s", 0.0)])
def test_latencies(text, value):
    assert parse_seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "50", "us", "-1us", "1.2.3s", "5m"])
def test_latencies_that_are_none(text):
    with raises(DataError, "latency"):
        parse_seconds(text)
