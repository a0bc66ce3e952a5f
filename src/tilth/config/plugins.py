"""User code: the files and modules of ``plugins``, and what they declare. Imports no torch.

A decorator (``tilth.advantage``, ``tilth.reward``, ``tilth.flow``, ``tilth.role`` ...) only records what it decorates;
the package that uses such a thing builds it from the declaration when its name is looked up. So a process that only
scores rewards can import a plugin without importing torch.

Every process that receives a recipe imports its plugins: in the controller when the recipe is read, in a worker when
the recipe arrives (``Recipe.__setstate__``), in a process that scores when the reward is named ``FILE.py:name``.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args

from tilth.config.errors import PluginError
from tilth.config.flows import FLOWS, OPTIONAL, SHARED_OPTIONS, Flow, Learns
from tilth.config.open_sets import OPTIMIZERS
from tilth.config.roles import ROLES, SHIPPED_ROLES, MeshKind, Receives, RoleSpec

Kind = Literal[
    "advantage",
    "policy_loss",
    "reward",
    "flow",
    "family",
    "task",
    "role",
    "engine",
    "backend",
    "callback",
    "tracker",
    "optimizer",
    "command",
]
T = TypeVar("T")


@dataclass(frozen=True)
class Declaration:
    """One thing that user code declares."""

    kind: Kind
    name: str
    value: Any
    file: str
    line: int

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
        """``FILE.py:name`` or ``module:name``, by which another process finds it; "" where none could (a notebook)."""
        module = getattr(self.value, "__module__", "__main__")
        if self.file.endswith(".py") and module == module_name(Path(self.file).resolve()):
            return f"{Path(self.file).resolve()}:{self.name}"
        return "" if module == "__main__" else f"{module}:{self.name}"

    @property
    def same_code(self) -> tuple[str, str]:
        """Module and qualified name: a declaration replaces an earlier one of the same code (a notebook cell)."""
        return getattr(self.value, "__module__", ""), getattr(self.value, "__qualname__", "")


ENGINES = {"native": "tilth.rollout.engine:Engine"}
"""Generation engines that come with Tilth: name -> module and class."""
BACKENDS = {
    "inline": "tilth.cluster.backends.inline:InlineBackend",
    "local": "tilth.cluster.controller.launcher:local_backend",
    "ray": "tilth.cluster.backends.ray:RayBackend",
}
"""Backends that come with Tilth: name -> module and class, or function that returns one."""
_SHIPPED_FLOWS = frozenset(FLOWS)
_DECLARED: dict[Kind, dict[str, Declaration]] = {kind: {} for kind in get_args(Kind)}


def declare(kind: Kind, name: str) -> Callable[[T], T]:
    """Return a decorator that records a function or class under a name. Raises PluginError: a name that is taken."""
    if not isinstance(name, str) or not name.isidentifier():
        raise PluginError(f"@tilth.{kind}({name!r}): a name is text such as 'my_{kind}', letters, digits and _")

    def record(value: T) -> T:
        code = inspect.unwrap(value)  # type: ignore[arg-type]
        found = Declaration(kind, name, value, *_place(code))
        rivals = ("reward", "task") if kind in ("reward", "task") else (kind,)  # a task is a reward too
        before = next((_DECLARED[k][name] for k in rivals if name in _DECLARED[k]), None)  # type: ignore[index]
        if before is not None and before.same_code != found.same_code:
            raise PluginError(
                f"{kind} {name!r} of {found.where} is declared by {before.where} too; choose another name"
            )
        _DECLARED[kind][name] = found
        return value

    return record


def advantage(name: str) -> Callable[[T], T]:
    """Declare an advantage estimator that ``algorithm.advantage=name`` chooses.

    A function over rows, ``(rewards, groups, *, scale: float = 1.0)``: float64 [n], int64 [n] -> float64 [n]; a
    function over tokens where it asks for a column of tokens (``values``, ``logprobs``, ``lengths`` ...); or a subclass
    of ``tilth.rl.advantages.Advantage``. Argument names say which columns are passed, keyword arguments are options
    (``algorithm.options.scale=0.5``). See ``tilth.rl.functions``. Raises PluginError: a name that is taken.
    """
    return declare("advantage", name)


def policy_loss(name: str) -> Callable[[T], T]:
    """Declare a policy loss that ``algorithm.loss=name`` chooses.

    A function ``(logprobs, old_logprobs, advantages, *, clip: float = 0.2)`` of float tensors [tokens] -> loss of each
    token [tokens], or (loss, {metric: [tokens]}); or a subclass of ``tilth.rl.losses.PolicyLoss``. Argument names say
    which columns are passed, keyword arguments are options. Raises PluginError: a name that is taken.
    """
    return declare("policy_loss", name)


def reward(name: str) -> Callable[[T], T]:
    """Declare a reward ``(prompt, completion, info) -> number or dict`` that ``reward.function=name`` chooses."""
    return declare("reward", name)


def callback(name: str) -> Callable[[T], T]:
    """Declare a subclass of ``tilth.Callback``, made without arguments for each run whose recipe names this plugin."""
    return declare("callback", name)


def tracker(name: str) -> Callable[[T], T]:
    """Declare a subclass of ``tilth.Tracker`` that ``run.track=["name"]`` chooses."""
    return declare("tracker", name)


def optimizer(name: str, *, state: Sequence[str] = ()) -> Callable[[T], T]:
    """Declare an optimizer that ``optimizer.name=name`` chooses: (parameters, section) -> torch.optim.Optimizer.

    section: [optimizer] of the recipe; ``param_groups`` get the learning rate of each step. state: names of the tensors
    that it keeps of each parameter, 0 at first, which memory plans and checkpoints go by; a number ``step`` needs no
    name. Where the model is divided, parameters are the parts that this rank has.
    Raises PluginError: a name that is taken.
    """
    if name in OPTIMIZERS and name not in _DECLARED["optimizer"]:
        raise PluginError(f"@tilth.optimizer({name!r}): one that comes with Tilth has this name; choose another one")
    record = declare("optimizer", name)

    def add(make: T) -> T:
        record(make)
        OPTIMIZERS[name] = tuple(state)
        return make

    return add


def command(name: str) -> Callable[[T], T]:
    """Declare a function as a command: ``tilth --plugins FILE.py name``; arguments and options as typer takes them."""
    return declare("command", name)


def flow(
    name: str,
    *,
    title: str = "",
    learns: Learns = "experience",
    critic: bool = False,
    reference: bool = False,
    roles: Iterable[str] = (),
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> Callable[[T], T]:
    """Declare a training loop ``(run: tilth.flows.run.Run) -> None`` that ``flow=name`` chooses.

    title: its name in terminal and report. learns: from samples of its own that are scored ("experience"), or from
    given "answers", "documents" or "pairs". critic, reference: whether it needs such a model. roles: those of plugins
    that it calls (``tilth.role``). defaults: section -> key -> value below what a recipe says, as in
    ``{"algorithm": {"advantage": "gae"}}``. Raises PluginError: a name that is taken.
    """
    if name in _SHIPPED_FLOWS:
        raise PluginError(f"@tilth.flow({name!r}): a flow that comes with Tilth has this name; choose another one")
    record = declare("flow", name)

    def add(page: T) -> T:
        record(page)
        own = defaults or {}
        FLOWS[name] = Flow(
            title or name, learns, critic, reference, reads=OPTIONAL, own=own, roles=frozenset(roles), own_loop=True
        )
        return page

    return add


def family(name: str) -> Callable[[T], T]:
    """Declare a model family, ``() -> tilth.models.family.Family``, that ``model.family=name`` chooses.

    A model directory whose config.json has its architecture is of this family. Raises PluginError: a name that
    is taken.
    """
    if name in shipped_families():
        raise PluginError(f"@tilth.family({name!r}): a family that comes with Tilth has this name; choose another one")
    return declare("family", name)


def family_names() -> list[str]:
    """Names of the model families that there are: those that come with Tilth, then those of plugins."""
    return [*shipped_families(), *_DECLARED["family"]]


def shipped_families() -> list[str]:
    """Names of the files of ``tilth/models/families``, each of which declares the family of its name."""
    return _files("models/families")


@cache
def _files(folder: str) -> list[str]:
    return [file.name for file in pkgutil.iter_modules([str(Path(__file__).parents[1] / folder)])]


def task(name: str) -> Callable[[T], T]:
    """Declare a task, ``() -> tilth.config.tasks.Task``, that ``data.source=name`` chooses with its prompts, and
    ``reward.function=name`` with its reward alone. Raises PluginError: a name that is taken."""
    if name in shipped_tasks():
        raise PluginError(f"@tilth.task({name!r}): a task that comes with Tilth has this name; choose another one")
    return declare("task", name)


def task_names() -> list[str]:
    """Names of the tasks that there are: those that come with Tilth, then those of plugins."""
    return [*shipped_tasks(), *_DECLARED["task"]]


def shipped_tasks() -> list[str]:
    """Names of the files of ``tilth/tasks``, each of which declares the task of its name."""
    return _files("tasks")


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

    The class is called in each of its workers as ``Class(context, ...)``; the names of its other arguments say what it
    is given (``recipe``, ``config``, ``tokenizer``, ``prompts``), keyword-only ones are options
    (``roles.NAME.options.KEY``). Where it stands is said by ``roles.NAME.pool`` and, unless mesh is "one", ``.layout``.
    loads: ``roles.NAME.path`` names a model that it loads. The others are those of ``RoleSpec``. Raises PluginError: a
    name that is taken, or a mesh of several workers without a memory function.
    """
    from tilth.config.schema import Recipe

    if name in SHIPPED_ROLES or name in Recipe.model_fields:
        raise PluginError(f"@tilth.role({name!r}): a role or section that comes with Tilth has this name")
    record = declare("role", name)

    def add(worker: T) -> T:
        record(worker)
        ROLES[name] = RoleSpec(
            name,
            worker,  # type: ignore[arg-type]
            lambda recipe: name in recipe.flow_spec.roles,
            mesh,
            memory,
            trains=trains,
            loads=f"roles.{name}.path" if loads else "",
            receives=receives,
            values=values,
        )
        return worker

    return add


