"""Pickled plain values (numbers, texts, lists, tables) decoded without unpickling: no class, no call, no import."""

import pickletools
from typing import Any

from tilth.core.errors import DataError

MOST = 1 << 23
"""Operations of a pickle. Each may make a container of 64 bytes; 20,000 recorded collectives take about 2,000,000."""
_VALUES = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT"})
_VALUES |= {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARKED = frozenset({"LIST", "TUPLE", "DICT", "APPENDS", "SETITEMS"})
_PUT, _GET = frozenset({"PUT", "BINPUT", "LONG_BINPUT"}), frozenset({"GET", "BINGET", "LONG_BINGET"})


class _Machine:
    """Stack machine for the operations of a pickle that make plain values; ValueError for any other one."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _PUT:
            self.memo[argument] = self._top()
        elif name in _GET:
            if argument not in self.memo:
                raise ValueError(f"refers to value {argument}, which is not there")
            self.stack.append(self.memo[argument])
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self._top()
        elif name in _MARKED:
            self._collect(name, self._since_mark())
        elif name in ("APPEND", "SETITEM"):
            self._collect(f"{name}S", self._take(1 if name == "APPEND" else 2))
        elif name in _TUPLES:
            self._collect("TUPLE", self._take(_TUPLES[name]))
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise ValueError(f"has the operation {name}, which plain values do not need")

    def _collect(self, name: str, items: list[Any]) -> None:
        """Make a container of these items, or add them to the one on top."""
        if name in ("LIST", "TUPLE"):
            self.stack.append(items if name == "LIST" else tuple(items))
            return
        if name == "DICT":
            self.stack.append({})
        target = self._top()
        if not isinstance(target, list if name == "APPENDS" else dict):
            raise ValueError(f"adds to a {type(target).__name__}")
        if isinstance(target, list):
            target.extend(items)
        elif len(items) % 2 or not all(_is_key(key) for key in items[::2]):
            raise ValueError("has a table whose keys are neither texts nor integers of 64 bits")
        else:
            target.update(zip(items[::2], items[1::2]))

    def _top(self) -> Any:
        return self._take(1, keep=True)[0]

    def _take(self, n: int, keep: bool = False) -> list[Any]:
        base = self.marks[-1] if self.marks else 0
        if len(self.stack) - base < n:
            raise ValueError("takes a value that is not there")
        taken = self.stack[-n:]
        if not keep:
            del self.stack[-n:]
        return taken

    def _since_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("takes values that are not there")
        start = self.marks.pop()
        taken = self.stack[start:]
        del self.stack[start:]
        return taken


def _is_key(value: Any) -> bool:
    """Return True for a text or a small integer: larger ones can be chosen to have one hash, and then cost squares."""
    return isinstance(value, str) or (isinstance(value, int) and abs(value) < 1 << 64)


def decode(data: bytes, source: str) -> Any:
    """Return the plain value of a pickle; DataError if it is cut, or needs anything but plain values.

    source: name of the file or process in the error, and its key. Values may share parts, even contain themselves: a
    reader that follows them must count.
    """
    machine = _Machine()
    try:
        for number, (operation, argument, _) in enumerate(pickletools.genops(data)):
            if number >= MOST:
                raise ValueError(f"has more than {MOST} operations")
            machine.step(operation.name, argument)
        if len(machine.stack) != 1 or machine.marks:
            raise ValueError(f"ends with {len(machine.stack)} values instead of one")
    except (ValueError, OverflowError) as error:
        raise DataError(f"{source}: not a pickle of plain values: {error}", key=source) from None
    return machine.stack[0]
