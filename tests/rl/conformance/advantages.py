"""Oracles of the advantage estimators: plain loops in Python floats, written from the formulas of the papers.

Each takes the rows of a whole batch and the options; it gives the advantages of each row's tokens that count and, where
the estimator makes targets for a critic, its returns. A row without a reward, or without a token that counts,
enters nothing and has None.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.rl.conformance.batch import Row

Numbers = list[list[float] | None]
Options = dict[str, Any]
Oracle = Callable[[list[Row], Options], tuple[Numbers, Numbers | None]]
ORACLES: dict[str, Oracle] = {}


def oracle(name: str) -> Callable[[Oracle], Oracle]:
    """Make a reference known for a registered name."""

    def add(function: Oracle) -> Oracle:
        ORACLES[name] = function
        return function

    return add


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: list[float], how: str = "unbiased") -> float:
    """Over n - 1 values, or over n."""
    return math.sqrt(math.fsum((v - mean(values)) ** 2 for v in values) / (len(values) - (how == "unbiased")))


def there(row: Row) -> bool:
    return math.isfinite(row.reward) and bool(row.tokens)


def company(rows: list[Row], row: Row) -> list[Row]:
    """Rows of the same group that have a reward."""
    return [r for r in rows if r.group == row.group and there(r)]


def spread(rows: list[Row], scores: list[float]) -> Numbers:
    """The same number at every token of a row."""
    return [[s] * len(r.tokens) if there(r) else None for r, s in zip(rows, scores)]


def to_go(row: Row, gamma: float) -> list[float]:
    """Discounted reward to come at each token that counts; the score is given at the last of them."""
    return [row.reward * gamma**k for k in reversed(range(len(row.tokens)))]


def whitened(numbers: Numbers) -> Numbers:
    """Mean 0, unbiased variance 1 over the tokens of the batch; a single token stays as it is, equal ones are 0."""
    flat = [a for row in numbers if row is not None for a in row]
    if len(flat) < 2:
        return numbers
    if max(flat) - min(flat) <= 1e-8 * max(map(abs, flat)):
        return [None if row is None else [0.0] * len(row) for row in numbers]
    centre, scale = mean(flat), math.sqrt(deviation(flat) ** 2 + 1e-8)
    return [None if row is None else [(a - centre) / scale for a in row] for row in numbers]


def by_group(rows: list[Row], relative: Callable[[Row, list[Row]], float], o: Options, one: float = 1.0):
    """A row's number in its group; alone in it the score (times ``one``) or 0; equal scores: exactly 0."""
    found = []
    for row in rows:
        mates = company(rows, row) if there(row) else []
        if len(mates) > 1:
            flat = max(m.reward for m in mates) == min(m.reward for m in mates)
            found.append(0.0 if flat else relative(row, mates))
        else:
            found.append(row.reward * one if mates and o.get("singleton", "reward") == "reward" else 0.0)
    return found


def others(row: Row, mates: list[Row]) -> list[float]:
    return [m.reward for m in mates if m is not row]


def scores(mates: list[Row]) -> list[float]:
    return [m.reward for m in mates]


@oracle("grpo")
def grpo(rows: list[Row], o: Options) -> tuple[Numbers, None]:
    def relative(row: Row, mates: list[Row]) -> float:
        return (row.reward - mean(scores(mates))) / (deviation(scores(mates), o["std"]) + o["eps"])

    return spread(rows, by_group(rows, relative, o, 1 / (1 + o["eps"]))), None


def turns(row: Row) -> list[float]:
    """Rewards of a row's turns, runs of neighbouring tokens: all in the last one."""
    count = sum(not k or t.place != row.tokens[k - 1].place + 1 for k, t in enumerate(row.tokens))
    return [0.0] * (count - 1) + [row.reward]


@oracle("grpo_process")
def grpo_process(rows: list[Row], o: Options) -> tuple[Numbers, None]:
    found: Numbers = []
    for row in rows:
        if not there(row):
            found.append(None)
            continue
        all_turns = [r for mate in company(rows, row) for r in turns(mate)]
        normal = [0.0 for _ in turns(row)]
        if len(all_turns) == 1:
            normal = [row.reward / (1 + o["eps"])]
        elif max(all_turns) != min(all_turns):
            normal = [(r - mean(all_turns)) / (deviation(all_turns, o["std"]) + o["eps"]) for r in turns(row)]
        mine, turn = [], -1
        for k, token in enumerate(row.tokens):
            turn += not k or token.place != row.tokens[k - 1].place + 1
            mine.append(math.fsum(normal[turn:]))
        found.append(mine)
    return found, None


