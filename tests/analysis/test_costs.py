"""Costs of work: the law behind a trace comes back, its error is stated, and nothing is answered beyond it."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.analysis.costs import ENOUGH, fit_costs
from tilth.analysis.events import from_table
from tilth.core.errors import DataError, StorageError
from tilth.plan.costs import LEARN, REACH, Costs, as_dict, load_costs, save_costs, wire
from tilth.plan.packing import balance
from tilth.trace.writer import EVENTS

FORWARD = (2e-6, 3e-9, 1e-3)  # seconds a token, a square, and each


def table(rows):
    """Events out of dicts; what a row does not say is 0, -1 or empty."""
    usual = {
        "attempt": 1, "rank": 0, "parent": -1, "depth": 0, "detail": "", "seq": -1, "role": "policy", "place": "",
        "step": 1, "micro_batch": -1, "tokens": 0, "squares": 0, "bytes": 0, "flops": 0.0, "thread": "MainThread",
    }  # fmt: skip
    full = [usual | {"id": i, "start": 10**9 * i} | row for i, row in enumerate(rows)]
    return from_table(pa.table({f.name: pa.array([r.get(f.name) for r in full], f.type) for f in EVENTS}))


def took(tokens, squares, law=FORWARD):
    return law[0] * tokens + law[1] * squares + law[2]


def passes(steps=20, each=4, noise=0.0, slow=None, seed=0, op="forward"):
    """Passes of two ranks; rank ``slow`` takes 1.4 times as long."""
    draw, rows = np.random.default_rng(seed), []
    for step in range(1, steps + 1):
        for rank in (0, 1):
            for micro in range(each):
                tokens = int(draw.integers(200, 4000))
                squares = tokens * int(draw.integers(10, 300))
                seconds = took(tokens, squares) * draw.lognormal(0, noise) * (1.4 if rank == slow else 1)
                rows.append({"op": op, "step": step, "rank": rank, "micro_batch": micro, "tokens": tokens,
                             "squares": squares, "duration": round(seconds * 1e9)})  # fmt: skip
    return rows


def meetings(count=40):
    rows = []
    for seq in range(count):
        size = 1000 * 4 ** (seq % 4)
        messages, moved = wire("all_reduce", 2, size)
        rows += [
            {"op": "all_reduce", "rank": r, "detail": "0,1", "seq": seq, "bytes": size, "start": 10**8 * seq,
             "duration": round(1e9 * (messages * 5e-5 + moved / 2e8)), "step": 1 + seq // 4}
            for r in (0, 1)
        ]  # fmt: skip
    return rows


@pytest.fixture(scope="module")
def costs():
    return fit_costs(table(passes(noise=0.02) + meetings()), {"run": "one"})


def test_the_law_comes_back():
    (found,) = fit_costs(table(passes())).compute
    assert (found.op, found.role, found.count, found.separate) == ("forward", "policy", 160, True)
    assert (found.per_token, found.per_square, found.fixed) == pytest.approx(FORWARD, rel=1e-4)
    assert found.error.p90 < 1e-4 and found.error.held_out and found.error.count == 32
    assert float(found.seconds(1000, 50_000)) == pytest.approx(took(1000, 50_000), rel=1e-4)


def test_a_role_s_rows_cost_what_its_passes_do():
    found = fit_costs(table(passes() + passes(op="backward") + passes(op="infer")))
    lengths = np.array([10, 200, 5000])  # the last one is longer than those that were fitted
    once = FORWARD[0] * lengths + FORWARD[1] * lengths**2
    assert found.rows("policy")(lengths) == pytest.approx(2 * once, rel=1e-3)
    with raises(DataError, "critic.forward"):
        found.rows("critic")
    both = replace(found, compute=(*found.compute, replace(found.of("infer", "policy"), op=LEARN)))
    assert both.rows("policy")(lengths) == pytest.approx(once, rel=1e-3)


def test_noise_becomes_the_stated_error(costs):
    found = costs.of("forward", "policy")
    assert found.error.median == pytest.approx(0.02 * 0.6745, rel=0.5)  # median of |normal|
    assert found.error.p90 == pytest.approx(0.02 * 1.645, rel=0.5)
    tokens, squares = np.array([300.0, 3000]), np.array([60_000.0, 500_000])
    np.testing.assert_allclose(found.seconds(tokens, squares), took(tokens, squares), rtol=0.02)


def test_a_slow_rank_shows():
    (found,) = fit_costs(table(passes(slow=1))).compute
    times = dict(found.ranks)
    assert times[1] / times[0] == pytest.approx(1.4, rel=0.02)


def test_work_within_work_is_not_counted_twice():
    """Communications inside a forward are not its own time, and a phase that holds forwards has no cost itself."""
    rows = passes(op="forward")
    held = [r | {"id": 1000 + i, "start": 10**9 * i, "duration": r["duration"] + 10**7, "role": "policy"}
            for i, r in enumerate(rows)]  # fmt: skip
    inside = [{"op": "broadcast", "id": 5000 + i, "parent": 1000 + i, "start": r["start"] + 5, "duration": 10**7,
               "rank": r["rank"]} for i, r in enumerate(held)]  # fmt: skip
    phase = [{"op": "logprobs", "id": 9000 + i, "start": r["start"] - 5, "duration": 2 * 10**7, "tokens": 50,
              "rank": r["rank"]} for i, r in enumerate(held)]  # fmt: skip
    held = [r | {"parent": 9000 + i} for i, r in enumerate(held)]
    (found,) = fit_costs(table(held + inside + phase)).compute
    assert found.op == "forward"
    assert (found.per_token, found.per_square, found.fixed) == pytest.approx(FORWARD, rel=1e-3)


def test_a_scoring_phase_that_holds_nothing_is_work():
    rows = [r | {"op": "logprobs", "role": "reference"} for r in passes()]
    waits = [{"op": "await", "role": "reference", "duration": 10**6} for _ in range(20)]
    costs = fit_costs(table(rows + waits))
    assert [(c.op, c.role) for c in costs.compute] == [("logprobs", "reference")]
    assert costs.compute[0].per_token == pytest.approx(FORWARD[0], rel=1e-3)


def test_equal_amounts_go_by_the_token():
    rows = [{"op": "forward", "tokens": 500, "duration": 10**6, "step": i} for i in range(20)]
    (found,) = fit_costs(table(rows)).compute
    assert not found.separate and found.fixed == 0
    assert found.per_token == pytest.approx(2e-6) and float(found.seconds(600)) == pytest.approx(1.2e-3)
    assert found.squares == (0, 0)


def test_sequences_of_one_length_go_by_the_token():
    """Otherwise noise decides how much of the time is attention, and long sequences cost whatever."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(10, 100, 80) * 16
    rows = [{"op": "forward", "tokens": t, "squares": 16 * t, "duration": round(1e3 * t * draw.lognormal(0, 0.2)),
             "step": i // 4} for i, t in enumerate(tokens.tolist())]  # fmt: skip
    odd = {"op": "forward", "tokens": 20, "squares": 100, "duration": 20_000, "step": 3}
    (found,) = fit_costs(table([*rows, odd])).compute
    assert found.separate and not found.separate_squares and found.per_square == 0
    assert found.per_token == pytest.approx(1e-6, rel=0.1)
    assert found.lengths == (5, 16)
    with raises(DataError, "tokens a sequence"):
        found.seconds(320, 64 * 320)
    with raises(DataError, "tokens a sequence"):
        found.rows(np.array([8, 64]))
    assert found.rows(np.array([8, 64]), beyond=True)[1] == 8 * found.rows(np.array([8]))[0]
    assert found.rows(np.zeros(0)).tolist() == []


def test_what_has_no_amount_has_a_fixed_cost():
    rows = [{"op": "optimizer", "duration": 5 * 10**6, "step": i} for i in range(20)]
    (found,) = fit_costs(table(rows)).compute
    assert float(found.seconds()) == pytest.approx(5e-3)


def test_a_step_that_was_skipped_costs_nothing_to_learn_from():
    """Most of them are, here."""
    rows = [{"op": "optimizer", "duration": 5 * 10**6 if i % 3 == 0 else 3000, "step": i} for i in range(60)]
    (found,) = fit_costs(table(rows)).compute
    assert found.count == 20 and float(found.seconds()) == pytest.approx(5e-3)
    assert found.error.p90 < 1e-6


def test_nothing_is_answered_beyond_what_was_fitted(costs):
    found = costs.of("forward", "policy")
    most = found.tokens[1]
    assert found.seconds(most * REACH * 0.99, found.squares[1]).shape == ()
    with raises(DataError, "tokens"):
        found.seconds(most * 2, found.squares[1])
    with raises(DataError, "tokens"):
        found.seconds(np.array([most, 0]), found.squares[1])
    with raises(DataError, "squares"):
        found.seconds(most, found.squares[1] * 2)
    assert float(found.seconds(most * 2, found.squares[1], beyond=True)) > float(found.seconds(most, found.squares[1]))


def test_communications(costs):
    found = costs.communication("all_reduce", 2, np.array([1000, 64_000]))
    assert found.tolist() == pytest.approx([1e-4 + 5e-6, 1e-4 + 3.2e-4], rel=1e-3)
    with raises(DataError, "bytes"):
        costs.communication("all_reduce", 2, 1e6)
    assert float(costs.communication("all_reduce", 2, 1e6, beyond=True)) == pytest.approx(1e-4 + 5e-3, rel=1e-2)


def test_what_was_not_fitted_is_named(costs):
    with raises(DataError, "rollout.decode"):
        costs.of("decode", "rollout")
    with raises(DataError, "all_reduce.8"):
        costs.link("all_reduce", 8)
    with raises(DataError, "all_reduce.8"):
        Costs((), ()).link("all_reduce", 8)


def test_rows_for_a_balance(costs):
    """Long rows weigh more than their tokens."""
    found = costs.of("forward", "policy")
    rows = found.rows(np.array([30, 300]))
    assert rows[1] > 10 * rows[0]
    assert rows.tolist() == pytest.approx([6e-5 + 2.7e-6, 6e-4 + 2.7e-4], rel=0.05)
    parts = balance(found.rows(np.array([300, 150, 150, 150])), 2)
    assert [len(p) for p in parts] == [1, 3]  # by tokens alone it would be two and two


def test_a_stated_error_is_of_steps_that_were_kept_out():
    """Every fifth step alone has long sequences: what a square costs cannot be known from the others."""
    rows = []
    for row in passes():
        squares = row["tokens"] * (1000 if row["step"] % 5 == 0 else 10)
        rows.append(row | {"squares": squares, "duration": round(took(row["tokens"], squares) * 1e9)})
    (found,) = fit_costs(table(rows)).compute
    assert (found.per_token, found.per_square, found.fixed) == pytest.approx(FORWARD, rel=1e-2)
    assert found.error.held_out and found.error.count == 4 * 8
    assert 0.4 < found.error.median < 0.6 and found.error.p90 < 0.6  # of 5 us a token 3 are for squares


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 2**16), st.floats(0, 0.5))
def test_costs_are_never_negative(seed, noise):
    for one in fit_costs(table(passes(steps=4, noise=noise, seed=seed))).compute:
        assert min(one.fixed, one.per_token, one.per_square) >= 0
        assert (one.rows(np.arange(10)) >= 0).all()


