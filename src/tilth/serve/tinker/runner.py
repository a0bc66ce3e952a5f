"""Runner of a training service: requests of all clients on the workers, one after another, and their states on disk.

A state is written now and then, and the requests since then run again after a kill: passes and steps are
deterministic, so every bit is that of an undisturbed server.
"""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilth.config.schema import LoraConfig
from tilth.core.clock import utc_now
from tilth.core.errors import CheckpointError, DataError, StorageError, TilthError
from tilth.engines.client import BREAKS
from tilth.engines.completion import RequestError
from tilth.process.restarts import RestartPolicy
from tilth.serve.tinker.base import ServiceLimits
from tilth.serve.tinker.bodies import AdamBody, LoadBody, SaveBody, StepBody
from tilth.serve.tinker.client import TrainClient
from tilth.serve.tinker.folders import ABOUT, CheckpointPath, ServiceFolder, expires_at, read_json, write_json
from tilth.serve.tinker.log import RequestLog
from tilth.serve.tinker.queues import FRESH, Operation, RequestQueue, StoredAnswer, next_of
from tilth.serve.tinker.samplers import SamplerDesk, sampler_name
from tilth.serve.tinker.trained import AdamStep, ModelSpec
from tilth.serve.tinker.wire import MEDIA, TrainRequest, read_train_request, write_output
from tilth.serve.tinker.worker import STATE, read_about

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
