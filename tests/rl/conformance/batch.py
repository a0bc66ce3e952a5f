"""Packed batches with every edge row and every column, and the same as plain rows of Python numbers for the oracle."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.rl.fixture import GROUPS as FIXTURE_GROUPS
from tests.rl.fixture import GRPO, LENGTHS, REWARDS, Fixture


@dataclass(frozen=True)
class Token:
    """A token that counts. place: its index in the row; at: in the packed column."""

    at: int
    place: int
    columns: dict[str, float]

    def __getattr__(self, name: str) -> float:
        try:
            return self.columns[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Row:
    """A sequence: its tokens that count, and its numbers (reward is NaN where missing)."""

    tokens: list[Token]
    group: int
    reward: float
    length: int
    columns: dict[str, float]


@dataclass(frozen=True)
class Batch:
    """lengths, rewards, groups [n]; mask bool [total]; tokens: columns [total], float64; rows: columns [n]."""

    lengths: Tensor
    mask: Tensor
    rewards: Tensor
    groups: Tensor
    tokens: dict[str, Tensor]
    rows: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    def index(self, rows: Tensor) -> Tensor:
        """Where the tokens of these rows lie."""
        starts = torch.cumsum(self.lengths, 0) - self.lengths
        spans = [torch.arange(int(starts[r]), int(starts[r] + self.lengths[r])) for r in rows]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)

    def pick(self, rows: Tensor) -> "Batch":
        """The batch with these rows, in this order."""
        at = self.index(rows)
        return Batch(
            self.lengths[rows],
            self.mask[at],
            self.rewards[rows],
            self.groups[rows],
            {k: v[at] for k, v in self.tokens.items()},
            {k: v[rows] for k, v in self.rows.items()},
        )

    def padded(self, left: int, width: int) -> tuple["Batch", Tensor]:
        """Masked tokens (NaN) before every row and, up to one width, behind it; and where the tokens are now."""
        n, longest = len(self), int(self.lengths.max()) if len(self) else 0
        width = left + max(longest, width)
        starts = torch.arange(n) * width + left
        own = torch.cumsum(self.lengths, 0) - self.lengths
        at = torch.arange(len(self.mask)) + torch.repeat_interleave(starts - own, self.lengths)

        def spread(column: Tensor, empty: Any) -> Tensor:
            return torch.full((n * width,), empty, dtype=column.dtype).index_put((at,), column)

        columns = {k: spread(v, math.nan) for k, v in self.tokens.items()}
        lengths, mask = torch.full((n,), width, dtype=torch.int64), spread(self.mask, False)
        return replace(self, lengths=lengths, mask=mask, tokens=columns), at

    def plain(self) -> list[Row]:
        """Rows of Python numbers."""
        return list(self._plain())

    def _plain(self) -> Iterator[Row]:
        columns = {k: v.tolist() for k, v in self.tokens.items()}
        mask, start = self.mask.tolist(), 0
        for i, length in enumerate(self.lengths.tolist()):
            inside = [t for t in range(start, start + length) if mask[t]]
            tokens = [Token(t, t - start, {k: v[t] for k, v in columns.items()}) for t in inside]
            row = {k: float(v[i]) for k, v in self.rows.items()}
            yield Row(tokens, int(self.groups[i]), float(self.rewards[i]), length, row)
            start += length

    def with_rewards(self, rewards: Tensor) -> "Batch":
        """The same with other rewards, and parts that add up to them."""
        share = torch.linspace(0, 1, len(self), dtype=torch.float64).round(decimals=1)
        parts = {"part/correct": rewards * share, "part/format": rewards * (1 - share)}
        return replace(self, rewards=rewards, rows={**self.rows, **parts})


def golden(prompt: int = 0, width: int | None = None) -> Batch:
    """The fixture of the golden vectors, in one of its packings."""
    data = Fixture(prompt, width)
    tokens = {
        "logprobs": data.new,
        "old_logprobs": data.old,
        "rollout_logprobs": data.rollout,
        "ref_logprobs": data.ref,
        "values": data.values,
        "loss": data.loss,
        "advantages": torch.where(data.mask > 0, GRPO[data.row], math.nan),
        "sum_pi_squared": torch.full((len(data.mask),), 0.5),
        "uniforms": torch.full((len(data.mask),), 0.5),
        "chunk_tokens": torch.ones(len(data.mask)),
        "rewards": data.token_rewards,
    }
    tokens = {k: v.double() for k, v in tokens.items()}
    tokens["place"] = torch.cat([torch.arange(int(n)) for n in data.lengths]).double() - prompt
    return Batch(
        data.lengths,
        data.mask > 0,
        REWARDS,
        FIXTURE_GROUPS,
        tokens,
        {"baselines": torch.tensor([0.5, 0.5, 0.5, 0.1, 0.1, 0.1, 0.2]), "lengths": torch.tensor(LENGTHS).double()},
    )


KINDS = ("any", "any", "any", "all", "none", "one")


def _mask(rng: np.random.Generator, length: int) -> list[bool]:
    kind = rng.choice(KINDS)
    if kind == "any":
        return [bool(b) for b in rng.random(length) < 0.7]
    return [kind == "all" or (kind == "one" and t == length // 2) for t in range(length)]


def drawn(seed: int, *, even: bool = False, missing: bool = True, rows: int | None = None) -> Batch:
    """A random batch of 1 to 12 rows. even: two groups of one size; missing: some rewards are NaN.

    Masked places hold NaN. Log-probs differ enough that every clip acts on some tokens.
    """
    rng = np.random.default_rng([seed, 77])
    n = rows or (2 * int(rng.integers(2, 6)) if even else int(rng.integers(1, 13)))
    lengths = rng.integers(1, 8, n)
    mask = np.array([m for length in lengths for m in _mask(rng, length)], dtype=bool)
    scores = rng.choice([0.0, 1.0, 0.7, -0.3, 0.25], n) + rng.choice([0.0, 0.0, 0.1], n) * rng.standard_normal(n)
    if missing and not even:
        scores[rng.random(n) < 0.1] = np.nan
    groups = np.arange(n) % 2 * 9 - 4 if even else rng.integers(-2, 3, n)

    def column(scale: float, shift: float = 0.0) -> Tensor:
        return torch.from_numpy(np.where(mask, shift + scale * rng.standard_normal(len(mask)), np.nan))

    def near(logprobs: Tensor, scale: float) -> Tensor:
        return (logprobs + column(scale)).clamp(max=-0.01)

    old = -column(0.6).abs() - 0.05
    tokens = {
        "old_logprobs": old,
        "logprobs": near(old, 0.25),
        "rollout_logprobs": near(old, 0.2),
        "ref_logprobs": near(old, 0.4),
        "values": column(0.5),
        "advantages": column(1.0),
        "weights": column(0.3, 1.0).abs(),
        "sum_pi_squared": old.exp() ** 2 + column(0.3).abs().clamp(max=1.0) * (1 - old.exp()) ** 2,
        "uniforms": torch.from_numpy(np.where(mask, rng.random(len(mask)), np.nan)),
        "old_values": column(0.5),
        "returns": column(0.7),
        "loss": column(1.0),
        "chunk_tokens": torch.from_numpy(np.where(mask, 1.0 + np.arange(len(mask)) % 3, np.nan)),
    }
    rows_of = {
        "baselines": torch.from_numpy(rng.choice([0.0, 1.0, 0.3], n)),
        "rejected": torch.from_numpy(-rng.random(n) * 4),
        "rejected_reference": torch.from_numpy(-rng.random(n) * 4),
        "rejected_counts": torch.from_numpy(rng.integers(1, 8, n)).double(),
        "margins": torch.from_numpy(rng.random(n)),
    }
    made = Batch(
        torch.from_numpy(lengths),
        torch.from_numpy(mask),
        torch.from_numpy(scores),
        torch.from_numpy(groups),
        tokens,
        rows_of,
    )
    return made.with_rewards(made.rewards)
