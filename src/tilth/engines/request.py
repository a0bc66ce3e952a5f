"""Requests to an engine, and the state of a sequence in flight."""

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tilth.config.parts import TINY
from tilth.core.errors import DataError
from tilth.core.media import Media, check_media, media_keys
from tilth.core.trajectory import Finish, Likeliest, Segment, Trajectory
from tilth.engines.adapters import LoadedAdapter
from tilth.engines.blocks import BlockTable
from tilth.engines.cache import Slab
from tilth.engines.grammar import Grammar, Grammars
from tilth.engines.stops import Decodes, StopStrings, completion_text


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stop conditions of a completion. Raises DataError for impossible values.

    Filters act in this order on the softmax at ``temperature``: the ``top_k`` most likely (0: all), of these the
    smallest set with mass ``top_p``, of these the tokens at least ``min_p`` times as likely as the first. A token that
    ties with the last one kept is kept too. ``temperature`` 0 takes the most likely token, with log-probs at
    temperature 1.

    A completion ends with any of ``stop_tokens`` (the end token belongs to it), when its text contains one of the
    strings ``stop`` (all its tokens are kept, ``Trajectory.text`` ends before the string), or after ``max_tokens``.
    ``stop`` may contain special tokens, although texts do not.

    Before all filters ``logit_bias`` (pairs of token and addend), ``presence_penalty`` and ``frequency_penalty`` change
    the logits, and no end or stop string counts before ``min_tokens``.

    schema: text of a JSON schema. Only tokens with which the text can become JSON of this schema are drawn, a filter
    before the others, and the completion ends where nothing can follow. It may be a grammar too (``engines.grammar``).
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    schema: str = ""
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        _check(self.max_tokens > 0, "max_tokens", self.max_tokens, "positive")
        _check(
            self.temperature == 0 or self.temperature >= TINY, "temperature", self.temperature, f"0, or from {TINY} on"
        )
        _check(0 <= self.top_k < 2**63, "top_k", self.top_k, "at least 0, and an int64")
        _check(all(0 <= one < 2**63 for one in self.stop_tokens), "stop_tokens", self.stop_tokens, "token ids")
        _check(TINY <= self.top_p <= 1, "top_p", self.top_p, f"from {TINY} to 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _check(
            not isinstance(self.stop, str) and all(self.stop),
            "stop",
            self.stop,
            "a tuple of strings that are not empty",
        )
        most = 0 if self.schema else self.max_tokens
        _check(0 <= self.min_tokens <= most, "min_tokens", self.min_tokens, "from 0 to max_tokens; 0 with a schema")

    @property
    def biased(self) -> bool:
        """True if it changes logits before anything is drawn."""
        return bool(self.logit_bias or self.presence_penalty or self.frequency_penalty or self.min_tokens)

    @property
    def filtered(self) -> bool:
        """True if filters change the softmax at ``temperature``."""
        return (
            bool(self.schema)
            or self.biased
            or (self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0))
        )


def _check(good: bool, name: str, value: object, right: str) -> None:
    if not good:
        raise DataError(f"sampling {name} is {value!r}; it must be {right}", key=name)


class LogitBias:
    """Addends of the logits of one completion, as OpenAI and vLLM define them.

    To each token its ``logit_bias``, minus ``presence_penalty`` if the completion has it, minus ``frequency_penalty``
    for each time; minus infinity to ``stop_tokens`` while the completion has fewer than ``min_tokens``.
    """

    def __init__(self, params: SamplingParams, vocabulary: int) -> None:
        self._params, self._left = params, params.min_tokens
        self._fixed, self._counts = np.zeros(vocabulary, np.float32), np.zeros(vocabulary, np.float32)
        for token, value in params.logit_bias:
            self._fixed[token] = value

    def push(self, ids: Iterable[int]) -> bool:
        """Add the next tokens; False, since no completion ends by them."""
        for id in ids:
            self._counts[id] += 1
            self._left -= 1
        return False

    def change(self) -> np.ndarray:
        """Return what is added to the logits at the sampling temperature, float32 [vocabulary]."""
        p = self._params
        found = self._fixed - p.frequency_penalty * self._counts - p.presence_penalty * (self._counts > 0)
        found = (found / (p.temperature or 1.0)).astype(np.float32)
        if self._left > 0:
            found[list(p.stop_tokens)] = -np.inf
        return found


