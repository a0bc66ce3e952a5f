"""Desk of a training service: takes requests of clients, runs them one after another on the worker, keeps their state.

It lives in one event loop. A request is on disk before it is acknowledged. State is written now and then, requests
since then run again after a kill: passes and steps are deterministic, so every bit is that of an undisturbed server.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilth.config.schema import LoraConfig
from tilth.core.errors import CheckpointError, DataError, StorageError, TilthError
from tilth.serve.completion import RoomError
from tilth.serve.room import BREAKS
from tilth.service.bodies import AdamBody, CreateBody, LoadBody, SampleBody, SaveBody, StepBody
from tilth.service.folders import ABOUT, ServiceFolder, check_name, expires_at, now, read_json, write_json
from tilth.service.log import RequestLog
from tilth.service.losses import check_data, options_of
from tilth.service.queues import Operation, RequestQueue, StoredAnswer, next_of
from tilth.service.samplers import TrainRoom, WeightSampler, ensure, sample
from tilth.service.trained import AdamStep, ModelSpec
from tilth.service.wire import MEDIA, TrainRequest, read_train_request, write_output
from tilth.service.worker import STATE, read_about

STEPS = 16
"""Optimizer steps after which a model's state is written."""
FRESH = 64 * 2**20
"""Bytes of requests after which a model's state is written."""
ATTEMPTS = 3
"""Times that a request begins if its worker dies."""
EPHEMERAL = 16
"""Newest snapshots of a model, without a checkpoint's name, that are kept."""
GRACE = 30.0
"""Seconds in which requests that run may finish when the server is asked to end."""
WAIT = 20.0
"""Seconds that a request for an answer waits for it."""
TARGETS = {"train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "train_mlp": ("gate_proj", "up_proj", "down_proj")}
ALPHA = 32.0
"""Alpha of all adapters, as Tinker has it: their change is 32 / rank B A."""


@dataclass(frozen=True)
class ServedBase:
    """The base as clients see it. names: that they may call it by, the first one in answers."""

    names: tuple[str, ...]
    tokenizer: str
    arch: str
    vocabulary: int
    longest: int
    ends: tuple[int, ...]
    modules: tuple[str, ...]
    """Modules that can have adapters."""


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

    @property
    def spec(self) -> ModelSpec:
        """Shape of its model."""
        return ModelSpec(LoraConfig.model_validate(self.about["lora"], strict=False), int(self.about["seed"]))

    @property
    def session(self) -> str:
        """Session that it belongs to."""
        return str(self.about["session"])


class TrainingDesk:
    """Sessions, models, samplers and checkpoints of one base model. Call ``open`` before anything else."""

    def __init__(self, room: TrainRoom, folder: ServiceFolder, base: ServedBase, *, most: int = 1024) -> None:
        """most: requests of one client that may wait."""
        self.room, self.folder, self.base, self.most = room, folder, base, most
        self.clients = dict[str, Client]()
        self.samplers = dict[str, WeightSampler]()
        self.sessions = dict[str, dict[str, Any]]()
        self._changed = asyncio.Event()
        self._working = asyncio.Lock()
        self._loads = dict[str, asyncio.Task[None]]()
        self._closing = False
        self.trouble: StorageError | None = None
        """Why the last state could not be written; its requests are on disk."""
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read what is on disk, and begin to work on what is not answered."""
        self.sessions = dict(self.folder.entries("sessions"))
        for name, about in self.folder.entries("models"):
            self._begin_load(self._add_client(name, about))
        for name, about in self.folder.entries("samplers"):
            sampler = self._add_sampler(name, about)
            for operation in list(sampler.queue.operations.values()):
                if not operation.answer.done():
                    self._begin(sampler, operation)
        self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Stop after the requests that run, and write all states; those that wait are on disk for the next server."""
        self._closing = True
        self._changed.set()
        if self._task is not None:
            tasks = {self._task, *(task for sampler in self.samplers.values() for task in sampler.running)}
            _, late = await asyncio.wait(tasks, timeout=GRACE)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for client in self.clients.values():
            if client.alive == self.room.restarts and client.queue.next - 1 > client.saved:
                with suppress(RoomError, StorageError, *BREAKS):  # its requests are on disk
                    await self._save(client)
            client.queue.log.close()
        for sampler in self.samplers.values():
            sampler.queue.log.close()
        self.folder.lock.release()

    # ---- sessions ----

    def create_session(self, about: Mapping[str, Any], key: str) -> str:
        """Return a session's id. key: equal for a request that is sent again; "": none."""
        for name, held in self.sessions.items():
            if key and held.get("key") == key:
                return name
        name = f"s{secrets.token_hex(8)}"
        self.sessions[name] = {**about, "time": now(), "key": key, "status": "active"}
        write_json(self.folder.entry("sessions", name) / ABOUT, self.sessions[name])
        return name

    def session(self, name: str) -> dict[str, Any]:
        """Return the facts of a session. CheckpointError: there is none."""
        if name not in self.sessions:
            raise CheckpointError(f"session_id={name!r} is unknown to this server", key="session_id.missing")
        return self.sessions[name]

    def finish_session(self, name: str, reason: Mapping[str, Any], detail: str | None) -> None:
        """Note that a session is over."""
        self.session(name).update(status=reason.get("type", "success"), detail=detail)
        write_json(self.folder.entry("sessions", name) / ABOUT, self.sessions[name])

    # ---- models ----

    def client(self, name: str) -> Client:
        """Return a training run. CheckpointError: there is none."""
        if name not in self.clients:
            raise CheckpointError(f"model_id={name!r} is unknown to this server", key="model_id.missing")
        return self.clients[name]

    def _add_client(self, name: str, about: dict[str, Any]) -> Client:
        folder = self.folder.entry("models", name)
        client = Client(name, about, RequestQueue(name, RequestLog(folder / "log"), most=self.most))
        if (folder / STATE).exists():
            client.saved = int(read_about(folder)["seq"])
        done = [seq for seq, one in client.queue.operations.items() if one.answer.done()]
        client.queue.next = max([client.saved, *done]) + 1
        self.clients[name] = client
        return client

    def _named(self, name: str) -> None:
        if name not in self.base.names:
            there = ", ".join(map(repr, self.base.names))
            raise DataError(f"base_model={name!r} is not served here; there is {there}", key="base_model")

    def create_model(self, body: CreateBody) -> Client:
        """Return the new training run of a session, or the one that an equal request made. DataError."""
        self._named(body.base_model)
        if body.optimizer_config.type != "adamw":
            message = f"optimizer_config.type={body.optimizer_config.type!r} is not offered by this server; use adamw"
            raise DataError(message, key="optimizer_config.type")
        lora = LoraConfig(rank=0)
        given = body.lora_config
        if given is not None and given.rank:
            wanted = [name for key, names in TARGETS.items() if getattr(given, key) for name in names]
            targets = tuple(name for name in wanted if name in self.base.modules)
            if not targets:
                message = "lora_config: this server has adapters of attention and MLP; set train_attn or train_mlp"
                raise DataError(message, key="lora_config.targets")
            lora = LoraConfig(rank=given.rank, alpha=ALPHA, targets=targets)
        seed = None if given is None else given.seed
        return self._new_client(body.session_id, body.model_seq_id, lora, seed, body.user_metadata, body.model_dump())

    def _new_client(
        self, session: str, number: int, lora: LoraConfig, seed: int | None, metadata: Any, request: dict[str, Any]
    ) -> Client:
        self.session(session)
        name = f"{session}:train:{number}"
        if name in self.clients:
            if self.clients[name].about["request"] != request:
                message = f"model_seq_id={number} of session {session} is another model: two clients with one name"
                raise DataError(message, key="model_seq_id.reused")
            return self.clients[name]
        about = {
            "session": session,
            "lora": lora.model_dump(mode="json"),
            "seed": secrets.randbits(62) if seed is None else seed,
            "user_metadata": metadata,
            "request": request,
            "time": now(),
        }
        write_json(self.folder.entry("models", name) / ABOUT, about)
        return self._add_client(name, about)

    def load(self, body: LoadBody) -> Client:
        """Return a new run that begins at a checkpoint; ``loaded`` waits for it. DataError, CheckpointError."""
        assert body.session_id is not None and body.model_seq_id is not None
        about = read_json(self._loadable(body) / ABOUT)
        if body.base_model is not None:
            self._named(body.base_model)
        lora = LoraConfig.model_validate(about["lora"], strict=False)
        request = body.model_dump()
        client = self._new_client(body.session_id, body.model_seq_id, lora, 0, body.user_metadata, request)
        self._begin_load(client)
        return client

    def _begin_load(self, client: Client) -> None:
        """Begin to load a run's first state, if that is not on disk and nobody does it."""
        there = (self.folder.entry("models", client.id) / STATE).exists()
        if "path" in client.about["request"] and not there and client.id not in self._loads:
            self._loads[client.id] = asyncio.create_task(self._first_state(client))

    async def _first_state(self, client: Client) -> None:
        body = LoadBody.model_validate(client.about["request"])
        async with self._working:
            await self.room.call("create", client.id, client.spec, idempotent=True)
            await self.room.call("read", client.id, str(self._loadable(body)), body.optimizer)
            client.alive = self.room.restarts
            await self._save(client)

    async def loaded(self, name: str) -> StoredAnswer | None:
        """Return the answer to a request that made a run of a checkpoint; None: it is not there yet."""
        client = self.client(name)
        if (task := self._loads.get(name)) is not None:
            try:
                await asyncio.wait_for(asyncio.shield(task), WAIT)
            except TimeoutError:
                return None
            except TilthError as error:
                return failed(error, "user")
        return as_json({"path": client.about["request"].get("path"), "model_id": name, "type": "load_weights"})

    def _loadable(self, body: LoadBody) -> Path:
        folder = self.folder.checkpoint(body.path)
        about = read_json(folder / ABOUT)
        if about["fingerprint"] != self.folder.fingerprint:
            message = f"{body.path} is an adapter of another base, {about['base_model']!r}"
            raise CheckpointError(f"{message}; this server has {self.base.names[0]!r}", key="path.base")
        if body.optimizer and not about["optimizer"]:
            message = f"{body.path} was saved for sampling: it has no optimizer state; load it without"
            raise CheckpointError(message, key="path.optimizer")
        if about["kind"] == "external_weights":
            raise DataError(f"{body.path} was saved for other programs; load one of save_state", key="path.kind")
        if body.weights_access_token is not None:
            message = "weights_access_token: this server has one account; leave it out"
            raise DataError(message, key="weights_access_token")
        return folder

    def submit(self, model: str, seq: int, kind: str, body: bytes, request: Any, cost: int = 1) -> Operation:
        """Take a request of a client. DataError, BusyError, CheckpointError: there is no such client."""
        self._check_open()
        operation = self.client(model).queue.accept(seq, kind, body, request, cost)
        self._changed.set()
        return operation

    def submit_data(self, body: bytes) -> tuple[Client, Operation]:
        """Take a request for passes. DataError names what is wrong with it."""
        request = read_train_request(body)
        client = self.client(request.model)
        if request.seq < 1:
            raise DataError(f"seq_id={request.seq}; it must be at least 1", key="seq_id")
        try:
            options_of(request.loss, request.options)
            check_data(request.loss, request.data, self.base.vocabulary, self.base.longest)
        except DataError as error:  # it has its place among the client's requests
            return client, self.submit(client.id, request.seq, "refused", failed(error, "user").body, None)
        cost = sum(len(datum.tokens) for datum in request.data) * (1 if request.forward_only else 3)
        return client, self.submit(client.id, request.seq, "data", body, request, cost)

    def _check_open(self) -> None:
        if self._closing:
            raise RoomError("the server shuts down; ask again when it is back", key="serve.closing")

    # ---- the task that works ----

    async def _work(self) -> None:
        """Run requests, the client with fewest tokens first; share the time with samples evenly."""
        clock = asyncio.get_running_loop().time
        while not self._closing:
            self._changed.clear()
            queue = next_of(client.queue for client in self.clients.values())
            if queue is None:
                await self._changed.wait()
                continue
            begun = clock()
            async with self._working:
                await self._run(self.clients[queue.name])
            if self.room.load:
                await asyncio.sleep(clock() - begun)

    async def _run(self, client: Client) -> None:
        """Run the next request of a client, and write its state if that is due."""
        operation = client.queue.ready()
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
        except (StorageError, RoomError, *BREAKS) as error:  # it goes on from the requests on disk
            self.trouble = error if isinstance(error, StorageError) else None

    async def _answered(self, client: Client, operation: Operation) -> StoredAnswer:
        """Return the answer to a request, also of one that fails."""
        for attempt in range(ATTEMPTS):
            try:
                await self._revive(client, operation.seq)
                return await OPERATIONS[operation.kind](self, client, operation)
            except BREAKS as error:
                client.alive = -1
                if attempt == ATTEMPTS - 1:
                    return failed(error, "server")
            except (RoomError, StorageError) as error:
                return failed(error, "server")
            except TilthError as error:
                return failed(error, "user")
            except Exception as error:  # noqa: BLE001 - inline, a worker's own exception comes as it is
                client.alive = -1
                return failed(error, "server")
        raise AssertionError("unreachable")

    async def _revive(self, client: Client, upto: int) -> None:
        """Give the worker this model if it has not: the state on disk, and the requests since, run again."""
        if client.alive == self.room.restarts:
            return
        folder = self.folder.entry("models", client.id)
        restarts = self.room.restarts
        await self.room.call("create", client.id, client.spec)
        if (folder / STATE).exists():
            await self.room.call("read", client.id, str(folder), True)
        for seq in range(client.saved + 1, upto):
            operation = client.queue.operations[seq]
            if operation.kind in REPEATED:
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

    async def _data(self, client: Client, operation: Operation) -> StoredAnswer:
        request: TrainRequest = operation.request or read_train_request(operation.body)
        arguments = request.data, request.loss, dict(request.options), request.forward_only
        logprobs, metrics = await self.room.call("forward_backward", client.id, *arguments)
        return StoredAnswer(write_output(logprobs, metrics), MEDIA)

    async def _step(self, client: Client, operation: Operation) -> StoredAnswer:
        p = StepBody.model_validate_json(operation.body).adam_params or AdamBody()
        how = AdamStep(p.learning_rate, (p.beta1, p.beta2), p.eps, p.weight_decay, p.grad_clip_norm)
        return as_json({"metrics": await self.room.call("optim_step", client.id, how)})

    async def _refused(self, client: Client, operation: Operation) -> StoredAnswer:
        return StoredAnswer(operation.body, error=True)

    async def _load(self, client: Client, operation: Operation) -> StoredAnswer:
        body = LoadBody.model_validate_json(operation.body)
        folder = self._loadable(body)
        held = read_json(folder / ABOUT)["lora"]
        if held != client.about["lora"]:
            message = f"{body.path} has adapters of rank {held['rank']} over {held['targets']}, and this model others"
            raise CheckpointError(f"{message}; use create_training_client_from_state", key="path.lora")
        await self.room.call("read", client.id, str(folder), body.optimizer)
        return as_json({"path": body.path, "model_id": client.id, "type": "load_weights"})

    async def _save_weights(self, client: Client, operation: Operation) -> StoredAnswer:
        body, kind = SaveBody.model_validate_json(operation.body), CHECKPOINTS[operation.kind]
        if body.path is None:
            return await self._snapshot(client, body)
        check_name(body.path)
        folder = self.folder.new_checkpoint(client.id, kind, body.path)
        path = self.folder.path_of(client.id, kind, body.path)
        if (folder / ABOUT).exists() and read_json(folder / ABOUT)["seq"] != operation.seq and not body.overwrite:
            message = f"{path} exists: two checkpoints with one name; choose another, or save with overwrite=True"
            raise DataError(message, key="path.exists")
        self.folder.remove(folder)
        if kind == "external_weights":
            size = await self.room.call("export", client.id, str(folder))
        else:
            size = await self.room.call("write", client.id, str(folder), {"seq": operation.seq}, kind == "weights")
        self._describe(client, folder, kind, path, size, operation.seq, body)
        return as_json({"path": path, "type": operation.kind})

    def _describe(
        self, client: Client, folder: Path, kind: str, path: str, size: int, seq: int, body: SaveBody
    ) -> None:
        """Write the facts of a checkpoint, which make it one."""
        about = {
            "path": path,
            "kind": kind,
            "model": client.id,
            "seq": seq,
            "size": size,
            "time": now(),
            "expires": expires_at(body.ttl_seconds),
            "user_metadata": body.user_metadata,
            "lora": client.about["lora"],
            "optimizer": kind == "weights",
            "base_model": self.base.names[0],
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
        name = f"{client.session}:sample:{body.sampling_session_seq_id}"
        folder = self.folder.entry("samplers", name)
        if name not in self.samplers:
            await self.room.call("write", client.id, str(folder), {"seq": body.seq_id}, False)
            about = {"base_model": self.base.names[0], "path": "", "model": client.id, "lora": client.about["lora"]}
            about |= {"time": now(), "session": client.session}
            write_json(folder / ABOUT, about)
            self._drop_old(client)
            self._add_sampler(name, about)
        return as_json({"sampling_session_id": name, "type": "save_weights_for_sampler"})

    def _drop_old(self, client: Client) -> None:
        """Delete the oldest snapshots of a model that have no name and no request."""
        own = [s for s in self.samplers.values() if s.ephemeral and s.model == client.id]
        for sampler in [one for one in own if not one.running][: max(len(own) - EPHEMERAL + 1, 0)]:
            del self.samplers[sampler.id]
            sampler.queue.log.close()
            self.folder.remove(self.folder.entry("samplers", sampler.id))

    # ---- samplers ----

    def sampler(self, name: str) -> WeightSampler:
        """Return a sampler. CheckpointError: there is none, or its snapshot was dropped for newer ones."""
        if name not in self.samplers:
            message = f"sampling_session_id={name!r} is unknown to this server; of snapshots without a name it keeps"
            raise CheckpointError(f"{message} a model's newest {EPHEMERAL}", key="sampling_session_id.missing")
        return self.samplers[name]

    def create_sampler(self, session: str, number: int, base_model: str | None, path: str | None) -> WeightSampler:
        """Return a sampler of the base or a checkpoint, or the one that an equal request made."""
        self.session(session)
        if not path:
            self._named(base_model or "")
        name = f"{session}:sample:{number}"
        about: dict[str, Any] = {"base_model": self.base.names[0], "path": path or "", "model": "", "lora": None}
        if path:
            held = read_json(self._loadable(LoadBody(path=path, optimizer=False)) / ABOUT)
            about |= {"lora": held["lora"], "model": held["model"]}
        if name in self.samplers:
            if self.samplers[name].path != about["path"]:
                message = f"sampling_session_seq_id={number} of session {session} is another one: two clients with one"
                raise DataError(f"{message} name", key="sampling_session_seq_id.reused")
            return self.samplers[name]
        about |= {"time": now(), "session": session}
        write_json(self.folder.entry("samplers", name) / ABOUT, about)
        return self._add_sampler(name, about)

    def _add_sampler(self, name: str, about: Mapping[str, Any]) -> WeightSampler:
        own = self.folder.entry("samplers", name)
        queue = RequestQueue(name, RequestLog(own / "log"), ordered=False, most=self.most)
        sampler = WeightSampler(name, about["base_model"], queue, path=about["path"], model=about["model"])
        if about["lora"] is not None:
            lora = LoraConfig.model_validate(about["lora"], strict=False)
            folder = own
            if sampler.path:
                folder = self.folder.new_checkpoint(*_parts(sampler.path))
            sampler = replace(sampler, lora=lora, folder=folder, running=set())
        self.samplers[name] = sampler
        return sampler

    def submit_sample(self, body: SampleBody, raw: bytes) -> Operation:
        """Take a request for samples. DataError, BusyError, CheckpointError."""
        self._check_open()
        sampler = self.sampler(body.sampling_session_id)
        operation = sampler.queue.accept(body.seq_id, "sample", raw, body, body.num_samples)
        if not operation.answer.done() and operation.seq not in {int(t.get_name()) for t in sampler.running}:
            self._begin(sampler, operation)
        return operation

    def _begin(self, sampler: WeightSampler, operation: Operation) -> None:
        task = asyncio.create_task(self._sample(sampler, operation), name=str(operation.seq))
        sampler.running.add(task)
        task.add_done_callback(sampler.running.discard)

    async def _sample(self, sampler: WeightSampler, operation: Operation) -> None:
        body = operation.request or SampleBody.model_validate_json(operation.body)
        try:
            while self.room.load + body.num_samples > self.room.limits.most and self.room.load:
                await asyncio.sleep(0.05)
            busy = {one.name for one in self.samplers.values() if one.running}
            await ensure(self.room, sampler, busy)
            answer = await sample(self.room, sampler, body, self.base.longest, self.base.ends)
        except (*BREAKS, RoomError, StorageError) as error:
            answer = failed(error, "server")
        except TilthError as error:
            answer = failed(error, "user")
        except asyncio.CancelledError:
            if self._closing:  # it runs again when the server is back
                raise
            answer = failed(RoomError("the client has left", key="sample.left"), "user")
        sampler.queue.finish(operation, answer)
        if sampler.queue.fresh >= FRESH:
            sampler.queue.shorten()

    def cancel(self, sampler: str, seq: int) -> None:
        """Stop a request for samples whose client has left."""
        for task in list(self.sampler(sampler).running):
            if task.get_name() == str(seq):
                task.cancel()

    # ---- answers ----

    async def answer(self, name: str, seq: int, *, sampling: bool) -> StoredAnswer | None:
        """Return the answer to a request, waiting for a while; None: it is not there yet. CheckpointError: there is no
        such request, or its answer is no longer kept."""
        queue = self.sampler(name).queue if sampling else self.client(name).queue
        if seq not in queue.operations:
            message = f"request {seq} of {name} is unknown, or its answer is no longer kept"
            raise CheckpointError(message, key="request_id.missing")
        answer = queue.operations[seq].answer
        if self._task is not None and not answer.done():
            either: set[asyncio.Future[Any]] = {answer, self._task}
            await asyncio.wait(either, timeout=WAIT, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        if self._task is None or self._task.done():
            raise RoomError("the desk of this server has stopped; start it again", key="service.stopped")
        return None


def _parts(path: str) -> tuple[str, str, str]:
    model, kind, name = path.removeprefix("tinker://").split("/")
    return model, kind, name


def as_json(facts: Mapping[str, Any]) -> StoredAnswer:
    """Return an answer in JSON."""
    return StoredAnswer(json.dumps(facts).encode())


def failed(error: Exception, category: str) -> StoredAnswer:
    """Return the answer to a request that failed. category: whose fault it is, "user" or "server"."""
    return StoredAnswer(json.dumps({"error": str(error), "category": category}).encode(), error=True)


CHECKPOINTS = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
"""Kind of request -> part of the path of its checkpoint."""
Run = Callable[[TrainingDesk, Client, Operation], Awaitable[StoredAnswer]]
OPERATIONS: Mapping[str, Run] = {
    "data": TrainingDesk._data,
    "refused": TrainingDesk._refused,
    "optim_step": TrainingDesk._step,
    "load_weights": TrainingDesk._load,
    **dict.fromkeys(CHECKPOINTS, TrainingDesk._save_weights),
}
REPEATED = ("data", "optim_step", "load_weights")
"""Requests that change a model, which run again where their effect is not on disk."""
