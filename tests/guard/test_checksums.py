"""Copies that differ, by rank; and digests of real layouts."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.parallel.layouts import Case, batch, engine_of, loss_of, rows_of, spread, weights
from tilth.checkpoint.copies import bits
from tilth.guard.snapshots import compare, differing
from tilth.roles.state import Learner

HERE = "tests.guard.test_checksums:"


def test_copies_that_agree_give_no_verdict():
    assert compare({}) is None and compare({0: {}, 1: {7: 1}}) is None
    assert compare({rank: {7: 5, 8: rank % 2} for rank in (0, 2, 4)}) is None


@given(st.integers(3, 9), st.data())
def test_the_odd_one_of_three_or_more_is_named(count, data):
    odd = data.draw(st.integers(0, count - 1))
    found = compare({rank: {7: 5 + (rank == odd), 8: 1} for rank in range(count)}, "policy")
    assert (found.kind, found.ranks, found.details["majority"]) == ("corruption", (odd,), True)


def test_of_two_copies_both_are_named():
    found = compare({0: {7: 1}, 1: {7: 2}, 2: {8: 1}, 3: {8: 1}})
    assert found.ranks == (0, 1) and not found.details["majority"]


def test_a_majority_elsewhere_decides_between_two():
    """dp=2 x tp=2: norms on all four ranks, matrices on two."""
    found = compare({rank: {1: 10 + (rank == 3), 2 + rank % 2: 20 + (rank == 3)} for rank in range(4)})
    assert found.ranks == (3,) and found.details["majority"]


def test_tensors_that_differ_are_named():
    assert differing([{"a": (1, 5), "b": (1, 6)}, {"a": (1, 5), "b": (1, 7)}, {"b": (2, 8)}]) == ["b"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_every_bit_counts(dtype):
    tensor = torch.arange(1, 14).to(dtype)
    before, words = bits(tensor), tensor.view(torch.uint8)
    for place, bit in product(range(len(words)), range(8)):
        words[place] ^= 1 << bit
        assert bits(tensor) != before
        words[place] ^= 1 << bit
    assert bits(tensor) == before


CASES = [Case(dp=2), Case(tp=2, sp=True), Case(fsdp=2)]
MORE = [
    Case(dp=3),
    Case(cp=2),
    Case(tp=4),
    Case(tp=4, sp=True, tied=False),
    Case(dp=2, tp=2),
    Case(dp=2, fsdp=2),
    Case(dp=2, cp=2, cp_style="ulysses"),
    Case(fsdp=2, tp=2, sp=True, zero=2),
    Case(fsdp=2, cp=2),
    Case(pp=2, dp=2),
    Case(pp=2, tp=2, sp=True),
    Case(dp=2, experts=True),
    Case(fsdp=2, ep=2, experts=True, num_experts=4),
    Case(tp=2, sp=True, experts=True),
    Case(dp=2, fsdp=2, value=True, zero=2),
    Case(dp=2, dropout=0.1, checkpointing=True),
    Case(dp=2, cp=2, zero=1),
    Case(dp=2, ep=2, zero=1, experts=True, num_experts=4),
]


@pytest.mark.dist
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)], ids=str)
def test_copies_stay_equal_in_training_and_a_flipped_bit_is_found(pool, case):
    found = pool.run(case.ranks, HERE + "flipped", case=case)
    for moment in (0, 1):
        assert compare({rank: own[moment] for rank, own in enumerate(found)}) is None
    if not found[-1][-1]:
        assert case.fsdp * case.ep == case.ranks  # nobody holds a copy of a weight
        return
    for moment in (2, 3) if case.zero != 1 else (2,):  # of a weight, and of the gradient a step before
        verdict = compare({rank: own[moment] for rank, own in enumerate(found)})
        assert verdict is not None and case.ranks - 1 in verdict.ranks
        assert verdict.details["majority"] == (verdict.ranks == (case.ranks - 1,))
    assert bool(differing([own[4] for own in found])) == (case.zero != 1)  # whose gradients have no copy


def flipped(rank, case):
    """Digests at first, after two steps, after a flip, after a step with a flipped gradient; checksums at the end."""
    sharded = spread(case, rank)
    sharded.load_(weights(case))
    engine = engine_of(case, sharded)
    role = Learner(engine, "model", "optimizer")
    tokens, mask, starts = rows_of(case, sharded)
    loss = loss_of(case, batch()[1])
    found = [role._copies.digests(role.groups())]
    for _ in range(2):
        engine.update(tokens, mask, {}, loss, starts=starts)
    found.append(role._copies.digests(role.groups()))
    copied = [n for n, p in sharded.parameters.items() if role._copies.holders(sharded.layouts[n]) and p.numel()]
    last = rank == case.ranks - 1
    flip = _flip if last else lambda tensor: None
    if copied:
        flip(sharded.parameters[copied[0]].data)
    found.append(role._copies.digests(role.groups()))
    if copied:
        flip(sharded.parameters[copied[0]].data)  # back
    step = engine.optimizers.step

    def corrupted(lr):
        if copied:
            flip(engine.optimizers.parameters[copied[0]].grad)
        step(lr)

    engine.optimizers.step = corrupted
    engine.update(tokens, mask, {}, loss, starts=starts)
    found += [role._copies.digests(role.groups()), role._copies.tensors(role.groups()), bool(copied)]
    return found


def _flip(tensor, bit=22):
    tensor.view(-1).view(torch.int32)[len(tensor) // 2] ^= 1 << bit


def test_one_process_has_no_copies():
    case = Case()
    role = Learner(engine_of(case, spread(case)), "model", "optimizer")
    assert role._copies.digests(role.groups()) == {}
