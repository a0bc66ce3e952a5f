"""Process of environments: runs the methods of many episodes at once, a thread for each. Imports no torch.

Requests come pickled from the parent, which the process trusts; its answers are JSON, since what a tool returns may be
anything.
"""

import asyncio
import inspect
import json
import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, NamedTuple

from tilth.config.code import describe
from tilth.config.imports import uncollected
from tilth.config.plugins import declared, import_file, load_plugins, shipped_tasks
from tilth.config.tasks import task_of
from tilth.core.errors import PluginError, TilthError
from tilth.envs.adapters import ADAPTERS, adapted
from tilth.envs.environment import Environment, EnvironmentFault, Message, SelfDriven
from tilth.process.frames import frame, read_frame
from tilth.process.program import end_fork, outlive_signals
from tilth.rewards.functions import normalise

ROLES = ("system", "user", "tool")


class Asked(NamedTuple):
    """Request about one episode. op: begin (argument: info), step (a message), reward (why it was cut, if it was), or
    end."""

    episode: int
    op: str
    argument: Any = None


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """Serve until the pipe from the parent is closed."""
    spec, plugins, rollout = pickle.loads(read_frame(requests) or b"")
    answers = _Answers(replies)
    try:
        with uncollected():
            load_plugins(plugins)
            kind = load_environment(spec)
            _hand_over(kind, spec, rollout)
            kind.prepare()
    except TilthError as error:
        answers.send({"failed": str(error), "key": error.key})
        return
    outlive_signals()  # an environment may have set its own handlers
    answers.send({"ready": True})
    episodes = dict[int, SimpleQueue[Asked]]()
    while (body := read_frame(requests)) is not None:
        asked: Asked = pickle.loads(body)
        if asked.op == "ping":
            answers.send({"pong": True})
            continue
        if asked.op == "begin":
            queue = episodes[asked.episode] = SimpleQueue()
            threading.Thread(target=_episode, args=(kind, queue, answers), daemon=True).start()
        episodes[asked.episode].put(asked)
        if asked.op == "end":
            del episodes[asked.episode]


def _hand_over(kind: type[Environment], spec: str, rollout: Mapping[str, Any] | None) -> None:
    """Give an agent how the recipe draws turns; None: there is no recipe. Raises PluginError."""
    if rollout is None:
        return
    agent = issubclass(kind, SelfDriven)
    if rollout["serve"] != agent:
        what = "an agent calls the policy over HTTP" if agent else "it is no tilth.Agent, so nobody would call"
        message = f"rollout.serve = {str(not agent).lower()}, rollout.environment = {spec!r}: {what}"
        raise PluginError(f"{message}; set rollout.serve={str(agent).lower()}", key="rollout.serve.environment")
    if issubclass(kind, SelfDriven):
        kind.sampling = rollout


class _Answers:
    """Pipe to the parent, which several threads write to."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe, self._lock, self._process = pipe, threading.Lock(), os.getpid()

    def send(self, answer: Mapping[str, Any]) -> None:
        self.write(encoded(answer))

    def write(self, body: bytes) -> None:
        end_fork(self._process)
        with self._lock:
            self._pipe.write(body)
            self._pipe.flush()


def encoded(answer: Mapping[str, Any]) -> bytes:
    """Return an answer as a frame for the pipe. Raises EnvironmentFault for one that is not JSON."""
    try:
        return frame(json.dumps(answer).encode())
    except (TypeError, ValueError, RecursionError) as error:
        message = f"the environment returned a message or tool with what is not JSON: {error}"
        raise EnvironmentFault(message, key="environment.json") from None


def _episode(kind: type[Environment], queue: "SimpleQueue[Asked]", answers: _Answers) -> None:
    """Answer the requests about one episode, in order."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    environment: Environment | None = None
    while (asked := queue.get()).op != "end":
        if environment is None:  # so that an episode that holds up all others can be found
            answers.send({"episode": asked.episode, "thread": threading.get_native_id()})
        try:
            environment = environment or kind()
            body = encoded({"episode": asked.episode, "value": _answer(environment, asked)})
        except EnvironmentFault as fault:
            body = encoded({"episode": asked.episode, "error": str(fault)})
        except BaseException as error:  # noqa: BLE001 - whatever user code raises fails this episode alone
            body = encoded({"episode": asked.episode, "error": describe(error)})
        answers.write(body)
    if environment is not None:
        with suppress(Exception):  # nobody waits for it any more
            _awaited(environment.close())
    loop.close()


def _answer(environment: Environment, asked: Asked) -> Any:
    if asked.op == "begin":
        first = _messages(_awaited(environment.reset(asked.argument)), "reset")
        tools = [one.schema for one in environment.tools().values()] if environment.describes_tools else []
        return {"messages": first, "tools": tools, **_limits(environment)}
    if asked.op == "step":
        return {**_step(_awaited(environment.step(asked.argument))), **_limits(environment)}
    if asked.argument and isinstance(environment, SelfDriven):
        environment.cut(asked.argument)
    return normalise(_awaited(environment.reward()))._asdict()


