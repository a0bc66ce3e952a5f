"""One rank of a data-parallel loop under torchrun, torchft or NVRx, for ``faults_rivals.py``; needs no Tilth.

    PYTHON faults_loop.py {torchrun,torchft,nvrx} FOLDER RANK RANKS [PORT]

Each step is a line of JSON in FOLDER/steps-PID. A file FOLDER/gil-RANK makes the rank hold the GIL for 30 s, a file
FOLDER/nan-RANK gives it one batch of NaN. Limits of time are each one's defaults, or those of its own example.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

HELD = 30
STEP = 0.05


class Loop:
    """The model, one step of it, and its log."""

    def __init__(self, folder: Path, rank: int) -> None:
        torch.manual_seed(0)
        self.folder, self.rank = folder, rank
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.file = open(folder / f"steps-{os.getpid()}", "a", encoding="utf-8")  # noqa: SIM115 - open for the loop

    def gradients(self) -> list[torch.Tensor]:
        """Compute those of one batch, after what the harness asks for."""
        if self._asked("gil"):
            ctypes.PyDLL(None).sleep(HELD)
        time.sleep(STEP)
        x = torch.randn(4, 8) * (float("nan") if self._asked("nan") else 1.0)
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _asked(self, what: str) -> bool:
        try:
            os.unlink(self.folder / f"{what}-{self.rank}")
        except FileNotFoundError:
            return False
        return True

    def log(self, step: int) -> None:
        """Write a line."""
        finite = all(bool(p.isfinite().all()) for p in self.model.parameters())
        line = {"rank": self.rank, "pid": os.getpid(), "step": step, "time": time.monotonic(), "finite": finite}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


def plain(loop: Loop) -> None:
    """Train without end: gradients are summed, the optimizer steps."""
    for step in range(1_000_000):
        for grad in loop.gradients():
            dist.all_reduce(grad)
        loop.optimizer.step()
        loop.log(step)


def torchrun(folder: Path, rank: int, ranks: int, port: int) -> None:
    """Run under ``torchrun``: a failure starts all ranks anew, without a state. port: limit of a collective in s."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=port))
    plain(Loop(folder, dist.get_rank()))


def torchft(folder: Path, rank: int, ranks: int, port: int) -> None:
    """Run one replica of torchft, with the timeouts of its train_ddp.py (5 s for a collective, 30 s for the rest)."""
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    loop = Loop(folder, rank)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    short, long = timedelta(seconds=5), timedelta(seconds=30)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=short), load_state_dict=loop.model.load_state_dict,
        state_dict=loop.model.state_dict, min_replica_size=1, timeout=long, quorum_timeout=long, connect_timeout=long,
        rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, replica_id=f"replica-{rank}-",
        lighthouse_addr=f"http://127.0.0.1:{port}", hostname="127.0.0.1",
    )  # fmt: skip
    while True:
        manager.start_quorum()
        for work in [manager.allreduce(grad) for grad in loop.gradients()]:
            work.wait()
        if manager.should_commit():
            loop.optimizer.step()
            loop.log(manager.current_step())


def nvrx(folder: Path, rank: int, ranks: int, port: int) -> None:
    """Run under NVRx's in-process restart, with its defaults: a failure calls the function again without the rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    import nvidia_resiliency_ext.inprocess as inprocess

    made = list[Loop]()

    def train(call: inprocess.CallWrapper | None = None) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        own_store = dist.PrefixStore(str(call.iteration if call else 0), store)
        own, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=own_store, rank=own, world_size=size)
        if not made:
            made.append(Loop(folder, rank))
        try:
            plain(made[0])
        finally:
            dist.destroy_process_group()  # or peers of gloo wait for this rank until they are killed

    inprocess.Wrapper(store_kwargs={"host_name": "127.0.0.1", "port": port})(train)()


WAYS: dict[str, Callable[[Path, int, int, int], None]] = {"torchrun": torchrun, "torchft": torchft, "nvrx": nvrx}

if __name__ == "__main__":
    torch.set_num_threads(1)
    WAYS[sys.argv[1]](Path(sys.argv[2]), *(int(word) for word in [*sys.argv[3:], "0"][:3]))
