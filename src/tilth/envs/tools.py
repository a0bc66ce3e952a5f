"""Tools: typed functions with a JSON schema, whose arguments are checked before the call."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import pydantic


class Tool:
    """A typed function under a name.

    ``__call__`` takes the arguments of a call and returns the text of the answer, whatever happens in it.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        self._checked = pydantic.validate_call(function)

    @property
    def schema(self) -> dict[str, Any]:
        """The function's description in the form that chat templates take: type, name, description, parameters."""
        signature: Any = self.function
        parameters = pydantic.TypeAdapter(signature).json_schema()
        about = (inspect.getdoc(self.function) or "").partition("\n\n")[0].replace("\n", " ")
        return {"type": "function", "function": {"name": self.name, "description": about, "parameters": parameters}}

    def __call__(self, arguments: Mapping[str, Any]) -> str:
        try:
            found = self._checked(**arguments)
            if inspect.isawaitable(found):
                found = asyncio.get_event_loop().run_until_complete(found)
            return as_text(found)
        except pydantic.ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            return f"error: arguments of {self.name}: {wrong}"
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is its answer
            return f"error: {type(error).__name__}: {error}"


def as_text(value: Any) -> str:
    """Return what a tool gave back as text: a text as it is, bytes decoded, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return json.dumps(value, ensure_ascii=False, default=str)
