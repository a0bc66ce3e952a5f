"""Advantage estimators: rewards become one number a token that says how much better than expected it was.

Statistics run in float64 and come back as float32. A reward that is not finite is missing: its row enters no statistic,
its advantage is 0, and ``Estimate.mask`` leaves its tokens out, so that the loss does not count them either.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from tilth.core.errors import RecipeError, TokenCountError
from tilth.rl.packing import Gather, Groups, Packing, Reduce, alone, discounted_sums, rows_alone, whiten
from tilth.rl.registry import Entry, Scope, build, register, require


@dataclass(frozen=True)
class Estimate:
    """What an estimator makes. Also readable as ``estimate["advantages"]``."""

    advantages: Tensor
    """float32 [total], 0 at masked positions."""
    returns: Tensor | None
    """float32 [total]: targets of the value model, 0 at masked positions; None where the estimator has none."""
    mask: Tensor
    """bool [total]: the tokens that the loss may count (the mask given, without rows whose reward is missing)."""

    def __getitem__(self, name: str) -> Tensor | None:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)


@dataclass(frozen=True)
class Rows:
    """One row a sequence: scores float64 [n], 0 where missing; valid bool [n]; counts int64 [n], tokens that count."""

    scores: Tensor
    valid: Tensor
    counts: Tensor | None
    columns: Mapping[str, Tensor]

    @cached_property
    def groups(self) -> Groups:
        """Statistics within groups."""
        return Groups.of(self.columns["groups"], self.scores, self.valid)


@dataclass(frozen=True)
class Everyone:
    """Rows of all workers, in the order of the whole batch. own: int64 [n], which of them are this worker's."""

    rows: Rows
    own: Tensor


@dataclass(frozen=True)
class Tokens:
    """Packed tokens. packing: without rows whose reward is missing; rewards: float64 [total], 0 where masked."""

    rows: Rows
    packing: Packing
    rewards: Tensor
    reduce: Reduce
    everyone: Everyone | None = None
    """For scope "rows" where this worker does not have all rows."""

    def chosen(self, column: str) -> Tensor:
        """A column at the tokens that count, in order, float64 [number of such tokens]."""
        return self.packing.column(column, self.rows.columns[column]).to(torch.float64)[self.packing.mask]

    def scatter(self, chosen: Tensor) -> Tensor:
        """The inverse: values of the tokens that count -> [total], 0 elsewhere."""
        return chosen.new_zeros(len(self.packing.mask)).masked_scatter(self.packing.mask, chosen)


class Advantage(Entry):
    """An estimator over tokens: advantages and returns, float64 [total], 0 at masked positions."""

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor | None]:
        """Advantages and, where there are any, returns."""
        raise NotImplementedError


class RowAdvantage(Advantage):
    """An estimator that needs rows only, so that the controller can run it: one advantage for all tokens of a row."""

    @property
    def scope(self) -> Scope:
        """Rows."""
        return "rows"

    def rows(self, rows: Rows) -> Tensor:
        """Advantage of each row, float64 [n]; any value where the reward is missing."""
        raise NotImplementedError

    def tokens(self, tokens: Tokens) -> tuple[Tensor, None]:
        """The same at every token of the row that counts; statistics are over the rows of all workers."""
        all_of_them = tokens.everyone
        rows = self.rows(tokens.rows) if all_of_them is None else self.rows(all_of_them.rows)[all_of_them.own]
        return tokens.packing.masked(tokens.packing.spread(rows)), None


class _Grouped(RowAdvantage):
    singleton: Literal["reward", "zero"] = Field(
        "reward",
        description="what a group with a single reward gets: the reward, as if its baseline were 0 (verl), or zero",
    )

    @property
    def needs(self) -> tuple[str, ...]:
        """Rewards and groups."""
        return ("rewards", "groups")

    def rows(self, rows: Rows) -> Tensor:
        """Advantage of each row; groups of one apart."""
        groups = rows.groups
        single = self.single(rows.scores) if self.singleton == "reward" else torch.zeros_like(rows.scores)
        return torch.where(groups.size > 1, self.relative(groups), single)

    def relative(self, groups: Groups) -> Tensor:
        """Advantage in a group of at least two."""
        raise NotImplementedError

    def single(self, scores: Tensor) -> Tensor:
        """Advantage in a group of one."""
        return scores


