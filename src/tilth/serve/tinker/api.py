"""Routes of Tinker's API, as its SDK 0.38 calls them. What is not offered is refused with a sentence."""

import math
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from pydantic_core import from_json

from tilth.core.errors import CheckpointError, DataError, StorageError, TilthError
from tilth.engines.completion import RequestError
from tilth.serve.errors import first_line, wrong_fields
from tilth.serve.tinker.bodies import (
    INT32,
    ClientBody,
    CreateBody,
    FinishBody,
    LifetimeBody,
    LoadBody,
    NamedBody,
    RetrieveBody,
    SampleBody,
    SamplingSessionBody,
    SaveBody,
    SessionBody,
    StepBody,
)
from tilth.serve.tinker.desk import CHECKPOINTS, Client, TrainingDesk
from tilth.serve.tinker.folders import ABOUT, KINDS, CheckpointPath, expires_at, read_json, write_json
from tilth.serve.tinker.losses import WEIGHT
from tilth.serve.tinker.queues import BusyError, StoredAnswer
from tilth.serve.tinker.samplers import check_sample

PREFIX = "/api/v1"
LARGEST = 64 * 2**20
"""Most bytes of a body: a batch of training data."""
NUMBERED = tuple(f"{PREFIX}/{name}" for name in ("forward_backward", "optim_step", "load_weights", *CHECKPOINTS))
"""Routes of requests with a place among those of a client, which a refused one has too."""
BODIES: Mapping[str, float] = {**dict.fromkeys(NUMBERED, math.inf), f"{PREFIX}/asample": LARGEST}
"""Route -> most bytes of a body; infinite for one that limits its bodies itself."""
REFUSED: Mapping[str, str] = {
    "publish": "checkpoints of this server are not published; give others the files of save_weights_external",
    "project": "this server has no projects",
    "search": "sessions are not searched here; use list_sessions",
    "trace_export": "this server exports no traces of sessions",
    "copy_weights": "this server has one account, so weights need no copy; load them by their path",
    "create_custom_loss": "custom losses run in the client; client_config says so",
    "retrieve_futures": "answers are asked for one by one; client_config says so",
    "auth": "this server takes an API key, which it compares with its token",
    "audit": "this server keeps no audit log",
    "billing": "this server bills nobody",
}
"""Part of a route -> why it is not offered."""
UNEMBED = (
    "this server trains no adapter of the unembedding, whatever train_unembed says; those of attention and MLP are as "
    "train_attn and train_mlp say"
)
STABLE = (
    "stable_reinforce is this server's own objective under Tinker's name: REINFORCE with importance weights of at most "
    f"{WEIGHT:g}"
)
STATUS: Mapping[type[TilthError], int] = {BusyError: 429, CheckpointError: 404, DataError: 400, StorageError: 503}
Kind = TypeVar("Kind", bound=ClientBody)
Numbered = TypeVar("Numbered", StepBody, SaveBody, LoadBody)


def error_response(error: TilthError) -> JSONResponse:
    """Return the response to a request that an error refuses."""
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    if isinstance(error, RequestError):
        status = 429 if error.key == "serve.full" else 503
    if isinstance(error, DataError) and error.key == "seq_id.past":
        status = 410
    return JSONResponse({"detail": first_line(error), "key": error.key}, status)


async def taken(request: Request) -> tuple[bytes, DataError | None]:
    """Return a body; of one that is too large the beginning, and the error that says so, when all of it has come."""
    kept, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        kept += chunk[: max(LARGEST - len(kept), 0)]
    if size <= LARGEST:
        return bytes(kept), None
    return bytes(kept), DataError(f"the body has {size} bytes, the limit is {LARGEST}: send less", key="body.size")


async def read(request: Request, kind: type[Kind]) -> tuple[Kind, bytes]:
    """Return a body, read and raw. DataError names the field that is wrong."""
    raw = await request.body()
    return parsed(raw, kind), raw


def parsed(raw: bytes, kind: type[Kind]) -> Kind:
    """Return a body. DataError names the field that is wrong."""
    try:
        return kind.model_validate_json(raw or b"{}")
    except ValidationError as error:
        first = wrong_fields(error)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise DataError(f"{where}: {first['msg']}", key=where) from None


def promise(kind: str, name: str, seq: int, **more: Any) -> dict[str, Any]:
    """Return what a client asks for its answer with. kind: "f" of a model, "s" of a sampler, "c" or "l" of a new
    model."""
    return {"request_id": f"{kind}/{name}/{seq}", **more}


