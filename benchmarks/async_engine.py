"""Engines at the pace of a device that is not here, a plugin of ``async_rl.py`` and ``async_reward.py``.

A decode step takes max(t0, c b) seconds for b sequences: bound by memory, then by compute. Completions take given
numbers of steps. "paced" computes nothing: token t of trajectory i is a function of both. "slowed" says what the policy
says and holds it back until its steps are over.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from async_lengths import length_of
from torch import Tensor

import tilth
from tilth.core.trajectory import Trajectory
from tilth.engines import engine
from tilth.engines.cache import SequenceKV
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Progress, Request, SamplingParams, SequenceState
from tilth.models.config import DecoderConfig


@tilth.engine("paced")
class Paced(Engine):
    """Ends every completion at its own given length and nowhere else."""

    def __init__(self, config: DecoderConfig, options: EngineOptions) -> None:
        """Arguments "t0" and "c": seconds of a step, and of a sequence in it; "log", if there: a folder in which each
        process appends, with each version, its number, the seconds of its steps so far, and those that they took with
        what the worker does between them."""
        super().__init__(config, options)
        self._least, self._each = options.arguments["t0"], options.arguments["c"]
        self._log, self._taken, self._asked = options.arguments.get("log"), 0.0, 0.0
        self._before: tuple[float, float] | None = None
        self._most, self._flying = options.max_rows, dict[int, SequenceState]()

    def update_weights(
        self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int, keep_kv: bool = False
    ) -> None:
        super().update_weights(weights, version, keep_kv)
        self._before = None
        if self._log:
            with (Path(self._log) / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps([version, self._asked, self._taken]) + "\n")

    def submit(self, requests: Iterable[Request]) -> None:
        for r in requests:
            self._flying[r.id] = SequenceState.start(replace(r, params=_cut(r.id, r.params)))

    def resume(
        self, trajectory: Trajectory, params: SamplingParams, adapter: str = "", kv: SequenceKV | None = None
    ) -> None:
        self._flying[trajectory.id] = SequenceState.resume(trajectory, _cut(trajectory.id, params))

    def abort(self, trajectory: int) -> Trajectory:
        return self._flying.pop(trajectory).finish("aborted", self.tokenizer)

    def progress(self, seen: Mapping[int, int]) -> dict[int, Progress]:
        found = dict[int, Progress]()
        for i, row in ((i, self._flying[i]) for i in seen if i in self._flying):
            begin = len(row.request.prompt) + seen[i]
            if begin < len(row.tokens):
                drawn = row.tokens[begin:].copy(), row.logprobs[begin:].copy()
                found[i] = Progress(*drawn, versions=[*row.versions])
        return found

    def poll(self) -> list[Trajectory]:
        began, rows = time.perf_counter(), list(self._flying.values())[: self._most]
        for row in rows:
            row.stamp(self.version)
            token = (row.request.id + len(row.tokens)) % self.config.vocab_size
            row.append(np.array([token]), np.array([-math.log(self.config.vocab_size)], np.float32), None)
        ended = [row for row in rows if len(row.tokens) >= row.end]
        done = [self._flying.pop(row.request.id).finish("length", self.tokenizer) for row in ended]
        if self._before is not None:
            since, pace = self._before
            self._asked, self._taken = self._asked + pace, self._taken + began - since
        pace = max(self._least, self._each * len(rows))
        self._before = (began, pace) if self._flying else None
        time.sleep(max(0.0, began + pace - time.perf_counter()))
        return done


def pace_native(pace: Mapping[str, float]) -> None:
    """Let the native engine, which takes weights from a relay, be a paced one in this process."""

    def made(config: DecoderConfig, options: EngineOptions) -> Paced:
        return Paced(config, replace(options, arguments=pace))

    engine.Engine = made  # type: ignore[assignment, misc]


def _cut(trajectory: int, params: SamplingParams) -> SamplingParams:
    return replace(params, max_tokens=min(params.max_tokens, length_of(trajectory)), stop_tokens=())


@tilth.engine("slowed")
class Slowed(Engine):
    """Answers of the policy, each given away after its own number of steps."""

    def __init__(self, config: DecoderConfig, options: EngineOptions) -> None:
        """Arguments as above."""
        super().__init__(config, options)
        self._least, self._each = options.arguments["t0"], options.arguments["c"]
        self._step, self._due, self._said = 0, dict[int, int](), dict[int, Trajectory]()

    def submit(self, requests: Iterable[Request]) -> None:
        for one in requests:
            super().submit([one])
            self._due[one.id] = self._step + length_of(one.id)

    def resume(
        self, trajectory: Trajectory, params: SamplingParams, adapter: str = "", kv: SequenceKV | None = None
    ) -> None:
        super().resume(trajectory, params, adapter, kv)
        self._due[trajectory.id] = self._step + length_of(trajectory.id)

    @property
    def pending(self) -> int:
        return super().pending + len(self._said)

    @property
    def running(self) -> int:
        return super().running + len(self._said)

    def abort(self, trajectory: int) -> Trajectory:
        return self._said.pop(trajectory) if trajectory in self._said else super().abort(trajectory)

    def poll(self) -> list[Trajectory]:
        began, self._step = time.perf_counter(), self._step + 1
        if super().pending:
            self._said.update((one.id, one) for one in super().poll())
        pace = max(self._least, self._each * self.running)
        due = [one for one in self._said if self._due[one] <= self._step]
        time.sleep(max(0.0, began + pace - time.perf_counter()))
        return [self._said.pop(one) for one in due]
