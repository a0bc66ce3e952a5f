"""Engines whose computation a server does: what is lost with a server, what ends with this process, what is refused."""

import gc
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.engines.reference import CONFIG, make_engine, make_model, make_requests
from tests.engines.standin import TOKEN, StandIn, Thread, standing
from tests.engines.test_stops import WRITES as TOKENIZER
from tests.errors import raises
from tests.flows import tiny
from tilth.core.errors import ModelError, NonFiniteError, RecipeError
from tilth.engines import server
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.engines.server import EngineProcess, ServerError, ServerLost, find_python
from tilth.engines.vllm import VLLM, VLLMServer

MODEL, OTHER = make_model(), make_model(seed=1)
REQUESTS = make_requests(10, longest=20)


def remote(**options):
    engine = VLLM(CONFIG, EngineOptions(seed=7, max_length=256, **options))
    engine.update_weights(MODEL.named_parameters(), version=1)
    return engine


def told(trajectories):
    return [(t.tokens.tolist(), t.finish, t.versions, t.text) for t in trajectories]


def test_a_server_says_what_the_native_engine_says(monkeypatch):
    standing(monkeypatch)
    ours, theirs = make_engine(MODEL).generate(REQUESTS), remote().generate(REQUESTS)
    assert told(ours) == told(theirs)
    for a, b in zip(ours, theirs):
        assert np.abs(a.logprobs - b.logprobs).max() < 1e-4
        assert (a.sampling_logprobs is None) == (b.sampling_logprobs is None)
        if a.sampling_logprobs is not None:
            assert np.abs(a.sampling_logprobs - b.sampling_logprobs).max() < 1e-4


def test_a_lost_server_is_replaced_with_its_weights_and_asked_for_what_is_missing(monkeypatch):
    servers = standing(monkeypatch, fails=[5, 0, 7])
    engine = remote()
    engine.submit(REQUESTS)
    found = {}
    while len(found) < len(REQUESTS):
        found |= {t.id: t for t in engine.poll()}
    assert told(found[r.id] for r in REQUESTS) == told(make_engine(MODEL).generate(REQUESTS))
    assert len(servers) == 4
    again = servers[2].seen[1]["ask"]
    assert all(len(one["prompt"]) > len(REQUESTS[int(one["wire"].split(".")[0])].prompt) for one in again)


def test_a_server_that_stands_still_is_replaced(monkeypatch):
    servers, stands = standing(monkeypatch), threading.Event()
    engine, start = remote(patience=0.2), VLLM.start_server

    def patient(engine):
        engine._patience = 600.0
        return start(engine)

    monkeypatch.setattr(VLLM, "start_server", patient)
    monkeypatch.setattr(servers[0], "advance", lambda one: stands.wait(60))
    engine.submit(REQUESTS)
    found = {}
    while len(found) < len(REQUESTS):
        found |= {t.id: t for t in engine.poll()}
    stands.set()
    assert told(found[r.id] for r in REQUESTS) == told(make_engine(MODEL).generate(REQUESTS)) and len(servers) == 2


def test_a_server_that_always_ends_is_an_error_with_its_last_words(monkeypatch):
    servers = standing(monkeypatch, fails=[0] * 9)
    engine = remote()
    with raises(ServerError, "rollout.engine.server") as raised:
        engine.generate(REQUESTS[:1])
    assert "out of luck" in str(raised.value) and len(servers) == 4


def test_weights_reach_a_server_that_ends_while_it_takes_them(monkeypatch):
    servers = standing(monkeypatch)
    engine = remote()

    monkeypatch.setattr(engine._server.process, "call", lambda *given: (_ for _ in ()).throw(ServerLost("gone")))
    engine.update_weights(OTHER.named_parameters(), version=2)
    assert [len(servers), engine.version] == [2, 2]
    wanted = make_engine(OTHER).generate(REQUESTS)
    assert [t.tokens.tolist() for t in engine.generate(REQUESTS)] == [t.tokens.tolist() for t in wanted]


def test_stop_strings_end_a_completion_and_its_request(monkeypatch):
    servers = standing(monkeypatch)
    params = SamplingParams(max_tokens=60, stop=(TOKENIZER.decode([7]), TOKENIZER.decode([11, 2])))
    requests = [Request(i, [1, 2, 3], params) for i in range(6)]
    engine, native = remote(tokenizer=TOKENIZER), make_engine(MODEL, tokenizer=TOKENIZER)
    found = engine.generate(requests)
    assert told(found) == told(native.generate(requests))
    assert "stop" in {t.finish for t in found}
    engine.generate([Request(9, [1], SamplingParams(max_tokens=1))])
    assert not servers[0].flying


