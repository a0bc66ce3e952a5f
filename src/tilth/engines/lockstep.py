"""Lock-step of the ranks of one engine: the same requests, decisions and tokens, or an error that names who differs.

Ranks along "tp" compute one step together, so one that schedules or samples otherwise would wait for a collective that
never comes, or add up rows of different requests. Each rank digests all that decides its next step; before the step the
digests are compared, in one collective of eight bytes.
"""

import hashlib
from dataclasses import replace

import numpy as np
import torch

from tilth.config.axes import MODEL
from tilth.core.errors import TilthError
from tilth.engines.protocol import EngineError
from tilth.models.config import DecoderConfig
from tilth.parallel.comm import Group, all_gather
from tilth.parallel.dims import ParallelDims


class LockStepError(TilthError):
    """Ranks of one engine are about to do different things."""


class LockStep:
    """Digest of the history of one rank of an engine, compared with those of its other ranks."""

    def __init__(self, group: Group | None, ranks: tuple[int, ...] = ()) -> None:
        """group: of the engine's ranks, in their order; None: an engine of one rank, which compares nothing."""
        self._group, self._ranks = group, ranks
        self._history = hashlib.blake2b(digest_size=8)

    def note(self, *values: object) -> None:
        """Add to the history: arrays by their bytes, other values by their text."""
        if self._group is None:
            return
        for value in values:
            self._history.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())

    def check(self) -> None:
        """Raise LockStepError, on every rank, unless the histories are equal. Each rank calls it before a step."""
        if self._group is None:
            return
        own = torch.tensor([int.from_bytes(self._history.digest(), "little", signed=True)])
        every = own.new_empty(self._group.size())
        all_gather(every, own, self._group)
        digests = every.tolist()
        if wrong := [rank for rank, digest in zip(self._ranks, digests) if digest != digests[0]]:
            raise LockStepError(
                f"ranks {', '.join(map(str, wrong))} of a generation engine have other requests, tokens or weights "
                f"than its rank {self._ranks[0]}; one engine's ranks must be given the same calls in the same order",
                key="rollout.layout.tp",
            )


def check_divided(dims: ParallelDims, *, compile: bool, parity: bool, apart: bool) -> None:
    """Raise EngineError for a mode that an engine over several ranks does not have."""
    for axis in dims.mesh.over(*MODEL):
        size = dims.size(axis)
        if size > 1 and parity:
            raise EngineError(
                f"an engine of parity over {axis}={size} ranks: partial sums round differently; use {axis}=1",
                key=f"parity.{axis}",
            )
        if size > 1 and compile:
            raise EngineError(
                f"an engine over {axis}={size} ranks does not compile its steps, which have collectives; use "
                "compile=False",
                key=f"compile.{axis}",
            )
        if size > 1 and apart:
            raise EngineError(
                f"drafts of a process apart come by a clock, and the {axis}={size} ranks of an engine guess alike; "
                "use draft.apart=False",
                key=f"draft.apart.{axis}",
            )


def part_of(config: DecoderConfig, tp: int) -> DecoderConfig:
    """Return the shape of the KV cache of one rank: key heads fewer than ranks are held by several."""
    return replace(config, num_heads=config.num_heads // tp, num_kv_heads=max(1, config.num_kv_heads // tp))
