"""What runs in each rank for the tests of context parallelism: attention of divided tokens beside the whole."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilth.core.layout import Mesh
from tilth.parallel.context import ContextParallel
from tilth.parallel.dims import ParallelDims


def brute_force(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Attention by one matrix over all packed tokens, with a mask."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    place = np.concatenate([np.arange(n) for n in lengths])
    apart = place[:, None] - place[None]
    visible = (sequence[:, None] == sequence) & (apart >= 0) & (apart < (window or 1 << 30))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~torch.from_numpy(visible), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def inputs(lengths: list[int], heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(sum(lengths))
    sizes = (heads, kv_heads, kv_heads, heads)
    made = [torch.randn(sum(lengths), n, width, generator=generator, dtype=torch.float64) * 1.5 for n in sizes]
    return [x.to(dtype) for x in made]


def attend(
    rank: int, ranks: int, style: str, cases: list[dict[str, Any]], dtype: str = "float64"
) -> list[dict[str, float]]:
    """Greatest difference of output and gradients from brute force, over cases: lengths, heads, kv_heads, window."""
    shape: Any = SimpleNamespace(num_heads=1 << 10, num_kv_heads=1 << 10)
    parallel = ContextParallel.of(ParallelDims.of(Mesh(("cp",), (ranks,)), rank), style, shape)
    return [_attend(parallel, getattr(torch, dtype), **case) for case in cases]


def _attend(
    parallel: ContextParallel, dtype: torch.dtype, lengths: list[int], heads: int, kv_heads: int, window: int | None
) -> dict[str, float]:
    share = parallel.share(lengths)
    whole = inputs(lengths, heads, kv_heads, 4, dtype)
    mine = [x[share.tokens].clone().requires_grad_(i < 3) for i, x in enumerate(whole)]
    wide = [x.double().requires_grad_(i < 3) for i, x in enumerate(whole)]
    found = share.context().attend(0, *mine[:3], window)
    wanted = brute_force(*wide[:3], lengths, window)
    assert found.dtype == dtype and found.shape == mine[0].shape
    grads = [torch.autograd.grad((a * b).sum(), x[:3]) for a, b, x in ((found, mine[3], mine), (wanted, wide[3], wide))]
    pairs = zip(("out", "q", "k", "v"), (found, *grads[0]), (wanted, *grads[1]))
    return {name: _far(a.double(), b[share.tokens]) for name, a, b in pairs}


def _far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0
