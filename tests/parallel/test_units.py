"""Hybrid data parallelism: units of any ranks are one process, send what the plan says, and check each other."""

import numpy as np
import pytest

from tests.parallel.layouts import CONFIG, LENGTHS, Case, train
from tests.parallel.test_comm import rows
from tests.parallel.test_training import apart, check_double, check_floats
from tests.parallel.units import BROKEN
from tilth.plan.context import ZigZag

pytestmark = pytest.mark.dist
HERE = "tests.parallel.units:"
MIXED = {"experts": True, "num_experts": 4, "both": True}
TWO, FOUR = {"hdp": 2, "micro_tokens": 6}, {"hdp": 4, "micro_tokens": 3}
"""The longest of 12 tokens is on both ranks, or on all four; most are on one."""

CASES = [Case(**TWO, double=True, dropout=0.1, checkpointing=True, tied=False)]
MORE = [
    Case(**TWO, double=True, value=True, experts=True),
    Case(**FOUR, double=True, dropout=0.1),
    Case(hdp=4, micro_tokens=5, double=True, experts=True, checkpointing=True),
    Case(hdp=4, micro_tokens=12, double=True, tied=False),
    Case(**TWO, double=True, lora=True, lora_dropout=0.3, checkpointing="selective"),
    Case(**TWO, double=True, layers=4, offload=0.5, dropout=0.1),
    Case(**TWO, pp=2, double=True, layers=6, offload=0.3),
    Case(**TWO, tp=2, double=True, dropout=0.1, tied=False),
    Case(**TWO, tp=2, sp=True, double=True, value=True),
    Case(**TWO, pp=2, double=True, dropout=0.1),
    Case(**TWO, pp=2, double=True, layers=4, schedule="interleaved", value=True),
    Case(**TWO, pp=2, double=True, schedule="zero-bubble", tied=False),
    Case(**TWO, fsdp=2, double=True, dropout=0.1),
    Case(**TWO, fsdp=2, double=True, zero=2, tied=False, checkpointing=True),
    Case(**TWO, ep=2, double=True, **MIXED),
    Case(**TWO, ep=2, double=True, **MIXED, zero=1),
    Case(**TWO, zero=1, double=True, dropout=0.1, tied=False),
    Case(**TWO, dp=2, zero=1, double=True, dropout=0.1),
    Case(**TWO, dp=2, zero=1, double=True, value=True, experts=True, checkpointing=True),
    Case(**TWO, ep=2, double=True, **MIXED, zero=2, checkpointing=True),
]


@pytest.mark.parametrize("case", [*CASES, *[pytest.param(c, marks=pytest.mark.slow) for c in MORE]], ids=str)
def test_units_of_any_ranks_are_one_process_in_float64(pool, case):
    check_double(pool, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(**TWO, dropout=0.1), Case(**FOUR)], ids=str)
def test_twenty_steps_in_float32_stay_close(pool, case):
    check_floats(pool, case, within=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(**TWO, experts=True),
        Case(hdp=4, micro_tokens=5, experts=True),
        Case(**TWO, **MIXED),
        Case(**TWO, ep=2, **MIXED),
        Case(**TWO, ep=2, **MIXED, zero=1),
    ],
    ids=str,
)
def test_twenty_steps_of_experts_stay_close_whatever_micro_batches_the_ranks_have(pool, case):
    found, one = check_floats(pool, case, within=1e-5), train(0, case.alone, steps=20, init=True)
    assert len({got["results"][0].computed for got in found}) > 1
    for got in found:
        for a, b in zip(got["results"], one["results"]):
            assert a.loss == pytest.approx(b.loss, rel=1e-5) and a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)
        assert max(apart(got["end"][n], w) for n, w in one["end"].items()) < 1e-5


def test_the_first_rank_of_a_unit_evaluates_a_loss_of_whole_sequences(pool):
    case = Case(**TWO, double=True, dropout=0.1)
    (one,), ranks = (pool.run(n, HERE + "whole_rows", case=c) for n, c in ((1, case.alone), (2, case)))
    for found in ranks:
        assert found[:2] == pytest.approx(one[:2], rel=1e-11)


@pytest.fixture
def followed(pool, tmp_path):
    """A traced step on two ranks: what each found, and its exchanges of the second step."""
    case = Case(**TWO)
    found = pool.run(2, HERE + "traced", case=case, folder=str(tmp_path))
    return found, [[e for e in own if e["op"] == "exchange"] for own in rows(tmp_path)]


