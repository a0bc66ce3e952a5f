"""Checks of one update: each token is used and computed once, and which rows made a loss that is not finite."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from tilth.core.batch import Jagged
from tilth.core.errors import TokenCountError, TokenDivisionError

NAMED = 8
"""Most rows that a message names."""


def check_used(used: np.ndarray) -> None:
    """Raise TokenCountError unless every token of the batch was used once."""
    if (used != 1).any():
        wrong = int(np.flatnonzero(used != 1)[0])
        raise TokenCountError(
            f"token {wrong} of {len(used)} of the batch was used {used[wrong]} times in one update", key="tokens"
        )


def check_divided(given: float, computed: float) -> None:
    """Raise TokenDivisionError unless all ranks together have computed each token of their batch once."""
    if given != computed:
        raise TokenDivisionError(
            f"all ranks together computed {computed:.0f} tokens of a batch of {given:.0f}: the mechanism of an axis "
            "that splits tokens does not divide them among its ranks",
            key="tokens.divided",
        )


def suspects(
    plan: Sequence[np.ndarray], values: Sequence[float], tokens: Jagged, columns: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return the rows that may have made a loss not finite, in order: int64.

    plan: rows of each micro-batch; values: their losses; columns: per token. Of the rows of a micro-batch whose loss is
    not finite, those with a number that is not; all of them if the model made it of finite numbers.
    """
    found = [rows for rows, value in zip(plan, values) if not math.isfinite(value)]
    rows = np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)
    wrong = np.zeros(len(tokens.values) + 1, np.int64)
    for column in columns.values():
        if len(rows) and column.dtype.kind == "f":
            wrong[1:] += ~np.isfinite(column).reshape(len(column), -1).all(1)
    upto = np.cumsum(wrong)
    given = upto[tokens.offsets[rows + 1]] > upto[tokens.offsets[rows]]
    return rows[given] if given.any() else rows


def listed(rows: Mapping[str, np.ndarray]) -> str:
    """Return the rows whose loss is not finite as text. rows: what names them."""
    count = len(next(iter(rows.values())))
    if not count:
        return "the loss of every row is finite, the gradient is not"
    more = " ..." if count > NAMED else ""
    texts = [f"{name} {', '.join(map(str, column[:NAMED]))}{more}" for name, column in rows.items()]
    return f"{count} rows may be the cause: {'; '.join(texts)}"
