"""Estimate advantages: turn rewards into one number for each token, how much better than expected the token was.

Statistics run in float64 and come back as float32. A reward that is not finite is missing: its row enters no statistic,
its advantage is 0, and ``Estimate.mask`` leaves its tokens out of the loss. This also holds for other numbers of a row
that an estimator needs (``Advantage.finite``), and for a row without any token that counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilth.core.errors import RecipeError, TokenCountError
from tilth.rl import optimal  # noqa: F401  (importing it registers its estimators)
from tilth.rl.estimators import OF_TOKENS, Advantage, GlobalRows, RowAdvantage, Rows, Tokens
from tilth.rl.packing import Gather, Packing, Reduce, alone, rows_alone
from tilth.rl.registry import Scope, build, require


@dataclass(frozen=True)
class Estimate:
    """Result of an estimator; ``estimate["advantages"]`` works too."""

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


_GATHERED: tuple[Scope, ...] = ("rows", "group-local", "group tokens")
"""Scopes that depend on the rows of other workers."""


def estimate(
    name: str | Advantage,
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
    """Return token-level advantages of packed sequences: a whole batch, or one worker's rows of it.

    Where a batch is spread over workers, every worker calls it, those without rows too, and each scope is honoured:
    "rows" and "group tokens" by gathering (the same bits as of one worker, whatever the split), "global moments" by
    ``reduce``, "token-local" alone; a "group-local" estimator raises RecipeError where a group lies on two workers.

    Args:
        name: one of ``names()["advantages"]``, or an entry.
        rewards: per sequence [n] (given at the last token that counts) or per token [total] (those at masked positions
            are ignored). Not finite: missing. A row without any token that counts has no reward either way.
        lengths: integers [n], tokens of each sequence. mask: [total], not 0 where the policy chose the token.
        groups: integers [n], samples of one occurrence of a prompt share one.
        values, logprobs, ref_logprobs: [total], for estimators that need them.
        reduce: sums a float64 vector over workers, for the scope "global moments" (``ParallelDims.sum``).
        gather: columns of all workers, for the scopes that depend on other rows (``ParallelDims.gather_rows``).
        row: integers [n], index of each row in the whole batch, as ``gather`` goes by; None: 0, 1, 2, ..., all of it.
        options: options of the estimator; further columns that it needs or takes go here too, by name (rows [n]:
            ``baselines``, ``part/NAME``; tokens [total]: ``sum_pi_squared``, ``weights``, ``chunk_tokens``).

    Raises: RecipeError (unknown name or option, missing column), TokenCountError (a column of another size).
    """
    given = {"rewards": rewards, "groups": groups, "values": values, "logprobs": logprobs, "ref_logprobs": ref_logprobs}
    columns = {k: v for k, v in given.items() if v is not None}
    entry, columns = _prepare(name, columns, options)
    tokens = _tokens(entry, Packing.of(lengths, mask), rewards, columns, reduce)
    if gather is not rows_alone and entry.scope in _GATHERED:
        tokens = replace(tokens, gather=gather, everyone=_everyone(entry, tokens.rows, gather, row))
    with torch.no_grad():
        advantages, returns = entry.tokens(tokens)
    return Estimate(advantages.float(), None if returns is None else returns.float(), tokens.packing.mask)


def estimate_rows(
    name: str, *, rewards: Tensor, groups: Tensor | None = None, counts: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the advantage of each row, float32 [n], by an estimator of scope "rows", without tokens.

    rewards: [n]; counts: tokens that count in each row [n], for estimators that weigh by length. A row whose reward is
    missing (not finite), or whose count is 0, gets 0 and enters no statistic. For trying estimators on rewards alone,
    and for tests; training loops call ``estimate``.
    """
    given = {"rewards": rewards, "groups": groups, "counts": counts}
    entry, columns = _prepare(name, {k: v for k, v in given.items() if v is not None}, options)
    if not isinstance(entry, RowAdvantage):
        raise RecipeError(f"{name} works on tokens (scope {entry.scope!r}); call tilth.rl.estimate", key="name")
    if entry.weighs and counts is None:
        raise RecipeError(f"{name} needs the column 'counts', which is missing", key="counts")
    scores = torch.as_tensor(rewards).to(torch.float64)
    own = _row_columns(columns, len(scores))
    valid = _complete(entry, torch.isfinite(scores), own)
    valid = valid if counts is None else valid & (own["counts"] > 0)
    found = entry.rows(Rows(torch.where(valid, scores, 0.0), valid, own.get("counts"), own))
    return torch.where(valid, found, 0.0).float()