def test_too_few_spans_are_said():
    few = [{"op": "decode", "role": "rollout", "tokens": 5, "duration": 10}] * (ENOUGH - 1)
    assert fit_costs(table(passes() + few)).left == (f"decode of rollout: {ENOUGH - 1} of {ENOUGH} spans",)
    with raises(DataError, "events.few"):
        fit_costs(table(few))
    with raises(DataError, "events.work"):
        fit_costs(table([{"op": "step", "role": "", "duration": 10}]))


def test_too_few_communications_are_said():
    costs = fit_costs(table(passes() + meetings(3)))
    assert costs.links == () and costs.left == (f"all_reduce among 2 ranks: 6 of {ENOUGH} spans",)


def test_saved_and_read_again(costs, tmp_path):
    path = tmp_path / "costs.json"
    save_costs(costs, path)
    assert load_costs(path) == costs
    assert json.loads(path.read_text())["about"] == {"run": "one"}
    assert {c["op"] for c in json.loads(path.read_text())["compute"]} == {"forward"}


def test_what_is_no_number_survives_as_such(costs, tmp_path):
    link = replace(costs.links[0], bandwidth=math.inf, error=replace(costs.links[0].error, median=math.nan))
    save_costs(replace(costs, links=(link,)), tmp_path / "costs.json")
    again = load_costs(tmp_path / "costs.json").links[0]
    assert math.isinf(again.bandwidth) and math.isnan(again.error.median) and again.error.p90 == link.error.p90


