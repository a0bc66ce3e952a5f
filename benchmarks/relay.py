"""Weights by way of a relay: how long the trainer stands still.

    python benchmarks/relay.py [--quick] [--json PATH]

Readers, threads of another process, take each version of a bf16 model from the relay when they are told of it.
publish_seconds: how long the trainer stands still for its copy, checksums included (readers have the version before);
beside_seconds: the same while all readers read the version before; taken_seconds: until all readers have taken a
version, which a trainer would wait for that sends it to all at once. Medians.

Then what relays of other nodes get: AdamW learns random tokens, and the bf16 copy of the weights after a step is sent
as its changes since the step before: by the exclusive or of both, compressed by zstd (``roles.relay_delta``) or by lz4,
or by the places of changed elements in blocks of 2**16, with their values.

Exit status 1 if a bit differs. --quick: a smaller model, fewer readers.
"""

import itertools
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from driver import benchmark_parser, write_rows
from machine import config_of, random_model
from torch import Tensor

from tilth.cluster.backends.session_dir import SHARED_MEMORY
from tilth.core.checksum import checksum
from tilth.core.layout import Mesh
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.inputs import ModelInput
from tilth.parallel.reshard import parts_of
from tilth.plan.layout import layouts
from tilth.plan.reshard import relay_pieces
from tilth.roles import relay_delta
from tilth.roles.relay import Publication, Relay

BEGUN = 0.05
"""Seconds after which a reader that was told of a version reads it."""
LIMIT = 120.0
TRAINER, READER = Mesh.of({}), Mesh(("dp",), (1,), (1,))
fork = multiprocessing.get_context("fork")


