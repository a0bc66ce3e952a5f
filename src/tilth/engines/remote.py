"""Engines whose computation a server does: requests in flight, weights, restarts; what every such server shares."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import safetensors.torch
from torch import Tensor

from tilth.core.errors import DataError, ModelError, NonFiniteError, RecipeError
from tilth.core.trajectory import Finish, Trajectory
from tilth.engines.options import EngineOptions
from tilth.engines.protocol import EngineError, GenerationEngine
from tilth.engines.request import Progress, Request, SamplingParams, SequenceState
from tilth.engines.server import Connection, ServerError, ServerLost
from tilth.engines.stats import Stats
from tilth.models.config import DecoderConfig
from tilth.models.hf import stored_tensors
from tilth.plan.packing import portions
from tilth.plan.shape import parameter_shapes
from tilth.process.child import finalize
from tilth.process.restarts import RestartPolicy

_BUCKET = 256 << 20
"""Bytes of weights that travel at a time."""
_RESTARTS = RestartPolicy(fruitless=3)
"""Fruitless is a server that ends before it has generated a token."""
T = TypeVar("T")


class Ask(NamedTuple):
    """A request, or the rest of one, as a server gets it. wire: its name there, which is never used again; draws: seed
    and number of its stream of random numbers."""

    wire: str
    draws: tuple[int, int]
    prompt: list[int]
    max_tokens: int
    params: SamplingParams


class Continuation(NamedTuple):
    """Tokens that a server has drawn since the last look, with log-probs before and after filters. cached: tokens of
    the prompt that it did not have to compute."""

    tokens: list[int]
    logprobs: list[float]
    sampling: list[float]
    cached: int = 0


class EngineServer(Protocol):
    """A running server; every method may raise ServerLost."""

    process: Connection

    def advance(self, cancel: list[str], asks: list[Ask], seconds: float) -> tuple[dict[str, Continuation], int]:
        """Abort and add requests, let it work for a while; return new tokens by ``wire``, and its steps. ServerLost if
        it gives none for these seconds."""

    def forget(self) -> None:
        """Forget prefixes of finished requests."""

    def load(self, buckets: Iterable[bytes]) -> None:
        """Abort all requests, forget prefixes and replace all weights by those of safetensors files, as they come."""

    def sleep(self) -> None:
        """Abort all requests and free the KV cache's memory."""

    def wake_up(self) -> None:
        """Allocate it again."""

    def stop(self) -> None:
        """End it; never raises ServerLost."""
        self.process.stop()

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        return self.process.log_tail()


@dataclass(eq=False)
class Flying:
    """A request in flight. wire: its name at the server; "": the server does not have it."""

    answer: SequenceState
    wire: str = ""


