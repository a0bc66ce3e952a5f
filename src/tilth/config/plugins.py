"""Plugins: the user's files and modules of the key ``plugins``, and what they declare. Imports no torch.

A decorator (``tilth.advantage``, ``tilth.reward``, ``tilth.flow``, ``tilth.role`` ...) only records what it decorates;
the package that uses it builds the object when its name is looked up. So a process that only scores rewards can import
a plugin without importing torch.

Every process that receives a recipe imports its plugins: the controller when it reads the recipe, a worker when it
unpickles it (``Recipe.__setstate__``), a reward process when the reward is named ``FILE.py:name``.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args

from tilth.config.code import describe, imported_by, is_missing, place
from tilth.config.errors import PluginError, TilthError
from tilth.config.flows import FLOWS, OPTIONAL, SHARED_OPTIONS, Flow, Learns
from tilth.config.open_sets import COMPRESSORS, OPTIMIZERS, CompressorSpec, OptimizerSpec
from tilth.config.roles import ROLES, SHIPPED_ROLES, MeshKind, Receives, RoleSpec

Kind = Literal[
    "advantage",
    "policy_loss",
    "reward",
    "flow",
    "family",
    "encoder",
    "task",
    "role",
    "engine",
    "environment",
    "backend",
    "callback",
    "tracker",
    "optimizer",
    "command",
    "transform",
    "compressor",
]
T = TypeVar("T")


@dataclass(frozen=True)
class Declaration:
    """One object that user code declares."""

    kind: Kind
    name: str
    value: Any
    file: str
    line: int
    plugin: str = ""
    """The plugin whose import declared it; "": a script, or a file that is no plugin."""

    @property
    def where(self) -> str:
        """File and line, for error messages."""
        return f"{Path(self.file).name}:{self.line}"

    @property
    def title(self) -> str:
        """Kind, name, file and line: the subject of an error message."""
        return f"{self.kind} {self.name!r} ({self.where})"

    @property
    def spec(self) -> str:
        """``FILE.py:name`` or ``module:name`` for another process to import; "" if none can (a notebook)."""
        module = getattr(self.value, "__module__", "__main__")
        if self.file.endswith(".py") and module == module_name(Path(self.file).resolve()):
            return f"{Path(self.file).resolve()}:{self.name}"
        return "" if module == "__main__" else f"{module}:{self.name}"

    @property
    def same_code(self) -> tuple[str, str]:
        """Module and qualified name. A declaration replaces an earlier one of the same code (a notebook cell)."""
        return getattr(self.value, "__module__", ""), getattr(self.value, "__qualname__", "")


ENGINES = {
    "native": "tilth.engines.engine:Engine",
    "vllm": "tilth.engines.vllm:VLLM",
    "sglang": "tilth.engines.sglang:SGLang",
}
"""Generation engines that come with Tilth: name -> module and class."""
SERVED = ("vllm", "sglang")
"""Those that run in a process of their own, with the interpreter ``rollout.python``."""
BACKENDS = {
    "inline": "tilth.cluster.backends.inline:InlineBackend",
    "local": "tilth.cluster.controller.launcher:local_backend",
    "ray": "tilth.cluster.backends.ray:RayBackend",
}
"""Backends that come with Tilth: name -> module and class, or function that returns one."""
_SHIPPED_FLOWS, _SHIPPED_OPTIMIZERS = frozenset(FLOWS), frozenset(OPTIMIZERS)
_SHIPPED_COMPRESSORS = frozenset(COMPRESSORS)
_DECLARED: dict[Kind, dict[str, Declaration]] = {kind: {} for kind in get_args(Kind)}
_TABLES: dict[Kind, dict[str, Any]] = {
    "flow": FLOWS, "role": ROLES, "optimizer": OPTIMIZERS, "compressor": COMPRESSORS,
}  # fmt: skip
"""Kinds that have a table of their own beside ``_DECLARED``."""
_SOURCES: dict[str, bytes] = {}
"""Module of a plugin file -> its text when it was imported."""
_LOADED: dict[str, dict[str, bytes]] = {}
"""Plugin -> the modules beside it that its import added, with their texts."""
_IMPORTING: list[str] = []  # plugins that are being imported, the innermost last
_PLACES: list[str] = []  # files of plugins, in the order of the import path


def declare(
    kind: Kind, name: str, shipped: Iterable[str] = (), add: Callable[[Any], None] = lambda value: None
) -> Callable[[T], T]:
    """Return a decorator that records a function or class under a name.

    shipped: names of this kind that come with Tilth; add: called with it. Raises PluginError if the name is taken.
    """
    if callable(name):
        own = getattr(name, "__name__", "my_name")
        raise PluginError(f"@tilth.{kind} needs a name, as in @tilth.{kind}({own!r})", key=f"@tilth.{kind}")
    if not isinstance(name, str) or not name.isidentifier():
        message = f"@tilth.{kind}({name!r}): a name is text such as 'my_{kind}', letters, digits and _"
        raise PluginError(message, key=f"@tilth.{kind}")
    if name in shipped:
        message = f"@tilth.{kind}({name!r}): Tilth comes with a {kind} of this name; choose another one"
        raise PluginError(message, key=f"{kind}.{name}.shipped")

    def record(value: T) -> T:
        if not callable(value):
            message = f"@tilth.{kind}({name!r}) declares {value!r}, which is no function or class"
            raise PluginError(message, key=f"{kind}.{name}")
        code = inspect.unwrap(value)  # type: ignore[arg-type]
        found = Declaration(kind, name, value, *place(code), _IMPORTING[-1] if _IMPORTING else "")
        rivals = ("reward", "task") if kind in ("reward", "task") else (kind,)  # a task is a reward too
        before = next((_DECLARED[k][name] for k in rivals if name in _DECLARED[k]), None)  # type: ignore[index]
        if before is not None and before.same_code != found.same_code:
            message = f"{kind} {name!r} of {found.where} is declared by {before.where} too; choose another name"
            raise PluginError(message, key=f"{kind}.{name}")
        add(value)
        _DECLARED[kind][name] = found
        return value

    return record


def advantage(name: str) -> Callable[[T], T]:
    """Declare an advantage estimator, chosen by ``algorithm.advantage=name``.

    A function over rows, ``(rewards, groups, *, scale: float = 1.0)``: float64 [n], int64 [n] -> float64 [n]; a
    function over tokens if it takes a column of tokens (``values``, ``logprobs``, ``lengths`` ...); or a subclass of
    ``tilth.rl.advantages.Advantage``. Argument names select the columns passed, keyword arguments are options
    (``algorithm.options.scale=0.5``). See ``tilth.rl.functions``. Raises PluginError if the name is taken.
    """
    return declare("advantage", name)


def policy_loss(name: str) -> Callable[[T], T]:
    """Declare a policy loss, chosen by ``algorithm.loss=name``.

    A function ``(logprobs, old_logprobs, advantages, *, clip: float = 0.2)`` of float tensors [tokens] -> loss of each
    token [tokens], or (loss, {metric: [tokens]}); or a subclass of ``tilth.rl.losses.PolicyLoss``. Argument names
    select the columns passed, keyword arguments are options. Raises PluginError if the name is taken.
    """
    return declare("policy_loss", name)


def reward(name: str) -> Callable[[T], T]:
    """Declare a reward ``(prompt, completion, info) -> number or dict``, chosen by ``reward.function=name``."""
    return declare("reward", name)


def callback(name: str) -> Callable[[T], T]:
    """Declare a subclass of ``tilth.Callback``, created without arguments for each run that names this plugin."""
    return declare("callback", name)


def tracker(name: str) -> Callable[[T], T]:
    """Declare a subclass of ``tilth.Tracker``, chosen by ``run.track=["name"]``."""
    return declare("tracker", name)


def optimizer(name: str, *, state: Sequence[str] = ()) -> Callable[[T], T]:
    """Declare an optimizer, chosen by ``optimizer.name=name``: (parameters, section) -> torch.optim.Optimizer.

    section: [optimizer] of the recipe; ``param_groups`` get the learning rate of each step. state: names of the state
    tensors of each parameter, 0 at first, which memory plans and checkpoints use; a number ``step`` needs no name. If
    the model is sharded, the parameters are this rank's shards. Further arguments by these names get: ``named``, the
    parameters by name; ``table``, the rules of parameters (``tilth.plan.rules``); ``squares``, a collective function
    that returns the squared norms of whole tensors (``ShardedModel.squares``). A
    ``tilth.training.optim.MatrixOptimizer`` needs whole matrices: its class is called with (parameters by name, sharded
    model or None, section). Raises PluginError if the name is taken.
    """

    def add(make: Any) -> None:
        OPTIMIZERS[name] = OptimizerSpec(tuple(state), getattr(make, "needs", "elements"), make)

    record = declare("optimizer", name, _SHIPPED_OPTIMIZERS, add)
    _check_names(f"optimizer.{name}.state", state)
    return record


def compressor(name: str, *, state: Sequence[str] = ("residual",)) -> Callable[[T], T]:
    """Declare a compressor of gradients, chosen by ``policy.comm.gradients=name``: a subclass of
    ``tilth.parallel.compress.Compressor``, whose keyword-only arguments are options (``policy.comm.options``).

    state: what each rank keeps for it, in checkpoints too: a residual for error feedback, or nothing. Raises
    PluginError if the name is taken, or for another state.
    """

    def add(make: Any) -> None:
        COMPRESSORS[name] = CompressorSpec(make, tuple(state))

    record = declare("compressor", name, {*_SHIPPED_COMPRESSORS, "exact"}, add)
    _check_names(f"compressor.{name}.state", state)
    if unknown := set(state) - {"residual"}:
        message = f"@tilth.compressor({name!r}): state={tuple(state)} has {min(unknown)!r}; there is a residual alone"
        raise PluginError(message, key=f"compressor.{name}.state")
    return record


def transform(name: str) -> Callable[[T], T]:
    """Declare a function of a record, chosen by ``transform`` or ``filter`` of a source of ``data.mixture``.

    ``(record)`` or ``(record, random)`` -> record, or a bool as a filter; ``random``: ``numpy.random.Generator``, a
    pure function of seed, source and place of the record. It is given as the second place if that has no default or
    None, is named random, rng or generator, or is ``*args``; any other keeps its default. Raises PluginError if the
    name is taken.
    """
    return declare("transform", name)


def command(name: str) -> Callable[[T], T]:
    """Declare a function as a command, ``tilth --plugins FILE.py name``; typer derives its arguments and options."""
    return declare("command", name)


def flow(
    name: str,
    *,
    title: str = "",
    learns: Learns = "experience",
    critic: bool = False,
    reference: bool = False,
    roles: Iterable[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> Callable[[T], T]:
    """Declare a training loop ``(run: tilth.flows.run.Run) -> None``, chosen by ``flow=name``.

    title: its name in terminal and report. learns: from its own scored samples ("experience"), or from given "answers",
    "documents" or "pairs". critic, reference: it needs such a model. roles: those of plugins that it calls
    (``tilth.role``). defaults: values for keys that the recipe does not set, by section or by full names:
    ``{"algorithm": {"advantage": "gae"}}``, ``{"algorithm.advantage": "gae"}``. Raises PluginError if the name is
    taken, if the function takes other arguments, or if a default is of no key.
    """

    def add(loop: Any) -> None:
        if inspect.isfunction(loop):
            taken = inspect.signature(loop)
            try:
                taken.bind("run")
            except TypeError:
                message = f"@tilth.flow({name!r}): {loop.__name__} must take one argument, run, not {taken}"
                raise PluginError(message, key=f"flow.{name}.arguments") from None
        FLOWS[name] = made

    record = declare("flow", name, _SHIPPED_FLOWS, add)
    _check_names(f"flow.{name}.roles", roles)
    if learns not in get_args(Learns):
        known = ", ".join(map(repr, get_args(Learns)))
        raise PluginError(f"@tilth.flow({name!r}): learns={learns!r} is not one of {known}", key=f"flow.{name}.learns")
    calls, own = frozenset(roles), _nested(name, defaults or {})
    made = Flow(title or name, learns, critic, reference, reads=OPTIONAL, own=own, roles=calls, own_loop=True)
    return record


def _check_names(key: str, names: Iterable[str]) -> None:
    """Raise PluginError for one text in place of a list: its letters would be the names."""
    if isinstance(names, str):
        word = key.rpartition(".")[2]
        raise PluginError(f"{key}: {word}={names!r} is one text; give a list, {word}=[{names!r}]", key=key)


def _nested(flow: str, defaults: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return section -> key -> default. PluginError for what is no key of a recipe."""
    from tilth.config.keys import all_names  # imports this module

    found: dict[str, dict[str, Any]] = {}
    for name, value in defaults.items():
        section, dot, key = str(name).partition(".")
        given: Any = {key: value} if dot else value
        keys = [f"{section}.{k}" for k in given] if isinstance(given, Mapping) else [section]
        for wrong in keys if section != "roles" else ():
            if "." not in wrong or wrong not in all_names():
                right = 'give sections, as in {"algorithm": {"advantage": "gae"}}, or full names of keys'
                message = f"@tilth.flow({flow!r}): defaults has {wrong}, which is no key of a section; {right}"
                raise PluginError(message, key=f"flow.{flow}.defaults")
        found.setdefault(section, {}).update(given)
    return found


