"""One rank of ``checkpoint.py``: trains a little beside each way of saving, and writes down what it cost."""

import argparse
import ctypes
import gc
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from checkpoint_methods import METHODS, QUARTERS, Method, State
from machine import wait

STEPS = 10


@dataclass
class Found:
    """What one rank saw of one way to save: seconds, one for each repeat, and bytes."""

    same: bool = True
    """Whether what was loaded has the bits of what was saved."""
    prints: list[int] = field(default_factory=list)
    """Checksums of the first quarter of the columns of its rows."""
    first: float = 0.0
    """The first call of all, which makes buffers, plans and processes."""
    calls: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Processor time until then, of all threads and child processes."""
    without: list[float] = field(default_factory=list)
    """Ten steps that save nothing."""
    beside: list[float] = field(default_factory=list)
    """The ten steps from a save on."""
    warm: list[float] = field(default_factory=list)
    """Loading from the page cache."""
    cold: list[float] = field(default_factory=list)
    """Loading from the disk."""
    read: int = 0
    """Bytes that the process read to load (rchar)."""
    stored: int = 0
    """Bytes of the files of a save, of all ranks."""
    peak: int = 0
    """Greatest memory of this process and its children above what it had before the first save."""


class Step:
    """Matrix products on one thread, as many as take about ``seconds`` on the first rank; the same on all. On a GPU
    they are larger."""

    def __init__(self, seconds: float, device: torch.device) -> None:
        size = 384 if device.type == "cpu" else 4096
        self.a, self.b = (torch.full((size, size), 0.5, device=device) for _ in range(2))
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            torch.mm(self.a, self.a, out=self.b)
            wait(device)
            count += 1
        said = [count]
        dist.broadcast_object_list(said)
        self.count = said[0]

    def __call__(self) -> None:
        for _ in range(self.count):
            torch.mm(self.a, self.a, out=self.b)
        wait(self.a.device)


class Trial:
    """One way to save, on this rank."""

    def __init__(self, name: str, state: State, step: Step, folder: Path) -> None:
        self.state, self.step, self.root = state, step, folder
        self.found, self.number = Found(), 0
        settle()
        dist.barrier()
        clear_peaks()
        before = resident()
        self.method: Method = METHODS[name](state)
        for _ in range(2):
            call, _, _ = self.save()
            self.found.first = self.found.first or call
        self.found.peak = peaks() - before

    @property
    def folder(self) -> Path:
        """Where the newest save went."""
        return self.root / f"{self.number}"

    def save(self) -> tuple[float, float, float]:
        """Save and wait, nothing beside it: seconds of the call, until this rank knows it to be durable, of the
        processor until then."""
        self._next()
        dist.barrier()
        began, before = time.perf_counter(), processor()
        self.method.save(self.folder)
        call = time.perf_counter() - began
        self.method.before_update()
        self.method.wait()
        done, used = time.perf_counter() - began, processor() - before
        dist.barrier()
        return call, done, used

    def steps(self, *, saving: bool) -> float:
        """Seconds of ten steps of all ranks, a save at the beginning."""
        if saving:
            self._next()
        dist.barrier()
        began = time.perf_counter()
        if saving:
            self.method.save(self.folder)
        for number in range(STEPS):
            self.step()
            if saving and not number:
                self.method.before_update()
            self.state.update()
            dist.barrier()
        wait(self.state.device)
        took = time.perf_counter() - began
        if saving:
            self.method.wait()
            dist.barrier()
        return took

    def check(self) -> None:
        """Save, change, load: everything must be as it was when it was saved."""
        self._next()
        prints = self.state.prints()
        self.found.prints = self.state.prints(QUARTERS)[0]
        self.method.save(self.folder)
        self.method.before_update()
        self.state.update()
        self.method.wait()
        dist.barrier()
        self.found.stored = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        self.state.zero()
        before = read_so_far()
        self.method.load(self.folder)
        self.found.read = read_so_far() - before
        self.found.same &= self.state.prints() == prints
        dist.barrier()  # the next save removes this one

    def load(self, *, warm: bool) -> float:
        """Seconds to load the newest save into memory that is there."""
        if self.state.rank == 0:
            cached(self.folder, warm)
        self.state.zero()
        dist.barrier()
        return timed(lambda: self.method.load(self.folder), self.state.device)

    def measure(self, rounds: int, pairs: int) -> Found:
        """All of it. The last save, which ``check`` made, stays for who loads it in another layout."""
        found = self.found
        self.check()
        for _ in range(rounds):
            for kept, value in zip((found.calls, found.durable, found.cpu), self.save()):
                kept.append(value)
        for _ in range(pairs):
            found.without.append(self.steps(saving=False))
            found.beside.append(self.steps(saving=True))
        self.check()
        for _ in range(rounds):
            found.warm.append(self.load(warm=True))
            found.cold.append(self.load(warm=False))
        dist.barrier()
        self.method.close()
        return found

    def _next(self) -> None:
        """A new folder; the one before is removed."""
        if self.state.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.number += 1


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds."""
    began = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - began


