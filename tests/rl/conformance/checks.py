"""The columns (a) to (e) of the table, for any kind: golden vectors, oracle, invariance, edges, two workers."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.rl import oracle
from tests.rl.conformance import advantages, corrections, losses, preferences
from tests.rl.conformance.batch import Batch, drawn, golden
from tests.rl.conformance.cell import Gap, NotApplicable, Subject
from tests.rl.conformance.family import FAMILIES, Family, Result, Variant
from tests.rl.conformance.variants import unchecked, variants
from tilth import rl

SIX_DIGITS = 1.1e-6
EXACT = 1e-9
"""Of sums of a few dozen float64 numbers."""
SINGLE = 2e-6
"""Of advantages, which come as float32."""
FEW, MANY = 9, 60
"""Random batches for each variant: in the quick table, in the whole one."""
PACKINGS = ((0, None), (3, None), (0, 6), (2, 9))
"""(prompt, width) of the golden fixture: packed, prompted, padded, both."""


@cache
def vectors() -> dict[str, Any]:
    """The golden vectors."""
    return json.loads((Path(__file__).parent / "golden.json").read_text())


# ---- (a) golden vectors ----


def check_golden(subject: Subject) -> Gap:
    """Every published vector of the entry, in four packings."""
    cases = [c for c in vectors().get(subject.kind, []) if c["entry"] == subject.name]
    if not cases:
        reasons = vectors()["without"].get(subject.kind, {})
        reason = reasons.get(subject.name, reasons.get("*"))
        if reason is None:
            raise AssertionError("no golden vector, and golden.json does not say why")
        raise NotApplicable(reason)
    gap = Gap(SIX_DIGITS)
    for case in cases:
        for prompt, width in PACKINGS:
            _GOLDEN[subject.kind](gap, case, golden(prompt, width))
    return gap


def _golden_advantages(gap: Gap, case: dict[str, Any], batch: Batch) -> None:
    found = FAMILIES["advantages"].run(case["entry"], Variant(case.get("options", {})), batch)
    made, rows = found.tokens, list(torch.split(torch.arange(len(batch.mask)), batch.lengths.tolist()))
    inside = batch.tokens["place"] >= 0
    for i, value in enumerate(case.get("rows", [])):
        own = rows[i][batch.mask[rows[i]]]
        if value is not None:
            gap.see(made["advantages"][own], torch.full((len(own),), value), f"row {i}")
    for column, given in (("advantages", case.get("tokens", {})), ("returns", case.get("returns", {}))):
        for i, numbers in given.items():
            at = rows[int(i)][inside[rows[int(i)]]][: len(numbers)]
            gap.see(made[column][at], torch.tensor(numbers), f"{column} of row {i}")


def _golden_aggregations(gap: Gap, case: dict[str, Any], batch: Batch) -> None:
    given = {"denominator": case["denominator"]} if "denominator" in case else {}
    value = FAMILIES["aggregations"].micro(case["entry"], Variant(case.get("options", {})), batch, given)
    gap.see(case.get("times", 1) * value.totals["loss"], case["value"], str(case.get("options", {})))


def _at(batch: Batch, row: int, token: int) -> int:
    start = int(batch.lengths[:row].sum())
    return start + int((batch.tokens["place"][start : start + int(batch.lengths[row])] == token).nonzero()[0])


def _golden_losses(gap: Gap, case: dict[str, Any], batch: Batch) -> None:
    tokens = dict(batch.tokens)
    tokens["old_logprobs"] = tokens["rollout_logprobs" if case.get("ratio_to") == "rollout" else "old_logprobs"]
    if "weights" in case:
        which = "logprobs" if case["weights"]["of"] == "new" else "old_logprobs"
        rho = (batch.tokens[which] - tokens["rollout_logprobs"]).exp()
        tokens["weights"] = rho.clamp(max=case["weights"]["cap"])
    variant = Variant(case.get("options", {}), case.get("aggregation", ""), "weights" in case)
    found = FAMILIES["losses"].run(case["entry"], variant, replace(batch, tokens=tokens))
    gap.see(found.totals["loss"], case["loss"], f"loss, {variant}", 2e-6)
    gradient = found.tokens["gradient"]
    gap.see(gradient.abs().sum(), case["norm"], f"norm of the gradient, {variant}", 2e-6)
    for key, place in (("first", (0, 0)), ("other", (5, 1))):
        if key in case:
            gap.see(gradient[_at(batch, *place)], case[key], f"gradient at {place}, {variant}")
    for names, share in case.get("shares", {}).items():
        metrics = _metrics(case["entry"], variant, replace(batch, tokens=tokens))
        gap.see(sum(float(metrics[n]) for n in names.split("+")), share, f"{names}, {variant}", 6e-6)


def _metrics(name: str, variant: Variant, batch: Batch) -> dict[str, Any]:
    columns = FAMILIES["losses"].columns(batch)
    return rl.policy_loss(name, aggregation=variant.aggregation, **columns, **variant.options).metrics


def _golden_kl(gap: Gap, case: dict[str, Any], batch: Batch) -> None:
    leaf = batch.tokens["logprobs"].clone().requires_grad_()
    penalty = rl.kl_penalty(case["entry"], leaf, batch.tokens["ref_logprobs"])
    mean = rl.aggregate("token-mean", penalty, mask=batch.mask, lengths=batch.lengths)
    mean.backward()
    gap.see(mean, case["value"], "value")
    gap.see(leaf.grad[_at(batch, 0, 0)], case["first"], "gradient at (0, 0)")
    gap.see(leaf.grad[_at(batch, 3, 1)], case["other"], "gradient at (3, 1)")


def _golden_value(gap: Gap, case: dict[str, Any], batch: Batch) -> None:
    tokens, place = dict(batch.tokens), batch.tokens["place"]
    tokens["old_values"], tokens["values"] = tokens["values"], tokens["values"] + 0.3
    rows = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    first = batch.rewards[rows].double()  # rewards reversed in time over the fixture's width: given at T - length
    tokens["returns"] = torch.where(place == 6 - batch.rows["lengths"][rows], first, 0.0)
    found = FAMILIES["value"].run("clip", Variant(case["options"]), replace(batch, tokens=tokens))
    gap.see(found.totals["loss"], case["loss"], "loss")


def _golden_corrections(gap: Gap, case: dict[str, Any], batch: Batch) -> None:
    """Weights of row 0, means, tokens kept in each row; the published digits are five here."""
    names = ("rollout_logprobs", "old_logprobs")
    columns = {c: batch.tokens[c] for c in names} | {"mask": batch.mask, "lengths": batch.lengths}
    found = rl.correct(case["entry"], **columns, **case.get("options", {}))
    rows = list(torch.split(torch.arange(len(batch.mask)), batch.lengths.tolist()))
    what = str(case.get("options", {}))
    if "row0" in case:
        gap.see(found.weights[rows[0][batch.mask[rows[0]]]], torch.tensor(case["row0"]), f"row 0, {what}", 6e-6)
    for key, metric in (("mean", "weight"), ("effective", "effective"), ("scale", "scale")):
        if key in case:
            gap.see(float(found.metrics[f"correction/{metric}"]), case[key], f"{key}, {what}")
    if "kept" in case:
        gap.see(rl.token_counts(found.mask, batch.lengths), torch.tensor(case["kept"]), f"tokens kept, {what}", 0.0)
    for key, value in case.get("diagnostics", {}).items():
        gap.see(float(found.metrics[f"mismatch/{key}"]), value, key)


_GOLDEN: dict[str, Callable[[Gap, dict[str, Any], Batch], None]] = {
    "advantages": _golden_advantages,
    "aggregations": _golden_aggregations,
    "losses": _golden_losses,
    "kl": _golden_kl,
    "value": _golden_value,
    "corrections": _golden_corrections,
}


# ---- (b) oracle ----


def check_oracle(subject: Subject, count: int = FEW) -> Gap:
    """Plain loops on random batches, every option set at least once; an entry or an option without them fails."""
    family, reference = FAMILIES[subject.kind], _reference(subject)
    if subject.kind in rl.names():
        left = unchecked(subject.kind, subject.name, rl.options(subject.kind, subject.name))
        if left:
            raise AssertionError(f"no variant sets the option {left[0]!r}")
    gap = Gap(EXACT)
    for variant in variants(subject.kind, subject.name):
        for seed in range(count):
            batch = drawn(seed)
            found, wanted = family.run(subject.name, variant, batch), reference(batch, variant)
            _agree(gap, found, wanted, f"seed {seed}, {variant}")
    return gap


def _reference(subject: Subject) -> Callable[[Batch, Variant], Result]:
    """The oracle of an entry; an entry without one fails the table."""
    try:
        return _ORACLES[subject.kind](subject.name)
    except KeyError:
        raise AssertionError(f"no oracle: add one for {subject.name} beside the others of its kind") from None


def _agree(gap: Gap, found: Result, wanted: Result, where: str, tolerance: float | None = None) -> None:
    for name, number in wanted.totals.items():
        gap.see(found.totals[name], number, f"{name}, {where}", tolerance)
    for name, column in wanted.tokens.items():
        if name in found.tokens:
            limit = SINGLE if found.tokens[name].dtype == torch.float32 else tolerance
            gap.see(found.tokens[name], column, f"{name}, {where}", limit)
    gap.true(set(found.tokens) <= set(wanted.tokens), f"a column that the oracle has not, {where}")


def _packed(batch: Batch, rows: Iterable[list[float] | None]) -> Tensor:
    """Numbers of the tokens that count, 0 elsewhere."""
    column = torch.zeros(len(batch.mask), dtype=torch.float64)
    for row, numbers in zip(batch.plain(), rows):
        for token, number in zip(row.tokens, numbers or []):
            column[token.at] = number
    return column


def _of_advantages(name: str) -> Callable[[Batch, Variant], Result]:
    reference = advantages.ORACLES[name]

    def run(batch: Batch, variant: Variant) -> Result:
        found, returns = reference(
            batch.plain(), {**rl.options("advantages", name), **variant.options, "weighted": variant.weighted}
        )
        kept = [None if row is None else [1.0] * len(row) for row in found]
        made = {"advantages": _packed(batch, found), "mask": _packed(batch, kept)}
        return Result({}, made if returns is None else made | {"returns": _packed(batch, returns)})

    return run


def _one_number(batch: Batch, slopes: losses.Slopes, aggregation: str, o: dict[str, Any]) -> Result:
    """Token values and slopes become loss and gradient."""
    weights = losses.AGGREGATIONS[aggregation]([len(r.tokens) for r in batch.plain()], o)
    total = math.fsum(w * value for w, row in zip(weights, slopes) for value, _ in row)
    gradient = _packed(batch, [[w * slope for _, slope in row] for w, row in zip(weights, slopes)])
    return Result({"loss": total}, {"gradient": gradient})


def _of_losses(name: str) -> Callable[[Batch, Variant], Result]:
    reference = losses.ORACLES[name]

    def run(batch: Batch, variant: Variant) -> Result:
        options = rl.options("losses", name) | variant.options
        tokens = batch.tokens | ({"weight": batch.tokens["weights"]} if variant.weighted else {})
        found = reference(replace(batch, tokens=tokens).plain(), options)
        aggregation, more = FAMILIES["losses"].aggregation(name, variant)
        return _one_number(batch, found, aggregation, more)

    return run


def _of_kl(name: str) -> Callable[[Batch, Variant], Result]:
    form = losses.KL[name]

    def run(batch: Batch, variant: Variant) -> Result:
        base = losses.ORACLES["ppo_clip"](batch.plain(), rl.options("losses", "ppo_clip"))
        slopes = []
        for row, own in zip(batch.plain(), base):
            penalty = [form(t.logprobs - t.ref_logprobs) for t in row.tokens]
            slopes.append([(v + 0.7 * p, s + 0.7 * q) for (v, s), (p, q) in zip(own, penalty)])
        return _one_number(batch, slopes, variant.aggregation or "token-mean", {})

    return run


def _of_aggregations(name: str) -> Callable[[Batch, Variant], Result]:
    def run(batch: Batch, variant: Variant) -> Result:
        slopes = [[(t.loss, 1.0) for t in row.tokens] for row in batch.plain()]
        found = _one_number(batch, slopes, name, variant.options)
        second = oracle.aggregate(name, [[v for v, _ in row] for row in slopes], variant.options.get("norm_length"))
        assert math.isclose(found.totals["loss"], second, rel_tol=1e-9, abs_tol=1e-12), "the oracles disagree"
        return found

    if name not in losses.AGGREGATIONS:
        raise KeyError(name)
    return run


def _of_value(name: str) -> Callable[[Batch, Variant], Result]:
    def run(batch: Batch, variant: Variant) -> Result:
        bound = variant.options["clip"]
        slopes = [[losses.value_loss(t, bound) for t in row.tokens] for row in batch.plain()]
        return _one_number(batch, slopes, variant.aggregation or "token-mean", {})

    return run


def _of_corrections(name: str) -> Callable[[Batch, Variant], Result]:
    preset = corrections.NOTHING | corrections.PRESETS[name]

    def run(batch: Batch, variant: Variant) -> Result:
        options = preset | variant.options
        rows = batch.plain()
        weights, kept = corrections.correct(rows, options)
        bypass = [[float(options["bypass"])] * len(r.tokens) for r in rows]
        made = {"weights": weights, "mask": [[float(k) for k in row] for row in kept], "bypass": bypass}
        totals = {}
        for metric, (total, count) in corrections.diagnostics(rows).items():
            totals |= {f"sum of mismatch/{metric}": total, f"count of mismatch/{metric}": count}
        return Result(totals, {k: _packed(batch, v) for k, v in made.items()})

    return run


def _of_preferences(name: str) -> Callable[[Batch, Variant], Result]:
    reference = preferences.ORACLES[name]

    def run(batch: Batch, variant: Variant) -> Result:
        options, rows = rl.options("preferences", name) | variant.options, batch.plain()
        groups = [r.group for r in rows]
        weights = [1 / groups.count(g) / len(set(groups)) for g in groups]
        total, slopes = 0.0, {"chosen": [], "rejected": []}
        for row, weight in zip(rows, weights):
            sums = (math.fsum(t.columns[c] for t in row.tokens) for c in ("logprobs", "ref_logprobs"))
            lost = tuple(row.columns[c] for c in ("rejected", "rejected_reference", "rejected_counts"))
            margin = row.columns["margins"] if variant.weighted else 0.0
            value, *by = reference((*sums, max(len(row.tokens), 1)), lost, margin, options)
            total += weight * value
            for side, slope in zip(slopes, by):
                slopes[side].append([weight * slope] * len(row.tokens))
        return Result({"loss": total}, {k: _packed(batch, v) for k, v in slopes.items()})

    return run


_ORACLES: dict[str, Callable[[str], Callable[[Batch, Variant], Result]]] = {
    "advantages": _of_advantages,
    "losses": _of_losses,
    "kl": _of_kl,
    "aggregations": _of_aggregations,
    "value": _of_value,
    "corrections": _of_corrections,
    "preferences": _of_preferences,
}


# ---- (c) invariance ----


def check_invariance(subject: Subject, count: int = FEW) -> Gap:
    """Micro-batches, order of rows, padding, names of groups: the same loss, gradient or advantages.

    count: 1: the first variant in every cut into micro-batches, the others in one.
    """
    family, gap = FAMILIES[subject.kind], Gap(EXACT)
    for place, variant in enumerate(variants(subject.kind, subject.name)):
        for seed in range(max(count // 3, 1)):
            batch = drawn(1000 + seed)
            whole = family.run(subject.name, variant, batch)
            where = f"seed {1000 + seed}, {variant}"
            _micro_batches(gap, family, subject.name, variant, batch, whole, where, every=count > 1 or place == 0)
            _another_order(gap, family, subject.name, variant, batch, whole, where)
            _padding(gap, family, subject.name, variant, batch, whole, where)
    return gap


def _order(batch: Batch, seed: int) -> Tensor:
    return torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed))


def _scattered(found: Result, at: Tensor) -> Result:
    return Result(found.totals, {k: torch.zeros_like(v).index_put((at,), v) for k, v in found.tokens.items()})


def _micro_batches(
    gap: Gap, family: Family, name: str, variant: Variant, batch: Batch, whole: Result, where: str, *, every: bool
) -> None:
    if not family.micros:
        return
    order, n = _order(batch, 1), len(batch)
    for cuts in ([n // 4, n // 2], *([[n // 2], list(range(1, n))] if every else [])):
        parts = list(order.tensor_split(cuts))
        _agree(gap, family.run(name, variant, batch, cuts=parts), whole, f"{len(parts)} micro-batches, {where}")


def _another_order(
    gap: Gap, family: Family, name: str, variant: Variant, batch: Batch, whole: Result, where: str
) -> None:
    order = _order(batch, 2)
    other = batch.pick(order)
    other = replace(other, groups=1000 - 7 * other.groups)
    found = _scattered(family.run(name, variant, other), batch.index(order))
    _agree(gap, found, whole, f"another order, {where}")


def _padding(gap: Gap, family: Family, name: str, variant: Variant, batch: Batch, whole: Result, where: str) -> None:
    padded, at = batch.padded(2, 9)
    found = family.run(name, variant, padded)
    outside = torch.ones(len(padded.mask), dtype=torch.bool).index_put((at,), torch.tensor(False))
    for column, values in found.tokens.items():
        gap.true(not values[outside].any(), f"{column} is not 0 at padding, {where}")
    inside = Result(found.totals, {k: v[at] for k, v in found.tokens.items()})
    _agree(gap, inside, whole, f"padded, {where}")


# ---- (e) two workers ----


def check_split(subject: Subject, count: int = FEW) -> Gap:
    """Two workers that share groups, each cutting its rows into micro-batches, make what one makes.

    count: 1: the first variant with every division of rows, the others with one.
    """
    family, gap = FAMILIES[subject.kind], Gap(EXACT)
    for place, variant in enumerate(variants(subject.kind, subject.name)):
        for seed in range(max(count // 8, 1)):
            batch = drawn(2000 + seed, rows=8)
            whole = family.run(subject.name, variant, batch)
            for owner in owners(len(batch))[: None if count > 1 or place == 0 else 1]:
                parts = [torch.tensor([r for r, w in enumerate(owner) if w == k], dtype=torch.int64) for k in (1, 0)]
                found = family.split(subject.name, variant, batch, parts)
                _agree(gap, found, whole, f"owners {owner}, seed {2000 + seed}, {variant}")
    return gap


def owners(n: int) -> list[list[int]]:
    """Which of two workers has each row: alternating (groups straddle), halves, all on the second one."""
    return [[i % 2 for i in range(n)], [int(i < n // 2) for i in range(n)], [1] * n]