def centred(row: Row, mates: list[Row]) -> float:
    return row.reward - mean(scores(mates))


@oracle("grpo_no_std")
def grpo_no_std(rows: list[Row], o: Options) -> tuple[Numbers, None]:
    return spread(rows, by_group(rows, centred, o)), None


@oracle("rloo")
def rloo(rows: list[Row], o: Options) -> tuple[Numbers, None]:
    return spread(rows, by_group(rows, lambda row, mates: row.reward - mean(others(row, mates)), o)), None


def _gae(row: Row, gamma: float, lam: float) -> list[float]:
    found, running, following = [], 0.0, 0.0
    for t, token in reversed(list(enumerate(row.tokens))):
        reward = row.reward if t == len(row.tokens) - 1 else 0.0
        running = reward + gamma * following - token.values + gamma * lam * running
        following = token.values
        found.append(running)
    return found[::-1]


def _maybe_whitened(rows: list[Row], found: Numbers, o: Options) -> Numbers:
    """Whitened where that is asked for; 0 where all tokens of the batch have the same reward to come."""
    if not o["whiten"]:
        return found
    ahead = [x for row in rows if there(row) for x in to_go(row, o["gamma"])]
    if len(ahead) > 1 and max(ahead) - min(ahead) <= 1e-8 * max(map(abs, ahead)):
        return [None if row is None else [0.0] * len(row) for row in found]
    return whitened(found)


def _targets(rows: list[Row], gamma: float, lam: float) -> Numbers:
    """Advantage + value."""
    return [[a + t.values for a, t in zip(_gae(r, gamma, lam), r.tokens)] if there(r) else None for r in rows]


@oracle("gae")
def gae(rows: list[Row], o: Options) -> tuple[Numbers, Numbers]:
    found: Numbers = [_gae(row, o["gamma"], o["lam"]) if there(row) else None for row in rows]
    return _maybe_whitened(rows, found, o), _targets(rows, o["gamma"], o["lam"])


@oracle("vapo")
def vapo(rows: list[Row], o: Options) -> tuple[Numbers, Numbers]:
    def lam(row: Row) -> float:
        return 1 - 1 / max(o["alpha"] * len(row.tokens), 1.0) if o["adaptive"] else o["lam"]

    found: Numbers = [_gae(row, o["gamma"], lam(row)) if there(row) else None for row in rows]
    return _maybe_whitened(rows, found, o), _targets(rows, o["gamma"], o["value_lam"])


@oracle("reinforce_pp")
def reinforce_pp(rows: list[Row], o: Options) -> tuple[Numbers, Numbers]:
    ahead: Numbers = [to_go(row, o["gamma"]) if there(row) else None for row in rows]
    return _maybe_whitened(rows, ahead, o), ahead


@oracle("reinforce_pp_baseline")
def reinforce_pp_baseline(rows: list[Row], o: Options) -> tuple[Numbers, None]:
    return whitened(spread(rows, by_group(rows, centred, o))), None


@oracle("remax")
def remax(rows: list[Row], o: Options) -> tuple[Numbers, Numbers]:
    known = [there(r) and math.isfinite(r.columns["baselines"]) for r in rows]
    found = [[r.reward - r.columns["baselines"]] * len(r.tokens) if k else None for r, k in zip(rows, known)]
    return found, [[r.reward] * len(r.tokens) if k else None for r, k in zip(rows, known)]


@oracle("opo")
def opo(rows: list[Row], o: Options) -> tuple[Numbers, None]:
    def relative(row: Row, mates: list[Row]) -> float:
        lengths = [len(m.tokens) for m in mates]
        return row.reward - math.fsum(n * m.reward for n, m in zip(lengths, mates)) / max(sum(lengths), 1)

    return spread(rows, by_group(rows, relative, o)), None


@oracle("gpg")
def gpg(rows: list[Row], o: Options) -> tuple[Numbers, None]:
    valid = [row for row in rows if there(row)]
    if o["count"] == "nonzero":
        teach = sum(row.reward != 0 for row in valid)
    else:
        teach = sum(len(set(scores(company(rows, row)))) > 1 for row in valid)
    alpha = len(valid) / max(teach, 1)
    return spread(rows, [alpha * a / o["norm"] for a in by_group(rows, centred, o)]), None


