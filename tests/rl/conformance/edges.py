"""The column (d): what batches at the edge of sense must give."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from tests.rl.conformance.batch import Batch, drawn
from tests.rl.conformance.cell import Gap, Subject
from tests.rl.conformance.checks import EXACT, SINGLE
from tests.rl.conformance.family import FAMILIES, Result, Variant
from tests.rl.conformance.variants import variants
from tilth import rl


def check_edges(subject: Subject) -> Gap:
    """Group of one, equal rewards, all masked, no rows, missing rewards, NaN at masked places, extreme log-probs."""
    gap = Gap(EXACT)
    for variant in variants(subject.kind, subject.name):
        for edge in EDGES.get(subject.kind, LOSS_EDGES):
            edge(gap, subject, variant)
    return gap


def _run(subject: Subject, variant: Variant, batch: Batch) -> Result:
    return FAMILIES[subject.kind].run(subject.name, variant, batch)


def _sound(gap: Gap, found: Result, batch: Batch, what: str) -> None:
    """Finite everywhere, 0 at masked places (which hold NaN)."""
    for name, number in found.totals.items():
        gap.true(math.isfinite(number), f"{name} = {number}: {what}")
    for name, column in found.tokens.items():
        gap.true(torch.isfinite(column.double()).all(), f"{name} is not finite: {what}")
        gap.true(not column[~batch.mask].any(), f"{name} is not 0 at masked places: {what}")


def random_batches(gap: Gap, subject: Subject, variant: Variant) -> None:
    """NaN at masked places, rows without tokens, single tokens: whatever is drawn."""
    for seed in range(12):
        batch = drawn(3000 + seed)
        _sound(gap, _run(subject, variant, batch), batch, f"seed {3000 + seed}, {variant}")


def all_masked(gap: Gap, subject: Subject, variant: Variant) -> None:
    """No token counts: 0, with a gradient that is there and 0."""
    batch = drawn(5, rows=6)
    batch = replace(
        batch,
        mask=torch.zeros_like(batch.mask),
        tokens={k: torch.full_like(v, math.nan) for k, v in batch.tokens.items()},
    )
    found = _run(subject, variant, batch)
    _sound(gap, found, batch, f"all masked, {variant}")
    gap.see(sum(map(abs, found.totals.values())), 0.0, f"all masked, {variant}", 0.0)


def no_rows(gap: Gap, subject: Subject, variant: Variant) -> None:
    """A worker without rows."""
    batch = drawn(5, rows=6).pick(torch.zeros(0, dtype=torch.int64))
    found = _run(subject, variant, batch)
    gap.true(all(len(v) == 0 for v in found.tokens.values()), f"no rows, {variant}")
    gap.see(sum(map(abs, found.totals.values())), 0.0, f"no rows, {variant}", 0.0)


def one_row(gap: Gap, subject: Subject, variant: Variant) -> None:
    """A batch of one sequence: a group of one; of one token: no variance."""
    for seed in range(6):
        batch = drawn(4000 + seed, rows=1, missing=False)
        _sound(gap, _run(subject, variant, batch), batch, f"one row, seed {4000 + seed}, {variant}")
        batch = replace(batch, mask=torch.arange(len(batch.mask)) == 0)
        batch = replace(batch, tokens={k: torch.where(batch.mask, 0.3, math.nan).double() for k in batch.tokens})
        _sound(gap, _run(subject, variant, batch), batch, f"one token, seed {4000 + seed}, {variant}")


def groups_of_one(gap: Gap, subject: Subject, variant: Variant) -> None:
    """Each row its own group."""
    batch = drawn(11, rows=7, missing=False)
    batch = replace(batch, groups=torch.arange(7))
    _sound(gap, _run(subject, variant, batch), batch, f"groups of one, {variant}")


def zero_spread(gap: Gap, subject: Subject, variant: Variant) -> None:
    """Equal rewards, seven times 0.7 in float32: exactly 0 where the estimator compares rewards with each other."""
    for reward in (0.7, 0.0, 1.0, -1e20):
        batch = drawn(12, even=True, rows=14).with_rewards(torch.full((14,), reward, dtype=torch.float32))
        batch = replace(batch, rows=batch.rows | {c: batch.rewards for c in ("part/correct", "part/format")})
        if subject.name in _TURNS:
            batch = replace(batch, mask=_first_turns(batch))
            batch = replace(batch, tokens={k: torch.where(batch.mask, v, math.nan) for k, v in batch.tokens.items()})
        found = _run(subject, variant, batch)
        _sound(gap, found, batch, f"all rewards {reward}, {variant}")
        entry = rl.check(subject.name, _EVERY, variant.options, kind="advantages")
        relative = "groups" in entry.needs and not any(c in entry.needs for c in _POSITION)
        if relative or (getattr(entry, "whiten", False) and variant.options.get("gamma", 1) == 1):
            gap.true(not found.tokens["advantages"].any(), f"all rewards {reward}: not exactly 0, {variant}")


def _first_turns(batch: Batch) -> torch.Tensor:
    """Mask of the first run of neighbouring tokens of each row, bool [tokens]."""
    row = torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths)
    begins = batch.mask.clone()
    begins[1:] &= ~batch.mask[:-1] | (row[1:] != row[:-1])
    turns = torch.zeros_like(batch.lengths).index_add(0, row, begins.long())
    return batch.mask & (begins.cumsum(0) - (turns.cumsum(0) - turns)[row] == 1)


_TURNS = ("grpo_process",)
"""Compare turns, not rows: equal rewards of rows are equal rewards of turns where each row has one."""
_POSITION = ("sum_pi_squared",)
"""Needed by estimators that have no baseline where a token is alone at its place."""
_EVERY = (
    "rewards groups counts values logprobs ref_logprobs old_logprobs rollout_logprobs sum_pi_squared weights "
    "chunk_tokens uniforms baselines part/correct part/format"
).split()


def missing_rewards(gap: Gap, subject: Subject, variant: Variant) -> None:
    """A row without a reward is as if it were not there: 0, out of the mask, in nobody's statistic."""
    for seed in range(6):
        batch = drawn(4100 + seed, rows=9, missing=False)
        gone = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[: 1 + seed % 4]
        rest = torch.tensor([r for r in range(9) if r not in gone.tolist()])
        for nothing in (math.nan, math.inf):
            rewards = batch.rewards.clone().index_fill(0, gone, nothing)
            found = _run(subject, variant, replace(batch, rewards=rewards))
            apart = _run(subject, variant, batch.pick(rest))
            where = f"reward {nothing}, seed {4100 + seed}, {variant}"
            for name, column in found.tokens.items():
                gap.true(not column[batch.index(gone)].any(), f"{name} of a row without a reward, {where}")
                gap.see(column[batch.index(rest)], apart.tokens[name], f"{name} of the others, {where}", SINGLE * 5)
    none = replace(batch, rewards=torch.full((9,), math.nan))
    found = _run(subject, variant, none)
    gap.true(not any(c.any() for c in found.tokens.values()), f"no reward at all, {variant}")


