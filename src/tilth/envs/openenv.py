"""Environments of OpenEnv, which a server holds: ``rollout.environment=openenv:URL``.

Package ``openenv`` from 0.10 on; ``openenv-core`` before.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.request import urlopen

from tilth.core.errors import PluginError
from tilth.envs.adapters import PlayedEnvironment, imported, offered
from tilth.envs.environment import Message

INVALID = "VALIDATION_ERROR"
"""OpenEnv's code of an action that is none."""


class OpenEnvironment(PlayedEnvironment, declares=False):
    """Episode of a server, each with a session of its own. ``options`` are of ``GenericEnvClient``; ``id`` is the
    address of the server, as ``http://127.0.0.1:8000``.

    An action of one text field is the policy's turn; any other one is a call of the tool ``act`` with its fields.
    """

    _action: ClassVar[Mapping[str, Any]] = {}
    """JSON schema of an action, without its metadata."""
    _client: Any = None

    @classmethod
    def prepare(cls) -> None:
        """Ask the server for the schema of its actions, so that one that does not answer ends the run at its start."""
        imported("openenv", "openenv.core.generic_client")
        try:
            with urlopen(f"{cls.id.rstrip('/')}/schema", timeout=10) as answer:
                schema = json.load(answer)["action"]
        except (OSError, ValueError, KeyError) as error:
            raise PluginError(
                f"openenv:{cls.id} gives no schema: {error!r}", key="environment.openenv.server"
            ) from error
        fields = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
        cls._action = {**schema, "properties": fields}

    def reset(self, info: dict[str, Any]) -> Sequence[Message]:
        """Begin with the record's ``seed``, or with the arguments in its ``reset``."""
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(self.id, **self.options).sync()
        given = info.get("reset") or {k: info[k] for k in ("seed",) if k in info}
        return self._first(_seen(self._client.reset(**given)))

    def step(self, message: Message) -> tuple[Sequence[Message], bool, float]:
        """Take the action of a turn. One that is none is answered with why."""
        role = "tool" if message.get("tool_calls") and not self._field else "user"
        if (action := self._read(message)) is None:
            return [{"role": role, "content": "error: call the tool act, once"}], False, 0.0
        try:
            found = self._client.step(action)
        except RuntimeError as error:  # how the package reports what the server refuses
            if INVALID not in str(error):
                raise
            return [{"role": role, "content": f"error: {error}"}], False, 0.0
        self._steps += 1
        return [{"role": role, "content": _seen(found)}], bool(found.done), float(found.reward or 0.0)

    def _read(self, message: Message) -> dict[str, Any] | None:
        """Return the action of a turn; None if it names none."""
        if self._field:
            return {self._field: message["content"].strip()}
        calls: list[Any] = message.get("tool_calls") or []
        acts = len(calls) == 1 and calls[0]["name"] == "act" and not calls[0]["problem"]
        return calls[0]["arguments"] if acts else None

    def tools(self) -> dict[str, Any]:
        """Return the tool whose arguments are an action, where an action is not one text."""
        if self._field or not self._action:
            return {}
        return {"act": offered("act", self._action.get("description", ""), {**self._action})}

    def close(self) -> None:
        """End the session."""
        if self._client is not None:
            self._client.close()

    @property
    def _field(self) -> str:
        """Field of an action that is one text; "" for any other action."""
        fields = self._action.get("properties", {})
        (name, *others) = fields or [""]
        return "" if others or fields.get(name, {}).get("type") != "string" else name


def _seen(found: Any) -> str:
    """Return an observation as text: its only field, or its fields as JSON."""
    fields = {k: v for k, v in found.observation.items() if k not in ("done", "reward", "metadata")}
    only = next(iter(fields.values())) if len(fields) == 1 else None
    return only if isinstance(only, str) else json.dumps(fields, ensure_ascii=False)
