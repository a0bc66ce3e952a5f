"""Functions that travel to another process by value."""

import io
from collections import ChainMap
from collections.abc import Callable
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

_USUAL = cloudpickle.Pickler.dispatch_table


class _Pickler(cloudpickle.Pickler):
    """Keeps the names of files of code, which cloudpickle leaves out from 3.1.3 on: messages name them."""

    dispatch_table: ClassVar = ChainMap(
        {CodeType: lambda code: (_rebuilt, (*_USUAL[CodeType](code), code.co_filename))}, _USUAL
    )


def _rebuilt(make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


def dumps(value: Any) -> bytes:
    """Pickle a value, of what cannot be imported the code; ``pickle.loads`` reads it."""
    with io.BytesIO() as buffer:
        _Pickler(buffer).dump(value)
        return buffer.getvalue()
