"""The native engine with given lengths, a plugin of ``rl_tilth.py``: completions end where ``rl_task.py`` says."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rl_task import Task

import tilth
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request
from tilth.models.config import DecoderConfig


@tilth.engine("given_lengths")
class GivenLengths(Engine):
    """Ends every completion at its own given length and nowhere else; request ids count up from step to step."""

    def __init__(self, config: DecoderConfig, options: EngineOptions) -> None:
        """The argument "task" is the file of the task, as JSON."""
        super().__init__(config, options)
        self._task = Task.load(Path(options.arguments["task"]))

    def submit(self, requests: Iterable[Request]) -> None:
        super().submit([self._cut(request) for request in requests])

    def _cut(self, request: Request) -> Request:
        step, place = divmod(request.id, self._task.samples)
        most = min(request.params.max_tokens, self._task.lengths(step)[place])  # a probe asks for fewer
        return replace(request, params=replace(request.params, max_tokens=most, stop_tokens=()))
