"""One rank of ``dataplane.py``, or the reader before it: takes batches from a loader, and computes (sleeps) a step.

Speaks lines of JSON with the driver: "imported", "begin", results of the steps, and stays until its input ends, so that
the memory of all processes can be read.
"""

import json
import os
import resource
import socket
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

CONTEXT = 4096
Sample = tuple[int, np.ndarray, np.ndarray]
"""Index, token ids, mask."""


class Mapped(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Records of several files by index, as each worker of a DataLoader has them. kept: of the first pass on disk."""

    def __init__(self, files: Sequence[str], tokenizer: str, kept: bool) -> None:
        from tilth.data.template import make_template
        from tilth.data.tokenizer import Tokenizer

        self.files, self.kept, self.opened = files, kept, dict[int, Any]()
        self.starts = np.cumsum([0, *map(self.count, range(len(files)))])
        self.template = make_template("", Tokenizer.load(Path(tokenizer)))

    def count(self, number: int) -> int:
        """Return the records of a file."""
        raise NotImplementedError

    def record(self, number: int, row: int) -> dict[str, str]:
        """Return a record of a file."""
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Sample:
        from tilth.data.columns import Prompt

        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        record = self.record(number, index - int(self.starts[number]))
        (made,) = self.template.examples([Prompt(index, record["prompt"], record["answer"])])
        return index, made.tokens, made.mask


class Lines(Mapped):
    """JSON lines: the offsets of all lines, and open files."""

    def count(self, number: int) -> int:
        kept = Path(f"{self.files[number]}.npy")
        if not self.kept:
            with open(self.files[number], "rb") as lines:
                sizes = np.fromiter(map(len, lines), np.int64)
            part = kept.with_suffix(f".{os.getpid()}.npy")
            np.save(part, np.cumsum(sizes) - sizes)
            part.replace(kept)
        self.offsets = [*getattr(self, "offsets", []), np.load(kept, mmap_mode="r")]
        return len(self.offsets[-1])

    def record(self, number: int, row: int) -> dict[str, str]:
        if number not in self.opened:
            self.opened[number] = open(self.files[number], "rb")  # noqa: SIM115 - open as long as the worker
        self.opened[number].seek(int(self.offsets[number][row]))
        found: dict[str, str] = json.loads(self.opened[number].readline())
        return found


class Tables(Mapped):
    """Parquet: open files, and the group of rows that was read last of each."""

    def count(self, number: int) -> int:
        return int(pq.read_metadata(self.files[number]).num_rows)

    def record(self, number: int, row: int) -> dict[str, str]:
        if number not in self.opened:
            self.opened[number] = [pq.ParquetFile(self.files[number]), -1, None]
        file, group, rows = self.opened[number]
        first = 0
        for at in range(file.num_row_groups):
            size = file.metadata.row_group(at).num_rows
            if row < first + size:
                break
            first += size
        if at != group:
            rows = file.read_row_group(at)
            self.opened[number][1:] = at, rows
        found: dict[str, str] = rows.slice(row - first, 1).to_pylist()[0]
        return found


def rival(job: dict[str, Any], kind: type) -> Iterator[list[Sample]]:
    """Batches of this rank from a loader of its own, with ``workers`` processes."""
    order = np.load(job["order"])[:, job["rank"] :: job["ranks"]]
    made = kind(
        (Tables if job["files"][0].endswith(".parquet") else Lines)(job["files"], job["tokenizer"], job["kept"]),
        batch_sampler=[rows.tolist() for rows in order],
        num_workers=job["workers"],
        collate_fn=list,
        prefetch_factor=max(2, job["ahead"] // job["workers"]),
    )
    return iter(made)


def plane(job: dict[str, Any]) -> Iterator[list[Sample]]:
    """Batches of this rank from the loaders that all ranks share: rank 0 asks them, and deals the rows."""
    if job["rank"]:
        yield from received(socket.socket(fileno=job["fds"][0]))
        return
    peers = [socket.socket(fileno=fd) for fd in job["fds"]]
    loaders = shared_loaders(job)
    order, ahead = np.load(job["order"]), job["ahead"]
    for step, rows in enumerate(order):
        found = loaders.take("examples", rows.tolist())
        loaders.ask("examples", order[step + 1 : step + 1 + ahead].ravel().tolist())
        samples = [(int(i), one.rows[0], one.masks[0]) for i, one in zip(rows, found)]
        for rank, peer in enumerate(peers, 1):
            send(peer, samples[rank :: job["ranks"]])
        yield samples[:: job["ranks"]]


def opened(job: dict[str, Any]) -> tuple[Any, Any]:
    """Open the sources as a run does; return their keys and their prompts."""
    from tilth.config.schema import DataConfig, MixtureSource
    from tilth.data.origin import Home
    from tilth.data.prompts import load_source

    parts = tuple(MixtureSource(name=Path(file).stem, source=file) for file in job["files"])
    data = DataConfig(source="", mixture=parts)
    return data, load_source(data, home=Home(job["home"]))


def index(job: dict[str, Any]) -> None:
    """Open the sources, and tell what that took."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory is that of now
    before, processor, began = status("VmHWM"), time.process_time(), time.perf_counter()
    _, prompts = opened(job)
    spent = {"seconds": time.perf_counter() - began, "processor_s": time.process_time() - processor}
    peak = (status("VmHWM") - before) / 1024
    say({**spent, "lines": len(prompts), "fingerprint": prompts.fingerprint(), "peak_mb": peak})


def status(name: str) -> int:
    """Return a figure of this process in KB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def shared_loaders(job: dict[str, Any]) -> Any:
    """Open the sources as a run does, and start the processes that load them."""
    from tilth.data.records import Records, parts_of
    from tilth.data.template import template_names
    from tilth.data.tokenizer import Tokenizer
    from tilth.plan.loaders import place_loaders
    from tilth.roles.source_loader import LoaderSettings
    from tilth.roles.source_loaders import SourceLoaders

    data, prompts = opened(job)
    sources = {part.name: source for part, source in zip(data.sources, parts_of(prompts.source))}
    settings = LoaderSettings(template_names(data), Tokenizer.load(Path(job["tokenizer"])), CONTEXT)
    work = {name: float(source.wholes().mean()) for name, source in sources.items() if isinstance(source, Records)}
    made = SourceLoaders(sources, settings, place_loaders(dict.fromkeys(work, 1), work, job["workers"]))
    if job["limit_mb"]:
        while len(made.pids()) < len(made.plan):
            time.sleep(0.001)
        for pid in made.pids():
            resource.prlimit(pid, resource.RLIMIT_DATA, (job["limit_mb"] << 20,) * 2)
    KEPT.append((made, prompts))
    return made


KEPT: list[Any] = []
"""Loaders that live as long as the process."""


def limit(more: int) -> None:
    """Let this process, and what it forks, have at most so many MB of data more than it has now."""
    has = status("VmData") >> 10
    resource.setrlimit(resource.RLIMIT_DATA, (has + more << 20,) * 2)


def send(peer: socket.socket, samples: list[Sample]) -> None:
    """Send samples: their number, then index, length, ids and mask of each."""
    parts = [struct.pack("<q", len(samples))]
    for index, tokens, mask in samples:
        parts += [struct.pack("<qq", index, len(tokens)), tokens.tobytes(), mask.tobytes()]
    body = b"".join(parts)
    peer.sendall(struct.pack("<q", len(body)) + body)


def received(peer: socket.socket) -> Iterator[list[Sample]]:
    """Yield the samples of each step until the other end closes."""
    with peer.makefile("rb") as stream:
        while head := stream.read(8):
            body = stream.read(struct.unpack("<q", head)[0])
            (count,), at, samples = struct.unpack_from("<q", body), 8, []
            for _ in range(count):
                index, size = struct.unpack_from("<qq", body, at)
                tokens = np.frombuffer(body, np.int64, size, at + 16)
                mask = np.frombuffer(body, np.uint8, size, at + 16 + 8 * size)
                samples.append((index, tokens, mask))
                at += 16 + 9 * size
            yield samples


def digest(sample: Sample) -> int:
    """Checksum of a sample's tokens and mask."""
    return zlib.crc32(sample[2].tobytes(), zlib.crc32(np.asarray(sample[1], np.int64).tobytes()))


def kind_of(contender: str) -> type:
    """The class of a rival's loader."""
    if contender == "torch":
        return torch.utils.data.DataLoader
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader


def main() -> None:
    """Serve the driver."""
    job = json.loads(sys.argv[1])
    for name in ("numpy", "tilth.data.prompts", "tilth.data.template"):  # what all contenders import
        __import__(name)
    if job["contender"] == "index":
        index(job)
        return
    kind = None if job["contender"] == "tilth" else kind_of(job["contender"])
    torch.set_num_threads(1)
    if job["limit_mb"]:
        limit(job["limit_mb"])
    say({"imported": True})
    sys.stdin.readline()
    began = time.perf_counter()
    batches = plane(job) if kind is None else rival(job, kind)
    stalls, seen = [], []
    for step in range(job["steps"]):
        start = time.perf_counter()
        batch = next(batches)
        stalls.append(time.perf_counter() - start)
        seen.append([(index, digest((index, tokens, mask))) for index, tokens, mask in batch])
        if not step:
            say({"first": time.perf_counter() - began})
            sys.stdin.readline()
        time.sleep(job["step_s"])
    say({"stalls": stalls[1:], "seen": seen})
    sys.stdin.readline()  # until the driver has read the memory
    KEPT.clear()


def say(message: dict[str, Any]) -> None:
    """Tell the driver."""
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