def family(name: str) -> Callable[[T], T]:
    """Declare a model family, ``() -> tilth.models.family.Family``, chosen by ``model.family=name``.

    A model directory whose config.json names its architecture is of this family. Raises PluginError if the name is
    taken.
    """
    return declare("family", name, shipped_families())


def encoder(name: str) -> Callable[[T], T]:
    """Declare an encoder of media, ``() -> tilth.models.family.Encoder``, for families that name it. Raises
    PluginError if the name is taken."""
    return declare("encoder", name)


def family_names() -> list[str]:
    """Return the names of all model families: those that come with Tilth, then those of plugins."""
    return [*shipped_families(), *_DECLARED["family"]]


def shipped_families() -> list[str]:
    """Return the names of the families that come with Tilth, one file of ``tilth/models/families`` each."""
    return _modules_in("models/families")


@cache
def _modules_in(folder: str) -> list[str]:
    return [file.name for file in pkgutil.iter_modules([str(Path(__file__).parents[1] / folder)])]


def task(name: str) -> Callable[[T], T]:
    """Declare a task, ``() -> tilth.config.tasks.Task``.

    ``data.source=name`` chooses its prompts and reward, ``reward.function=name`` its reward alone. Raises PluginError
    if the name is taken.
    """
    return declare("task", name, shipped_tasks())


