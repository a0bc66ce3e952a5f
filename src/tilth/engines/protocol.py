"""The protocol of generation engines, and the one place that constructs them."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from tilth.config.plugins import ENGINES, call_declared, declared, load_plugins
from tilth.config.roles import resolve
from tilth.config.schema import LoraConfig
from tilth.core.checksum import checksums
from tilth.core.errors import PluginError, RecipeError, TilthError
from tilth.core.trajectory import Trajectory
from tilth.engines.options import EngineOptions
from tilth.engines.request import Progress, Request, TextScores
from tilth.engines.rounds import EngineRounds
from tilth.engines.stats import Stats
from tilth.models.config import DecoderConfig


class EngineError(TilthError):
    """An engine was called in an invalid order."""


class GenerationEngine(Protocol):
    """Generate completions of token ids, many at once, with weights that are replaced in place.

    It fits an engine in this process (vLLM's LLMEngine: ``poll`` is its step) and a server (vLLM, SGLang: ``poll``
    waits until a response is there). An engine extends this class; ``make_engine`` constructs it as
    ``Engine(config, options)`` with ``EngineOptions``. One thread calls it. Errors are TilthErrors.
    """

    version: int = 0
    """Version of the weights that generate; tokens are stamped with it (``Trajectory.versions``)."""
    max_length: int
    """Tokens of the longest sequence, prompt and completion together."""
    tolerance: float | None = None
    """How weights are checked after a weight sync. 0: each tensor's bits, by ``fingerprint``. Above 0: each tensor of
    ``named_parameters`` (quantised, say) is at most this far off, as |found - sent| / |sent|. None: the engine cannot
    show its weights, so its log-probs of a few prompts are compared with the policy's after every sync."""

    shares: bool = False
    """True: the policy's shard may lie in the live storage of ``named_parameters``, which weight sync then fills."""

    constrains: bool = False
    """True: it draws only what ``SamplingParams.schema`` allows, and from changed logits (``SamplingParams.biased``);
    otherwise ``check_served`` refuses such requests."""

    adapts: bool = False
    """True: it serves ``Request.adapter``; otherwise ``check_served`` and ``load_adapter`` refuse."""

    syncs_adapters: bool = False
    """True: it takes ``EngineOptions.lora``: A and B are then among its weights (``plan.lora``), and after an update
    by all of them an update may bring A and B alone (``rollout.adapters = "adapter"``)."""

    scores: bool = False
    """True: it reports ``Request.likeliest``, and has ``score`` and ``embed``; otherwise all are refused."""

    encodes: bool = False
    """True: it serves ``Request.media`` of encoders that its model has; otherwise ``check_served`` refuses."""

    reports: bool = True
    """False on ranks of one engine but its first, whose answers and counts stand for all."""

    @abstractmethod
    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Raises DataError, and queues none of them, if one cannot be served, such as one that names an
        adapter which is not there (key "request.adapter"). What ``check_served`` refuses never comes here."""

    @abstractmethod
    def poll(self) -> list[Trajectory]:
        """Do a bounded piece of work, or wait for it, and return what has finished since the last call, in any order.

        ``Trajectory.logprobs`` are float32 [tokens], in nats, of the softmax at ``params.temperature`` before filters
        (at 1 for temperature 0). Raises EngineError while the engine sleeps.
        """

    def run_ahead(self, requests: Sequence[Request]) -> None:
        """Take requests that are likely to come next, in place of those of the last call: an engine may prepare for
        them where it is idle. They are not in flight, and nothing of them is returned."""

    @abstractmethod
    def abort(self, trajectory: int) -> Trajectory:
        """Stop a request now, free its KV and return what there is of it, with finish "aborted". Raises DataError if it
        is not in flight."""

    def progress(self, seen: Mapping[int, int]) -> dict[int, Progress]:
        """Return what requests in flight have chosen behind their first ``seen[id]`` tokens, where there is something;
        none of an engine that shows a completion when it has finished."""
        return {}

    def score(self, texts: Sequence[np.ndarray], likeliest: int = 0, adapter: str = "") -> list[TextScores]:
        """Return the log-probs of each text's own tokens, with ``likeliest`` alternatives; nothing in flight changes.

        Raises DataError for a token or an adapter that is not there, EngineError if the engine does not score.
        """
        raise self._without_scores()

    def embed(self, texts: Sequence[np.ndarray], pooling: str = "last", adapter: str = "") -> list[np.ndarray]:
        """Return the hidden state of each text after the final norm, float32 [hidden] of length 1; in flight nothing
        changes. pooling: "last", of its last token, or "mean", of all.

        Raises DataError for a token or an adapter that is not there, EngineError if the engine does not score.
        """
        raise self._without_scores()

    def _without_scores(self) -> EngineError:
        message = f"{type(self).__name__} reports log-probs of its own tokens only; use the native engine"
        return EngineError(message, key="request.likeliest.engine")

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights by whole tensors, taken one by one, with the names that Hugging Face gives them.

        Requests in flight go on under the new ones. Raises ModelError unless names and shapes match.
        """

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors that generate, by the names of ``update_weights``; none if they cannot be had."""
        return iter(())

    def fingerprint(self) -> Mapping[str, int]:
        """Return numbers that change with the weights: by default the checksum of each tensor by its name."""
        return checksums(self.named_parameters())

    def load_adapter(self, name: str, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> None:
        """Hold an adapter for requests that name it, in place of the one that has the name.

        tensors: A and B of every weight that it changes, by the names of ``tilth.plan.lora``; they are copied. Requests
        in flight go on with the adapter that they began with. Raises ModelError, and changes nothing, for an adapter of
        another base; DataError for an empty name; EngineError if the engine does not adapt.
        """
        raise self._without_adapters(name)

    def remove_adapter(self, name: str) -> None:
        """Refuse this adapter to later requests; those in flight go on with it. Raises DataError for an unknown name,
        EngineError if the engine does not adapt."""
        raise self._without_adapters(name)

    def _without_adapters(self, name: str) -> EngineError:
        message = f"{type(self).__name__} does not serve the adapter {name!r} beside its base; use the native engine"
        return EngineError(message, key="request.adapter.engine")

    def check_served(self, requests: Iterable[Request]) -> None:
        """Raise EngineError for a request that engines of this class serve to nobody; for callers of ``submit``."""
        for request in requests:
            if request.params.schema and not self.constrains:
                message = f"{type(self).__name__} draws no completions by a schema; use the native engine"
                raise EngineError(message, key="request.schema.engine")
            if request.params.biased and not self.constrains:
                message = f"{type(self).__name__} draws from logits as they are; use the native engine"
                raise EngineError(message, key="request.bias.engine")
            if request.likeliest and not self.scores:
                raise self._without_scores()
            if request.adapter and not self.adapts:
                raise self._without_adapters(request.adapter)
            if request.media and not self.encodes:
                message = f"{type(self).__name__} gets tokens alone, no media; use the native engine"
                raise EngineError(message, key="request.media.engine")

    @abstractmethod
    def sleep(self) -> None:
        """Give the KV cache's memory back. Requests in flight go on after ``wake_up``, or EngineError is raised."""

    @abstractmethod
    def wake_up(self) -> None:
        """Allow ``poll`` again; weights are those of before ``sleep``."""

    @abstractmethod
    def stats(self, reset: bool = False) -> Stats:
        """Return counts since the engine was constructed, or since the last ``reset``; 0 for what it does not count."""

    def reset_prefix_cache(self) -> None:
        """Forget prefixes of finished requests."""

    def generate(self, requests: Iterable[Request]) -> list[Trajectory]:
        """Return the trajectories of all requests, in their order, where nothing else is in flight."""
        requests = list(requests)
        found = {t.id: t for t in EngineRounds(self).drain(requests)}
        return [found[r.id] for r in requests]


