"""Roles that the tests of every backend put on workers."""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np

from tilth.cluster.protocol import control, transfer
from tilth.cluster.worker.context import Context
from tilth.config.plugins import load_plugins
from tilth.core.batch import Batch, Column, Handle, Jagged
from tilth.core.errors import DataError, TilthError
from tilth.trace.spans import span

HERE = "tests.cluster.workers"
LONG = 30_000
"""Tokens of an answer that takes long."""


class Odd(TilthError):
    """An error of another kind, to come up as itself."""


class Metric:
    """A mergeable value, as tilth.rl has them."""

    def __init__(self, total: float, count: float) -> None:
        self.total, self.count = total, count

    def merge(self, other: "Metric") -> "Metric":
        return Metric(self.total + other.total, self.count + other.count)


class Echo:
    """Does nothing but what the protocols promise."""

    def __init__(self, context: Context, scale: Callable[[float], float]) -> None:
        self.context, self.scale, self.calls = context, scale, []

    @transfer("rows", "rows")
    def same(self, batch: Batch) -> Batch:
        return batch

    @transfer("rows", "rows")
    def scaled(self, batch: Batch) -> Batch:
        return Batch({"y": np.array([self.scale(x) for x in batch["x"].tolist()])})

    @transfer("rows", "rows")
    def backwards(self, batch: Batch) -> Batch:
        return batch.select(np.arange(len(batch))[::-1])

    @transfer("rows", "all")
    def seen(self, batch: Batch, plain: int = 0) -> dict:
        return {k: v.tolist() for k, v in batch.rows.items()} | {"rank": self.context.rank, "plain": plain}

    @transfer("rows", "merge")
    def total(self, batch: Batch) -> dict[str, Metric]:
        return {"x": Metric(float(batch["x"].sum()), len(batch))}

    @transfer("rows", "merge")
    def unmergeable(self, batch: Batch) -> dict[str, int]:
        return {"rows": len(batch)} if len(batch) else {}

    @transfer("each", "all")
    def each(self, item: object, plain: int = 0) -> tuple:
        return self.context.rank, item, plain

    @transfer("all", "first")
    def about(self) -> dict:
        c = self.context
        return {"role": c.role, "mesh": c.mesh, "rank": c.rank, "workers": c.workers, "init_method": c.init_method,
                "timeout": c.timeout, "roles": sorted(c.roles), "generation": c.generation}  # fmt: skip

    @transfer("all", "all")
    def pid(self) -> int:
        return os.getpid()

    @transfer("all", "all")
    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    @transfer("rows", "rows")
    def think(self, batch: Batch) -> Batch:
        """Ragged payload of `length` tokens a row: id, id + 1, ..."""
        with span("think", tokens=int(batch["length"].sum())):
            rows = [np.arange(i, i + n) for i, n in zip(batch["id"].tolist(), batch["length"].tolist())]
            data = Jagged.of(rows) if rows else Jagged(np.zeros(0, np.int64), np.zeros(1, np.int64))
            return batch.with_payload(tokens=Column.whole(self.context.store.put("tokens", data), len(batch)))

    @transfer("rows", "rows")
    def sums(self, batch: Batch) -> Batch:
        found = batch.read(self.context.store, "tokens")["tokens"]
        return batch.with_rows(sum=np.array([found.row(i).sum() for i in range(len(batch))], np.int64))

    @transfer("all", "first")
    def put(self, values: list[int]) -> Handle:
        return self.context.store.put("loose", Jagged.of([np.array(values)]))

    @transfer("all", "first")
    def get(self, handle: Handle) -> list[int]:
        return self.context.store.get(handle).values.tolist()

    @transfer("all", "merge")
    def timed(self, name: str, seconds: float) -> dict:
        """When it ran, on the machine's one monotonic clock."""
        began = time.monotonic()
        time.sleep(seconds)
        return {(name, self.context.rank): (began, time.monotonic())}

    @transfer("all", "merge")
    def until(self, name: str, path: str) -> dict:
        """Wait until this file is there."""
        while not Path(path).exists():
            time.sleep(0.01)
        return {(name, self.context.rank): True}

    @transfer("all", "all")
    def twice(self, values: object) -> list:
        """An answer of twice the size."""
        return [values, pickle.loads(pickle.dumps(values))]

    @transfer("all", "first")
    def generator(self) -> object:
        return (x for x in ())


