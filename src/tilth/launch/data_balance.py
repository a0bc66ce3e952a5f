"""Lengths of a recipe's sequences as work: what is long, how even the ranks of its layout would be, and of others."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from tilth.cluster.controller.balance import ROLE, padding, spread
from tilth.config.checks import pool_of, pools
from tilth.config.parts import LayoutConfig
from tilth.config.schema import Recipe
from tilth.core.layout import Mesh
from tilth.launch.balance_costs import CACHED, cached
from tilth.launch.planning import published
from tilth.models.config import DecoderConfig
from tilth.plan.batch import RankLoad, RowCosts
from tilth.plan.costs import Costs, load_costs
from tilth.plan.mapping import Option
from tilth.plan.schedule import Balance
from tilth.plan.search import STAGES, SearchInput, StepCosts, policy_options
from tilth.plan.shape import token_flops
from tilth.plan.working import with_device

BEST = 4
"""Other layouts that are shown, the fastest ones."""
BALANCES: tuple[Balance, ...] = get_args(Balance)


@dataclass(frozen=True)
class LengthShare:
    """Sequences of ``least`` to ``most`` tokens: shares of all sequences, tokens and predicted cost."""

    least: int
    most: int
    rows: float
    tokens: float
    cost: float


@dataclass(frozen=True)
class LayoutBalance:
    """Predicted means over some steps. layout: sizes of its axes; here: it is the recipe's.

    spread, padding: as the metrics balance/spread and padding; idle: share of the ranks' time in which they wait for
    the busiest; seconds: of an update, its communication included.
    """

    layout: dict[str, int]
    balance: str
    here: bool
    spread: float
    idle: float
    padding: float
    seconds: float


@dataclass(frozen=True)
class BalanceReport:
    """Costs of lengths. source: where costs come from; error: their relative error on steps not fitted, if known."""

    source: str
    error: float | None
    lengths: list[LengthShare]
    layouts: list[LayoutBalance]


def balance_report(recipe: Recipe, config: DecoderConfig, steps: Sequence[np.ndarray]) -> BalanceReport:
    """Report on the lengths of the sequences of some steps, int64 [n] each."""
    recipe = with_device(recipe)
    source, costs = known_costs(recipe, config)
    every = np.concatenate(steps)
    of_rows = costs.rows(ROLE) if costs is not None else flop_seconds(recipe, config)
    error = max(c.error.median for c in costs.learning(ROLE)) if costs is not None else None
    workers = pools(recipe)[pool_of(recipe, ROLE)]
    own = recipe.policy.layout.sizes(workers)
    free = SearchInput(
        recipe.replaced("policy", pool="", layout=LayoutConfig()).replaced("algorithm", steps=0),
        config, int(every.max()), published(recipe, workers), workers, generates=False, costs=costs, lengths=every,
        tried=lambda layout: layout.sizes(workers) != own,
    )  # fmt: skip

    def measured(option: Option, by: Balance, *, here: bool) -> LayoutBalance:
        """Return the balance of the steps under a layout, planned as a run's calls; it has the time of an update."""
        mesh = Mesh.of(option.layout.sizes(workers), tuple(range(workers)))
        sizes = {name: mesh.size(name) for name in mesh.names if mesh.size(name) > 1}
        planned = StepCosts(of_rows, by, recipe.train.micro_tokens, costs.ring if costs is not None else 0.0)
        loads = [planned.loads(lengths, mesh) for lengths in steps]
        took = np.array([[load.cost.sum() for load in of_step] for of_step in loads])
        seconds, idle = option.seconds[STAGES.index("train")], float(np.mean(1 - took.mean(1) / took.max(1)))
        return LayoutBalance(sizes, by, here, _mean(spread, loads), idle, _mean(padding, loads), seconds)

    def here(by: Balance) -> SearchInput:
        placed = _by(free.recipe, by).replaced("policy", layout=recipe.policy.layout)
        return replace(free, recipe=placed, tried=lambda layout: layout.sizes(workers) == own, shares={})

    rows = [fastest(measured(option, by, here=True) for option in policy_options(here(by))) for by in BALANCES]
    others = policy_options(replace(free, recipe=_by(free.recipe, recipe.balance)))
    rows += [fastest(measured(option, recipe.balance, here=False) for option in others)]
    layouts = [row for found in rows for row in found[:BEST]]
    return BalanceReport(source, error, buckets(every, of_rows), layouts)


def _by(recipe: Recipe, balance: Balance) -> Recipe:
    """Return the recipe with this balance; a file of costs would imply one."""
    return recipe.replaced("cluster", costs="").replaced("train", balance=balance)


def fastest(found: Iterable[LayoutBalance]) -> list[LayoutBalance]:
    """Return the fastest of each layout first; modes of one, such as ``zero``, have equal sizes."""
    best: dict[str, LayoutBalance] = {}
    for one in sorted(found, key=lambda one: one.seconds):
        best.setdefault(str(one.layout), one)
    return list(best.values())


def known_costs(recipe: Recipe, config: DecoderConfig) -> tuple[str, Costs | None]:
    """Return the costs that a run of the recipe would begin with, and their origin; None before a first profile."""
    if recipe.cluster.costs:
        return f"cluster.costs = {recipe.cluster.costs}", load_costs(recipe.cluster.costs)
    if (path := cached(recipe, config)).exists():
        return CACHED, load_costs(path)
    return "FLOPs of the model and published rates", None


def flop_seconds(recipe: Recipe, config: DecoderConfig) -> RowCosts:
    """Return a function from lengths to the seconds of both passes, by FLOPs on this machine's type of device."""
    rate = published(recipe, 1).rate(recipe.train.precision, recipe.train.matmul)
    first, second = (token_flops(config, seen).both for seen in (1.0, 2.0))
    return lambda lengths: lengths * (first + (second - first) * (lengths - 1) / 2) / rate


def buckets(lengths: np.ndarray, costs: RowCosts) -> list[LengthShare]:
    """Return the histogram of lengths by powers of two."""
    place = np.floor(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    amounts = np.stack([np.ones(len(lengths)), lengths, costs(lengths.astype(np.float64))])
    shares = amounts / amounts.sum(1, keepdims=True)
    found = []
    for power in np.unique(place).tolist():
        rows, tokens, cost = shares[:, place == power].sum(1).tolist()
        found.append(LengthShare(2**power, 2 ** (power + 1) - 1, rows, tokens, cost))
    return found


def _mean(figure: Callable[[Sequence[RankLoad]], float], steps: Sequence[Sequence[RankLoad]]) -> float:
    return float(np.mean([figure(loads) for loads in steps]))
