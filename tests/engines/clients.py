"""Engine rooms for tests: a small model behind each backend, and engines that fail on purpose."""

import asyncio
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

from tests.engines.reference import make_engine, make_model
from tilth.cluster.controller.cluster import open_cluster
from tilth.core.errors import WorkerLost
from tilth.engines.client import EngineClient
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams


def small_engine(**options):
    """An engine whose log-probs do not depend on company, bit for bit."""
    return make_engine(make_model(), parity=True, **options)


POISON = 19


class Failing(Engine):
    """An engine that raises at a number of polls, counted over all of them."""

    left: ClassVar[list[Exception]] = []
    after = 3

    def poll(self):
        Failing.after -= 1
        if Failing.after <= 0 and Failing.left:
            raise Failing.left.pop()
        return super().poll()


class Poisoned(Engine):
    """An engine that a token in a prompt breaks."""

    def poll(self):
        if any(POISON in answer.request.prompt for answer in self._scheduler.answers()):
            raise WorkerLost("gone", key="serve.advance")
        return super().poll()


def failing_engine(kind=Failing):
    model = make_model()
    engine = kind(model.config, EngineOptions(seed=7, max_length=256, parity=True))
    engine.update_weights(model.named_parameters(), version=1)
    return engine


@contextmanager
def opened(backend="inline", make=small_engine, most=512, seconds=20.0, **options):
    room = EngineClient(open_cluster(backend, 1), partial(make, **options), most=most)
    try:
        yield room
    finally:
        room.close(seconds)


def request(id, most=20, prompt=(5, 6, 7), **params):
    return Request(id, list(prompt), SamplingParams(max_tokens=most, **params))


def alone(requests, seed=0, **options):
    """Completions of an engine that has one of them at a time."""
    return [small_engine(seed=seed, **options).generate([one])[0].tokens.tolist() for one in requests]


async def gathered(room, requests):
    """Trajectories of requests that come at once, and the tokens of the pieces of each."""

    async def one(request):
        tokens, logprobs = [], []
        async for piece in room.generate(request):
            tokens += piece.tokens.tolist()
            logprobs += piece.logprobs.tolist()
        assert piece.whole.id == request.id
        mine = piece.whole.mask == 1
        assert piece.whole.tokens[mine].tolist() == tokens and piece.whole.logprobs[mine].tolist() == logprobs
        return piece.whole

    return await asyncio.gather(*(one(request) for request in requests))
