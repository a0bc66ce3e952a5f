"""Episodes of several turns: an engine and the environments that answer it, side by side.

While an environment works, its episode holds no row of the engine; its tokens stay in the prefix cache. Token ids are
only appended: what the policy wrote is never rendered or tokenised again.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from tilth.core.errors import DataError
from tilth.core.random import stream_id
from tilth.core.trajectory import Finish, Trajectory
from tilth.data.template import Template, TemplateError
from tilth.engines.grammar import added_tokens, grammar_of_calls
from tilth.engines.protocol import GenerationEngine
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds
from tilth.engines.stops import Decodes
from tilth.envs.calls import message_of
from tilth.envs.environment import EnvironmentFault
from tilth.envs.pool import Answer, EnvironmentPool
from tilth.rollout.buffer import TrajectoryBuffer, joined, parted
from tilth.rollout.prefix_log import FlightLog
from tilth.rollout.turns import split_turn, stop_string

KEPT = "played"
WAIT = 0.2
"""Seconds that an idle engine waits for an environment before it looks again."""


@dataclass(frozen=True)
class Limits:
    """turns: most turns of the policy in an episode. context: most tokens of an episode, with its prompt."""

    turns: int
    context: int


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to play. info: what ``Environment.reset`` gets."""

    id: int
    info: dict[str, Any]
    group: int = 0
    prompt: int = 0


@dataclass
class EpisodeConversation:
    """One conversation of an episode."""

    tools: Sequence[Mapping[str, Any]] = ()
    ended: bool = False
    """True if the policy wrote its end token."""
    buffer: TrajectoryBuffer = field(default_factory=TrajectoryBuffer)
    """Its tokens up to the policy's newest turn."""


@dataclass
class Episode:
    """An episode in flight."""

    request: EpisodeRequest
    conversations: list[EpisodeConversation] = field(default_factory=lambda: [EpisodeConversation()])
    at: int = 0
    """Conversation of the newest turn."""
    turns: int = 0
    calls: int = 0
    """Calls of tools in all turns."""
    finish: Finish = "stop"
    note: str = ""
    """Why the episode was cut short."""
    earned: float = 0.0
    """Sum of all rewards of turns."""
    written: int = 0
    """Tokens of the policy since it was begun or resumed."""
    limits: Mapping[str, Any] | None = None
    """Limits of the next turn, where the environment asks for it (``SelfDriven.limits``)."""
    short: bool = False
    """True if the newest turn may end for these limits, before the recipe's."""
    params: SamplingParams = field(default_factory=SamplingParams)
    """How the newest turn is drawn."""
    again: int | None = None
    """Oldest version whose turns are taken from the log; None: it has none."""
    known: int = 0
    """Tokens of the policy that the log had."""

    @property
    def conversation(self) -> EpisodeConversation:
        """Return the conversation of the newest turn."""
        return self.conversations[self.at]

    @property
    def request_id(self) -> int:
        """Return the id of requests of this conversation, which selects their random numbers."""
        return conversation_id(self.request.id, self.at)

    @property
    def others(self) -> int:
        """Return the tokens of its other conversations."""
        return sum(one.buffer.length for one in self.conversations if one is not self.conversation)


def conversation_id(episode: int, at: int) -> int:
    """Return the id of requests of conversation ``at`` of an episode."""
    return stream_id("conversation", episode, at) if at else episode


@dataclass(frozen=True)
class EpisodeResult:
    """A finished episode: its trajectory, the score of its environment, and the number of the policy's turns."""

    trajectory: Trajectory
    parts: dict[str, float]
    reason: str = ""
    """Why the reward is missing, or why the episode was cut short."""
    status: str = "ok"
    turns: int = 0
    calls: float = math.nan
    """Calls of tools, right and broken ones; nan if the prompt lists no tools."""
    paused: dict[str, Any] | None = None
    """State of an episode that has not ended, as JSON; None: it has."""

    def kept(self) -> Trajectory:
        """Return a trajectory from which ``of`` makes this again."""
        facts = {name: getattr(self, name) for name in ("parts", "reason", "status", "turns", "calls", "paused")}
        return replace(self.trajectory, info={KEPT: facts})

    @classmethod
    def of(cls, kept: Trajectory) -> "EpisodeResult":
        """Return what ``kept`` was made of."""
        return cls(replace(kept, info={}), **kept.info[KEPT])


