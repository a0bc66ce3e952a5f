"""The generation engine SGLang, over its own HTTP server; untested against a real one."""

import http.client
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from tilth.core.errors import DataError
from tilth.core.random import stream_id
from tilth.engines.options import EngineOptions
from tilth.engines.remote import Ask, Continuation, EngineServer, RemoteEngine
from tilth.engines.request import SequenceState
from tilth.engines.server import Connection, EngineProcess, ServerLost, find_python
from tilth.models.config import DecoderConfig

_WAIT = 1.0
"""Seconds that a poll waits for the next token."""
_START = 600.0
"""Seconds after which a server that does not answer is given up."""


class SGLang(RemoteEngine):
    """Engine SGLang, in a process of its own with the interpreter ``options.python``.

    ``options.arguments`` are further arguments of SGLang's ``ServerArgs``. SGLang draws the tokens, by
    ``sampling_seed`` if it runs with ``enable_deterministic_inference``; its log-probs are those at the temperature
    before filters, so that filters, whose log-probs it does not return, are refused.
    """

    name = "sglang"

    def __init__(self, config: DecoderConfig, options: EngineOptions) -> None:
        super().__init__(config, options)
        self.python = find_python(options.python, self.name, "sglang")
        kind, name = torch.device(options.device).type, str(options.dtype).removeprefix("torch.")
        self._config = {**config.to_hf(), "torch_dtype": name}
        self._arguments = {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "device": kind,
            "dtype": name,
            "context_length": self.max_length,
            "max_running_requests": options.max_rows,
            "max_total_tokens": options.kv_tokens or options.max_rows * self.max_length,
            "chunked_prefill_size": options.step_tokens,
            "random_seed": options.seed,
            "disable_cuda_graph": not options.compile,
            "enable_memory_saver": kind == "cuda",
            **options.arguments,
        }

    def start_server(self) -> "SGLangServer":
        folder = Path(tempfile.mkdtemp(prefix="tilth-sglang-"))
        (folder / "config.json").write_text(json.dumps(self._config))
        settings = {"folder": str(folder), "arguments": {**self._arguments, "model_path": str(folder)}}
        return SGLangServer(EngineProcess(self.python, "sglang_server.py", settings, {}), folder)

    def _check(self, answer: SequenceState, seen: set[int]) -> None:
        super()._check(answer, seen)
        if answer.request.params.filtered:
            message = f"request {answer.request.id}: top_k, top_p and min_p need log-probs that SGLang does not return"
            raise DataError(f"{message}; leave them out, or use rollout.engine = vllm", key="request.filter")


class SGLangServer(EngineServer):
    """A running server of SGLang. Requests that are asked together are one stream, read by a thread of its own."""

    def __init__(self, process: Connection, folder: Path) -> None:
        self.process, self.folder, self._ready = process, folder, False
        self._news: SimpleQueue[tuple[str, Continuation] | ServerLost] = SimpleQueue()
        self._silent = 0.0
        """Seconds that polls have waited since the newest token."""

    def advance(self, cancel: list[str], asks: list[Ask], seconds: float) -> tuple[dict[str, Continuation], int]:
        for wire in cancel:
            self._post("abort_request", {"rid": wire})
        if asks:
            threading.Thread(target=self._read, args=(asks,), daemon=True).start()
        found: dict[str, Continuation] = {}
        try:
            new = self._news.get(timeout=_WAIT)
            while True:
                if isinstance(new, ServerLost):
                    raise new
                wire, more = new
                found[wire] = _joined(found[wire], more) if wire in found else more
                new = self._news.get_nowait()
        except Empty:
            self._silent = 0.0 if found else self._silent + _WAIT
            if self._silent >= seconds:
                raise ServerLost(f"generate: no token for {self._silent:g} s") from None
            return found, 0

    def _read(self, asks: list[Ask]) -> None:
        """Ask, and pass on what is streamed."""
        seen = [0] * len(asks)
        try:
            for line in self.process.stream("generate", _asked(asks)):
                if line.strip() == b"data: [DONE]":
                    return
                if not line.startswith(b"data: "):
                    continue
                answer = json.loads(line.removeprefix(b"data: "))
                if "error" in answer:
                    raise ServerLost(f"generate: {answer['error']}")
                place, about = answer.get("index", 0), answer["meta_info"]
                rows = about["output_token_logprobs"]  # all of them, or the newest ones
                first = about.get("output_token_logprobs_length", len(rows)) - len(rows)
                new = rows[max(0, seen[place] - first) :]
                seen[place] += len(new)
                logprobs = [row[0] for row in new]
                tokens = [row[1] for row in new]
                self._news.put((asks[place].wire, Continuation(tokens, logprobs, [], about.get("cached_tokens", 0))))
            raise ServerLost("generate: the stream ended before its end")
        except ServerLost as lost:
            self._news.put(lost)
        except (OSError, http.client.HTTPException) as error:
            self._news.put(ServerLost(f"generate: {error!r}"))

    def forget(self) -> None:
        self._post("flush_cache", {})

    def load(self, buckets: Iterable[bytes]) -> None:
        self._wait()
        self._post("abort_request", {"abort_all": True})
        files = []
        for number, bucket in enumerate(buckets):
            files.append(self.folder / f"model-{number:05d}.safetensors")
            files[-1].write_bytes(bucket)
        self._post("update_weights_from_disk", {"model_path": str(self.folder), "abort_all_requests": True})
        for file in files:
            file.unlink()

    def _wait(self) -> None:
        """Wait until the server answers; SGLang opens its port when the model is there."""
        end = time.monotonic() + _START
        while not self._ready:
            try:
                self.process.request("GET", "health")
                self._ready = True
            except ServerLost:
                if not self.process.alive() or time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def sleep(self) -> None:
        self._post("abort_request", {"abort_all": True})
        self._post("release_memory_occupation", {"tags": ["kv_cache"]})

    def wake_up(self) -> None:
        self._post("resume_memory_occupation", {"tags": ["kv_cache"]})

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        self.process.request("POST", path, json.dumps(body).encode())

    def stop(self) -> None:
        super().stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _joined(a: Continuation, b: Continuation) -> Continuation:
    return a._replace(tokens=a.tokens + b.tokens, logprobs=a.logprobs + b.logprobs)


def _asked(asks: list[Ask]) -> bytes:
    body = {
        "rid": [ask.wire for ask in asks],
        "input_ids": [ask.prompt for ask in asks],
        "sampling_params": [_sampling(ask) for ask in asks],
        "return_logprob": True,
        "stream": True,
    }
    return json.dumps(body).encode()


def _sampling(ask: Ask) -> dict[str, Any]:
    return {
        "max_new_tokens": ask.max_tokens,
        "temperature": ask.params.temperature,
        "stop_token_ids": list(ask.params.stop_tokens),
        "ignore_eos": True,
        "sampling_seed": stream_id(*ask.draws) & 0x7FFFFFFF,
    }
