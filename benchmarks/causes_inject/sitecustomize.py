"""Python imports a module of this name when it starts. ``causes.py`` puts this one before its runs: it makes one rank
slow, deals rows unevenly, lets one rank collect garbage, or throttles the network, as ``$CAUSE`` (JSON) says.

Nothing here knows of spans: what is slowed is what they time. A cause is on in every second window of steps.
"""

import functools
import gc
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

CAUSE: Mapping[str, Any] = json.loads(os.environ.get("CAUSE", "{}"))
"""kind: slow, lengths, gc, network or none; rank: whose; window: steps; and what the functions below take from it."""
COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
    "reduce_scatter_single", "broadcast", "send", "recv",
)  # fmt: skip


class State:
    """What this process is doing."""

    rank, step, collective, heap = -1, -1, False, list[object]()
    collected = -1


def on(step: int) -> bool:
    """Whether the cause is at work in a step (from 1 on); never outside of the steps."""
    return step > 0 and (step - 1) // CAUSE["window"] % 2 == 1


def mine(kind: str) -> bool:
    """Whether this rank is struck now."""
    return CAUSE["kind"] == kind and State.rank == CAUSE["rank"] and on(State.step)


def follow(host: ModuleType) -> None:
    """Know the rank and the step of each call."""
    run = host.Executor._run

    def _run(self: Any, call: Any) -> Any:
        State.rank, State.step = self.rank, call.step
        if CAUSE["kind"] == "gc" and self.rank == CAUSE["rank"] and not State.heap:
            State.heap = [[i] for i in range(CAUSE["objects"])]
        return run(self, call)

    host.Executor._run = _run


def slowed(work: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
    """The function, and then what is more: on a slow rank so much processor time again as makes it ``factor`` times.

    seconds: of sleep that stand for the work of these arguments (calibrated sleep: 0 where the work is real)."""

    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        factor = CAUSE["factor"] if mine("slow") else 1.0
        began = time.thread_time()
        found = work(*args, **kwargs)
        if CAUSE["sleep"]:
            time.sleep(factor * seconds(*args))
        elif factor > 1:
            compute(time.thread_time() + (factor - 1) * (time.thread_time() - began))
        return found

    return run


def compute(until: float) -> None:
    """Products like those of a model until this thread has had so much processor time: what else runs on the machine
    feels no other load than that of training (asking for the time in a bare loop slows other processes down)."""
    import torch

    with torch.no_grad():
        a = torch.ones(128, 128)
        while time.thread_time() < until:
            torch.mm(a, a)


class Sleep:
    """Seconds that stand for a pass: a constant, a slope in tokens (``sleep``); twice that backwards."""

    tokens = 0

    @classmethod
    def forward(cls, model: Any, given: Any, *_: Any) -> float:
        """Of a forward pass over a ``ModelInput``; none where nothing is learned from it."""
        cls.tokens = given.ids.shape[0] if model.training else 0
        base, slope = CAUSE["sleep"]
        return base + slope * cls.tokens if cls.tokens else 0.0

    @classmethod
    def backward(cls, *_: Any) -> float:
        """Of the backward pass after it."""
        base, slope = CAUSE["sleep"]
        return 2 * (base + slope * cls.tokens)


def collecting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The first forward pass of a step begins with a full collection, as of a library that tidies up."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if mine("gc") and State.step % CAUSE["every"] == 0 and State.step != State.collected:
            State.collected = State.step
            gc.collect()
        return forward(*args, **kwargs)

    return run


def slow_model(decoder: ModuleType) -> None:
    """Forward passes, of training and of generation."""
    decoder.Decoder.forward = collecting(slowed(decoder.Decoder.forward, Sleep.forward))


def slow_tensor(tensor: ModuleType) -> None:
    """Backward passes."""
    tensor.Tensor.backward = slowed(tensor.Tensor.backward, Sleep.backward)


def slow_optimizer(optim: ModuleType) -> None:
    """Optimizer steps."""
    optim.Optimizers.step = slowed(optim.Optimizers.step, lambda *_: 0.0)


def throttled(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective whose members go on only when its bytes would have come over a link of so many bytes a second."""

    @functools.wraps(collective)
    def run(*args: Any, **kwargs: Any) -> Any:
        inner, State.collective = State.collective, True
        try:
            found = collective(*args, **kwargs)
        finally:
            State.collective = inner
        if CAUSE["kind"] == "network" and not inner and on(State.step):
            first = next(iter((*args, *kwargs.values())))
            time.sleep(CAUSE["latency"] + size(first) / CAUSE["bandwidth"])
        return found

    return run


def size(tensors: Any) -> int:
    """Bytes of a tensor, or of a list of them."""
    return sum(map(size, tensors)) if isinstance(tensors, Sequence) else int(tensors.nbytes)


def throttle(distributed: ModuleType) -> None:
    """All collectives."""
    for name in COLLECTIVES:
        if hasattr(distributed, name):
            setattr(distributed, name, throttled(getattr(distributed, name)))


def deal_unevenly(batch: ModuleType) -> None:
    """As many rows for each worker, but the longest ones (``blur`` 0; 1: about so) for one."""
    import numpy as np

    from tilth.trace.spans import current_step

    fair = batch.divide

    def divide(lengths: Any, groups: Any, parts: int) -> list[np.ndarray]:
        if CAUSE["kind"] != "lengths" or not on(current_step()):
            return fair(lengths, groups, parts)
        place = np.argsort(np.argsort(lengths, kind="stable")) / len(lengths)
        blurred = place + CAUSE["blur"] * np.random.default_rng(current_step()).random(len(lengths))
        order = np.argsort(blurred)
        dealt = [np.sort(rows) for rows in np.array_split(order, parts)]
        dealt[CAUSE["rank"]], dealt[-1] = dealt[-1], dealt[CAUSE["rank"]]
        return dealt

    batch.divide = divide


AFTER = {
    "torch.distributed.distributed_c10d": throttle,
    "torch._tensor": slow_tensor,
    "tilth.cluster.worker.executor": follow,
    "tilth.models.decoder": slow_model,
    "tilth.plan.batch": deal_unevenly,
    "tilth.training.optim": slow_optimizer,
}
"""What is done to a module when it has been imported."""


class Finder(importlib.abc.MetaPathFinder):
    """Lets the modules of AFTER be found as ever, and changes them once they are there."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """As every finder's; None for all other modules."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name in AFTER else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            AFTER[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if CAUSE:
    sys.meta_path.insert(0, Finder())
