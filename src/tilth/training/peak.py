"""The matmul rate of this machine, measured: what model FLOPs utilisation is taken against."""

import time

import torch

SIZE = {"cpu": 768, "cuda": 8192}


def measured_flops(device: torch.device, dtype: torch.dtype, repeats: int = 5) -> float:
    """Best of a few square matmuls, in FLOP/s, with the threads and fp32 precision that are set now (about 50 ms)."""
    n = SIZE.get(device.type, SIZE["cuda"])
    a = torch.ones(n, n, device=device, dtype=dtype)
    seconds = []
    for _ in range(repeats + 1):  # the first one warms up
        _wait(device)
        started = time.perf_counter()
        torch.mm(a, a)
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return 2.0 * n**3 / min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
