"""Who may ask a server, how much, and how it ends."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from tests.errors import raises
from tests.models.tiny import FAMILIES
from tests.patience import patience
from tests.serve.servers import WEATHER, client_of, model_folder, raw, running
from tilth.config.schema import ModelConfig
from tilth.core.errors import DataError, WorkerError
from tilth.core.memory import Room
from tilth.engines.completion import RequestError
from tilth.models.family import new_config
from tilth.plan.shape import kv_bytes, parameters
from tilth.process.access import AddressError, PatientProtocol, check_address, listen
from tilth.runs.models import load_model
from tilth.serve import start
from tilth.serve.app import BODY, bare_app
from tilth.serve.errors import http_error
from tilth.serve.start import ServeOptions, open_server, served_name

TOKEN = "a secret"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("served"))


@pytest.mark.parametrize("gpu", [False, True])
def test_the_cache_of_a_server_leaves_memory_for_passes(monkeypatch, gpu):
    """All rows at their longest, if half of what is free beside the weights holds them, and one in any case."""
    config = new_config(ModelConfig(context=256), 64)
    token, weights = kv_bytes(config, 2 if gpu else 4), 2 * parameters(config) * gpu
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    for tokens, wanted in ((10**6, start.ROWS * 256), (2000, 1000), (0, 256)):
        room = Room(1 << 40, weights + tokens * token, "this machine")
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda room=room: (room.free, room.total))
        monkeypatch.setattr(start, "host_memory", lambda room=room: room)
        assert start.kv_capacity(config) == wanted
    if not gpu:  # latents of a family are whole keys and values in parity mode
        config = FAMILIES["deepseek-v3"]
        monkeypatch.setattr(start, "host_memory", lambda: Room(1 << 40, 2000 * kv_bytes(config, 4), "this machine"))
        assert start.kv_capacity(config, parity=True) < start.kv_capacity(config) == 1000


@pytest.fixture(scope="module")
def guarded(model):
    with running(model, token=TOKEN) as (_, found):
        yield found


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_beyond_this_machine_a_token_is_needed(host, model):
    with raises(AddressError, "--token"):
        open_server(model, ServeOptions(host=host))
    check_address(host, TOKEN)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_on_this_machine_none_is(host):
    check_address(host, "")


def test_a_port_that_is_taken_is_named(model):
    with socket.create_server(("127.0.0.1", 0)) as other, raises(AddressError, "--port"):
        open_server(model, ServeOptions(port=other.getsockname()[1]))


def test_a_worker_without_kernels_is_told_of_once(model, monkeypatch, capsys):
    monkeypatch.setattr(start.row_product, "missing", lambda: "there are no kernels")
    monkeypatch.setattr(start, "open_cluster", lambda *_, **__: None)
    for backend, said in (("local", "tilth: there are no kernels\n"), ("inline", "")):
        start._room(str(model), load_model(str(model)), ServeOptions(backend=backend), 1, lambda cluster, make: None)
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("host", ["203.0.113.1", "not a name"])
def test_an_address_of_another_machine_is_named(host):
    with raises(AddressError, "--host"):
        listen(host, 0)


def test_two_servers_that_start_at_once_do_not_share_a_port():
    with listen("127.0.0.1", 0) as door, raises(AddressError, "--port"):
        listen("127.0.0.1", door.getsockname()[1])


def test_an_adapter_has_another_name_than_the_model(model):
    for name in (model, Path(model).name):
        with raises(DataError, "--adapter"):
            open_server(model, ServeOptions(port=0, adapters={name: "somewhere"}))


@pytest.mark.parametrize(
    "model, name",
    [
        ("runs/sorter", "sorter"),
        ("runs/sorter@best", "sorter@best"),
        ("/a/b/", "b"),
        (".", Path.cwd().name),
        ("s3://bucket/sorter", "sorter"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("tests/Qwen3-0.6B", "Qwen3-0.6B"),
    ],
)
def test_the_name_of_a_model_has_no_slash_but_that_of_the_hub(model, name):
    assert served_name(model, ServeOptions()) == name
    assert served_name(model, ServeOptions(name="Org/named")) == "Org/named"


@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer other"}, {"Authorization": TOKEN[:-1]}, {"X-API-Key": ""}]
)
def test_a_wrong_token_is_refused(guarded, headers):
    for path in ("/v1/models", "/metrics", "/nowhere"):
        found = httpx.get(guarded.removesuffix("/v1") + path, headers=headers)
        assert found.status_code == 401 and TOKEN not in found.text


def test_the_token_opens(guarded, model):
    with client_of(guarded, TOKEN) as client:
        assert [one.id for one in client.models.list()] == [Path(model).name]
    with pytest.raises(openai.AuthenticationError), client_of(guarded, "other") as client:
        client.models.list()
    base = guarded.removesuffix("/v1")
    assert httpx.get(f"{base}/health").status_code == 200
    for headers in ({"X-API-Key": TOKEN}, {"authorization": f"bearer {TOKEN}"}, {"Authorization": f"BEARER  {TOKEN}"}):
        assert httpx.get(f"{base}/v1/models", headers=headers).status_code == 200


def test_a_client_that_leaves_in_its_body_is_no_failure(guarded, caplog):
    port = int(guarded.removesuffix("/v1").rpartition(":")[2])
    for _ in range(2):  # the second is answered after the first
        with socket.create_connection(("127.0.0.1", port)) as door:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9"
            door.sendall(f"{head}\r\n\r\n{{".encode())
            door.shutdown(socket.SHUT_WR)
            door.recv(1)
    assert not [one for one in caplog.records if one.exc_info]


def test_tools_that_a_template_cannot_list_are_refused(model, tmp_path):
    turn = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    end = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (tmp_path / "plain.jinja").write_text("{% for m in messages %}" + turn + "{% endfor %}" + end)
    with running(model, template=str(tmp_path / "plain.jinja")) as (_, address):
        body = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert raw(address, "/v1/chat/completions", **body)[0] == 200
        status, said = raw(address, "/v1/chat/completions", **body, tools=[WEATHER])
    assert (status, said["error"]["param"]) == (400, "tools") and "--template" in said["error"]["message"]


def test_a_traceback_of_a_worker_stays_here():
    for kind in (WorkerError, RequestError):
        assert str(http_error(kind("rank 0: it broke\nTraceback ..."))) == "rank 0: it broke"


def test_health_needs_no_token_so_it_has_no_traceback(model):
    with running(model, token=TOKEN) as (server, address):
        server.room.failure = WorkerError("rank 0: it broke\nTraceback ...", key="serve.advance")
        found = httpx.get(f"{address.removesuffix('/v1')}/health")
        server.room.failure = None
        assert found.status_code == 503 and "it broke" in found.text and "Traceback" not in found.text


def test_too_large_a_body_is_refused(guarded):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    found = httpx.post(f"{guarded}/completions", content=b" " * (BODY + 1), headers=headers)
    assert found.status_code == 413
    chunks = (b" " * (1 << 20) for _ in range(9))
    assert httpx.post(f"{guarded}/completions", content=chunks, headers=headers).status_code == 413


HOSTS = [("LOCALHOST:1", 200), ("[::1]", 200), ("[::1]:8000", 200), ("127.0.0.2", 200), ("127.0.0.1", 200)]
HOSTS += [("localhost.evil.example", 403), ("evil.example:127.0.0.1", 403), ("", 403), (b"\xff\xfe", 403)]


def test_without_a_token_it_is_this_machine_only(model):
    with running(model) as (_, address):
        found = httpx.get(f"{address}/models", headers={"Host": "evil.example:80"})
        assert (found.status_code, found.json()["error"]["param"]) == (403, "host")
        for host, status in HOSTS:
            assert httpx.get(f"{address}/models", headers={"Host": host}).status_code == status, host
        for method, path in (("GET", "/v1/completions"), ("GET", "/v2")):
            found = httpx.request(method, address.removesuffix("/v1") + path)
            assert found.status_code in (404, 405) and found.json()["error"]["message"]


ORIGINS = [("http://localhost:3000", 200), ("http://127.0.0.1", 200), ("https://[::1]:1", 200), ("null", 403)]
ORIGINS += [("https://evil.example", 403), ("http://localhost.evil.example:80", 403), (b"\xff", 403)]


def test_without_a_token_pages_of_other_machines_are_refused(model, guarded):
    with running(model) as (_, address):
        for origin, status in ORIGINS:
            found = httpx.get(f"{address}/models", headers={"Origin": origin})
            assert found.status_code == status, origin
            assert status == 200 or found.json()["error"]["param"] == "origin"
    headers = {"Origin": "https://evil.example", "Authorization": f"Bearer {TOKEN}"}
    assert httpx.get(f"{guarded}/models", headers=headers).status_code == 200


@contextmanager
def patient(app):
    """A server of an application; yields its port."""
    door = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", http=PatientProtocol))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [door]})
    thread.start()
    try:
        yield door.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("begin", [b"", HEAD, HEAD + b"\r\n" + HEAD], ids=["nothing", "part", "second"])
def test_a_connection_ends_whose_headers_do_not(monkeypatch, begin):
    monkeypatch.setattr("tilth.process.access.SILENCE", 0.1)
    with patient(bare_app()) as port, socket.create_connection(("127.0.0.1", port), patience(20)) as client:
        client.sendall(begin)
        with suppress(ConnectionError):
            while client.recv(1 << 16):  # raises TimeoutError while it stays open
                pass


@pytest.mark.parametrize("reads", [False, True])
def test_a_stream_ends_whose_client_reads_nothing(monkeypatch, reads):
    monkeypatch.setattr("tilth.process.access.SILENCE", 0.1)
    left = threading.Event()

    async def app(scope, receive, send):
        async def until_gone():
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.ensure_future(until_gone())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(1 << 18), "more_body": True})
            await asyncio.sleep(0)
        left.set()

    with patient(app) as port, socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(HEAD + b"\r\n")
        if reads:
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                assert client.recv(1 << 16)
                time.sleep(0.01)
            client.close()
        assert left.wait(patience(20))


def test_a_body_ends_that_does_not_go_on(monkeypatch, model):
    monkeypatch.setattr("tilth.serve.app.SILENCE", 0.1)
    with running(model) as (server, _), socket.create_connection(server.listener.getsockname(), patience(20)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        assert b" 408 " in client.recv(1 << 16).partition(b"\r\n")[0]


def asked(model, most, **more):
    return {"model": model, "prompt": "what is it?", "max_tokens": most, "seed": 1, **more}


def test_clients_that_leave_take_their_requests_along(model):
    async def leave(room, address):
        async with httpx.AsyncClient(timeout=60) as client:
            for stream in (True, False):
                task = asyncio.create_task(
                    client.post(f"{address}/completions", json=asked(model, 200, n=8, stream=stream))
                )
                while not room.load:
                    await asyncio.sleep(0.001)
                task.cancel()
                late = time.monotonic() + patience(20)
                while room.load and time.monotonic() < late:
                    await asyncio.sleep(0.005)
                assert not room.load and not room._running

    with running(model) as (server, address):
        asyncio.run(leave(server.room, address))
        while server.room.status()["in_flight"]:
            time.sleep(0.01)
        with client_of(address) as client:
            assert client.completions.create(**asked(model, 4)).usage.completion_tokens


def test_beyond_its_places_it_asks_to_come_again(model):
    with running(model) as (server, address), client_of(address) as client:
        server.room.most = 3
        long = client.completions.create(**asked(model, 200, n=2, stream=True))
        next(iter(long))
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**asked(model, 4, n=2))
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**asked(model, 4, n=4))
        assert caught.value.param == "n"
        assert client.completions.create(**asked(model, 4)).choices
        long.close()


def test_asked_to_end_it_lets_finish_and_takes_nothing_more(model):
    found = {}
    with running(model) as (server, address), client_of(address) as client:
        stream = client.completions.create(**asked(model, 150, stream=True))
        first = next(iter(stream))
        server.handle_exit(signal.SIGTERM, None)
        found["text"] = first.choices[0].text + "".join(part.choices[0].text for part in stream)
    with running(model) as (_, address), client_of(address) as client:
        assert client.completions.create(**asked(model, 150)).choices[0].text == found["text"]


@pytest.mark.dist
@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_end_and_survives_its_worker(model):
    command = [sys.executable, "-m", "tilth", "serve", model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = process.stderr.readline().partition(" at ")[2].partition(";")[0]
            with client_of(address) as client:
                whole = client.completions.create(**asked(model, 200)).choices[0].text
                parts = client.completions.create(**asked(model, 200, stream=True))
                text = next(iter(parts)).choices[0].text
                kill_worker(address)
                assert text + "".join(part.choices[0].text for part in parts) == whole
                kill_worker(address)
                assert client.completions.create(**asked(model, 200)).choices[0].text == whole
                page = httpx.get(f"{address.removesuffix('/v1')}/metrics").text
                assert "tilth_worker_restarts_total" in page and "tilth_worker_restarts_total 0.0" not in page
            process.send_signal(signal.SIGTERM)
            assert process.wait(patience(60)) == 0
        finally:
            process.kill()


def kill_worker(address):
    """Kill the server's worker."""
    page = httpx.get(f"{address.removesuffix('/v1')}/metrics").text
    pid = next(line.split()[1] for line in page.splitlines() if line.startswith("tilth_engine_pid "))
    os.kill(int(float(pid)), signal.SIGKILL)


def test_errors_are_json(guarded):
    assert json.loads(httpx.get(f"{guarded}/models").text)["error"]["code"] == "invalid_api_key"
