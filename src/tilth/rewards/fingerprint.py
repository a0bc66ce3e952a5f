"""Fingerprint of a reward function, including the user code that it imports and the values that it reads.

A function counts as it travels to the reward process. A function imported there (``FILE.py:function``,
``module:function``, a function of a module) counts by its file and, transitively, the user files that this imports. A
function sent by value (a lambda, a function of a script or notebook) counts by its code, defaults, closure and the
globals that it reads, functions and classes among them. Other objects count by what pickle would send.

User files are those outside of the standard library, site-packages and this package. Not covered: data files, imports
of computed names, services, installed packages, and objects that cannot be pickled, of which only the type counts.
Code sent by value is bytecode, which differs between minor versions of Python.
"""

import copyreg
import dis
import functools
import hashlib
import importlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from tilth.config.code import full_names, imported_by
from tilth.config.plugins import declared
from tilth.rewards.functions import Reward, is_importable
from tilth.rewards.verifiers import builtin

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
_DESCRIPTORS = (FunctionType, staticmethod, classmethod, property, functools.cached_property)


def fingerprint(spec: str | Mapping[str, float] | Reward) -> str:
    """Return 16 hex digits for an argument of ``load_reward``, equal in every process."""
    importlib.invalidate_caches()
    found = _Fingerprint()
    if isinstance(spec, Mapping):
        found.add({_without_folder(name): weight for name, weight in spec.items()})
    else:
        found.add(_without_folder(spec) if isinstance(spec, str) else spec)
    for name in [spec] if isinstance(spec, str) else spec if isinstance(spec, Mapping) else ():
        found.imports.spec(name)
    return found.digest()


def _without_folder(name: str) -> str:
    """Return ``/path/mine.py:brevity`` of a plugin as ``mine.py:brevity``; other names stay."""
    of_plugins = {found.spec for kind in ("reward", "task") for found in declared(kind).values()}
    where, _, function = name.rpartition(":")
    return f"{Path(where).name}:{function}" if name in of_plugins and where.endswith(".py") else name


def files_fingerprint(plugins: Iterable[str]) -> str:
    """Return 16 hex digits for the contents of files (ending in .py) and modules, and of user files that they import.

    Folders of the files do not count.
    """
    found = [sorted(one.found.items()) for one in imports_of(list(plugins))]
    return hashlib.blake2b(repr(found).encode(), digest_size=8).hexdigest()


def imports_of(names: Sequence[str], *, own_first: bool = True) -> list["Imports"]:
    """Return the imports of each file, module, ``FILE.py:function`` or ``module:function``, which one process imports:
    each finds modules in its own folder first (False: in the order of the folders), then in those of the others."""
    importlib.invalidate_caches()
    files = [Path(name if name.endswith(".py") else name.rpartition(":")[0]).expanduser().resolve() for name in names]
    folders = [str(file.parent) if file.suffix == ".py" else os.getcwd() for file in files]
    every = [Imports(dict.fromkeys([own, *folders] if own_first else folders)) for own in folders]
    for imports, name, file in zip(every, names, files, strict=True):
        if name.endswith(".py"):
            imports.file("", file)
        elif ":" in name:
            imports.spec(name)
        else:
            imports.module(name)
    return every


# ---- files ----


