"""Web server of ``tilth ui``: routes, and who may ask. No route changes a file or a run."""

import asyncio
import hashlib
import hmac
import math
import secrets
import time
from collections.abc import Callable, Coroutine, MutableMapping, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse

from tilth.core.errors import DataError, TilthError, parsing
from tilth.process.access import PatientProtocol, Refusal, check_address, listen, refusal
from tilth.ui.html import render, text_of
from tilth.ui.web.compare import compare_page, pages_of
from tilth.ui.web.follow import FollowedRun, News, RunsFolder, UnknownRun
from tilth.ui.web.search import SORTS, Wanted, newest_step
from tilth.ui.web.times import ReplayProcesses, health_page, lanes_of, time_page
from tilth.ui.web.views import PARTS, TOKENS, RunList, group_page, head, lines_of, marks_of, run_page, trajectories_page

BODY = 1 << 16
"""Most bytes of a request's body; no route reads one."""
SHARED = ("/runs/", "/curves.json")
"""Beginnings of paths whose answers pages share that ask for the same within ``SECONDS``, if they have at most
``LARGEST`` bytes."""
SECONDS, LARGEST = 0.5, 1 << 20
TICK = 0.5
"""Seconds between two looks at whether the server is to end."""
COOKIE = "tilth-{port}"
"""Name of the cookie; browsers send a cookie to every port of a host."""
ENTER = "/enter"
"""Path of the address that is good for one visit and leaves a cookie."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""Content security policy. Plotly sets styles of elements; it gets no inline script and no eval."""
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip
LAST = 1 << 31
METRICS = 24
"""Most curves of one request."""
Whole = Annotated[int, Query(ge=0, lt=LAST)]
Maybe = Annotated[int | None, Query(ge=0, lt=1 << 62)]
Number = Annotated[str, Query(max_length=40)]
Text = Annotated[str, Query(max_length=20_000)]
Names = Annotated[list[str], Query(max_length=METRICS)]
Axis = Annotated[str, Query(pattern="^(step|tokens|seconds)$")]
Scope = MutableMapping[str, Any]


class OneVisit:
    """Token of a server: by header, or by a cookie that the address for one visit leaves."""

    def __init__(self, token: str) -> None:
        self.token = token.encode()
        self.key = secrets.token_urlsafe(24) if token else ""
        self.cookie = secrets.token_urlsafe(32)

    def given(self, cookies: bytes, server: Any) -> bytes:
        """Return the token if the right cookie is among these. server: host and port of the request's scope."""
        for one in cookies.split(b";"):
            name, _, value = one.strip().partition(b"=")
            if name == _cookie(server).encode() and hmac.compare_digest(value, self.cookie.encode()):
                return self.token
        return b""

    def enter(self, key: str, server: Any) -> Response:
        """Return the answer to a visit of the address, which is good once."""
        if not self.key or not hmac.compare_digest(key.encode(), self.key.encode()):
            return HTMLResponse(_page("This address was used already; start tilth ui again.", 401), 401)
        self.key = ""
        answer = RedirectResponse("/", 303)
        answer.set_cookie(_cookie(server), self.cookie, httponly=True, samesite="strict")
        return answer


def _cookie(server: Any) -> str:
    return COOKIE.format(port=server[1] if server else 0)


