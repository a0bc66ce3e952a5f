"""Desk of a training service, in one event loop: takes requests of clients, and has their answers.

A request is on disk before it is acknowledged. ``ClientRunner`` runs those that train, ``samplers.SamplerDesk`` those
that sample. A state is written now and then, and the requests since then run again after a kill: passes and steps are
deterministic, so every bit is that of an undisturbed server.
"""

import asyncio
import itertools
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from tilth.config.schema import LoraConfig
from tilth.core.clock import utc_now
from tilth.core.errors import CheckpointError, DataError, StorageError, TilthError
from tilth.engines.client import BREAKS
from tilth.engines.completion import RequestError
from tilth.process.restarts import RestartPolicy
from tilth.serve.app import GRACE
from tilth.serve.tinker.base import ServedBase, ServiceLimits
from tilth.serve.tinker.bodies import AdamBody, CreateBody, LoadBody, OptimizerKind, SampleBody, SaveBody, StepBody
from tilth.serve.tinker.folders import ABOUT, CheckpointPath, ServiceFolder, expires_at, read_json, write_json
from tilth.serve.tinker.losses import TOKENS, check_data, check_provenance, loss_named, options_of
from tilth.serve.tinker.queues import FRESH, BusyError, Operation, RequestLog, RequestQueue, StoredAnswer, next_of
from tilth.serve.tinker.samplers import SamplerDesk, TrainClient, WeightSampler, sampler_name
from tilth.serve.tinker.wire import MEDIA, TrainRequest, place_of, read_train_request, write_output
from tilth.serve.tinker.worker import STATE, AdamStep, ModelSpec, read_about

STEPS = 16
"""Optimizer steps after which a model's state is written."""
RESTARTS = RestartPolicy(attempts=3)
"""Restarts of a request whose worker dies."""


@dataclass
class Client:
    """One training run: its queue and what is known of it."""

    id: str
    about: dict[str, Any]
    queue: RequestQueue
    alive: int = -1
    """Number of the worker's restarts at which it has this model; -1: it has not."""
    saved: int = 0
    """Last request whose effect is in the state on disk."""
    steps: int = 0
    """Optimizer steps since."""
    used: float = 0.0
    """When its newest request ran, in seconds of the event loop."""

    @property
    def spec(self) -> ModelSpec:
        """Shape of its model."""
        return ModelSpec(LoraConfig.model_validate(self.about["lora"], strict=False), int(self.about["seed"]))

    @property
    def session(self) -> str:
        """Session that it belongs to."""
        return str(self.about["session"])

    @property
    def begins_at(self) -> str:
        """Path of the checkpoint that it begins at; "": it is new."""
        return str(self.about["request"].get("path", ""))


