"""Count what making process groups asks of the store as ranks grow: groups of members alone, beside ``new_group``.

Each rank makes its group along tp (of 4) and along dp, and sums one number over each. With ``new_group`` every rank
takes part in making every group; with TORCH_DIST_INIT_BARRIER=1, torch's default of old, all ranks also meet in the
store after each group, as in the start-up that MegaScale mends (arXiv 2402.15627, section 5). Here members alone make
a group (``parallel.dims``). Ranks are forked processes on gloo.
"""

import multiprocessing
import os
import tempfile
import time
from collections import Counter
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from driver import benchmark_parser, write_rows

from tilth.core.layout import Mesh
from tilth.parallel.dims import ParallelDims

TP = 4
WAYS = ("members", "new_group", "new_group with barriers")
LIMIT = timedelta(minutes=5)


class CountingStore(dist.Store):
    """A store that counts the operations on another one."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store, self.counts = store, Counter[str]()

    def set(self, key: str, value: Any) -> None:
        """Set a key."""
        self.counts["set"] += 1
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it."""
        self.counts["get"] += 1
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self.counts["add"] += 1
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """True if all keys are set."""
        self.counts["check"] += 1
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = LIMIT) -> None:
        """Wait for keys."""
        self.counts["meet" if any("worker" in str(key) for key in keys) else "wait"] += 1
        self._store.wait(keys, timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Replace a value if it is the expected one."""
        self.counts["set"] += 1
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        self.counts["set"] += 1
        return self._store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of a wait."""
        self._store.set_timeout(timeout)


def one_rank(rank: int, ranks: int, file: str, made_by: str, pipe: Connection) -> None:
    """Make the groups of one rank; send the operations of making and of their first use, and the seconds of both."""
    os.environ["TORCH_DIST_INIT_BARRIER"] = str(int(made_by == "new_group with barriers"))
    store = CountingStore(dist.FileStore(file, ranks))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
    mesh, mine = Mesh(("dp", "tp"), (ranks // TP, TP)), []
    store.counts.clear()
    started = time.perf_counter()
    for name in ("tp", "dp"):
        if made_by == "members":
            mine.append(ParallelDims.of(mesh, rank).group(name))
            continue
        for ranks_of_group in mesh.groups(name):
            group = dist.new_group(list(ranks_of_group))
            mine += [group] if rank in ranks_of_group else []
    made, seconds = Counter(store.counts), time.perf_counter() - started
    for group in mine:
        dist.all_reduce(torch.zeros(1), group=group)
    pipe.send((made, store.counts - made, seconds))
    pipe.recv()  # until all are done


def _answers(ranks: int, file: str, made_by: str) -> list[Any]:
    """Return what the processes of all ranks send."""
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(ranks)]
    processes = [
        fork.Process(target=one_rank, args=(rank, ranks, file, made_by, there), daemon=True)
        for rank, (_, there) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    answers = [here.recv() for here, _ in pipes]
    for here, _ in pipes:
        here.send(None)
    for process in processes:
        process.join()
    return answers


def measure(ranks: int, made_by: str) -> dict[str, Any]:
    """Return the operations of all ranks together."""
    with tempfile.TemporaryDirectory() as folder:
        answers = _answers(ranks, f"{folder}/store", made_by)
    made, used = (sum((answer[i] for answer in answers), Counter[str]()) for i in range(2))
    return {
        "made_by": made_by, "ranks": ranks, "operations": made.total(), "meetings": made["meet"],
        "first_use": used.total(), "seconds": max(answer[2] for answer in answers),
    }  # fmt: skip


def main() -> None:
    """Print and write a row for each number of ranks and each way."""
    parser = benchmark_parser(__doc__, "up to 16 ranks instead of 64")
    chosen = parser.parse_args()
    rows = []
    for ranks in (8, 16) if chosen.quick else (8, 16, 32, 64):
        for made_by in WAYS:
            rows.append(measure(ranks, made_by))
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
            write_rows(chosen.json, rows)


if __name__ == "__main__":
    main()