def test_weights_of_other_names_or_shapes_are_refused(monkeypatch):
    standing(monkeypatch)
    whole = dict(MODEL.named_parameters())
    name = "model.norm.weight"
    for weights, problem in (
        ({**whole, "more": whole[name]}, "more.extra"),
        ({**whole, name: torch.ones(3)}, f"{name}.shape"),
        ({n: t for n, t in whole.items() if n != name}, f"{name}.missing"),
    ):
        with raises(ModelError, problem):
            VLLM(CONFIG, EngineOptions()).update_weights(weights.items(), version=1)


def test_logits_that_are_not_finite_stop_the_run(monkeypatch):
    standing(monkeypatch)
    engine = remote()
    broken = {n: torch.full_like(t, torch.nan) for n, t in MODEL.named_parameters()}
    engine.update_weights(broken.items(), version=2)
    with raises(NonFiniteError, "logits"):
        engine.generate(REQUESTS[:1])


def test_a_server_answers_nobody_without_the_token():
    stand_in = Thread(StandIn(CONFIG))
    for token, path, status in (("wrong", "/ready", 401), ("", "/poll", 401), (TOKEN, "/nothing", 404)):
        asking = http.client.HTTPConnection("127.0.0.1", stand_in.port, timeout=10)
        asking.request("POST", path, b"{}", {"Authorization": f"Bearer {token}"} if token else {})
        assert asking.getresponse().status == status
    assert stand_in.call("ready")["device"] == "cpu"


def test_a_fork_leaves_the_server_to_the_engines_process(monkeypatch):
    standing(monkeypatch)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    monkeypatch.setattr(VLLMServer, "stop", lambda server: os.write(writer, b"x"))
    engine = remote()
    if (fork := os.fork()) == 0:
        del engine
        gc.collect()
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    del engine
    gc.collect()
    assert os.read(reader, 2) == b"x"


# ---- the process ----

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import json, os, link
settings = link.receive_settings()
link.end_with(os.getppid(), settings["folder"])
print("this is the log", flush=True)
def name(body):
    return [os.getpid(), settings["seed"], os.environ.get("PYTHONPATH"), os.environ["MINE"]]
def fail(body):
    raise ValueError("broken")
link.serve(settings["listening"], settings["token"], {{"/name": name, "/fail": fail}})
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(folder=str(Path(server.__file__).parent / "servers")))
    (tmp_path / "left").mkdir()
    return path


def start(program):
    settings = {"folder": str(program.parent / "left"), "seed": 5}
    return EngineProcess(sys.executable, str(program), settings, {"MINE": "1"})


def test_a_process_answers_and_its_end_is_seen(program):
    process = start(program)
    assert process.call("name") == [process.pid, 5, None, "1"]
    with pytest.raises(ServerLost):
        process.call("fail")
    deadline = time.monotonic() + 30  # the answer is lost before all of the log is written
    while "broken" not in process.log_tail() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.stop()
    assert "this is the log" in process.log_tail() and "broken" in process.log_tail()
    assert not psutil.pid_exists(process.pid)
    with pytest.raises(ServerLost):
        process.call("name")


def test_a_process_ends_with_its_parent_however_that_ends(program):
    given = (str(program), {"folder": str(program.parent / "left"), "seed": 5}, {"MINE": "1"})
    code = (
        f"import sys, time; from tilth.engines.server import EngineProcess; given = {given!r};"
        "p = EngineProcess(sys.executable, *given); p.call('name'); print(p.pid, flush=True); time.sleep(100)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    found = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs([found], timeout=30)
    assert not alive and not (program.parent / "left").exists()


def test_an_interpreter_without_the_engine_is_named_before_the_run(tmp_path):
    with raises(RecipeError, "rollout.python"):
        find_python(str(tmp_path / "python"), "vllm", "vllm")
    with raises(RecipeError, "rollout.python.package"):
        find_python("", "vllm", "no_such_package")
    assert find_python("", "vllm", "json") == sys.executable


@pytest.mark.parametrize(
    "sections, key",
    [
        ({"rollout": {"python": "python3"}}, "rollout.python.engine"),
        ({"rollout": {"options": {"a": 1}}}, "rollout.options"),
        ({"rollout": {"engine": "vllm"}, "train": {"parity": True}}, "train.parity.engine"),
        ({"rollout": {"engine": "vllm", "speculate": "suffix"}}, "rollout.speculate.engine"),
    ],
)
def test_keys_that_an_engine_does_not_have_are_refused(tmp_path, sections, key):
    with pytest.raises(RecipeError) as raised:
        tiny.recipe(tmp_path, **sections)
    assert key.rsplit(".", 1)[0] in str(raised.value)
