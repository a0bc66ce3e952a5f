"""Rollout role: a generation engine that turns prompts into batches of experience."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tilth.cluster.protocol import control, transfer
from tilth.config.schema import RolloutConfig as RolloutSection
from tilth.core.batch import Batch, Store
from tilth.core.checksum import relative_error, sketch
from tilth.core.errors import WeightMismatch
from tilth.core.media import MEDIA, Media, unpack_media
from tilth.core.trajectory import Trajectory
from tilth.data.template import Template
from tilth.engines.protocol import EngineError, GenerationEngine
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds, RoundLimits
from tilth.envs.journal import ObservationJournal
from tilth.plan.repack import ReplicaLoad
from tilth.rewards.process_pool import CORRECT
from tilth.roles.experience import CALLS, CARRIED, INFO, OUTCOME, TURNS, identity, media_of, texts, to_batch
from tilth.rollout.episodes import EpisodeRequest, EpisodeResult, Player
from tilth.rollout.prefix_log import FlightLog, PrefixLog
from tilth.rollout.prefixes import PrefixPool
from tilth.trace.spans import span

LIMITS = RoundLimits(steps=1 << 30, early=1 << 30, seconds=0.25)
"""Of an engine on one rank. Engines side by side wait for the longest round, so all take the same time."""
DIVIDED = RoundLimits(steps=32, early=32)
"""Of an engine over several ranks, which end alike."""
COUNTED = RoundLimits(steps=8, early=8)
"""Of an engine in the process of the loop that generates ahead (``rollout.staleness``), so that no clock has a say."""


class Ended(NamedTuple):
    """A sample that has ended, or has paused (``rollout.partial``). checksum: of its ids; text: "" if nobody asks."""

    prompt: int
    checksum: int
    text: str
    paused: bool
    versions: Sequence[tuple[int, int]] = ()
    """(first token, version of the policy) of each span that it chose."""
    length: int = 0
    """Tokens, with the prompt."""
    chosen: Sequence[int] = ()
    """Tokens that it chose of each span; others are those of an environment."""
    failure: Mapping[str, Any] | None = None
    """Value None, ``reason`` and ``status`` of an episode that has ended without a reward."""
    opened: Sequence[int] = ()
    """First token of each conversation of an episode behind the first one."""


class Resumed(NamedTuple):
    """Continuation of a sample behind the first ``tokens`` of its completion, under this ``version`` of the weights."""

    tokens: int
    version: int


class Aside(NamedTuple):
    """Samples in flight, and others that have ended, of ``RolloutWorker.set_aside``, and how both are drawn."""

    flying: list[Trajectory]
    ended: dict[int, EpisodeResult]
    params: SamplingParams
    plays: bool
    media: bool
    log: FlightLog | None
    observed: ObservationJournal | None
    asked: int
    done: int
    before: dict[int, int]
    aborting: list[int]
    news: list[int]


class EngineCounts(NamedTuple):
    """Counts of an engine between two calls of ``RolloutWorker.engine_counts``, in the order of its answer."""

    drawn: float
    """Tokens drawn in decode passes; then those that drafts proposed, those of them that were said, and those that
    run-ahead said."""
    drafted: float
    accepted: float
    ahead: float
    missed: float
    """Passes without drafts since a drafter apart was late."""
    lost: float
    """Processes of drafters."""
    looks: float
    """Passes after which the KV cache was looked at; then the share of its blocks in use, summed over these, and the
    greatest."""
    used: float
    peak: float


class RolloutWorker:
    """Generation engine, and the store of prompts and answers. player: plays episodes in place of single answers.

    Samples are submitted, generated in rounds, and collected. Between two rounds weights may come, samples may join or
    be aborted.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        template: Template,
        section: RolloutSection,
        store: Store,
        player: Player | None = None,
        rank: int = 0,
        limits: RoundLimits | None = None,
    ) -> None:
        self.engine, self.template, self.section, self.store = engine, template, section, store
        self.player = player
        self.rank = rank
        self.rounds = EngineRounds(engine, limits or LIMITS, player)
        self._journals: Path | None = None
        self._asked = self._done = 0
        self._aborting: list[int] = []
        self._ended: dict[int, EpisodeResult] = {}
        """Samples that have ended or paused and were not collected."""
        self._news: list[int] = []
        """Those of them that had ended before they were submitted."""
        self._before: dict[int, int] = {}
        """Sample that goes on -> length of its completion before."""
        self._params, self._partial, self._plays, self._media = SamplingParams(), 0, False, False
        self._prefixes: PrefixPool | None = None
        self._log: FlightLog | None = None
        """Of the tokens of samples in flight, where they may go on elsewhere."""
        self._observed: ObservationJournal | None = None
        """Of what the environments of samples in flight say."""
        self._least, self._keeps = 0, True
        self._aside: Aside | None = None
        self._updates: Callable[[], int] | None = None
        self._seen = 0
        self._counted: tuple[float, ...] = (0,) * 8

    @control
    def status(self) -> dict[str, float]:
        """Return the number of ``requests`` since ``begin``, ``done``: those of them that have ended or paused, the
        ``version`` of the weights and the engine's counts (``Stats.dump``); 0 on ranks whose engine another rank
        reports."""
        counts = {"requests": self._asked, "done": self._done, **self.engine.stats().dump()}
        return {"version": self.engine.version, **{n: count * self.engine.reports for n, count in counts.items()}}

    @transfer(split="all", gather="merge", over=("dp",))
    def begin(self, *, anew: bool = False) -> dict[str, Any]:
        """Drop what is in flight and was not collected, and forget prefixes of earlier steps, so that a step that runs
        again does the same work. anew: drop what is set aside, too."""
        self.rounds.drop()
        self.engine.run_ahead([])
        self.engine.reset_prefix_cache()
        for kept in (self._ended, self._news, self._before, self._aborting):
            kept.clear()
        self._log_in(None)
        self._observe(None)
        if self.player is not None:
            self.player.results.clear()
        if anew:
            if self._aside is not None and self._aside.observed is not None:
                self._aside.observed.close()
            self._aside = None
            if self.player is not None:
                self.player.drop_aside()
        self._asked = self._done = 0
        return {}

    @transfer(split="rows", gather="merge", over=("dp",))
    def submit(
        self,
        asked: Batch,
        *,
        greedy: bool = False,
        since: int | None = None,
        again: int | None = None,
        stops: Mapping[int, int] | None = None,
    ) -> dict[int, Resumed]:
        """Take a sample for each row (columns id, group, prompt; payload prompt_tokens), or an episode (payload info).

        since: step at whose end the samples with ``carried`` 1 paused; they go on. Each sample then gets
        ``rollout.partial`` tokens at most, and an episode ends the turn in which it has them. again: samples go on from
        the tokens that the log has of them (``log_to``), of this version or newer ones; return how, by sample.
        stops: request (``episodes.conversation_id``) -> tokens with which its sample pauses, with those before the
        completion.
        """
        self._params, self._plays = self._params_of(greedy), INFO in asked.payload
        self._media = MEDIA in asked.payload
        self._partial, carried = 0, list[EpisodeResult]()
        fresh = asked
        if since is not None:
            assert self._prefixes is not None
            goes = asked[CARRIED] != 0
            self._partial, fresh = self.section.partial, asked.select(~goes)
            kept = self._prefixes.take(since, asked["id"][goes].tolist()).values()
            carried = [EpisodeResult.of(t) if self._plays else self._answer(t) for t in kept]
        self._asked += len(asked)
        if self._log is not None:
            self._log.stops, self._log.peak = stops or {}, 0
        known = self._go_on(carried, self._episodes(fresh) if self._plays else [], again=again)
        if not self._plays:
            known = self._submit(self._requests(fresh), again=again)
        return {i: Resumed(count, self.engine.version) for i, count in known.items()}

    @transfer(split="rows", gather="merge", over=("dp",))
    def run_ahead(self, asked: Batch) -> dict[str, Any]:
        """Let the engine answer the prompt of each group, greedily, where it is idle, until ``begin``: for drafts of
        the samples that these rows ask for, when they come, and nothing else."""
        first = np.sort(np.unique(asked["group"], return_index=True)[1])
        params = self._params_of(greedy=True)
        self.engine.run_ahead([replace(one, params=params) for one in self._requests(asked.select(first))])
        return {}

    def _submit(self, requests: Sequence[Request], *, again: int | None) -> dict[int, int]:
        """Submit requests; return the tokens with which those go on that the log has something of."""
        if (log := self._log) is None:
            self.rounds.submit(requests)
            return {}
        known = dict[int, Trajectory]()
        if again is not None:
            known = {one.id: t for one in requests if (t := log.take(one, again)) is not None}
        fresh = [one for one in requests if one.id not in known]
        for one in fresh:
            log.begin(one)
        self.rounds.submit([replace(one, params=log.left(one) or one.params) for one in fresh])
        for one in requests:
            if (t := known.get(one.id)) is None:
                continue
            if t.finish == "aborted" and (params := log.left(one)) is not None:
                self._before[t.id] = t.completion_length
                self.rounds.resume(t, params)
            else:
                log.forget(t.id)
                self._ended[t.id] = EpisodeResult(t, {}, paused={} if t.finish == "aborted" else None)
                self._news.append(t.id)
        return {i: t.completion_length for i, t in known.items()}

    @transfer(split="all", gather="merge", over=("dp",))
    def resume(self) -> dict[str, Any]:
        """Go on with the samples that have paused and were not collected."""
        paused = [one for one in self._ended.values() if one.paused is not None]
        self._done -= len(paused)
        for one in paused:
            del self._ended[one.trajectory.id]
        self._go_on(paused, [], again=None)
        return {}

    @transfer(split="all", gather="merge", over=("dp",))
    def advance(self, *, texts: bool = True) -> dict[int, Ended]:
        """Generate for a round; return the samples that have ended, by id. texts: with their texts."""
        news, self._news = self._news, []
        if self.rounds.busy:
            self._check_current()
            with span("generate") as spent:
                aborted, self._aborting = self._aborting, []
                found = self.rounds.advance(aborted=aborted).finished
                written = sum(t.completion_length - self._before.pop(t.id, 0) for t in found)
                spent.set(tokens=written, squares=sum(len(t.tokens) ** 2 - t.prompt_length**2 for t in found))
            for t in found:
                self._ended[t.id] = self._result(t)
            news += [t.id for t in found]
            if self._log is not None:
                self._log.write(self.rounds.progress())
        self._done += len(news)
        return {i: self._told(self._ended[i], texts) for i in news}

    def _told(self, result: EpisodeResult, texts: bool) -> Ended:
        t, failure = result.trajectory, None
        if self._plays and t.reward is None and result.paused is None:
            failure = {"value": None, "reason": result.reason, "status": result.status}
        chosen = [t.completion_length]
        if len(t.versions) != 1:
            chosen = [int(t.mask[a:b].sum()) for a, b in pairwise([*(first for first, _ in t.versions), len(t.tokens)])]
        text, paused = t.text if texts else "", result.paused is not None
        return Ended(
            t.prompt, identity(t.tokens), text, paused, tuple(t.versions), len(t.tokens), chosen, failure, t.opened
        )

    def _note_ended(self) -> None:
        """Take episodes that had ended before they were submitted, which the next round reports."""
        for t in [] if self.player is None else self.player.take(()):
            self._before.pop(t.id, None)
            self._ended[t.id] = self._result(t)
            self._news.append(t.id)

    @transfer(split="all", gather="first")
    def set_aside(self) -> None:
        """Stop what is in flight, and keep it and what was not collected: until ``take_up`` other samples may be drawn.
        Environments go on. Of an engine that can resume samples."""
        self._note_ended()
        how = self._params, self._plays, self._media, self._log, self._observed
        counts = self._asked, self._done, self._before, self._aborting
        self._aside = Aside(self._pause(), self._ended, *how, *counts, self._news)
        self._ended, self._log, self._observed, self._before, self._aborting = {}, None, None, {}, []
        self._news = []
        if self.player is not None:
            self.player.set_aside()

    @transfer(split="all", gather="first")
    def take_up(self) -> None:
        """Go on with what was set aside, each sample with its own random numbers, under the weights that are here."""
        assert self._aside is not None
        one, self._aside = self._aside, None
        flying, ended, self._params, self._plays, self._media, self._log, *_ = one
        self._observe(one.observed)
        self._asked, self._done, self._before, self._aborting = one.asked, one.done, one.before, one.aborting
        self._ended, self._news = self._ended | ended, one.news
        turns = {} if self.player is None else self.player.take_up()
        for trajectory in flying:
            self.rounds.resume(trajectory, turns.get(trajectory.id, self._params))

    @transfer(split="all", gather="merge")
    def discard(self, ids: Sequence[int]) -> dict[str, Any]:
        """Forget samples that are in flight or have ended, and end their environments."""
        self._note_ended()
        told = [i for i in self._news if i not in ids]
        self._done, self._news = self._done + len(self._news) - len(told), told
        flying = [i for i in ids if i not in self._ended]
        self.rounds.discard([*flying, *(self.player.discard(flying) if self.player is not None else [])])
        self._done += len(flying)
        for i in ids:
            self._ended.pop(i, None)
            self._before.pop(i, None)
            if self._log is not None:
                self._log.forget(i)
        return {}

    @transfer(split="all", gather="all")
    def abort(self, ids: Sequence[int] | None = None) -> int:
        """End samples (None: all) in the next round, each with the tokens it has and finish "aborted"; an episode ends
        with the turn that is drawn. Return their number."""
        chosen = [i for i in self.rounds if ids is None or i in ids]
        self._aborting += chosen
        return len(chosen) * self.engine.reports

    @transfer(split="all", gather="rows", over=("dp",))
    def collect(self, ids: np.ndarray) -> Batch:
        """Return the rows of those of these samples that have ended here, in this order, and forget them."""
        found = [self._ended.pop(i) for i in ids.tolist() if i in self._ended]
        if self._log is not None and self._observed is not None:  # before a step learns from them, for its replay
            self._observed.sync()
        batch = to_batch([one.trajectory for one in found], self.store, by_turn=self._plays, media=self._media)
        return self._scored(batch, found) if self._plays else batch

    @transfer(split="all", gather="first")
    def keep(self, step: int, oldest: int) -> None:
        """Keep the samples that were not collected for the step after this one, durably, and drop those of steps before
        ``oldest``. StorageError."""
        assert self._prefixes is not None
        if self.engine.reports:
            left = [one.kept() if self._plays else one.trajectory for one in self._ended.values()]
            self._prefixes.keep(step, left, oldest)
        self._ended.clear()

    @transfer(split="all", gather="first")
    def carry_in(self, folder: str) -> None:
        """Keep samples that go on in the next step in this folder."""
        self._prefixes = PrefixPool(Path(folder), self.rank)

    # ---- samples that may go on elsewhere ----

    @transfer(split="all", gather="first")
    def log_to(
        self, folder: str, attempt: int, version: int, *, least: int = 0, complete: bool = False, keeps: bool = True
    ) -> None:
        """Log the tokens of samples in flight in this folder until ``begin``, see ``PrefixLog``, and what environments
        say where ``journal_to`` has told. For engines that can resume samples.

        least: lowest id of those that go on; complete: of a replay, in which environments say nothing new; keeps: what
        environments have said stays, for a replay, also where no resume needs it.
        StorageError.
        """
        log = PrefixLog(Path(folder), attempt, version, self.rank)
        finish = self.section.inflight == "finish"
        self._log_in(FlightLog(log, self.engine, one_version=finish, complete=complete))
        self._least, self._keeps = least, keeps
        if self._journals is not None:
            self._observe(ObservationJournal.of_attempt(self._journals, attempt, self.rank, complete=complete))

    def _log_in(self, log: FlightLog | None) -> None:
        self._log = log
        if self.player is not None:
            self.player.log = log

    def _observe(self, journal: ObservationJournal | None) -> None:
        """Keep what environments say from now on in a journal, in place of the one before."""
        if self._observed is not None:
            self._observed.close()
        self._observed = journal
        if self.player is not None:
            self.player.pool.keep(journal)

    @transfer(split="all", gather="merge")
    def forget(self, below: int) -> dict[str, Any]:
        """Let the log forget groups below this one, of which a resume needs nothing. StorageError."""
        if self._log is not None and self.engine.reports:
            self._log.log.forget(below)
        if self._log is not None and self._observed is not None:
            self._observed.end_part()
            if not self._observed.complete:
                self._observed.forget(below, files=not self._keeps)
        return {}

    @transfer(split="all", gather="first")
    def load(self) -> ReplicaLoad:
        """Return what is in flight, after a round, for a plan of moves."""
        assert self._log is not None
        return ReplicaLoad(self.engine.version, tuple(self._log.rows()), self._log.still, self._log.peak)

    @transfer(split="all", gather="first")
    def give_up(self, ids: Sequence[int]) -> dict[int, int]:
        """Stop these answers, those of them that are in flight, and keep their tokens in the log, for a ``submit`` to
        another replica; return the numbers of tokens. StorageError."""
        stopped = self._pause(ids)
        for t in stopped:
            assert self._log is not None
            self._log.forget(t.id)
            self._before.pop(t.id, None)
        self._asked -= len(stopped)
        return {t.id: t.completion_length for t in stopped}

    def _pause(self, ids: Sequence[int] | None = None) -> list[Trajectory]:
        """Stop these samples, or all that are in flight, and return what there is of them, which is in the log then."""
        stopped = self.rounds.pause(ids)
        if self._log is not None:
            self._log.pause(stopped)
        return stopped

    def _requests(self, asked: Batch) -> list[Request]:
        some = replace(self._params, max_tokens=self._partial or self._params.max_tokens)
        prompts = asked.read(self.store, "prompt_tokens")["prompt_tokens"].rows()
        packed = media_of(asked, self.store).get(MEDIA)
        media: Iterable[Media] = repeat(()) if packed is None else map(unpack_media, packed)
        rows = zip(*(asked[c].tolist() for c in ("id", "group", "prompt")), prompts, media)
        return [Request(i, prompt, some, g, p, media=items) for i, g, p, prompt, items in rows]

    def _episodes(self, asked: Batch) -> list[EpisodeRequest]:
        infos = texts(asked.read(self.store, INFO)[INFO])
        rows = zip(*(asked[c].tolist() for c in ("id", "group", "prompt")))
        return [EpisodeRequest(i, json.loads(info), g, p) for info, (i, g, p) in zip(infos, rows)]

    def _go_on(
        self, carried: Sequence[EpisodeResult], requests: Sequence[EpisodeRequest], *, again: int | None
    ) -> dict[int, int]:
        """Go on with samples that have paused, and begin episodes; those that have ended wait for their groups. Return
        the tokens of episodes that go on ``again``."""
        paused = [one for one in carried if one.paused is not None]
        self._before |= {one.trajectory.id: one.trajectory.completion_length for one in paused}
        for one in carried:
            if one.paused is None:
                self._ended[one.trajectory.id] = one
                self._news.append(one.trajectory.id)
        if self._plays:
            return self._play(requests, carried, paused, again=again)
        for one in paused:
            most = min(self._params.max_tokens, one.trajectory.completion_length + self._partial)
            self.rounds.resume(one.trajectory, replace(self._params, max_tokens=most))
        return {}

    def _play(
        self,
        requests: Sequence[EpisodeRequest],
        carried: Sequence[EpisodeResult],
        paused: Sequence[EpisodeResult],
        *,
        again: int | None,
    ) -> dict[int, int]:
        """Begin these episodes and go on with paused ones. carried: all that go on or wait, whose observations are in
        the journal too."""
        assert self.player is not None
        if self._observed is not None and again is not None:
            self._observed.recall([one.id for one in requests], self._least)
        if self._journals is not None and self._log is None:
            about = f"version {self.engine.version}, {self._params}"
            about += f", after {sum(len(one.trajectory.tokens) for one in carried)}" if carried else ""
            ids = sorted([*(one.id for one in requests), *(one.trajectory.id for one in carried)])
            self._observe(ObservationJournal.of_call(self._journals / f"rank-{self.rank}", ids, about))
        known = self.player.begin(requests, self._params, self._partial, paused, again=again)
        self._before |= known
        return known

    def _result(self, t: Trajectory) -> EpisodeResult:
        """Return a sample that has ended or paused."""
        result = None if self.player is None else self.player.results.pop(t.id, None)
        return self._answer(t) if result is None else result

    def _answer(self, t: Trajectory) -> EpisodeResult:
        """Return a single answer that has ended or paused."""
        left = self._log is not None and self._log.end(t)
        return EpisodeResult(t, {}, paused={} if left else self._paused(t))

    def _paused(self, t: Trajectory) -> dict[str, Any] | None:
        """Return {} for an answer that was cut by ``rollout.partial`` alone; None for one that has ended."""
        goes = self._partial and t.finish == "length" and t.completion_length < self.section.max_tokens
        return {} if goes else None

    def _scored(self, batch: Batch, found: Sequence[EpisodeResult]) -> Batch:
        """Add the parts of the environment's reward, and numbers of turns and calls."""
        names = sorted({name for one in found for name in one.parts})
        rows = {f"part/{n}": np.array([one.parts.get(n, np.nan) for one in found], np.float32) for n in names}
        rows[TURNS] = np.array([one.turns for one in found], np.float32)
        rows[CALLS] = np.array([one.calls for one in found], np.float32)
        if CORRECT in names:
            rows[OUTCOME] = rows[f"part/{CORRECT}"]
        return batch.with_rows(**rows)

    @transfer(split="all", gather="first")
    def journal_to(self, folder: str) -> None:
        """Keep what environments say in this folder, for a step or samples that begin again."""
        self._journals = Path(folder)

    @transfer(split="all", gather="first")
    def print_to(self, folder: str) -> None:
        """Append what the environments of this rank print to a file of its own in this folder."""
        if self.player is not None:
            self.player.pool.print_to(Path(folder) / f"environments-{self.rank}.log")

    def close(self) -> None:
        """End the processes of environments."""
        self._observe(None)
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

    def _params_of(self, greedy: bool) -> SamplingParams:
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

    @control
    def engine_counts(self) -> tuple[float, ...]:
        """Return ``EngineCounts`` since the last call; 0 on ranks whose engine another rank reports."""
        stats, before = self.engine.stats(), self._counted
        self._counted = (
            *(stats.useful_rows, stats.drafted_tokens, stats.accepted_tokens, stats.ahead_tokens),
            *(stats.undrafted_passes, stats.lost_drafters, stats.kv_looks, stats.kv_used),
        )
        peak, stats.kv_peak = stats.kv_peak, 0.0
        counts = (*(now - then for now, then in zip(self._counted, before)), peak)
        return tuple(count * self.engine.reports for count in counts)

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
    """Return rows that ask for ``group`` samples of each prompt; ids count up from ``first_id``, and the number of a
    group is its first one, whatever its size."""
    ids = first_id + np.arange(len(prompts) * group, dtype=np.int64)
    numbers, of = np.repeat(ids[::group], group), np.repeat(np.asarray(prompts, np.int64), group)
    return Batch({"id": ids, "group": numbers, "prompt": of})
