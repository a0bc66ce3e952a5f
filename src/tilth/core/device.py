"""Copies between host and device, one for many arrays, for which the host waits at most once; what a device can run.

A copy of pageable memory to a GPU waits until the device has done all that it was given, whatever ``non_blocking`` is.
"""

import ctypes
import functools
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 16  # bytes, for vectorised kernels
TRITON = (3, 6)
"""Oldest version of Triton whose language the kernels are written in: that of torch 2.11."""
AMD_SHARED = 64 << 10
"""Bytes of shared memory of a program on an AMD GPU."""
CAPABILITY = 8
"""Oldest NVIDIA generation with products in bf16 (A100); AMD's numbers are above it."""


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays of one dimension or more on a device; on a GPU by one copy for which the host does not wait.

    On a CPU tensors share the memory of arrays that are contiguous.
    """
    if device.type == "cuda":
        return unpacked(pinned(arrays).to(device, non_blocking=True), arrays)
    return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]


def to_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Return tensors of one device as arrays: by one copy, or of a CPU without any."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.detach().numpy() for tensor in tensors]
    flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]).cpu()
    parts = flat.split([tensor.nbytes for tensor in tensors])
    return [part.clone().view(tensor.dtype).view(tensor.shape).numpy() for part, tensor in zip(parts, tensors)]


def pinned(arrays: Sequence[np.ndarray]) -> Tensor:
    """Return arrays one after the other in pinned memory, uint8 [bytes]. torch keeps it until its copies are over."""
    ends = _ends(arrays)
    found = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    room = found.numpy()
    for begin, array in zip(ends, arrays):
        np.copyto(room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape), array)
    return found


def unpacked(flat: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Return the arrays in what ``pinned`` made of them, or a copy of it, as views."""
    dtypes = [torch.from_numpy(np.empty(0, array.dtype)).dtype for array in arrays]
    return [
        flat[begin : begin + array.nbytes].view(dtype).view(array.shape)
        for begin, array, dtype in zip(_ends(arrays), arrays, dtypes)
    ]


def has_products(device: torch.device) -> bool:
    """Return True for a GPU with products in bf16, as flash attention and the kernels in Triton need them."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= CAPABILITY


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Return True if kernels in Triton run on a device: on a GPU where nothing is missing. If something is, stderr says
    so once."""
    if not has_products(device):
        return False
    missing = triton_missing()
    if missing:
        print(f"tilth: {missing}; plain functions of torch compute in place of kernels", file=sys.stderr)
    return not missing


def gpus_run_triton() -> bool:
    """Return True if GPUs of this machine run kernels in Triton, and where there is none: torch for GPUs comes with
    it."""
    return not torch.cuda.is_available() or runs_triton(torch.device("cuda", 0))


def triton_missing() -> str:
    """Return what is missing for kernels in Triton, with what would help; "" if nothing is."""
    needed = ".".join(map(str, TRITON))
    try:
        import triton
    except ImportError:
        return f"Triton is not installed: pip install '.[triton]' in Tilth's folder, or triton>={needed}"
    numbers = tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))
    if numbers < TRITON:
        return f"Triton {triton.__version__} is too old: pip install 'triton>={needed}'"
    compiler = os.environ.get("CC")  # for the code that launches a kernel
    if not any(map(shutil.which, [compiler] if compiler else ["gcc", "clang", "cc"])):
        return f"Triton needs a C compiler, and there is no {compiler or 'gcc or clang'}: install one, or set CC"
    return ""


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program on a GPU may have."""
    if device.type != "cuda" or torch.version.hip:  # which does not tell
        return AMD_SHARED
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack the number
    return int(properties.shared_memory_per_block_optin)


def return_memory(device: torch.device) -> None:
    """Give memory that is free, of a device and of this process, back to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _ends(arrays: Sequence[np.ndarray]) -> list[int]:
    """Return where each array begins, and where the last one ends."""
    found = [0]
    for array in arrays:
        found.append(found[-1] + -(-array.nbytes // _ALIGNED) * _ALIGNED)
    return found