@register("advantages", "gae")
class Gae(Advantage):
    """Generalised advantage estimation (Schulman 2015): sum of (gamma * lam)^k * delta, with a value at each token.

    Tokens that the policy did not choose are skipped: value and running sum pass through them, as in verl. Returns are
    advantage + value before whitening. Whitening is over all tokens that count in the global batch, by unbiased
    variance; here masked positions are 0 again afterwards, where verl leaves the whitened running sum in them.

    Also unlike verl: where the reward to come, discounted, is the same at every token of the global batch (with gamma
    1: where all samples have the same reward), whitened advantages are 0. Nothing that happened tells one token from
    another then; what is left is the noise of the critic, and whitening would scale it to variance 1. Returns stay.
    """

    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    lam: float = Field(1.0, ge=0, le=1, description="lambda: 1 is reward-to-go minus value, 0 is one-step")
    whiten: bool = Field(True, description="shift and scale to mean 0, variance 1 over the global batch")

    @property
    def needs(self) -> tuple[str, ...]:
        """Rewards and values."""
        return ("rewards", "values")

    @property
    def scope(self) -> Scope:
        """Whitening needs the moments of the global batch."""
        return "global moments" if self.whiten else "token-local"

    def tokens(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Masked tokens are taken out first: in what is left, each token's successor is the next row entry."""
        values, rewards = tokens.chosen("values"), tokens.rewards[tokens.packing.mask]
        row = tokens.packing.spread(torch.arange(len(tokens.packing.counts), device=values.device))[tokens.packing.mask]
        same = torch.nn.functional.pad(row[1:] == row[:-1], (0, 1))[: len(row)]
        following = torch.where(same, torch.roll(values, -1), 0.0)
        delta = rewards + self.gamma * following - values
        advantages = discounted_sums(delta, tokens.packing.counts, self.gamma * self.lam)
        returns = advantages + values
        if self.whiten:
            flat = _flat(discounted_sums(rewards, tokens.packing.counts, self.gamma), tokens.reduce)
            advantages = whiten(advantages, tokens.reduce)
            advantages = torch.zeros_like(advantages) if flat else advantages
        return tokens.scatter(advantages), tokens.scatter(returns)


_WHOLE: tuple[Scope, ...] = ("rows", "group-local")
"""Scopes that depend on the rows of other workers."""
_OF_TOKENS = ("values", "logprobs", "ref_logprobs")
"""Columns that have a value at each token."""
_EQUAL = 1e-9
"""Relative distance up to which rewards are the same: above the rounding of a float64 mean, below that of a float32."""


def _flat(values: Tensor, reduce: Reduce) -> bool:
    """Whether all workers' values [k] are equal, and at least two: decided by sums, so by every worker alike."""
    count, total = reduce(torch.stack([values.new_tensor(float(len(values))), values.sum()]))
    mean = total / count.clamp(min=1)
    (apart,) = reduce(((values - mean).abs() > _EQUAL * mean.abs()).sum().to(values.dtype).reshape(1))
    return bool(count > 1) and not bool(apart)


@register("advantages", "grpo")
class Grpo(_Grouped):
    """Group-relative (DeepSeekMath): (score - mean) / (std + eps) in the group, unbiased std, the row itself included.

    Exactly 0 where all scores are equal. A group of one counts as mean 0 and std 1: score / (1 + eps), as in verl.
    """

    eps: float = Field(1e-6, ge=0, description="added to the standard deviation")

    def relative(self, groups: Groups) -> Tensor:
        """Standardised score."""
        return torch.where(groups.flat, 0.0, groups.centred / (groups.std + self.eps))

    def single(self, scores: Tensor) -> Tensor:
        """Mean 0, std 1."""
        return scores / (1 + self.eps)


@register("advantages", "grpo_no_std")
class GrpoNoStd(_Grouped):
    """Dr.GRPO's advantage: score - mean of the group. Published with the aggregation seq-mean-token-sum-norm."""

    def relative(self, groups: Groups) -> Tensor:
        """Centred score."""
        return groups.centred


@register("advantages", "rloo")
class Rloo(_Grouped):
    """Leave-one-out (Ahmadian 2024): score - mean of the others in the group = n / (n - 1) * (score - mean).

    verl's ``rloo`` keeps the score of a group of one, its ``rloo_vectorized`` makes it 0: option ``singleton``.
    """

    def relative(self, groups: Groups) -> Tensor:
        """Score minus the mean of the others."""
        return groups.centred * groups.size / (groups.size - 1).clamp(min=1)


def estimate(
    name: str,
    *,
    rewards: Tensor,
    lengths: Tensor,
    mask: Tensor,
    groups: Tensor | None,
    values: Tensor | None = None,
    logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    reduce: Reduce = alone,
    gather: Gather = rows_alone,
    row: Tensor | None = None,
    **options: Any,
) -> Estimate:
    """Token-level advantages of packed sequences: of all of a batch, or of one worker's rows of it.

    Where a batch is spread over workers, every worker calls it, those without rows too, and each scope is honoured:
    "rows" by gathering row columns (the same bits as of one worker, whatever the split), "global moments" by
    ``reduce``, "token-local" alone; a "group-local" estimator raises RecipeError where a group lies on two workers.

    Args:
        name: one of ``names()["advantages"]``.
        rewards: per sequence [n] (given at the last token that counts) or per token [total] (those at masked positions
            are ignored; a row without any token that counts has no reward). Not finite: missing.
        lengths: integers [n], tokens of each sequence. mask: [total], not 0 where the policy chose the token.
        groups: integers [n], samples of one occurrence of a prompt share one.
        values, logprobs, ref_logprobs: [total], for estimators that need them.
        reduce: sums a float64 vector over workers, for the scope "global moments" (``Grid.sum``).
        gather: row columns of all workers, for the scopes "rows" and "group-local" (``Grid.gather_rows``).
        row: integers [n], index of each row in the whole batch, as ``gather`` goes by; None: 0, 1, 2, ..., all of it.
        options: options of the estimator; further columns that it needs go here too, by name.

    Raises: RecipeError (unknown name or option, missing column), TokenCountError (a column of another size).
    """
    given = {"rewards": rewards, "groups": groups, "values": values, "logprobs": logprobs, "ref_logprobs": ref_logprobs}
    columns = {k: v for k, v in given.items() if v is not None}
    entry, columns = _prepare(name, columns, options)
    tokens = _tokens(Packing.of(lengths, mask), rewards, columns, reduce)
    if gather is not rows_alone and entry.scope in _WHOLE:
        tokens = replace(tokens, everyone=_everyone(name, entry, tokens.rows, gather, row))
    with torch.no_grad():
        advantages, returns = entry.tokens(tokens)
    return Estimate(advantages.float(), None if returns is None else returns.float(), tokens.packing.mask)


def estimate_rows(
    name: str, *, rewards: Tensor, groups: Tensor | None = None, counts: Tensor | None = None, **options: Any
) -> Tensor:
    """The advantage of each row, float32 [n], by an estimator of scope "rows": the controller needs no token for it.

    rewards: [n]; counts: tokens that count in each row [n], for estimators that weigh by length. A row whose reward is
    missing (not finite) gets 0. A worker spreads the result over the row's tokens that count.
    """
    given = {"rewards": rewards, "groups": groups, "counts": counts}
    entry, columns = _prepare(name, {k: v for k, v in given.items() if v is not None}, options)
    if not isinstance(entry, RowAdvantage):
        raise RecipeError(f"{name} works on tokens (scope {entry.scope!r}), not on rows alone")
    scores = torch.as_tensor(rewards).to(torch.float64)
    valid = torch.isfinite(scores)
    rows = Rows(torch.where(valid, scores, 0.0), valid, columns.get("counts"), _row_columns(columns, len(scores)))
    return torch.where(valid, entry.rows(rows), 0.0).float()


def valid_rows(rewards: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    """bool [n]: rows whose reward is there. Arguments as in ``estimate``; see ``keep_rows`` for the mask."""
    return _scores(Packing.of(lengths, mask), torch.as_tensor(rewards))[1]


def flat_rows(rewards: Tensor, groups: Tensor) -> Tensor:
    """bool [n]: rows of groups in which all rewards that are there are equal, so that they teach nothing.

    rewards: [n]. Groups with fewer than two rewards are flat too.
    """
    scores = torch.as_tensor(rewards).to(torch.float64)
    valid = torch.isfinite(scores)
    return Groups.of(torch.as_tensor(groups), torch.where(valid, scores, 0.0), valid).flat


def _prepare(name: str, columns: dict[str, Tensor], options: dict[str, Any]) -> tuple[Advantage, dict[str, Tensor]]:
    """Tell further columns from options (a tensor is a column), build the entry and check its columns."""
    extra = {k: v for k, v in options.items() if isinstance(v, Tensor)}
    entry = build("advantages", name, {k: v for k, v in options.items() if k not in extra}, Advantage)
    unknown = [k for k in extra if k not in entry.needs]
    if unknown:
        raise RecipeError(f"{name} has no use for the column {unknown[0]!r}")
    columns = {**columns, **extra}
    require(name, entry, columns)
    return entry, columns


def _tokens(packing: Packing, rewards: Tensor, columns: Mapping[str, Tensor], reduce: Reduce) -> Tokens:
    rewards = torch.as_tensor(rewards).to(packing.mask.device, torch.float64)
    scores, valid = _scores(packing, rewards)
    kept = packing.keep(valid)
    if len(rewards) == len(scores):
        has, ends = kept.ends >= 0, kept.ends
        per_token = rewards.new_zeros(len(packing.mask)).index_put((ends[has],), scores[has])
    else:
        per_token = kept.masked(rewards)
    return Tokens(Rows(scores, valid, kept.counts, _row_columns(columns, len(scores))), kept, per_token, reduce)


def _everyone(name: str, entry: Advantage, own: Rows, gather: Gather, row: Tensor | None) -> Everyone:
    """The row columns that an estimator needs, of all workers in the order of the whole batch."""
    n = len(own.scores)
    numbers = np.arange(n) if row is None else torch.as_tensor(row).cpu().numpy().astype(np.int64)
    if numbers.shape != (n,):
        raise TokenCountError(f"row has the shape {numbers.shape}; there are {n} rows")
    columns = {"scores": own.scores, "valid": own.valid}
    columns |= {} if own.counts is None else {"counts": own.counts}
    columns |= {c: own.columns[c] for c in entry.needs if c not in ("rewards", *_OF_TOKENS)}
    worker = np.full(n, numbers.min() if n else 0)  # its first row tells it from the others
    found = gather({"row": numbers, "worker": worker, **{k: v.cpu().numpy() for k, v in columns.items()}})
    order = np.argsort(found["row"], kind="stable")
    rows = found["row"][order]
    twice = rows[1:][rows[1:] == rows[:-1]]
    if len(twice):
        raise TokenCountError(
            f"row {twice[0]} of the batch is on two workers; each must be on one, by its index in the whole batch"
        )
    if entry.scope == "group-local":
        _check_local(name, found["groups"], found["worker"])
    whole = {k: torch.from_numpy(np.ascontiguousarray(found[k][order])).to(own.scores.device) for k in columns}
    all_rows = Rows(whole.pop("scores"), whole.pop("valid"), whole.get("counts"), whole)
    return Everyone(all_rows, torch.from_numpy(np.searchsorted(rows, numbers)).to(own.scores.device))


def _check_local(name: str, groups: np.ndarray, worker: np.ndarray) -> None:
    """RecipeError if rows of a group are on two workers."""
    pairs = np.unique(np.stack([groups.astype(np.int64), worker]), axis=1)[0]
    apart = pairs[1:][pairs[1:] == pairs[:-1]]
    if len(apart):
        raise RecipeError(
            f"{name} sees whole groups only (scope group-local), but group {apart[0]} lies on two workers; "
            "divide the batch by groups, or set cluster.workers=1"
        )


def _scores(packing: Packing, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Score of each row, float64 [n], 0 where missing, and bool [n] where it is there."""
    rewards = rewards.to(packing.mask.device, torch.float64)
    n, total = len(packing.lengths), len(packing.mask)
    if rewards.shape == (n,):
        valid = torch.isfinite(rewards)
        return torch.where(valid, rewards, 0.0), valid
    if rewards.shape != (total,):
        raise TokenCountError(f"rewards has the shape {tuple(rewards.shape)}; there are {n} rows of {total} tokens")
    broken = packing.sum((~torch.isfinite(rewards)).to(torch.float64)) > 0
    valid = ~broken & (packing.counts > 0)
    return torch.where(valid, packing.sum(rewards), 0.0), valid


def _row_columns(columns: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
    groups = columns.get("groups")
    if groups is not None and torch.as_tensor(groups).shape != (n,):
        raise TokenCountError(f"groups has the shape {tuple(torch.as_tensor(groups).shape)}; there are {n} rows")
    return {k: torch.as_tensor(v) for k, v in columns.items()}
