"""A training service in this process, on a thread of its own, for the SDK's own objects."""

import asyncio
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import tinker

from tilth.data.tokenizer import Tokenizer
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.hf import save_pretrained
from tilth.serve.start import ServeOptions
from tilth.serve.tinker.base import ServiceLimits
from tilth.serve.tinker.start import TrainOptions, open_training

TOKENIZER = Tokenizer.characters("0123456789+= abcdefghij")


def base(folder: Path, seed: int = 0, **more) -> Path:
    """A Hugging Face directory of a small model. more: sizes of its experts."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "head_dim": 16, **more}
    config = DecoderConfig(
        TOKENIZER.vocab_size, **sizes, family="qwen3_moe" if more else "qwen3", qk_norm=True, max_positions=64
    )
    model = Decoder(config)
    model.init_weights_(seed)
    save_pretrained(folder, config, dict(model.named_parameters()), tokenizer=TOKENIZER)
    return folder


class Served:
    """A server on a thread. url: its address."""

    def __init__(
        self, model: Path, state: Path, port: int = 0, name: str = "", backend: str = "inline", layout="", **more
    ) -> None:
        options = ServeOptions(port=port, backend=backend, token=more.pop("token", ""))
        train = TrainOptions(state, name, ServiceLimits(**more), layout)
        self.server, self.url = open_training(str(model), options, train)
        self.desk, self.port, self.killed = self.server.desk, self.server.listener.getsockname()[1], False
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
            time.sleep(0.005)

    def _run(self):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve())

    async def _serve(self):
        await self.server.serve([self.server.listener])
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()  # as the end of a process does
        await asyncio.sleep(0.05)

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        self.desk.room.close(0.0)

    def end(self) -> None:
        """End it as SIGTERM does."""
        self.loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGTERM, None)
        self._thread.join(60)
        self.desk.room.close(0.0)

    def kill(self) -> None:
        """End it as a kill does: nothing is written, nobody is answered."""
        self.killed = self.server.force_exit = True

        def stop():
            self.desk.close, samplers = _nothing, self.desk.samplers.samplers.values()
            for task in [self.desk.runner.task, *(task for one in samplers for task in one.running.values())]:
                task.cancel()
            for queue in [one.queue for one in (*self.desk.clients.values(), *samplers)]:
                queue.finish = lambda operation, answer: None

        self.loop.call_soon_threadsafe(stop)
        self.close()
        self.desk.folder.lock.release()


async def _nothing() -> None:
    """In place of what a killed server does not do."""


@contextmanager
def serving(model: Path, state: Path, **options):
    server = Served(model, state, **options)
    try:
        yield server
    finally:
        server.close()


def service(server: Served, **options) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key="tml-none", **options)
