"""Registry of algorithms: each entry is a small immutable class that declares what it needs, its options and scope.

An option is a pydantic field (type, range, default, description), so a wrong one is named before the run starts.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from tilth.config import plugins
from tilth.config.open_sets import ALGORITHMS
from tilth.core.errors import ArgumentError, PluginError, RecipeError

Kind = Literal["advantages", "losses", "aggregations", "kl", "preferences", "corrections"]
Scope = Literal["rows", "token-local", "global moments", "group-local", "group tokens"]
"""What one call must see: rows of the whole batch without tokens (controller); any part of the tokens; any part, plus a
sum over all workers; whole groups; or any part, plus tokens of other workers in groups that lie on several."""


class Entry(BaseModel):
    """Base of every algorithm. Its fields are its options."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    entry_name: ClassVar[str] = ""
    """Name in the registry."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that the entry needs, with these options."""
        return ()

    @property
    def takes(self) -> tuple[str, ...]:
        """Columns that the entry uses if they exist."""
        return ()

    @property
    def scope(self) -> Scope:
        """Scope of the entry, with these options."""
        return "token-local"


E = TypeVar("E", bound=Entry)
_ENTRIES: dict[Kind, dict[str, type[Entry]]] = {kind: ALGORITHMS.setdefault(kind, {}) for kind in get_args(Kind)}


def register(kind: Kind, name: str) -> Callable[[type[E]], type[E]]:
    """Register a class under ``name`` (decorator). Raises ArgumentError if the name is taken."""

    def add(entry: type[E]) -> type[E]:
        if name in _ENTRIES[kind]:
            raise ArgumentError(f"{kind}: {name!r} is registered already", key="name")
        entry.entry_name = name
        _ENTRIES[kind][name] = entry
        return entry

    return add


DECLARED_AS: dict[Kind, plugins.Kind] = {"advantages": "advantage", "losses": "policy_loss"}
_BUILT: dict[tuple[Kind, str], tuple[plugins.Declaration, type[Entry]]] = {}
"""Entries made of plugins' declarations; a new declaration of a name makes a new entry."""


def registered(kind: Kind) -> dict[str, type[Entry]]:
    """Return name -> class in order of registration, plugins' entries last. Raises PluginError."""
    found = dict(_ENTRIES[kind])
    for name, declaration in plugins.declared(DECLARED_AS[kind]).items() if kind in DECLARED_AS else ():
        if name in found:
            raise PluginError(
                f"{declaration.title} has the name of a built-in entry; choose another name",
                key=f"{declaration.name}.name",
            )
        built = _BUILT.get((kind, name))
        if built is None or built[0] is not declaration:
            built = _BUILT[kind, name] = declaration, _entry_of(kind, declaration)
            built[1].entry_name = name
        found[name] = built[1]
    return found


def _entry_of(kind: Kind, declaration: plugins.Declaration) -> type[Entry]:
    from tilth.rl import functions  # which needs the classes that need this registry

    make = functions.advantage_entry if kind == "advantages" else functions.loss_entry
    return make(declaration)


def lookup(kind: Kind, name: str) -> type[Entry]:
    """Return the class of this name; RecipeError with the nearest name."""
    table = registered(kind)
    if name not in table:
        raise RecipeError(f"{kind}: no {name!r}{nearest(name, table)}", key=kind)
    return table[name]


def build(kind: Kind, name: str | E, options: Mapping[str, Any], known: type[E]) -> E:
    """Return the entry with its options checked; RecipeError names a wrong option, its value and what would be right.

    name: or a built entry, which takes no options.
    """
    if isinstance(name, Entry):
        if options:
            raise RecipeError(
                f"{name.entry_name} is a built entry and takes no option {min(options)!r}; build it with that option",
                key=f"{name.entry_name}.{min(options)}",
            )
        return name
    entry = lookup(kind, name)
    for option in options:
        if option not in entry.model_fields:
            raise RecipeError(
                f"{name}: no option {option!r}{nearest(option, entry.model_fields)}", key=f"{name}.{option}"
            )
    try:
        built = entry(**options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "options"
        raise RecipeError(f"{name}: {where} = {first['input']!r}: {first['msg']}", key=f"{name}.{where}") from None
    if not isinstance(built, known):
        raise RecipeError(
            f"{kind}: {name!r} is registered as {entry.__name__}, which is not a {known.__name__}", key=f"{kind}.{name}"
        )
    return built


def require(entry: Entry, columns: Iterable[str]) -> None:
    """Raise RecipeError unless every needed column exists; for a part of the reward, list the known parts."""
    columns = set(columns)
    missing = [c for c in entry.needs if c not in columns]
    if missing:
        part = missing[0].partition("part/")[2]
        parts = sorted(c.removeprefix("part/") for c in columns if part and c.startswith("part/"))
        hint = nearest(part, parts) if parts else ""
        raise RecipeError(f"{entry.entry_name} needs the column {missing[0]!r}, which is missing{hint}", key=missing[0])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the nearest known name, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 1, 0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(known)}" if known else "; it has none"
