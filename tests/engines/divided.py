"""What runs in each rank for the tests of an engine over several ranks."""

from dataclasses import replace
from typing import Any

import numpy as np

from tests.engines.reference import CONFIG, LORAS, halves, make_model, make_requests
from tests.models.tiny import FAMILIES
from tilth.core.layout import Mesh
from tilth.core.trajectory import Trajectory
from tilth.engines.engine import Engine
from tilth.engines.lockstep import LockStepError
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds, RoundLimits
from tilth.models.config import DecoderConfig
from tilth.parallel.dims import ParallelDims


def config_of(changes: dict[str, Any]) -> DecoderConfig:
    """The model of the tests with these changes; of: that of a family instead."""
    rest = {key: value for key, value in changes.items() if key != "of"}
    return replace(FAMILIES[changes["of"]] if "of" in changes else CONFIG, **rest)


def made(rank: int, tp: int, changes: dict[str, Any], seed: int = 0, ep: int = 1, **options: Any) -> Engine:
    """The engine of this rank with the weights of ``make_model``, given whole."""
    config = config_of(changes)
    dims = ParallelDims.of(Mesh.of({"ep": ep, "tp": tp}), rank)
    engine = Engine(config, EngineOptions(dims=dims, **{"seed": 7, "max_length": 256, **options}))
    engine.update_weights(dict(make_model(config, seed).named_parameters()), version=1)
    return engine


def generated(engine: Engine, requests: int, again: bool) -> list[Trajectory]:
    """What an engine says; again: the second time, led by drafts of the first."""
    asked = make_requests(requests, vocab=engine.config.vocab_size)
    found = engine.generate(asked)
    return engine.generate(asked) if again else found


def spoken(rank: int, tp: int, changes: dict[str, Any], requests: int, **options: Any) -> dict[str, Any]:
    """What the ranks of one engine say, and what each holds."""
    engine = made(rank, tp, changes, **options)
    found = generated(engine, requests, again="draft" in options)
    parameters = dict(engine.named_parameters())
    return {
        "said": found,
        "heads": engine._staging.keys[0].shape[1],
        "elements": sum(p.numel() for p in parameters.values()),
        "stats": (engine.stats().decoded_tokens, engine.stats().preemptions, engine.stats().accepted_tokens),
    }


def adapted(rank: int, tp: int, changes: dict[str, Any]) -> list[Trajectory]:
    """What the ranks of one engine say with the adapters of requests, and without."""
    engine = made(rank, tp, changes)
    for name in ("a", "b"):
        engine.load_adapter(name, LORAS[name], halves(name, engine.config))
    requests = make_requests(9, vocab=engine.config.vocab_size)
    return engine.generate([replace(r, adapter=["", "a", "b"][r.id % 3]) for r in requests])


def aborted(rank: int, tp: int) -> list[tuple[int, str, int]]:
    """A request ends between two rounds, on all ranks."""
    rounds = EngineRounds(made(rank, tp, {}), RoundLimits(64))
    requests = [Request(i, [1, 2], SamplingParams(max_tokens=n)) for i, n in enumerate((4, 50, 50))]
    found = [*rounds.advance(requests).finished, *rounds.advance(aborted=[1]).finished, *rounds.drain()]
    return [(t.id, t.finish, t.completion_length) for t in found]


def diverged(rank: int, tp: int, how: str) -> str:
    """Rank 1 departs in one way; the key of the error that each rank gets."""
    engine = made(rank, tp, {}, seed=rank if how == "weights" else 0)
    requests = make_requests(6)
    if rank == 1:
        if how == "requests":
            requests[2] = Request(2, np.array([9, 9, 9]), requests[2].params)
        if how == "seed":
            engine.seed = 8
        if how == "version":
            engine.update_weights(dict(make_model().named_parameters()), version=2)
    try:
        if how == "abort":
            rounds = EngineRounds(engine)
            rounds.advance(requests)
            rounds.advance(aborted=[rank])
        engine.generate(requests)
    except LockStepError as error:
        return f"{error.key}: {error}"
    return "went on"
