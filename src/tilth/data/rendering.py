"""Chat templates with limits: whatever a template of somebody's model does, rendering it ends, in bounded memory.

Work is counted, not timed, so that a template is refused on every machine or on none. What could make much of little is
counted before it runs: loops, operators, filters, methods, new lists, output; what no chat template needs is missing.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set, Sized, ValuesView
from functools import wraps
from re import search
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

WORK = 1 << 20
"""Most work of one rendering: a unit is a value that is gone through, or 256 characters."""
CALL, FILTER = 16, 4
"""Work of a call and of a filter beside what they go through."""
DEEP = {"tojson", "string", "join", "format", "sort", "unique", "groupby", "min", "max", "sum", "dictsort"}
"""Filters that go through all in a value, not only through its elements."""
FILTERS = {
    *("batch", "center", "filesizeformat", "pprint", "random", "round", "slice", "striptags", "truncate", "urlize"),
    *("wordcount", "wordwrap", "xmlattr"),
}
"""Filters that are missing."""
METHODS = {
    *("center", "ljust", "rjust", "zfill", "expandtabs", "translate", "format", "format_map", "encode", "to_bytes"),
}
"""Methods that are missing."""


class OverrunError(TemplateRuntimeError):
    """A template does more than ``WORK``."""


def size(value: Any) -> int:
    """Return the work of going through the elements of a value."""
    if isinstance(value, str | bytes):
        return 1 + (len(value) >> 8)
    return 1 + len(value) if isinstance(value, list | tuple | Mapping | Set | ValuesView | range) else 1


def weight(value: Any) -> int:
    """Return the work of going through all in a value, at most a little more than ``WORK``."""
    if type(value) is str:
        return 1 + (len(value) >> 8)
    found, todo = 0, [value]
    while todo and found <= WORK:
        one = todo.pop()
        if isinstance(one, Mapping):
            todo += [*one, *one.values()]
        elif isinstance(one, list | tuple | Set | ValuesView):
            todo += one
        elif isinstance(one, int):
            found += one.bit_length() >> 8
        found += WORK if isinstance(one, Namespace) else size(one) if isinstance(one, str | bytes) else 1
    return found  # a namespace may be in itself


def added(left: Any, right: Any) -> int:
    """Return the work of a sum."""
    if type(left) is type(right) is str:
        return 1 + (len(left) + len(right) >> 8)
    return weight(left) + weight(right)


def product(left: Any, right: Any) -> int:
    """Return the work of a product."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * right.bit_length() >> 10
    number, other = (left, right) if isinstance(left, int) else (right, left)
    return abs(number) * weight(other) if isinstance(number, int) and not isinstance(other, float) else 1


def power(left: Any, right: Any) -> int:
    """Return the work of a power."""
    return (left.bit_length() * abs(right)) ** 2 >> 10 if isinstance(left, int) and isinstance(right, int) else 1


def filled(text: Any, values: Any) -> int:
    """Return the work of ``text % values``, or of a remainder."""
    if not isinstance(text, str):
        return 1
    if search(r"\*|\d{5}", text):  # the width of a number
        return WORK + 1
    return size(text) + text.count("%") * weight(values)


def replaced(text: str, old: Any, new: Any) -> int:
    """Return the work of putting a text in place of another."""
    return size(text) + (text.count(str(old)) * len(str(new)) >> 8)


def joined(separator: Any, items: Any) -> int:
    """Return the work of joining texts."""
    return weight(items) + size(items) * size(separator)


OPERATORS: Mapping[str, Callable[[Any, Any], int]] = {
    "+": added,
    "*": product,
    "**": power,
    "%": filled,
}
"""Operator -> its work."""


def called(function: Any, given: Sequence[Any]) -> int:
    """Return the work of a call."""
    own, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(own, str) and name == "replace" and len(given) > 1:
        return replaced(own, given[0], given[1])
    if isinstance(own, str) and name == "join" and given:
        return joined(own, given[0])
    if isinstance(own, Mapping) or isinstance(function, Macro):
        return CALL + sum(map(size, given))
    return CALL + weight(own) + sum(map(weight, given))