def task_names() -> list[str]:
    """Return the names of all tasks: those that come with Tilth, then those of plugins."""
    return [*shipped_tasks(), *_DECLARED["task"]]


def shipped_tasks() -> list[str]:
    """Return the names of the tasks that come with Tilth, one file of ``tilth/tasks`` each."""
    return _modules_in("tasks")


def role(
    name: str,
    *,
    mesh: MeshKind = "one",
    memory: Callable[..., Any] | None = None,
    trains: bool = False,
    loads: bool = False,
    receives: Receives = "",
    values: bool = False,
) -> Callable[[T], T]:
    """Declare a role: a class of workers that flows with ``roles=[name]`` reach as ``run.roles[name]``.

    Each worker calls the class as ``Class(context, ...)`` with the further arguments that it names (``recipe``,
    ``config``, ``tokenizer``, ``prompts``); keyword-only arguments are options (``roles.NAME.options.KEY``).
    ``roles.NAME.pool`` and, unless mesh is "one", ``.layout`` place it. loads: it loads the model in
    ``roles.NAME.path``. The other arguments are fields of ``RoleSpec``. Raises PluginError if the name is taken, or if
    a mesh of several workers has no memory function.
    """
    from tilth.config.schema import Recipe  # imports this module

    def add(worker: Any) -> None:
        ROLES[name] = RoleSpec(
            name,
            worker,
            lambda recipe: name in recipe.flow_spec.roles,
            mesh,
            memory,
            trains=trains,
            loads=(f"roles.{name}.path",) if loads else (),
            receives=receives,
            values=values,
        )

    return declare("role", name, {*SHIPPED_ROLES, *Recipe.model_fields}, add)


