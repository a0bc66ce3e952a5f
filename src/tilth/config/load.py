"""Recipes from TOML, from ``key=value`` overrides and from dictionaries, and back. Imports no torch.

Every mistake in a recipe raises one ``RecipeError`` of one line: the key, its value, what would be right and, for a
mistyped name, the nearest one.
"""

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import reduce
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError

from tilth.config.checks import check
from tilth.config.errors import PluginError, RecipeError, nearest
from tilth.config.flows import FLOWS
from tilth.config.keys import Key, all_names, declared_as, entries_of, find, keys, listed, sections, table_entry
from tilth.config.plugins import absolute, load_plugins
from tilth.config.schema import ModelConfig, Recipe, RolloutConfig, Section

SHIPPED = Path(__file__).parent.parent / "recipes"
LIBRARIES = tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text(encoding="utf-8"))
"""TRL and verl -> their key (a pattern) -> keys of Tilth, "" if there is none: docs/from-trl-and-verl.md as data."""


def names() -> list[str]:
    """Return the names of the recipes that ship with Tilth."""
    return sorted(p.stem for p in SHIPPED.glob("*.toml"))


def load_recipe(name_or_path: str, overrides: Sequence[str] = (), launched: int = 1) -> Recipe:
    """Load a shipped recipe by name, or any by the path of its TOML file, with dotted ``key=value`` overrides.

    launched: processes that torchrun or Slurm started: the number of workers if the recipe sets none.
    """
    path = recipe_path(name_or_path)
    data, over = _read(path), parse_overrides(overrides)
    try:
        return _checked(path, data, over, launched)
    except (RecipeError, PluginError) as error:
        if path.parent == SHIPPED or _sets(over, error.key):
            raise
        raise type(error)(f"{path}: {error}", key=error.key) from None