def engine(name: str) -> Callable[[T], T]:
    """Declare a generation engine that ``rollout.engine=name`` chooses: a class that extends
    ``tilth.rollout.protocol.GenerationEngine``. Raises PluginError: a name that is taken."""
    if name in ENGINES:
        raise PluginError(f"@tilth.engine({name!r}): an engine that comes with Tilth has this name; choose another one")
    return declare("engine", name)


def backend(name: str) -> Callable[[T], T]:
    """Declare a backend that ``cluster.backend=name`` chooses: a class with the methods of
    ``tilth.cluster.backends.base.Backend``, called as ``Class(workers, timeout=, address=, gpus=)``. Raises
    PluginError: a name that is taken."""
    if name in BACKENDS:
        raise PluginError(
            f"@tilth.backend({name!r}): a backend that comes with Tilth has this name; choose another one"
        )
    return declare("backend", name)


def shared_defaults(advantage: str, loss: str) -> dict[str, Any]:
    """Defaults that a declared estimator and loss have for keys of [algorithm], below what a recipe says."""
    found: dict[str, Any] = {}
    for kind, name in (("advantage", advantage), ("policy_loss", loss)):
        declaration = declared(kind).get(name)  # type: ignore[arg-type]
        if declaration is not None and not inspect.isclass(declaration.value):
            options = inspect.signature(declaration.value).parameters.values()
            found |= {o.name: o.default for o in options if o.name in SHARED_OPTIONS and o.kind is o.KEYWORD_ONLY}
    return found


