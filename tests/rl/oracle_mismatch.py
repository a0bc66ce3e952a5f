"""Corrections and diagnostics a second time: loops over rows and tokens in Python floats, written from the formulas."""

import math

from tests.rl.oracle import rows_of

STATISTIC = {"k1": lambda d: -d, "k2": lambda d: d**2 / 2, "k3": lambda d: math.exp(d) - 1 - d}


def clamp(value, bound=20.0):
    return min(max(value, -bound), bound)


def gap(old, rollout):
    return 0.0 if old == rollout else clamp(old - rollout)


def coins(p, q):
    p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def rows(batch, columns):
    """(old, rollout, advantages, mask) of each row, as lists of the tokens that count; the whole mask of the row."""
    for *values, mask in rows_of(batch.lengths, *columns.values(), batch.mask):
        yield [[v for v, m in zip(column, mask) if m] for column in values], mask


def ratios(level, gaps):
    if level == "token":
        return [math.exp(d) for d in gaps]
    whole = math.fsum(gaps) / (len(gaps) if level == "geometric" else 1)
    return [math.exp(clamp(whole))] * len(gaps)


def bounded(rho, cap, low, beyond):
    inside = rho >= low and (not cap or rho <= cap)
    if beyond == "clip":
        return min(max(rho, low), cap or math.inf), True
    return (rho if inside else 0.0), inside or beyond == "zero"


def passes(name, bounds, old, rollout, gaps):
    """Whether each token meets one condition."""
    if name == "token_binary":
        return [max(coins(o, r), coins(r, o)) <= bounds for o, r in zip(old, rollout)]
    over, _, form = name.rpartition("_")
    values = [STATISTIC[form](d) for d in gaps]
    whole = {"seq_sum": math.fsum, "seq_mean": lambda v: math.fsum(v) / len(v), "seq_max": max}
    if over != "token":
        values = [whole[over](values)] * len(values)
    if form != "k1":
        return [v <= bounds for v in values]
    return [bounds[0] <= math.exp(v) <= bounds[1] for v in values]


def nearest(pushed, bound):
    """How large a squared gap may be, of the tokens that are pushed further from the engine: the largest left goes as
    long as the mean is above the bound, with those that are as large."""
    left = sorted(pushed)
    while left and math.fsum(left) / len(left) > bound:
        left = [v for v in left if v < left[-1]]
    return left[-1] if left else -1.0


def correct(
    batch, columns, *, level, max_weight, min_weight, beyond, normalise, denominators, reject_negative, second_moment,
    reject,
):  # fmt: skip
    weights, masks, above, below, failed, held = [], [], 0, 0, dict.fromkeys(reject, 0), []
    lost_rows = lost = total = rows_alive = 0
    if reject_negative is not None:
        failed["negative"] = 0
    if second_moment is not None:
        failed["second_moment"] = 0
        every = [(gap(o, r), a) for row, _ in rows(batch, columns) for o, r, a in zip(*row)]
        largest = nearest([d * d for d, a in every if a * d > 0], second_moment)
    scales = []
    for (old, rollout, advantages), _ in rows(batch, columns):
        gaps = [gap(o, r) for o, r in zip(old, rollout)]
        rho = ratios(level, gaps) if gaps else []
        row = [bounded(r, max_weight, min_weight, beyond) for r in rho]
        above += sum(bool(max_weight) and r > max_weight for r in rho)
        below += sum(r < min_weight for r in rho)
        keep = [k for _, k in row]
        for name, bounds in reject.items():
            ok = passes(name, bounds, old, rollout, gaps) if gaps else []
            failed[name] += sum(not k for k in ok)
            keep = [a and b for a, b in zip(keep, ok)]
        if gaps and reject_negative is not None:
            far = -math.fsum(gaps) / len(gaps) > reject_negative
            if far and math.fsum(advantages) < 0:
                failed["negative"] += len(gaps)
                keep = [False] * len(gaps)
        if second_moment is not None:
            ok = [a * d <= 0 or d * d <= largest for d, a in zip(gaps, advantages)]
            failed["second_moment"] += sum(not k for k in ok)
            keep = [a and b for a, b in zip(keep, ok)]
        held += [w for w, _ in row]
        scales += [w for w, inside in (row if level == "token" else row[:1]) if inside]
        weights.append([w for w, _ in row])
        masks.append(keep)
        total, lost = total + len(keep), lost + sum(not k for k in keep)
        rows_alive, lost_rows = rows_alive + bool(keep), lost_rows + (not all(keep))
    scale = math.fsum(scales) / len(scales) if scales else 1.0
    scale = scale if scale > 1e-8 else 1.0
    may_reject = reject or reject_negative is not None or second_moment is not None or beyond == "reject"
    flat_weights, flat_mask = [], []
    for (_, mask), row, keep in zip(rows(batch, columns), weights, masks):
        place = iter(zip(row, keep))
        for m in mask:
            weight, kept = next(place) if m else (0.0, False)
            weight = weight / scale if normalise else weight
            every = denominators == "all" and may_reject
            flat_weights.append(weight if kept or not every else 0.0)
            flat_mask.append(bool(m) if every else kept)
    share = (lambda n: n / total) if total else (lambda n: math.nan)
    squares = math.fsum(w * w for w in held)
    metrics = {
        "weight": share(math.fsum(held)),
        "effective": math.fsum(held) ** 2 / (squares * total) if squares else math.nan,
        "above": share(above),
        "below": share(below),
        "rejected": share(lost),
        "rejected_rows": lost_rows / rows_alive if rows_alive else math.nan,
        **({"scale": scale} if normalise else {}),
        **{f"rejected/{name}": share(n) for name, n in failed.items()},
    }
    return flat_weights, flat_mask, {f"correction/{k}": v for k, v in metrics.items()}


def diagnostics(batch, columns):
    gaps, apart, sums, old_ppl, rollout_ppl, further = [], [], [], [], [], []
    for (old, rollout), _ in rows(batch, columns):
        if not old:
            continue
        mine = [gap(o, r) for o, r in zip(old, rollout)]
        gaps += mine
        apart += [0.0 if o == r else abs(o - r) for o, r in zip(old, rollout)]
        sums.append(clamp(math.fsum(mine)))
        old_ppl.append(math.exp(-math.fsum(old) / len(old)))
        rollout_ppl.append(math.exp(-math.fsum(rollout) / len(rollout)))
        further.append(-math.fsum(mine) / len(mine))
    mean = lambda v: math.fsum(v) / len(v) if v else math.nan  # noqa: E731
    rho = [math.exp(d) for d in gaps]
    return {
        "kl": mean([-d for d in gaps]),
        "k3": mean([min(STATISTIC["k3"](d), 10.0) for d in gaps]),
        "mean": mean(apart),
        "max": max(apart) if apart else math.nan,
        "chi2_token": mean([r * r - 1 for r in rho]),
        "effective": math.fsum(rho) ** 2 / (math.fsum(r * r for r in rho) * len(rho)) if rho else math.nan,
        "training_ppl": mean(old_ppl),
        "rollout_ppl": mean(rollout_ppl),
        "log_ppl_diff": mean(further),
        "ppl_ratio": mean([math.exp(f) for f in further]),
        "chi2_seq": mean([math.exp(2 * s) - 1 for s in sums]),
    }
