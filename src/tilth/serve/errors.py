"""Errors of an HTTP server in OpenAI's form or Anthropic's, with the field that is at fault (``error.param``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from tilth.core.errors import DataError, TilthError

if TYPE_CHECKING:
    from starlette.responses import Response

Schema = TypeVar("Schema", bound=BaseModel)
RETRY = {"Retry-After": "1"}
BUSY = ("serve.full",)
ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""Status -> type of the error in Anthropic's form."""
MOST = 1000
"""Most wrong fields of a body that are looked at one by one."""
FIELDS = {
    "request.max_tokens": "max_tokens", "request.prompt": "prompt", "request.prompt.vocab_size": "prompt",
    "kv_tokens": "prompt", "request.adapter": "model", "request.adapter.engine": "model",
    "request.bias.engine": "logit_bias", "request.min_tokens": "min_tokens", "request.schema": "response_format",
    "request.schema.engine": "response_format", "request.schema.llguidance": "response_format",
    "request.likeliest.engine": "logprobs",
}  # fmt: skip
"""Key of an engine's refusal -> field of the HTTP request."""


class HttpError(Exception):
    """A response that is an error: status, message, field, OpenAI's code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI writes it."""
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic(self) -> dict[str, Any]:
        """Return the error as Anthropic writes it, with the field and the code besides."""
        kind = ANTHROPIC.get(self.status) or ("invalid_request_error" if self.status < 500 else "api_error")
        error = {"type": kind, "message": str(self), "param": self.param, "code": self.code}
        return {"type": "error", "error": error}

    def renamed(self, fields: Mapping[str, str]) -> HttpError:
        """Return the error with the names that fields of a chat completion have in another body."""
        old, text = self.param or "", str(self)
        if (new := fields.get(old.partition(".")[0])) is None:
            return self
        message = f"{new}{text.removeprefix(old)}" if text.startswith(old) else text
        return HttpError(self.status, message, new, self.code)

    def response(self, path: str) -> Response:
        """Return the response to a request of a path."""
        from starlette.responses import JSONResponse  # chat streams without a server's packages

        headers = RETRY if self.status in (429, 503) else None
        body = self.anthropic if path.startswith("/v1/messages") else self.body
        return JSONResponse(body, self.status, headers=headers)


def http_error(error: Exception) -> HttpError:
    """Return the response for an error of the engine client, of its engine, or of the text of a request."""
    if isinstance(error, HttpError):
        return error
    from tilth.engines.completion import RequestError
    from tilth.engines.protocol import EngineError  # here: they import torch, which processes of agents do without

    key = error.key if isinstance(error, TilthError) else ""
    if isinstance(error, RequestError):
        return HttpError(429 if key in BUSY else 503, first_line(error), code=key)
    if key in FIELDS or isinstance(error, DataError | EngineError):
        return HttpError(400, str(error), FIELDS.get(key), key)
    if isinstance(error, TilthError):
        return HttpError(500, first_line(error), code=key)
    return HttpError(500, f"the server failed: {type(error).__name__}", code="internal_error")


def first_line(error: Exception) -> str:
    """Return what clients read of an error: behind the first line it may have a worker's traceback, stacks or log."""
    return str(error).partition("\n")[0]


def read(schema: type[Schema], body: bytes) -> Schema:
    """Return a body as the schema has it. Raises HttpError 400 with the field, and the value that is wrong."""
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        found = wrong_fields(error)
        if found[0]["type"] == "json_invalid":
            raise HttpError(400, f"the body is not JSON: {found[0]['msg']}", "body", "json_invalid") from None
        value = json.loads(body)
        paths = [_path(one, value) for one in found]
        fits = [(len(path), not one["type"].endswith("_type")) for one, path in zip(found, paths, strict=True)]
        deepest = fits.index(max(fits))  # of a union, the branch that fits best
        first, param = found[deepest], ".".join(paths[deepest]) or "body"
        raise HttpError(400, f"{param}: {_why(first)}", param, first["type"]) from None


def wrong_fields(error: ValidationError) -> list[Mapping[str, Any]]:
    """Return what is wrong with a body, by field; of more than ``MOST`` fields, which take long to list, the count."""
    if error.error_count() > MOST:
        return [{"type": "combination", "loc": (), "msg": f"{error.error_count()} fields or values are wrong"}]
    return [*error.errors(include_url=False)]


def shortened(value: object) -> str:
    """Return how Python writes a value, or its beginning."""
    given = repr(value)
    return given if len(given) <= 80 else f"{given[:80]}..."


def _why(first: Mapping[str, Any]) -> str:
    if first["type"] == "extra_forbidden":
        return "there is no such field, or this server does not support it"
    if first["type"] == "missing":
        return "this field is required"
    if first["type"] == "combination":
        return str(first["msg"])
    return f"{first['msg'].removeprefix('Value error, ')}, not {shortened(first['input'])}"


def _path(wrong: Mapping[str, Any], value: Any) -> list[str]:
    """Return the path of a field in a body, without the branches of unions that the place of an error names."""
    extra = filter(None, [wrong.get("ctx", {}).get("field")])
    place, named = [*wrong["loc"], *extra], wrong["type"] in ("missing", "combination")
    path = []
    for number, part in enumerate(place):
        index = isinstance(value, list) and isinstance(part, int)  # a name in range(n) is compared n times
        inside = 0 <= part < len(value) if index else isinstance(value, dict) and part in value
        if inside:
            value = value[part]
        elif not (named and number == len(place) - 1):
            continue
        path.append(str(part))
    return path