def _prepare(
    name: str | Advantage, columns: dict[str, Tensor], options: dict[str, Any]
) -> tuple[Advantage, dict[str, Tensor]]:
    """Separate further columns from options (a tensor is a column), build the entry and check its columns."""
    extra = {k: v for k, v in options.items() if isinstance(v, Tensor)}
    entry = build("advantages", name, {k: v for k, v in options.items() if k not in extra}, Advantage)
    unknown = [k for k in extra if k not in (*entry.needs, *entry.takes)]
    if unknown:
        raise RecipeError(f"{entry.entry_name} takes no column {unknown[0]!r}", key=f"{entry.entry_name}.{unknown[0]}")
    columns = {**columns, **extra}
    require(entry, columns)
    return entry, columns


def _tokens(
    entry: Advantage, packing: Packing, rewards: Tensor, columns: Mapping[str, Tensor], reduce: Reduce
) -> Tokens:
    rewards = torch.as_tensor(rewards).to(packing.mask.device, torch.float64)
    scores, valid = _scores(packing, rewards)
    own = _row_columns(columns, len(scores))
    valid = _complete(entry, valid, own)
    scores = torch.where(valid, scores, 0.0)
    kept = packing.keep(valid)
    if len(rewards) == len(scores):
        has, ends = kept.ends >= 0, kept.ends
        per_token = rewards.new_zeros(len(packing.mask)).index_put((ends[has],), scores[has])
    else:
        per_token = kept.masked(rewards)
    return Tokens(Rows(scores, valid, kept.counts, own), kept, per_token, reduce)


def _complete(entry: Advantage, valid: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """Rows that have everything the estimator needs, bool [n]."""
    for column in entry.finite:
        valid = valid & torch.isfinite(columns[column].to(valid.device))
    return valid


def _everyone(entry: Advantage, own: Rows, gather: Gather, row: Tensor | None) -> GlobalRows:
    """Gather the row columns that an estimator needs from all workers, in the order of the whole batch."""
    n = len(own.scores)
    numbers = np.arange(n) if row is None else torch.as_tensor(row).cpu().numpy().astype(np.int64)
    if numbers.shape != (n,):
        raise TokenCountError(f"row has the shape {numbers.shape}; there are {n} rows", key="row.shape")
    columns = {"scores": own.scores, "valid": own.valid}
    columns |= {} if own.counts is None else {"counts": own.counts}
    columns |= {c: own.columns[c] for c in entry.needs if c not in ("rewards", *OF_TOKENS)}
    worker = np.full(n, numbers.min() if n else 0)  # its first row identifies it
    found = gather({"row": numbers, "worker": worker, **{k: v.cpu().numpy() for k, v in columns.items()}})
    order = np.argsort(found["row"], kind="stable")
    rows = found["row"][order]
    twice = rows[1:][rows[1:] == rows[:-1]]
    if len(twice):
        raise TokenCountError(
            f"row {twice[0]} of the batch is on two workers; each must be on one, by its index in the whole batch",
            key="row",
        )
    if entry.scope == "group-local":
        _check_local(entry.entry_name, found["groups"], found["worker"])
    whole = {k: torch.from_numpy(np.ascontiguousarray(found[k][order])).to(own.scores.device) for k in columns}
    all_rows = Rows(whole.pop("scores"), whole.pop("valid"), whole.get("counts"), whole)
    mine, holder = np.searchsorted(rows, numbers), np.ascontiguousarray(found["worker"][order])
    return GlobalRows(all_rows, *(torch.from_numpy(x).to(own.scores.device) for x in (mine, holder)))


def _check_local(name: str, groups: np.ndarray, worker: np.ndarray) -> None:
    """RecipeError if rows of a group are on two workers."""
    pairs = np.unique(np.stack([groups.astype(np.int64), worker]), axis=1)[0]
    apart = pairs[1:][pairs[1:] == pairs[:-1]]
    if len(apart):
        raise RecipeError(
            f"{name} needs whole groups (scope group-local), but group {apart[0]} lies on two workers; "
            "divide the batch by groups, or set cluster.workers=1",
            key="groups",
        )


def _scores(packing: Packing, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return the score of each row, float64 [n], 0 where missing, and bool [n], True where it is known. A row without
    tokens that count has no score, whether rewards are given by row or by token."""
    rewards = rewards.to(packing.mask.device, torch.float64)
    n, total = len(packing.lengths), len(packing.mask)
    if rewards.shape not in ((n,), (total,)):
        raise TokenCountError(
            f"rewards has the shape {tuple(rewards.shape)}; there are {n} rows of {total} tokens", key="rewards.shape"
        )
    scores = rewards if rewards.shape == (n,) else packing.sum(rewards)
    valid = torch.isfinite(scores) & (packing.counts > 0)
    return torch.where(valid, scores, 0.0), valid


def _row_columns(columns: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
    """Convert all columns to tensors; TokenCountError names a row column that is not [n]."""
    found = {k: torch.as_tensor(v) for k, v in columns.items()}
    for name, column in found.items():
        if name not in ("rewards", *OF_TOKENS) and column.shape != (n,):
            raise TokenCountError(
                f"{name} has the shape {tuple(column.shape)}; there are {n} rows", key=f"{name}.shape"
            )
    return found
