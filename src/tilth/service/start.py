"""Construction of a training service from a model's reference and a folder."""

import os
from functools import partial
from pathlib import Path

from tilth.cluster.controller.cluster import open_cluster
from tilth.flows.model import LoadedModel, load_model, make_engine
from tilth.rollout.protocol import GenerationEngine
from tilth.runs.model_refs import identity
from tilth.serve.room import RoomLimits
from tilth.service.desk import ServedBase, TrainingDesk
from tilth.service.folders import ServiceFolder
from tilth.service.links import Links
from tilth.service.samplers import TrainRoom

ROWS = 64
"""Sequences that the engine decodes at a time."""


def engine_of(model: str, seed: int, rows: int, longest: int) -> GenerationEngine:
    """Construct the engine of a base model in its worker."""
    return make_engine(load_model(model), seed=seed, max_rows=rows, max_length=longest)


def served_base(model: str, loaded: LoadedModel, name: str, longest: int) -> ServedBase:
    """Return the base as clients see it. name: that it is known by besides its reference."""
    folder = str(loaded.source.resolve())
    names = tuple(dict.fromkeys(filter(None, [name, model, folder])))
    tokenizer = loaded.tokenizer
    modules = {row.name.split(".")[-2] for row in loaded.config.table if row.kind == "matrix"}
    return ServedBase(
        names=names,
        tokenizer=folder,
        arch=loaded.config.family,
        vocabulary=loaded.config.vocab_size,
        longest=longest,
        ends=() if tokenizer is None else tuple(tokenizer.stop_ids),
        modules=tuple(sorted(modules)),
    )


def _weights_of(model: str) -> str:
    """Return a fingerprint of a model's weights, whatever it is called."""
    return identity(model).rpartition(" (")[2]


def open_desk(
    model: str,
    state: Path,
    *,
    name: str = "",
    backend: str = "inline",
    address: str = "",
    rows: int = ROWS,
    longest: int = 0,
    parity: bool = False,
    most: int = 1024,
) -> tuple[TrainingDesk, Links]:
    """Return the desk of a service, to be opened in its event loop, and its links.

    model: reference of the base; state: folder of all that clients make; backend: of the worker; longest: tokens of the
    longest sequence (0: the model's); parity: bits of log-probs do not depend on company. Raises ModelError,
    CheckpointError: the folder is another base's; RecipeError.
    """
    loaded = load_model(model)
    longest = longest or loaded.config.max_positions
    base = served_base(model, loaded, name, longest)
    folder = ServiceFolder(state, base.names[0], _weights_of(model))
    cluster = open_cluster(backend, 1, address=address)
    make = partial(engine_of, os.path.abspath(model) if os.path.exists(model) else model, 0, rows, longest)
    room = TrainRoom(cluster, make, limits=RoomLimits(), source=model, parity=parity)
    return TrainingDesk(room, folder, base, most=most), Links(folder.secret)