def test_only_units_of_several_ranks_send_and_no_group_is_made(followed):
    found, events = followed
    for got, own in zip(found, events):
        several = {i for i, micro in enumerate(got["plan"]) if micro.several}
        assert 0 < len(several) < len(got["plan"])
        assert {e["micro_batch"] for e in own} - {-1} == several  # rows come before the passes begin
        assert {e["detail"] for e in own} == {"0,1"}
        assert got["groups"][0] == got["groups"][1] and got["result"].padded == 0
    numbers = [[e["seq"] for e in own] for own in events]
    assert numbers[0] == numbers[1]  # so a trace shows who waited for whom


def test_bytes_are_those_of_the_plan(followed):
    """A step and a pass without gradient: keys and values, gradients of those of others; ids and mask of all tokens
    from the first rank; log-probs and entropies to it, and their gradients back."""
    found, events = followed
    wide, integer, number = 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4, 8, 4
    for rank, (got, own) in enumerate(zip(found, events)):
        planned = 0
        for micro in (m for m in got["plan"] if m.several):
            division, first = ZigZag.of(micro.lengths, 2), rank == micro.ranks[0]
            sent, mine = division.sent(), len(division.tokens(rank))
            out, back = int(sent[rank].sum()), int(sent[:, rank].sum())
            planned += CONFIG.num_layers * wide * (2 * out + back + out)
            count = int(micro.lengths.sum())
            planned += 2 * 2 * count * integer + 2 * (count - mine) * number if first else (2 + 1) * mine * number
        assert sum(e["bytes"] for e in own) == 2 * planned


def test_a_ring_that_is_timed_sends_what_attention_sends(pool, tmp_path):
    """Keys and values of a sequence forward and backward, gradients back, in each layer; a layout without units: 0."""
    assert pool.run(2, HERE + "ring_timed", case=Case(cp=2), folder="") == [0.0, 0.0]
    found = pool.run(2, HERE + "ring_timed", case=Case(**TWO), folder=str(tmp_path))
    sent = ZigZag.of(np.array([11]), 2).sent()
    for rank, own in enumerate(rows(tmp_path)):
        out, back = int(sent[rank].sum()), int(sent[:, rank].sum())
        wide = 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 4
        assert sum(e["bytes"] for e in own if e["op"] == "exchange") == CONFIG.num_layers * wide * (2 * out + back)
    assert all(seconds > 0 for seconds in found)


@pytest.mark.parametrize("change", BROKEN)
def test_ranks_with_other_units_are_told_before_they_wait_for_each_other(pool, change):
    case = Case(hdp=2, micro_tokens=6)
    assert sum(n > 6 for n in LENGTHS) > 2
    assert pool.run(2, HERE + "refused", case=case, change=change) == [["plan.units"] * 2] * 2


def test_ranks_run_as_many_micro_batches_as_they_have(pool):
    """Nothing in a pass is collective, so that no blank is needed, whatever the numbers."""
    found = pool.run(2, "tests.parallel.layouts:train", case=Case(**TWO))
    assert [got["results"][0].padded for got in found] == [0, 0]
    assert sum(got["results"][0].computed for got in found) == sum(LENGTHS)
    assert sorted(np.concatenate([got["rows"] for got in found])) == list(range(len(LENGTHS)))


def test_a_unit_whose_ranks_compute_all_tokens_each_is_seen(pool):
    assert pool.run(2, HERE + "undivided", case=Case(**TWO)) == ["tokens.divided"] * 2


def test_ranks_without_the_rows_get_conversations_choices_of_experts_and_targets(pool):
    case = Case(**TWO, double=True, experts=True)
    ((_, wanted),) = pool.run(1, HERE + "scored", case=case.alone)
    starts = np.cumsum((0, *LENGTHS))
    for rows_here, found in pool.run(2, HERE + "scored", case=case):
        for name, scores in found.items():
            own = np.concatenate([wanted[name][starts[r] : starts[r + 1]] for r in rows_here])
            np.testing.assert_allclose(scores, own, rtol=1e-5, atol=1e-6)
    assert all(np.abs(wanted[name] - wanted["plain"]).max() > 1e-3 for name in ("opens", "routing", "targets"))


def test_ranks_keep_in_step_where_passes_are_collective(pool):
    kinds = [{"pp": 2}, {"fsdp": 2}, {"ep": 2, **MIXED, "zero": 1}, {"tp": 2}]
    found = pool.run(4, HERE + "in_step", cases=[Case(**TWO, **more) for more in kinds])
    assert found == [[True, True, True, False]] * 4
