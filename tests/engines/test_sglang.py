"""The client of SGLang, against a stand-in written from the source of SGLang 0.5.23 (``srt/entrypoints/http_server.py``
and ``srt/managers``): real exchanges have not been recorded. ``record_sglang.py`` records them where SGLang runs."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.engines.reference import CONFIG, make_engine, make_model
from tests.errors import raises
from tests.flows import tiny
from tilth.core.errors import DataError, RecipeError
from tilth.engines import sglang
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.engines.server import Connection, ServerLost
from tilth.engines.sglang import SGLang, SGLangServer
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder

MODEL, OTHER = make_model(), make_model(seed=1)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, stop_tokens=(3,))
REQUESTS = [Request(i, [1 + i, 2, 3 + i], GREEDY) for i in range(5)]


class StandIn(BaseHTTPRequestHandler):
    """Greedy answers, streamed as SGLang does."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply(b"")

    def do_POST(self):
        state = self.server.state
        if self.headers["Authorization"] != "Bearer secret" or self.headers["Content-Type"] != "application/json":
            return self.reply(b"", 401)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state["seen"].append((self.path, body))
        if self.path == "/generate":
            return self.generate(state, body)
        if self.path == "/abort_request":
            state["aborted"].add(body.get("rid"))
        if self.path == "/update_weights_from_disk":
            for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
                state["model"].load_state_dict(safetensors.torch.load_file(file), strict=False)
        self.reply(b"{}")

    def reply(self, body, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def generate(self, state, body):
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        flying = {place: (list(ids), []) for place, ids in enumerate(body["input_ids"])}
        while flying:
            for place, (ids, rows) in list(flying.items()):
                if state["left"] == 0:
                    return  # without the last line, as of a server that ended
                state["left"] -= 1
                self.advance(state["model"], ids, rows)
                given = body["sampling_params"][place]
                done = len(rows) == given["max_new_tokens"] or ids[-1] in given["stop_token_ids"]
                about = {"output_token_logprobs": rows, "output_token_logprobs_length": len(rows), "cached_tokens": 1}
                if state["incremental"]:
                    about["output_token_logprobs"] = rows[-1:]
                self.wfile.write(b"data: " + json.dumps({"index": place, "meta_info": about}).encode() + b"\n\n")
                if done or body["rid"][place] in state["aborted"]:
                    del flying[place]
            time.sleep(state["pause"])
        self.wfile.write(b"data: [DONE]\n\n")

    @torch.no_grad()
    def advance(self, model, ids, rows):
        logprobs = model.logits(model(torch.tensor(ids), PackedContext([len(ids)]))[-1:]).log_softmax(-1)[0]
        ids.append(int(logprobs.argmax()))
        rows.append([float(logprobs[ids[-1]]), ids[-1], None])

    def log_message(self, *given):
        pass


class Here(Connection):
    def alive(self):
        return False

    def log_tail(self):
        return "gone"


@pytest.fixture
def made(monkeypatch, tmp_path):
    """An engine with stand-ins, whose states are listed."""
    states = []

    def start(engine):
        folder = tmp_path / f"server-{len(states)}"
        folder.mkdir()
        server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
        server.daemon_threads = True
        server.state = {"model": Decoder(CONFIG).eval(), "seen": [], "aborted": set(), "folder": folder, **changes}
        states.append(server.state)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return SGLangServer(Here(server.server_port, "secret"), folder)

    changes = {"left": -1, "incremental": False, "pause": 0.0}
    monkeypatch.setattr(SGLang, "start_server", start)
    monkeypatch.setattr(sglang, "find_python", lambda python, *names: python)

    def make(patience=600.0, **given):
        changes.update(given)
        engine = SGLang(CONFIG, EngineOptions(seed=7, max_length=128, patience=patience))
        engine.update_weights(MODEL.named_parameters(), version=1)
        return engine

    make.states, make.changes = states, changes
    return make


def same(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        assert (a.tokens.tolist(), a.finish, a.versions) == (b.tokens.tolist(), b.finish, b.versions)
        assert np.abs(a.logprobs - b.logprobs).max() < 1e-4


@pytest.mark.parametrize("incremental", [False, True])
def test_greedy_answers_under_old_and_new_weights(made, incremental):
    engine, native = made(incremental=incremental), make_engine(MODEL)
    same(engine.generate(REQUESTS), native.generate(REQUESTS))
    for one in (engine, native):
        one.update_weights(OTHER.named_parameters(), version=2)
    same(engine.generate(REQUESTS), native.generate(REQUESTS))
    (state,) = made.states
    assert not list(state["folder"].glob("*.safetensors"))
    assert [path for path, _ in state["seen"]].count("/update_weights_from_disk") == 2


def test_an_abort_a_sleep_and_new_weights_reach_the_server(made):
    engine = made(pause=0.01)
    engine.submit(REQUESTS)
    engine.abort(0)
    done = engine.poll()
    engine.sleep()
    engine.wake_up()
    engine.reset_prefix_cache()
    while len(done) < 4:
        done += engine.poll()
    same(sorted(done, key=lambda t: t.id), make_engine(MODEL).generate(REQUESTS[1:]))
    paths = [path for path, _ in made.states[0]["seen"]]
    assert paths.index("/release_memory_occupation") < paths.index("/resume_memory_occupation")
    assert "/flush_cache" in paths and paths.count("/generate") == 2


def test_a_stream_that_breaks_is_asked_for_again(made):
    engine = made(left=17)
    made.changes["left"] = -1  # of the next one
    same(engine.generate(REQUESTS), make_engine(MODEL).generate(REQUESTS))
    assert len(made.states) == 2 and not made.states[0]["folder"].exists()


def test_a_server_that_gives_no_token_is_started_again(made, monkeypatch):
    """One that is stopped, say; requests that it has are asked for again."""
    monkeypatch.setattr(sglang, "_WAIT", 0.05)
    engine, start, done = made(pause=60.0, patience=0.2), SGLang.start_server, []

    def patient(engine):
        engine._patience, made.changes["pause"] = 600.0, 0.0
        return start(engine)

    monkeypatch.setattr(SGLang, "start_server", patient)
    engine.submit(REQUESTS)
    while len(done) < len(REQUESTS):
        done += engine.poll()
    same(sorted(done, key=lambda t: t.id), make_engine(MODEL).generate(REQUESTS))
    assert len(made.states) == 2


def test_filters_and_a_wrong_token_are_refused(made, tmp_path):
    engine = made()
    with raises(DataError, "request.filter"):
        engine.submit([Request(0, [1], SamplingParams(top_k=3))])
    engine._server.process._token = "wrong"
    with pytest.raises(ServerLost):
        engine._server.forget()
    with pytest.raises(RecipeError) as raised:
        tiny.recipe(tmp_path, rollout={"engine": "sglang", "top_p": 0.9})
    assert "rollout.top_p" in str(raised.value)
