"""Parallel axes: one table of the ways to divide the work of a role over its ranks.

Derived from an entry: the key of a recipe's layout, the mesh, process groups, denominators, transfer protocols, plans
of memory and traffic, who writes a checkpoint and who reports a value. What divides a model or its tokens is a module
of ``parallel``. ``sp`` is a mode of tp, not an axis: ranks along tp then divide the tokens of the residual stream too.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from tilth.config.errors import AxisError

Split = Literal["rows", "tokens", "parameters", "layers", "experts"]
DATA: tuple[Split, ...] = ("rows", "tokens")
"""Splits after which ranks see different data: gradients, losses and counts are summed over them."""
MODEL: tuple[Split, ...] = ("parameters", "layers", "experts")
"""Splits after which ranks hold different parts of the model."""


def _check(splits: tuple[Split, ...]) -> None:
    if wrong := [split for split in splits if split not in get_args(Split)]:
        raise AxisError(f"no axis splits {wrong[0]!r}; axes split {', '.join(get_args(Split))}")


@dataclass(frozen=True)
class Axis:
    """One way to divide work over ranks."""

    name: str
    splits: tuple[Split, ...]
    """What ranks along it divide; they are alike in all else. rows: of a batch. tokens: of the same rows. parameters:
    elements of each; with rows too they are gathered to compute (FSDP), alone each rank computes with its part."""
    about: str
    """Description of its key in a recipe's layout."""
    fills: bool = False
    """0 in a recipe stands for what the other axes leave of the pool; exactly one axis of the table does so."""

    def __post_init__(self) -> None:
        _check(self.splits)


AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis("dp", ("rows",), "replicas, each with rows of its own; 0: what fsdp and tp leave of the pool", fills=True),
        Axis("fsdp", ("rows", "parameters"), "ranks that share the parameters and take rows of their own"),
        Axis("tp", ("parameters",), "ranks that share every matrix product, on the same rows"),
    )
}
"""By name, outermost first: neighbouring ranks differ in the last one."""


def known(name: str) -> Axis:
    """Return the axis of this name; AxisError, with the axes there are."""
    if name not in AXES:
        raise AxisError(f"no axis {name!r}; the axes are {', '.join(AXES)}")
    return AXES[name]


def over(*splits: Split) -> tuple[str, ...]:
    """Names of the axes that split any of these, in order; AxisError for what no axis can split."""
    _check(splits)
    return tuple(name for name, axis in AXES.items() if not set(splits).isdisjoint(axis.splits))
