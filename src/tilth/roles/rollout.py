"""Rollout role: a generation engine that turns prompts into batches of experience."""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tilth.cluster.protocol import control, transfer
from tilth.config.schema import RolloutConfig as RolloutSection
from tilth.core.batch import Batch, Store
from tilth.core.checksum import relative_error, sketch
from tilth.core.errors import WeightMismatch
from tilth.core.trajectory import Trajectory
from tilth.data.template import Template
from tilth.engines.protocol import EngineError, GenerationEngine
from tilth.engines.request import Request, SamplingParams
from tilth.envs.journal import ObservationJournal
from tilth.rewards.process_pool import CORRECT
from tilth.roles.experience import CALLS, CARRIED, INFO, OUTCOME, TURNS, identity, texts, to_batch
from tilth.rollout.episodes import Played, Player, Wanted
from tilth.rollout.partial import Unfinished
from tilth.trace.spans import span


class Carry(NamedTuple):
    """Steps over which samples go on. since: step at whose end those of ``asked`` were kept; step: at whose end those
    of the answer are; oldest: step that a resume may return to."""

    since: int
    step: int
    oldest: int


class RolloutWorker:
    """Generation engine, and the store of prompts and answers. player: plays episodes in place of single answers."""

    def __init__(
        self,
        engine: GenerationEngine,
        template: Template,
        section: RolloutSection,
        store: Store,
        player: Player | None = None,
        rank: int = 0,
    ) -> None:
        self.engine, self.template, self.section, self.store = engine, template, section, store
        self.player = player
        self.rank = rank
        self._journals: Path | None = None
        self._failures: dict[int, dict[str, Any]] = {}
        self._asked: Sequence[int] = ()
        self._done = 0
        self._aborting: deque[int] = deque()
        self._finished: deque[list[Any]] = deque()
        self._unfinished: Unfinished | None = None
        self._updates: Callable[[], int] | None = None
        self._seen = 0

    @control
    def status(self) -> dict[str, float]:
        """Return the number of ``requests`` that the running call was asked for, ``done``: those of them that have
        ended, the ``version`` of the weights and the engine's counts (``Stats.dump``); 0 on ranks whose engine another
        rank reports."""
        done = self._done if self._asked else 0
        counts = {"requests": len(self._asked), "done": done, **self.engine.stats().dump()}
        return {"version": self.engine.version, **{n: count * self.engine.reports for n, count in counts.items()}}

    @control
    def abort(self, ids: Sequence[int] | None = None) -> int:
        """Abort requests of the running call (None: all) before the engine's next poll; return their number.

        Each ends with the tokens it has and finish "aborted"; one that has finished meanwhile does not change.
        """
        chosen = [i for i in self._asked if ids is None or i in ids]
        self._aborting.extend(chosen)
        return len(chosen) * self.engine.reports

    @control
    def finished(self) -> list[list[Any]]:
        """Return the samples of the running call that have finished since the last look: id, prompt, checksum of the
        ids, text."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    @transfer(split="rows", gather="rows", over=("dp",))
    def generate(self, asked: Batch, *, greedy: bool = False, carry: Carry | None = None) -> Batch:
        """Generate one sample for each row (columns id, group, prompt; payload prompt_tokens), in order, or play an
        episode (payload info).

        carry: a sample gets ``rollout.partial`` tokens at most, an episode ends the turn in which it has them. The row
        column ``carried`` is 1 in ``asked`` for samples that go on, and in the answer for those that are not finished.
        """
        self._check_current()
        params, player = self._params(greedy), self.player if INFO in asked.payload else None
        before = {} if carry is None else self._before(asked, carry)
        work: Callable[[], list[Played]]
        if player is None:
            work = partial(self._complete, self._requests(asked, params, carry), params, before)
        else:
            work = partial(self._play, player, self._wanted(asked), params, carry, before)
        with span("generate") as spent:
            self.engine.reset_prefix_cache()  # no trace of earlier steps, so that a resumed run does the same work
            self._aborting.clear()
            self._asked, self._done = asked["id"].tolist(), 0
            try:
                found = work()
            finally:
                self._asked = ()
                self._finished.clear()
            trajectories = [one.trajectory for one in found]
            written = sum(t.completion_length for t in trajectories)
            written -= sum(t.completion_length for t in before.values())
            spent.set(tokens=written, squares=sum(len(t.tokens) ** 2 - t.prompt_length**2 for t in trajectories))
        batch = to_batch(trajectories, self.store, by_turn=player is not None)
        if player is not None:
            batch = self._scored(batch, found)
            trajectories = [one.kept() for one in found]
        if carry is not None:
            batch = self._carried(batch, trajectories, [one.paused is not None for one in found], carry)
        return batch

    def _before(self, asked: Batch, carry: Carry) -> dict[int, Trajectory]:
        """Return the samples that go on, and those that wait for the rest of their group."""
        assert self._unfinished is not None
        return self._unfinished.take(carry.since, asked["id"][asked[CARRIED] != 0].tolist())

    def _requests(self, asked: Batch, params: SamplingParams, carry: Carry | None) -> list[Request]:
        some = params if carry is None else replace(params, max_tokens=self.section.partial)
        encoded = asked.read(self.store, "prompt_tokens")["prompt_tokens"]
        return [
            Request(id=i, prompt=encoded.row(row), params=some, group=g, prompt_index=p)
            for row, (i, g, p) in enumerate(zip(*(asked[c].tolist() for c in ("id", "group", "prompt"))))
        ]

    def _complete(
        self, requests: Sequence[Request], params: SamplingParams, before: Mapping[int, Trajectory]
    ) -> list[Played]:
        """Generate until all requests and samples of the step before have ended; return them in the order of
        ``requests``."""
        resumed = [t for t in before.values() if not self._ended(t)]
        for t in resumed:
            most = min(params.max_tokens, t.completion_length + self.section.partial)
            self.engine.resume(t, replace(params, max_tokens=most))  # type: ignore[attr-defined]  # checked at start
        new = [request for request in requests if request.id not in before]
        more = ([t.id for t in resumed],) if resumed else ()
        found = {**before}
        for t in self.engine.stream(new, self._aborting, *more):
            self._announce(t)
            found[t.id] = t
        return [Played(t, {}, paused=None if self._ended(t) else {}) for t in (found[r.id] for r in requests)]

    def _ended(self, t: Trajectory) -> bool:
        """True if a trajectory was cut by nothing but ``rollout.max_tokens``, if at all."""
        return t.finish != "length" or t.completion_length >= self.section.max_tokens

    def _carried(self, batch: Batch, found: Sequence[Trajectory], going: Sequence[bool], carry: Carry) -> Batch:
        """Keep the samples of groups that are not finished; name in the answer those that are not."""
        assert self._unfinished is not None
        groups = {t.group for t, goes in zip(found, going, strict=True) if goes}
        if self.engine.reports:
            self._unfinished.keep(carry.step, [t for t in found if t.group in groups], carry.oldest)
        return batch.with_rows(**{CARRIED: np.array(going, np.int8)})

    @transfer(split="all", gather="first")
    def carry_in(self, folder: str) -> None:
        """Keep samples that go on in the next step in this folder."""
        self._unfinished = Unfinished(Path(folder), self.rank)

    def _announce(self, t: Trajectory) -> None:
        self._done += 1
        if self.engine.reports:
            self._finished.append([t.id, t.prompt, identity(t.tokens), t.text])

    def _wanted(self, asked: Batch) -> list[Wanted]:
        infos = texts(asked.read(self.store, INFO)[INFO])
        rows = zip(*(asked[c].tolist() for c in ("id", "group", "prompt")))
        return [Wanted(i, json.loads(info), g, p) for info, (i, g, p) in zip(infos, rows)]

    def _play(
        self,
        player: Player,
        wanted: Sequence[Wanted],
        params: SamplingParams,
        carry: Carry | None,
        before: Mapping[int, Trajectory],
    ) -> list[Played]:
        """Play these episodes to their ends, or with ``carry`` up to a pause."""
        if self._journals is not None:
            about = f"version {self.engine.version}, {params}"
            about += f", after {sum(len(t.tokens) for t in before.values())}" if before else ""
            player.pool.keep(ObservationJournal(self._journals, self._asked, about))
        try:
            most, kept = self.section.partial * (carry is not None), {i: Played.of(t) for i, t in before.items()}
            return player.play(wanted, params, partial=most, before=kept, finished=self._announce)
        finally:
            player.pool.keep(None)

    def _scored(self, batch: Batch, found: Sequence[Played]) -> Batch:
        """Add the parts of the environment's reward, and numbers of turns and calls; note why rewards are missing."""
        waiting = {one.trajectory.group for one in found if one.paused is not None}
        self._failures = {
            one.trajectory.id: {"value": None, "reason": one.reason, "status": one.status}
            for one in found
            if one.trajectory.reward is None and one.trajectory.group not in waiting
        }
        names = sorted({name for one in found for name in one.parts})
        rows = {f"part/{n}": np.array([one.parts.get(n, np.nan) for one in found], np.float32) for n in names}
        rows[TURNS] = np.array([one.turns for one in found], np.float32)
        rows[CALLS] = np.array([one.calls for one in found], np.float32)
        if CORRECT in names:
            rows[OUTCOME] = rows[f"part/{CORRECT}"]
        return batch.with_rows(**rows)

    @transfer(split="all", gather="first")
    def journal_to(self, folder: str) -> None:
        """Keep what environments say in a folder of this rank below this one, for a step that runs again."""
        self._journals = Path(folder) / f"rank-{self.rank}"

    @transfer(split="all", gather="first")
    def print_to(self, folder: str) -> None:
        """Append what the environments of this rank print to a file of its own in this folder."""
        if self.player is not None:
            self.player.pool.print_to(Path(folder) / f"environments-{self.rank}.log")

    @transfer(split="all", gather="merge")
    def failures(self) -> dict[int, dict[str, Any]]:
        """Return reason and status of the episodes of the last call that have no reward, by trajectory id."""
        return self._failures

    def close(self) -> None:
        """End the processes of environments."""
        if self.player is not None:
            self.player.pool.close()

    def follow(self, updates: Callable[[], int]) -> None:
        """Share memory with the policy from now on. updates: number of the policy's updates so far."""
        self._updates = updates

    def _check_current(self) -> None:
        """Raise EngineError if the policy has changed a part of the engine's weights since the last weight sync."""
        if self._updates is not None and self._updates() != self._seen:
            raise EngineError(
                "the policy was updated after the last weight sync, and its shard is a part of the engine's weights; "
                "call run.sync_weights(run.policy) before generating",
                key="rollout.stale",
            )

    def _params(self, greedy: bool) -> SamplingParams:
        s = self.section
        stops = self.template.stops
        if greedy:
            return SamplingParams(max_tokens=s.max_tokens, temperature=0.0, stop=s.stop, stop_tokens=stops)
        return SamplingParams(
            max_tokens=s.max_tokens,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            stop=s.stop,
            stop_tokens=stops,
        )

    @transfer(split="all", gather="first")
    def compile_seconds(self) -> float:
        """Seconds that torch.compile took so far."""
        return self.engine.stats().compile_seconds

    @property
    def tolerance(self) -> float | None:
        """Check of the engine's weights: ``GenerationEngine.tolerance``."""
        return self.engine.tolerance

    def receive(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the engine's weights. WeightMismatch names one that is off by more than ``tolerance``."""
        self._seen = self._updates() if self._updates is not None else 0
        sent: dict[str, Tensor] = {}

        def sketched() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                sent[name] = sketch(tensor)
                yield name, tensor

        self.engine.update_weights(sketched() if self.tolerance else weights, version=version)
        if self.tolerance:
            found = {name: sketch(tensor) for name, tensor in self.engine.named_parameters()}
            for name, expected in sent.items():
                error = relative_error(found[name], expected) if name in found else math.inf
                if not error <= self.tolerance:
                    raise WeightMismatch(
                        f"{name} in the generation engine differs by {error:.2g} of its size from what was sent, more "
                        f"than the engine's tolerance of {self.tolerance:g}",
                        key=name,
                    )

    def fingerprint(self) -> Mapping[str, int]:
        """Return the checksum of each tensor of the engine's storage."""
        return self.engine.fingerprint()


def ask(prompts: Sequence[int], group: int, first_id: int) -> Batch:
    """Return rows that ask for ``group`` samples of each prompt; ids count up from ``first_id``, groups likewise."""
    n = len(prompts) * group
    ids = first_id + np.arange(n, dtype=np.int64)
    groups = first_id // group + np.repeat(np.arange(len(prompts), dtype=np.int64), group)
    return Batch({"id": ids, "group": groups, "prompt": np.repeat(np.asarray(prompts, np.int64), group)})
