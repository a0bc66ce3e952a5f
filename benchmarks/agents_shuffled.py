"""Plugin of a control: rewards permuted across all rows of a step, which teach nothing about any of them.

tilth run code-sandbox 'plugins=["benchmarks/agents_shuffled.py"]' algorithm.advantage=shuffled
"""

import torch
from torch import Tensor

import tilth


@tilth.advantage("shuffled")
def shuffled(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return another row's reward minus the mean of what its group got."""
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(int(groups.sum())))
    mixed, same = rewards[order], groups[:, None] == groups
    return mixed - (same * mixed).sum(1) / same.sum(1)