def engine(name: str) -> Callable[[T], T]:
    """Declare a generation engine, chosen by ``rollout.engine=name``: a subclass of
    ``tilth.engines.protocol.GenerationEngine``. Raises PluginError if the name is taken."""
    return declare("engine", name, ENGINES)


def backend(name: str) -> Callable[[T], T]:
    """Declare a backend, chosen by ``cluster.backend=name``: a class with the methods of
    ``tilth.cluster.backends.base.Backend``, called as ``Class(workers, timeout=, address=, gpus=)``. Raises PluginError
    if the name is taken."""
    return declare("backend", name, BACKENDS)


def shared_defaults(advantage: str, loss: str) -> dict[str, Any]:
    """Return the defaults of a declared estimator and loss for keys of [algorithm]."""
    found: dict[str, Any] = {}
    for kind, name in (("advantage", advantage), ("policy_loss", loss)):
        declaration = declared(kind).get(name)  # type: ignore[arg-type]
        if declaration is not None and not inspect.isclass(declaration.value):
            options = inspect.signature(declaration.value).parameters.values()
            found |= {o.name: o.default for o in options if o.name in SHARED_OPTIONS and o.kind is o.KEYWORD_ONLY}
    return found


def declared(kind: Kind) -> dict[str, Declaration]:
    """Return name -> declaration of a kind, of all user code in this process."""
    return dict(_DECLARED[kind])


