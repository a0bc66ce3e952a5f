"""Samplers: snapshots of weights with requests of their own, drawn from streams that nothing else moves."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilth.cluster.controller.group import WorkerGroup
from tilth.config.schema import LoraConfig
from tilth.core.clock import utc_now
from tilth.core.errors import CheckpointError, DataError, TilthError
from tilth.core.layout import Mesh
from tilth.core.trajectory import Trajectory
from tilth.engines.client import EngineClient
from tilth.engines.completion import Completion, RequestError
from tilth.engines.request import Request, SamplingParams
from tilth.plan.packing import divide
from tilth.serve.tinker.base import ServedBase
from tilth.serve.tinker.bodies import SampleBody, TargetsBody
from tilth.serve.tinker.folders import ABOUT, CheckpointPath, ServiceFolder, write_json
from tilth.serve.tinker.losses import TOKENS, SampleRecord
from tilth.serve.tinker.queues import FRESH, Operation, RequestLog, RequestQueue, StoredAnswer
from tilth.serve.tinker.wire import MEDIA, Datum, SampledTokens, Topk, filled, read_samples, write_samples
from tilth.serve.tinker.worker import SequenceScores

LIVE = 32
"""Snapshots whose weights the engine holds at a time."""
SCORES = 8
"""Sequences that wait for their scores at a time: enough to keep its worker busy, and few before a training call."""


class TrainClient(EngineClient):
    """Engine client with a second role, "train", on all workers. A bounded number of snapshots samples beside the base;
    workers that were started again get them back."""

    def __init__(self, *args: Any, source: str, mesh: Mesh, **more: Any) -> None:
        """source: reference of the base model; mesh: of the role "train"."""
        self._published = dict[str, tuple[str, LoraConfig]]()
        """Name -> folder and shape of each snapshot that the engine holds; the one used last is the last."""
        self._publishing, self._scoring = asyncio.Lock(), asyncio.Semaphore(SCORES)
        super().__init__(*args, factory="tilth.serve.tinker.worker:sample_worker", source=source, **more)
        try:
            self.learners = self.cluster.group(
                "train", "tilth.serve.tinker.worker:train_worker", {"source": source}, mesh
            )
        except BaseException:  # an interrupt too: no process may be left
            self.close(0.0)
            raise

    def group_of(self, method: str) -> WorkerGroup:
        return self.learners if method in self.learners.methods else self.group

    async def forward_backward(
        self, model: str, data: Sequence[Datum], loss: str, options: Mapping[str, float | str], forward_only: bool
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Run passes over data, dealt over the workers by tokens; return log-probs of each datum, float32, and sums."""
        ranks, found, sums = self.learners.world_size, dict[int, np.ndarray](), dict[str, float]()
        mesh = self.learners.mesh
        parts = divide([datum.columns[TOKENS].size for datum in data], None, mesh.count("rows"))
        place = [mesh.index(rank, *mesh.over("rows")) for rank in mesh.ranks]  # ranks along tp have the same rows
        alike = [[one] * ranks for one in (model, loss, dict(options), forward_only)]
        answers = await self.call("forward_backward", [[data[row] for row in parts[own]] for own in place], *alike)
        for number, rows in enumerate(parts):
            logprobs, added = answers[place.index(number)]
            found |= zip(rows.tolist(), logprobs)
            sums = {name: sums.get(name, 0.0) + value for name, value in added.items()}
        return [found[row] for row in range(len(data))], sums

    async def publish(self, name: str, folder: Path, lora: LoraConfig, busy: Collection[str]) -> None:
        """Let the engine hold a snapshot, in place of those used longest ago. busy: names with requests."""
        async with self._publishing:  # of all requests for a new snapshot the first one publishes it
            held = self._published.pop(name, None)
            if held is None:
                await self.call("publish", name, str(folder), lora, idempotent=True)
            self._published[name] = str(folder), lora
            idle = [one for one in self._published if one not in busy and one != name]
            for old in idle[: max(len(self._published) - LIVE, 0)]:
                del self._published[old]
                await self.call("retract", old)

    async def score(
        self, name: str, tokens: np.ndarray, topk: int = 0, targets: np.ndarray | None = None
    ) -> SequenceScores:
        """Return log-probs of a sequence under a snapshot, or the base (""), however many wait for theirs."""
        async with self._scoring:
            return await self.call("score_tokens", name, tokens, topk, targets, idempotent=True)

    def restore(self) -> None:
        for name, (folder, lora) in list(self._published.items()):
            try:
                self.group.publish(name, folder, lora)
            except CheckpointError:  # deleted since: the next request for it says so
                del self._published[name]


