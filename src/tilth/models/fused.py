"""Functions between the products of a decoder's layer, in one pass each: C++ (``row_product.cpp``) in place of several
kernels of torch, in float32 on a CPU without a gradient.

Each has the bits of the functions that it replaces: it is tried once on this machine and not used where one differs,
since torch's order of sums and its exponential function are not documented. Without the library, which a generation
engine builds, nothing is used.
"""

import ctypes
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tilth.models.rope import rotate
from tilth.models.row_product import library, ready
from tilth.models.steady import GRAIN, elementwise, steady

EXPONENTIALS = {"AVX512": "Sleef_expf16_u10", "AVX2": "Sleef_expf8_u10"}
"""Exponential function of a vector that torch is linked with, by capability."""
LENGTHS = (16, 48, 272, 704)
"""Keys of a trial of the softmax."""
_ROWS = 32
"""Rows of a trial."""


def serves(x: Tensor) -> bool:
    """Return True if these functions compute with tensors like x here, where their trial has passed."""
    return (
        ready()
        and not torch.is_grad_enabled()
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= GRAIN else 1


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``F.rms_norm`` of the last dimension of x, if it ``norms`` this width."""
    x = x.contiguous()
    found, width = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // width
    pointers = x.data_ptr(), weight.data_ptr(), found.data_ptr()
    library().row_norm(*pointers, rows, width, eps, _threads(x.numel()))
    return found


def gated(gate: Tensor, up: Tensor, exponential: int) -> Tensor:
    """Return silu(gate) * up of two [N, width] whose rows are dense. exponential: ``exponential_of``, above 0."""
    rows, width = gate.shape
    found = gate.new_empty(rows, width)
    pointers = gate.data_ptr(), up.data_ptr(), found.data_ptr(), exponential
    library().row_gated(*pointers, rows, width, gate.stride(0), up.stride(0), _threads(gate.numel()))
    return found


def heads(
    x: Tensor, by: tuple[Tensor, Tensor] | None, tables: tuple[Tensor, ...], sizes: tuple[int, int, int], eps: float
) -> tuple[Tensor, Tensor]:
    """Return queries [N, heads, width] and keys [N, kv_heads, width], normed by weights and rotated, of x [N, (heads +
    kv_heads) * width and more], whose rows are dense.

    by: weights of norms of queries and of keys. tables: cosines and sines [N, 1, width]. sizes: heads, kv_heads, width.
    """
    (count, kv_count, width), rows = sizes, x.shape[0]
    q, k = x.new_empty(rows, count, width), x.new_empty(rows, kv_count, width)
    weights = (0, 0) if by is None else tuple(one.data_ptr() for one in by)
    pointers = x.data_ptr(), *weights, *(one.data_ptr() for one in tables), q.data_ptr(), k.data_ptr()
    library().row_heads(*pointers, rows, x.stride(0), count, kv_count, width, eps, _threads(q.numel()))
    return q, k


# ---- trials ----


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@cache
def norms(width: int, eps: float) -> bool:
    """Return True if norms of rows of this width have the bits of ``F.rms_norm``."""
    x, weight = _random(_ROWS, width) * 3, _random(1, width)[0]
    tried = ((norm(some, weight, eps), F.rms_norm(some, (width,), weight, eps)) for some in (x, x[-1:]))
    return all(torch.equal(*both) for both in tried)


@cache
def exponential_of() -> int:
    """Return the address of the exponential function with which ``gated``, and a softmax in C++, have the bits of
    torch's; 0 if they have others."""
    try:
        name = EXPONENTIALS[torch.backends.cpu.get_cpu_capability()]
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p).value or 0
    except (KeyError, OSError, AttributeError):
        return 0
    return found if _gates(found) and _weighs(found) else 0


@torch.no_grad()
def _gates(exponential: int) -> bool:
    both = _random(_ROWS, 2 * 77) * 5
    gate, up = both.chunk(2, -1)
    with steady():
        expected = elementwise(F.silu, gate.contiguous()).mul_(up)
    return torch.equal(gated(gate, up, exponential), expected)


def _weighs(exponential: int) -> bool:
    for keys in LENGTHS:
        scores = (_random(_ROWS, keys) * 4).masked_fill_(torch.arange(keys) > keys - 7, -torch.inf)
        expected = torch.softmax(scores, -1)
        library().row_softmax(scores.data_ptr(), exponential, _ROWS, keys)
        if not torch.equal(scores, expected):
            return False
    return True


@cache
def rotates(width: int) -> bool:
    """Return True if ``heads`` of this width have the bits of ``rope.rotate``."""
    x, cos, sin = _random(_ROWS, 3, width), _random(_ROWS, 1, width), _random(_ROWS, 1, width).flip(0)
    expected = rotate(x, cos, sin)
    q, k = heads(x.flatten(1), None, (cos, sin), (2, 1, width), 0.0)
    return torch.equal(torch.cat((q, k), 1), expected)