@oracle("grpo_passk")
def grpo_passk(rows: list[Row], o: Options) -> tuple[Numbers, None]:
    found = []
    for row in rows:
        mates = company(rows, row)
        rest = others(row, mates)
        if not there(row) or not rest or row.reward <= max(rest):
            found.append(0.0)
        else:
            scale = 1.0 if o["std"] == "none" else deviation(scores(mates), o["std"]) + o["eps"]
            found.append((row.reward - max(rest)) / scale)
    return spread(rows, found), None


@oracle("gdpo")
def gdpo(rows: list[Row], o: Options) -> tuple[Numbers, None]:
    """GRPO of each part by itself, the weighted sum whitened; a row without one of the parts is out of everything."""
    columns = [[r.columns[f"part/{key}"] for r in rows] for key in o["keys"]] or [[r.reward for r in rows]]
    whole = [there(r) and all(math.isfinite(c[i]) for c in columns) for i, r in enumerate(rows)]
    total = [0.0] * len(rows)
    for weight, column in zip(o["weights"] or [1.0] * len(columns), columns):
        part = [replace(r, reward=c if k else math.nan) for r, c, k in zip(rows, column, whole)]
        found, _ = grpo(part, o)
        total = [t + (weight * row[0] if row else 0.0) for t, row in zip(total, found)]
    return whitened([[t] * len(r.tokens) if k else None for t, r, k in zip(total, rows, whole)]), None


def _energies(rows: list[Row], weighted: bool) -> list[list[float]]:
    """Sum of w = 1 - 2 pi + sum(pi^2) up to each token, squared importance weights in front of each w."""
    found = []
    for row in rows:
        running, own = 0.0, []
        for t in row.tokens:
            weight = t.weights**2 if weighted else 1.0
            running += weight * max(1 - 2 * math.exp(t.old_logprobs) + t.sum_pi_squared, 0.0)
            own.append(running)
        found.append(own)
    return found


def _by_place(rows: list[Row], o: Options, place: Callable[[Row, int], int]) -> tuple[Numbers, Numbers]:
    """Reward minus the mean of the group's rewards at the same place, by the energies gathered up to there.

    Where no other sample of the group has a token at the place there is no baseline.
    """
    energies = _energies(rows, o["weighted"])
    found: Numbers = []
    for row in rows:
        out = []
        for k in range(len(row.tokens)):
            alive = [
                (own[j], mate.reward)
                for mate, own in zip(rows, energies)
                for j in range(len(mate.tokens))
                if there(mate) and mate.group == row.group and place(mate, j) == place(row, k)
            ]
            weight = math.fsum(w for w, _ in alive) + o["eps"]
            if len(alive) < 2:
                out.append(row.reward if o["singleton"] == "reward" else 0.0)
            elif len({g for _, g in alive}) == 1:
                out.append(0.0)
            else:
                out.append(row.reward - math.fsum(w * g for w, g in alive) / weight)
        found.append(out if there(row) else None)
    return found, [[r.reward] * len(r.tokens) if there(r) else None for r in rows]


@oracle("optimal_token_baseline")
def optimal_token_baseline(rows: list[Row], o: Options) -> tuple[Numbers, Numbers]:
    return _by_place(rows, o, lambda row, k: row.tokens[k].place - row.tokens[0].place)


@oracle("tir_optimal_token_baseline")
def tir_optimal_token_baseline(rows: list[Row], o: Options) -> tuple[Numbers, Numbers]:
    return _by_place(rows, o, lambda row, k: k)


@oracle("distill")
def distill(rows: list[Row], o: Options) -> tuple[Numbers, None]:
    """log teacher - log student, of a whole chunk if they are aligned, and the discounted same of the tokens behind."""
    found: Numbers = []
    for row in rows:
        of_chunk = o["align"] == "characters"
        gaps = [(t.ref_logprobs - t.old_logprobs) * (t.chunk_tokens if of_chunk else 1) for t in row.tokens]
        sums = [math.fsum(o["horizon"] ** k * g for k, g in enumerate(gaps[i:])) for i in range(len(gaps))]
        found.append(sums if there(row) else None)
    return found, None
