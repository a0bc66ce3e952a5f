"""Linear layers whose rows have the same bits however many rows there are: parity mode on a CPU.

Matrix libraries choose a kernel, and with it the order of a row's sum, by the number of rows. Measured on AVX-512 with
AMX: oneDNN in bf16 for sums of 512 terms and more, MKL in fp32 on two threads from 896 on. So rows go through in blocks
of sizes that were tried on this machine: once for each shape, random rows in a block of that size must have the bits
that they have in blocks of ``ROW_MULTIPLE``.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilth.plan.kernels import CHUNK_ELEMENTS, ROW_MULTIPLE

SIZES = (1024, 512, 256, 128, 64, 32)
"""Rows of a block beside ``ROW_MULTIPLE``, if they keep the bits."""


class _Mode(threading.local):
    on = False


_mode = _Mode()


@contextmanager
def steady() -> Iterator[None]:
    """Let ``linear`` of this thread keep the bits of a row at any number of rows on a CPU."""
    before, _mode.on = _mode.on, True
    try:
        yield
    finally:
        _mode.on = before


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [N, in] times weight [out, in], plus bias, both cast to x's dtype: [N, out]."""
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return steady_linear(x, weight, bias) if _mode.on else F.linear(x, weight, bias)


def steady_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [N, in] times weight [out, in], plus bias, all of one dtype; N a multiple of ``ROW_MULTIPLE``: [N, out].

    A row has the same bits for every N, on the CPU and with the number of threads that it has now.
    """
    on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()  # compiled code has no parity mode
    blocks = _blocks(x, weight, bias) if on_cpu else []
    return F.linear(x, weight, bias) if len(blocks) < 2 else _Blocks.apply(x, weight, bias, blocks)


def _blocks(x: Tensor, weight: Tensor, bias: Tensor | None) -> list[slice]:
    rows, at = len(x), 0
    found: list[slice] = []
    shape = (*weight.shape, x.dtype, bias is not None, torch.get_num_threads())
    for size in (*SIZES, ROW_MULTIPLE):
        while at < rows and (rows - at >= size or size == ROW_MULTIPLE):
            if size != ROW_MULTIPLE and not keeps_bits(size, *shape):
                break
            found.append(slice(at, min(at + size, rows)))
            at += size
    return found


@cache
def keeps_bits(size: int, out: int, width: int, dtype: torch.dtype, biased: bool, threads: int) -> bool:
    """Return True if rows in a block of this size have the bits that they have in blocks of ``ROW_MULTIPLE``.

    Tried on ``threads`` threads, which this thread has now, with random terms whose sum is 0: what comes out is
    rounding alone, so that another order shows in bf16 too.
    """
    if size * out > CHUNK_ELEMENTS:
        return False
    some = torch.Generator().manual_seed(size)
    left, right, bias = (
        torch.randn(shape, generator=some).to(dtype) for shape in ((size, width // 2), (out, width // 2), (out,))
    )
    order = torch.randperm(2 * (width // 2), generator=some)
    x, weight = (F.pad(torch.cat(both, 1)[:, order], (0, width % 2)) for both in ((left, left), (right, -right)))
    if biased and width > 1:  # one more term takes the bias away
        x[:, order == 0], weight[:, order == 0] = 1, -bias[:, None]
        x[:, order == width // 2] = 0
    whole, parts = x.new_empty(size, out), x.new_empty(size, out)
    _product(x, weight, bias if biased else None, [slice(0, size)], whole)
    steps = [slice(i, i + ROW_MULTIPLE) for i in range(0, size, ROW_MULTIPLE)]
    _product(x, weight, bias if biased else None, steps, parts)
    return torch.equal(whole, parts)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, blocks: list[slice], out: Tensor) -> Tensor:
    # Not F.linear: selective recomputation counts its products, and a trial happens once only.
    for some in blocks:
        if bias is None:
            torch.mm(x[some], weight.t(), out=out[some])
        else:
            torch.addmm(bias, x[some], weight.t(), out=out[some])
    return out


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: list[slice]) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias, blocks, x.new_empty(len(x), len(weight)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), wanted = ctx.saved_tensors, ctx.needs_input_grad
        return (
            grad @ weight if wanted[0] else None,
            grad.t() @ x if wanted[1] else None,
            grad.sum(0) if wanted[2] else None,
            None,
        )
