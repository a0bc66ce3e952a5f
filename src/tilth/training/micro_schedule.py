"""Schedules: the order in which the parts of a model do their passes over the micro-batches of one step."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from tilth.core.errors import ScheduleError


class Pass(NamedTuple):
    """One pass of one part over one micro-batch; the loss belongs to the forward pass of the last part."""

    direction: Literal["forward", "backward"]
    part: int
    micro_batch: int


Schedule = Callable[[int, int], Iterable[Pass]]
"""(parts, micro-batches) -> every pass, once; micro-batches begin in their order."""


def sequential(parts: int, micro_batches: int) -> Iterable[Pass]:
    """One micro-batch after another, so that only one has activations."""
    for i in range(micro_batches):
        yield from (Pass("forward", part, i) for part in range(parts))
        yield from (Pass("backward", part, i) for part in reversed(range(parts)))


SCHEDULES: dict[str, Schedule] = {"sequential": sequential}
"""By name."""


def passes(name: str, parts: int, micro_batches: int) -> list[Pass]:
    """The passes of a schedule, checked. ScheduleError: no such schedule; a pass that is missing, there twice, or
    before one that it needs."""
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule {name!r} is not declared; there are {', '.join(SCHEDULES)}", key="schedule")
    order, done = list(SCHEDULES[name](parts, micro_batches)), set[Pass]()
    for one in order:
        direction, part, i = one
        if direction == "backward":
            needed = Pass("backward", part + 1, i) if part + 1 < parts else Pass("forward", part, i)
        else:
            needed = Pass("forward", part - 1, i) if part else Pass("forward", 0, i - 1)
        if one in done or (needed not in done and one != Pass("forward", 0, 0)):
            raise ScheduleError(
                f"schedule {name!r}: {one} is there twice, or comes before {needed}", key=f"{name}.order"
            )
        done.add(one)
    wanted = {Pass(d, part, i) for d in ("forward", "backward") for part in range(parts) for i in range(micro_batches)}
    if done != wanted:
        raise ScheduleError(
            f"schedule {name!r}: {next(iter(done ^ wanted))} is missing, or of no micro-batch", key=f"{name}.passes"
        )
    return order
