"""Serve a model: its engine in a worker of its own, its adapters, and OpenAI's interface in front of it."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from fastapi import FastAPI

from tilth.cluster.controller.cluster import open_cluster
from tilth.core.errors import DataError
from tilth.core.memory import host_memory
from tilth.data.template import Template, make_template
from tilth.data.tokenizer import Tokenizer
from tilth.engines.client import EngineClient
from tilth.engines.options import EngineOptions
from tilth.engines.protocol import GenerationEngine
from tilth.models import row_product
from tilth.models.config import DecoderConfig
from tilth.models.hub import is_hub_id
from tilth.models.peft import load_adapter
from tilth.plan.shape import kv_bytes, parameters
from tilth.process.access import check_address, listen
from tilth.runs.models import LoadedModel, load_model, make_engine, wants_tokenizer
from tilth.serve.app import Guarded, HttpServer, new_app
from tilth.serve.metrics import ServerMetrics
from tilth.serve.model import ServedModel
from tilth.serve.openai import OpenAI

ROWS = 64
"""Completions that are decoded at once; further ones wait."""
SHARE = 0.5
"""Share of the memory that is free at the start which the KV cache may take; the rest is for passes over tokens."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of ``tilth serve``. adapters: name -> directory. template: None: the run's or the model's own.
    address: of a Ray cluster. name: by which clients call the model, besides its reference; "": ``served_name``.
    pooling: of embeddings, "last" or "mean". fast: on a CPU completions may depend on their company, by rounding."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str = ""
    template: str | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    backend: str = "local"
    address: str = ""
    name: str = ""
    pooling: str = "last"
    fast: bool = False


class OpenedApp(NamedTuple):
    """Parts of a server whose engine is ready. address: without a path."""

    app: FastAPI
    room: EngineClient
    listener: socket.socket
    metrics: ServerMetrics
    address: str


def served_name(model: str, options: ServeOptions) -> str:
    """Return the name by which a server lists its model: the last part of a path, since clients read a slash as the
    end of a provider's name; an id of the hub as it is."""
    return options.name or (model if is_hub_id(model) else os.path.basename(os.path.abspath(model)))


def open_server(model: str, options: ServeOptions) -> tuple[HttpServer, str]:
    """Return a server whose engine is ready (``HttpServer.run_here`` serves), and its address.

    model: as ``load_model`` takes it. Raises TilthError for a model, an adapter, a template or an address that does not
    work.
    """
    made = open_app(model, options, EngineClient)
    return HttpServer(Guarded(made.app, options.token, made.metrics), made.room, made.listener), f"{made.address}/v1"


def open_app(model: str, options: ServeOptions, kind: Callable[..., EngineClient], workers: int = 1) -> OpenedApp:
    """Return OpenAI's interface over a room. kind: makes it of cluster, engine and limits; workers: of the cluster, the
    first of which has the engine."""
    check_address(options.host, options.token)
    loaded = load_model(model)
    served = _served(model, loaded, options)
    for name, folder in options.adapters.items():
        if name in (model, served.name):
            raise DataError(f"--adapter {name}={folder}: this is the name of the model itself", key="--adapter")
    stored = {name: load_adapter(folder, loaded.config) for name, folder in options.adapters.items()}
    listener = listen(options.host, options.port)
    try:
        room = _room(model, loaded, options, workers, kind)
        served.max_length = served.tokenizer.most = room.abilities.max_length
        try:
            for name, adapter in stored.items():
                asyncio.run(room.load_adapter(name, adapter.lora, adapter.tensors))
        except BaseException:  # an interrupt too: no process may be left
            room.close(0.0)
            raise
    except BaseException:
        listener.close()
        raise
    metrics = ServerMetrics(room)
    app = new_app(room, metrics)
    OpenAI(room, served, metrics).add_to(app)
    host = f"[{options.host}]" if ":" in options.host else options.host
    return OpenedApp(app, room, listener, metrics, f"http://{host}:{listener.getsockname()[1]}")


def _room(
    model: str, loaded: LoadedModel, options: ServeOptions, workers: int, kind: Callable[..., EngineClient]
) -> EngineClient:
    gpu = torch.cuda.is_available() and options.backend != "inline"
    if options.backend == "local" and not torch.cuda.is_available() and (missing := row_product.missing()):
        print(f"tilth: {missing}", file=sys.stderr)  # nobody reads what its worker prints
    make = partial(serving_engine, model, options.fast)
    return kind(open_cluster(options.backend, workers, address=options.address, gpus=gpu), make)


def kv_capacity(config: DecoderConfig, parity: bool = False) -> int:
    """Return the tokens of a server's KV cache: ``ROWS`` whole completions, or those for which this process finds
    memory beside the weights, bf16 on a GPU, but one completion at least. parity: latents are kept as
    whole keys and values."""
    gpu, length = torch.cuda.is_available(), config.max_positions
    free = torch.cuda.mem_get_info()[0] - 2 * parameters(config) if gpu else host_memory().free
    fits = int(free * SHARE / kv_bytes(config, 2 if gpu else 4, latent=not parity))
    return max(min(ROWS * length, fits), length)


def serving_engine(model: str, fast: bool = False) -> GenerationEngine:
    """Return the engine of a server's worker. On a CPU its completions depend on their requests alone, bit for bit,
    unless it is fast."""
    loaded = load_model(model)
    native = loaded.settings.get("rollout", {}).get("engine", "native") == "native"
    parity = native and not fast and not torch.cuda.is_available()
    options = EngineOptions(
        max_rows=ROWS,
        kv_tokens=kv_capacity(loaded.config, parity),
        parity=parity,
        padded=not fast,
    )
    return make_engine(loaded, options)


def _served(name: str, loaded: LoadedModel, options: ServeOptions) -> ServedModel:
    tokenizer, config = wants_tokenizer(loaded), loaded.config
    adapters = list(options.adapters)
    called, length = served_name(name, options), config.max_positions
    served = ServedModel(
        called, tokenizer, config.vocab_size, length, None, loaded.stop, adapters, name, options.pooling
    )
    served.chat = _template(loaded, tokenizer, options.template)
    return served


def _template(loaded: LoadedModel, tokenizer: Tokenizer, wanted: str | None) -> Template | None:
    """Return the template of conversations; None if there is none."""
    default = loaded.template or ("model" if tokenizer.chat_template else "")
    name = default if wanted is None else wanted
    return make_template(name, tokenizer, key="--template") if name else None
