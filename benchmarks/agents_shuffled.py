"""Plugin of a control: every row gets the reward of a row of another group, which teaches nothing about it.

tilth run code-sandbox 'plugins=["benchmarks/agents_shuffled.py"]' algorithm.advantage=shuffled

Rows of one group answer one prompt, drawn independently of those of other groups. So the advantages of a group are
independent of what its rows say, and the gradient's mean is 0 whatever the rewards are. A permutation of all rows gives
some their own reward, and some that of a row they are compared with.
"""

import torch
from torch import Tensor

import tilth


def elsewhere(groups: Tensor) -> Tensor:
    """Return a random permutation, int64 [n], that maps no row to one of its own group; the groups decide on it.

    Raises ValueError if a group has more than half of the rows: there is none.
    """
    n, drawn = len(groups), torch.Generator().manual_seed(int(groups.sum()))
    if 2 * int(groups.unique(return_counts=True)[1].max()) > n:
        raise ValueError("a group has more than half of the rows of this step; use more prompts")
    order = torch.randperm(n, generator=drawn)
    for i in range(n):
        while groups[order[i]] == groups[i]:
            j = int(torch.randint(n, (1,), generator=drawn))
            if groups[order[j]] != groups[i] and groups[order[i]] != groups[j]:
                order[i], order[j] = int(order[j]), int(order[i])
    return order


@tilth.advantage("shuffled")
def shuffled(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return the reward of a row of another group minus the mean of what its own group got."""
    mixed, same = rewards[elsewhere(groups)], groups[:, None] == groups
    return mixed - (same * mixed).sum(1) / same.sum(1)
