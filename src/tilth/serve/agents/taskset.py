"""Environments of ``verifiers`` 0.4: a taskset whose harness calls the policy as any OpenAI client does.

``rollout.serve=true`` and ``rollout.environment=verifiers:NAME``, with the records of ``tilth env records``.
"""

import asyncio
import os
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any, ClassVar

from tilth.core.errors import PluginError
from tilth.envs.adapters import event_loop, missing
from tilth.envs.environment import EnvironmentFault
from tilth.serve.agents.agent import Agent


class VerifiersTaskset(Agent, declares=False):
    """Episode of an ``Env`` of ``verifiers.v1``, as it is: its agents play a task, its rewards score their traces.

    Each agent is a conversation. All episodes of a process share the environment and an event loop.
    """

    conversations = 16
    _episode: Any = None
    _cut = False
    id: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    """Its ``EnvConfig`` as a dict, such as ``{"agent": {"harness": {"id": "bash"}, "runtime": {"type": "docker"}}}``.
    Default of a plain taskset: the harness ``null``, which runs no code, as a process."""

    @classmethod
    def prepare(cls) -> None:
        """Load the environment and start what its agents share. Raises PluginError."""
        super().prepare()
        cls._loaded()

    @classmethod
    @cache
    def _loaded(cls) -> Any:
        """Return the environment, loaded once in a process, with what its agents share."""
        env = _environment(cls)
        asyncio.run_coroutine_threadsafe(env.serving().__aenter__(), event_loop()).result()
        return env

    @classmethod
    def records(cls, count: int) -> Iterator[dict[str, Any]]:
        """Yield its tasks as records: the text of the prompt, and the whole task."""
        for task in islice(_environment(cls).taskset, count or None):
            yield {"prompt": task.data.prompt_text, "task": task.data.model_dump(mode="json", exclude_none=True)}

    async def run(self, info: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
        """Play the record's ``task``; any other record is the prompt of one."""
        work = self._run_episode(info, base_url, api_key, model)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, event_loop()))

    async def _run_episode(self, info: dict[str, Any], base_url: str, api_key: str, model: str) -> None:
        from verifiers.v1 import EvalClientConfig, ModelContext

        env = self._loaded()
        kind = type(env.taskset).task_type()
        given = info.get("task") or {**info, "prompt": info["prompt"]}
        task = kind(kind.data_type().model_validate(given), env.config.taskset.task)
        variable = f"TILTH_API_KEY_{id(self)}"  # a client reads its key from the environment and nowhere else
        os.environ[variable] = api_key
        try:
            client = EvalClientConfig(base_url=base_url, api_key_var=variable)
            self._episode = await env.run_episode(task, ModelContext(model=model, client=client))
        finally:
            del os.environ[variable]

    def cut(self, why: str) -> None:
        """End the episode; what it was not refused for is scored as it is."""
        self._cut = True
        super().cut(why)

    def reward(self) -> dict[str, Any]:
        """Return the sum of its traces' weighted rewards; each reward and metric is a part."""
        errors = [error for part in (self._episode, *self._episode.traces) for error in part.errors]
        if errors and not self._cut:
            message = f"the environment failed: {errors[0].type}: {errors[0].message:.200}"
            raise EnvironmentFault(message, key="environment.verifiers.error")
        traces = self._episode.traces
        parts = {name: float(x) for trace in traces for name, x in trace.metrics.items() if x is not None}
        return {**parts, "reward": sum(trace.reward for trace in traces)}


def _environment(kind: type[VerifiersTaskset]) -> Any:
    """Return the environment of a class. Raises PluginError."""
    try:
        from verifiers.v1 import load_environment, load_harness, resolve_env_config
    except ImportError as error:
        raise missing("verifiers", error) from error
    plain = {"agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
    options = kind.options or plain
    config = {**options, "taskset": {"id": kind.id, **options.get("taskset", {})}}
    try:
        env = load_environment(resolve_env_config(config))
    except (ValueError, TypeError, ModuleNotFoundError, AttributeError) as error:  # how the package reports a name
        raise PluginError(str(error), key="environment.verifiers.name") from error
    for role, harness in env.config.agent_harnesses().items():
        if load_harness(harness).EXECUTES_CODE and getattr(env.config, role).runtime.type == "subprocess":
            message = (
                f"{role}.harness = {harness.id!r} runs the model's code, and {role}.runtime = 'subprocess' runs it"
            )
            text = f"{message} on this machine as you; set {role}.runtime.type to a container's, or the harness 'null'"
            raise PluginError(text, key="environment.verifiers.runtime")
    return env
