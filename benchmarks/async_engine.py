"""An engine at the pace of a device that is not here, a plugin of ``async_rl.py``.

A decode step takes max(t0, c b) seconds for b sequences: bound by memory, then by compute. It holds the policy's
weights, which come and are verified as always, and computes nothing with them: token t of trajectory i is a function of
both, and completions have given lengths.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from async_lengths import length_of

import tilth
from tilth.core.trajectory import Trajectory
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams, SequenceState
from tilth.models.config import DecoderConfig


@tilth.engine("paced")
class Paced(Engine):
    """Ends every completion at its own given length and nowhere else."""

    def __init__(self, config: DecoderConfig, options: EngineOptions) -> None:
        """Arguments "t0" and "c": seconds of a step, and of a sequence in it."""
        super().__init__(config, options)
        self._least, self._each = options.arguments["t0"], options.arguments["c"]
        self._most, self._flying = options.max_rows, dict[int, SequenceState]()

    def submit(self, requests: Iterable[Request]) -> None:
        for r in requests:
            self._flying[r.id] = SequenceState.start(replace(r, params=_cut(r.id, r.params)))

    def resume(self, trajectory: Trajectory, params: SamplingParams, adapter: str = "") -> None:
        self._flying[trajectory.id] = SequenceState.resume(trajectory, _cut(trajectory.id, params))

    def abort(self, trajectory: int) -> Trajectory:
        return self._flying.pop(trajectory).finish("aborted", self.tokenizer)

    def poll(self) -> list[Trajectory]:
        began, rows = time.perf_counter(), list(self._flying.values())[: self._most]
        for row in rows:
            row.stamp(self.version)
            token = (row.request.id + len(row.tokens)) % self.config.vocab_size
            row.append(np.array([token]), np.array([-math.log(self.config.vocab_size)], np.float32), None)
        ended = [row for row in rows if len(row.tokens) >= row.end]
        done = [self._flying.pop(row.request.id).finish("length", self.tokenizer) for row in ended]
        pace = max(self._least, self._each * len(rows))
        time.sleep(max(0.0, began + pace - time.perf_counter()))
        return done


def _cut(trajectory: int, params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=min(params.max_tokens, length_of(trajectory)), stop_tokens=())
