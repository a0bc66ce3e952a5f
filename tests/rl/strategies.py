"""Random packed batches with every edge row: all masked, one token, missing rewards, groups of one, flat groups."""

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st

from tilth.rl.advantages import Advantage
from tilth.rl.estimators import OF_TOKENS
from tilth.rl.registry import build

EXAMPLES = 2 * settings.default.max_examples


@dataclass
class Drawn:
    lengths: torch.Tensor
    mask: torch.Tensor
    rewards: torch.Tensor
    groups: torch.Tensor
    seed: int

    def column(self, number: int, scale: float = 0.5) -> torch.Tensor:
        """A float64 column [total] with NaN where masked."""
        generator = torch.Generator().manual_seed(self.seed * 16 + number)
        values = torch.randn(len(self.mask), generator=generator, dtype=torch.float64) * scale
        return torch.where(self.mask, values, torch.nan)

    def pick(self, rows: torch.Tensor) -> "Drawn":
        """The batch with these rows, in this order."""
        tokens = self.token_index(rows)
        return Drawn(self.lengths[rows], self.mask[tokens], self.rewards[rows], self.groups[rows], self.seed)

    def token_index(self, rows: torch.Tensor) -> torch.Tensor:
        """Where the tokens of these rows lie."""
        starts = torch.cumsum(self.lengths, 0) - self.lengths
        spans = [torch.arange(int(starts[r]), int(starts[r] + self.lengths[r])) for r in rows]
        return torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)


@st.composite
def batches(draw, rows=st.integers(1, 9)) -> Drawn:
    n = draw(rows)
    lengths = draw(st.lists(st.integers(1, 7), min_size=n, max_size=n))
    kinds = draw(st.lists(st.sampled_from(["any", "any", "all", "none", "one"]), min_size=n, max_size=n))
    mask = []
    for length, kind in zip(lengths, kinds):
        if kind == "any":
            mask += draw(st.lists(st.booleans(), min_size=length, max_size=length))
        else:
            mask += [kind == "all" or (kind == "one" and t == length // 2) for t in range(length)]
    reward = st.sampled_from([0.0, 1.0, 0.7, -0.3, float("nan")]) | st.floats(-2, 2, width=32)
    rewards = draw(st.lists(reward, min_size=n, max_size=n))
    groups = draw(st.lists(st.integers(-2, 2), min_size=n, max_size=n))
    return Drawn(
        torch.tensor(lengths, dtype=torch.int64),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(rewards),
        torch.tensor(groups, dtype=torch.int64),
        draw(st.integers(0, 2**20)),
    )


def columns_for(name: str, batch: Drawn, **options) -> dict[str, torch.Tensor]:
    """Every further column that an estimator needs or takes: of tokens with NaN where masked, of rows some missing."""
    entry = build("advantages", name, options, Advantage)
    wanted = [c for c in (*entry.needs, *entry.takes) if c not in ("rewards", "groups")]
    likely = batch.column(9).abs().neg().exp()
    of_tokens = {
        "values": batch.column(1),
        "logprobs": likely.log(),
        "ref_logprobs": batch.column(12),
        "sum_pi_squared": likely**2 + batch.column(10).abs().neg().exp() * (1 - likely) ** 2,
        "weights": batch.column(11).exp(),
        "chunk_tokens": batch.column(13).abs().floor() + 1,
    }
    return {c: of_tokens[c] if c in of_tokens else row_column(batch, c) for c in wanted}


def row_column(batch: Drawn, name: str) -> torch.Tensor:
    """A column [n] of numbers of which many are equal and some missing; another one for each name."""
    generator = torch.Generator().manual_seed(batch.seed * 16 + sum(map(ord, name)) % 16)
    return torch.tensor([0.0, 0.0, 1.0, 1.0, 0.3, -0.7, torch.nan])[
        torch.randint(7, (len(batch.lengths),), generator=generator)
    ]


def pick_columns(columns: dict[str, torch.Tensor], batch: Drawn, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The columns of these rows."""
    tokens = batch.token_index(rows)
    return {name: column[tokens if name in OF_TOKENS else rows] for name, column in columns.items()}
