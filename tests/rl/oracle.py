"""A second implementation: plain loops over rows and tokens in Python floats, written from the formulas."""

import math

import torch


def rows_of(lengths, *columns):
    """Cut packed columns into rows of Python numbers."""
    start = 0
    for length in lengths.tolist():
        yield [c[start : start + length].tolist() for c in columns]
        start += length


def mean(values):
    return math.fsum(values) / len(values)


def deviation(values):
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - 1))


def row_advantages(name, rewards, groups):
    """Missing rewards (NaN) enter nothing and get 0."""
    result = []
    for reward, group in zip(rewards, groups):
        others = [r for r, g in zip(rewards, groups) if g == group and not math.isnan(r)]
        if math.isnan(reward):
            result.append(0.0)
        elif len(others) == 1:
            result.append(reward / (1 + 1e-6) if name == "grpo" else reward)
        elif max(others) == min(others):
            result.append(0.0)
        elif name == "grpo":
            result.append((reward - mean(others)) / (deviation(others) + 1e-6))
        elif name == "grpo_no_std":
            result.append(reward - mean(others))
        else:
            left = list(others)
            left.remove(reward)
            result.append(reward - mean(left))
    return result


def gae(rewards, values, masks, gamma, lam, whiten):
    """Rows of token rewards (None: missing row), values and masks -> advantages, returns with None where masked."""
    advantages, returns = [], []
    for reward, value, mask in zip(rewards, values, masks):
        row, back, following, running = [None] * len(mask), [None] * len(mask), 0.0, 0.0
        for t in reversed(range(len(mask))):
            if mask[t] and reward is not None:
                running = reward[t] + gamma * following - value[t] + gamma * lam * running
                following = value[t]
                row[t], back[t] = running, running + value[t]
        advantages.append(row)
        returns.append(back)
    flat = [a for row in advantages for a in row if a is not None]
    if whiten and len(flat) > 1:
        centre, scale = mean(flat), math.sqrt(deviation(flat) ** 2 + 1e-8)
        ahead = rewards_ahead(rewards, masks, gamma)
        if max(ahead) - min(ahead) <= 1e-8 * max(map(abs, ahead)):
            centre, scale, advantages = 0.0, 1.0, [[None if a is None else 0.0 for a in row] for row in advantages]
        advantages = [[None if a is None else (a - centre) / scale for a in row] for row in advantages]
    return advantages, returns


def rewards_ahead(rewards, masks, gamma):
    """What each token that counts has still to come, by its definition."""
    found = []
    for reward, mask in zip(rewards, masks):
        row = [] if reward is None else [r for r, m in zip(reward, mask) if m]
        found += [math.fsum(gamma**k * r for k, r in enumerate(row[t:])) for t in range(len(row))]
    return found


def clip_term(logp, old, advantage, low, high, dual):
    ratio = math.exp(min(max(logp - old, -20.0), 20.0))
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    return min(loss, -advantage * dual) if advantage < 0 and dual else loss


def aggregate(name, rows, norm_length=None):
    """rows: lists of the values that count."""
    alive = [r for r in rows if r]
    total = math.fsum(v for r in alive for v in r)
    if not alive or name == "token-sum":
        return total
    if name == "token-mean":
        return total / sum(len(r) for r in alive)
    if name == "seq-mean-token-mean":
        return mean([mean(r) for r in alive])
    length = (norm_length or max(len(r) for r in alive)) if name == "seq-mean-token-sum-norm" else 1
    return total / len(alive) / length


def packed(rows):
    """Rows with None where masked -> float64 [total] with 0 there."""
    return torch.tensor([0.0 if v is None else v for row in rows for v in row], dtype=torch.float64)


# -- every other estimator: rows of the tokens that count, as dicts of lists -----------------------------------------


def counted(batch, columns, rewards=None):
    """What an estimator sees, row by row, as dicts: numbers of rows, and lists over the tokens that count."""
    rows = []
    masks = [m for (m,) in rows_of(batch.lengths, batch.mask)]
    start = 0
    for i, mask in enumerate(masks):
        at = [t for t, m in enumerate(mask) if m]
        row = {"group": int(batch.groups[i]), "places": [t - at[0] for t in at], "score": float(batch.rewards[i])}
        row["tokens"] = [0.0] * (len(at) - 1) + [row["score"]] if at else []
        if rewards is not None:
            row["tokens"] = [float(rewards[start + t]) for t in at]
            row["score"] = math.fsum(row["tokens"]) if at else math.nan
        for name, column in columns.items():
            row[name] = (
                float(column[i])
                if len(column) == len(masks) and name.startswith(("part", "base"))
                else ([float(column[start + t]) for t in at])
            )
        needed = [row["score"]] + [row[c] for c in columns if c.startswith(("part", "base"))]
        row["valid"] = bool(at) and all(map(math.isfinite, needed))
        rows.append(row)
        start += len(mask)
    return rows