class Engine:
    """Storage of a reader's weights."""

    tolerance = 0.0

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self.weights = {name: torch.empty_like(tensor) for name, tensor in like.items()}

    def receive(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all weights."""
        for name, tensor in weights:
            self.weights[name].copy_(tensor)

    def fingerprint(self) -> dict[str, int]:
        """Return the checksum of each tensor."""
        return {name: checksum(tensor) for name, tensor in self.weights.items()}


class Trainer:
    """Weights, and their relay at ``path``."""

    def __init__(self, config: DecoderConfig, path: Path) -> None:
        self.held, self.wanted = layouts(config, TRAINER), layouts(config, READER)
        self.path, self.pieces = path, relay_pieces(TRAINER, self.held, self.wanted)
        self.weights = {n: torch.randn(layout.shape).bfloat16().float() for n, layout in self.held.items()}
        self.number = 0

    def open(self) -> Relay:
        return Relay(self.path, self.pieces, torch.bfloat16)

    def publish(self, relay: Relay) -> float:
        """Publish another version; return the seconds that it took."""
        self.number += 1
        for tensor in self.weights.values():
            tensor.neg_()
        begin = time.perf_counter()
        relay.publish([parts_of(self.weights, self.held, 0)], Publication(self.number, self.number), 0)
        return time.perf_counter() - begin


def read(trainer: Trainer, pipe: Connection) -> None:
    """Take the newest version when told; answer its number, when it was taken, and whether it is right."""
    torch.set_num_threads(1)
    relay, have = trainer.open(), None
    engine = Engine({name: tensor.bfloat16() for name, tensor in trainer.weights.items()})
    while pipe.recv():
        have = relay.pull(engine, trainer.wanted, 1, have)
        assert have is not None
        at, sign = time.perf_counter(), 1 - 2 * (have.number % 2)
        right = all(torch.equal(engine.weights[n], (sign * t).bfloat16()) for n, t in trainer.weights.items())
        pipe.send((have.number, at, right))


def read_all(trainer: Trainer, pipes: Sequence[Connection]) -> None:
    """Run the readers."""
    threads = [threading.Thread(target=read, args=(trainer, pipe)) for pipe in pipes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def stall_row(config: DecoderConfig, readers: int, turns: int) -> dict[str, Any]:
    """Return the row of this many readers."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        trainer = Trainer(config, Path(folder) / "relay")
        pipes = [fork.Pipe() for _ in range(readers)]
        child = fork.Process(target=read_all, args=(trainer, [there for _, there in pipes]), daemon=True)
        child.start()
        relay, right = trainer.open(), True
        stalls, beside, taken = list[float](), list[float](), list[float]()
        for _ in range(turns):
            begin = time.perf_counter()
            stalls.append(trainer.publish(relay))
            tell(pipes)
            found = [answer(pipe, trainer.number) for pipe, _ in pipes]
            taken.append(max(end for end, _ in found) - begin)
            trainer.publish(relay)
            tell(pipes)
            time.sleep(BEGUN)
            beside.append(trainer.publish(relay))
            right = right and all(good for _, good in found + [answer(pipe, trainer.number - 1) for pipe, _ in pipes])
        for pipe, _ in pipes:
            pipe.send(False)
        child.join(LIMIT)
        return {
            "readers": readers,
            "whole_bytes": relay.nbytes,
            "publish_seconds": statistics.median(stalls),
            "beside_seconds": statistics.median(beside),
            "taken_seconds": statistics.median(taken),
            "equal": right,
        }


LEARNING_RATES = (1e-6, 1e-5, 1e-4)
WARM = 5
"""Steps before the one that is measured, so that AdamW's moments are none of a first step."""


def learned(config: DecoderConfig, lr: float, steps: int) -> list[np.ndarray]:
    """Bits of the bf16 copy of all weights after each of the last two steps, uint16."""
    model, chance = random_model(config, torch.float32, "cpu"), torch.Generator().manual_seed(0)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=lr), list[np.ndarray]()
    for step in range(steps):
        ids = torch.randint(config.vocab_size, (256,), generator=chance)
        hidden = model(ModelInput(ids), PackedContext([len(ids)], torch.device("cpu")))
        torch.nn.functional.cross_entropy(model.logits(hidden[:-1]), ids[1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= steps - 2:
            copies = [p.detach().bfloat16().view(torch.int16).flatten() for p in model.parameters()]
            found.append(torch.cat(copies).numpy().view(np.uint16))
    return found


def by_places(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Changes as counts in blocks, places in them, and values."""
    places = np.flatnonzero(new != old)
    counts = np.bincount(places >> 16, minlength=-(-len(new) >> 16)).astype(np.uint32)
    return np.concatenate([part.view(np.uint8) for part in (counts, places.astype(np.uint16), new[places])])


def by_lz4(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """The exclusive or of both, compressed."""
    return np.frombuffer(pyarrow.compress(pyarrow.py_buffer(new ^ old), codec="lz4"), np.uint8)


def by_zstd(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Changes as relays send them."""
    return relay_delta.packed(new.view(np.uint8), old.view(np.uint8))


def delta_rows(config: DecoderConfig) -> Iterable[dict[str, Any]]:
    """A row for each learning rate and encoding."""
    torch.set_num_threads(1)
    for lr in LEARNING_RATES:
        old, new = learned(config, lr, WARM)
        for encode in (by_zstd, by_lz4, by_places):
            begin = time.perf_counter()
            row = encode(new, old)
            seconds = time.perf_counter() - begin
            equal = encode is not by_zstd or unpacked_equal(row, new, old)
            yield {
                "lr": f"{lr:g}",
                "encoding": encode.__name__,
                "whole_bytes": new.nbytes,
                "changed": float(np.mean(new != old)),
                "share": row.nbytes / new.nbytes,
                "pack_seconds": seconds,
                "equal": equal,
            }


def unpacked_equal(row: np.ndarray, new: np.ndarray, old: np.ndarray) -> bool:
    """Whether the changes give the same bits back."""
    return relay_delta.unpacked(row, old.view(np.uint8)).tobytes() == new.tobytes()


def tell(pipes: Sequence[tuple[Connection, Connection]]) -> None:
    """Tell all readers of a version."""
    for pipe, _ in pipes:
        pipe.send(True)


def answer(pipe: Connection, number: int) -> tuple[float, bool]:
    """Return when a reader had taken this version, or a newer one, and whether it is right."""
    if not pipe.poll(LIMIT):
        raise TimeoutError(f"a reader did not take version {number} in {LIMIT:g} s")
    seen, at, right = pipe.recv()
    return at, right and seen >= number


def main() -> int:
    args = benchmark_parser(__doc__, "a smaller model, fewer readers").parse_args()
    torch.set_num_threads(1)
    config = config_of("6M")
    if args.quick:
        config = DecoderConfig(
            vocab_size=512, hidden_size=64, intermediate_size=192, num_layers=2, num_heads=2, max_positions=64
        )
    rows, counts, turns = [], (1, 2) if args.quick else (1, 4, 16), 2 if args.quick else 5
    stalls = (stall_row(config, readers, turns) for readers in counts)
    for row in itertools.chain(stalls, delta_rows(config)):
        values = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  ".join(values), flush=True)
        rows.append(row)
    write_rows(args.json, rows)
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
