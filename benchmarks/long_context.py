"""Long sequences divided over ranks: ring attention beside Ulysses and beside one rank.

    python benchmarks/long_context.py [--quick] [--json PATH] [--lengths 2048,8192] [--steps 3]

A decoder (grouped query attention) learns from one sequence, on processes of this machine (backend local, gloo, one
thread each): as one rank, and with its tokens divided by ``cp``. The columns:

- tokens/s: tokens over the fastest step, forward, backward and optimizer; ranks share the cores of the machine.
- peak: greatest resident memory of a rank during the steps, over what the process had before them (MiB); one rank
  holds all activations, a rank of n about 1/n of them.
- MB/step: bytes that a rank sends in attention for one step, on average over ranks, and what the plan says.

Exit status 1 if bytes differ from the plan. --quick: one short sequence, two steps.
"""

import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from driver import benchmark_parser, write_rows
from layout_parity import fresh_peak, peak
from torch.utils._python_dispatch import TorchDispatchMode
from trial import JoinedRole

from tilth.cluster.controller.cluster import Cluster, open_cluster
from tilth.cluster.protocol import transfer
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.layout import Mesh
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import shard
from tilth.plan.context import ZigZag
from tilth.training.engine import TrainEngine, negative_log_likelihood

CONFIG = DecoderConfig(
    vocab_size=512, hidden_size=128, intermediate_size=344, num_layers=4, num_heads=8, num_kv_heads=2, qk_norm=True
)
ROWS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "ring, cp 2": {"ranks": 2},
    "ulysses, cp 2": {"ranks": 2, "style": "ulysses"},
    "ring, cp 4": {"ranks": 4},
    "ulysses, cp 4": {"ranks": 4, "style": "ulysses"},
}
FP32 = 4


@dataclass(frozen=True)
class Task:
    """Steps on one sequence of this length."""

    length: int
    steps: int
    ranks: int = 1
    style: str = "ring"


@dataclass
class Found:
    """What one rank saw."""

    seconds: float
    """Of the fastest step."""
    peak: float
    """MiB over what the process had."""
    sent: int
    """Bytes of attention in a step."""
    loss: float
    """Of the last step."""


class Trial(JoinedRole):
    """A role that trains a model of its own on each of its ranks."""

    @transfer("all", "all")
    def train(self, task: dict[str, Any]) -> Found:
        """Every rank's view of a run."""
        return run(Task(**task), ParallelDims.of(self.context.mesh, self.context.rank))


def run(task: Task, grid: ParallelDims) -> Found:
    """Initialise, train for the task's steps, and count the bytes of one more."""
    fresh_peak()
    before = peak()
    sharded = shard(lambda: Decoder(CONFIG), grid, cp_style=task.style)  # type: ignore[arg-type]
    sharded.init_(0)
    engine = TrainEngine(sharded, OptimizerConfig(lr=1e-3), total_steps=task.steps, micro_tokens=task.length)
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab_size, task.length)
    tokens, mask = Jagged.of([ids]), np.arange(task.length) > 0
    loss, seconds = negative_log_likelihood(float(mask.sum())), []
    for _ in range(task.steps):
        begin = time.perf_counter()
        found = engine.update(tokens, mask.astype(np.uint8), {}, loss, entropy=False)
        seconds.append(time.perf_counter() - begin)
    top = peak() - before
    with Attention() as attention:
        engine.update(tokens, mask.astype(np.uint8), {}, loss, entropy=False)
    return Found(min(seconds), top, attention.bytes, found.loss)


class Attention(TorchDispatchMode):
    """Inside of it, ``bytes`` adds up what this process sends to single ranks and in all-to-alls."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" and name == "send":
            self.bytes += sum(x.nbytes for x in args[0])
        elif func.namespace == "c10d" and name == "alltoall_base_":
            row, counts = args[1].nbytes // max(len(args[1]), 1), args[4]
            self.bytes += row * (sum(counts) - counts[dist.ProcessGroup.unbox(args[2]).rank()])
        return func(*args, **(kwargs or {}))


def planned(task: Task) -> float:
    """Bytes that each rank sends in the attention of one step, on average."""
    width, ranks = CONFIG.head_dim * FP32, task.ranks
    if task.style == "ring":  # keys and values twice, and their gradients
        tokens = int(ZigZag.of(np.array([task.length]), ranks).sent().sum()) / ranks
        return CONFIG.num_layers * 3 * tokens * 2 * CONFIG.num_kv_heads * width
    heads = 2 * CONFIG.num_heads + 2 * max(CONFIG.num_kv_heads, ranks)
    return CONFIG.num_layers * 2 * heads * width * task.length * (ranks - 1) / ranks**2


def row(cluster: Cluster, name: str, length: int, steps: int) -> dict[str, Any]:
    """One line of the table."""
    task = Task(length, steps, **ROWS[name])
    group = cluster.group(f"{name} {length}", "long_context:Trial", {}, mesh=Mesh(("cp",), (task.ranks,)))
    found = group.train(asdict(task))
    return {
        "tokens": length,
        "layout": name,
        "tokens_per_second": length / max(f.seconds for f in found),
        "peak_mib": max(f.peak for f in found),
        "sent_bytes": sum(f.sent for f in found) / len(found),
        "planned_bytes": planned(task) if task.ranks > 1 else 0.0,
        "loss": found[0].loss,
    }


def main() -> int:
    parser = benchmark_parser(__doc__, "one short sequence, two steps")
    parser.add_argument("--lengths", default="2048,4096,8192", help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    lengths = [1024] if options.quick else [int(n) for n in options.lengths.split(",")]
    names = list(ROWS)[:3] if options.quick else list(ROWS)
    workers = max(ROWS[name].get("ranks", 1) for name in names)
    table: list[dict[str, Any]] = []
    print(f"{'tokens':>7} {'layout':14} tokens/s  peak MiB  MB/step  planned      loss")
    with open_cluster("local", workers) as cluster:
        for length in lengths:
            for name in names:
                found = row(cluster, name, length, 2 if options.quick else options.steps)
                table.append(found)
                sent, plan = found["sent_bytes"] / 1e6, found["planned_bytes"] / 1e6
                print(
                    f"{length:7} {name:14} {found['tokens_per_second']:8.0f} {found['peak_mib']:9.0f} "
                    f"{sent:8.2f} {plan:8.2f} {found['loss']:9.6f}",
                    flush=True,
                )
    write_rows(options.json, table)
    return int(
        any(abs(found["sent_bytes"] - found["planned_bytes"]) > 0.01 * found["planned_bytes"] for found in table)
    )


if __name__ == "__main__":
    sys.exit(main())