def unequal_groups(gap: Gap, subject: Subject, variant: Variant) -> None:
    """Members of a group have gone: the group has the size that it has."""
    batch = drawn(13, rows=9, missing=False)
    batch = replace(batch, groups=torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 3]))
    _sound(gap, _run(subject, variant, batch), batch, f"groups of 5, 2, 1 and 1, {variant}")


def extreme(gap: Gap, subject: Subject, variant: Variant) -> None:
    """Policies that are far apart, equal, or sure of a token."""
    batch = drawn(14, rows=8)
    for shift in (60.0, -60.0, 0.0):
        tokens = dict(batch.tokens)
        tokens["logprobs"] = tokens["old_logprobs"] + shift
        tokens["ref_logprobs"] = tokens["old_logprobs"].clone()
        tokens["values"] = tokens["values"] + shift
        _sound(gap, _run(subject, variant, replace(batch, tokens=tokens)), batch, f"log-ratio {shift}, {variant}")


def nothing_to_learn(gap: Gap, subject: Subject, variant: Variant) -> None:
    """Advantages that are all 0, as of flat groups."""
    batch = drawn(15, rows=8)
    tokens = batch.tokens | {"advantages": torch.zeros(len(batch.mask), dtype=torch.float64)}
    batch = replace(batch, tokens=tokens)
    _sound(gap, _run(subject, variant, batch), batch, f"advantages 0, {variant}")


def equal_policies(gap: Gap, subject: Subject, variant: Variant) -> None:
    """Where both policies agree nothing is corrected: weights 1, no token left out."""
    batch = drawn(16, rows=8)
    tokens = batch.tokens | {"rollout_logprobs": batch.tokens["old_logprobs"].clone()}
    batch = replace(batch, tokens=tokens)
    found = _run(subject, variant, batch)
    gap.see(found.tokens["weights"], batch.mask.double(), f"weights of equal policies, {variant}")
    gap.same(found.tokens["mask"], batch.mask, f"tokens kept of equal policies, {variant}")


def impossible_tokens(gap: Gap, subject: Subject, variant: Variant) -> None:
    """Log-probs of -inf in one policy, or in both: weights are finite, and 1 where both say it cannot be."""
    batch = drawn(17, rows=8)
    tokens = {k: v.clone() for k, v in batch.tokens.items()}
    tokens["old_logprobs"][::3] = -math.inf
    tokens["rollout_logprobs"][::2] = -math.inf
    found = _run(subject, variant, replace(batch, tokens=tokens))
    column = found.tokens["weights"]
    gap.true(torch.isfinite(column).all() and (column >= 0).all(), f"weights of impossible tokens, {variant}")


def masked_pairs(gap: Gap, subject: Subject, variant: Variant) -> None:
    """Answers without a token, and scores that are far apart or equal."""
    for shift in (0.0, 300.0, -300.0):
        batch = drawn(18, rows=8)
        batch = replace(batch, rows=batch.rows | {"rejected": batch.rows["rejected"] + shift})
        _sound(gap, _run(subject, variant, batch), batch, f"scores {shift} apart, {variant}")


Edge = Callable[[Gap, Subject, Variant], None]
ANY_EDGES: list[Edge] = [random_batches, all_masked, no_rows, one_row]
LOSS_EDGES: list[Edge] = [*ANY_EDGES, extreme, nothing_to_learn]
EDGES: dict[str, list[Edge]] = {
    "advantages": [*ANY_EDGES, groups_of_one, zero_spread, missing_rewards, unequal_groups],
    "corrections": [random_batches, no_rows, one_row, equal_policies, impossible_tokens],
    "preferences": [random_batches, no_rows, masked_pairs],
}