def numbered(
    desk: TrainingDesk,
    given: tuple[bytes, DataError | None],
    operation: str,
    kind: type[Numbered],
    check: Callable[[Numbered], None],
) -> dict[str, Any]:
    """Take a request of a client. One that is refused has its place too, so that later ones do not wait for it."""
    raw, wrong = given
    model, seq = _number(raw) or ("", 0)
    try:
        if wrong is not None:
            raise wrong
        check(parsed(raw, kind))
    except DataError as error:
        desk.refuse(model, seq, error)
    else:
        desk.submit(model, seq, operation, raw, None)
    return promise("f", model, seq, model_id=model)


def _number(raw: bytes) -> tuple[str, int] | None:
    """Return the client and number of a request whose body may be wrong in other fields; None: it has none."""
    try:
        given = from_json(raw, allow_partial=True)
    except ValueError:
        return None
    model, seq = (given.get("model_id"), given.get("seq_id")) if isinstance(given, dict) else (None, None)
    return (model, seq) if isinstance(model, str) and type(seq) is int and 1 <= seq < INT32 else None


class NamedErrorRoute(APIRoute):
    """Route whose errors are answered as the SDK reads them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except TilthError as error:
                return error_response(error)

        return answered


def router(desk: TrainingDesk) -> APIRouter:
    """Return all routes."""
    routes = APIRouter(prefix=PREFIX, route_class=NamedErrorRoute)
    _general(routes, desk)
    _training(routes, desk)
    _sampling(routes, desk)
    _listings(routes, desk)
    _checkpoints(routes, desk)

    @routes.api_route("/{rest:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def refuse(rest: str, request: Request) -> Response:
        why = next((reason for part, reason in REFUSED.items() if part in rest.split("/")), "it is unknown here")
        return JSONResponse({"detail": f"{request.method} {PREFIX}/{rest} is not offered: {why}"}, 400)

    return routes


def _general(routes: APIRouter, desk: TrainingDesk) -> None:
    @routes.post("/client/config")
    async def config() -> dict[str, Any]:
        return {"sample_max_concurrent_requests": desk.limits.requests, "custom_loss_server_side": False}

    @routes.post("/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @routes.get("/healthz")
    async def health() -> Response:
        trouble = desk.room.failure or desk.runner.trouble
        if trouble is not None:
            return JSONResponse({"detail": first_line(trouble)}, 503)
        return JSONResponse({"status": "ok"})

    @routes.get("/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        one = {"max_context_length": desk.base.longest, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **one} for name in desk.base.names]}

    @routes.post("/telemetry")
    async def telemetry(request: Request) -> dict[str, str]:
        await request.body()
        return {"status": "accepted"}

    @routes.post("/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        body, _ = await read(request, SessionBody)
        about = body.model_dump(include={"tags", "user_metadata", "display_name", "sdk_version"})
        name = desk.create_session(about, request.headers.get("x-idempotency-key", ""))
        return {"session_id": name, "type": "create_session", "warning_message": f"{UNEMBED}; {STABLE}"}

    @routes.post("/session_heartbeat")
    async def heartbeat(request: Request) -> Response:
        body, _ = await read(request, NamedBody)
        return JSONResponse({"type": "session_heartbeat"}, 200 if desk.beat(body.session_id) else 410)

    @routes.post("/sessions/{name}/finish")
    async def finish(name: str, request: Request) -> Response:
        body, _ = await read(request, FinishBody)
        desk.finish_session(name, body.reason, body.detail)
        return Response(status_code=204)


def _training(routes: APIRouter, desk: TrainingDesk) -> None:
    @routes.post("/create_model")
    async def create_model(request: Request) -> dict[str, Any]:
        body, _ = await read(request, CreateBody)
        client = desk.create_model(body)
        return promise("c", client.id, 0, model_id=client.id)

    @routes.post("/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        body, _ = await read(request, NamedBody)
        client = desk.client(body.model_id)
        name = desk.base.names[0]
        data = {"arch": desk.base.arch, "model_name": name, "tokenizer_id": desk.base.tokenizer}
        facts = {"model_data": data, "model_id": client.id, "model_name": name, "type": "get_info"}
        return {**facts, "is_lora": bool(client.spec.lora.rank), "lora_rank": client.spec.lora.rank or None}

    @routes.post("/forward_backward")
    async def forward_backward(request: Request) -> dict[str, Any]:
        if request.headers.get("content-encoding"):
            raise DataError("content-encoding: bodies are taken as they are; client_config says so", key="encoding")
        model, operation = await desk.submit_data(*await taken(request))
        return promise("f", model, operation.seq, model_id=model)

    @routes.post("/optim_step")
    async def optim_step(request: Request) -> dict[str, Any]:
        return numbered(desk, await taken(request), "optim_step", StepBody, _check_step)

    @routes.post("/load_weights")
    async def load_weights(request: Request) -> dict[str, Any]:
        given = raw, wrong = await taken(request)
        if _number(raw) is not None:
            return numbered(desk, given, "load_weights", LoadBody, lambda body: None)
        if wrong is not None:
            raise wrong
        body = parsed(raw, LoadBody)
        if body.session_id is None or body.model_seq_id is None:
            message = "load_weights needs model_id and seq_id, or session_id and model_seq_id of a new model"
            raise DataError(message, key="model_id")
        client = desk.load(body)
        return promise("l", client.id, 0, model_id=client.id)

    for kind in CHECKPOINTS:
        _save_route(routes, desk, kind)

    @routes.post("/retrieve_future")
    async def retrieve(request: Request) -> Response:
        body, _ = await read(request, RetrieveBody)
        kind, name, seq = _parsed(body.request_id)
        answer: StoredAnswer | None
        if kind == "c":
            answer = StoredAnswer.of({"model_id": desk.client(name).id, "type": "create_model"})
        elif kind == "l":
            answer = await desk.loaded(name)
        else:
            answer = await desk.answer(name, seq, sampling=kind == "s")
        if answer is None:
            facts = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(facts, 408)
        return Response(answer.body, media_type=answer.media)


def _save_route(routes: APIRouter, desk: TrainingDesk, kind: str) -> None:
    @routes.post(f"/{kind}")
    async def save(request: Request) -> dict[str, Any]:
        return numbered(desk, await taken(request), kind, SaveBody, check)

    def check(body: SaveBody) -> None:
        if body.age_encryption_recipients:
            raise DataError("age_encryption_recipients: this server does not encrypt files; leave it out", key="age")
        if body.path is None and kind != "save_weights_for_sampler":
            raise DataError(f"{kind} needs a path, the checkpoint's name", key="path")


def _check_step(body: StepBody) -> None:
    """Raise DataError for an optimizer that this server has not."""
    if body.optimizer_params is not None:
        kind = body.optimizer_params.get("type")
        message = f"optimizer_params.type={kind!r} is not offered by this server; use AdamParams"
        raise DataError(message, key="optimizer_params.type")


def _parsed(name: str) -> tuple[str, str, int]:
    """Return kind, owner and number of a request's name. DataError."""
    parts = name.split("/")
    if len(parts) != 3 or parts[0] not in ("c", "f", "l", "s") or not parts[2].isdecimal() or len(parts[2]) > 19:
        raise DataError(f"unknown request_id {name!r}", key="request_id")
    return parts[0], parts[1], int(parts[2])