# ---- samplers ----

EPHEMERAL = 16
"""Newest snapshots of a model, without a checkpoint's name, that are kept."""


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
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """Tasks of its requests by number."""

    @property
    def session(self) -> str:
        """Session that it belongs to."""
        return self.id.partition(":")[0]

    @property
    def name(self) -> str:
        """Name of its adapter in the engine; "" for the base."""
        return "" if self.folder is None else self.id

    @property
    def ephemeral(self) -> bool:
        """True if no checkpoint has its weights."""
        return self.folder is not None and not self.path


class PlaceLine:
    """Places in the engine client, given to requests in the order of their coming."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0
        self._line, self._freed = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def places(self, count: int) -> AsyncIterator[None]:
        """Hold places until the block ends; the first of those that wait is the next one, however many it needs."""
        async with self._line:
            while self.taken and self.taken + count > self.most:
                self._freed.clear()
                await self._freed.wait()
            self.taken += count
        try:
            yield
        finally:
            self.taken -= count
            self._freed.set()


class SamplerDesk:
    """Samplers of a service and the requests for samples, each a task of the event loop."""

    def __init__(self, room: TrainClient, folder: ServiceFolder, base: ServedBase, most: int) -> None:
        """most: requests of one sampler that may wait."""
        self.room, self.folder, self.base, self.most = room, folder, base, most
        self.samplers = dict[str, WeightSampler]()
        self.line = PlaceLine(room.most)
        self._closing = False

    def open(self) -> None:
        """Read what is on disk, and begin to answer what is not answered."""
        for name, about in self.folder.entries("samplers"):
            sampler = self._add(name, about)
            for operation in list(sampler.queue.operations.values()):
                if not operation.answer.done():
                    self._begin(sampler, operation)

    async def close(self, seconds: float) -> None:
        """Let requests that run end for some seconds; the others are on disk for the next server."""
        self._closing = True
        if tasks := {task for sampler in self.samplers.values() for task in sampler.running.values()}:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def find(self, name: str) -> WeightSampler:
        """Return a sampler. CheckpointError: there is none, or its snapshot was dropped for newer ones."""
        if name not in self.samplers:
            message = f"sampling_session_id={name!r} is unknown to this server; of snapshots without a name it keeps"
            raise CheckpointError(f"{message} a model's newest {EPHEMERAL}", key="sampling_session_id.missing")
        return self.samplers[name]

    def create(self, session: str, number: int, path: CheckpointPath | None, lora: Any) -> WeightSampler:
        """Return a sampler of the base (None), or of a checkpoint whose adapters are ``lora``, or the one that an equal
        request made."""
        name, written = sampler_name(session, number), "" if path is None else str(path)
        if (held := self.samplers.get(name)) is not None:
            if held.path != written:
                message = f"sampling_session_seq_id={number} of session {session} is another one: two clients with one"
                raise DataError(f"{message} name", key="sampling_session_seq_id.reused")
            return held
        return self._new(name, session, written, "" if path is None else path.run, lora)

    def add_snapshot(self, name: str, session: str, model: str, lora: Any) -> None:
        """Take a snapshot whose weights are in the folder of its name; the model's oldest ones are dropped for it."""
        own = [s for s in self.samplers.values() if s.ephemeral and s.model == model]
        for sampler in [one for one in own if not one.running][: max(len(own) - EPHEMERAL + 1, 0)]:
            self.drop(sampler)
        self._new(name, session, "", model, lora)

    def drop(self, sampler: WeightSampler) -> None:
        """Forget a sampler, and delete its files."""
        del self.samplers[sampler.id]
        self.folder.remove(self.folder.entry("samplers", sampler.id))

    def _new(self, name: str, session: str, path: str, model: str, lora: Any) -> WeightSampler:
        about = {"base_model": self.base.names[0], "path": path, "model": model, "lora": lora}
        about |= {"time": utc_now("microseconds"), "session": session}
        write_json(self.folder.entry("samplers", name) / ABOUT, about)
        return self._add(name, about)

    def _add(self, name: str, about: Mapping[str, Any]) -> WeightSampler:
        folder = self.folder.entry("samplers", name)
        queue = RequestQueue(name, RequestLog(folder / "log"), ordered=False, most=self.most)
        sampler = WeightSampler(name, about["base_model"], queue, path=about["path"], model=about["model"])
        if about["lora"] is not None:
            sampler.lora = LoraConfig.model_validate(about["lora"], strict=False)
            sampler.folder = self.folder.place(CheckpointPath.read(sampler.path)) if sampler.path else folder
        self.samplers[name] = sampler
        return sampler

    def record(self, session: str, sequence: str) -> SampleRecord:
        """Return a sequence that a session has sampled, which every sampler keeps with its answers. DataError: another
        session's, or no longer kept."""
        name, _, rest = sequence.partition("/")
        seq, _, index = rest.partition("/")
        if not name.startswith(sampler_name(session, 0)[:-1]) or not (seq.isdecimal() and index.isdecimal()):
            raise DataError(f"{sequence!r} is no sample of session {session}", key="sequence_id.session")
        operation = self.samplers[name].queue.operations.get(int(seq)) if name in self.samplers else None
        if operation is None or not operation.body or not operation.answer.done() or operation.answer.result().error:
            message = f"sample {sequence!r} is not kept: of snapshots without a name there are a model's newest"
            raise DataError(f"{message} {EPHEMERAL}", key="sequence_id.missing")
        found, body = read_samples(operation.answer.result().body), SampleBody.model_validate_json(operation.body)
        if int(index) >= len(found):
            raise DataError(f"{sequence!r} is none of {len(found)} samples", key="sequence_id.missing")
        return SampleRecord(np.array(body.prompt.tokens), *found[int(index)])

    def submit(self, body: SampleBody, raw: bytes) -> Operation:
        """Take a request for samples. DataError, BusyError, CheckpointError."""
        sampler = self.find(body.sampling_session_id)
        operation = sampler.queue.accept(body.seq_id, "sample", raw, body, body.num_samples)
        if not operation.answer.done() and operation.seq not in sampler.running:
            self._begin(sampler, operation)
        return operation

    def cancel(self, name: str, seq: int) -> None:
        """Stop a request whose client has left."""
        if (task := self.find(name).running.get(seq)) is not None:
            task.cancel()

    def _begin(self, sampler: WeightSampler, operation: Operation) -> None:
        sampler.running[operation.seq] = asyncio.create_task(self._sample(sampler, operation))
        sampler.running[operation.seq].add_done_callback(lambda done: sampler.running.pop(operation.seq))

    async def _sample(self, sampler: WeightSampler, operation: Operation) -> None:
        body = operation.request or SampleBody.model_validate_json(operation.body)
        try:
            async with self.line.places(body.num_samples):
                if sampler.folder is not None:
                    busy = {one.name for one in self.samplers.values() if one.running}
                    await self.room.publish(sampler.name, sampler.folder, sampler.lora, busy)
                answer = await sample(self.room, sampler, body, self.base)
        except TilthError as error:
            answer = StoredAnswer.failure(error)
        except asyncio.CancelledError:
            if self._closing:  # it runs again when the server is back
                raise
            answer = StoredAnswer.failure(RequestError("the client has left", key="sample.left"), "user")
        sampler.queue.finish(operation, answer)
        if sampler.queue.fresh >= FRESH:
            sampler.queue.shorten()