def make_engine(
    name: str, config: DecoderConfig, options: EngineOptions, *, plugins: Iterable[str] = ()
) -> GenerationEngine:
    """Construct the engine that ``rollout.engine`` names. plugins: those that may declare it.

    Raises RecipeError for an unknown name, PluginError for a declared class that is no engine or cannot be constructed.
    """
    if name not in ENGINES and name not in declared("engine"):
        load_plugins(plugins)
    if name in ENGINES:
        _check_adapters(name, resolve(ENGINES[name]), options)
        return resolve(ENGINES[name])(config, options)
    if (declaration := declared("engine").get(name)) is None:
        known = ", ".join([*ENGINES, *declared("engine")])
        message = f"rollout.engine={name!r} is not an engine; use {known}, or a plugin that declares it"
        raise RecipeError(message, key="rollout.engine")
    if GenerationEngine not in getattr(declaration.value, "__mro__", ()):
        message = f"{declaration.title} is not a subclass of {GenerationEngine.__module__}.{GenerationEngine.__name__}"
        raise PluginError(message, key=f"engine.{name}.class")
    _check_adapters(name, declaration.value, options)
    return call_declared(declaration, config, options)


def _check_adapters(name: str, kind: Any, options: EngineOptions) -> None:
    if options.lora is not None and not kind.syncs_adapters:
        message = f"rollout.adapters = adapter: rollout.engine = {name} takes no adapters of the policy; use merged"
        raise RecipeError(message, key="rollout.adapters.engine")
