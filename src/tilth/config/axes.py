"""Parallel axes: one table of the ways to divide the work of a role over its ranks.

Derived from an entry: the key of a recipe's layout, the mesh, process groups, denominators, transfer protocols, plans
of memory and traffic, which rank writes a checkpoint and which reports a value. ``parallel.sharded.shard`` calls the
mechanism of each axis, which divides a model or its tokens. ``sp`` is a mode of tp, not an axis: ranks along tp then
divide the tokens of the residual stream too.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from tilth.config.errors import AxisError

Split = Literal["rows", "tokens", "parameters", "layers", "experts"]
DATA: tuple[Split, ...] = ("rows", "tokens")
"""Splits after which ranks see different data: gradients are summed over them. Losses and counts are summed over rows
alone: ranks that divide tokens exchange what a loss needs of each token, and each has the loss of whole rows; of ranks
that divide both, the first of those with a row has its loss."""
MODEL: tuple[Split, ...] = ("parameters", "layers", "experts")
"""Splits after which ranks hold different parts of the model."""


_SPLITS = frozenset(get_args(Split))


def _check(splits: tuple[Split, ...]) -> None:
    if wrong := [split for split in splits if split not in _SPLITS]:
        raise AxisError(f"no axis splits {wrong[0]!r}; axes split {', '.join(get_args(Split))}", key=wrong[0])


@dataclass(frozen=True)
class Axis:
    """One way to divide work over ranks."""

    name: str
    splits: tuple[Split, ...]
    """What ranks along the axis divide; all else is equal. rows: of a batch. tokens: of the same rows; together with
    rows, of those that a plan gives to several ranks. parameters: elements of each; together with rows they are
    gathered to compute (FSDP), alone each rank computes with its part."""
    about: str
    """Description of the axis's key in a recipe's layout."""
    mechanism: str = ""
    """Function, "module:name", that divides a ``parallel.division.Division`` along the axis. "": none, for an axis of
    rows alone; ``cluster.protocol.deal`` divides rows along all axes."""
    engines: bool = False
    """True: a layout of generation engines may have it; their ranks along it have the same rows, or are engines."""
    fills: bool = False
    """True: 0 in a recipe means the ranks that the other axes leave of the pool. Exactly one axis of the table."""

    def __post_init__(self) -> None:
        _check(self.splits)

    def undivided(self, size: int) -> str:
        """Return why a layout cannot have this size: nothing divides what several ranks share; "" if it can."""
        if size == 1 or self.mechanism or self.splits == ("rows",):
            return ""
        return f"nothing divides {' and '.join(self.splits)} along it: its Axis has no mechanism; use 1"


AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis(
            "pp",
            ("layers",),
            "stages of the model's layers, on the same rows",
            mechanism="tilth.parallel.pipeline:divide_layers",
        ),
        Axis(
            "dp",
            ("rows",),
            "replicas, each with its own rows; 0: the ranks that the other axes leave of the pool",
            engines=True,
            fills=True,
        ),
        Axis(
            "fsdp",
            ("rows", "parameters"),
            "ranks that shard the parameters, each with its own rows",
            mechanism="tilth.parallel.fsdp:shard_parameters",
        ),
        Axis(
            "ep",
            ("rows", "experts"),
            "ranks that divide the experts of each layer, each with its own rows (of an engine: the same rows)",
            mechanism="tilth.parallel.experts:divide_experts",
            engines=True,
        ),
        Axis(
            "hdp",
            ("rows", "tokens"),
            "in place of dp and cp: a row is on as many ranks as its length takes, with train.micro_tokens each",
            mechanism="tilth.parallel.context:divide_units",
        ),
        Axis(
            "cp",
            ("tokens",),
            "ranks that divide the tokens of each sequence, on the same rows",
            mechanism="tilth.parallel.context:divide_tokens",
        ),
        Axis(
            "tp",
            ("parameters",),
            "ranks that split every matrix product, on the same rows",
            mechanism="tilth.parallel.tensor:divide_products",
            engines=True,
        ),
    )
}
"""Name -> axis, outermost first: neighbouring ranks differ in the last axis."""
ENGINE_AXES = tuple(name for name, axis in AXES.items() if axis.engines)
"""Axes of the layout of generation engines: side by side, and each divided."""


def known(name: str) -> Axis:
    """Return the axis of this name. Raises AxisError, which names all axes."""
    if name not in AXES:
        raise AxisError(f"no axis {name!r}; the axes are {', '.join(AXES)}", key=name)
    return AXES[name]


def over(*splits: Split, without: tuple[Split, ...] = ()) -> tuple[str, ...]:
    """Return the names of the axes that split any of these, and none of ``without``, in order. Raises AxisError for an
    unknown split."""
    _check((*splits, *without))
    wanted, left = set(splits), set(without)
    return tuple(n for n, axis in AXES.items() if not wanted.isdisjoint(axis.splits) and left.isdisjoint(axis.splits))
