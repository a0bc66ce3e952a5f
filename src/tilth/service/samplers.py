"""Samplers: snapshots of weights with requests of their own, drawn from streams that nothing else moves."""

import asyncio
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilth.config.schema import LoraConfig
from tilth.core.errors import DataError
from tilth.core.trajectory import Trajectory
from tilth.rollout.request import Request, SamplingParams
from tilth.serve.room import EngineRoom
from tilth.service.bodies import SampleBody, TargetsBody
from tilth.service.queues import RequestQueue, StoredAnswer
from tilth.service.trained import SequenceScores
from tilth.service.wire import MEDIA, SampledTokens, Samples, Topk, write_samples

LIVE = 32
"""Samplers whose weights the engine holds at a time."""


class TrainRoom(EngineRoom):
    """Engine room that gives a worker which was started again its snapshots back."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.published = dict[str, tuple[str, LoraConfig]]()
        """Name -> folder and shape of each snapshot that the engine holds; the one used last is the last."""
        super().__init__(*args, factory="tilth.service.worker:train_worker", **more)

    def restore(self) -> None:
        for name, (folder, lora) in self.published.items():
            self.group.publish(name, folder, lora)


@dataclass
class WeightSampler:
    """Weights that sample. folder: None: the base. path: of the checkpoint they are from, "" of none."""

    id: str
    base_model: str
    queue: RequestQueue
    folder: Path | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)
    path: str = ""
    model: str = ""
    """Training run whose weights these are, "" for the base."""
    running: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Name of its adapter in the engine; "" for the base."""
        return "" if self.folder is None else self.id

    @property
    def ephemeral(self) -> bool:
        """True if no checkpoint has its weights."""
        return self.folder is not None and not self.path


async def ensure(room: TrainRoom, sampler: WeightSampler, busy: set[str]) -> None:
    """Let the engine hold the sampler's weights, in place of those used longest ago. busy: names with requests."""
    name, folder = sampler.name, sampler.folder
    if folder is None:
        return
    held = room.published.pop(name, None)
    if held is None:
        await room.call("publish", name, str(folder), sampler.lora, idempotent=True)
    room.published[name] = str(folder), sampler.lora
    for old in [one for one in room.published if one not in busy and one != name][: len(room.published) - LIVE]:
        del room.published[old]
        await room.call("retract", old)


def check_sample(body: SampleBody, vocabulary: int, longest: int) -> None:
    """Raise DataError for a request that this server cannot answer as it is."""
    tokens, params = body.prompt.tokens, body.sampling_params
    if not tokens:
        raise DataError("prompt is empty; it must have at least one token", key="prompt")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        message = f"prompt has a token that is not in the vocabulary of {vocabulary}"
        raise DataError(message, key="prompt.vocabulary")
    if len(tokens) + (params.max_tokens or 1) > longest:
        message = f"prompt has {len(tokens)} tokens and max_tokens={params.max_tokens}; together at most {longest}"
        raise DataError(message, key="sampling_params.max_tokens")
    if body.prompt_alt_tokens_k:
        raise DataError("prompt_alt_tokens_k is not offered by this server; leave it 0", key="prompt_alt_tokens_k")
    if body.record_stability_info:
        message = "record_stability_info is not offered by this server: stable_reinforce needs Tinker's own samplers"
        raise DataError(message, key="record_stability_info")
    if body.base_model or body.model_path:
        message = "a request for samples names its sampler by sampling_session_id, not by base_model or model_path"
        raise DataError(message, key="sampling_session_id")
    if body.target_prompt_logprobs is not None:
        _targets(body.target_prompt_logprobs, len(tokens), vocabulary)


