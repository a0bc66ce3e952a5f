"""Table of all recipe keys, read from the schema: for error messages, overrides and documentation."""

from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from tilth.config.open_sets import OneOf
from tilth.config.parts import Fixed
from tilth.config.schema import BroughtRole, LayoutConfig, Option, Recipe, Section


class Key(NamedTuple):
    """One key: its dotted name, its field and a description of its values."""

    name: str
    field: FieldInfo
    values: str


def sections() -> dict[str, type[Section]]:
    """Return section name -> its class, in the order of the schema."""
    annotations: dict[str, Any] = {name: field.annotation for name, field in Recipe.model_fields.items()}
    return {name: annotation for name, annotation in annotations.items() if _is_section(annotation)}


def keys() -> dict[str, Key]:
    """Return dotted name -> key, in the order of the schema."""
    return {key.name: key for key in _walk(Recipe, "")}


def entries_of(kind: type[Section], prefix: str = "") -> list[Key]:
    """Return the entries of a table with keys of its own, their names behind a prefix such as ``policy.layout.``."""
    return list(_walk(kind, prefix))


def table_entry(table: Key, name: str) -> Key:
    """Return a key for one entry of a table of values of one kind, such as ``cluster.pools.train``."""
    annotation: Any = table.field.annotation
    kinds = [kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is dict]
    field = FieldInfo.from_annotation(get_args(kinds[0])[1])
    return Key(name, field, _values(field.annotation, field.metadata))


def entries(table: Key) -> list[Key]:
    """Return the entries of a layout or another table with keys of its own, such as ``policy.lora``; else none."""
    kind: Any = table.field.annotation
    return entries_of(kind, f"{table.name}.") if _is_section(kind) else []


def listed(table: Key | None) -> type[Section] | None:
    """Return the class of the tables in a list of tables, such as ``data.mixture``; None for any other key."""
    kinds: tuple[Any, ...] = get_args(table.field.annotation) if table is not None else ()
    return kinds[0] if kinds and _is_section(kinds[0]) else None


def _named(table: Key | None) -> type[Section] | None:
    """Return the class of the entries of a table of named tables, such as ``roles``; None for any other key."""
    kinds: tuple[Any, ...] = get_args(table.field.annotation) if table is not None else ()
    return kinds[1] if len(kinds) == 2 and _is_section(kinds[1]) else None


def find(name: str) -> Key | None:
    """Return the key of this name, or the entry of a table with keys of its own (``policy.layout.fsdp``,
    ``roles.NAME.pool``)."""
    known, parts = keys(), name.split(".")
    for size in range(1, len(parts) - 1):
        if kind := _named(known.get(".".join(parts[:size]))):
            known = {key.name: key for key in entries_of(kind, f"{'.'.join(parts[: size + 1])}.")}
            break
    table = known.get(name.rpartition(".")[0])
    if table is not None and (own := entries(table)):
        return {key.name: key for key in own}.get(name)
    return known.get(name)


def all_names() -> list[str]:
    """Return the names that an override can set: all keys, then the entries of tables with keys of their own."""
    return [*keys(), *(entry.name for key in keys().values() for entry in entries(key))]


def fixed() -> dict[str, str]:
    """Return the names of keys and sections that are marked ``Fixed``, each with its reason."""
    marked: dict[str, FieldInfo] = {}
    for name, field in Recipe.model_fields.items():
        kind: Any = field.annotation
        marked[name] = field
        marked |= {f"{name}.{key}": own for key, own in kind.model_fields.items()} if _is_section(kind) else {}
    return {name: mark.why for name, field in marked.items() for mark in field.metadata if isinstance(mark, Fixed)}


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        annotation: Any = field.annotation
        if _is_section(annotation) and section is Recipe:
            yield from _walk(annotation, f"{name}.")
        else:
            yield Key(prefix + name, field, _values(annotation, field.metadata))


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


_PLAIN = {bool: "true or false", str: "text", int: "an integer", float: "a number"}


def _values(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Describe the values of an annotation."""
    if _is_section(annotation) and annotation is not BroughtRole:
        what = "a layout, " if annotation is LayoutConfig else ""
        return f"{what}a table of {', '.join(annotation.model_fields)}"
    if known := _choices(annotation, metadata):
        return f"one of {', '.join(known)}"
    if annotation == Option:
        return "a finite number, text, true or false, a list of numbers or of texts, or a table of numbers"
    if annotation in _PLAIN:
        return _PLAIN[annotation] + _range(metadata)
    if get_origin(annotation) is dict:
        return "a table"
    if get_origin(annotation) is Annotated:
        base, field = get_args(annotation)
        return _values(base, field.metadata)
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(_values, get_args(annotation)))
    items = [a for a in get_args(annotation) if a is not Ellipsis]
    if items and _is_section(items[0]):
        return f"a list of tables of {', '.join(items[0].model_fields)}"
    if not items:
        return "a finite number, text, true or false, or a list of those"
    if known := _choices(items[0]):
        return f"a list of {', '.join(known)}, written '[\"{known[0]}\"]'"
    return """a list of texts, written '["a", "b"]'""" if items[0] is str else f"a list of {len(items)} numbers"


def declared_as(key: Key) -> str:
    """Return the kind of declaration by which a plugin adds a value of a key, or of an item of its list; "": none."""
    items: tuple[Any, ...] = get_args(key.field.annotation)
    marks = [*key.field.metadata, *(mark for item in items for mark in getattr(item, "__metadata__", ()))]
    return next((mark.kind for mark in marks if isinstance(mark, OneOf)), "")


def _choices(annotation: Any, metadata: Iterable[Any] = ()) -> list[str]:
    """Return the names of a choice; [] for an annotation that is no choice."""
    if get_origin(annotation) is Literal:
        return [str(name).lower() if isinstance(name, bool) else str(name) for name in get_args(annotation)]
    marks = (*metadata, *getattr(annotation, "__metadata__", ()))
    return [name for mark in marks if isinstance(mark, OneOf) for name in mark.names() if name]


def _range(metadata: Iterable[Any]) -> str:
    words = []
    for bound in metadata:
        match bound:
            case Gt(gt=low):
                words.append(f"above {low}")
            case Ge(ge=low):
                words.append(f"of at least {low}")
            case Lt(lt=high):
                words.append(f"below {high}")
            case Le(le=high):
                words.append(f"at most {high}")
    return (" " + " and ".join(words)) if words else ""
