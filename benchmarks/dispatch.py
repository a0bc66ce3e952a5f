"""What one call through the controller costs, and what of a batch goes through the controller.

    python benchmarks/dispatch.py [--quick] [--json PATH]

Microseconds a call, the median: ``round trip`` until the answer is there, ``call returns`` until the controller can go
on while the workers still work (lazy answers). Beside a bare ``multiprocessing.Pipe`` with one process, and a plain
actor call of Ray where it is installed. Bytes are those of the messages between controller and workers, both ways, that
load prompts, generate, score and write trajectories, for completions of 16 and of 65,536 tokens; what arrived on disk
is checked. The roles are Tilth's own loader and writer, and one that speaks without a model.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from driver import benchmark_parser, write_rows

from tilth.cluster.controller.cluster import Cluster, open_cluster
from tilth.cluster.controller.group import WorkerGroup
from tilth.cluster.protocol import transfer
from tilth.cluster.worker.context import Context
from tilth.core.batch import Batch
from tilth.core.layout import Mesh
from tilth.core.trajectory import Trajectory
from tilth.data.prompts import PromptSet
from tilth.data.template import make_template
from tilth.data.tokenizer import Tokenizer
from tilth.data.trajectories import read_trajectories
from tilth.roles.experience import to_batch
from tilth.roles.loader import PromptLoader
from tilth.roles.rollout import ask
from tilth.roles.trajectory_writer import SHOWN, TrajectoryWriter

ROWS = 256
FEW = 64
"""Rows of the step whose bytes are counted."""
SHORT, LONG = 16, 65_536
"""Tokens of a completion."""


class Role:
    """What a policy does, without a model."""

    def __init__(self, context: Context) -> None:
        self.store = context.store

    @transfer("all", "first")
    def nothing(self) -> None:
        """An empty call on all ranks."""

    @transfer("rows", "merge")
    def count(self, batch: Batch) -> dict[int, int]:
        """Rows in, a number out."""
        return {int(batch["id"][0]) if len(batch) else -1: len(batch)}

    @transfer("rows", "rows")
    def speak(self, asked: Batch, tokens: int) -> Batch:
        """Behind each prompt an answer of so many tokens, each its id."""
        prompts = asked.read(self.store, "prompt_tokens")["prompt_tokens"]
        return to_batch([self._said(i, prompts.row(row), tokens) for row, i in enumerate(asked["id"])], self.store)

    def _said(self, id: int, prompt: np.ndarray, tokens: int) -> Trajectory:
        said = np.concatenate([prompt, np.full(tokens, id, np.int64)])
        mask = (np.arange(len(said)) >= len(prompt)).astype(np.uint8)
        logprobs, versions = -mask.astype(np.float32), [(len(prompt), 0)]
        return Trajectory(int(id), int(id), 0, said, mask, logprobs, versions=versions, text="x" * tokens)

    @transfer("rows", "rows")
    def score(self, batch: Batch) -> Batch:
        """Reads all tokens."""
        found = batch.read(self.store, "tokens")["tokens"]
        return batch.with_rows(reward=np.array([found.row(i).mean() for i in range(len(batch))], np.float32))


def role(context: Context) -> Role:
    """The factory."""
    return Role(context)


def loader(context: Context) -> PromptLoader:
    """A prompt for each row."""
    prompts = PromptSet.of([f"{i}+1=" for i in range(ROWS)])
    template = make_template("", Tokenizer.characters(prompts.alphabet()))
    return PromptLoader(prompts, template, 1 << 20, context.store)


def writer(context: Context) -> TrajectoryWriter:
    """Beside the loader."""
    beside: Any = context.roles["loader"]
    return TrajectoryWriter(beside.prompts, context.store)


def median_us(call: Callable[[], object], calls: int, after: Callable[[], object] = lambda: None) -> float:
    """Median microseconds of one call; ``after`` is not timed."""
    took = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        took.append(time.perf_counter() - start)
        after()
    return statistics.median(took[calls // 10 :]) * 1e6


def group_of(cluster: Cluster) -> WorkerGroup:
    """The role on all workers."""
    return cluster.group("role", f"{Path(__file__).stem}:role", {}, Mesh(("dp",), (cluster.workers,)))


def backend(name: str, workers: int, calls: int) -> dict[str, Any]:
    """One row of the table."""
    batch = Batch({"id": np.arange(ROWS), "length": np.full(ROWS, SHORT)})
    with open_cluster(name, workers, timeout=120) as cluster:
        group = group_of(cluster)
        pending: list[Any] = []
        found = {
            "backend": name,
            "workers": workers,
            "round_trip_us": median_us(group.nothing, calls),
            "rows_round_trip_us": median_us(lambda: len(group.count(batch)), calls),
            "rows_call_returns_us": median_us(
                lambda: pending.append(group.count(batch)), calls, lambda: len(pending.pop())
            ),
        }
        found |= {f"bytes_per_row_of_{n}_tokens": bytes_per_row(cluster, group, n) for n in (SHORT, LONG)}
    return found


def bytes_per_row(cluster: Cluster, group: WorkerGroup, tokens: int, rows: int = FEW) -> float:
    """Bytes through the controller for a step without its training, a row."""
    made = {name: cluster.group(name, f"{Path(__file__).stem}:{name}", {}) for name in ("loader", "writer")}
    with tempfile.TemporaryDirectory() as folder, cluster.store.scope():
        made["writer"].open(f"{folder}/trajectories")
        cluster.traffic()
        asked = made["loader"].encode(ask(range(rows), 1, 0))
        made["writer"].add(group.score(group.speak(asked, tokens)), 1)
        made["writer"].commit(1)
        made["writer"].flush(60.0)
        counts = [int(row.values.to_numpy().sum()) for row in read_trajectories(folder)["mask"]]
        assert counts == [tokens] * rows, "the tokens did not arrive"
    return sum(cluster.traffic().values()) / rows


def _answer(pipe: Connection) -> None:
    while (message := pipe.recv()) is not None:
        pipe.send(message)


def pipe_us(calls: int) -> float:
    """A bare pipe: send a small tuple, receive it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_answer, args=(theirs,))
    process.start()

    def ask() -> None:
        ours.send(("role", "nothing", ()))
        ours.recv()

    found = median_us(ask, calls)
    ours.send(None)
    process.join()
    return found


