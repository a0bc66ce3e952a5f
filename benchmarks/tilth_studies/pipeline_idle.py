"""Idle time of a pipeline's stages under a schedule (``plan.pipeline``), pass by pass."""

from collections.abc import Mapping, Sequence

from tilth.plan.pipeline import Pass, chunks_of, needed, passes


def simulate(orders: Sequence[Sequence[Pass]], chunks: int, seconds: Mapping[str, float]) -> list[tuple[float, float]]:
    """Return (busy seconds, end) of each stage. seconds: of a pass of one part, by direction; messages take none."""
    parts, ends = len(orders) * chunks, dict[Pass, float]()
    places, clocks, busy = [0] * len(orders), [0.0] * len(orders), [0.0] * len(orders)
    left = sum(map(len, orders))
    while left:
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                one = order[places[stage]]
                before = needed(one, parts)
                if before is not None and before not in ends:
                    break
                took = seconds[one.direction]
                clocks[stage] = max(clocks[stage], 0.0 if before is None else ends[before]) + took
                ends[one], busy[stage] = clocks[stage], busy[stage] + took
                places[stage], left = places[stage] + 1, left - 1
    return list(zip(busy, clocks))


def idle_share(name: str, stages: int, micro_batches: int, seconds: Mapping[str, float]) -> float:
    """Return the share of a step in which a stage waits, on average. seconds: of a pass of a whole stage."""
    chunks = chunks_of(name)
    each = {direction: took / chunks for direction, took in seconds.items()}
    found = simulate(passes(name, stages, chunks, micro_batches), chunks, each)
    whole = max(end for _, end in found)
    return 1 - sum(busy for busy, _ in found) / (len(found) * whole)