def _targets(given: TargetsBody, prompt: int, vocabulary: int) -> np.ndarray:
    """Return targets int64 [prompt - 1, K]. DataError."""
    values, shape = np.array(given.data, np.int64), given.shape or []
    good = len(shape) == 2 and given.sparse_crow_indices is None and shape[0] == prompt - 1
    if not good or shape[0] * shape[1] != len(values):
        message = f"target_prompt_logprobs has the shape {shape}; it must be dense and [{prompt - 1}, K]"
        raise DataError(message, key="target_prompt_logprobs.shape")
    if len(values) and (values.min() < 0 or values.max() >= vocabulary):
        message = f"target_prompt_logprobs has a token that is not in the vocabulary of {vocabulary}"
        raise DataError(message, key="target_prompt_logprobs.vocabulary")
    return values.reshape(shape)


def sampling_params(body: SampleBody, longest: int, ends: tuple[int, ...]) -> SamplingParams:
    """Return the engine's parameters. ends: tokens that end every completion."""
    given = body.sampling_params
    stop = given.stop if given.stop is not None else []
    texts = [stop] if isinstance(stop, str) else [one for one in stop if isinstance(one, str)]
    ids = [one for one in stop if isinstance(one, int)]
    return SamplingParams(
        max_tokens=given.max_tokens or longest - len(body.prompt.tokens),
        temperature=given.temperature,
        top_k=max(given.top_k, 0),
        top_p=given.top_p,
        stop=tuple(texts),
        stop_tokens=tuple(dict.fromkeys([*ends, *ids])),
    )


def draws(sampler: str, body: SampleBody, index: int) -> tuple[int, int]:
    """Return the stream of one sample: of its seed, or of its sampler and number. A request that is answered again
    draws the same tokens."""
    seed = body.sampling_params.seed
    if seed is not None:
        return seed % 2**62, index
    digest = hashlib.sha256(f"{sampler}/{body.seq_id}/{index}".encode()).digest()
    return 0, int.from_bytes(digest[:8], "little") >> 2


async def sample(
    room: TrainRoom, sampler: WeightSampler, body: SampleBody, longest: int, ends: tuple[int, ...]
) -> StoredAnswer:
    """Return the answer to a request, whose log-probs of prompts come from a forward pass."""
    prompt, params = np.array(body.prompt.tokens, np.int64), sampling_params(body, longest, ends)
    wanted = [
        Request(0, prompt, params, adapter=sampler.name, draws=draws(sampler.id, body, i))
        for i in range(body.num_samples)
    ]
    completions = room.admit(wanted)
    try:
        found = await asyncio.gather(*(completion.whole() for completion in completions))
    finally:
        for completion in completions:
            completion.close()
    sequences = [await _sequence(room, sampler, trajectory, len(prompt), body) for trajectory in found]
    if not (body.prompt_logprobs or body.topk_prompt_logprobs or body.target_prompt_logprobs):
        return StoredAnswer(write_samples(Samples(sequences)), MEDIA)
    targets = body.target_prompt_logprobs
    asked = None if targets is None else np.array(targets.data, np.int64).reshape(targets.shape or [0])
    scores: SequenceScores = await room.call(
        "score_tokens", sampler.name, prompt, body.topk_prompt_logprobs, asked, idempotent=True
    )
    own = scores.own if body.prompt_logprobs else None
    if own is not None and body.prompt_logprobs_last_n is not None:
        own[: max(len(own) - body.prompt_logprobs_last_n, 0)] = np.nan
    return StoredAnswer(write_samples(Samples(sequences, own, scores.topk, scores.targets)), MEDIA)


async def _sequence(
    room: TrainRoom, sampler: WeightSampler, found: Trajectory, start: int, body: SampleBody
) -> SampledTokens:
    topk = None
    if body.topk_sample_logprobs:
        k = body.topk_sample_logprobs
        scores: SequenceScores = await room.call("score_tokens", sampler.name, found.tokens, k, None, idempotent=True)
        assert scores.topk is not None
        topk = Topk(scores.topk.tokens[start:], scores.topk.logprobs[start:])
    return SampledTokens(found.finish, found.tokens[start:], found.logprobs[start:], topk)
