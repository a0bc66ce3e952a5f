"""Roles of benchmarks, which work with models of their own."""

import torch

from tilth.cluster.worker.context import Context
from tilth.parallel.dims import join


class JoinedRole:
    """Role whose ranks have joined each other, with one thread each."""

    def __init__(self, context: Context) -> None:
        join(context.rank, context.workers, context.init_method, context.timeout)
        torch.set_num_threads(1)
        self.context = context