@dataclass(frozen=True)
class Request:
    """Request for one completion. Neighbouring samples of one group share the computation of their prompt."""

    id: int
    """Unique among requests in flight; selects the random numbers and becomes ``Trajectory.id``."""
    prompt: Sequence[int] | np.ndarray
    """Token ids, at least one."""
    params: SamplingParams = SamplingParams()
    group: int = 0
    prompt_index: int = 0
    """Index of the prompt in its dataset; becomes ``Trajectory.prompt``."""
    info: dict[str, Any] = field(default_factory=dict)
    keeps: bool = False
    """True: a later request begins with its tokens, so an engine may keep their KV."""
    adapter: str = ""
    """Name of an adapter that the engine holds (``GenerationEngine.load_adapter``); empty: its weights as they are."""
    likeliest: int = 0
    """Number of alternatives of each token to report (``Trajectory.likeliest``), at the sampling temperature before
    filters, if the engine does (``GenerationEngine.scores``)."""
    draws: tuple[int, int] | None = None
    """Seed and number of the stream whose random numbers choose its tokens; None: the engine's seed and its id."""
    media: Media = ()
    """Items in the prompt, if the engine reads media (``GenerationEngine.encodes``)."""

    @cached_property
    def prompt_keys(self) -> np.ndarray:
        """Ids by which a cache knows the prompt: ``media_keys``."""
        return media_keys(np.asarray(self.prompt, np.int64), self.media)


class Progress(NamedTuple):
    """Newest tokens of a request in flight, int64 [n], with their log-probs, float32 [n], and alternatives if it asks
    for them; of an engine that can resume it, also what the columns of its ``Trajectory`` have."""

    tokens: np.ndarray
    logprobs: np.ndarray
    likeliest: Likeliest | None = None
    sampling: np.ndarray | None = None
    """float32 [n], of ``sampling_logprobs``; None without a filter."""
    versions: Sequence[tuple[int, int]] = ()
    """Of all its tokens so far."""


class TextScores(NamedTuple):
    """Log-probs of a text's own tokens but the first at temperature 1, float32 [T - 1], with alternatives of each."""

    logprobs: np.ndarray
    likeliest: Likeliest