def cached(folder: Path, warm: bool) -> None:
    """Bring all files of a folder into the page cache, or out of it; they are on disk already."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        if warm:
            while os.read(descriptor, 1 << 22):
                pass
        else:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# Memory and bytes


def settle() -> None:
    """Give back freed memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def processes() -> Iterator[psutil.Process]:
    """This one and what it has started."""
    me = psutil.Process()
    yield me
    yield from me.children(recursive=True)


def status(process: psutil.Process) -> dict[str, int]:
    """Bytes of the kernel's account of a process's memory."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


def resident() -> int:
    """Bytes of this process."""
    return status(psutil.Process())["VmRSS"]


def clear_peaks() -> None:
    """Begin to measure the peak anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peaks() -> int:
    """Greatest resident bytes of this process, and of each child beside what it shares with this one."""
    total = 0
    for number, process in enumerate(processes()):
        with suppress(FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
            found = status(process)
            if "VmHWM" in found:  # a child that is ending has no memory any more
                total += found["VmHWM"] - (found["RssShmem"] + found["RssFile"] if number else 0)
    return total


def processor() -> float:
    """Seconds of the processor that this process and its children have used."""
    used = [process.cpu_times() for process in processes()]
    return sum(times.user + times.system for times in used)


def read_so_far() -> int:
    """Bytes that this process has read from files, also from the page cache."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


# Both kinds of rank


def train(options: argparse.Namespace) -> dict[str, object]:
    """A rank that saves, in all ways one after another."""
    meeting = f"file://{options.folder}/meeting"
    backend = "gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=meeting, rank=options.rank, world_size=options.ranks)
    state = State(options.mb, options.rank, options.ranks, device=options.device)
    step, found = Step(options.step, state.device), {}
    for name in options.methods.split(","):
        state.fill()
        trial = Trial(name, state, step, options.folder / name.replace(" ", "-"))
        found[name] = asdict(trial.measure(options.rounds, options.pairs)) | {"kept": str(trial.folder)}
    dist.barrier()
    return {"nbytes": state.nbytes, "found": found}


def reshard(options: argparse.Namespace) -> dict[str, object]:
    """The first of four ranks of another layout, alone: it loads the first quarter of the columns."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=QUARTERS)
    state = State(options.mb, 0, QUARTERS, rows=False)
    method = METHODS[options.methods](state)
    folder, seconds = Path(options.reshard), []
    for _ in range(options.rounds):
        cached(folder, warm=True)
        state.zero()
        before = read_so_far()
        seconds.append(timed(lambda: method.load(folder), state.device))
        read = read_so_far() - before
    return {"seconds": seconds, "read": read, "asked": method.load(folder), "prints": state.prints(0, options.ranks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--mb", type=float, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--step", type=float, default=0.2, help="seconds")
    parser.add_argument("--methods", required=True)
    parser.add_argument("--device", default="cpu", help="of a rank that saves")
    parser.add_argument("--reshard", default="", help="a checkpoint to load by columns; nothing else is done")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = reshard(options) if options.reshard else train(options)
    (options.folder / f"rank-{options.rank}.json").write_text(json.dumps(found))
    os._exit(0)  # gloo's threads need not be waited for


if __name__ == "__main__":
    main()