def sampler_name(session: str, number: int) -> str:
    """Return the name of a session's sampler."""
    return f"{session}:sample:{number}"


def check_sample(body: SampleBody, base: ServedBase) -> None:
    """Raise DataError for a request that this server cannot answer as it is."""
    tokens, params, vocabulary, longest = body.prompt.tokens, body.sampling_params, base.vocabulary, base.longest
    if not tokens:
        raise DataError("prompt is empty; it must have at least one token", key="prompt")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise DataError(f"prompt has a token that is not in the vocabulary of {vocabulary}", key="prompt.vocabulary")
    if len(tokens) + (params.max_tokens or 1) > longest:
        message = f"prompt has {len(tokens)} tokens and max_tokens={params.max_tokens}; together at most {longest}"
        raise DataError(message, key="sampling_params.max_tokens")
    if body.prompt_alt_tokens_k:
        raise DataError("prompt_alt_tokens_k is not offered by this server; leave it 0", key="prompt_alt_tokens_k")
    if body.base_model or body.model_path:
        message = "a request for samples names its sampler by sampling_session_id, not by base_model or model_path"
        raise DataError(message, key="sampling_session_id")
    if body.target_prompt_logprobs is not None:
        _targets(body.target_prompt_logprobs, len(tokens), vocabulary)


