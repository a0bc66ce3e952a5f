"""A training service in this process, on a thread of its own, for the SDK's own objects."""

import asyncio
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import tinker
import uvicorn
from fastapi import FastAPI

from tilth.data.tokenizer import Tokenizer
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.hf import save_pretrained
from tilth.service.api import router
from tilth.service.start import open_desk

TOKENIZER = Tokenizer.characters("0123456789+= abcdefghij")


def base(folder: Path, seed: int = 0) -> Path:
    """A Hugging Face directory of a small model."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "head_dim": 16}
    config = DecoderConfig(TOKENIZER.vocab_size, **sizes, family="qwen3", qk_norm=True, max_positions=64)
    model = Decoder(config)
    model.init_weights_(seed)
    save_pretrained(folder, config, dict(model.named_parameters()), tokenizer=TOKENIZER)
    return folder


class Served:
    """A server on a thread. url: its address."""

    def __init__(self, model: Path, state: Path, port: int = 0, **options) -> None:
        self.door = socket.socket()
        self.door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.door.bind(("127.0.0.1", port))
        self.port = self.door.getsockname()[1]
        self.killed = False
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self.loop = asyncio.new_event_loop()
        self.desk = None
        self._thread = threading.Thread(target=self._run, args=(model, state, options), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)

    def _run(self, model, state, options):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve(model, state, options))

    async def _serve(self, model, state, options):
        self.desk, links = open_desk(str(model), state, **options)
        await self.desk.open()
        app = FastAPI()
        app.include_router(router(self.desk, links))
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._ready.set()
        await self.server.serve([self.door])
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()  # as the end of a process does
        await asyncio.sleep(0.05)
        if not self.killed:
            await self.desk.close()

    def close(self) -> None:
        self.server.should_exit = True
        self._thread.join(30)
        self.desk.room.close(0.0)

    def kill(self) -> None:
        """End it as a kill does: nothing is written, nobody is answered."""
        self.killed = self.server.force_exit = True

        def stop():
            for task in [self.desk._task, *(task for one in self.desk.samplers.values() for task in one.running)]:
                task.cancel()
            for queue in [one.queue for one in (*self.desk.clients.values(), *self.desk.samplers.values())]:
                queue.finish = lambda operation, answer: None

        self.loop.call_soon_threadsafe(stop)
        self.close()


@contextmanager
def serving(model: Path, state: Path, **options):
    server = Served(model, state, **options)
    try:
        yield server
    finally:
        server.close()


def service(server: Served, **options) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key="tml-none", **options)