def to_go(values, gamma):
    return [math.fsum(gamma**k * v for k, v in enumerate(values[t:])) for t in range(len(values))]


def whitened(rows):
    """Rows of numbers, shifted and scaled to mean 0 and unbiased variance 1 over all of them."""
    flat = [v for row in rows for v in row]
    if len(flat) < 2:
        return rows
    if max(flat) - min(flat) <= 1e-9 * max(map(abs, flat)):
        return [[0.0 for _ in row] for row in rows]
    return [[(v - mean(flat)) / math.sqrt(deviation(flat) ** 2 + 1e-8) for v in row] for row in rows]


def spread_of(values, std):
    if std == "none":
        return 1.0
    return deviation(values) * (math.sqrt((len(values) - 1) / len(values)) if std == "biased" else 1.0)


def in_group(rows, key="score"):
    """For each valid row: the numbers of its group."""
    return [[r[key] for r in rows if r["valid"] and r["group"] == row["group"]] for row in rows]


def relative(rows, key="score", std=None, eps=1e-6, singleton="reward"):
    """Number minus mean of the group, over its deviation where there is one; 0 for missing rows."""
    found = []
    for row, others in zip(rows, in_group(rows, key)):
        value = row[key] if row["valid"] else 0.0
        if len(others) < 2:
            value = value if singleton == "reward" else 0.0
            found.append(value / (1 + eps) if std else value)
        elif not row["valid"] or max(others) == min(others):
            found.append(0.0)
        else:
            found.append((value - mean(others)) / (spread_of(others, std) + eps if std else 1.0))
    return found


def row_estimates(name, rows, **o):
    """One number a row."""
    singleton = o.get("singleton", "reward")
    if name == "grpo":
        return relative(rows, std=o.get("std", "unbiased"), singleton=singleton)
    if name in ("grpo_no_std", "rloo", "reinforce_pp_baseline", "gpg"):
        found = relative(rows, singleton=singleton)
    if name == "rloo":
        sizes = [len(others) for others in in_group(rows)]
        return [a * (n / (n - 1) if n > 1 else 1) for a, n in zip(found, sizes)]
    if name == "gpg":
        live = [(row["score"], others) for row, others in zip(rows, in_group(rows)) if row["valid"]]
        teach = [s != 0 if o.get("count") != "spread" else max(others) > min(others) for s, others in live]
        return [a * len(live) / max(sum(teach), 1) / o.get("norm", 1.0) for a in found]
    if name == "gdpo":
        keys = [f"part/{k}" for k in o.get("keys", ())] or ["score"]
        parts = [relative(rows, k, o.get("std", "unbiased"), singleton=singleton) for k in keys]
        found = [sum(w * a for w, a in zip(o.get("weights") or [1.0] * len(keys), each)) for each in zip(*parts)]
    if name == "opo":
        return optimal_rows(rows, singleton)
    if name == "grpo_passk":
        return best_of(rows, o.get("std", "unbiased"))
    return found


def optimal_rows(rows, singleton):
    found = []
    for row in rows:
        others = [(len(r["places"]), r["score"]) for r in rows if r["valid"] and r["group"] == row["group"]]
        lengths, scores = [c for c, _ in others], [s for _, s in others]
        if not row["valid"] or (len(others) > 1 and max(scores) == min(scores)):
            found.append(0.0)
        elif len(others) == 1:
            found.append(row["score"] if singleton == "reward" else 0.0)
        else:
            found.append(row["score"] - math.fsum(c * s for c, s in others) / max(sum(lengths), 1))
    return found


def best_of(rows, std):
    found = []
    for row, others in zip(rows, in_group(rows)):
        first = sorted(others, reverse=True)
        alone = row["valid"] and len(first) > 1 and row["score"] == first[0] > first[1]
        scale = spread_of(others, std) + (1e-6 if std != "none" else 0.0) if alone else 1.0
        found.append((first[0] - first[1]) / scale if alone else 0.0)
    return found


