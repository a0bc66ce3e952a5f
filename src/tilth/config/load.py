"""Recipes from TOML, from ``key=value`` overrides and from dictionaries, and back. Imports no torch.

Whatever is wrong with a recipe is one ``RecipeError`` of one line: the key, its value, what would be right and, where a
name was mistyped, the nearest one.
"""

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from tilth.config.checks import check
from tilth.config.elsewhere import LIBRARIES
from tilth.config.errors import RecipeError
from tilth.config.keys import Key, all_names, find, keys, sections
from tilth.config.plugins import absolute, load_plugins
from tilth.config.schema import ModelConfig, Recipe, Section

SHIPPED = Path(__file__).parent.parent / "recipes"


def names() -> list[str]:
    """Names of the recipes that ship with Tilth."""
    return sorted(p.stem for p in SHIPPED.glob("*.toml"))


def load_recipe(name_or_path: str, overrides: Sequence[str] = (), launched: int = 1) -> Recipe:
    """A shipped recipe by name, or any by the path of its TOML file, with dotted ``key=value`` overrides.

    launched: processes that torchrun or Slurm started, which are the workers where the recipe does not say how many.
    """
    path = recipe_path(name_or_path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read recipe {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {path} is not TOML: {error}") from None
    over = parse_overrides(overrides)
    merged = _merge(data, over)
    if begun := _of_model(merged).get("path"):
        _check_shape(_of_model(over), begun)
        if "path" not in _of_model(over) and not (path.parent / "run.json").is_file():
            _check_shape(_stated(data), begun)
    return _checked(_joined(merged, launched))


def _of_model(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section [model], if it is one."""
    model = data.get("model")
    return model if isinstance(model, Mapping) else {}


def _stated(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section [model], unless every key is in it, as in what a run keeps: nobody chose these."""
    model = _of_model(data)
    return {} if model.keys() >= ModelConfig.model_fields.keys() else model


def _check_shape(said: Mapping[str, Any], begun: str) -> None:
    """RecipeError for keys of a new model's shape that were said beside the path of a model."""
    names = [f"model.{name}" for name in said if name in ModelConfig.model_fields and name not in ModelConfig.LOADED]
    if names:
        them = "it" if len(names) == 1 else "them"
        raise RecipeError(f"{', '.join(names)} beside model.path = {begun}: that has its own shape; leave {them} out")


def _joined(data: dict[str, Any], launched: int) -> dict[str, Any]:
    """With the launched processes as workers, before layouts are checked against them; 1 counts as left out."""
    cluster = data.get("cluster")
    if launched == 1 or not isinstance(cluster, dict) or cluster.get("backend") != "local":
        return data
    said = cluster.get("pools") or cluster.get("workers", 1) != 1
    return data if said else {**data, "cluster": {**cluster, "workers": launched}}


def recipe_path(name_or_path: str) -> Path:
    """Where a recipe lies. A text with a slash or ending in ``.toml`` is a path, anything else a shipped name."""
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        if not Path(name_or_path).is_file():
            raise RecipeError(f"no recipe file {name_or_path!r}; shipped recipes: {', '.join(names())}")
        return Path(name_or_path)
    if name_or_path not in names():
        raise RecipeError(f"no recipe {name_or_path!r}; {_nearest(name_or_path, names())}")
    return SHIPPED / f"{name_or_path}.toml"


def recipe_name(name_or_path: str) -> str:
    """What to call runs of this recipe: the file's stem, or its folder for the ``recipe.toml`` of a run."""
    path = Path(name_or_path)
    return path.resolve().parent.name if path.name == "recipe.toml" else path.name.removesuffix(".toml")


def from_dict(data: Mapping[str, Any], *, complete: bool = True) -> Recipe:
    """A checked recipe from nested dictionaries, as a TOML file gives them; lists may stand for tuples.

    complete: False for one that is only looked at: what a run would need beside it may be missing.
    """
    if begun := _of_model(data).get("path"):
        _check_shape(_stated(data), begun)
    return _checked(data, complete=complete)


def _checked(data: Mapping[str, Any], *, complete: bool = True) -> Recipe:
    """Import the plugins first, since they add to what other keys may name; then check every key."""
    frozen = {name: _frozen(value) for name, value in data.items()}
    plugins = frozen.get("plugins", ())
    if isinstance(plugins, tuple):
        plugins = tuple(str(name) if isinstance(name, Path) else name for name in plugins)
    if isinstance(plugins, tuple) and all(isinstance(name, str) for name in plugins):
        frozen["plugins"] = absolute(plugins)
        load_plugins(frozen["plugins"])
    try:
        recipe = Recipe.model_validate(frozen)
    except ValidationError as error:
        raise RecipeError(_explain(error)) from None
    if complete:
        check(recipe)
    return recipe


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """``["run.name=x", "seed=3"]`` -> nested dictionary. Values are TOML; text needs no quotes.

    A table that is the value of a key (``data.columns={...}``) replaces what the recipe has there; sections and dotted
    names (``data.columns.prompt=x``) are merged into it.
    """
    result: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals or not name:
            raise RecipeError(f"override {override!r} is not of the form key=value, as in rollout.group=16")
        *path, last = name.split(".")
        table = result
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise RecipeError(f"override {override!r} needs a section, but {part} has a value already")
        table.update(_merge(table, {last: _given(name, _value(name, text.strip()))}))
    return result


class _Whole(dict[str, Any]):
    """A table that was given as the value of a key: it replaces, where dotted names are merged."""


def _given(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: _given(f"{name}.{k}", v) for k, v in value.items()} if name in sections() else _Whole(value)


def dump_toml(recipe: Recipe) -> str:
    """All keys of a recipe as TOML; loading it gives an equal recipe."""
    data = recipe.dump()
    tables = sections()
    lines = [f"{name} = {dump_value(value)}" for name, value in data.items() if name not in tables]
    for section in tables:
        lines += ["", f"[{section}]"] + [f"{name} = {dump_value(value)}" for name, value in data[section].items()]
    return "\n".join(lines) + "\n"


_SAVING = (
    "save_every",
    "save_minutes",
    "save_background",
    "save_failures",
    "grace",
    "checkpoints",
    "keep",
    "keep_every",
)
_WATCHING = ("collect_every", "prometheus", "profile", "profile_ranks")
_SAME_WORK = {"run": ("dir", "name", "track", *_WATCHING, *_SAVING), "cluster": ("timeout", "address")}


def digest(recipe: Recipe) -> str:
    """16 hex digits that differ where two recipes ask for different work; where it is kept does not count.

    Nor does how often and where it is saved, how long a call may take and which Ray cluster it runs on. The division
    over workers does: the last bits of a sum depend on it.
    """
    return hashlib.blake2b(json.dumps(_work(recipe), sort_keys=True).encode(), digest_size=8).hexdigest()


def differences(before: Recipe, now: Recipe) -> dict[str, str]:
    """Key -> "KEY was OLD and is NEW" for every key in which two recipes ask for different work."""
    old, new = _flat(_work(before)), _flat(_work(now))
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return {name: f"{name} was {json.dumps(old.get(name))} and is {json.dumps(new.get(name))}" for name in changed}


def check_allowed(names: Iterable[str]) -> None:
    """RecipeError for what names neither a key nor a section nor a part of a layout's or table's name."""
    known = {".".join(path[: i + 1]) for path in (name.split(".") for name in all_names()) for i in range(len(path))}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(sections())}"
            raise RecipeError(f"--allow {name or repr(name)}: no such key or section; {hint}")


def _work(recipe: Recipe) -> dict[str, Any]:
    """What decides the numbers of a run."""
    data = recipe.dump()
    for section, names in _SAME_WORK.items():
        for name in names:
            del data[section][name]
    del data["plugins"]  # where they lie does not matter; what is in them does, see flows.launch
    if not data["roles"]:  # a run from before there were any is the same work
        del data["roles"]
    if not data["data"]["options"]:  # nor any of these
        del data["data"]["options"]
    data["cluster"]["pools"] = list(data["cluster"]["pools"].items())  # the first one is where roles are by default
    return data


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        mergeable = isinstance(value, dict) and not isinstance(value, _Whole)
        merged[name] = _merge(below, value) if mergeable and isinstance(below, dict) else value
    return merged


def _frozen(value: Any) -> Any:
    """Lists as tuples, since values of a recipe are immutable."""
    if isinstance(value, Mapping):
        return {name: _frozen(v) for name, v in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _value(name: str, text: str) -> Any:
    """An override's value: TOML, or else plain text; for a key that holds text, always text (run.name=7 is "7")."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    key = find(name)
    if key is None or (isinstance(value, str) and key.field.annotation is str):
        return value
    if key.field.annotation is str:
        return text
    if key.field.annotation is bool and text in ("True", "False"):
        return text == "True"
    return value


_BARE = re.compile("[A-Za-z0-9_-]+")  # a TOML key that needs no quotes
_ESCAPED = re.compile("[\x7f\u2028\u2029]")  # json.dumps leaves them as they are, TOML forbids the first


def dump_value(value: Any) -> str:
    """One value of a recipe as TOML."""
    if isinstance(value, str):
        return _ESCAPED.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(value, ensure_ascii=False))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(dump_value, value)) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{k if _BARE.fullmatch(str(k)) else dump_value(str(k))} = {dump_value(v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Section):
        return dump_value(value.model_dump())
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _explain(error: ValidationError) -> str:
    problems = _problems(error)
    place, first = next(iter(problems.items()))
    name = ".".join(map(str, place[: 1 + (place[0] in sections())]))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        return _unknown(".".join(map(str, place)), first["input"]) + more
    if name in sections():
        return f"{name} = {first['input']!r} is not a section; its keys are written {name}.KEY" + more
    key = keys()[name]
    if len(place) > 2 and isinstance(place[2], str):
        return _explain_entry(key, ".".join(map(str, place[1:])) if name == "roles" else place[2], first) + more
    return _explain_value(key, first) + more


def _explain_value(key: Key, problem: Any) -> str:
    """What is wrong with one value, and what the key takes."""
    value = problem["input"]
    guess = difflib.get_close_matches(str(value), key.values.removeprefix("one of ").split(", "), 1)
    meant = f"; did you mean {guess[0]!r}?" if problem["type"] == "literal_error" and guess else ""
    return f"{key.name} = {_shown(value)} is not {key.values}{meant}"


def _problems(error: ValidationError) -> dict[tuple[Any, ...], Any]:
    """Place -> problem, one each. A place is section, key and, in a table or a list, which entry.

    Of a key that may be text or a table only what is wrong inside the table, if one is given.
    """
    found: dict[tuple[Any, ...], Any] = {}
    for problem in error.errors(include_url=False):
        place = tuple(part for part in problem["loc"] if part != "[key]")
        key = keys().get(".".join(map(str, place[:2])))
        if key is not None and get_origin(key.field.annotation) is UnionType:
            place = place[:2] + place[3:]  # without the kind that was tried
        found.setdefault(place, problem)
    inside = {place[:2] for place in found if len(place) > 2}
    return {place: problem for place, problem in found.items() if place not in inside}


def _explain_entry(key: Key, name: str, problem: Any) -> str:
    """What is wrong with one entry of a table."""
    inner = find(f"{key.name}.{name}")
    if inner is not None:
        return _explain_value(inner, problem)
    if problem["type"] == "literal_error":
        return f"{key.name} has no key {name}; there are {', '.join(get_args(get_args(key.field.annotation)[0]))}"
    value = _shown(problem["input"])
    if key.name == "cluster.pools":
        return f"{key.name}.{name} = {value} is not a number of workers, an integer above 0"
    if problem["type"] == "string_type":
        return f"{key.name}.{name} = {value} is not text"
    return f"{key.name}: the weight of {name} is {value}, which is not a finite number"


def _shown(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


def _whole(name: str, value: Any) -> str:
    """The dotted name that was said, down to the first value in what stands at an unknown one."""
    while isinstance(value, Mapping) and value:
        inner, value = next(iter(value.items()))
        name = f"{name}.{inner}"
    return name


def _unknown(name: str, value: Any) -> str:
    """What is said of a key, or of what should be a section, that there is not; value: what stands there."""
    section, _, leaf = name.rpartition(".")
    known = all_names()
    if leaf in sections() and not section:
        return f"{name} is a section, not a key"
    near = [k for k in known if k.rpartition(".")[2] == leaf]
    near = [k for k in near if section and k.startswith(f"{section}.")] or near
    meant = f"did you mean {' or '.join(near)}?" if near else ""
    whole = _whole(name, value)
    if theirs := _translated(_above(whole), fnmatchcase):
        return f"unknown key {whole}; {theirs}" + (f"; or {meant}" if meant and not section else "")
    if meant := meant or _translated([f".{name}", f".{leaf}"], lambda end, theirs: f".{theirs}".endswith(end)):
        return f"unknown key {name}; {meant}"
    inside = [k for k in known if k.rpartition(".")[0] == section]
    if not section:
        inside = inside + list(sections())
    return f"unknown key {name}; {_nearest(name, inside, known)}"


def _above(name: str) -> list[str]:
    """A dotted name and what it lies in, down to a section of ours: algorithm.kl_ctrl of algorithm.kl_ctrl.type."""
    parts = name.split(".")
    above = [".".join(parts[:size]) for size in range(len(parts) - 1, 0, -1)]
    return [name, *(place for place in above if place not in sections())]


def _translated(names: Sequence[str], same: Callable[[str, str], bool]) -> str:
    """What a key of TRL or verl is called here, of the first of these names that is one; empty if none is."""
    for name, (library, table) in product(names, LIBRARIES.items()):
        theirs = next((theirs for theirs in table if same(name, theirs)), "")
        if theirs:
            here = f"is {table[theirs]} here" if table[theirs] else "has no counterpart here"
            return f"{library}'s {theirs} {here} (docs/from-trl-and-verl.md)"
    return ""


def _nearest(name: str, *choices: Iterable[str]) -> str:
    """ "did you mean ..." out of the first choices that hold anything near, else all of the first."""
    for some in choices:
        near = difflib.get_close_matches(name, list(some), 1, 0.6)
        if near:
            return f"did you mean {near[0]}?"
    return "there is " + ", ".join(choices[0])
