"""How a call on a worker group is split over its ranks and how the answers come together.

A role's method says it once, in a decorator; every backend honours it. With one worker (the ``inline`` backend) a
split is the whole and a gather is the one answer, so the same role runs unchanged there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Split = Literal["rows", "all"]
Gather = Literal["rows", "first", "merge"]
Method = TypeVar("Method", bound=Callable[..., Any])
ATTRIBUTE = "__tilth_transfer__"


@dataclass(frozen=True)
class Transfer:
    """split 'rows': a Batch argument is divided by rows over the data-parallel ranks; 'all': every rank gets all.

    gather 'rows': answers are Batches, concatenated; 'first': all answers are equal, take one; 'merge': dictionaries,
    put together (metrics by their own reductions).
    """

    split: Split
    gather: Gather


def transfer(split: Split, gather: Gather) -> Callable[[Method], Method]:
    """Declare the transfer protocol of a role's method; without it a method cannot be called through a group."""

    def mark(method: Method) -> Method:
        setattr(method, ATTRIBUTE, Transfer(split, gather))
        return method

    return mark


def transfer_of(method: Callable[..., Any]) -> Transfer | None:
    """The declared protocol, if any."""
    found: Transfer | None = getattr(method, ATTRIBUTE, None)
    return found