def token_estimates(name, rows, **o):
    """Advantages and returns of each row's tokens that count; empty lists for missing rows."""
    live = [row if row["valid"] else row | {"places": [], "tokens": []} for row in rows]
    if name == "gae":
        return with_critic(live, o.get("gamma", 1.0), [o.get("lam", 1.0)] * len(live), o.get("lam", 1.0), o)
    if name == "vapo":
        alpha, lam = o.get("alpha", 0.05), o.get("lam", 0.95)
        lams = [min(max(1 - 1 / max(alpha * len(r["places"]), 1), 0), 1) for r in live]
        return with_critic(
            live,
            o.get("gamma", 1.0),
            lams if o.get("adaptive", True) else [lam] * len(live),
            o.get("value_lam", 1.0),
            o,
        )
    if name == "distill":
        sizes = [row["chunk_tokens"] if "align" in o else [1.0] * len(row["logprobs"]) for row in live]
        each = [zip(row["ref_logprobs"], row["logprobs"], n, row["places"]) for row, n in zip(live, sizes)]
        gaps = [[(r - p) * n for r, p, n, _ in row] for row in each]
        return [to_go(gap, o.get("horizon", 0.0)) for gap in gaps], None
    if name in ("reinforce_pp", "remax"):
        returns = [to_go(row["tokens"], o.get("gamma", 1.0)) for row in live]
        if name == "reinforce_pp":
            return whitened(returns) if o.get("whiten", True) else returns, returns
        return [[g - row["baselines"] for g in back] for row, back in zip(live, returns)], returns
    if name == "grpo_process":
        return [of_turns(row, live, o.get("std", "unbiased")) for row in live], None
    if "optimal" in name:
        return optimal_tokens(live, name.startswith("tir"), o), [to_go(row["tokens"], 1.0) for row in live]
    found = row_estimates(name, rows, **o)
    found = [[a] * len(row["places"]) for a, row in zip(found, live)]
    return whitened(found) if name in ("reinforce_pp_baseline", "gdpo") else found, None


def turns_of(row):
    """Rewards of a row's turns: runs of neighbouring places."""
    found = []
    for i, (place, reward) in enumerate(zip(row["places"], row["tokens"])):
        if not i or place != row["places"][i - 1] + 1:
            found.append([])
        found[-1].append(reward)
    return found


def of_turns(row, rows, std):
    """DeepSeekMath, section 4.1.3, by its definition: a token gets the normalised rewards from its turn on."""
    everyone = [math.fsum(turn) for r in rows if r["group"] == row["group"] for turn in turns_of(r)]
    found = []
    for k, turn in enumerate(turns_of(row)):
        behind = [math.fsum(later) for later in turns_of(row)[k:]]
        if len(everyone) == 1:
            total = behind[0] / (1 + 1e-6)
        elif max(everyone) == min(everyone):
            total = 0.0
        else:
            total = math.fsum((r - mean(everyone)) / (spread_of(everyone, std) + 1e-6) for r in behind)
        found += [total] * len(turn)
    return found


def with_critic(rows, gamma, lams, value_lam, o):
    """GAE by its definition, a double sum over one-step errors, with a lambda for each row and one for the targets."""
    advantages, returns = [], []
    for row, lam in zip(rows, lams):
        values = row["values"][: len(row["tokens"])]
        delta = [r + gamma * after - v for r, after, v in zip(row["tokens"], [*values[1:], 0.0], values)]
        advantages.append(to_go(delta, gamma * lam))
        returns.append([a + v for a, v in zip(to_go(delta, gamma * value_lam), values)])
    if o.get("whiten", True):
        coming = [g for row in rows for g in to_go(row["tokens"], gamma)]
        equal = len(coming) > 1 and max(coming) - min(coming) <= 1e-9 * max(map(abs, coming))
        advantages = [[0.0 for _ in row] for row in advantages] if equal else whitened(advantages)
    return advantages, returns


def optimal_tokens(rows, by_ordinal, o):
    """A = G - sum(G W) / (sum(W) + eps) over the samples of the group that have a token at the place."""
    paths, returns = [], []
    for row in rows:
        weights = row.get("weights") or [1.0] * len(row["places"])
        steps = zip(row["logprobs"], row["sum_pi_squared"], weights)
        each = [(1 - 2 * math.exp(logp) + squares) * w**2 for logp, squares, w in steps]
        paths.append([math.fsum(each[: t + 1]) for t in range(len(each))])
        returns.append(to_go(row["tokens"], 1.0))
    places = [range(len(row["places"])) if by_ordinal else row["places"] for row in rows]
    found = []
    for i, row in enumerate(rows):
        found.append([])
        for t, place in enumerate(places[i]):
            same = [j for j, r in enumerate(rows) if r["group"] == row["group"] and place in places[j]]
            at = [(returns[j][list(places[j]).index(place)], paths[j][list(places[j]).index(place)]) for j in same]
            mine = returns[i][t]
            if len(at) == 1:
                found[i].append(mine if o.get("singleton", "reward") == "reward" else 0.0)
            elif max(g for g, _ in at) == min(g for g, _ in at):
                found[i].append(0.0)
            else:
                found[i].append(mine - math.fsum(g * w for g, w in at) / (math.fsum(w for _, w in at) + 1e-8))
    return found
