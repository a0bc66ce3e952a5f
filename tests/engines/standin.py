"""A server that speaks as ``servers/vllm_server.py`` does, over the same link, on a thread: no vLLM, no KV cache."""

import json
import os
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import safetensors.torch
import torch

from tilth.engines import vllm
from tilth.engines.sampling import Rules, choose, draws
from tilth.engines.server import Connection
from tilth.engines.servers.link import serve
from tilth.engines.vllm import VLLM, VLLMServer
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder

TOKEN = "secret"


class StandIn:
    """The methods of ``Served``. polls: after so many of them it is gone; None: it stays."""

    def __init__(self, config, polls=None):
        self.model, self.polls = Decoder(config).eval(), polls
        self.flying, self.seen, self.asleep = {}, [], False

    def ready(self, body):
        return {"version": "0", "device": "cpu"}

    def poll(self, body):
        asked = json.loads(body)
        if self.polls is not None:
            self.polls -= 1
            if self.polls < 0:
                raise SystemExit("gone")
        for wire in asked["cancel"]:
            self.flying.pop(wire, None)
        self.flying |= {one["wire"]: {**one, "left": one["max_tokens"]} for one in asked["ask"]}
        assert not self.asleep
        self.seen.append(asked)
        return {"pieces": {wire: self.advance(one) for wire, one in list(self.flying.items())}, "steps": 1}

    @torch.no_grad()
    def advance(self, one):
        ids = torch.tensor(one["prompt"])
        logits = self.model.logits(self.model(ids, PackedContext([len(ids)]))[-1:])
        number = torch.from_numpy(draws(0, [SimpleNamespace(draws=tuple(one["draws"]))], [len(ids)], 1)[:, 0])
        chosen = choose(logits, number, Rules.of([SimpleNamespace(**one["sampling"])]))
        token = int(chosen.tokens)
        one["prompt"].append(token)
        one["left"] -= 1
        if not one["left"] or token in one["stop_tokens"]:
            del self.flying[one["wire"]]
        sampling = chosen.logprobs if chosen.sampling is None else chosen.sampling
        return {"tokens": [token], "logprobs": chosen.logprobs.tolist(), "sampling": sampling.tolist(), "cached": 0}

    def forget(self, body):
        self.seen.append("forget")

    def begin_load(self, body):
        self.flying.clear()

    def load(self, body):
        self.model.load_state_dict(safetensors.torch.load(body), strict=False)

    def end_load(self, body):
        self.seen.append("weights")

    def sleep(self, body):
        self.flying.clear()
        self.asleep = True

    def wake_up(self, body):
        self.asleep = False


def _serve(*given):
    with suppress(SystemExit):
        serve(*given)


class Thread(Connection):
    """A stand-in on a thread, in place of a process."""

    def __init__(self, stand_in):
        self.stand_in = stand_in
        with socket.create_server(("127.0.0.1", 0)) as listening:
            super().__init__(listening.getsockname()[1], TOKEN)
            names = ("ready", "poll", "forget", "begin_load", "load", "end_load", "sleep", "wake_up")
            methods = {f"/{name}": getattr(stand_in, name) for name in names}
            given = (os.dup(listening.fileno()), TOKEN, methods)
            threading.Thread(target=_serve, args=given, daemon=True).start()

    def log_tail(self):
        return "out of luck"


def standing(monkeypatch, fails=()):
    """Let the engine ``vllm`` start stand-ins, which are listed. fails: polls of each one before it is gone."""
    servers, fails = [], list(fails)

    def start(engine):
        servers.append(StandIn(engine.config, fails.pop(0) if fails else None))
        return VLLMServer(Thread(servers[-1]), "cpu")

    monkeypatch.setattr(VLLM, "start_server", start)
    monkeypatch.setattr(vllm, "find_python", lambda python, *names: python)
    return servers