class RemoteEngine(GenerationEngine):
    """Engine that asks a server. The server is started with the first weights and started again when it is lost.

    A new server gets the weights, of which a copy stays here, and what is missing of all requests in flight. Requests
    in flight go on under new weights with KV that is computed again. Stop strings are found here.
    """

    tolerance: float | None = None
    name = ""

    def __init__(self, config: DecoderConfig, options: EngineOptions) -> None:
        for key, wanted in (("train.parity", options.parity), ("train.routing", options.routing)):
            if wanted:
                message = f"{key}: rollout.engine = {self.name} cannot give it with kernels of its own; use native"
                raise RecipeError(message, key=f"{key}.engine")
        self.config, self.tokenizer, self.seed = config, options.tokenizer, options.seed
        self._patience = options.patience
        self.max_length = options.max_length or config.max_positions
        self._special = () if self.tokenizer is None else tuple(self.tokenizer.special())
        self._flying: dict[int, Flying] = {}
        self._cancelled: list[str] = []
        self._weights: list[bytes] = []
        self._server: EngineServer | None = None
        self._asleep = self._stale = False
        self._asked = self._lost = 0
        self._stats = Stats()

    @abstractmethod
    def start_server(self) -> EngineServer:
        """Start a server without weights."""

    # Requests

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Raises DataError, and queues none of them, if one cannot be served."""
        self._submit([SequenceState.start(request) for request in requests])

    def resume(self, trajectory: Trajectory, params: SamplingParams) -> None:
        """Continue a partial trajectory. Raises DataError."""
        self._submit([SequenceState.resume(trajectory, params)])

    def _submit(self, answers: list[SequenceState]) -> None:
        seen = set(self._flying)
        for answer in answers:
            self._check(answer, seen)
            seen.add(answer.request.id)
        for answer in answers:
            answer.begin_watching(self.tokenizer, self._special, self.config.vocab_size, None)
            self._flying[answer.request.id] = Flying(answer)

    def _check(self, answer: SequenceState, seen: set[int]) -> None:
        """Raise DataError for a sequence that cannot be served. seen: ids in flight, and those that come with it."""
        answer.check(self.config.vocab_size, self.max_length, seen, self.tokenizer)

    def _found(self, trajectory: int) -> Flying:
        if trajectory not in self._flying:
            raise DataError(f"trajectory {trajectory} is not in flight", key="trajectory")
        return self._flying[trajectory]

    def abort(self, trajectory: int) -> Trajectory:
        flying = self._found(trajectory)
        self._cancel(flying)
        return self._finish(flying.answer, "aborted")

    def progress(self, seen: Mapping[int, int]) -> dict[int, Progress]:
        found = {}
        for i, answer in ((i, self._flying[i].answer) for i in seen if i in self._flying):
            begin = len(answer.request.prompt) + seen[i]
            if begin < len(answer.tokens):
                found[i] = Progress(answer.tokens[begin:].copy(), answer.logprobs[begin:].copy())
        return found

    def _cancel(self, flying: Flying) -> None:
        if flying.wire:
            self._cancelled.append(flying.wire)
        flying.wire = ""

    def poll(self) -> list[Trajectory]:
        if self._asleep:
            raise EngineError("the engine sleeps; call wake_up() before poll()", key="poll")
        done: list[Trajectory] = []
        if self._flying:
            pieces, steps = self._call(self._advance)
            self._stats.steps += steps
            flying = {one.wire: one for one in self._flying.values()}
            for wire, piece in pieces.items():
                if wire in flying and piece.tokens:
                    self._lost = 0
                    done += self._take(flying[wire], piece)
        return done

    def _advance(self, server: EngineServer) -> tuple[dict[str, Continuation], int]:
        if self._stale:
            server.forget()
            self._stale = False
        asks = [self._ask(one) for one in self._flying.values() if not one.wire]
        cancel, self._cancelled = self._cancelled, []
        return server.advance(cancel, asks, self._patience)

    def _ask(self, flying: Flying) -> Ask:
        answer = flying.answer
        self._asked += 1
        flying.wire = f"{answer.request.id}.{self._asked}"
        count = len(answer.tokens)
        draws = answer.request.draws or (self.seed, answer.request.id)
        return Ask(flying.wire, draws, answer.tokens.tolist(), answer.end - count, answer.request.params)

    def _take(self, flying: Flying, piece: Continuation) -> list[Trajectory]:
        """Append new tokens; return the trajectory if they end it."""
        answer, params, logprobs = flying.answer, flying.answer.request.params, np.asarray(piece.logprobs, np.float32)
        if not np.isfinite(logprobs).all():
            message = f"request {answer.request.id}: logits of the {self.name} engine are not finite"
            raise NonFiniteError(message, key="logits")
        if not len(answer.completion):
            self._stats.cached_tokens += piece.cached
            self._stats.prefilled_tokens += len(answer.tokens) - piece.cached
        count, reason = self._until(answer, piece.tokens)
        answer.stamp(self.version)
        sampling = np.asarray(piece.sampling[:count], np.float32) if params.filtered else None
        answer.append(np.asarray(piece.tokens[:count], np.int64), logprobs[:count], sampling)
        self._stats.decoded_tokens += count
        if reason is None:
            return []
        if count < len(piece.tokens) or reason == "stop":
            self._cancel(flying)
        return [self._finish(answer, reason)]

    def _until(self, answer: SequenceState, tokens: list[int]) -> tuple[int, Finish | None]:
        """Return how many of the new tokens belong to the completion, and why it ends with them, if it does."""
        stops, left = answer.request.params.stop_tokens, answer.end - len(answer.tokens)
        for count, token in enumerate(tokens[:left], 1):
            if answer.watch(token) or token in stops:
                return count, "stop"
        return min(len(tokens), left), "length" if len(tokens) >= left else None

    def _finish(self, answer: SequenceState, reason: Finish) -> Trajectory:
        del self._flying[answer.request.id]
        self._stats.finished += 1
        return answer.finish(reason, self.tokenizer)

    # The server

    def _call(self, method: Callable[[EngineServer], T]) -> T:
        """Call a method of the server, of a new one if it is lost. ServerError if new ones do not help."""
        while True:
            try:
                return method(self._running())
            except ServerLost as lost:
                self._restart(lost)

    def _running(self) -> EngineServer:
        if self._server is None:
            if not self._weights:
                raise EngineError("the engine has no weights; call update_weights() first", key="update_weights")
            self._server = self._started()
            self._server.load(self._weights)
        return self._server

    def _started(self) -> EngineServer:
        server = self.start_server()
        finalize(self, server.stop)
        return server

    def _restart(self, lost: ServerLost) -> None:
        """Give up the server; the next call starts one, which is asked for all that is missing."""
        server, self._server = self._server, None
        self._forget_asked()
        self._lost += 1
        tail = ""
        if server is not None:
            server.stop()
            tail = server.log_tail()
        if not _RESTARTS.again(fruitless=self._lost):
            message = f"rollout.engine = {self.name}: its server ended {self._lost} times ({lost})"
            raise ServerError(f"{message}; the log of the last one:\n{tail}", key="rollout.engine.server")

    def _forget_asked(self) -> None:
        """Note that the server has no requests."""
        self._cancelled.clear()
        for flying in self._flying.values():
            flying.wire = ""

    # Weights and memory

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, bucket by bucket. Raises ModelError unless names and shapes match, after which the
        engine is unusable."""
        self._forget_asked()
        self._weights = []
        stream = self._buckets(weights)
        if self._server is None:
            self._weights.extend(stream)
            self._call(lambda server: None)
        else:
            self._replace(stream)
        self.version = version

    def _replace(self, stream: Iterator[bytes]) -> None:
        def kept() -> Iterator[bytes]:
            for bucket in stream:
                self._weights.append(bucket)
                yield bucket

        assert self._server is not None
        try:
            self._server.load(kept())
        except ServerLost as lost:
            self._weights.extend(stream)
            self._restart(lost)
            self._call(lambda server: None)

    def _buckets(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[bytes]:
        stored = stored_tensors(self.config, self._checked(weights))
        held = ((name, tensor.detach().to("cpu").contiguous().clone()) for name, tensor in stored)
        for some in portions(held, lambda named: named[1].nbytes, _BUCKET):
            yield safetensors.torch.save(dict(some))

    def _checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        missing = parameter_shapes(self.config)
        for name, tensor in weights:
            if name not in missing:
                message = f"weights for the {self.name} engine: {name} is not in the model, or comes twice"
                raise ModelError(message, key=f"{name}.extra")
            if tuple(tensor.shape) != (right := missing.pop(name)):
                message = f"weights for the {self.name} engine: {name} is {tuple(tensor.shape)}; it must be {right}"
                raise ModelError(message, key=f"{name}.shape")
            yield name, tensor
        if missing:
            name = next(iter(missing))
            raise ModelError(f"weights for the {self.name} engine: {name} is missing", key=f"{name}.missing")

    def fingerprint(self) -> dict[str, int]:
        """Return the version, since the server's weights are in the form of its kernels."""
        return {"version": self.version}

    def sleep(self) -> None:
        self._forget_asked()
        self._asleep = True
        if self._server is not None:
            self._call(lambda server: server.sleep())

    def wake_up(self) -> None:
        self._asleep = False
        if self._server is not None:
            self._call(lambda server: server.wake_up())

    def reset_prefix_cache(self) -> None:
        self._stale = True

    def stats(self, reset: bool = False) -> Stats:
        found = self._stats
        if reset:
            self._stats = Stats()
        return found


def parsed_pieces(answer: Any) -> dict[str, Continuation]:
    """Return what a server's answer has about each request."""
    return {wire: Continuation(**piece) for wire, piece in answer.items()}