class _Aside(NamedTuple):
    """Episodes that are set aside: ``Player`` has the same attributes for those that are played."""

    open: dict[int, Episode]
    generating: dict[int, int]
    params: SamplingParams
    partial: int
    log: FlightLog | None
    new: list[Request]
    going: list[tuple[Trajectory, SamplingParams]]


class Player:
    """Plays episodes: an engine, a template, a tokenizer that shows special tokens, and a pool of environments.

    It is a source of requests for the rounds of the engine (``engines.rounds.RequestSource``)."""

    def __init__(
        self,
        engine: GenerationEngine,
        template: Template,
        tokenizer: Decodes,
        pool: EnvironmentPool,
        limits: Limits,
        constrained: bool = False,
        lockstep: bool = False,
    ) -> None:
        """constrained: calls of tools follow the tools' schemas (``engines.grammar``); lockstep: each step of the
        engine waits for all environments, so that no clock decides beside what a turn is drawn, and when."""
        self.lockstep = lockstep
        self.constrained, self._added = constrained, added_tokens(tokenizer) if constrained else frozenset[str]()
        self.engine, self.template, self.tokenizer, self.pool, self.limits = engine, template, tokenizer, pool, limits
        self.results: dict[int, EpisodeResult] = {}
        """Episodes that have ended or paused, for the caller to take."""
        self.log: FlightLog | None = None
        """Of turns in flight, where episodes may go on elsewhere."""
        self._params, self._partial = SamplingParams(), 0
        self._open: dict[int, Episode] = {}
        self._resumed: list[Answer] = []
        """Answers of environments of resumed episodes, from before they paused or while they were set aside."""
        self._generating: dict[int, int] = {}
        """Request in flight -> its episode."""
        self._new: list[Request] = []
        """Turns that the rounds of the engine are to take."""
        self._going: list[tuple[Trajectory, SamplingParams]] = []
        """Turns with which they are to go on."""
        self._unwanted: list[int] = []
        self._ended: list[Trajectory] = []
        self._aside: _Aside | None = None
        self._late: list[Answer] = []
        """Answers of environments of episodes that are set aside."""

    def play(self, requests: Sequence[EpisodeRequest], params: SamplingParams) -> list[EpisodeResult]:
        """Play these episodes to their ends and return them in order. Raises what the engine and the template raise;
        an environment's failures become missing rewards."""
        self.begin(requests, params)
        try:
            for _ in EngineRounds(self.engine, source=self).drain():
                pass  # ``results`` has them
        finally:
            self.drop()
        return [self.results.pop(one.id) for one in requests]

    def begin(
        self,
        requests: Sequence[EpisodeRequest],
        params: SamplingParams,
        partial: int = 0,
        paused: Sequence[EpisodeResult] = (),
        again: int | None = None,
    ) -> dict[int, int]:
        """Begin episodes, beside those that are open, and go on with paused ones.

        partial: tokens of the policy from now on after which an episode pauses before its next turn; 0: none does.
        again: episodes go on from the turns that ``log`` has of this version or newer ones, as far as their
        environments are known to answer; return
        the tokens of these by episode.
        """
        self._params, self._partial = params, partial
        if partial:
            self.pool.keep_only([*(one.id for one in requests), *(one.trajectory.id for one in paused)])
        begun = [Episode(one, again=again) for one in requests]
        for episode in begun:
            self._begin(episode)
        for result in paused:
            self._resume(result)
        if again is not None:
            self._hear(self.pool.at_once())
        return {episode.request.id: episode.known for episode in begun if episode.known}

    def _begin(self, episode: Episode) -> None:
        self._open[episode.request.id] = episode
        self.pool.begin(episode.request.id, episode.request.info)

    @property
    def open(self) -> bool:
        """True while an episode has not ended, or one has of which nobody knows."""
        return bool(self._open or self._ended)

    def requests(self, *, wait: bool) -> tuple[list[Request], list[int], list[tuple[Trajectory, SamplingParams]]]:
        """Return the next turns, in the order of their ids, so that equal prompts meet, the requests of episodes that
        have ended meanwhile, and turns to go on with."""
        if self._open:
            self._hear(self._answers(WAIT if wait and not self._new and not self._going else 0.0))
        found, self._new, self._unwanted, self._going = (self._new, self._unwanted, self._going), [], [], []
        return found

    def _hear(self, answers: Sequence[Answer]) -> None:
        """Go on with episodes whose environments have answered, over the turns that the log has."""
        while answers:
            for answer in sorted(answers, key=lambda a: a.episode):
                if (request := self._request(answer)) is not None:
                    self._draw(request)
            answers = self.pool.at_once() if self.log is not None else ()

    def _draw(self, request: Request) -> None:
        """Let a turn be drawn, or what the log lacks of it."""
        if self.log is None:
            self._new.append(request)
            return
        episode, known = self._open[self._generating[request.id]], None
        if episode.again is not None:
            known = self.log.take(request, episode.again)
        else:
            self.log.begin(request)
        episode.known += 0 if known is None else known.completion_length
        if known is not None and known.finish != "aborted":
            self._turn_ended(known)
        elif (params := self.log.left(request)) is None:
            self._put_off(episode)
        elif known is None:
            self._new.append(replace(request, params=params))
        else:
            self._going.append((known, params))

    def _answers(self, seconds: float) -> list[Answer]:
        """Return what environments of open episodes have answered; wait for the first one at most this long."""
        resumed, self._resumed = self._resumed, []
        found = resumed or self.pool.poll(seconds)
        while self.lockstep and self.pool.working(self._open):
            found = [*found, *self.pool.poll(WAIT)]
        if self._aside is not None:
            self._late += [answer for answer in found if answer.episode in self._aside.open]
        return [answer for answer in found if answer.episode in self._open]

    def take(self, finished: Iterable[Trajectory]) -> list[Trajectory]:
        """Take turns that are drawn; return the episodes that have ended or paused, and what is no turn."""
        others = []
        for trajectory in finished:
            if trajectory.id not in self._generating:
                others.append(trajectory)
            elif self.log is not None and self.log.end(trajectory):
                self._put_off(self._open[self._generating[trajectory.id]])
            else:
                self._turn_ended(trajectory)
        ended, self._ended = self._ended, []
        return [*others, *ended]

    def drop(self) -> None:
        """End the episodes that are open, as after an error of the engine."""
        for id in self._open:
            self.pool.end(id)
        for kept in (self._open, self._generating, self._resumed, self._new, self._going, self._unwanted, self._ended):
            kept.clear()

    def discard(self, ids: Iterable[int]) -> list[int]:
        """Forget those of these episodes that are open, and end their environments. Return the requests of their turns
        that are in flight."""
        gone = {id for id in ids if self._open.pop(id, None) is not None}
        for id in gone:
            self.pool.end(id)
        return [request for request, id in [*self._generating.items()] if id in gone and self._withdraw(request)]

    def _withdraw(self, request: int) -> bool:
        """Forget the request of a turn; True if the rounds of the engine have it."""
        if self._generating.pop(request, None) is None:
            return False
        if self.log is not None:
            self.log.forget(request)
        waiting = len(self._new) + len(self._going)
        self._new = [one for one in self._new if one.id != request]
        self._going = [one for one in self._going if one[0].id != request]
        return waiting == len(self._new) + len(self._going)

    def set_aside(self) -> None:
        """Stop the open episodes until ``take_up``, so that others may be played; their environments go on."""
        self.pool.keep_only(self._open)
        how = self._params, self._partial, self.log, self._new, self._going
        self._aside = _Aside(self._open, self._generating, *how)
        self._open, self._generating, self._resumed, self._late = {}, {}, [], self._resumed
        self.log, self._new, self._going = None, [], []

    def drop_aside(self) -> None:
        """End the episodes that are set aside, as after an error of what was played meanwhile."""
        if self._aside is not None:
            for id in self._aside.open:
                self.pool.end(id)
            self._aside, self._late = None, []

    def take_up(self) -> dict[int, SamplingParams]:
        """Go on with what was set aside. Return how the turns are drawn that were in flight, by request."""
        assert self._aside is not None
        self._open, self._generating, self._params, self._partial, self.log, self._new, self._going = self._aside
        self._aside = None
        self._resumed, self._late = self._late, []
        return {request: self._open[id].params for request, id in self._generating.items()}

    def _resume(self, result: EpisodeResult) -> None:
        """Go on with a paused episode: what its environment has said is the beginning of the next turn."""
        whole, state = result.trajectory, dict(result.paused or {})
        self.pool.resume(whole.id, state.pop("said"))
        self._resumed.append(Answer(whole.id, "step", {"messages": state.pop("heard"), "done": False}))
        conversations = [
            EpisodeConversation(one["tools"], one["ended"], TrajectoryBuffer.of(part, one["rewards"]))
            for one, part in zip(state.pop("talks"), parted(whole), strict=True)
        ]
        self._open[whole.id] = Episode(EpisodeRequest(whole.id, {}, whole.group, whole.prompt), conversations, **state)

    def _pause(self, episode: Episode, heard: Sequence[Mapping[str, Any]]) -> None:
        """Leave an episode as it is, before the policy's next turn."""
        state = {name: getattr(episode, name) for name in ("at", "turns", "calls", "earned", "limits")}
        state["talks"] = [
            {"tools": one.tools, "ended": one.ended, "rewards": one.buffer.rewards} for one in episode.conversations
        ]
        state |= {"heard": heard, "said": self.pool.said(episode.request.id)}
        whole = _joined(episode, [one.buffer for one in episode.conversations], cut=False)
        self._leave(episode, EpisodeResult(whole, {}, turns=episode.turns, paused=state))

    def _leave(self, episode: Episode, result: EpisodeResult) -> None:
        del self._open[episode.request.id]
        self.results[episode.request.id] = result
        self._ended.append(result.trajectory)

    def _request(self, answer: Answer) -> Request | None:
        """Return the request for the policy's next turn; None if the episode ends or waits."""
        episode = self._open[answer.episode]
        if answer.status == "differs" and self.log is not None:
            self._begin_anew(episode)
        elif answer.status != "ok":
            self._close(episode, {}, answer.reason, answer.status)
        elif answer.op == "reward":
            score = answer.value
            self._close(episode, score["parts"], score["reason"], "ok" if score["value"] is not None else "invalid",
                        score["value"])  # fmt: skip
        elif answer.op == "begin":
            episode.limits = answer.value.get("limits")
            return None if self._counts(episode, answer.value) else self._first(episode, answer.value)
        else:
            return self._stepped(episode, answer.value)
        return None

    def _begin_anew(self, episode: Episode) -> None:
        """Begin an episode whose lost environment, made again, answers otherwise, where others do not wait for it."""
        if self._withdraw(episode.request_id):
            self._unwanted.append(episode.request_id)
        self._begin(Episode(episode.request, again=episode.again or 0))  # its first turn may be in the log

    def _put_off(self, episode: Episode) -> None:
        """Leave an episode for now, in the middle of a turn."""
        self._withdraw(episode.request_id)
        self.pool.end(episode.request.id)
        self._leave(episode, EpisodeResult(_whole(episode), {}, turns=episode.turns, paused={}))

    def _stepped(self, episode: Episode, answer: Mapping[str, Any]) -> Request | None:
        """Go on after a step: with the next turn, or with the reward at the end of the episode."""
        reward = answer.get("reward", 0.0)
        episode.earned += reward
        episode.conversation.buffer.pay(reward)
        episode.limits = answer.get("limits", episode.limits)
        if answer["done"]:
            self.pool.reward(episode.request.id)
        elif episode.finish != "stop":
            self.pool.reward(episode.request.id, episode.note)
        elif self._counts(episode, answer):
            return None
        elif episode.turns >= self.limits.turns:
            self._cut(episode, f"{self.limits.turns} turns")
        elif self._partial and episode.written >= self._partial:
            self._pause(episode, answer["messages"])
        else:
            return self._turn_to(episode, answer["messages"])
        return None

    def _counts(self, episode: Episode, answer: Mapping[str, Any]) -> bool:
        """Count the tokens of a prompt, if the environment asks for that alone (``SelfDriven.limits``)."""
        limits = episode.limits or {}
        if not limits.get("count"):
            return False
        new, at = answer["messages"], limits["conversation"]
        try:
            if at is None:
                found = len(self.template.begin(new, limits["tools"]))
            else:
                chat = episode.conversations[at]
                found = chat.buffer.length + len(self.template.follow(new, chat.tools, ended=chat.ended))
        except DataError as error:
            self.pool.step(episode.request.id, {"refused": str(error)})
        else:
            self.pool.step(episode.request.id, {"counted": found})
        return True

    def _turn_to(self, episode: Episode, new: Sequence[Mapping[str, Any]]) -> Request | None:
        """Go on with the conversation that the environment names, or begin it."""
        limits = episode.limits or {}
        episode.at = limits.get("conversation", 0)
        if episode.at < len(episode.conversations) and episode.conversation.buffer.length:
            return self._next(episode, new)
        if episode.at == len(episode.conversations):  # else the first one, before which tokens were counted
            episode.conversations.append(EpisodeConversation())
        return self._first(episode, {"messages": new, "tools": limits["tools"], "limits": limits})

    def _first(self, episode: Episode, begun: Mapping[str, Any]) -> Request | None:
        episode.conversation.tools, episode.limits = begun["tools"], begun.get("limits")
        try:
            ids = self.template.begin(begun["messages"], episode.conversation.tools)
        except DataError as error:
            self._unreadable(episode, error)
            return None
        return self._ask(episode, np.asarray(ids, np.int64), f"its first messages have {len(ids)} tokens")

    def _next(self, episode: Episode, new: Sequence[Mapping[str, Any]]) -> Request | None:
        """Append the environment's messages to the ids; they are read, never trained."""
        conversation = episode.conversation
        try:
            ids = self.template.follow(new, conversation.tools, ended=conversation.ended) if new else []
        except DataError as error:
            self._unreadable(episode, error)
            return None
        if ids:
            conversation.buffer.read(new[0]["role"], ids)
        return self._ask(episode, conversation.buffer.tokens, f"an answer of the environment has {len(ids)} tokens")

    def _unreadable(self, episode: Episode, error: DataError) -> None:
        """End an episode whose environment says what the tokenizer cannot express, or the template does not take in
        this place. A template that cannot work at all ends the run."""
        if isinstance(error, TemplateError) and error.key != "template.render":
            raise error
        self._close(episode, {}, str(error), "error")

    def _ask(self, episode: Episode, tokens: np.ndarray, what: str) -> Request | None:
        """Return the request for the next turn; without room for a token the episode is cut, and scored as it is."""
        room = self.limits.context - len(tokens) - episode.others
        request, params = episode.request, self._params
        if room < 1:
            self._cut(episode, f"{what}, of a context of {self.limits.context}")
            return None
        own, most = episode.limits or {}, min(params.max_tokens, room)
        longest = min(own.get("max_tokens") or most, most)
        episode.short = longest < most
        stop = (*params.stop, *own.get("stop", ()))
        some = replace(params, max_tokens=longest, stop=stop, schema=self._schema(episode))
        self._generating[episode.request_id], episode.params = request.id, some
        return Request(episode.request_id, tokens, some, request.group, request.prompt, keeps=True)

    def _cut(self, episode: Episode, why: str) -> None:
        """Leave the policy no further turn; the episode is scored as it is."""
        episode.finish, episode.note = "length", why
        self.pool.reward(episode.request.id, why)

    def _schema(self, episode: Episode) -> str:
        """Return the grammar of the policy's turns, "" for any text, as for an agent whose calls list no tools."""
        tools = episode.conversation.tools
        if not self.constrained or (episode.limits is not None and not tools):
            return ""
        if not tools:
            message = "rollout.tool_schemas = true, but the environment lists no tools in its prompts; use false"
            raise EnvironmentFault(message, key="rollout.tool_schemas.none")
        return grammar_of_calls(json.dumps(tools), self._added)

    def _turn_ended(self, trajectory: Trajectory) -> None:
        """Take the policy's turn: pass it on, or end an episode whose turn was cut."""
        episode = self._open[self._generating.pop(trajectory.id)]
        conversation = episode.conversation
        start = conversation.buffer.length or trajectory.prompt_length
        conversation.buffer.take(trajectory)
        episode.turns += 1
        ids = trajectory.tokens[start:].tolist()
        episode.written += len(ids)
        conversation.ended = len(ids) > 0 and ids[-1] in self._params.stop_tokens
        text = self.tokenizer.decode(ids[:-1] if conversation.ended else ids, special=True)
        short = episode.short and trajectory.finish == "length"
        if trajectory.finish in ("length", "aborted") and not short:
            episode.finish, episode.note = trajectory.finish, f"turn {episode.turns} was cut"
        # a turn that was cut is heard all the same, as the last one
        message = message_of(text)
        episode.calls += len(message.get("tool_calls", ()))
        if episode.limits is not None:
            message |= self._facts(trajectory, start, episode.limits)
        self.pool.step(episode.request.id, message)

    def _facts(self, turn: Trajectory, start: int, limits: Mapping[str, Any]) -> dict[str, Any]:
        """Return facts of a turn for an environment that asks for turns (``SelfDriven.limits``). start: its prompt's
        length."""
        ids = turn.tokens[start:].tolist()
        content, _ = split_turn(self.tokenizer, turn, self._params.stop_tokens, start)
        found = {"content": content, "text": turn.text, "finish": turn.finish, "counts": [start, len(ids)]}
        stopped = stop_string(self.tokenizer, turn, self._params.stop_tokens, limits.get("stop", ()), start)
        if stopped is not None:
            found["stopped"] = stopped
        if not limits.get("details"):
            return found
        pieces = [self.tokenizer.decode([one], special=True) for one in ids]
        return {**found, "ids": ids, "pieces": pieces, "logprobs": turn.logprobs[start:].tolist()}

    def _close(
        self, episode: Episode, parts: dict[str, float], reason: str, status: str, value: float | None = None
    ) -> None:
        """End an episode. Tokens after the policy's last turn of a conversation are left out: nothing follows them."""
        self.pool.end(episode.request.id)
        if self._withdraw(episode.request_id):  # its lost environment was not the same again
            self._unwanted.append(episode.request_id)
        finish: Finish = "error" if status in ("error", "timeout", "died", "differs") else episode.finish
        whole = _whole(episode)
        whole.reward, whole.finish = None if value is None else value + episode.earned, finish
        calls = episode.calls if any(conversation.tools for conversation in episode.conversations) else math.nan
        self._leave(episode, EpisodeResult(whole, parts, reason or episode.note, status, episode.turns, calls))


def _silent(request: EpisodeRequest) -> Trajectory:
    """Return the trajectory of an episode in which the policy was never asked: one padding token, not trained."""
    nothing = np.zeros(1, np.int64)
    return Trajectory(
        request.id, request.prompt, request.group, nothing, nothing.astype(np.uint8), np.zeros(1, np.float32)
    )


def _whole(episode: Episode) -> Trajectory:
    """Return the conversations of an ended episode in which the policy chose a token, each up to its last one."""
    if found := [one.buffer for one in episode.conversations if one.buffer.last >= 0]:
        return _joined(episode, found, cut=True)
    first = episode.conversations[0].buffer
    return _joined(episode, [first], cut=False) if first.length else _silent(episode.request)


def _joined(episode: Episode, buffers: Sequence[TrajectoryBuffer], *, cut: bool) -> Trajectory:
    """Return these conversations as one trajectory, with text and finish of the newest turn if it is among them."""
    newest = episode.conversation.buffer
    order = buffers.index(newest) if newest in buffers else 0
    request = episode.request
    return joined(request.id, request.prompt, request.group, buffers, order, cut=cut)
