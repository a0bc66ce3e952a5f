"""Construction of a training server: OpenAI's and Tinker's interfaces over one engine client and one folder."""

import socket
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from tilth.config.axes import AXES
from tilth.core.errors import DataError
from tilth.core.layout import Mesh
from tilth.runs.model_refs import fingerprint
from tilth.runs.models import load_model
from tilth.serve.app import Guarded, HttpServer
from tilth.serve.start import ServeOptions, open_app
from tilth.serve.tinker.api import BODIES, router
from tilth.serve.tinker.base import ServedBase, ServiceLimits
from tilth.serve.tinker.desk import TrainingDesk
from tilth.serve.tinker.folders import ServiceFolder
from tilth.serve.tinker.samplers import TrainClient

LAYOUT = frozenset(name for name, axis in AXES.items() if {*axis.splits} <= {"rows", "parameters"})
"""Axes that a layout of clients' models may have."""
KEY = "tml-"
"""Beginning of every key that the SDK sends."""


@dataclass(frozen=True)
class TrainOptions:
    """Options of ``tilth serve --train``. name: that clients call the base by besides its reference.
    layout: of clients' models over workers, as "dp=2,fsdp=2"; "": one worker."""

    state: Path
    name: str = ""
    limits: ServiceLimits = field(default_factory=ServiceLimits)
    layout: str = ""


class TrainServer(HttpServer):
    """A server whose desk opens and closes with its event loop."""

    def __init__(self, app: Any, room: TrainClient, listener: socket.socket, desk: TrainingDesk) -> None:
        super().__init__(app, room, listener)
        self.desk = desk

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop serving. The engine client stays open until the desk is closed, which writes its states by it."""
        uvicorn.Server.handle_exit(self, sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the desk before the first request."""
        await self.desk.open()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the desk, so that all states are on disk, then the connections."""
        await self.desk.close()
        await super().shutdown(sockets)


def mesh_of(layout: str) -> Mesh:
    """Return the mesh of clients' models. DataError: it does not work."""
    pairs = [one.partition("=") for one in layout.split(",") if one]
    sizes = {name: size for name, _, size in pairs}
    if (
        len(sizes) < len(pairs)
        or not sizes.keys() <= LAYOUT
        or not all(size.isdecimal() and int(size) for size in sizes.values())
    ):
        message = f"--layout {layout}: name each of {', '.join(sorted(LAYOUT))} at most once, as fsdp=2,tp=2"
        raise DataError(message, key="--layout")
    return Mesh.of({name: int(size) for name, size in sizes.items()})


def open_training(model: str, options: ServeOptions, train: TrainOptions) -> tuple[TrainServer, str]:
    """Return a server whose engine is ready (``run_here`` serves), and its address.

    model: as ``load_model`` takes it. Raises TilthError for a model or an address that does not work, CheckpointError
    for the folder of another base, StorageError for that of another server.
    """
    if options.token and not options.token.startswith(KEY):
        message = f"--token: the tinker SDK sends keys that begin with {KEY!r} alone; choose such a token"
        raise DataError(message, key="--token")
    mesh, loaded = mesh_of(train.layout), load_model(model)
    folder = ServiceFolder(train.state, train.name or model, fingerprint(model))
    try:
        made = open_app(model, options, partial(TrainClient, source=model, mesh=mesh), len(mesh))
    except BaseException:
        folder.lock.release()
        raise
    assert isinstance(made.room, TrainClient)
    desk = TrainingDesk(made.room, folder, ServedBase.of(model, loaded, train.name), train.limits)
    made.app.include_router(router(desk))
    return TrainServer(
        Guarded(made.app, options.token, made.metrics, BODIES), made.room, made.listener, desk
    ), made.address
