"""The fixture of the golden vectors: seven rows of at most six tokens, built from its formulas."""

import math

import torch

LENGTHS = [6, 4, 5, 3, 6, 2, 4]
REWARDS = torch.tensor([1, 0, 1, 0.5, 0.2, -1, 0.7])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1, 2])
GRPO = torch.tensor([0.577349, -1.154699, 0.577349, 0.755928, 0.377964, -1.133892, 0.699999])


def _column(formula, prompt: int, width: int | None) -> torch.Tensor:
    """One packed column: ``prompt`` masked tokens (NaN), then the row's tokens (or ``width`` with NaN padding)."""
    rows = []
    for i, length in enumerate(LENGTHS):
        row = [math.nan] * prompt + [formula(i, t) for t in range(length)]
        rows += row + [math.nan] * ((width or length) - length)
    return torch.tensor(rows)


class Fixture:
    """All columns. ``prompt`` and ``width`` change the packing, never a result at a token that counts."""

    def __init__(self, prompt: int = 0, width: int | None = None) -> None:
        def column(formula):
            return _column(formula, prompt, width)

        def old(i, t):
            return -(0.2 + 0.1 * i + 0.05 * t)

        self.lengths = torch.tensor([prompt + (width or length) for length in LENGTHS])
        masked = column(lambda i, t: float(not (i == 4 and t in (2, 3))))
        self.mask = torch.nan_to_num(masked).to(torch.uint8)
        self.old = column(old)
        self.new = column(lambda i, t: old(i, t) + 0.03 * (((i + 2 * t) % 7) - 3))
        self.rollout = column(lambda i, t: old(i, t) + 0.02 * (((3 * i + t) % 5) - 2))
        self.ref = column(lambda i, t: old(i, t) - 0.04 * (((2 * i + t) % 3) - 1))
        self.values = column(lambda i, t: 0.1 * i - 0.05 * t)
        self.loss = column(lambda i, t: 0.1 * i + 0.01 * t)
        self.token_rewards = column(lambda i, t: float(REWARDS[i]) if t == LENGTHS[i] - 1 else 0.0)
        self.row = torch.repeat_interleave(torch.arange(7), self.lengths)
        self.starts = torch.cumsum(self.lengths, 0) - self.lengths + prompt

    def at(self, row: int, token: int) -> int:
        """Packed index of a token of a row."""
        return int(self.starts[row]) + token

    def tokens(self, column: torch.Tensor, row: int) -> torch.Tensor:
        """A row of a packed column without prompt and padding."""
        return column[int(self.starts[row]) : int(self.starts[row]) + LENGTHS[row]]