class Imports:
    """User modules that some code imports, transitively. Executes nothing."""

    def __init__(self, folders: Iterable[str] = ()) -> None:
        """folders: where modules are looked for behind the import path."""
        self.found: dict[str, str] = {}
        """Name of a module or file -> hash of its bytes."""
        self.files: list[Path] = []
        """Their paths."""
        self._specs: dict[str, ModuleSpec | None] = {}
        self._folders = list(folders)

    def spec(self, name: str) -> None:
        """Add the file or module of ``FILE.py:function`` or ``module:function``; ignore a built-in verifier."""
        where = name.rpartition(":")[0]
        if builtin(name) is not None or not where:
            return
        if not where.endswith(".py"):
            self.search(os.getcwd())  # as load_reward does
            self.module(where)
        elif (file := Path(where).expanduser().resolve()).is_file():
            self.search(str(file.parent))
            self.file(_without_folder(name).rpartition(":")[0], file)

    def module(self, name: str) -> None:
        """Add a user module by its full name, with the packages around it."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            spec = self._find(".".join(parts[:end]), parts[:end])
            if spec is None or not _is_own(spec):
                return
            if spec.origin is not None and spec.has_location:
                self.file(spec.name, Path(spec.origin), spec.name if spec.submodule_search_locations else spec.parent)

    def file(self, name: str, file: Path, package: str | None = "") -> None:
        """Add a file and its imports. package: base of relative imports."""
        if name in self.found:
            return
        try:
            source = file.read_bytes()
        except OSError:  # in an archive, or gone: importing it raises
            return
        self.found[name] = hashlib.blake2b(source, digest_size=8).hexdigest()
        self.files.append(file)
        for imported in imported_by(source, package or "") if file.suffix == ".py" else ():
            self.module(imported)

    def search(self, folder: str) -> None:
        """Append a folder to the search path."""
        self._folders.append(folder)
        self._specs.clear()

    def _find(self, name: str, parts: Sequence[str]) -> ModuleSpec | None:
        if name not in self._specs:
            above = self._specs.get(".".join(parts[:-1]))
            path = None if above is None else above.submodule_search_locations
            if len(parts) > 1 and path is None:
                self._specs[name] = None  # no package
            else:
                found = (finder.find_spec(name, path) for finder in sys.meta_path)
                first = next((spec for spec in found if spec is not None), None)
                self._specs[name] = first or PathFinder.find_spec(name, self._folders if path is None else path)
        return self._specs[name]


def _is_own(spec: ModuleSpec) -> bool:
    if spec.origin in ("built-in", "frozen"):
        return False
    places = [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())
    return any(not _is_installed(Path(place).resolve()) for place in places)


def _is_installed(file: Path) -> bool:
    return f"{file}{os.sep}".startswith(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """Return folders of installed modules, each with a separator at its end."""
    paths = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), str(Path(__file__).parents[1])]
    paths += [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]  # of another Python
    return tuple(f"{Path(path).resolve()}{os.sep}" for path in paths)


# ---- values ----


class _Fingerprint:
    """Hash of a sequence of values. A value seen before counts by its index, so that cycles end."""

    def __init__(self, imports: Imports | None = None, open_sets: tuple[int, ...] = ()) -> None:
        self.imports = imports or Imports()
        self._hash = hashlib.blake2b(digest_size=8)
        self._seen: dict[int, tuple[int, Any]] = {}  # the objects too, so that no other one gets the same id
        self._open_sets = open_sets

    def digest(self) -> str:
        """Return the hash of all values, then of the imported files."""
        self._put(*(f"{name} {content}" for name, content in sorted(self.imports.found.items())))
        return self._hash.hexdigest()

    def _put(self, *texts: object) -> None:
        for text in texts:
            data = text if isinstance(text, bytes) else str(text).encode("utf-8", "surrogatepass")
            self._hash.update(len(data).to_bytes(8, "little") + data)

    def add(self, value: Any) -> None:
        """Add a value of any type."""
        kind = type(value)
        if kind in _PLAIN:
            # Hexadecimal, since Python limits the decimal digits of a large integer.
            self._put(kind.__name__, f"{value:x}" if kind is int else value if kind in (str, bytes) else repr(value))
        elif kind is tuple:
            self._all("tuple", value)
        elif kind in (set, frozenset):
            self._set(value)
        elif kind is CodeType:
            self._code(value)
        elif id(value) in self._seen:
            self._put("seen", self._seen[id(value)][0])
        else:
            self._seen[id(value)] = (len(self._seen), value)
            self._object(value)

    def _all(self, kind: str, values: Iterable[Any]) -> None:
        found = list(values)
        self._put(kind, len(found))
        for value in found:
            self.add(value)

    def _set(self, value: Any) -> None:
        """Add elements ordered by fingerprint: the order of a set differs between processes."""
        if id(value) in self._open_sets:
            self._put("set above", len(self._open_sets) - self._open_sets.index(id(value)))
            return
        digests = []
        for element in value:
            one = _Fingerprint(self.imports, (*self._open_sets, id(value)))
            one.add(element)
            digests.append(one._hash.hexdigest())
        self._put(type(value).__name__, *sorted(digests))

    def _object(self, value: Any) -> None:
        if isinstance(value, list) and type(value) is list:
            self._all("list", value)
        elif type(value) is dict:
            self._all("dict", (part for item in value.items() for part in item))
        elif isinstance(value, ModuleType):
            self._module(value)
        elif _is_reference(value):
            self._put("reference", value.__module__, value.__qualname__)
            self.imports.module(value.__module__)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, MethodType):
            self._all("method", (value.__func__, value.__self__))
        elif isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            self._put("builtin", value.__qualname__)
            self.add(owner.__name__ if isinstance(owner, ModuleType) else owner)
        elif isinstance(value, property):
            self._all("property", (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.cached_property):
            self._all("cached property", (value.func,))
        elif isinstance(value, (staticmethod, classmethod)):
            self._all(type(value).__name__, (value.__func__,))
        elif isinstance(value, functools._lru_cache_wrapper):
            self._all("cached", (value.__wrapped__, value.cache_parameters()))
        elif value is os.environ:
            self._put("environ")  # differs between shells
        elif "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
            self._tensor(value)
        else:
            self._reduced(value)

    def _tensor(self, value: Any) -> None:
        from tilth.core.checksum import checksum  # torch is there already

        self._put("tensor", value.dtype, tuple(value.shape), checksum(value))

    def _reduced(self, value: Any) -> None:
        """Add what pickle would send."""
        kind = type(value)
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception:  # noqa: BLE001 - runs user code; any error means that it cannot be pickled
            self._put("opaque", kind.__module__, kind.__qualname__)
            return
        if isinstance(reduced, str):
            self._put("global", kind.__module__, reduced)
            return
        make, arguments, state, elements, items = (*reduced, None, None, None)[:5]
        self._all(f"object {kind.__qualname__}", (make, arguments, state))
        self._all("elements", elements or ())
        self._all("items", (part for item in items or () for part in item))

    def _function(self, value: FunctionType) -> None:
        closed = tuple(_content(cell) for cell in value.__closure__ or ())
        own = {name: item for name, item in vars(value).items() if name != "__wrapped__"}
        self._all("function", (value.__code__, value.__defaults__, value.__kwdefaults__, closed, own))
        for name in sorted(_read(value.__code__, self.imports, value.__globals__)):
            if name in value.__globals__ and not _is_special(name):
                self._put("global", name)
                self.add(value.__globals__[name])

    def _code(self, code: CodeType) -> None:
        arguments = code.co_argcount + code.co_kwonlyargcount
        self._put("code", code.co_code, code.co_exceptiontable, code.co_flags, code.co_posonlyargcount)
        self._all("names", (code.co_names, code.co_varnames[:arguments], code.co_argcount, code.co_consts))

    def _class(self, value: type) -> None:
        self._all("class", (value.__bases__, type(value)))
        for name, item in vars(value).items():
            kept = isinstance(item, _DESCRIPTORS) and name != "__annotate__" if _is_special(name) else True
            if kept and name != "_abc_impl" and type(item).__name__ not in ("member_descriptor", "getset_descriptor"):
                self._put("attribute", name)
                self.add(item)

    def _module(self, value: ModuleType) -> None:
        self._put("module", value.__name__)
        self.imports.module(value.__name__)
        file = getattr(value, "__file__", None)
        if file and value.__name__ not in self.imports.found and not _is_installed(Path(file).resolve()):
            self.imports.file(value.__name__, Path(file))  # loaded from a path


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_reference(value: Any) -> bool:
    """True if another process can import the function or class, by cloudpickle's rule."""
    name, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(name, str) or not isinstance(path, str) or name == "__main__" or isinstance(value, MethodType):
        return False
    found: Any = sys.modules.get(name)
    if found is None or not is_importable(name):
        return False
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    return found is value


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return "empty cell"


def _read(code: CodeType, imports: Imports, names: Mapping[str, Any]) -> set[str]:
    """Return names of the globals that code and its inner functions read; add the modules that they import."""
    found, before = set[str](), list[Any]()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            found.add(step.argval)
        elif step.opname == "IMPORT_NAME":
            level, taken = before
            for name in full_names(step.argval, level, taken or (), str(names.get("__package__") or "")):
                imports.module(name)
        if step.opname != "EXTENDED_ARG":
            before = [*before[-1:], step.argval]
    for name in found:
        if isinstance(package := names.get(name), ModuleType):
            _take_submodules(package.__name__, set(code.co_names), imports)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _read(inner, imports, names)
    return found


def _take_submodules(package: str, words: set[str], imports: Imports) -> None:
    """Add imported submodules that the code may use: after ``import a.b`` it reads the global a."""
    for name in list(sys.modules):
        if name.startswith(f"{package}.") and words.issuperset(name[len(package) + 1 :].split(".")):
            imports.module(name)