def declared_by(kind: Kind, plugins: Iterable[str]) -> list[Declaration]:
    """Return the declarations of these plugins and of this process's script, not those of an earlier recipe."""
    wanted = set(plugins)
    modules = {module_name(Path(name)) if name.endswith(".py") else name for name in wanted} | {"__main__"}
    found = [(declaration, getattr(declaration.value, "__module__", "")) for declaration in declared(kind).values()]
    return [d for d, own in found if d.plugin in wanted or any(own == m or own.startswith(f"{m}.") for m in modules)]


def load_plugins(plugins: Iterable[str]) -> list[ModuleType]:
    """Import each plugin once: a path ending in ``.py``, or the name of a module. Raises PluginError of one line."""
    return [_load(name) for name in plugins]


def _load(name: str) -> ModuleType:
    before = set(sys.modules)
    _IMPORTING.append(name)
    try:
        module = import_file(Path(name)) if name.endswith(".py") else _import_module(name)
    finally:
        _IMPORTING.pop()
    if name not in _LOADED:
        added = {new: file for new in sys.modules.keys() - before if (file := _beside(name, new)) is not None}
        _LOADED[name] = {new: file.read_bytes() for new, file in added.items()}
    return module


def _beside(plugin: str, module: str) -> Path | None:
    """Return the file of a module in the folder of a plugin, or in its package; None: it is elsewhere."""
    file = Path(getattr(sys.modules[module], "__file__", None) or "")
    same = module.partition(".")[0] == plugin.partition(".")[0]
    if plugin.endswith(".py"):
        same = Path(plugin).expanduser().resolve().parent in file.resolve().parents
    return file if same and file.is_file() else None


