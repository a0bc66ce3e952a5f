"""Desk of a training service, in one event loop: takes requests of clients, and has their answers.

A request is on disk before it is acknowledged. ``runner.ClientRunner`` runs those that train, ``samplers.SamplerDesk``
those that sample.
"""

import asyncio
import json
import secrets
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from tilth.config.schema import LoraConfig
from tilth.core.clock import utc_now
from tilth.core.errors import CheckpointError, DataError, TilthError
from tilth.engines.completion import RequestError
from tilth.serve.app import GRACE
from tilth.serve.tinker.base import ServedBase, ServiceLimits
from tilth.serve.tinker.bodies import CreateBody, LoadBody, OptimizerKind, SampleBody
from tilth.serve.tinker.client import TrainClient
from tilth.serve.tinker.folders import ABOUT, CheckpointPath, ServiceFolder, read_json, write_json
from tilth.serve.tinker.losses import TOKENS, check_data, loss_named, options_of
from tilth.serve.tinker.provenance import check_provenance
from tilth.serve.tinker.queues import BusyError, Operation, StoredAnswer
from tilth.serve.tinker.runner import Client, ClientRunner
from tilth.serve.tinker.samplers import SamplerDesk, WeightSampler
from tilth.serve.tinker.wire import TrainRequest, place_of, read_train_request

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