def test_where_it_cannot_be_written(costs, tmp_path):
    with raises(StorageError, "costs.json"):
        save_costs(costs, tmp_path / "nowhere" / "costs.json")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda d: "text", "format"),
        (lambda d: d | {"format": "other"}, "format"),
        (lambda d: d | {"version": 7}, "version"),
        (lambda d: {k: v for k, v in d.items() if k != "links"}, "links"),
        (lambda d: d | {"compute": [d["compute"][0] | {"per_token": -1.0}]}, "compute.0.per_token"),
        (lambda d: d | {"compute": [d["compute"][0] | {"fixed": "much"}]}, "compute.0.fixed"),
        (lambda d: d | {"compute": [d["compute"][0] | {"tokens": [1]}]}, "compute.0.tokens.1"),
        (lambda d: d | {"compute": [d["compute"][0] | {"ranks": []}]}, "compute.0.ranks"),
        (lambda d: d | {"compute": ["x"]}, "compute.0"),
        (lambda d: d | {"links": [d["links"][0] | {"error": None}]}, "links.0.error"),
    ],
)
def test_files_that_are_none(costs, tmp_path, change, field):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(change(as_dict(costs))))
    with raises(DataError, f"costs.json.{field}") as raised:
        load_costs(path)
    assert str(path) in str(raised.value)


def test_files_that_are_not_there_or_torn(costs, tmp_path):
    with raises(DataError, "none.json"):
        load_costs(tmp_path / "none.json")
    path = tmp_path / "torn.json"
    path.write_text(json.dumps(as_dict(costs))[:-20])
    with raises(DataError, "torn.json.syntax"):
        load_costs(path)