class ClientRunner:
    """Training runs by name, and the task that runs their requests: the client with fewest tokens first."""

    def __init__(self, room: TrainClient, folder: ServiceFolder, samplers: SamplerDesk, limits: ServiceLimits) -> None:
        self.room, self.folder, self.samplers, self.limits = room, folder, samplers, limits
        self.clients = dict[str, Client]()
        self.trouble: StorageError | None = None
        """Why the last state could not be written; its requests are on disk."""
        self.task: asyncio.Task[None] | None = None
        self._heard = dict[str, float]()
        """Session -> its newest sign of life, in seconds of the event loop."""
        self._changed = asyncio.Event()
        self._working = asyncio.Lock()
        self._closing = False

    def open(self) -> None:
        """Begin to work on what is not answered."""
        self.task = asyncio.create_task(self._work())

    async def close(self, seconds: float) -> None:
        """Let the request that runs end for some seconds, and write all states."""
        self._closing = True
        self._changed.set()
        if self.task is not None:
            _, late = await asyncio.wait([self.task], timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for client in self.clients.values():
            if client.alive == self.room.restarts and client.queue.next - 1 > client.saved:
                with suppress(RequestError, StorageError, *BREAKS):  # its requests are on disk
                    await self._save(client)

    def add(self, name: str, about: dict[str, Any]) -> Client:
        """Take a training run: a new one, or one that is on disk."""
        folder = self.folder.entry("models", name)
        client = Client(name, about, RequestQueue(name, RequestLog(folder / "log"), most=self.limits.requests))
        if self.has_state(name):
            client.saved = int(read_about(folder)["seq"])
        done = [seq for seq, one in client.queue.operations.items() if one.answer.done()]
        client.queue.next = max([client.saved, *done]) + 1
        self.clients[name] = client
        self.hear(client.session)
        return client

    def has_state(self, name: str) -> bool:
        """True if a run's state is on disk."""
        return (self.folder.entry("models", name) / STATE).exists()

    def submit(self, client: Client, seq: int, kind: str, body: bytes, request: Any, cost: int = 1) -> Operation:
        """Take a request. DataError, BusyError."""
        self.hear(client.session)
        operation = client.queue.accept(seq, kind, body, request, cost)
        self._changed.set()
        return operation

    def hear(self, session: str) -> None:
        """Note a sign of life of a session."""
        self._heard[session] = asyncio.get_running_loop().time()

    def silent(self, session: str) -> bool:
        """Return True if a session has given no sign of life for ``ServiceLimits.idle`` seconds."""
        return self._heard.get(session, -math.inf) + self.limits.idle <= asyncio.get_running_loop().time()

    def forget(self, session: str) -> None:
        """Forget a session, which has no models."""
        self._heard.pop(session, None)

    def leave(self, session: str) -> None:
        """Note that a session is over: its models are held no more."""
        self._heard[session] = -math.inf
        self._changed.set()

    async def begin_at(self, client: Client, body: LoadBody) -> None:
        """Load the first state of a run that begins at a checkpoint, again if the worker dies; its requests wait."""
        async with self._working:
            for begun in itertools.count(1):
                try:
                    await self._make_place(client)
                    await self.room.call("create", client.id, client.spec)
                    await self.room.call("read", client.id, str(self.folder.loadable(body)), body.optimizer)
                    client.alive = self.room.restarts
                    await self._save(client)
                    return
                except BREAKS:
                    client.alive = -1
                    if not RESTARTS.again(begun):
                        raise

    # ---- the task that works ----

    async def _work(self) -> None:
        """Run requests, and share the time with samples evenly."""
        clock = asyncio.get_running_loop().time
        while not self._closing:
            self._changed.clear()
            async with self._working:
                await self._release_idle()
            queue = next_of(client.queue for client in self.clients.values())
            if queue is None:
                await self._wait()
                continue
            begun = clock()
            async with self._working:
                await self._run(self.clients[queue.name])
            if self.room.load:
                await asyncio.sleep(clock() - begun)

    def _held(self) -> list[Client]:
        """Return the clients whose models the worker has, the one used longest ago first."""
        held = [client for client in self.clients.values() if client.alive == self.room.restarts]
        return sorted(held, key=lambda client: client.used)

    def _until_idle(self, client: Client) -> float:
        """Return the seconds until a client's session is idle."""
        now = asyncio.get_running_loop().time()
        return self._heard[client.session] + self.limits.idle - now

    async def _wait(self) -> None:
        """Wait for a request, or until a session is idle."""
        left = min(map(self._until_idle, self._held()), default=None)
        with suppress(TimeoutError):
            async with asyncio.timeout(None if left is None else max(left, 0.0)):
                await self._changed.wait()

    async def _release_idle(self) -> None:
        """Release the models of sessions without a sign of life."""
        for client in self._held():
            if client.queue.ready() is None and self._until_idle(client) <= 0:
                try:
                    await self._release(client)
                except (StorageError, RequestError, *BREAKS) as error:
                    self.hear(client.session)  # tried again when it is idle again
                    self.trouble = error if isinstance(error, StorageError) else None

    async def _release(self, client: Client) -> None:
        """Free a model; it comes back from disk with its next request."""
        if client.queue.next - 1 > client.saved:
            await self._save(client)
        await self.room.call("forget", client.id)
        client.alive = -1

    async def _make_place(self, client: Client) -> None:
        """Release models that were used longest ago until one more has a place."""
        others = [one for one in self._held() if one is not client]
        for one in others[: max(len(others) + 1 - self.limits.models, 0)]:
            await self._release(one)

    async def _run(self, client: Client) -> None:
        """Run the next request of a client, and write its state if that is due."""
        operation, client.used = client.queue.ready(), asyncio.get_running_loop().time()
        assert operation is not None
        try:
            answer = await self._answered(client, operation)
        except asyncio.CancelledError:
            client.alive = -1  # the worker may have run it, so its state is no longer that before it
            raise
        try:
            client.queue.finish(operation, answer)
            client.steps += operation.kind == "optim_step"
            if client.steps >= STEPS or client.queue.fresh >= FRESH or operation.kind == "load_weights":
                await self._save(client)
            self.trouble = None
        except (StorageError, RequestError, *BREAKS) as error:  # it goes on from the requests on disk
            self.trouble = error if isinstance(error, StorageError) else None

    async def _answered(self, client: Client, operation: Operation) -> StoredAnswer:
        """Return the answer to a request, also of one that fails."""
        for begun in itertools.count(1):
            try:
                await self._revive(client, operation.seq)
                return await OPERATIONS[operation.kind](self, client, operation)
            except BREAKS as error:
                client.alive = -1
                if not RESTARTS.again(begun):
                    return StoredAnswer.failure(error)
            except TilthError as error:
                return StoredAnswer.failure(error)
            except Exception as error:  # noqa: BLE001 - inline, a worker's own exception comes as it is
                client.alive = -1
                return StoredAnswer.failure(error)
        raise AssertionError("unreachable")

    async def _revive(self, client: Client, upto: int) -> None:
        """Give the worker this model if it has not: the state on disk, and the requests since, run again."""
        if client.alive == self.room.restarts:
            return
        if client.begins_at and not self.has_state(client.id):
            message = f"{client.id} could not be loaded from {client.begins_at}; create it again from a checkpoint"
            raise CheckpointError(message, key="model_id.unloaded")
        await self._make_place(client)
        restarts = self.room.restarts
        await self.room.call("create", client.id, client.spec)
        if self.has_state(client.id):
            await self.room.call("read", client.id, str(self.folder.entry("models", client.id)), True)
        for seq in range(client.saved + 1, upto):
            operation = client.queue.operations[seq]
            if operation.kind in REPEATED and not operation.answer.result().undone:
                try:
                    await OPERATIONS[operation.kind](self, client, operation)
                except BREAKS:
                    raise
                except TilthError:
                    assert operation.answer.result().error  # it failed the first time too
        client.alive = restarts

    async def _save(self, client: Client) -> None:
        """Write a model's state, and begin its log anew."""
        seq = client.queue.next - 1
        folder = self.folder.entry("models", client.id)
        await self.room.call("write", client.id, str(folder), {"seq": seq}, True)
        client.saved, client.steps = seq, 0
        client.queue.shorten()

    # ---- requests ----

    async def _data(self, client: Client, operation: Operation) -> StoredAnswer:
        request: TrainRequest = operation.request or read_train_request(operation.body)
        arguments = request.data, request.loss, request.options, request.forward_only
        return StoredAnswer(write_output(*await self.room.forward_backward(client.id, *arguments)), MEDIA)

    async def _step(self, client: Client, operation: Operation) -> StoredAnswer:
        p = StepBody.model_validate_json(operation.body).adam_params or AdamBody()
        how = AdamStep(p.learning_rate, (p.beta1, p.beta2), p.eps, p.weight_decay, p.grad_clip_norm)
        return StoredAnswer.of({"metrics": await self.room.call("optim_step", client.id, how)})

    async def _refused(self, client: Client, operation: Operation) -> StoredAnswer:
        return StoredAnswer(operation.body, error=True)

    async def _load(self, client: Client, operation: Operation) -> StoredAnswer:
        body = LoadBody.model_validate_json(operation.body)
        folder = self.folder.loadable(body)
        held = read_json(folder / ABOUT)["lora"]
        if held != client.about["lora"]:
            message = f"{body.path} has adapters of rank {held['rank']} over {held['targets']}, and this model others"
            raise CheckpointError(f"{message}; use create_training_client_from_state", key="path.lora")
        await self.room.call("read", client.id, str(folder), body.optimizer)
        return StoredAnswer.of({"path": body.path, "model_id": client.id, "type": "load_weights"})

    async def _save_weights(self, client: Client, operation: Operation) -> StoredAnswer:
        body = SaveBody.model_validate_json(operation.body)
        if body.path is None:
            return await self._snapshot(client, body)
        path = CheckpointPath(client.id, CHECKPOINTS[operation.kind], body.path)
        folder = self.folder.place(path)
        if (folder / ABOUT).exists() and read_json(folder / ABOUT)["seq"] != operation.seq and not body.overwrite:
            message = f"{path} exists: two checkpoints with one name; choose another, or save with overwrite=True"
            raise DataError(message, key="path.exists")
        self.folder.remove(folder)
        if path.kind == "external_weights":
            size = await self.room.call("export", client.id, str(folder))
        else:
            size = await self.room.call("write", client.id, str(folder), {"seq": operation.seq}, path.kind == "weights")
        self._describe(client, folder, path, size, operation.seq, body)
        return StoredAnswer.of({"path": str(path), "type": operation.kind})

    def _describe(
        self, client: Client, folder: Path, path: CheckpointPath, size: int, seq: int, body: SaveBody
    ) -> None:
        """Write the facts of a checkpoint, which make it one."""
        about = {
            "path": str(path),
            "kind": path.kind,
            "model": client.id,
            "seq": seq,
            "size": size,
            "time": utc_now("microseconds"),
            "expires": expires_at(body.ttl_seconds),
            "user_metadata": body.user_metadata,
            "lora": client.about["lora"],
            "optimizer": path.kind == "weights",
            "base_model": self.folder.base,
            "fingerprint": self.folder.fingerprint,
        }
        write_json(folder / ABOUT, about)

    async def _snapshot(self, client: Client, body: SaveBody) -> StoredAnswer:
        """Make a sampler of the weights as they are now."""
        if body.sampling_session_seq_id is None:
            message = "save_weights_for_sampler needs a path, or sampling_session_seq_id for a snapshot without one"
            raise DataError(message, key="sampling_session_seq_id")
        if body.kind == "inflight":
            message = "kind='inflight': samplers of this server keep their weights; use 'snapshot'"
            raise DataError(message, key="kind.inflight")
        name = sampler_name(client.session, body.sampling_session_seq_id)
        if name not in self.samplers.samplers:
            folder = self.folder.entry("samplers", name)
            await self.room.call("write", client.id, str(folder), {"seq": body.seq_id}, False)
            self.samplers.add_snapshot(name, client.session, client.id, client.about["lora"])
        return StoredAnswer.of({"sampling_session_id": name, "type": "save_weights_for_sampler"})


CHECKPOINTS = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
"""Kind of request -> part of the path of its checkpoint."""
Run = Callable[[ClientRunner, Client, Operation], Awaitable[StoredAnswer]]
OPERATIONS: Mapping[str, Run] = {
    "data": ClientRunner._data,
    "refused": ClientRunner._refused,
    "optim_step": ClientRunner._step,
    "load_weights": ClientRunner._load,
    **dict.fromkeys(CHECKPOINTS, ClientRunner._save_weights),
}
REPEATED = ("data", "optim_step", "load_weights")
"""Requests that change a model, which run again where their effect is not on disk."""


SESSIONS = 4096
"""Sessions without models that are kept."""
FACTS = 1 << 16
"""Most bytes of what a session tells of itself, which is kept in memory."""
WAIT = 20.0
"""Seconds that a request for an answer waits for it."""


class TrainingDesk:
    """Sessions, models, samplers and checkpoints of one base model. Call ``open`` before anything else."""

    def __init__(self, room: TrainClient, folder: ServiceFolder, base: ServedBase, limits: ServiceLimits) -> None:
        self.room, self.folder, self.base, self.limits = room, folder, base, limits
        self.samplers = SamplerDesk(room, folder, base, limits.requests)
        self.runner = ClientRunner(room, folder, self.samplers, limits)
        self.sessions = dict[str, dict[str, Any]]()
        self._loads = dict[str, asyncio.Task[None]]()
        self._closing = False

    async def open(self) -> None:
        """Read what is on disk, and begin to work on what is not answered."""
        self.sessions = dict(self.folder.entries("sessions"))
        for name, about in self.folder.entries("models"):
            self._begin_load(self.runner.add(name, about))
        self.samplers.open()
        self.runner.open()

    async def close(self) -> None:
        """Stop after the requests that run, and write all states; those that wait are on disk for the next server."""
        self._closing = True
        await asyncio.gather(self.samplers.close(GRACE), self.runner.close(GRACE))
        self.folder.lock.release()

    # ---- sessions ----

    def create_session(self, about: Mapping[str, Any], key: str) -> str:
        """Return a session's id. key: equal for a request that is sent again; "": none."""
        for name, held in self.sessions.items():
            if key and held.get("key") == key:
                return name
        if (size := len(json.dumps(about))) > FACTS:
            message = f"user_metadata and tags of a session have {size} bytes, the limit is {FACTS}: send less"
            raise DataError(message, key="user_metadata")
        self._forget_session()
        name = f"s{secrets.token_hex(8)}"
        self.sessions[name] = {**about, "time": utc_now("microseconds"), "key": key, "status": "active"}
        write_json(self.folder.entry("sessions", name) / ABOUT, self.sessions[name])
        self.runner.hear(name)
        return name

    def _forget_session(self) -> None:
        """Forget the oldest silent session without models, samplers too, if there are ``SESSIONS``. BusyError: all of
        them are alive."""
        training = {client.session for client in self.clients.values()}
        others = [name for name in self.sessions if name not in training]
        if len(others) < SESSIONS:
            return
        busy = {one.session for one in self.samplers.samplers.values() if one.running}
        old = next((name for name in others if name not in busy and self.runner.silent(name)), None)
        if old is None:
            raise BusyError(f"{len(others)} sessions are alive; end some, or ask again later", key="service.sessions")
        for sampler in [one for one in self.samplers.samplers.values() if one.session == old]:
            self.samplers.drop(sampler)
        self.folder.remove(self.folder.entry("sessions", old))
        self.runner.forget(old)
        del self.sessions[old]

    def session(self, name: str) -> dict[str, Any]:
        """Return the facts of a session. CheckpointError: there is none."""
        if name not in self.sessions:
            raise CheckpointError(f"session_id={name!r} is unknown to this server", key="session_id.missing")
        return self.sessions[name]

    def beat(self, name: str) -> bool:
        """Note a sign of life of a session; return False if it is over. CheckpointError: there is none."""
        active = bool(self.session(name)["status"] == "active")
        if active:
            self.runner.hear(name)
        return active

    def finish_session(self, name: str, reason: Mapping[str, Any], detail: str | None) -> None:
        """Note that a session is over."""
        self.session(name).update(status=reason.get("type", "success"), detail=detail)
        self.runner.leave(name)
        write_json(self.folder.entry("sessions", name) / ABOUT, self.sessions[name])

    # ---- models ----

    @property
    def clients(self) -> dict[str, Client]:
        """Training runs by name."""
        return self.runner.clients

    def client(self, name: str) -> Client:
        """Return a training run. CheckpointError: there is none."""
        if name not in self.clients:
            raise CheckpointError(f"model_id={name!r} is unknown to this server", key="model_id.missing")
        return self.clients[name]

    def create_model(self, body: CreateBody) -> Client:
        """Return the new training run of a session, or the one that an equal request made. DataError."""
        self.base.check_name(body.base_model)
        _check_optimizer(body.optimizer_config)
        lora, seed = self.base.lora(body.lora_config), None if body.lora_config is None else body.lora_config.seed
        return self._new_client(body.session_id, body.model_seq_id, lora, seed, body)

    def _new_client(
        self, session: str, number: int, lora: LoraConfig, seed: int | None, body: CreateBody | LoadBody
    ) -> Client:
        self.session(session)
        name, request = f"{session}:train:{number}", body.model_dump()
        if name in self.clients:
            if self.clients[name].about["request"] != request:
                message = f"model_seq_id={number} of session {session} is another model: two clients with one name"
                raise DataError(message, key="model_seq_id.reused")
            return self.clients[name]
        about = {
            "session": session,
            "lora": lora.model_dump(mode="json"),
            "seed": secrets.randbits(62) if seed is None else seed,
            "user_metadata": body.user_metadata,
            "request": request,
            "time": utc_now("microseconds"),
        }
        write_json(self.folder.entry("models", name) / ABOUT, about)
        return self.runner.add(name, about)

    def load(self, body: LoadBody) -> Client:
        """Return a new run that begins at a checkpoint; ``loaded`` waits for it. DataError, CheckpointError."""
        assert body.session_id is not None and body.model_seq_id is not None
        about = read_json(self.folder.loadable(body) / ABOUT)
        _check_optimizer(body.optimizer_config)
        if body.base_model is not None:
            self.base.check_name(body.base_model)
        lora = LoraConfig.model_validate(about["lora"], strict=False)
        client = self._new_client(body.session_id, body.model_seq_id, lora, 0, body)
        self._begin_load(client)
        return client

    def _begin_load(self, client: Client) -> None:
        """Begin to load a run's first state, if that is not on disk and nobody does it; again after a failure."""
        task = self._loads.get(client.id)
        loads = task is not None and not (task.done() and (task.cancelled() or task.exception()))
        if client.begins_at and not self.runner.has_state(client.id) and not loads:
            body = LoadBody.model_validate(client.about["request"])
            self._loads[client.id] = asyncio.create_task(self.runner.begin_at(client, body))

    async def loaded(self, name: str) -> StoredAnswer | None:
        """Return the answer to a request that made a run of a checkpoint; None: it is not there yet."""
        client = self.client(name)
        if (task := self._loads.get(name)) is not None:
            try:
                await asyncio.wait_for(asyncio.shield(task), WAIT)
            except TimeoutError:
                return None
            except TilthError as error:
                return StoredAnswer.failure(error)
        return StoredAnswer.of({"path": client.begins_at, "model_id": name, "type": "load_weights"})

    # ---- requests and answers ----

    def submit(self, model: str, seq: int, kind: str, body: bytes, request: Any, cost: int = 1) -> Operation:
        """Take a request of a client. DataError, BusyError, CheckpointError: there is no such client."""
        self._check_open()
        return self.runner.submit(self.client(model), seq, kind, body, request, cost)

    def refuse(self, model: str, seq: int, error: TilthError) -> Operation:
        """Give a request that is refused its place among the client's, so that later ones do not wait for it. Raises
        ``error`` where there is no such client."""
        if model not in self.clients:
            raise error
        return self.submit(model, seq, "refused", StoredAnswer.failure(error).body, None)

    async def submit_data(self, body: bytes, wrong: DataError | None = None) -> tuple[str, Operation]:
        """Take a request for passes; return its model. wrong: why it is refused, whatever it holds; the body may be its
        beginning alone then. DataError: it has no place among a client's requests."""
        try:
            if wrong is not None:
                raise wrong
            request = await asyncio.to_thread(self._read_data, body)  # thousands of sequences take their time
        except DataError as error:
            model, seq = place_of(body) or ("", 0)
            return model, self.refuse(model, seq, error)
        self.client(request.model)
        if request.seq < 1:
            raise DataError(f"seq_id={request.seq}; it must be at least 1", key="seq_id")
        cost = sum(datum.columns[TOKENS].size for datum in request.data) * (1 if request.forward_only else 3)
        return request.model, self.submit(request.model, request.seq, "data", body, request, cost)

    def _read_data(self, body: bytes) -> TrainRequest:
        """Return a request for passes that can run. DataError."""
        request = read_train_request(body)
        options_of(request.loss, request.options)
        check_data(request.loss, request.data, self.base.vocabulary, self.base.longest)
        if loss_named(request.loss).provenance and request.model in self.clients:
            find = partial(self.samplers.record, self.clients[request.model].session)
            check_provenance(request.data, cache(find))
        return request

    def submit_sample(self, body: SampleBody, raw: bytes) -> Operation:
        """Take a request for samples. DataError, BusyError, CheckpointError."""
        self._check_open()
        return self.samplers.submit(body, raw)

    def create_sampler(self, session: str, number: int, base_model: str | None, path: str | None) -> WeightSampler:
        """Return a sampler of the base or a checkpoint, or the one that an equal request made."""
        self.session(session)
        if not path:
            self.base.check_name(base_model or "")
            return self.samplers.create(session, number, None, None)
        about = read_json(self.folder.loadable(LoadBody(path=path, optimizer=False)) / ABOUT)
        return self.samplers.create(session, number, CheckpointPath.read(path), about["lora"])

    def _check_open(self) -> None:
        if self._closing:
            raise RequestError("the server shuts down; ask again when it is back", key="serve.closing")

    async def answer(self, name: str, seq: int, *, sampling: bool) -> StoredAnswer | None:
        """Return the answer to a request, waiting for a while; None: it is not there yet. CheckpointError: there is no
        such request, or its answer is no longer kept."""
        queue = self.samplers.find(name).queue if sampling else self.client(name).queue
        if seq not in queue.operations:
            message = f"request {seq} of {name} is unknown, or its answer is no longer kept"
            raise CheckpointError(message, key="request_id.missing")
        if not sampling:
            self.runner.hear(self.client(name).session)
        answer, work = queue.operations[seq].answer, self.runner.task
        if work is not None and not answer.done():
            either: set[asyncio.Future[Any]] = {answer, work}
            await asyncio.wait(either, timeout=WAIT, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if work is None or work.done():
            raise RequestError("the desk of this server has stopped; start it again", key="service.stopped")
        return None


def _check_optimizer(kind: OptimizerKind | None) -> None:
    """Raise DataError for an optimizer that this server has not."""
    if kind is not None and kind.type != "adamw":
        message = f"optimizer_config.type={kind.type!r} is not offered by this server; use adamw"
        raise DataError(message, key="optimizer_config.type")