def given(name_or_path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a recipe and overrides set, unchecked, without importing its plugins."""
    return _merge(_read(recipe_path(name_or_path)), parse_overrides(overrides))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"cannot read recipe {path}: {error}", key=path.name) from None
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {path} is not TOML: {error}", key=f"{path.name}.syntax") from None


def _checked(path: Path, data: Mapping[str, Any], over: Mapping[str, Any], launched: int) -> Recipe:
    """Return the recipe of a file's data with overrides."""
    merged = _merge(data, over)
    if model_path := _model(merged).get("path"):
        _check_no_shape(_model(over), model_path)
        if "path" not in _model(over) and not (path.parent / "run.json").is_file():
            _check_no_shape(_chosen_model_keys(data), model_path)
    shipped = path.parent == SHIPPED
    recipe = _validate(_add_launched_workers(merged, launched), over if shipped else merged)
    if shipped and "holdout" not in _section(over, "data"):
        recipe.data.model_fields_set.discard("holdout")
    return recipe


def _sets(over: Mapping[str, Any], key: str) -> bool:
    """True if overrides set this key, or a table with it."""
    value: Any = over
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return True
        if part not in value:
            return False
        value = value[part]
    return True


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section, or {} if its value is no table."""
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


def _model(data: Mapping[str, Any]) -> Mapping[str, Any]:
    return _section(data, "model")


def _fitted(data: dict[str, Any], chosen: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the data with lengths and a tokenizer that fit the model, and a line on each that this has changed.
    chosen: what a person has set, which is never changed."""
    told: list[str] = []
    path = _model(data).get("path")
    context = _model(data).get("context", ModelConfig.model_fields["context"].default)
    positions = _positions(path) if isinstance(path, str) and "context" not in _model(chosen) else 0
    if positions and isinstance(context, int) and context > positions:
        told.append(f"model.context = {positions}, not {context}: {path} has {positions} positions")
        context, data = positions, _merge(data, {"model": {"context": positions}})
    most = _section(data, "rollout").get("max_tokens", RolloutConfig.model_fields["max_tokens"].default)
    lengths = isinstance(context, int) and isinstance(most, int) and 1 < context <= most
    if lengths and "max_tokens" not in _section(chosen, "rollout") and data.get("flow") in (None, *_sampling()):
        told.append(f"rollout.max_tokens = {context // 2}, not {most}: half of model.context = {context}")
        data = _merge(data, {"rollout": {"max_tokens": context // 2}})
    named = _section(data, "data").get("tokenizer", "")
    if path and isinstance(named, str) and named.startswith("bpe:") and "tokenizer" not in _section(chosen, "data"):
        told.append(f'data.tokenizer = "", not {named}: {path} has its own')
        data = _merge(data, {"data": {"tokenizer": ""}})
    return data, told


def _sampling() -> list[str]:
    return [name for name, flow in FLOWS.items() if flow.learns != "documents"]


def _positions(path: str) -> int:
    """Return the positions of a model's directory or of a run; 0 if unknown here, so that loading it finds out."""
    for folder in (Path(path), Path(path.rpartition("@")[0] or path) / "model"):
        try:
            found = json.loads((folder / "config.json").read_text("utf-8"))
            positions = found.get("text_config", found).get("max_position_embeddings", 0)
        except (OSError, ValueError, AttributeError):
            continue
        if isinstance(positions, int) and positions > 0:
            return positions
    return 0


def _chosen_model_keys(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return [model], or {} if it has every key: the recipe of a run does, and nobody chose these."""
    model = _model(data)
    return {} if model.keys() >= ModelConfig.model_fields.keys() else model


def _check_no_shape(chosen: Mapping[str, Any], path: str) -> None:
    """Raise RecipeError if keys of a new model's shape are set beside the path of a model."""
    names = [f"model.{n}" for n in chosen if n in ModelConfig.model_fields and n not in ModelConfig.LOADED]
    if names:
        them = "it" if len(names) == 1 else "them"
        message = f"{', '.join(names)} beside model.path = {path}: that has its own shape; leave {them} out"
        raise RecipeError(message, key="model.path")


def _add_launched_workers(data: dict[str, Any], launched: int) -> dict[str, Any]:
    """Set ``cluster.workers`` to the launched processes, unless the recipe sets more than 1 worker or pools."""
    cluster = data.get("cluster")
    if launched == 1 or not isinstance(cluster, dict) or cluster.get("backend") != "local":
        return data
    chosen = cluster.get("pools") or cluster.get("workers", 1) != 1
    return data if chosen else {**data, "cluster": {**cluster, "workers": launched}}


def recipe_path(name_or_path: str) -> Path:
    """Return the file of a recipe. A text with a slash or ending in ``.toml`` is a path, else a shipped name."""
    if "/" in name_or_path or name_or_path.endswith(".toml"):
        if not Path(name_or_path).is_file():
            message = f"no recipe file {name_or_path!r}; shipped recipes: {', '.join(names())}"
            raise RecipeError(message, key="recipe.path")
        return Path(name_or_path)
    if begun := [name for name in names() if name.startswith(f"{name_or_path}-")]:
        raise RecipeError(f"no recipe {name_or_path!r}; did you mean {' or '.join(begun)}?", key="recipe")
    if name_or_path not in names():
        raise RecipeError(f"no recipe {name_or_path!r}; {nearest(name_or_path, names())}", key="recipe")
    return SHIPPED / f"{name_or_path}.toml"


def recipe_name(name_or_path: str) -> str:
    """Return the name for runs of a recipe: the file's stem, or the folder of a run's ``recipe.toml``."""
    path = Path(name_or_path)
    return path.resolve().parent.name if path.name == "recipe.toml" else path.name.removesuffix(".toml")


def from_dict(data: Mapping[str, Any], *, complete: bool = True) -> Recipe:
    """Return a checked recipe from nested dictionaries, as TOML gives them; lists may stand for tuples.

    complete: False skips the checks of keys against each other, for a recipe that is only displayed.
    """
    if model_path := _model(data).get("path"):
        _check_no_shape(_chosen_model_keys(data), model_path)
    return _validate(data, data, complete=complete)


def _validate(given: Mapping[str, Any], chosen: Mapping[str, Any], *, complete: bool = True) -> Recipe:
    """Import the plugins, which add values that other keys may name; then check every key."""
    data, told = _fitted(dict(given), chosen)
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
        raise _explain(error) from None
    recipe = recipe.telling(*told)
    if complete:
        check(recipe)
    return recipe


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse overrides such as ``["run.name=x", "seed=3"]`` into nested dictionaries.

    Values are TOML; text needs no quotes. A table given as the value of a key (``data.columns={...}``) replaces that of
    the recipe; sections and dotted names (``data.columns.prompt=x``) are merged into it.
    """
    result: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        name = name.strip()
        if not equals or not name:
            message = f"override {override!r} is not of the form key=value, as in rollout.group=16"
            raise RecipeError(message, key="override")
        *path, last = name.split(".")
        table = result
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise RecipeError(f"override {override!r} needs a section, but {part} has a value already", key=name)
        table.update(_merge(table, {last: _mark_tables(name, _parse_value(name, text.strip()))}))
    return result


class _Replacing(dict[str, Any]):
    """A table given as the value of a key, which replaces the earlier value instead of merging into it."""


def _mark_tables(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: _mark_tables(f"{name}.{k}", v) for k, v in value.items()} if name in sections() else _Replacing(value)


def dump_toml(recipe: Recipe) -> str:
    """Return all keys of a recipe as TOML; loading it gives an equal recipe."""
    data = recipe.dump()
    tables = sections()
    lines = [f"{name} = {dump_value(value)}" for name, value in data.items() if name not in tables]
    for section in tables:
        lines += ["", f"[{section}]"] + [f"{name} = {dump_value(value)}" for name, value in data[section].items()]
    return "\n".join(lines) + "\n"


_SAVING = ("save_every", "save_minutes", "save_background", "save_failures", "grace", "checkpoints", "keep")
_OBSERVING = ("track", "collect_every", "prometheus", "profile", "profile_ranks")
_SAME_WORK = {
    "run": ("dir", "name", "sweep", "keep_every", *_OBSERVING, *_SAVING),
    "cluster": ("timeout", "address", "search"),
    "rollout": ("python",),
}
"""Section -> keys that change no number of a run."""
_UNUSED: Mapping[str, Callable[[Recipe], bool]] = {
    "plugins": lambda r: True,  # launch.life compares their content; their paths do not matter
    "guard": lambda r: r.guard.batch != "scale",  # workers of a run may then change, and its batch does not
    "roles": lambda r: not r.roles,
    "reference.teachers": lambda r: not r.reference.teachers,
    "reference.field": lambda r: not r.reference.field,
    "data.options": lambda r: not r.data.options,
    "data.mixture": lambda r: not r.data.mixture,
    "data.deduplicate": lambda r: not r.data.deduplicate,
    "data.packing": lambda r: r.data.packing == "fit",
    "rollout.options": lambda r: not r.rollout.options,
    "rollout.engine": lambda r: r.rollout.engine == "native",
    "optimizer.plateau_steps": lambda r: r.optimizer.schedule != "plateau",
    "optimizer.ramp_steps": lambda r: r.guard.batch != "scale",
    "optimizer.muon_momentum": lambda r: r.optimizer.name != "muon" or r.optimizer.muon_momentum == 0.95,
    "optimizer.muon_precision": lambda r: r.optimizer.name != "muon",
    "policy.comm.local": lambda r: r.policy.comm.local == "none",
    "policy.comm.every": lambda r: r.policy.comm.local == "none",
}
"""Key or section -> True for a recipe whose numbers it does not decide; older runs do not have some of them."""


def digest(recipe: Recipe) -> str:
    """Return 16 hex digits that differ if two recipes ask for different work.

    Keys about folders, saving, logging, time limits and the Ray cluster's address do not count. The division over
    workers does: the last bits of a sum depend on it.
    """
    return hashlib.blake2b(json.dumps(_work(recipe), sort_keys=True).encode(), digest_size=8).hexdigest()


def differences(before: Recipe, now: Recipe) -> dict[str, str]:
    """Return key -> "KEY was OLD and is NEW" for every key in which two recipes ask for different work."""
    values = all_differences(before, now)
    return {name: values.get(name, said) for name, said in _differences(_work(before), _work(now)).items()}


def newer_keys(stored: str, now: Recipe) -> dict[str, Any]:
    """Return key -> value for keys that decide the numbers of a run, and that the version which wrote ``stored``, the
    ``dump_toml`` of a recipe, did not have."""
    there, names = tomllib.loads(stored), all_names()
    return {name: value for name, value in flattened(_work(now)).items() if name in names and not _has(there, name)}


def _has(table: Any, name: str) -> bool:
    first, _, rest = name.partition(".")
    return isinstance(table, dict) and first in table and (not rest or _has(table[first], rest))


def all_differences(before: Recipe, now: Recipe) -> dict[str, str]:
    """Return key -> "KEY was OLD and is NEW" for every key that differs, also if it changes no number of a run."""
    return _differences(before.dump(), now.dump())


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    old, new = flattened(before), flattened(now)
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return {name: f"{name} was {json.dumps(old.get(name))} and is {json.dumps(new.get(name))}" for name in changed}


def check_flows(names: Iterable[str], keys: Mapping[str, Any]) -> None:
    """Raise RecipeError for a flow that nobody declares, or a wrong key; keys: as of ``from_dict``."""
    from_dict(keys, complete=False)
    for name in names:
        if name not in FLOWS:
            raise RecipeError(f"no algorithm {name!r}; {nearest(name, FLOWS)}", key="flows")


def check_allowed(names: Iterable[str]) -> None:
    """Raise RecipeError for a name that is neither a key nor a section nor a prefix of one (``policy.layout``)."""
    known = {".".join(path[: i + 1]) for path in (name.split(".") for name in all_names()) for i in range(len(path))}
    for name in names:
        if name not in known and find(name) is None:
            near = difflib.get_close_matches(name, known, 1, 0.6)
            hint = f"did you mean {near[0]}?" if near else f"sections are {', '.join(sections())}"
            raise RecipeError(f"--allow {name or repr(name)}: no such key or section; {hint}", key="--allow")


def _work(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that decide the numbers of a run."""
    data = recipe.dump()
    for section, names in _SAME_WORK.items():
        for name in names:
            del data[section][name]
    data["guard"] = {"batch": data["guard"]["batch"]}
    for key, unused in _UNUSED.items():
        if unused(recipe):
            *sections, name = key.split(".")
            del reduce(lambda table, part: table[part], sections, data)[name]
    data["cluster"]["pools"] = list(data["cluster"]["pools"].items())  # in order: the first pool is the default
    return data


def flattened(value: Any, place: str = "") -> dict[str, Any]:
    """Flatten JSON to dotted keys; lists and empty objects are values."""
    if not isinstance(value, Mapping) or not value:
        return {place: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flattened(item, f"{place}.{key}" if place else str(key))
    return found


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        mergeable = isinstance(value, dict) and not isinstance(value, _Replacing)
        merged[name] = _merge(below, value) if mergeable and isinstance(below, dict) else value
    return merged


def _frozen(value: Any) -> Any:
    """Turn lists into tuples, since values of a recipe are immutable."""
    if isinstance(value, Mapping):
        return {name: _frozen(v) for name, v in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _parse_value(name: str, text: str) -> Any:
    """Parse an override's value as TOML, else as plain text; for a text key always as text (run.name=7 is "7")."""
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
    """Return one value of a recipe as TOML."""
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


def _explain(error: ValidationError) -> RecipeError:
    """Return one error for the first problem that pydantic found; its key is the dotted place."""
    problems = _problems(error)
    place, problem = next(iter(problems.items()))
    dotted, value = ".".join(map(str, place)), problem["input"]
    name = ".".join(map(str, place[: 1 + (place[0] in sections())]))
    if len(place) > 3 and (kind := listed(keys().get(name))):
        entry = [one for one in place[4:5] if isinstance(one, str)]  # of a table
        dotted = ".".join(map(str, [*place[:4], *entry]))
        message = _explain_listed(dotted, entries_of(kind, f"{name}.{place[2]}."), problem)
    elif problem["type"] == "extra_forbidden":
        message = _explain_unknown(dotted, value)
    elif name in sections():
        message = f"{name} = {value!r} is not a section; its keys are written {name}.KEY"
    elif len(place) > 2 and isinstance(place[2], str):
        message = _explain_entry(keys()[name], dotted, problem)
    else:
        message = _explain_value(keys()[name], problem)
    return RecipeError(message + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""), key=dotted)


def _explain_value(key: Key, problem: Any) -> str:
    value = problem["input"]
    guess = difflib.get_close_matches(str(value), key.values.removeprefix("one of ").split(", "), 1)
    hint = f"; did you mean {guess[0]!r}?" if problem["type"] == "literal_error" and guess else ""
    if not hint and (kind := declared_as(key)):
        hint = f"; a plugin declares another with @tilth.{kind}"
    return f"{key.name} = {list(value) if isinstance(value, tuple) else value!r} is not {key.values}{hint}"


def _explain_entry(key: Key, name: str, problem: Any) -> str:
    """Explain the problem of one entry of a table."""
    entry = name.removeprefix(f"{key.name}.")
    if problem["loc"][-1] == "[key]" and problem["type"] == "string_pattern_mismatch":
        return f"{key.name} has the key {entry!r}, which is no number from 0 on"
    if problem["type"] == "literal_error" and find(name) is None:
        return f"{key.name} has no key {entry}; there are {', '.join(get_args(get_args(key.field.annotation)[0]))}"
    return _explain_value(find(name) or table_entry(key, name), problem)


def _explain_listed(name: str, own: Sequence[Key], problem: Any) -> str:
    """Explain the problem of a key in one of a list of tables."""
    known = {key.name: key for key in own}
    if (table := name.rpartition(".")[0]) in known:
        return _explain_entry(known[table], name, problem)
    return _explain_value(known[name], problem) if name in known else f"unknown key {name}; {nearest(name, known)}"


def _problems(error: ValidationError) -> dict[tuple[Any, ...], Any]:
    """Return place -> problem. A place is section, key and, in a table or a list, the entry. For a key that takes text
    or a table, problems inside a given table replace those of the key itself."""
    found: dict[tuple[Any, ...], Any] = {}
    for problem in error.errors(include_url=False):
        place = tuple(part for part in problem["loc"] if part != "[key]")
        key = keys().get(".".join(map(str, place[:2])))
        if key is not None and get_origin(key.field.annotation) in (Union, UnionType):
            place = place[:2] + place[3:]  # without the member of the union
        if "options" in place[1:3]:  # the value of an option is wrong as a whole, by each member of its union
            place = place[: place.index("options") + 2]
        found.setdefault(place, problem)
    inside = {place[:2] for place in found if len(place) > 2}
    return {place: problem for place, problem in found.items() if place not in inside}


def _explain_unknown(name: str, value: Any) -> str:
    """Explain an unknown key or section. value: what the recipe sets it to."""
    section, _, leaf = name.rpartition(".")
    known = all_names()
    if leaf in sections() and not section:
        return f"{name} is a section, not a key"
    near = [k for k in known if k.rpartition(".")[2] == leaf]
    near = [k for k in near if section and k.startswith(f"{section}.")] or near
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    whole = _first_leaf(name, value)
    if translated := _translate([whole, *_parents(whole)], fnmatchcase):
        return f"unknown key {whole}; {translated}" + (f"; or {hint}" if hint and not section else "")
    if hint := hint or _translate([f".{name}", f".{leaf}"], lambda end, theirs: f".{theirs}".endswith(end)):
        return f"unknown key {name}; {hint}"
    inside = [k for k in known if k.rpartition(".")[0] == section]
    return f"unknown key {name}; {nearest(name, inside if section else [*inside, *sections()], known)}"


def _first_leaf(name: str, value: Any) -> str:
    """Extend a dotted name down to the first value inside nested tables."""
    while isinstance(value, Mapping) and value:
        inner, value = next(iter(value.items()))
        name = f"{name}.{inner}"
    return name


def _parents(name: str) -> list[str]:
    """Return the dotted prefixes of a name that are no section of Tilth, longest first."""
    parts = name.split(".")
    prefixes = [".".join(parts[:size]) for size in range(len(parts) - 1, 0, -1)]
    return [prefix for prefix in prefixes if prefix not in sections()]


def _translate(names: Sequence[str], same: Callable[[str, str], bool]) -> str:
    """Return what Tilth calls the first of these names that is a key of TRL or verl; "" if none is."""
    for name, (library, table) in product(names, LIBRARIES.items()):
        theirs = next((theirs for theirs in table if same(name, theirs)), "")
        if theirs:
            here = f"is {table[theirs]} here" if table[theirs] else "has no counterpart here"
            return f"{library}'s {theirs} {here} (docs/from-trl-and-verl.md)"
    return ""
