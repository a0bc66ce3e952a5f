"""Run vLLM for ``tilth.engines.vllm``: ``python vllm_server.py``, in an environment that has vLLM.

Of Tilth only files that import torch and numpy are used, found beside this one, so that the environment need not have
Tilth and nothing of Tilth's environment is imported.
"""

import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

if __name__ != "tilth.engines.servers.vllm_server":  # also in vLLM's own processes, which run this file again
    _package = types.ModuleType("tilth")
    _package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules["tilth"] = _package

from tilth.engines.servers.link import end_with, receive_settings, serve

STEPS = 4
"""Most steps of one poll, so that requests can be added and aborted in between."""


class Served:
    """vLLM's engine in this process, driven by the requests of one client."""

    def __init__(self, config: dict[str, Any], arguments: dict[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine

        with tempfile.TemporaryDirectory(prefix="tilth-vllm-") as folder:
            self.folder = folder
            end_with(os.getppid(), folder)
            (Path(folder) / "config.json").write_text(json.dumps(config))
            worker = "tilth.engines.servers.vllm_worker"
            fixed = {
                "model": folder, "skip_tokenizer_init": True, "load_format": "dummy", "generation_config": "vllm",
                "worker_extension_cls": f"{worker}.Extension", "logits_processors": [f"{worker}:Draw"],
                "async_scheduling": False, "disable_log_stats": True,
            }  # fmt: skip
            self.engine: Any = LLMEngine.from_engine_args(EngineArgs(**fixed, **arguments))
        self.lengths: dict[str, int] = {}

    def ready(self, body: bytes) -> dict[str, Any]:
        """Return the version of vLLM and the kind of device it runs on."""
        import vllm
        from vllm.platforms import current_platform

        return {"version": vllm.__version__, "device": current_platform.device_type}

    def poll(self, body: bytes) -> dict[str, Any]:
        """Abort and add requests, run a few steps until one of them ends, and return what they drew."""
        asked = json.loads(body)
        self._cancel(asked["cancel"])
        for one in asked["ask"]:
            self._add(one)
        pieces: dict[str, dict[str, Any]] = {}
        steps = ended = 0
        while self.engine.has_unfinished_requests() and steps < STEPS and not ended:
            steps += 1
            outputs = self.engine.step()
            (drawn, *_) = filter(None, self.engine.collective_rpc("drawn"))
            ended = sum(self._take(output, drawn, pieces) for output in outputs)
        return {"pieces": pieces, "steps": steps}

    def _add(self, one: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,  # ``Draw`` leaves one token
            max_tokens=one["max_tokens"],
            stop_token_ids=one["stop_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"tilth": {"wire": one["wire"], "draws": one["draws"], **one["sampling"]}},
        )
        self.lengths[one["wire"]] = len(one["prompt"])
        self.engine.add_request(one["wire"], {"prompt_token_ids": one["prompt"]}, params)

    def _take(self, output: Any, drawn: dict[str, dict[int, Any]], pieces: dict[str, dict[str, Any]]) -> bool:
        wire = output.request_id
        new: dict[str, Any] = {"tokens": [], "logprobs": [], "sampling": [], "cached": output.num_cached_tokens or 0}
        piece = pieces.setdefault(wire, new)
        for token in output.outputs[0].token_ids:
            logprob, sampling = drawn[wire][self.lengths[wire]]
            self.lengths[wire] += 1
            piece["tokens"].append(int(token))
            piece["logprobs"].append(logprob)
            piece["sampling"].append(sampling)
        if output.finished:
            del self.lengths[wire]
        return bool(output.finished)

    def _cancel(self, wires: list[str]) -> None:
        self.engine.abort_request([wire for wire in wires if self.lengths.pop(wire, None) is not None])

    def forget(self, body: bytes) -> None:
        """Forget prefixes of finished requests."""
        self.engine.reset_prefix_cache()

    def pause(self, body: bytes) -> None:
        """Abort all requests and forget what was computed for them."""
        self._cancel(list(self.lengths))
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use although there is no request")

    def begin_load(self, body: bytes) -> None:
        """Begin to replace all weights."""
        self.pause(b"")
        self.engine.collective_rpc("begin_load")

    def load(self, body: bytes) -> None:
        """Replace some weights by the tensors of a safetensors file."""
        self.engine.collective_rpc("load", args=(body,))

    def end_load(self, body: bytes) -> None:
        """Put the new weights into use."""
        self.engine.collective_rpc("end_load")

    def sleep(self, body: bytes) -> None:
        """Free the memory of the KV cache."""
        self.pause(b"")
        if self._sleeps:
            self.engine.sleep(1)
        else:
            self.engine.collective_rpc("free_cache")

    def wake_up(self, body: bytes) -> None:
        """Allocate it again."""
        if self._sleeps:
            self.engine.wake_up()
        else:
            self.engine.collective_rpc("allocate_cache")

    @property
    def _sleeps(self) -> bool:
        return bool(self.engine.vllm_config.model_config.enable_sleep_mode)


def main() -> None:
    """Load the engine and serve it until the process that started this one ends."""
    settings = receive_settings()
    served = Served(settings["config"], settings["arguments"])
    loading = served.begin_load, served.load, served.end_load
    methods: tuple[Any, ...] = (served.ready, served.poll, served.forget, *loading, served.sleep, served.wake_up)
    serve(settings["listening"], settings["token"], {f"/{method.__name__}": method for method in methods})


if __name__ == "__main__":
    main()
