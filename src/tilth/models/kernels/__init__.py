"""Kernels of our own, in Triton: one table of what a GPU computes with them in place of the plain functions.

Each row names its reference, which computes the same values on every device. Rows are few: where torch or a library
has a kernel that is as good, that one is used (``docs/packages/models.md`` says which and why).
"""

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilth.core.device import runs_triton


class KernelChoice(NamedTuple):
    """A kernel, the function whose values it has, and the dtypes for which it is chosen."""

    module: str
    reference: str
    dtypes: tuple[torch.dtype, ...]


KERNELS = {
    "linear_cross_entropy": KernelChoice(
        "tilth.models.kernels.linear_cross_entropy", "models.logprobs", (torch.bfloat16, torch.float16)
    ),
    "rope_cache": KernelChoice("tilth.models.kernels.rope_cache", "models.decoder", (torch.bfloat16, torch.float16)),
    "sampler": KernelChoice("tilth.models.kernels.sampler", "engines.sampling", (torch.float32,)),
}


def chosen(name: str, x: Tensor) -> Any:
    """Return the module of a kernel if it is to compute with tensors like x, else None: the reference does."""
    kernel = KERNELS[name]
    return importlib.import_module(kernel.module) if x.dtype in kernel.dtypes and runs_triton(x.device) else None