def declared(kind: Kind) -> dict[str, Declaration]:
    """Everything of a kind that user code has declared in this process, by name."""
    return dict(_DECLARED[kind])


def declared_by(kind: Kind, plugins: Iterable[str]) -> list[Declaration]:
    """What these plugins declare, or the script that this process runs; not what those of an earlier recipe do."""
    modules = {module_name(Path(name)) if name.endswith(".py") else name for name in plugins} | {"__main__"}
    found = [(declaration, getattr(declaration.value, "__module__", "")) for declaration in declared(kind).values()]
    return [d for d, module in found if any(module == m or module.startswith(f"{m}.") for m in modules)]


def load_plugins(plugins: Iterable[str]) -> list[ModuleType]:
    """Import each plugin once: a path ending in ``.py``, or the name of a module. Raises PluginError in one line."""
    return [import_file(Path(name)) if name.endswith(".py") else _import_module(name) for name in plugins]


def absolute(plugins: Sequence[str]) -> tuple[str, ...]:
    """Plugins with whole paths: workers and later readers of the run have other working directories."""
    return tuple(str(Path(name).expanduser().resolve()) if name.endswith(".py") else name for name in plugins)


def import_file(path: Path) -> ModuleType:
    """Import a file by its path, once. Its folder joins the end of the import path, so that its neighbours are found.

    Raises PluginError: no such file (with the nearest name), or one that fails when it is imported, with the line.
    """
    path = path.expanduser().resolve()
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, 1, 0.5)
        raise PluginError(f"no file {path}{f'; did you mean {near[0]!r}?' if near else ''}")
    name = module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except PluginError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PluginError(f"importing {path} failed: {describe(error)}") from error
    return module


