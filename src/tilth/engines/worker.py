"""Worker with an engine that takes and answers requests of many clients in rounds."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tilth.cluster.protocol import control, transfer
from tilth.cluster.worker.context import Context
from tilth.config.schema import LoraConfig
from tilth.engines.protocol import GenerationEngine
from tilth.engines.request import Request, TextScores
from tilth.engines.rounds import EngineRounds, Round, RoundLimits

MakeEngine = Callable[[], GenerationEngine]
"""Constructs the engine in the worker, weights and all; pickled by cloudpickle."""


class Abilities(NamedTuple):
    """Properties of an engine that decide which requests it can serve."""

    max_length: int
    constrains: bool
    adapts: bool
    scores: bool


LIMITS = RoundLimits(steps=16, seconds=0.01)
"""A round costs messages and threads about 3 ms, a step of one request 1 ms or more, and new requests wait for it."""


class EngineWorker:
    """A generation engine that is driven in rounds."""

    def __init__(self, make: MakeEngine) -> None:
        self.engine = make()
        self.rounds = EngineRounds(self.engine, LIMITS)

    @transfer(split="all", gather="first", patient=True)
    def advance(self, new: Sequence[Request], aborted: Iterable[int]) -> Round:
        """Take and end requests, then do a bounded piece of work on those in flight."""
        return self.rounds.advance(new, aborted)._replace(progress=self.rounds.progress())

    @transfer(split="all", gather="first")
    def abilities(self) -> Abilities:
        """Return what the engine can serve."""
        one = self.engine
        return Abilities(one.max_length, one.constrains, one.adapts, one.scores)

    @transfer(split="all", gather="first", patient=True)
    def score_texts(self, texts: Sequence[Sequence[int]], likeliest: int, adapter: str) -> list[TextScores]:
        """Return log-probs of texts, as ``GenerationEngine.score``."""
        return self.engine.score([np.asarray(text, np.int64) for text in texts], likeliest, adapter)

    @transfer(split="all", gather="first", patient=True)
    def embed_texts(self, texts: Sequence[Sequence[int]], pooling: str, adapter: str) -> list[np.ndarray]:
        """Return embeddings of texts, as ``GenerationEngine.embed``."""
        return self.engine.embed([np.asarray(text, np.int64) for text in texts], pooling, adapter)

    @transfer(split="all", gather="first")
    def load_adapter(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
        """Hold an adapter, as ``GenerationEngine.load_adapter``."""
        self.engine.load_adapter(name, lora, tensors)

    @transfer(split="all", gather="first")
    def remove_adapter(self, name: str) -> None:
        """Forget an adapter, as ``GenerationEngine.remove_adapter``."""
        self.engine.remove_adapter(name)

    @control
    def status(self) -> dict[str, Any]:
        """Return the engine's counts (``Stats.dump``), the number of requests ``in_flight`` and the process."""
        return {"in_flight": len(self.rounds), "pid": os.getpid(), **self.engine.stats().dump()}


def engine_worker(context: Context, make: MakeEngine) -> EngineWorker:
    """Construct the role "serve"."""
    return EngineWorker(make)