def _sampling(routes: APIRouter, desk: TrainingDesk) -> None:
    @routes.post("/create_sampling_session")
    async def create(request: Request) -> dict[str, Any]:
        body, _ = await read(request, SamplingSessionBody)
        found = desk.create_sampler(body.session_id, body.sampling_session_seq_id, body.base_model, body.model_path)
        return {"sampling_session_id": found.id, "type": "create_sampling_session"}

    @routes.post("/asample")
    async def asample(request: Request) -> dict[str, Any]:
        body, raw = await read(request, SampleBody)
        check_sample(body, desk.base)
        operation = desk.submit_sample(body, raw)
        ids = [f"{body.sampling_session_id}/{operation.seq}/{i}" for i in range(body.num_samples)]
        return promise("s", body.sampling_session_id, operation.seq, sample_sequence_ids=ids)

    @routes.post("/cancel_future")
    async def cancel(request: Request) -> Response:
        body, _ = await read(request, NamedBody)
        kind, name, seq = _parsed(body.request_id)
        if kind == "s":
            desk.samplers.cancel(name, seq)
        return Response(status_code=204)

    @routes.get("/samplers/{name}")
    async def sampler(name: str) -> dict[str, Any]:
        found = desk.samplers.find(name)
        return {"sampler_id": name, "base_model": found.base_model, "model_path": found.path or None}


