"""Rate of matrix products on this machine, the base of MFU."""

import time
from functools import cache

import torch

SIZE = {"cpu": 768, "cuda": 8192}


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the matmul rate of this machine in FLOP/s, as the base of MFU: the best of a few square products (about
    50 ms, once for each setting of a process).

    Threads and fp32 precision are those set now.
    """
    return _measured_flops(device, dtype, torch.get_num_threads(), torch.get_float32_matmul_precision())


@cache
def _measured_flops(device: torch.device, dtype: torch.dtype, threads: int, precision: str) -> float:
    n = SIZE.get(device.type, SIZE["cuda"])
    a = torch.ones(n, n, device=device, dtype=dtype)
    seconds = []
    for _ in range(6):  # the first one warms up
        _wait(device)
        started = time.perf_counter()
        torch.mm(a, a)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 2.0 * n**3 / min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