def generating(context: Context) -> object:
    """The rollout role, with answers of thousands of tokens."""
    from tests.roles import small
    from tilth.config.schema import RolloutConfig
    from tilth.engines.engine import Engine
    from tilth.engines.options import EngineOptions
    from tilth.models.decoder import Decoder
    from tilth.roles.rollout import RolloutWorker

    model = Decoder(small.config())
    model.init_weights_(1)
    config = replace(small.config(), max_positions=LONG + 16)
    engine = Engine(config, EngineOptions(tokenizer=small.TOKENIZER, seed=1, max_rows=8))
    engine.update_weights(model.named_parameters(), version=7)
    template = copy(small.TEMPLATE)
    template.stops = ()
    return RolloutWorker(engine, template, RolloutConfig(max_tokens=LONG), context.store)


def loading(context: Context) -> object:
    """The loader role, which gives rows the tokens of their prompts."""
    from tests.roles import small

    return small.loader(context.store)


class Faulty:
    """Goes wrong in every way, on one of its ranks."""

    def __init__(self, context: Context, closed: str) -> None:
        self.context, self.closed = context, closed

    def _other(self, rank: int) -> bool:
        return self.context.rank != rank

    @transfer("all", "merge")
    def kill(self, rank: int, wait: float = 0.0) -> dict:
        if not self._other(rank):
            time.sleep(wait)
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    @transfer("all", "merge")
    def leave(self, rank: int) -> dict:
        if not self._other(rank):
            print("the last words of a worker", flush=True)
            os._exit(3)
        return {}

    @transfer("all", "merge")
    def stop(self, rank: int) -> dict:
        if not self._other(rank):
            os.kill(os.getpid(), signal.SIGSTOP)
        return {}

    @transfer("all", "merge")
    def hold(self, rank: int, seconds: int) -> dict:
        """A C call that keeps the GIL."""
        if not self._other(rank):
            ctypes.PyDLL(None).sleep(seconds)
        return {}

    @transfer("all", "first")
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @transfer("all", "first")
    def paced(self, seconds: float) -> None:
        for _ in range(2):
            with span("forward"):
                time.sleep(seconds)

    @transfer("all", "first", patient=True)
    def wait_for_others(self, how: str, seconds: float) -> str:
        """What a call that may take long does: a read that never ends, a loop, a slow read, a sleep."""
        ours, theirs = os.pipe()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if how == "read":
                os.write(theirs, b"x")
            if how != "loop":
                os.read(ours, 1) if how in ("read", "block") else time.sleep(seconds)
                time.sleep(0.1)
        return how

    @transfer("all", "merge")
    def fail(self, rank: int, kind: str) -> dict:
        if not self._other(rank):
            if kind in ("data", "odd"):
                raise {"data": DataError, "odd": Odd}[kind]("it is wrong", key=f"faulty.{kind}")
            raise {"value": ValueError, "exit": SystemExit}[kind]("it is wrong")
        return {}

    @transfer("all", "merge")
    def meet(self, limit: float = 0.0) -> dict:
        """Join the process group. limit: seconds of a collective, after a first one (gloo tries five times to connect
        to a peer, each as long as the limit); 0: those of a call, as of every role."""
        import torch.distributed as dist  # takes seconds: only where it is needed

        c, seconds = self.context, timedelta(seconds=limit or self.context.timeout)
        dist.init_process_group("gloo", init_method=c.init_method, rank=c.rank, world_size=c.workers, timeout=seconds)
        if limit:
            dist.barrier()
        return {}

    @transfer("all", "merge")
    def reduce(self, absent: int, how: str) -> dict:
        """All ranks sum; one does not come: it raises, dies, is stopped, sleeps or holds the GIL."""
        import torch
        import torch.distributed as dist

        if not self._other(absent):
            if how == "raise":
                raise DataError("no collective without data", key="faulty.data")
            if how in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            time.sleep(600) if how == "sleep" else ctypes.PyDLL(None).sleep(600)
        total = torch.ones(1)
        dist.all_reduce(total)
        return {"total": float(total)}

    @transfer("all", "all")
    def child(self, folder: str) -> int:
        """A process in a session of its own, as a pool of rewards has."""
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid

    @control
    def status(self) -> str:
        return "here"

    def close(self) -> None:
        if self.closed:
            Path(self.closed, f"closed-{self.context.role}-{self.context.rank}").touch()


def echo(context: Context, scale: Callable[[float], float] = float) -> Echo:
    with span("made"):
        return Echo(context, scale)


def faulty(context: Context, closed: str = "") -> Faulty:
    """closed: a folder in which each rank leaves a file when it is closed."""
    return Faulty(context, closed)


def of_plugin(context: Context, path: str, name: str) -> object:
    """A role that a plugin declares, or one of its classes."""
    (module,) = load_plugins([path])
    return getattr(module, name)(context)


def broken(context: Context) -> None:
    raise DataError("corpus.txt: empty", key="corpus.txt")
