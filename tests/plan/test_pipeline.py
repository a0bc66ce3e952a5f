"""Schedules of pipelines: valid for any sizes, as idle as their papers say, and refused if they could not work."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilth_studies.pipeline_idle import idle_share, simulate

from tests.errors import raises
from tests.models.tiny import shape
from tilth.core.errors import ScheduleError
from tilth.core.layout import Mesh
from tilth.plan.layout import layouts
from tilth.plan.pipeline import (
    SCHEDULES,
    Pass,
    _balanced,
    chunks_of,
    in_flight,
    layer_costs,
    one_forward_one_backward,
    passes,
    scoring,
    sequential,
    stages_of,
    waiting,
)
from tilth.plan.shape import matrices, parameter_shapes

NAMES = sorted({"sequential", "1f1b", "interleaved", "zero-bubble"})
THIRDS = {"forward": 1.0, "backward": 1.0, "weight": 1.0}
"""Equal forward passes, gradients of inputs and gradients of matrices, as in 2401.10241."""
HALVES = {"forward": 1.0, "backward": 2.0}


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(0, 13))
def test_any_number_of_stages_and_micro_batches_ends_and_no_stage_waits_for_ever(name, stages, micro_batches):
    """``passes`` checks it; the simulation runs every pass."""
    orders = passes(name, stages, chunks_of(name), micro_batches)
    kinds = 3 if name == "zero-bubble" else 2
    assert [len(order) for order in orders] == [kinds * chunks_of(name) * micro_batches] * stages
    busy = simulate(orders, chunks_of(name), THIRDS)
    assert all(b == len(order) for (b, _), order in zip(busy, orders))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
def test_scores_need_each_forward_pass_once(stages, chunks, micro_batches):
    orders = scoring(stages, chunks, micro_batches)
    assert sorted(one for order in orders for one in order) == sorted(
        Pass("forward", part, i) for part in range(stages * chunks) for i in range(micro_batches)
    )
    simulate(orders, chunks, THIRDS)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_idle_shares_are_those_of_the_papers(stages, rounds):
    p, m = stages, rounds * stages
    assert idle_share("1f1b", p, m, HALVES) == pytest.approx((p - 1) / (m + p - 1))
    assert idle_share("interleaved", p, m, HALVES) == pytest.approx((p - 1) / (2 * m + p - 1))
    assert idle_share("zero-bubble", p, m, THIRDS) == pytest.approx((p - 1) / (3 * m + p - 1))
    assert idle_share("sequential", p, m, HALVES) == pytest.approx(1 - 1 / p)


def test_zero_bubble_holds_no_more_activations_than_1f1b_does_on_the_first_stage():
    for stages in (2, 4, 8):
        held = [in_flight("zero-bubble", stages, s, 3 * stages) for s in range(stages)]
        assert held == [in_flight("1f1b", stages, s, 3 * stages) for s in range(stages)] == list(range(stages, 0, -1))
        late = [_waiting(passes("zero-bubble", stages, 1, 3 * stages)[s]) for s in range(stages)]
        assert max(a + b for a, b in zip(held, late)) <= stages


def _waiting(order):
    """Greatest number of micro-batches whose gradients of matrices wait."""
    now, most = 0, 0
    for one in order:
        now += {"forward": 0, "backward": 1, "weight": -1}[one.direction]
        most = max(most, now if one.direction == "weight" else 0)
    return most


@pytest.mark.parametrize("stages", [2, 4])
def test_a_stage_of_zero_bubble_defers_as_many_micro_batches_as_it_is_far_from_the_first(stages):
    assert [waiting("zero-bubble", stages, stage, 4 * stages) for stage in range(stages)] == list(range(stages))
    assert not any(waiting("1f1b", stages, stage, 4 * stages) for stage in range(stages))


def test_one_stage_with_one_part_is_sequential():
    assert passes("1f1b", 1, 1, 5) == passes("sequential", 1, 1, 5)
    assert one_forward_one_backward(0, 1, 1, 3) == list(sequential(0, 1, 1, 3))


def backwards_first(stage, stages, chunks, n):
    order = one_forward_one_backward(stage, stages, chunks, n)
    return sorted(order, key=lambda one: (one.direction, one.micro_batch)) if stage else order


def other_order_of_messages(stage, stages, chunks, n):
    order = [Pass("forward", stage, i) for i in range(n)]
    back = [Pass("backward", stage, i) for i in (range(n) if stage else reversed(range(n)))]
    return [*order, *back]


@pytest.mark.parametrize(
    "broken, key", [(backwards_first, "order"), (other_order_of_messages, "channel")], ids=["order", "channel"]
)
def test_a_schedule_on_which_stages_would_wait_is_refused(monkeypatch, broken, key):
    monkeypatch.setitem(SCHEDULES, broken.__name__, broken)
    with raises(ScheduleError, f"{broken.__name__}.{key}"):
        passes(broken.__name__, 2, 1, 3)


# ---- parts of a model ----


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4))
def test_the_costliest_part_costs_as_little_as_any_division_allows(costs, parts):
    if parts > len(costs):
        return
    found = _balanced(costs, parts)
    assert [i for own in found for i in own] == list(range(len(costs))) and all(map(len, found))
    assert max(sum(costs[i] for i in own) for own in found) == _least(tuple(costs), parts)


def _least(costs, parts):
    if parts == 1:
        return sum(costs)
    return min(max(sum(costs[:k]), _least(costs[k:], parts - 1)) for k in range(1, len(costs) - parts + 2))


def test_the_head_counts_where_stages_are_balanced():
    wide = shape("llama", num_layers=8, vocab_size=2000, hidden_size=64, intermediate_size=96)
    layer, head = layer_costs(wide)[1], wide.vocab_size * wide.hidden_size
    found = stages_of(wide, 2, "1f1b").layers
    assert head > 2 * layer and len(found[0]) - len(found[1]) in (math.floor(head / layer), math.ceil(head / layer))
    assert len(stages_of(wide, 2, "1f1b", value=True).layers[0]) == 4


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "llama"])
def test_of_experts_those_that_a_token_meets_count_where_stages_are_balanced(family):
    config = shape(family, num_layers=4, **({} if family == "llama" else {"expert_layers": (2, 3)}))
    outside = config.hidden_size * (1 + config.vocab_size)
    assert sum(layer_costs(config)) == matrices(config, active=True) + outside


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_every_parameter_has_one_stage_but_the_tied_embedding(tied, value, schedule):
    config = shape("qwen3", num_layers=4, tie_embeddings=tied)
    stages, mesh = stages_of(config, 2, schedule, value=value), Mesh.of({"pp": 2, "tp": 2})
    found = layouts(config, mesh, value=value, schedule=schedule)
    assert found.keys() == parameter_shapes(config, value=value).keys()
    for name, layout in found.items():
        ends = tied and not value and name.startswith("model.embed_tokens")
        there = [rank in layout.mesh.ranks and bool(layout.boxes(rank)) for rank in mesh.ranks]
        assert there in ([[True] * 4] if ends else [[True, True, False, False], [False, False, True, True]])
        parts = [k for k in range(len(stages.layers)) if stages.holds(k, name)]
        assert tuple(sorted({k % 2 for k in parts})) == stages.holders(name)
    other = {stages.holders(f"model.layers.{i}.mlp.up_proj.weight") for i in (0, 1)}
    assert len(other) == (2 if schedule == "interleaved" else 1)


def test_a_parameter_that_no_stage_claims_is_refused():
    config = shape("qwen3", num_layers=4)
    assert stages_of(config, 1, "1f1b").holders("model.memory.weight") == (0,)
    with raises(ScheduleError, "model.memory.weight"):
        stages_of(config, 2, "1f1b").holders("model.memory.weight")


@pytest.mark.parametrize(("count", "schedule"), [(1, "1f1b"), (2, "1f1b"), (2, "interleaved")])
def test_a_layer_beyond_all_parts_is_refused(count, schedule):
    stages = stages_of(shape("qwen3", num_layers=4), count, schedule)
    assert stages.holders("model.layers.3.mlp.up_proj.weight") == (count - 1,)
    with raises(ScheduleError, "model.layers.4.mlp.up_proj.weight"):
        stages.holders("model.layers.4.mlp.up_proj.weight")


def test_more_parts_than_layers_name_the_stages_that_work():
    with raises(ScheduleError, "layout.pp") as error:
        stages_of(shape("llama", num_layers=4), 3, "interleaved")
    assert "pp may be 1 to 2" in str(error.value)
