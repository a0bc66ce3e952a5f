"""Random packed batches with every edge row: all masked, one token, missing rewards, groups of one, flat groups."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

EXAMPLES = 200


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