def filtered(name: str, given: Sequence[Any]) -> int:
    """Return the work of a filter or a test. given: its value, then its arguments."""
    total = FILTER + sum(map(weight if name in DEEP else size, given))
    if total > WORK or not given:
        return total
    if name == "replace" and len(given) > 2:
        return replaced(str(given[0]), given[1], given[2])
    if name == "format":
        return filled(str(given[0]), given[1:])
    if name == "join":
        return joined(given[1] if len(given) > 1 else "", given[0])
    if name == "indent":
        width = next((one if isinstance(one, int) else len(one) for one in given[1:] if isinstance(one, int | str)), 4)
        return total + (str(given[0]).count("\n") * abs(width) >> 8)
    numbers = [abs(one) for one in given[1:] if isinstance(one, int)] if name == "tojson" else []
    return total * max([1, *numbers])


class Counting(NodeTransformer):
    """Put a count around what a template does and its environment does not see: the elements of a loop, what is
    compared, put together or copied by a slice, and all in a new list, dictionary or tuple. One that has another one
    twice would double from line to line."""

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the node with counts inside, and around it."""
        self.generic_visit(node)
        if isinstance(node, nodes.For):
            node.iter = _counted(node.iter, "tilth_items")
        elif isinstance(node, nodes.Compare):
            node.expr = _counted(node.expr, "tilth_weight")
        elif isinstance(node, nodes.Concat):
            node.nodes = [_counted(one, "tilth_weight") for one in node.nodes]
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node.node = _counted(node.node, "tilth_size")
        elif isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return _counted(node, "tilth_weight")
        return node


def _counted(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Environment of a template whose renderings have ``WORK`` each; otherwise it is like another one."""

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self, like: ImmutableSandboxedEnvironment) -> None:
        super().__init__(
            trim_blocks=like.trim_blocks,
            lstrip_blocks=like.lstrip_blocks,
            extensions=[type(one) for one in like.extensions.values()],
            finalize=self._seen(weight),
        )
        self._budget = threading.local()
        self.globals = {name: one for name, one in like.globals.items() if name != "lipsum"}
        self.filters = {name: self._limited(name, one) for name, one in like.filters.items() if name not in FILTERS}
        self.filters |= {"tilth_items": self._items, "tilth_size": self._seen(size), "tilth_weight": self._seen(weight)}
        tests: Mapping[str, Any] = like.tests
        self.tests = {name: self._limited(name, one) for name, one in tests.items()}

    def compiled(self, source: str) -> Template:
        """Return a template of this environment."""
        self.begin()
        tree = Counting().visit(self.parse(source))
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def begin(self) -> None:
        """Begin a rendering in this thread."""
        self._budget.left = WORK

    def charge(self, work: int) -> None:
        """Note work before it begins. Raises OverrunError if it is too much."""
        self._budget.left -= work
        if self._budget.left < 0:
            raise OverrunError(f"it does more than the {WORK} units of work that one rendering has")

    def concat(self, pieces: Iterable[str]) -> str:  # type: ignore[override]
        """Put together the text of a template, a macro or a block."""
        pieces = list(pieces)
        self.charge(sum(map(len, pieces)) >> 8)
        return "".join(pieces)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return False for a method that makes much of little."""
        return attr not in METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Leave ``str.format`` to ``is_safe_attribute``."""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Count the work of an operator, and apply it."""
        self.charge(OPERATORS[operator](left, right))
        return self.binop_table[operator](left, right)

    def call(self, context: Context, obj: Any, /, *given: Any, **options: Any) -> Any:
        """Count the work of a call, and make it."""
        self.charge(called(obj, [*given, *options.values()]))
        return super().call(context, obj, *given, **options)

    def _seen(self, price: Callable[[Any], int]) -> Callable[[Any], Any]:
        def seen(value: Any) -> Any:
            self.charge(price(value))
            return value

        return seen

    def _items(self, value: Any) -> Any:
        """Count the elements of a loop, those of a generator one by one."""
        if isinstance(value, Sized):
            self.charge(len(value))
            return value
        return map(self._seen(lambda one: 1), value)

    def _limited(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter or a test that counts its work first."""
        begin = hasattr(made, "jinja_pass_arg")  # behind the context

        @wraps(made)
        def counted(*given: Any, **options: Any) -> Any:
            own = [*given[begin:], *options.values()]
            if name == "join" and own and not isinstance(own[0], str):  # elements of a generator are counted too
                own[0] = list(own[0])
                given = (*given[:begin], own[0], *given[begin + 1 :])
            self.charge(filtered(name, own))
            return made(*given, **options)

        return counted
