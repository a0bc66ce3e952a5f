"""Rates of this machine: of matrix products, the base of MFU, and of copies, in memory and between device and host."""

import time
from collections.abc import Callable
from functools import cache, partial

import torch

SIZE = {"cpu": 768, "cuda": 8192}
"""Rows of the largest square product by which a device is measured."""
LONG = 2e-3
"""Seconds of a product that is large enough: a CPU without units for a dtype would take seconds for larger ones."""
COPIED = 1 << 26
"""Bytes of a copy whose time is measured."""


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the matmul rate of this machine in FLOP/s, as the base of MFU: the best of a few square products (less
    than 0.1 s, once for each setting of a process).

    Threads and fp32 precision are those set now.
    """
    return _measured_flops(device, dtype, torch.get_num_threads(), torch.get_float32_matmul_precision())


@cache
def _measured_flops(device: torch.device, dtype: torch.dtype, threads: int, precision: str) -> float:
    largest = SIZE.get(device.type, SIZE["cuda"])
    for n in (largest // 4, largest // 2, largest):
        a = torch.ones(n, n, device=device, dtype=dtype)
        seconds = _least_seconds(partial(torch.mm, a, a), device)
        if seconds > LONG:
            break
    return 2.0 * n**3 / seconds


def host_bandwidth(device: torch.device) -> float:
    """Measure the bytes a second between a device and host memory that it can reach, in the slower direction."""
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    here = torch.empty(COPIED, dtype=torch.uint8, pin_memory=device.type == "cuda")
    pairs = ((here, there), (there, here))
    return COPIED / max(_least_seconds(partial(to.copy_, of, non_blocking=True), device) for to, of in pairs)


def memory_bandwidth(device: torch.device) -> float:
    """Measure the bytes a second that a device reads and writes in its own memory, together."""
    source, target = (torch.ones(2 * COPIED, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * source.nbytes / _least_seconds(partial(target.copy_, source), device)


def _least_seconds(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(6):  # the first one warms up
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