def ray_us(calls: int) -> float:
    """A plain actor call."""
    import ray

    class Plain:
        def nothing(self) -> None:
            pass

    with open_cluster("ray", 1):  # starts Ray; the actor has nothing to do with the cluster's workers
        actor = ray.remote(num_cpus=0)(Plain).remote()
        ray.get(actor.nothing.remote())
        return median_us(lambda: ray.get(actor.nothing.remote()), calls)


def measure(quick: bool) -> list[dict[str, Any]]:
    """All rows, and what they stand beside."""
    calls = 200 if quick else 3000
    rows: list[dict[str, Any]] = [{"beside": "multiprocessing.Pipe", "workers": 1, "round_trip_us": pipe_us(calls)}]
    rows += [backend("inline", 1, calls)]
    rows += [backend("local", workers, calls) for workers in ((1, 2) if quick else (1, 2, 4))]
    if find_spec("ray") is not None:
        rows += [{"beside": "plain Ray actor", "workers": 1, "round_trip_us": ray_us(calls)}]
        rows += [backend("ray", workers, calls) for workers in ((1,) if quick else (1, 2, 4))]
    return rows


def main() -> None:
    """Measure and print."""
    parser = benchmark_parser(__doc__, "fewer calls and workers")
    given = parser.parse_args()
    columns = ("round_trip_us", "rows_round_trip_us", "rows_call_returns_us")
    sizes = tuple(f"bytes_per_row_of_{n}_tokens" for n in (SHORT, LONG))
    print(f"{'':24}{'workers':>8}" + "".join(f"{c:>22}" for c in columns) + "".join(f"{c:>28}" for c in sizes))
    rows = measure(given.quick)
    for row in rows:
        cells = [
            f"{row[c]:>{w}.0f}" if c in row else " " * w
            for c, w in [*((c, 22) for c in columns), *((c, 28) for c in sizes)]
        ]
        print(f"{row.get('backend') or row['beside']:24}{row['workers']:>8}" + "".join(cells))
    for row in rows:
        if sizes[0] in row:
            limit = 1.05 * row[sizes[0]] + SHOWN / FEW  # one answer is shown
            assert row[sizes[1]] < limit, "bytes through the controller grow with the tokens"
    write_rows(given.json, rows)


if __name__ == "__main__":
    main()
