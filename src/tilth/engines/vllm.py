"""The generation engine vLLM: tokens drawn by Tilth's random numbers from the logits of vLLM."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tilth.core.errors import RecipeError
from tilth.engines.options import EngineOptions
from tilth.engines.remote import Ask, Continuation, EngineServer, RemoteEngine, parsed_pieces
from tilth.engines.request import SamplingParams
from tilth.engines.server import Connection, EngineProcess, find_python
from tilth.models.config import DecoderConfig
from tilth.plan.kernels import round_up
from tilth.plan.shape import kv_bytes

_BLOCK = 128
"""Tokens of the largest block of vLLM's KV cache."""


class VLLM(RemoteEngine):
    """Engine vLLM, in a process of its own with the interpreter ``options.python``.

    ``options.arguments`` are further arguments of vLLM's ``EngineArgs``, such as ``gpu_memory_utilization``. The random
    numbers and the sampler of the native engine choose the tokens: they differ by the rounding of logits alone.
    """

    name = "vllm"

    def __init__(self, config: DecoderConfig, options: EngineOptions) -> None:
        super().__init__(config, options)
        self.device, dtype = torch.device(options.device), str(options.dtype).removeprefix("torch.")
        self.python = find_python(options.python, self.name, "vllm")
        most = round_up(self.max_length, _BLOCK)
        tokens = max(options.kv_tokens or options.max_rows * most, most) + 2 * _BLOCK
        self._settings = {
            "config": {**config.to_hf(), "torch_dtype": dtype},
            "arguments": {
                "dtype": dtype,
                "max_model_len": self.max_length,
                "max_num_seqs": options.max_rows,
                "max_num_batched_tokens": max(options.step_tokens, options.max_rows),
                "kv_cache_memory_bytes": tokens * kv_bytes(config, options.dtype.itemsize, latent=False),
                "enforce_eager": not options.compile,
                **({"enable_sleep_mode": True} if self.device.type == "cuda" else {}),
                **options.arguments,
            },
        }
        self._environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the server itself is the process
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several servers would bind the same cores
            "TORCH_COMPILE_DISABLE": str(int(not options.compile)),
        }

    def start_server(self) -> "VLLMServer":
        return VLLMServer(
            EngineProcess(self.python, "vllm_server.py", self._settings, self._environment), self.device.type
        )


class VLLMServer(EngineServer):
    """A running ``servers/vllm_server.py``."""

    def __init__(self, process: Connection, device: str) -> None:
        self.process, self._device, self._ready = process, device, False

    def advance(self, cancel: list[str], asks: list[Ask], seconds: float) -> tuple[dict[str, Continuation], int]:
        answer = self.process.call("poll", {"cancel": cancel, "ask": [_sent(ask) for ask in asks]}, seconds)
        return parsed_pieces(answer["pieces"]), answer["steps"]

    def forget(self) -> None:
        self.process.call("forget")

    def load(self, buckets: Iterable[bytes]) -> None:
        if not self._ready:
            self._check(self.process.call("ready"))
        self.process.call("begin_load")
        for bucket in buckets:
            self.process.call("load", bucket)
        self.process.call("end_load")

    def _check(self, found: Mapping[str, str]) -> None:
        self._ready = True
        if found["device"] != self._device:
            message = f"train.device = {self._device}, but the vLLM {found['version']} of rollout.python "
            raise RecipeError(f"{message}is built for {found['device']}", key="rollout.python.device")

    def sleep(self) -> None:
        self.process.call("sleep")

    def wake_up(self) -> None:
        self.process.call("wake_up")


def _sent(ask: Ask) -> dict[str, Any]:
    return {
        "wire": ask.wire,
        "draws": ask.draws,
        "prompt": ask.prompt,
        "max_tokens": ask.max_tokens,
        "stop_tokens": list(ask.params.stop_tokens),
        "sampling": _rules(ask.params),
    }


def _rules(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "filtered")
    return {name: getattr(params, name) for name in names}