def forget(keep: Iterable[str]) -> None:
    """Undo the imports of plugins, with all that they declare, unless only these are loaded and no file has changed."""
    if set(_LOADED) <= set(keep) and not any(_changed(*item) for known in _LOADED.values() for item in known.items()):
        return
    for kind, known in _DECLARED.items():
        for name in [name for name, found in known.items() if found.plugin]:
            del known[name]
            if kind in _TABLES:
                _TABLES[kind].pop(name, None)
    for modules in _LOADED.values():
        for module in modules:
            sys.modules.pop(module, None)
            _SOURCES.pop(module, None)
    sys.path[:] = [entry for entry in sys.path if entry not in _PLACES]
    _LOADED.clear()
    _PLACES.clear()


def _changed(module: str, text: bytes) -> bool:
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    return not file.is_file() or file.read_bytes() != text


def absolute(plugins: Sequence[str]) -> tuple[str, ...]:
    """Make paths of plugins absolute: workers and later readers of the run have other working directories."""
    return tuple(str(Path(name).expanduser().resolve()) if name.endswith(".py") else name for name in plugins)


def existing(path: Path) -> Path:
    """Return the absolute path of a file. PluginError, with the nearest name, if there is none."""
    path = path.expanduser().resolve()
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, 1, 0.5)
        raise PluginError(f"no file {path}{f'; did you mean {near[0]!r}?' if near else ''}", key=path.name)
    return path


def import_file(path: Path) -> ModuleType:
    """Import a file by its path, once, and append it to the import path, for the modules beside it (``_Neighbours``).

    Raises PluginError if there is no such file (with the nearest name) or if importing it fails (with the line).
    """
    path = existing(path)
    name, source = module_name(path), path.read_bytes()
    if name in sys.modules:
        if _SOURCES.get(name) != source:  # workers would import the new text
            raise PluginError(
                f"{path} has changed since this process imported it; restart it", key=f"{path.name}.changed"
            )
        return sys.modules[name]
    _check_neighbours(path)
    if str(path) not in sys.path:
        sys.path.append(str(path))
        sys.path_importer_cache.pop(str(path), None)
        _PLACES.append(str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is not a Python file", key=f"{path.name}.type")
    module = importlib.util.module_from_spec(spec)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)  # an edit within a second looks unchanged
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    _SOURCES[name] = source
    try:
        spec.loader.exec_module(module)
    except PluginError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PluginError(f"importing {path} failed: {_described(error, path)}", key=f"{path.name}.import") from error
    return module


class _Neighbours:
    """Finder of modules in the folder of a plugin, whose file stands in ``sys.path``, here and in child processes.
    Finds what plugins import, no other names: the folder may have a package that a library only tries to import."""

    def __init__(self, plugin: str) -> None:
        """ImportError: this is no plugin's place."""
        self._folder = Path(plugin).parent
        if plugin not in sys.path or not plugin.endswith(".py") or not Path(plugin).is_file():
            raise ImportError  # also for a script that runpy is asked to run

    def find_spec(self, name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, [str(self._folder)])
        plugins = [Path(place) for place in sys.path if place.endswith(".py")]
        return spec if spec is not None and name in _imported(plugins) else None


sys.path_hooks.append(_Neighbours)
for _entry in sys.path:  # those of a parent process, for which Python had no finder yet
    if sys.path_importer_cache.get(_entry, _entry) is None:
        del sys.path_importer_cache[_entry]


def _check_neighbours(path: Path) -> None:
    """Raise PluginError if Python would import another plugin's module in place of one beside this file."""
    earlier = [Path(place).parent for place in _PLACES]
    for name in _imported([path]):
        own = _module_file(path.parent, name)
        for folder in earlier[: earlier.index(path.parent) if path.parent in earlier else None]:
            first = _module_file(folder, name)
            if first is not None and own is not None and first.read_bytes() != own.read_bytes():
                message = f"{path} imports {name}: Python takes {first}, not {own}; rename one of them"
                raise PluginError(message, key=f"{path.name}.{name}")


def _imported(plugins: Sequence[Path]) -> set[str]:
    """Return the top-level names of modules that plugins import, also through modules in their folders."""
    return _reached([(plugin, "") for plugin in plugins], dict.fromkeys(plugin.parent for plugin in plugins))[0]