@dataclass(eq=False, slots=True)
class SequenceState:
    """A trajectory in flight, with columns of ``Trajectory``; while it decodes, its newest tokens are in its lane."""

    request: Request
    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    sampling: np.ndarray | None
    segments: list[Segment]
    """Segments before the current one."""
    versions: list[tuple[int, int]]
    end: int
    """Length in tokens at which it ends with finish "length"."""
    stops: StopStrings | None = None
    grammar: Grammar | None = None
    bias: LogitBias | None = None
    table: BlockTable = field(default_factory=BlockTable)
    order: int = -1
    """Order of admission; the highest is preempted first."""
    stale: bool = False
    """True if its KV was computed with earlier weights."""
    routing: np.ndarray | None = None
    """Experts of its first tokens, ``Trajectory.routing``."""
    adapter: LoadedAdapter | None = None
    ahead: Request | None = None
    """What a row of run-ahead answers; its own request is for all behind the first token."""
    likeliest: list[Likeliest] = field(default_factory=list)
    """Alternatives of each of its tokens, if its request asks for them."""

    @classmethod
    def start(cls, request: Request) -> "SequenceState":
        """Begin with the prompt."""
        tokens = np.asarray(request.prompt, np.int64)
        n = len(tokens)
        sampling = np.zeros(n, np.float32) if request.params.filtered else None
        end = n + request.params.max_tokens
        segments = [Segment("user", 0)]
        return cls(request, tokens, np.zeros(n, np.uint8), np.zeros(n, np.float32), sampling, segments, [], end)

    @classmethod
    def resume(cls, t: Trajectory, params: SamplingParams, adapter: str = "") -> "SequenceState":
        """Continue a partial trajectory: its last assistant segment, or a new one after another role.

        ``max_tokens`` includes the tokens that the segment already has. Raises DataError if these are all.
        """
        *before, last = t.segments
        before, begin = (before, last.start) if last.role == "assistant" else (t.segments, len(t.tokens))
        prompt = t.tokens[:begin]
        request = Request(t.id, prompt, params, t.group, t.prompt, t.info, adapter=adapter, media=t.media)
        sampling = t.sampling_logprobs
        if params.filtered and sampling is None:
            sampling = t.logprobs
        end = begin + params.max_tokens
        if end <= len(t.tokens):
            message = f"trajectory {t.id} already has max_tokens={params.max_tokens} tokens"
            raise DataError(message, key="params.max_tokens")
        return cls(request, t.tokens, t.mask, t.logprobs, sampling, list(before), list(t.versions), end)

    @property
    def keys(self) -> np.ndarray:
        """Ids by which the cache knows its tokens, int64 [n]: other media in a prompt, other ids."""
        r = self.request
        return np.concatenate([r.prompt_keys, self.completion]) if r.media else self.tokens

    def check(self, vocabulary: int, longest: int, known: Container[int], tokenizer: Decodes | None) -> None:
        """Raise DataError for a sequence that no engine of this vocabulary, context and tokenizer serves.

        known: ids in flight. ``max_tokens`` is never reduced: a prompt whose longest completion exceeds the context is
        refused.
        """
        what, count = f"request {self.request.id}", len(self.tokens)
        if self.request.id in known:
            raise DataError(f"{what}: another request in flight has this id; ids must be unique", key="request.id")
        if not count:
            raise DataError(f"{what}: the prompt is empty; it must have at least one token", key="request.prompt")
        check_media(self.request.media, len(self.request.prompt), what)
        if self.tokens.min() < 0 or self.tokens.max() >= vocabulary:
            message = f"{what}: a token id is outside the vocabulary of {vocabulary}"
            raise DataError(message, key="request.prompt.vocab_size")
        if self.end > longest:
            message = f"{what}: {count} prompt tokens and {self.end - count} new ones exceed the context of "
            raise DataError(f"{message}{longest} tokens", key="request.max_tokens")
        params = self.request.params
        if params.stop and tokenizer is None:
            raise DataError(f"{what}: stop strings need an engine with a tokenizer", key="request.stop")
        named = [token for token, _ in params.logit_bias] + list(params.stop_tokens if params.min_tokens else ())
        if named and not 0 <= min(named) <= max(named) < vocabulary:
            message = f"{what}: logit_bias or stop_tokens has a token outside the vocabulary of {vocabulary}"
            raise DataError(message, key="request.bias.vocab_size")
        if params.min_tokens and len(set(params.stop_tokens)) == vocabulary:
            message = f"{what}: every token is among stop_tokens, so none can be drawn before min_tokens"
            raise DataError(message, key="request.min_tokens")

    def begin_watching(
        self, tokenizer: Decodes | None, special: Collection[str], vocabulary: int, grammars: Grammars | None
    ) -> None:
        """Begin to watch its tokens. special: texts of the special tokens; grammars: of schemas, if there are any."""
        params = self.request.params
        if params.stop and tokenizer is not None:
            self.stops = StopStrings(params.stop, tokenizer, special, params.min_tokens)
        if params.schema and grammars is not None:
            self.grammar = grammars.begin(params.schema, params.stop_tokens)
        if params.biased:
            self.bias = LogitBias(params, vocabulary)
        for one in self.watching:
            one.push(self.completion.tolist())

    def append(self, tokens: np.ndarray, logprobs: np.ndarray, sampling: np.ndarray | None) -> None:
        """Append drawn tokens, as arrays of equal length; copies them."""
        self.tokens = np.concatenate([self.tokens, tokens])
        self.mask = np.concatenate([self.mask, np.ones(len(tokens), np.uint8)])
        self.logprobs = np.concatenate([self.logprobs, logprobs])
        if self.sampling is not None:
            self.sampling = np.concatenate([self.sampling, logprobs if sampling is None else sampling])

    def watch(self, token: int) -> bool:
        """Add its newest token to what watches its text; True if the completion ends with it."""
        return any([watching.push([token]) for watching in self.watching])

    @property
    def drafted(self) -> bool:
        """True if drafts may lead it: what it may say does not depend on the tokens before, beyond the model, and it is
        no run-ahead."""
        return self.grammar is None and self.bias is None and self.ahead is None

    @property
    def watching(self) -> list[StopStrings | Grammar | LogitBias]:
        """Watchers of its tokens."""
        return [one for one in (self.stops, self.grammar, self.bias) if one is not None]

    def change(self, vocabulary: int) -> np.ndarray | None:
        """Return what is added to its next logits, float32 [vocabulary]: -inf where its schema allows no token; None if
        nothing is."""
        if self.grammar is None and self.bias is None:
            return None
        found = np.zeros(vocabulary, np.float32) if self.bias is None else self.bias.change()
        if self.grammar is not None:
            found[~self.grammar.allowed()] = -np.inf
        return found

    def note(self, logp: Tensor) -> None:
        """Keep the alternatives of its newest token. logp: float32 [V]."""
        found = logp.topk(self.request.likeliest)
        self.likeliest.append(Likeliest(found.indices.cpu().numpy(), found.values.cpu().numpy()))

    def alternatives(self, seen: int = 0) -> Likeliest | None:
        """Return the alternatives of its tokens behind the first ``seen``; None if its request does not ask."""
        if not (k := self.request.likeliest):
            return None
        ids, logprobs = zip(*self.likeliest[seen:]) if len(self.likeliest) > seen else ((), ())
        return Likeliest(np.array(ids, np.int64).reshape(-1, k), np.array(logprobs, np.float32).reshape(-1, k))

    def keep_routing(self, slab: Slab, row: int, tokens: int) -> None:
        """Take the experts of the first ``tokens`` from a row of the cache, if it keeps them; none are known behind."""
        for routing in slab.routing:
            known = routing[row, 0, :tokens].cpu().numpy()
            spare = len(self.tokens) - tokens
            self.routing = np.pad(known, ((0, spare), (0, 0)), constant_values=np.iinfo(known.dtype).max)

    @property
    def completion(self) -> np.ndarray:
        """Tokens after the prompt."""
        return self.tokens[len(self.request.prompt) :]

    def stamp(self, version: int) -> None:
        """Set the version of the weights for later tokens."""
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((len(self.tokens), version))

    def finish(self, reason: Finish, tokenizer: Decodes | None) -> Trajectory:
        """Return the trajectory, without versions or assistant segments that have no token; "" is the text without a
        tokenizer. One whose schema allows no token finishes by "error"."""
        r = self.request
        if self.stops is not None and self.stops.found:
            text = self.stops.text
        else:
            text = completion_text(tokenizer, self.completion, r.params.stop_tokens)
        reason = "error" if self.grammar is not None and self.grammar.stuck else reason
        segments = [*self.segments, Segment("assistant", len(r.prompt))] if len(self.completion) else self.segments
        versions = [span for span in self.versions if span[0] < len(self.tokens)]
        return Trajectory(
            id=r.id, prompt=r.prompt_index, group=r.group, tokens=self.tokens, mask=self.mask,
            logprobs=self.logprobs, sampling_logprobs=self.sampling, segments=segments, versions=versions,
            finish=reason, text=text, info=r.info, routing=self.routing, likeliest=self.alternatives(), media=r.media,
        )  # fmt: skip
