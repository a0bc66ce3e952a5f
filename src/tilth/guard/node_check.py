"""Tests of a machine while no job computes on it: equal bits, compute and memory rates, transfers over loopback.

ByteRobust (arXiv 2509.16293) tests a node at stop time before it is blamed. A wrong bit or a lost byte is a fact; a
rate is told and compared with nothing, since what is slow depends on the machine and on who else uses it. Two pairings
of transfers tell which end is at fault: it is the one that fails in both.
"""

import hashlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

BUDGET = 2.0
"""Seconds of all tests together, on an idle machine."""
SIDE, COPIED, SENT = 384, 1 << 25, 1 << 22
"""Rows of a matrix, bytes of a copy, bytes of a transfer."""
PEERS = 4
_LIMIT = 1.0  # seconds of one transfer


@dataclass(frozen=True)
class NodeCheck:
    """Results. compute: GFLOP/s of one thread; memory, loopback: GB/s; unequal: products that had other bits than the
    first; failed: pairs of peers whose bytes did not arrive."""

    compute: float
    memory: float
    loopback: float
    unequal: int
    failed: tuple[tuple[int, int], ...]
    seconds: float

    @property
    def sound(self) -> bool:
        """True if nothing is wrong for certain."""
        return not self.unequal and not self.failed

    def sentence(self) -> str:
        """Describe it in one sentence."""
        found = [f"{self.unequal} products of equal matrices differ"] if self.unequal else []
        if self.failed:
            both = odd_peers(self.failed)
            named = f" ({', '.join(map(str, both))} in both pairings)" if both else ""
            found.append(f"transfers between {', '.join(f'{a} and {b}' for a, b in self.failed)} failed{named}")
        rates = (
            f"{self.compute:.3g} GFLOP/s a thread, copies of {self.memory:.3g} GB/s, loopback {self.loopback:.3g} GB/s"
        )
        return f"{'; '.join(found)}; {rates}" if found else f"nothing is wrong: {rates}"

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return {**asdict(self), "sound": self.sound, "odd_peers": list(odd_peers(self.failed))}


def check_node(budget: float = BUDGET) -> NodeCheck:
    """Test this machine, in about ``budget`` seconds at most."""
    began = time.monotonic()
    compute, unequal = _compute(budget / 4)
    memory = _memory(budget / 8)
    rates, failed = list[float](), list[tuple[int, int]]()
    for pairing in pairings(PEERS):
        for pair, rate in _transfers(pairing, until=began + budget).items():
            rates.append(rate)
            failed += [pair] if not rate else []
    return NodeCheck(compute, memory, float(np.median(rates)), unequal, tuple(failed), time.monotonic() - began)


def pairings(peers: int) -> list[list[tuple[int, int]]]:
    """Return two ways to pair an even number of peers, in which each has another partner."""
    return [[(i, i + 1) for i in range(0, peers, 2)], [(i, (i + 1) % peers) for i in range(1, peers, 2)]]


def odd_peers(failed: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return the peers that failed with both of their partners."""
    ends = [end for pair in failed for end in pair]
    return tuple(sorted({end for end in ends if ends.count(end) > 1}))


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


def _transfers(pairing: Sequence[tuple[int, int]], until: float) -> dict[tuple[int, int], float]:
    """Send random bytes within all pairs at the same time; return GB/s of each, 0 where they did not arrive."""
    rates = dict.fromkeys(pairing, 0.0)

    def run(pair: tuple[int, int]) -> None:
        try:
            rates[pair] = _transfer(os.urandom(SENT))
        except OSError:  # it failed, which is the result
            rates[pair] = 0.0

    threads = [threading.Thread(target=run, args=(pair,), daemon=True) for pair in pairing]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(_LIMIT, until - time.monotonic()))
    return rates


def _transfer(data: bytes) -> float:
    """Send bytes over loopback; return GB/s, 0 if others arrive."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_LIMIT)
        with socket.create_connection(listener.getsockname(), _LIMIT) as there, listener.accept()[0] as here:
            here.settimeout(_LIMIT)
            sender = threading.Thread(target=_send, args=(there, data), daemon=True)
            began = time.monotonic()
            sender.start()
            got = hashlib.blake2b(digest_size=16)
            left = len(data)
            for part in _received(here, left):
                got.update(part)
                left -= len(part)
            took = time.monotonic() - began
            sender.join(_LIMIT)
    same = got.digest() == hashlib.blake2b(data, digest_size=16).digest()
    return len(data) / took / 1e9 if same and not left else 0.0


def _send(there: socket.socket, data: bytes) -> None:
    try:
        there.sendall(data)
    except OSError:  # the other end sees that bytes are missing
        there.close()


def _received(here: socket.socket, left: int) -> Iterator[bytes]:
    while left and (part := here.recv(1 << 18)):
        left -= len(part)
        yield part


def second_time(replaced: Mapping[int, int], ranks: Sequence[int]) -> bool:
    """Return True if one of these workers was replaced before. replaced: rank -> times."""
    return any(replaced.get(rank, 0) for rank in ranks)