def _targets(given: TargetsBody, prompt: int, vocabulary: int) -> np.ndarray:
    """Return targets int64 [prompt - 1, K], -1 in cells that ask for nothing. DataError."""
    values, shape, where = np.array(given.data, np.int64), tuple(given.shape or ()), "target_prompt_logprobs"
    sparse = given.sparse_crow_indices is not None
    if len(shape) != 2 or shape[0] != prompt - 1 or not (sparse or np.prod(shape) == len(values)):
        message = f"{where} has {len(values)} values of the shape {list(shape)}; it must be [{prompt - 1}, K]"
        raise DataError(message, key=f"{where}.shape")
    if sparse:
        ends, columns = (np.array(x, np.int64) for x in (given.sparse_crow_indices, given.sparse_col_indices or []))
        values = filled(values, ends, columns, shape, where, rest=-1)
    if values.size and (values.min() < -1 or values.max() >= vocabulary):
        message = f"{where} has a token that is not in the vocabulary of {vocabulary}; -1 asks for nothing"
        raise DataError(message, key=f"{where}.vocabulary")
    return values.reshape(shape)


def sampling_params(body: SampleBody, base: ServedBase) -> SamplingParams:
    """Return the engine's parameters."""
    given = body.sampling_params
    stop = given.stop if given.stop is not None else []
    texts = [stop] if isinstance(stop, str) else [one for one in stop if isinstance(one, str)]
    ids = [one for one in stop if isinstance(one, int)]
    return SamplingParams(
        max_tokens=given.max_tokens or base.longest - len(body.prompt.tokens),
        temperature=given.temperature,
        top_k=max(given.top_k, 0),
        top_p=given.top_p,
        stop=tuple(texts),
        stop_tokens=tuple(dict.fromkeys([*base.ends, *ids])),
    )


def draws(sampler: str, body: SampleBody, index: int) -> tuple[int, int]:
    """Return the stream of one sample: of its seed, or of its sampler and number. A request that is answered again
    draws the same tokens."""
    seed = body.sampling_params.seed
    if seed is not None:
        return seed % 2**62, index
    digest = hashlib.sha256(f"{sampler}/{body.seq_id}/{index}".encode()).digest()
    return 0, int.from_bytes(digest[:8], "little") >> 2


async def admit(room: TrainClient, wanted: Sequence[Request]) -> list[Completion]:
    """Admit requests as soon as those of other interfaces leave them place. RequestError."""
    while True:
        try:
            return room.admit(wanted)
        except RequestError as error:
            if error.key != "serve.full" or not room.load:
                raise
            await asyncio.sleep(0.05)  # no event says that there is place


async def sample(room: TrainClient, sampler: WeightSampler, body: SampleBody, base: ServedBase) -> StoredAnswer:
    """Return the answer to a request, whose log-probs of prompts come from a forward pass."""
    prompt, params = np.array(body.prompt.tokens, np.int64), sampling_params(body, base)
    wanted = [
        Request(0, prompt, params, adapter=sampler.name, draws=draws(sampler.id, body, i))
        for i in range(body.num_samples)
    ]
    completions = await admit(room, wanted)
    try:
        found = await asyncio.gather(*(completion.whole() for completion in completions))
    finally:
        for completion in completions:
            completion.close()
    sequences = [await _sequence(room, sampler, trajectory, len(prompt), body) for trajectory in found]
    if not (body.prompt_logprobs or body.topk_prompt_logprobs or body.target_prompt_logprobs):
        return StoredAnswer(write_samples(sequences), MEDIA)
    targets = body.target_prompt_logprobs
    asked = None if targets is None else _targets(targets, len(prompt), base.vocabulary)
    scores = await room.score(sampler.name, prompt, body.topk_prompt_logprobs, asked)
    own = scores.own if body.prompt_logprobs else None
    if own is not None and body.prompt_logprobs_last_n is not None:
        own[: max(len(own) - body.prompt_logprobs_last_n, 0)] = np.nan
    sparse = targets is not None and targets.sparse_crow_indices is not None
    return StoredAnswer(write_samples(sequences, own, scores.topk, scores.targets, sparse), MEDIA)


async def _sequence(
    room: TrainClient, sampler: WeightSampler, found: Trajectory, start: int, body: SampleBody
) -> SampledTokens:
    topk = None
    if body.topk_sample_logprobs:
        scores = await room.score(sampler.name, found.tokens, body.topk_sample_logprobs)
        assert scores.topk is not None
        topk = Topk(scores.topk.tokens[start:], scores.topk.logprobs[start:])
    return SampledTokens(found.finish, found.tokens[start:], found.logprobs[start:], topk)
