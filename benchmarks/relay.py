"""Weights by way of a relay: bytes of what has changed beside a whole version, and how long the trainer stands still.

    python benchmarks/relay.py [--quick] [--json PATH]

Rows of part "changes": a model learns, and its bf16 copy goes to a relay after each step (``tilth.roles.relay``). For
each optimizer and learning rate: the words that a step changes, and the bytes of the last publication for a relay that
has the one before it, in three forms:

- mask: ours (``tilth.core.delta``): a bit for each word, and the bits that changed, Huffman-coded.
- places: the place of each changed word in its block of 256, and the bits that changed, deflated.
- planes: all bits that changed and those that did not, the low bytes first, deflated.

share: of the bytes of a whole version. encode_mb_per_s, decode_mb_per_s: MB of the whole version. Every form is decoded
and compared with the version before it counts.

Rows of part "stall": readers, threads of another process, take each version from the relay when they are told of it.
publish_seconds: how long the trainer stands still for its copy, checksums included (readers have the version before);
beside_seconds: the same while all readers read the version before; taken_seconds: until all readers have taken a
version, which a trainer would wait for that sends it to all at once. Medians.

Exit status 1 if a bit differs. --quick: a smaller model, fewer readers.
"""

import itertools
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from driver import benchmark_parser, write_rows
from machine import config_of, random_model
from torch import Tensor

from tilth.cluster.backends.session_dir import SHARED_MEMORY
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.checksum import checksum
from tilth.core.delta import apply_delta, encode_delta
from tilth.core.layout import Mesh
from tilth.models.config import DecoderConfig
from tilth.parallel.reshard import parts_of
from tilth.plan.layout import layouts
from tilth.plan.reshard import relay_pieces
from tilth.roles.relay import Publication, Relay
from tilth.training.engine import TrainEngine, negative_log_likelihood

RATES = (1e-6, 1e-5, 1e-4)
WARM = 4
"""Steps at a usual learning rate before those that are measured, so that the optimizer has moments."""
BEGUN = 0.05
"""Seconds after which a reader that was told of a version reads it."""
LIMIT = 120.0
TRAINER, READER = Mesh.of({}), Mesh(("dp",), (1,), (1,))
fork = multiprocessing.get_context("fork")


# ---- forms of changes ----


def places(before: np.ndarray, now: np.ndarray) -> bytes:
    """Encode the changes by their places."""
    changes = before ^ now
    found = np.flatnonzero(changes)
    counts = np.bincount(found >> 8, minlength=-(-len(now) // 256)).astype(np.uint16)
    planes = changes[found].view(np.uint8).reshape(-1, 2).T
    return zlib.compress(counts.tobytes() + (found & 255).astype(np.uint8).tobytes() + planes.tobytes(), 1)


def placed(coded: bytes, before: np.ndarray) -> np.ndarray:
    """Decode ``places``."""
    data, blocks, now = np.frombuffer(zlib.decompress(coded), np.uint8), -(-len(before) // 256), before.copy()
    counts, rest = data[: 2 * blocks].view(np.uint16), data[2 * blocks :]
    n = int(counts.sum())
    found = np.repeat(np.arange(blocks) << 8, counts) + rest[:n]
    now[found] ^= np.ascontiguousarray(rest[n:].reshape(2, -1).T).view(np.uint16)[:, 0]
    return now


def planes(before: np.ndarray, now: np.ndarray) -> bytes:
    """Encode all bits that changed and those that did not."""
    return zlib.compress(np.ascontiguousarray((before ^ now).view(np.uint8).reshape(-1, 2).T).tobytes(), 1)


def joined(coded: bytes, before: np.ndarray) -> np.ndarray:
    """Decode ``planes``."""
    data = np.frombuffer(zlib.decompress(coded), np.uint8).reshape(2, -1)
    return before ^ np.ascontiguousarray(data.T).view(np.uint16)[:, 0]


def masked(coded: bytes, before: np.ndarray) -> np.ndarray:
    """Decode ours."""
    now = np.empty_like(before)
    apply_delta(coded, before, now)
    return now


FORMS: dict[str, tuple[Callable[..., bytes], Callable[..., np.ndarray]]] = {
    "mask": (encode_delta, masked),
    "places": (places, placed),
    "planes": (planes, joined),
}


# ---- what a step changes ----


def learned(config: DecoderConfig, optimizer: str, lr: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the words of a model's bf16 copy, by tensor, before and after a step at a learning rate."""
    model = random_model(config, torch.float32, "cpu")
    section = OptimizerConfig(name=optimizer, lr=1e-3, schedule="constant", warmup_steps=0)  # type: ignore[arg-type]
    engine = TrainEngine(model, section, total_steps=100, micro_tokens=4096)
    chance, found = np.random.default_rng(0), list[list[np.ndarray]]()
    for step in range(WARM + 3):
        engine.peak_lr = 1e-3 if step < WARM else lr
        tokens = Jagged.of(list(np.cumsum(chance.integers(0, 9, (8, 64)), 1) % config.vocab_size))
        mask = np.tile(np.r_[0, np.ones(63)], 8).astype(np.uint8)
        engine.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())), entropy=False)
        found.append([words(p.detach().bfloat16()) for p in model.parameters()])
    return found[-2], found[-1]


def words(tensor: Tensor) -> np.ndarray:
    """Return the bits of a bf16 tensor, uint16 [n]."""
    return tensor.reshape(-1).view(torch.int16).numpy().view(np.uint16)


def change_rows(config: DecoderConfig) -> Iterator[dict[str, Any]]:
    """Yield a row for each optimizer, learning rate and form."""
    for optimizer in ("adamw", "muon"):
        for lr in RATES:
            before, now = learned(config, optimizer, lr)
            whole = sum(tensor.nbytes for tensor in now)
            changed = sum(int((a != b).sum()) for a, b in zip(before, now)) / sum(map(len, now))
            for form, (encode, decode) in FORMS.items():
                begin = time.perf_counter()
                coded = [encode(a, b) for a, b in zip(before, now)]
                between = time.perf_counter()
                again = [decode(c, a) for c, a in zip(coded, before)]
                end = time.perf_counter()
                size = sum(map(len, coded))
                yield {
                    "part": "changes",
                    "optimizer": optimizer,
                    "lr": lr,
                    "form": form,
                    "changed_share": changed,
                    "bytes": size,
                    "whole_bytes": whole,
                    "share": size / whole,
                    "encode_mb_per_s": whole / 1e6 / (between - begin),
                    "decode_mb_per_s": whole / 1e6 / (end - between),
                    "equal": all(np.array_equal(a, b) for a, b in zip(again, now)),
                }


# ---- how long the trainer stands still ----


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
            "part": "stall",
            "readers": readers,
            "whole_bytes": relay.nbytes,
            "publish_seconds": statistics.median(stalls),
            "beside_seconds": statistics.median(beside),
            "taken_seconds": statistics.median(taken),
            "equal": right,
        }


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
    for row in itertools.chain(change_rows(config), stalls):
        values = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  ".join(values), flush=True)
        rows.append(row)
    write_rows(args.json, rows)
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
