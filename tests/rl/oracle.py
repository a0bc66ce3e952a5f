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
