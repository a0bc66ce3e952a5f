"""Tests and the program that they judge, in two processes of one sandbox, so that the program cannot reach the tests.

``judge`` runs in a sandbox; its source is the text of this file. The program's process gets requests (call this, read
that) and answers with plain values in JSON or with handles of its objects. It never sees the tests, and what it writes
never reaches standard output. Imports nothing but the standard library.
"""

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import operator
import os
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from types import ModuleType
from typing import Any, NoReturn, TextIO

SET_DUMPABLE = 4
PLAIN = (type(None), bool, str)
MANY: Mapping[str, type] = {kind.__name__: kind for kind in (list, tuple, set, frozenset, deque)}
TABLES: Mapping[str, type] = {kind.__name__: kind for kind in (dict, Counter, OrderedDict, defaultdict)}
TEXTS: Mapping[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "int": (hex, lambda text: int(text, 16)),  # Python refuses long ones in decimal
    "bytes": (bytes.hex, bytes.fromhex),
    **{kind.__name__: (repr, kind) for kind in (float, complex)},
    **{kind.__name__: (str, kind) for kind in (Decimal, Fraction)},
}
KINDS = frozenset({*MANY.values(), *TABLES.values(), int, bytes, float, complex, Decimal, Fraction})
ORDER = ("lt", "le", "gt", "ge")
COMPUTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", *ORDER)
EXACT: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    *((kind, kind) for kind in (dict, *MANY.values())),
    *((str, str.__str__), (int, int.__int__), (float, float.__float__)),
)
"""Types of plain values -> the plain value of an object of a class derived from one, as a Counter is a dict."""


def contents(value: Any) -> Any:
    """Return the plain value that an object is in all but its class; the object itself if it is none."""
    return next((exact(value) for kind, exact in EXACT if isinstance(value, kind)), value)


ASKS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*COMPUTED, "getitem", "contains", "eq", "setitem")},
    **{f.__name__: f for f in (len, str, repr, iter, next, hash, getattr, setattr, contents)},
    "call": lambda function, arguments, named: function(*arguments, **named),
}


class ProgramError(Exception):
    """The program raised an exception of its own, or has ended."""


def packed(value: Any, handle: Callable[[Any], int]) -> Any:
    """Return a value for JSON. handle: returns the number of an object that is no plain value."""
    kind, name = type(value), type(value).__name__
    if kind in PLAIN or (kind is int and value.bit_length() < 64):
        return value
    if kind not in KINDS:
        return {"kind": "handle", "number": handle(value)}
    if name in TEXTS:
        return {"kind": name, "text": TEXTS[name][0](value)}
    if name in MANY:
        return {"kind": name, "items": [packed(item, handle) for item in value]}
    return {"kind": name, "items": [[packed(k, handle), packed(v, handle)] for k, v in value.items()]}


def unpacked(value: Any, object_of: Callable[[int], Any]) -> Any:
    """Return the value that ``packed`` was given, a ``defaultdict`` without its factory."""
    if not isinstance(value, dict):
        return value
    kind = value["kind"]
    if kind in MANY:
        return MANY[kind](unpacked(item, object_of) for item in value["items"])
    if kind in TABLES:
        items = {unpacked(k, object_of): unpacked(v, object_of) for k, v in value["items"]}
        return defaultdict(None, items) if kind == "defaultdict" else TABLES[kind](items)
    if kind == "handle":
        return object_of(value["number"])
    return TEXTS[kind][1](value["text"])


# ---- the program's process ----


