"""Rewards of an endpoint, of libraries and of async functions: what they answer, and what is missing."""

import json
import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.errors import raises
from tilth.core.errors import RewardError
from tilth.rewards import endpoint, verifiers
from tilth.rewards.functions import load_reward
from tilth.rewards.process_pool import RewardPool


@pytest.fixture
def server(monkeypatch):
    """A server whose answers are a list of (state, body); it notes what it was asked."""
    monkeypatch.setattr(endpoint, "PAUSE", 0.001)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append((body, self.headers.get("Authorization")))
            state, answer = self.server.answers.pop(0)
            self.send_response(state)
            if state == 302:
                self.send_header("Location", self.server.url)
            self.end_headers()
            self.wfile.write(answer if isinstance(answer, bytes) else json.dumps(answer).encode())

        def do_GET(self):
            self.server.asked.append(("GET", self.headers.get("Authorization")))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"1.0")

        def log_message(self, *_):
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    made.asked, made.answers, made.url = [], [], f"http://127.0.0.1:{made.server_port}/score"
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def test_an_endpoint_answers(server, monkeypatch):
    monkeypatch.setenv(endpoint.TOKEN, "secret")
    server.answers = [(200, {"reward": 0.5, "style": 1}), (200, 2)]
    reward = load_reward(server.url)
    assert reward("p", "c", {"answer": 3}) == {"reward": 0.5, "style": 1} and reward("p", "c", {}) == 2
    assert server.asked[0] == ({"prompt": "p", "completion": "c", "info": {"answer": 3}}, "Bearer secret")


def test_it_is_asked_again_where_that_may_help(server):
    server.answers = [(503, b""), (429, b""), (200, 1.0)]
    assert load_reward(server.url)("p", "c", {}) == 1.0 and len(server.asked) == 3


@pytest.mark.parametrize(
    "answers, key, count",
    [
        ([(404, b"")], "reward.function.url", 1),
        ([(302, b"")], "reward.function.url", 1),
        ([(500, b"")] * 9, "reward.function.url", endpoint.TRIES),
        ([(200, b"no")], "reward.function.json", 1),
        ([(200, b"1" * (endpoint.MOST + 1))], "reward.function.size", 1),
    ],
)
def test_what_is_no_reward(server, answers, key, count):
    server.answers = answers
    with raises(RewardError, key):
        load_reward(server.url)("p", "c", {})
    assert len(server.asked) == count


def test_a_url_without_a_host():
    with raises(RewardError, "reward.function.url"):
        load_reward("https:///score")


def test_nobody_listens(monkeypatch):
    monkeypatch.setattr(endpoint, "PAUSE", 0.001)
    with raises(RewardError, "reward.function.url"):
        load_reward("http://127.0.0.1:9/score")("p", "c", {})


MATH = [
    (r"so $\frac{1}{2}$", "0.5", 1.0),
    (r"\boxed{x^2+2x+1}", "$(x+1)^2$", 1.0),
    ("It is 7.", "7", 1.0),
    ("It is 8.", "7", 0.0),
    ("", "7", 0.0),
    (r"$\{1,2\}$", r"$\{2,1\}$", 1.0),
    (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", 1.0),
    ("It is 2.", r"2\sqrt{3}", 0.0),
    (r"\boxed{1000}", "10^{3}", 1.0),
    (r"\boxed{(-\infty, 3]}", r"(-\infty, 3]", 1.0),
    ("$x^2+1$", "1+x^2", 1.0),
    (r"\boxed{3yx}", "3xy", 1.0),
    (r"\boxed{5}", r"\$5", 1.0),
    (r"\boxed{10}", "10 cm", 1.0),
    ("It is 2.", "the answer is 2", 1.0),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1.0),
]


@pytest.mark.parametrize("completion, answer, value", MATH)
def test_mathematical_equivalence(completion, answer, value):
    pytest.importorskip("math_verify")
    assert load_reward("math_equal")("", completion, {"answer": answer}) == value


LATE = ["9**9**9**9", r"$\binom{99999999}{4999999}$", pytest.param(r"\boxed{9^{9^{9}}}", marks=pytest.mark.slow)]


@pytest.mark.parametrize("completion", LATE)
def test_an_answer_that_takes_too_long_is_wrong(completion, monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(verifiers, "MATH_SECONDS", 0.1)
    before = signal.getsignal(signal.SIGVTALRM)
    assert load_reward("math_equal")("", completion, {"answer": "7"}) == 0
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0) and signal.getsignal(signal.SIGVTALRM) == before
    assert "processor" in load_reward("math_equal").check({"answer": r"\binom{99999999}{4999999}"})


def test_answers_without_mathematics_are_named():
    pytest.importorskip("math_verify")
    assert load_reward("math_equal").check({"answer": "a dog"}) and not load_reward("math_equal").check({"answer": "7"})


def test_a_schema(tmp_path):
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    reward = load_reward(f"json:{tmp_path / 's.json'}")
    found = [reward("", text, {}) for text in ('{"a": 1}', '{"a": "x"}', "{")]
    assert [f["reward"] for f in found] == [1.0, 0.0, 0.0] and [f["format"] for f in found] == [1.0, 1.0, 0.0]
    for name, text in (("none.json", None), ("bad.json", "{"), ("wrong.json", '{"type": "nothing"}')):
        if text is not None:
            (tmp_path / name).write_text(text)
        with raises(RewardError, "json.schema"):
            load_reward(f"json:{tmp_path / name}")


async def slowly(prompt, completion, info):
    import asyncio

    await asyncio.sleep(0.001)
    if completion == "x":
        raise ValueError("no")
    return {"reward": len(completion), "seen": 1}


def test_an_async_function():
    with RewardPool(slowly) as pool:
        good, bad = pool.score([(0, "p", "four", {}), (1, "p", "x", {})])
    assert good.value == 4.0 and good.parts == {"seen": 1.0} and bad.value is None and bad.status == "error"