def _listings(routes: APIRouter, desk: TrainingDesk) -> None:
    @routes.get("/sessions")
    async def sessions(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        return {"sessions": list(reversed(desk.sessions))[offset : offset + limit]}

    @routes.get("/sessions/{name}")
    async def session(name: str) -> dict[str, Any]:
        about = desk.session(name)
        runs = [client.id for client in desk.clients.values() if client.session == name]
        samplers = [one for one in desk.samplers.samplers if one.startswith(f"{name}:")]
        facts = {key: about.get(key) for key in ("user_metadata", "display_name")}
        return {"training_run_ids": runs, "sampler_ids": samplers, **facts}

    @routes.get("/training_runs")
    async def runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        every = list(reversed(desk.clients.values()))
        cursor = {"offset": offset, "limit": limit, "total_count": len(every)}
        return {"training_runs": [_run(desk, one) for one in every[offset : offset + limit]], "cursor": cursor}

    @routes.get("/training_runs/{name}")
    async def run(name: str) -> dict[str, Any]:
        return _run(desk, desk.client(name))

    @routes.get("/checkpoints")
    async def every(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found = [_checkpoint(about) for about in desk.folder.checkpoints()][::-1]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}


def _run(desk: TrainingDesk, client: Client) -> dict[str, Any]:
    saved = [_checkpoint(about) for about in desk.folder.checkpoints(client.id)]
    newest = {one["checkpoint_type"]: one for one in saved}
    rank = client.spec.lora.rank
    metadata = client.about["user_metadata"]
    return {
        "training_run_id": client.id,
        "base_model": desk.base.names[0],
        "model_owner": "local",
        "is_lora": bool(rank),
        "lora_rank": rank or None,
        "last_request_time": client.about["time"],
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": None if metadata is None else {key: str(value) for key, value in metadata.items()},
    }


def _checkpoint(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a checkpoint as Tinker has them."""
    expires, path = about["expires"], CheckpointPath.read(about["path"])
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": KINDS[about["kind"]],
        "time": about["time"],
        "tinker_path": about["path"],
        "size_bytes": about["size"],
        "public": False,
        "user_metadata": about["user_metadata"],
        "expires_at": None if expires is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(expires)),
    }


def _checkpoints(routes: APIRouter, desk: TrainingDesk) -> None:
    base = "/training_runs/{run}/checkpoints"

    @routes.get(base)
    async def listed(run: str) -> dict[str, Any]:
        return {"checkpoints": [_checkpoint(about) for about in desk.folder.checkpoints(desk.client(run).id)]}

    @routes.delete(base + "/{kind}/{name}")
    async def delete(run: str, kind: str, name: str) -> Response:
        desk.folder.remove(desk.folder.checkpoint(CheckpointPath(run, kind, name)))
        return Response(status_code=204)

    @routes.put(base + "/{kind}/{name}/ttl")
    async def lifetime(run: str, kind: str, name: str, request: Request) -> Response:
        body, _ = await read(request, LifetimeBody)
        folder = desk.folder.checkpoint(CheckpointPath(run, kind, name))
        write_json(folder / ABOUT, {**read_json(folder / ABOUT), "expires": expires_at(body.ttl_seconds)})
        return Response(status_code=204)

    @routes.post("/weights_info")
    async def info(request: Request) -> dict[str, Any]:
        body, _ = await read(request, NamedBody)
        about = read_json(desk.folder.checkpoint(CheckpointPath.read(body.tinker_path)) / ABOUT)
        lora = about["lora"]
        parts = {"train_attn": "q_proj" in lora["targets"], "train_mlp": "up_proj" in lora["targets"]}
        facts = {"base_model": about["base_model"], "is_lora": bool(lora["rank"]), "train_unembed": False}
        return {**facts, "lora_rank": lora["rank"] or None, **parts}

    @routes.get(base + "/{kind}/{name}/external_weights_urls")
    async def urls(run: str, kind: str, name: str, request: Request) -> dict[str, Any]:
        return desk.folder.links(str(request.base_url), CheckpointPath(run, kind, name))

    @routes.get("/files/{run}/{kind}/{name}/{file}")
    async def download(run: str, kind: str, name: str, file: str, expires: int, signature: str) -> Response:
        return FileResponse(desk.folder.linked(CheckpointPath(run, kind, name), file, expires, signature))
