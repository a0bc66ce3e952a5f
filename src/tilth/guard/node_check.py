"""Tests of a machine while no job computes on it: equal bits, compute and memory rates, transfers over loopback.

ByteRobust (arXiv 2509.16293) tests a node at stop time before it is blamed. A wrong bit or a lost byte is a fact; a
rate is told and compared with nothing, since what is slow depends on the machine and on who else uses it.
"""

import hashlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np

BUDGET = 2.0
"""Seconds of all tests together, on an idle machine."""
SIDE, COPIED, SENT = 384, 1 << 25, 1 << 22
"""Rows of a matrix, bytes of a copy, bytes of a transfer."""
TRANSFERS = 4
_LIMIT = 1.0  # seconds in which a transfer gets no byte on


@dataclass(frozen=True)
class NodeCheck:
    """Results. compute: GFLOP/s of one thread; memory, loopback: GB/s; unequal: products that had other bits than the
    first; failed: transfers whose bytes did not arrive."""

    compute: float
    memory: float
    loopback: float
    unequal: int
    failed: int
    seconds: float

    @property
    def sound(self) -> bool:
        """True if nothing is wrong for certain."""
        return not self.unequal and not self.failed

    def sentence(self) -> str:
        """Describe it in one sentence."""
        found = [f"{self.unequal} products of equal matrices differ"] if self.unequal else []
        found += [f"{self.failed} of {TRANSFERS} transfers over loopback failed"] if self.failed else []
        rates = (
            f"{self.compute:.3g} GFLOP/s a thread, copies of {self.memory:.3g} GB/s, loopback {self.loopback:.3g} GB/s"
        )
        return f"{'; '.join(found)}; {rates}" if found else f"nothing is wrong: {rates}"

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return {**asdict(self), "sound": self.sound}


def check_node(budget: float = BUDGET) -> NodeCheck:
    """Test this machine, in about ``budget`` seconds at most."""
    began = time.monotonic()
    compute, unequal = _compute(budget / 4)
    memory = _memory(budget / 8)
    with ThreadPoolExecutor(TRANSFERS) as pool:
        rates = list(pool.map(_transfer, [os.urandom(SENT) for _ in range(TRANSFERS)]))
    return NodeCheck(compute, memory, float(np.median(rates)), unequal, rates.count(0.0), time.monotonic() - began)


def _compute(seconds: float) -> tuple[float, int]:
    """Multiply two matrices again and again; return GFLOP/s and how many products differ from the first."""
    made = np.random.default_rng(0).standard_normal((2, SIDE, SIDE), np.float32)
    first, count, unequal, busy = _product(made), 0, 0, 0.0
    until = time.monotonic() + seconds
    while time.monotonic() < until or not count:
        began = time.thread_time()
        product = _product(made)
        busy += time.thread_time() - began
        count, unequal = count + 1, unequal + (product != first)
    return 2 * SIDE**3 * count / max(busy, 1e-9) / 1e9, unequal


def _product(made: np.ndarray) -> bytes:
    return (made[0] @ made[1]).tobytes()


def _memory(seconds: float) -> float:
    """Copy an array larger than most caches; return GB/s, of reading and writing together."""
    source, target = np.ones(COPIED, np.uint8), np.ones(COPIED, np.uint8)  # written, so that their pages are there
    count, busy, until = 0, 0.0, time.monotonic() + seconds
    while time.monotonic() < until or not count:
        began = time.thread_time()
        np.copyto(target, source)
        busy, count = busy + time.thread_time() - began, count + 1
    return 2 * COPIED * count / max(busy, 1e-9) / 1e9


def _transfer(data: bytes) -> float:
    """Send bytes over loopback; return GB/s, 0 if others arrive or none."""
    got, left = hashlib.blake2b(digest_size=16), len(data)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(_LIMIT)
            with socket.create_connection(listener.getsockname(), _LIMIT) as there, listener.accept()[0] as here:
                here.settimeout(_LIMIT)
                sender = threading.Thread(target=_send, args=(there, data), daemon=True)
                began = time.monotonic()
                sender.start()
                while left and (part := here.recv(1 << 18)):
                    got.update(part)
                    left -= len(part)
                took = time.monotonic() - began
                sender.join(_LIMIT)
    except OSError:  # it failed, which is the result
        return 0.0
    same = got.digest() == hashlib.blake2b(data, digest_size=16).digest()
    return len(data) / took / 1e9 if same and not left else 0.0


def _send(there: socket.socket, data: bytes) -> None:
    try:
        there.sendall(data)
    except OSError:  # the other end sees that bytes are missing
        there.close()