def serve(requests: TextIO, answers: TextIO) -> NoReturn:
    """Execute the program in the first line, then answer requests until their end."""
    objects: list[Any] = []

    def handle(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def answer(found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(compile(json.loads(requests.readline()), "program.py", "exec"), main.__dict__)
        answer({name: packed(value, handle) for name, value in vars(main).items() if not name.startswith("__")})
        for line in requests:
            try:
                name, arguments = json.loads(line)
                answer({"value": packed(ASKS[name](*(unpacked(a, objects.__getitem__) for a in arguments)), handle)})
            except Exception as error:  # noqa: BLE001 - whatever the program raises, the tests hear of
                answer({"raised": type(error).__name__, "text": str(error)})
    finally:
        os._exit(1)


# ---- the tests' process ----


class ProgramObject:
    """An object of the program, as tests see it. It equals a plain value only by its contents, which the program gives
    without seeing that value; its own ``__eq__`` is not asked.

    shown: it was computed from a plain value of the tests, which may be the right answer.
    """

    def __init__(self, number: int, ask: Callable[..., Any], shown: bool = False) -> None:
        self.__dict__.update(_number=number, _ask=ask, _shown=shown)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._ask("call", self, arguments, named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._ask("setitem", self, key, value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ProgramObject):
            return bool(self._ask("eq", self, other))
        found = self._ask("contents", self)
        return not isinstance(found, ProgramObject) and bool(found == other)

    def __contains__(self, item: Any) -> bool:
        return bool(self._ask("contains", self, item))

    def __iter__(self) -> Any:
        return self._ask("iter", self)

    def __next__(self) -> Any:
        return self._ask("next", self)

    def __len__(self) -> int:
        return int(self._ask("len", self))

    def __bool__(self) -> bool:
        return True

    def __hash__(self) -> int:
        return int(self._ask("hash", self))

    def __str__(self) -> str:
        return str(self._ask("str", self))

    def __repr__(self) -> str:
        return str(self._ask("repr", self))


def computed(name: str) -> Callable[..., Any]:
    """Return an operator of handles. With a plain value, or with what was computed from one, it gives handles alone and
    no order: ``f(2) - 1.414`` would show the program what is right, and it could answer 0 or "less"."""

    def apply(self: ProgramObject, *other: Any) -> Any:
        shown = any(not isinstance(one, ProgramObject) or one._shown for one in (self, *other))
        found = self._ask(name, self, *other)
        if not shown:
            return found
        if name in ORDER or not isinstance(found, ProgramObject):
            raise TypeError(f"{name} of an object of the program and a plain value says nothing about the object")
        return ProgramObject(found._number, found._ask, shown=True)

    return apply


for _name in COMPUTED:
    setattr(ProgramObject, f"__{_name}__", computed(_name))


def own_name(name: str) -> bool:
    """Return True for a name that a program may bring into its tests. A builtin stays what it is: with an ``abs`` or a
    ``__builtins__`` of the program every difference could be 0."""
    return name.isidentifier() and not name.startswith("__") and not hasattr(builtins, name)


def modules_of(tests: ast.AST) -> dict[str, ModuleType]:
    """Return the standard modules whose attributes tests read by name. The tests choose what is imported, never the
    program, which could answer for a module that tests forget to import."""
    read = [(n.value.id, n.attr) for n in ast.walk(tests) if isinstance(n, ast.Attribute) and type(n.value) is ast.Name]
    known = {}
    for name, attribute in read:
        for module in (name, f"{name}.{attribute}") if name in sys.stdlib_module_names else ():
            if not hasattr(sys.modules.get(name), attribute):
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
            if hasattr(sys.modules.get(name), attribute):
                known[name] = sys.modules[name]
    return known


def judge() -> None:
    """Read {"program", "tests"} from standard input; run the tests, whose exceptions are this process's."""
    (requests, to_program), (from_program, answers) = os.pipe(), os.pipe()
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        for fd in (nothing, to_program, from_program):
            os.close(fd)
        serve(os.fdopen(requests), os.fdopen(answers, "w"))
    os.close(requests)
    os.close(answers)
    ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)  # no other process of this user may read or write its memory
    asked, heard = os.fdopen(to_program, "w"), os.fdopen(from_program)
    given = json.load(sys.stdin)

    def told(line: Any) -> dict[str, Any]:
        asked.write(json.dumps(line) + "\n")
        asked.flush()
        if not (answer := heard.readline()):
            raise ProgramError("the program has ended")
        return json.loads(answer)

    def not_plain(value: Any) -> int:
        if isinstance(value, ProgramObject):
            return int(value.__dict__["_number"])
        raise TypeError(f"tests give a program plain values or its own objects, not a {type(value).__name__}")

    def ask(name: str, *arguments: Any) -> Any:
        found = told([name, [packed(argument, not_plain) for argument in arguments]])
        if "value" in found:
            return unpacked(found["value"], lambda number: ProgramObject(number, ask))
        kind = getattr(builtins, found["raised"], None)
        ends = kind is StopIteration and name != "next"  # it would end a ``map`` of the tests, as if all were well
        if ends or not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = ProgramError
        raise kind(found["text"])

    begun = told(given["program"])
    names = {n: unpacked(v, lambda number: ProgramObject(number, ask)) for n, v in begun.items() if own_name(n)}
    sys.path[:] = [path for path in sys.path if path != os.getcwd()]  # where a program may have written modules
    tests = ast.parse(given["tests"])
    given_names = names | modules_of(tests) | {"__name__": "tests", "__builtins__": builtins}
    exec(compile(tests, "tests.py", "exec"), given_names)