def module_name(path: Path) -> str:
    """The name that a file given by its path has among the imported modules: the same in every process."""
    return f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def describe(error: BaseException, file: str = "") -> str:
    """An exception in one line of at most 300 characters, with the place where it was raised.

    file: of the code at fault; its own innermost line is named, where it called others. What Python's importer raises
    of a file that is no Python says its line itself.
    """
    message = " ".join(str(error).split())[:200]
    trace, frames = error.__traceback__, [("<frozen importlib>", 0)]
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    named, line = next((frame for frame in reversed(frames) if frame[0] == file), frames[-1])
    place = "" if named.startswith("<frozen importlib") else f" at {Path(named).name[-60:]}:{line}"
    notes = "".join(f" ({note[:100]})" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}{': ' + message if message else ''}{place}{notes}"


def _import_module(name: str) -> ModuleType:
    if not {"", str(Path.cwd())} & set(sys.path):  # a console script does not see the folder it is called in
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except PluginError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            meant = f"; a file is given with its ending, {name}.py" if Path(f"{name}.py").is_file() else ""
            raise PluginError(f"plugins: no module {error.name!r} on the import path{meant}") from None
        raise PluginError(f"plugins: importing {name} failed: {describe(error)}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"plugins: importing {name} failed: {describe(error)}") from error


def keyword_options(code: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only arguments of a function or class, which are its options, each with its annotation."""
    known = inspect.signature(code, eval_str=True).parameters.values()
    return {p.name: p.annotation for p in known if p.kind is p.KEYWORD_ONLY}


def source(code: Any) -> str:
    """File and line where a function or class begins, for error messages."""
    file, line = _place(inspect.unwrap(code))
    return f"{Path(file).name}:{line}"


def _place(code: Any) -> tuple[str, int]:
    """File and first line of a function or class; ("?", 0) where Python does not know them."""
    if inspect.isfunction(code):
        return code.__code__.co_filename, code.__code__.co_firstlineno
    try:
        return inspect.getsourcefile(code) or "?", inspect.getsourcelines(code)[1]
    except (OSError, TypeError):
        return "?", 0