def _reached(files: Iterable[tuple[Path, str]], folders: Iterable[Path]) -> tuple[set[str], set[Path]]:
    """Return the top-level names of modules that files of packages import, also through folders, and all files."""
    todo, seen, found = [one for one in files if one[0].is_file()], set[Path](), set[str]()
    while todo:
        file, package = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        names = imported_by(file.read_bytes(), package)
        found |= {name.partition(".")[0] for name in names}
        todo += [one for name in names for folder in folders for one in _module_files(folder, name)]
    return found, seen


def code_digest(declaration: Declaration) -> str:
    """Return a digest of the file that declares something and of the modules beside plugins that it imports."""
    module = sys.modules.get(getattr(declaration.value, "__module__", ""))
    package, file = getattr(module, "__package__", None) or "", Path(declaration.file)
    root = file.parents[len(package.split("."))] if package else file.parent
    texts = [one.read_bytes() for one in _reached([(file, package)], [root, *(Path(p).parent for p in _PLACES)])[1]]
    return hashlib.blake2b(b"".join(sorted(hashlib.blake2b(text).digest() for text in texts))).hexdigest()


def _module_files(folder: Path, name: str) -> Iterator[tuple[Path, str]]:
    """Yield the file of a module in a folder and those of the packages around it, with the package of each."""
    parts = name.split(".")
    for end, part in enumerate(parts):
        file = _module_file(folder.joinpath(*parts[:end]), part)
        if file is not None:
            yield file, ".".join(parts[: end + (file.name == "__init__.py")])


def _module_file(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / f"{name}.py", folder / name / "__init__.py") if file.is_file()), None)


def module_name(path: Path) -> str:
    """Return the name in ``sys.modules`` of a file imported by its path, equal in every process."""
    return f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def call_declared(declaration: Declaration, *given: Any, **options: Any) -> Any:
    """Call what a plugin declares. A TilthError passes through; PluginError for anything else that it raises."""
    try:
        return declaration.value(*given, **options)
    except TilthError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        raise _failed(declaration, error) from error


def blame(error: BaseException, role: str) -> PluginError | None:
    """Return the PluginError for an exception of a call to a role: one that a plugin declares, or one whose work calls
    a plugin's code, as an engine's methods. None if no plugin took part in the call."""
    own = _DECLARED["role"].get(role)
    if own is not None:
        return _failed(own, error)
    declarations = [d for known in _DECLARED.values() for d in known.values()]
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        code = frame.f_code
        here = [d for d in declarations if d.file == code.co_filename]
        for declaration in here:
            if f"{code.co_qualname}.".startswith(f"{declaration.same_code[1]}."):
                return _failed(declaration, error)
        if here:  # a class or function that a declared one uses
            file = Path(code.co_filename).name
            return PluginError(f"{file}: {describe(error, code.co_filename)}", key=f"{file}.{code.co_qualname}")
    return None


def _failed(declaration: Declaration, error: BaseException) -> PluginError:
    message = f"{declaration.title}: {_described(error, Path(declaration.file), declaration.file)}"
    return PluginError(message, key=f"{declaration.kind}.{declaration.name}")


def _described(error: BaseException, plugin: Path, file: str = "") -> str:
    """Describe an exception as ``describe``, with a hint at a module beside the plugin that no import names."""
    name = str(error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    beside = _module_file(plugin.parent, name) if name else None
    found = describe(error, file)
    return f"{found}; {beside} is found where a file imports it by its name: write import {name}" if beside else found


def _import_module(name: str) -> ModuleType:
    if not {"", str(Path.cwd())} & set(sys.path):  # a console script does not see its working directory
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        if is_missing(name, error):
            hint = f"; a file is given with its ending, {name}.py" if Path(f"{name}.py").is_file() else ""
            message = f"plugins: no module {error.name!r} on the import path{hint}"  # type: ignore[union-attr]
            raise PluginError(message, key=name) from None
        raise PluginError(f"plugins: importing {name} failed: {describe(error)}", key=f"{name}.import") from error