class GuardedPages:
    """ASGI application around the pages that checks the token, Host, Origin, method and body, and adds ``HEADERS``."""

    def __init__(self, app: Any, visit: OneVisit, end: Callable[[], None]) -> None:
        """end: ends the streams of news."""
        self._app, self._visit, self.end = app, visit, end
        self._answers: dict[Any, tuple[float, list[MutableMapping[str, Any]]]] = {}
        self._locks: dict[Any, asyncio.Lock] = {}

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def sent(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        refused = self._refused(scope, headers)
        if refused is not None:
            await HTMLResponse(_page(refused.message, refused.status), refused.status)(scope, receive, sent)
        elif scope["path"].startswith(SHARED):
            await self._shared(scope, receive, sent)
        else:
            await self._app(scope, receive, sent)

    async def _shared(self, scope: Scope, receive: Any, send: Any) -> None:
        """Send the answer that another page has just had, or make it for both."""
        key = scope["method"], scope["path"], scope["query_string"]
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                made, answer = self._answers.pop(key, (0.0, []))
                if time.monotonic() - made > SECONDS:
                    answer, made = [], time.monotonic()

                    async def kept(message: MutableMapping[str, Any]) -> None:
                        answer.append(message)

                    await self._app(scope, receive, kept)
                if sum(len(message.get("body", b"")) for message in answer) <= LARGEST:
                    self._answers[key] = made, answer
                now = time.monotonic()
                for old in [k for k, (then, _) in self._answers.items() if now - then > SECONDS]:
                    del self._answers[old]
        finally:
            if not lock.locked():
                self._locks.pop(key, None)
        for message in answer:
            await send(message)

    def _refused(self, scope: Scope, headers: dict[str, bytes]) -> Refusal | None:
        if scope["method"] != "GET":
            return Refusal(405, "the page only reads: use GET")
        origin, host = headers.get("origin", b"").decode("latin-1"), headers.get("host", b"").decode("latin-1")
        if self._visit.token and origin and origin.partition("://")[2] != host:
            return Refusal(403, f"this server answers no pages of {origin[:200]}", "origin")
        if not self._visit.token and _from_elsewhere(headers):
            return Refusal(403, "without a token this server answers no pages of other sites", "sec-fetch-site")
        given = self._visit.given(headers.get("cookie", b""), scope.get("server"))
        return refusal(headers, self._visit.token, BODY, given, free=scope["path"] == ENTER and bool(self._visit.token))


def _from_elsewhere(headers: dict[str, bytes]) -> bool:
    """True for a request that a page of another site makes, as of an image, which has no Origin; a link may lead
    here."""
    linked = headers.get("sec-fetch-mode") == b"navigate" and headers.get("sec-fetch-dest", b"document") == b"document"
    return headers.get("sec-fetch-site") == b"cross-site" and not linked


class RunRoute(APIRoute):
    """Route whose answer about a run with contents that cannot be read is the error that names the run."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            runs = (
                [request.path_params["name"]] if "name" in request.path_params else request.query_params.getlist("run")
            )
            with parsing(", ".join(runs)[:200]) if runs else nullcontext():
                return await handler(request)

        return handle


class Assets:
    """Files of the page by names with a hash of their contents, so that a browser keeps them."""

    @cached_property
    def plotly(self) -> bytes:
        """Return Plotly's script."""
        from plotly.offline import get_plotlyjs

        return str(get_plotlyjs()).encode()

    @cached_property
    def files(self) -> dict[str, tuple[str, bytes]]:
        """Return name -> type and contents."""
        style = (text_of("page.css") + text_of("web.css")).encode()
        given = (("web.css", "text/css", style), ("web.js", "text/javascript", text_of("web.js").encode()),
                 ("plotly.js", "text/javascript", self.plotly))  # fmt: skip
        return {self.named(name, data): (kind, data) for name, kind, data in given}

    @staticmethod
    def named(name: str, data: bytes) -> str:
        stem, _, end = name.partition(".")
        return f"{stem}-{hashlib.sha256(data).hexdigest()[:16]}.{end}"

    @cached_property
    def links(self) -> dict[str, str]:
        """Return the plain name of each file -> its address."""
        return {f"{name.partition('-')[0]}.{name.rpartition('.')[2]}": f"/static/{name}" for name in self.files}


def _page(message: str, status: int = 200) -> str:
    return render("refused.html", message=message, status=status)


def _range(text: str, name: str) -> tuple[float | None, float | None]:
    """Return both ends of ``A:B``, of which either may be empty; a number alone is both. DataError."""
    ends = text.split(":") if ":" in text else [text, text]
    try:
        low, high = (float(end) if end.strip() else None for end in ends)
        if any(end is not None and math.isnan(end) for end in (low, high)):
            raise ValueError
    except ValueError:
        raise DataError(f"{name}={text!r} is no range; use A:B, A: or :B", key=name) from None
    return low, high


def _steps(text: str) -> range | None:
    """Return the steps of ``A:B``, the last one not among them, or of a number. DataError."""
    low, high = _range(text, "steps")
    if low is None or high is None:
        return None
    if not (0 <= low < LAST and (low < high if ":" in text else low == high) and high < LAST):
        raise DataError(f"steps={text!r}: use A:B with A below B", key="steps")
    return range(int(low), max(int(high), int(low) + 1))


def _between(steps: str, run: FollowedRun) -> tuple[int, int]:
    """Return the first and the last step of ``A:B``; "": the newest one that has trajectories. DataError."""
    low, high = _range(steps, "steps") if steps else (newest_step(run.path) or 0,) * 2
    return int(min(max(low or 0, 0), LAST - 1)), int(min(max(LAST - 1 if high is None else high, 0), LAST - 1))


def make_app(root: Path, token: str = "") -> tuple[GuardedPages, str]:
    """Return the application for a folder of runs, and the path of its address for one visit. DataError."""
    runs, assets, visit, replays = RunsFolder(root), Assets(), OneVisit(token), ReplayProcesses()
    rows, news = RunList(runs), News(runs, head, PARTS)
    app = FastAPI(title="Tilth", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.route_class = RunRoute

    def shown(template: str, run: FollowedRun | None = None, **values: Any) -> Response:
        about = {"links": assets.links, "root": runs.root.name, "name": run.path.name if run else ""}
        top = head(run.path.name, run.look()) if run else ""
        return HTMLResponse(render(template, **about, head=top, **values))

    @app.get("/")
    def listed(q: Text = "", state: Number = "", tag: Text = "", page: Whole = 0) -> Response:
        return shown("runs.html", q=q, state=state, tag=tag, **rows.page(q, state, tag, page))

    @app.get("/events")
    async def events(run: Text = "") -> Response:
        if run:
            await asyncio.to_thread(runs.get, run)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(news.of(run), headers=headers, media_type="text/event-stream")

    @app.get("/curves.json")
    def curves(run: Names, metric: Names, x: Axis = "step", smooth: Whole = 0, since: float = -1.0) -> Response:
        chosen = [runs.get(name) for name in dict.fromkeys(run)]
        tables = {one.path.name: one.refresh() for one in chosen}  # lines and version of the same table
        lines = [line for name, table in tables.items() for line in lines_of(name, table, metric, x, smooth, since)]
        versions = {name: list(table.version) for name, table in tables.items()}
        marks = marks_of(chosen[0], x) if len(chosen) == 1 else []
        return JSONResponse({"lines": lines, "marks": marks, "versions": versions})

    @app.get("/compare")
    def compare(
        run: Names = [], sweep: Text = "", q: Text = "", x: Axis = "step", smooth: Whole = 0, prompt: Text = "",  # noqa: B006
        page: Whole = 0,
    ) -> Response:  # fmt: skip
        pages = pages_of(sweep, [*map(runs.get, runs.of_sweep(sweep))]) if sweep else [[*dict.fromkeys(run)]]
        page = min(page, len(pages) - 1)
        found = compare_page([runs.get(name) for name in pages[page]], q, x, smooth, prompt, sweep)
        kept = [("sweep", sweep), ("page", page)] if sweep else [("run", name) for name in pages[page]]
        return shown("compare.html", page=page, pages=len(pages), total=sum(map(len, pages)), kept=kept, **found)

    @app.get("/runs/{name}")
    def one(name: str, q: Text = "", x: Axis = "step", smooth: Whole = 0) -> Response:
        run = runs.get(name)
        return shown("run.html", run, **run_page(run, q, x, smooth))

    @app.get("/runs/{name}/trajectories")
    def trajectories(
        name: str, steps: Number = "", reward: Number = "", length: Number = "", finish: Number = "",
        prompt: Maybe = None, text: Text = "", down: bool = False, page: Whole = 0,
        sort: Annotated[str, Query(pattern=f"^({'|'.join(SORTS)})$")] = "reward",
    ) -> Response:  # fmt: skip
        run, ranges = runs.get(name), (_range(reward, "reward"), _range(length, "length"))
        wanted = Wanted(_between(steps, run), *ranges, finish, prompt, text, sort, down, page)
        given = {"steps": steps, "reward": reward, "length": length, "finish": finish, "text": text, "sort": sort}
        given |= {"down": "1" if down else "", "prompt": "" if prompt is None else str(prompt)}
        return shown("trajectories.html", run, given=given, linked=_linked(given), **trajectories_page(run, wanted))

    @app.get("/runs/{name}/group")
    def group(
        name: str, step: Whole, group: Maybe = None, id: Maybe = None,
        tokens: Annotated[int, Query(ge=1, le=50_000)] = TOKENS,
        by: Annotated[str, Query(pattern="^(logprob|advantage|mask|version|difference)$")] = "logprob",
    ) -> Response:  # fmt: skip
        run = runs.get(name)
        return shown("group.html", run, **group_page(run, step, group, id, by, tokens))

    @app.get("/runs/{name}/time")
    def times(name: str, steps: Number = "") -> Response:
        run, chosen = runs.get(name), _steps(steps) if steps else None
        try:
            found, trouble = time_page(run, chosen), ""
        except DataError as error:
            found, trouble = {}, str(error)
        return shown("time.html", run, trouble=trouble, asked=steps, t=found)

    @app.get("/runs/{name}/lanes.json")
    def lanes(name: str, step: Whole, begin: Annotated[float, Query(ge=0, le=1)] = 0.0,
              end: Annotated[float, Query(ge=0, le=1)] = 1.0) -> Response:  # fmt: skip
        return JSONResponse(lanes_of(runs.get(name), step, (min(begin, end), max(begin, end, 1e-6))))

    @app.get("/runs/{name}/whatif")
    def whatif(name: str, first: Whole, last: Whole) -> Response:
        run = runs.get(name)
        return shown("whatif.html", run, first=first, last=last, found=replays.of(run.path, first, last))

    @app.get("/runs/{name}/health")
    def health(name: str) -> Response:
        run = runs.get(name)
        return shown("ranks.html", run, **health_page(run))

    _serve_beside_pages(app, assets, visit)
    _answer_errors(app)
    return GuardedPages(app, visit, news.end), f"{ENTER}?key={visit.key}" if token else "/"


def _serve_beside_pages(app: FastAPI, assets: Assets, visit: OneVisit) -> None:
    @app.get(ENTER)
    def enter(request: Request, key: Text = "") -> Response:
        if not visit.token:
            raise HTTPException(404)
        return visit.enter(key, request.scope.get("server"))

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        if name not in assets.files:
            raise HTTPException(404)
        kind, data = assets.files[name]
        return Response(data, media_type=kind, headers={"Cache-Control": "public, max-age=31536000, immutable"})


def _linked(given: dict[str, str]) -> Callable[..., str]:
    """Return a function that returns the query of a search with some of its values changed."""

    def query(**changed: object) -> str:
        return urlencode({k: v for k, v in {**given, **changed}.items() if v not in ("", None)})

    return query


def _answer_errors(app: FastAPI) -> None:
    async def failed(request: Request, error: Exception) -> Response:
        status = 404 if isinstance(error, UnknownRun) else 422
        return HTMLResponse(_page(str(error).partition("\n")[0][:2000], status), status)

    async def gone(request: Request, error: Exception) -> Response:
        return HTMLResponse(_page(f"a file of the run cannot be read: {getattr(error, 'strerror', error)}", 404), 404)

    async def refused(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        return HTMLResponse(_page(f"{request.url.path[:200]}: {getattr(error, 'detail', error)}", status), status)

    async def wrong(request: Request, error: Exception) -> Response:
        found: Sequence[Any] = error.errors() if isinstance(error, RequestValidationError) else []
        said = "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in found[:5])
        return HTMLResponse(_page(said, 422), 422)

    app.add_exception_handler(TilthError, failed)
    app.add_exception_handler(OSError, gone)
    app.add_exception_handler(HTTPException, refused)
    app.add_exception_handler(RequestValidationError, wrong)


class PageServer(uvicorn.Server):
    """Server of the pages on a socket that listens already; its address opens them."""

    def __init__(self, root: Path, host: str, port: int, token: str) -> None:
        """DataError: no such folder; AddressError: the host needs a token, or the port is taken."""
        check_address(host, token)
        self._pages, path = make_app(root, token)
        self.listener = listen(host, port)
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{self.listener.getsockname()[1]}{path}"
        super().__init__(
            uvicorn.Config(
                self._pages, lifespan="off", server_header=False, log_level="warning", access_log=False,
                timeout_graceful_shutdown=1, http=PatientProtocol,
            )
        )  # fmt: skip

    async def main_loop(self) -> None:
        """Wait for the end; uvicorn's own loop wakes ten times a second, which is most of what an idle server costs."""
        while not await self.on_tick(0):
            await asyncio.sleep(TICK)
        self._pages.end()  # else the connections of streams would be cut, unfinished, after the time that is granted

    def run_here(self) -> None:
        """Serve until a signal."""
        with suppress(KeyboardInterrupt):
            self.run(sockets=[self.listener])
