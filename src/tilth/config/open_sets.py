"""Keys whose values are the names of an open set, to which plugins add."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

TRACKERS = {"tensorboard": "TensorBoard", "wandb": "WeightsAndBiases"}
"""Name of each tracker that comes with Tilth -> its class in ``tilth.ui.track``."""


@dataclass(frozen=True)
class OneOf:
    """Annotation of a text key: its value is one of the names that there are when a recipe is read."""

    names: Callable[[], Iterable[str]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value not in (known := list(self.names())):
            raise PydanticCustomError("literal_error", "not one of {names}", {"names": ", ".join(known)})
        return value
