"""What every advantage estimator is made of: the rows and tokens that it sees, and the classes that it extends."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tilth.rl.packing import Gather, Groups, Packing, Reduce, rows_alone
from tilth.rl.registry import Entry, Scope

OF_TOKENS = (
    "values",
    "logprobs",
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "sum_pi_squared",
    "versions",
    "weights",
    "uniforms",
)
"""Columns that have a value at each token; every other one has a value a row."""


@dataclass(frozen=True)
class Rows:
    """One row a sequence: scores float64 [n], 0 where missing; valid bool [n]; counts int64 [n], tokens that count."""

    scores: Tensor
    valid: Tensor
    counts: Tensor | None
    columns: Mapping[str, Tensor]

    @cached_property
    def groups(self) -> Groups:
        """Statistics of the scores within groups."""
        return self.grouped(self.scores)

    def grouped(self, scores: Tensor) -> Groups:
        """The same of other numbers, one a row."""
        return Groups.of(self.columns["groups"], scores, self.valid, self.counts)

    @cached_property
    def weights(self) -> Tensor:
        """Tokens that count in each row, float64 [n], 0 where the reward is missing; needs ``counts``."""
        assert self.counts is not None
        return torch.where(self.valid, self.counts.to(self.scores), 0.0)


@dataclass(frozen=True)
class Everyone:
    """Rows of all workers, in the order of the whole batch. own: int64 [n], which of them are this worker's."""

    rows: Rows
    own: Tensor
    worker: Tensor
    """int64 [N]: a number that each worker alone has."""


@dataclass(frozen=True)
class Tokens:
    """Packed tokens. packing: without rows whose reward is missing; rewards: float64 [total], 0 where masked."""

    rows: Rows
    packing: Packing
    rewards: Tensor
    reduce: Reduce
    gather: Gather = rows_alone
    everyone: Everyone | None = None
    """For scopes that depend on other rows, where this worker does not have all of them."""

    def chosen(self, column: str) -> Tensor:
        """A column at the tokens that count, in order, float64 [number of such tokens]."""
        return self.packing.column(column, self.rows.columns[column]).to(torch.float64)[self.packing.mask]

    def scatter(self, chosen: Tensor) -> Tensor:
        """The inverse: values of the tokens that count -> [total], 0 elsewhere."""
        return chosen.new_zeros(len(self.packing.mask)).masked_scatter(self.packing.mask, chosen)


class Advantage(Entry):
    """An estimator over tokens: advantages and returns, float64 [total], 0 at masked positions."""

    @property
    def finite(self) -> tuple[str, ...]:
        """Row columns without which a row teaches nothing: where one is not finite, the reward counts as missing."""
        return ()

    @property
    def flat_teaches(self) -> bool:
        """Whether a group of samples whose rewards are all equal may have advantages that are not 0.

        False: they are exactly 0 at every token (a group of one apart: option ``singleton``), so a flow may leave such
        groups out and draw others in their place. Where this is True, leaving them out would change what is learned.
        """
        return True

    @property
    def reads_reward(self) -> bool:
        """Whether advantages depend on the reward. Where not, what a flow adds to the reward (a KL penalty, one for
        length, a judge's) never reaches the policy; a row without a reward is left out all the same.
        """
        return True

    @property
    def relative_to_spread(self) -> bool:
        """Whether a difference between rewards counts in full however small it is.

        True where advantages are divided by the spread of rewards in the group, or by the number of rows that have one:
        in a group of equal rewards a KL penalty of 1e-3 in the reward is then as large as right and wrong elsewhere, or
        makes every row count as one that teaches.
        """
        return False

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Advantages and, where there are any, returns."""
        raise NotImplementedError


class RowAdvantage(Advantage):
    """An estimator that needs rows only, so that the controller can run it: one advantage for all tokens of a row."""

    @property
    def scope(self) -> Scope:
        """Rows."""
        return "rows"

    @property
    def weighs(self) -> bool:
        """Whether it needs ``Rows.counts``: rows count by their tokens."""
        return False

    def rows(self, rows: Rows) -> Tensor:
        """Advantage of each row, float64 [n]; any value where the reward is missing."""
        raise NotImplementedError

    def tokens(self, tokens: Tokens) -> tuple[Tensor, None]:
        """The same at every token of the row that counts; statistics are over the rows of all workers."""
        all_of_them = tokens.everyone
        rows = self.rows(tokens.rows) if all_of_them is None else self.rows(all_of_them.rows)[all_of_them.own]
        return tokens.packing.masked(tokens.packing.spread(rows)), None
