"""Loaders of each source, from the seconds that its samples cost and the weights of the steps to come.

A loader reads one source and computes on one core at a time. McNaughton (1959): work that may be interrupted ends on m
cores after max(longest piece, sum / m) seconds, laid on a line that is cut into m equal lengths. So a source needs as
many loaders as the cores that its work fills; more do not help. OmniLoad (arXiv 2504.09844) gives as many by
``ceil(rate * seconds)``; here the rate is the greatest among the steps ahead, so that loaders are there before their
source is needed, and go once no step ahead needs them.
"""

import math
from collections.abc import Mapping, Sequence

from tilth.core.errors import PlanError

GAIN = 0.25
"""Share of the time of a step below which another plan does not pay for the start of a process."""
Shares = Mapping[str, float]
"""Source -> share of its samples that a process computes."""


def plan_loaders(
    costs: Mapping[str, float],
    weights_by_step: Sequence[Mapping[str, float]],
    cores: int,
    now: Mapping[str, int],
    *,
    cap: int,
    gain: float = GAIN,
) -> dict[str, int]:
    """Return the loaders of each source that has a weight in a step ahead, at least one each.

    costs: processor seconds of a sample. weights_by_step: samples of each source, or their shares, in the next steps.
    cores: that loaders may fill. now: loaders at present. cap: most loaders, unless there are more sources: then each
    has one, and they share processes (``place_loaders``).

    A step takes at most 1 + ``gain`` times as long as with any number of loaders, where the cap allows it. A number
    changes only if the step would be longer than that, or if it is too great even for work of 1 + ``gain`` times as
    much; under the cap only if the longest work of a loader gets shorter by ``gain``. So costs that vary by a factor of
    at most ``(1 + gain) ** 0.25`` change nothing. Raises PlanError for a cost, a weight or a limit out of range.
    """
    needs = _needs(costs, weights_by_step, cores)
    if cap < 1 or gain < 0:
        key, value, least = ("cap", cap, 1) if cap < 1 else ("gain", gain, 0)
        raise PlanError(f"{key} = {value:g} is out of range; give {least} or more", key=key)
    plan = {name: _within(now.get(name, 0), need, gain) for name, need in needs.items()}
    most = max(cap, len(needs))
    if sum(plan.values()) <= most:
        return plan
    best, held = _fewer(needs, most), {name: now.get(name, 0) for name in needs}
    if (
        all(held.values())
        and sum(held.values()) <= most
        and _longest(needs, held) <= (1 + gain) * _longest(needs, best)
    ):
        return held
    return best


def place_loaders(
    plan: Mapping[str, int], work: Mapping[str, float], cap: int, now: Sequence[Shares] = (), *, gain: float = GAIN
) -> list[dict[str, float]]:
    """Return the shares of sources that each process has: a process for each loader, or all on ``cap`` processes.

    work: of each source of ``plan``, by any unit. On ``cap`` processes each has the same work (``wrap``), except that
    the shares at present are kept while they serve the same sources and no process has more than 1 + ``gain`` times
    the mean.
    """
    if sum(plan.values()) <= cap:
        return [{name: 1 / count} for name, count in plan.items() for _ in range(count)]
    whole = sum(work[name] for name in plan)
    loads = [sum(share * work.get(name, 0.0) for name, share in shares.items()) for shares in now]
    same = {name for shares in now for name in shares} == set(plan)
    if len(now) == cap and same and max(loads) <= (1 + gain) * whole / cap:
        return [dict(shares) for shares in now]
    return wrap({name: work[name] for name in plan}, cap)


def wrap(work: Mapping[str, float], parts: int) -> list[dict[str, float]]:
    """Lay sources on a line in their order, each as long as its work, and cut it into equal parts: shares of each.

    At most ``parts - 1`` sources are cut. A source without work is whole, at its place of the line.
    """
    whole = math.fsum(work.values())
    found: list[dict[str, float]] = [{} for _ in range(parts)]
    start = 0.0
    for name, own in work.items():
        begin, end = (parts * at / whole if whole else 0.0 for at in (start, start + own))
        start += own
        first = min(int(begin), parts - 1)
        last = max(first, min(math.ceil(end) - 1, parts - 1))
        for part in range(first, last + 1):
            share = (min(end, part + 1.0) - max(begin, part)) / (end - begin) if last > first else 1.0
            if share > _LEAST:
                found[part][name] = share
    return found


_LEAST = 1e-9
"""Share of a source that is the rounding of a cut."""


def _needs(costs: Mapping[str, float], weights_by_step: Sequence[Mapping[str, float]], cores: int) -> dict[str, float]:
    """Return the cores that the work of each source fills, at most in a step ahead, if it has a weight in one."""
    if cores < 1:
        raise PlanError(f"cores = {cores} leaves loaders no core; give 1 or more", key="cores")
    needs: dict[str, float] = {}
    for weights in weights_by_step:
        work = {name: _positive("weights", name, weight) * _cost(costs, name) for name, weight in weights.items()}
        whole = math.fsum(work.values())
        for name, own in work.items():
            if weights[name] > 0:
                needs[name] = max(needs.get(name, 0.0), cores * own / whole if whole else 0.0)
    return needs


def _cost(costs: Mapping[str, float], name: str) -> float:
    if name not in costs:
        raise PlanError(f"source {name} has a weight and no cost; measure it, or give bytes of samples", key="costs")
    return _positive("costs", name, costs[name])


def _positive(key: str, name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise PlanError(f"{key} of source {name} is {value:g}; give a finite number of 0 or more", key=f"{key}.{name}")
    return value


def _within(held: int, need: float, gain: float) -> int:
    """Return the loaders at present if they are neither too few nor too many, else as many as the work fills cores."""
    least, most = _ceil(need / (1 + gain)), _ceil(need * (1 + gain))
    return held if least <= held <= most else _ceil(need)


def _ceil(need: float) -> int:
    return max(1, math.ceil(need - _LEAST))


def _longest(needs: Mapping[str, float], plan: Mapping[str, int]) -> float:
    return max(need / plan[name] for name, need in needs.items())


def _fewer(needs: Mapping[str, float], cap: int) -> dict[str, int]:
    """Return at most ``cap`` loaders, one for each source and each further one where a loader has the most work."""
    plan = dict.fromkeys(needs, 1)
    for _ in range(cap - len(plan)):
        name = max(plan, key=lambda name: needs[name] / plan[name])
        if plan[name] >= _ceil(needs[name]):
            break
        plan[name] += 1
    return plan