def _limits(environment: Environment) -> dict[str, Any]:
    return {"limits": environment.limits()} if isinstance(environment, SelfDriven) else {}


def _step(found: Any) -> dict[str, Any]:
    """Check what a step returned: messages, whether the episode is over and, of an environment that rewards turns, the
    turn's reward."""
    if not isinstance(found, tuple) or len(found) not in (2, 3):
        message = f"step returned {found!r:.80}, not (messages, done) or (messages, done, reward)"
        raise EnvironmentFault(message, key="environment.step")
    answer = {"messages": _messages(found[0], "step"), "done": _truth(found[1])}
    if len(found) == 2:
        return answer
    score = normalise(found[2])
    if score.value is None or score.parts:
        why = score.reason or "returned parts, which only the reward of the episode has"
        raise EnvironmentFault(f"the reward of a turn: step {why}", key="environment.step.reward")
    return {**answer, "reward": score.value}


def _truth(done: Any) -> bool:
    """Return whether the episode is over; a number may be a reward in the wrong place, and an object is always true."""
    plain = done.item() if type(done).__name__ in ("bool", "bool_") and hasattr(done, "item") else done  # of numpy
    if not isinstance(plain, bool):
        message = f"step returned done={done!r:.80}, not True or False; a turn's reward is the third value"
        raise EnvironmentFault(message, key="environment.step.done")
    return plain


def _awaited(found: Any) -> Any:
    return asyncio.get_event_loop().run_until_complete(found) if inspect.isawaitable(found) else found


def _messages(found: Any, method: str) -> list[Message]:
    """Check messages of an environment; a text alone is the user's."""
    found = [{"role": "user", "content": found}] if isinstance(found, str) else found
    if not isinstance(found, Sequence):
        raise EnvironmentFault(f"{method} returned {found!r:.80}, not a list of messages", key=f"environment.{method}")
    for message in found:
        good = isinstance(message, Mapping) and isinstance(message.get("content"), str)
        if not good or message.get("role") not in (*ROLES, "assistant"):
            right = f'{{"role": one of {", ".join(ROLES)}, "content": text}}'
            text = f"{method} returned the message {message!r:.80}; a message is {right}"
            raise EnvironmentFault(text, key=f"environment.{method}")
    return [dict(message) for message in found]


def known_environments() -> list[str]:
    """Return the names of all environments: those of tasks that come with Tilth, then those of plugins."""
    own = list(declared("environment"))
    return [*(name for name in shipped_tasks() if name not in own and task_of(name).environment), *own]


def file_of(spec: str) -> str:
    """Return the file that ``rollout.environment`` names; "" if it names none."""
    return "" if spec.partition(":")[0] in ADAPTERS else spec.rpartition(":")[0]


def listed_tools(spec: str) -> list[dict[str, Any]]:
    """Return the schemas of the tools that prompts of ``rollout.environment`` list; none without an environment.

    An environment whose tools depend on the episode has none before one begins. Raises PluginError.
    """
    kind = load_environment(spec) if spec else None
    return [tool.schema for tool in kind().tools().values()] if kind is not None and kind.lists_tools() else []


def check_place(spec: str) -> None:
    """Raise PluginError for an environment whose file or name is not there; import no code of its file."""
    kind, _, id = spec.partition(":")
    if kind in ADAPTERS and id:
        return
    if ":" not in spec and spec not in known_environments():
        raise _no_environment(spec)
    if ":" in spec and not Path(file_of(spec)).expanduser().is_file():
        message = f"rollout.environment={spec!r}: there is no file {file_of(spec)!r}; give FILE.py:Class"
        raise PluginError(message, key="rollout.environment")


def _no_environment(spec: str) -> PluginError:
    message = f"rollout.environment={spec!r} names no subclass of tilth.Environment"
    known = f"there is {', '.join(known_environments())}, and FILE.py:Class"
    return PluginError(f"{message}; {known}", key="rollout.environment")


def load_environment(spec: str) -> type[Environment]:
    """Return the class that ``rollout.environment`` names: declared in a plugin, FILE.py:Class, a task's own, or of
    another package (``verifiers:NAME``, ``gymnasium:ID``).

    Raises PluginError.
    """
    kind, _, id = spec.partition(":")
    if kind in ADAPTERS and id:
        return adapted(kind, id)
    where, _, name = spec.rpartition(":")
    if where:
        module = import_file(Path(where))
        found = getattr(module, name, None)
    else:
        own = declared("environment").get(spec)
        found = own.value if own else task_of(spec).environment if spec in shipped_tasks() else None
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise _no_environment(spec)
    if found.reward is Environment.reward:
        message = f"rollout.environment={spec!r}: {found.__name__} needs a method reward"
        raise PluginError(f"{message}; where turns alone have rewards it returns 0", key="environment.reward")
    return found
