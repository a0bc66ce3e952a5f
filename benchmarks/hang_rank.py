"""One process of a job of ``hangs.py``: repeats collectives until its fault, and answers what its recorder holds."""

import ctypes
import itertools
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch._inductor.codecache  # the recorder imports it to name frames: seconds in each process otherwise
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from tilth.cluster.controller.report import in_collective
from tilth.guard.flight_recorder import dump

FOREVER = 600


def work(rank: int, case: Any, steps: int, counts: Any, reached: Any, pipe: Any) -> None:
    """Take part in the job; ends by a signal of the parent."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_GLOO_LAZY_INIT="1")
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo prints why it aborts
    store = _store(rank, case.world, counts)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world, timeout=timedelta(seconds=FOREVER))
    groups = _groups(rank, case)
    dist.barrier()
    state = {"host": ""}
    threading.Thread(target=_answer, args=(pipe, threading.main_thread().ident, state), daemon=True).start()
    try:
        _loop(rank, case, steps, groups, counts, reached)
    except RuntimeError:
        state["host"] = "failed"
    reached[rank] = 1
    time.sleep(FOREVER)


def _store(rank: int, world: int, counts: Any) -> dist.Store:
    """Return a client of the store of rank 0, which writes its port behind the counts."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        counts[world] = store.port
        return store
    while not counts[world]:
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", counts[world], is_master=False)


def _groups(rank: int, case: Any) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return axis -> (group, ranks)."""
    places = list(itertools.product(*(range(n) for n in case.sizes.values())))
    found: dict[str, tuple[Any, tuple[int, ...]]] = {"world": (dist.group.WORLD, tuple(range(case.world)))}
    for i, (axis, size) in enumerate(case.sizes.items()):
        mine = places[rank]
        ranks = tuple(r for r, p in enumerate(places) if (*p[:i], *p[i + 1 :]) == (*mine[:i], *mine[i + 1 :]))
        if size > 1:
            found[axis] = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=axis), ranks
    return found


def _loop(rank: int, case: Any, steps: int, groups: Any, counts: Any, reached: Any) -> None:
    kind, at = case.faults.get(rank, ("", -1))
    for i in range(steps * len(case.program)):
        counts[rank] = i + 1
        axis, op, size = case.program[i % len(case.program)]
        if i == at:
            reached[rank] = 1
            if kind == "missing":
                continue
            size += kind == "shape"
            _fault(kind)
        _call(rank, op, size, *groups[axis])
    counts[rank] = -1


def _fault(kind: str) -> None:
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "sleep":
        time.sleep(FOREVER)
    elif kind == "gil":
        ctypes.PyDLL(None).sleep(FOREVER)  # a call through PyDLL keeps the lock


def _call(rank: int, op: str, size: int, group: Any, ranks: tuple[int, ...]) -> None:
    mine = torch.ones(size)
    if op == "all_reduce":
        dist.all_reduce(mine, group=group)
    elif op == "all_gather":
        dist.all_gather_into_tensor(torch.empty(size * len(ranks)), mine, group=group)
    elif op == "broadcast":
        dist.broadcast(mine, src=ranks[0], group=group)
    else:  # from stage to stage, as a pipeline does; gloo records no send and no receive
        place = ranks.index(rank)
        if place > 0:
            dist.recv(mine, src=ranks[place - 1], group=group)
        if place + 1 < len(ranks):
            dist.send(mine, dst=ranks[place + 1], group=group)


def _answer(pipe: Any, main: int, state: dict[str, str]) -> None:
    """Send the recorder and what the main thread does, when asked."""
    pipe.recv()
    frame, files = sys._current_frames().get(main), list[str]()
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    host = state["host"] or ("waits" if in_collective(files) else "works")
    pipe.send({"dump": dump(), "raw": getattr(c10d, "_dump_fr_trace")(), "host": host})  # noqa: B009 - not in its types
