"""The fingerprint of a reward: another one for whatever decides, the same one in every process for the same."""

import functools
import os
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilth.rewards.fingerprint import Imports, files_fingerprint, fingerprint

# ---- functions of files and modules ----

FILES = {
    "rewards.py": """
        from typing import TYPE_CHECKING
        import json, torch_is_not_installed_here_xyz as nothing
        import helper
        from package import part, FLAG
        import importlib
        if TYPE_CHECKING:
            import never
        named = importlib.import_module("by_name")
        def score(p, c, i):
            import late
            return helper.score(c)
        def other(p, c, i):
            return 0
    """,
    "helper.py": "from second import *\nimport rewards\n",
    "second.py": "def score(c): return 1\n",
    "late.py": "",
    "by_name.py": "",
    "never.py": "",
    "unrelated.py": "",
    "package/__init__.py": "from .inner import FLAG\n",
    "package/part.py": "from ..package import inner\nfrom . import last\nfrom .... import beyond\n",
    "package/inner.py": "FLAG = 1\n",
    "package/last.py": "def broken(:\n",
    "package/stranger.py": "",
    "namespace/leaf.py": "",
}
USED = {
    "rewards.py", "helper.py", "second.py", "late.py", "by_name.py", "package/__init__.py", "package/part.py",
    "package/inner.py", "package/last.py",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    written(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def written(folder):
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


@pytest.mark.parametrize("spec", ["rewards.py:score", "rewards:score", {"gsm8k": 1.0, "rewards.py:score": 0.5}])
@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_that_is_imported_counts_and_no_other(folder, name, spec):
    before = fingerprint(spec)
    assert len(before) == 16 and fingerprint(spec) == before
    with open(folder / name, "a") as file:
        file.write("\n")
    assert (fingerprint(spec) != before) == (name in USED)


def test_nothing_is_executed_and_nothing_installed_counts(folder):
    (folder / "rewards.py").write_text("import numpy, json, tilth.rewards.verifiers, helper\nraise SystemExit\n")
    (folder / "helper.py").write_text("")
    imports = Imports()
    imports.spec("rewards.py:score")
    assert set(imports.found) == {"rewards.py", "helper"} and "helper" not in sys.modules


def test_a_namespace_package_and_one_that_is_not_there(folder):
    (folder / "rewards.py").write_text("import namespace.leaf, namespace.none, package.none.none, json.none\n")
    imports = Imports()
    imports.spec("rewards.py:score")
    assert set(imports.found) == {"rewards.py", "namespace.leaf", "package", "package.inner"}


def test_the_place_of_the_project_does_not_count(folder, tmp_path, monkeypatch):
    before = fingerprint("rewards.py:score")
    written(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert fingerprint("rewards.py:score") == before


def test_two_files_of_one_name_are_two(folder):
    for place in ("a", "b"):
        (folder / place).mkdir()
        (folder / place / "r.py").write_text("")
    spec = {"a/r.py:f": 1.0, "b/r.py:f": 1.0}
    before = fingerprint(spec)
    (folder / "b" / "r.py").write_text("1")
    assert fingerprint(spec) != before


def test_a_neighbour_that_one_plugin_finds_beside_another_counts(folder):
    for place in ("a", "b"):
        (folder / place).mkdir()
        (folder / place / "r.py").write_text("import neighbour\n" if place == "b" else "")
    before = files_fingerprint(["a/r.py", "b/r.py"])
    (folder / "a" / "neighbour.py").write_text("")
    assert files_fingerprint(["a/r.py", "b/r.py"]) != before


def test_names_and_weights_count():
    specs = [
        "gsm8k",
        "exact",
        {"gsm8k": 1.0},
        {"gsm8k": 2.0},
        {"gsm8k": 1.0, "exact": 1.0},
        "none.py:score",
        "no:score",
    ]
    assert len({fingerprint(spec) for spec in specs}) == len(specs)


# ---- functions by value, in processes of their own ----

SCRIPT = """
import abc, collections, dataclasses, enum, functools, importlib, logging, re, string
import numpy as np
import helpers, package.part
from helpers import imported
from tilth.rewards.fingerprint import fingerprint

NUMBER, NAMES, TABLE, LISTED = {v}, {{"aa", "bb", "cc", "d{v}"}}, {{"k": [1, {{"x": {v}}}]}}, [1, 2, {v}]
MIXED = {{("a", {v}), None, 1.5, "b", frozenset({{"x", "y", "z{v}"}})}}
ARRAY, PATTERN, WORDS = np.arange(3) * {v}, re.compile("a{{{v}}}"), collections.Counter(a={v})
LOG = logging.getLogger("x")
UNREAD, SAME = {v}, 7
limit = {v}

class Base(abc.ABC):
    factor = {v}
    @abc.abstractmethod
    def f(self): ...

class Child(Base):
    __slots__ = ("state",)
    def __init__(self, state): self.state = state
    def f(self): return self.factor
    def __call__(self, p, c, i): return self.f()
    def method(self, p, c, i): return 1
    @staticmethod
    def static(p, c, i): return {v}
    @classmethod
    def klass(cls, p, c, i): return cls.factor
    @property
    def size(self): return {v}

class Held:
    def __init__(self, state): self.state, self.me = state, self
    def __call__(self, p, c, i): return self.state
    def method(self, p, c, i): return 1

class Sized:
    @property
    def size(self): return {v}
    @functools.cached_property
    def other(self): return 1

class Color(enum.Enum):
    RED = {v}

@dataclasses.dataclass(frozen=True)
class Settings:
    strict: int = {v}
    words: set = dataclasses.field(default_factory=lambda: {{"a", "b"}})
    def __call__(self, p, c, i): return self.strict

Point = collections.namedtuple("Point", "x y")
SETTINGS, SIZED, POINT = Settings(), Sized(), Point(1, {v})

def deep(c): return NUMBER
def even(n): return n == 0 or odd(n - {v})
def odd(n): return n != 0 and even(n - 1)
def keyword(p, c, i, *, k={v}): return k
def default(p, c, i, k={v}): return k
def attribute(p, c, i): return attribute.k
attribute.k = {v}
def unassigned():
    if False: later = 1
    return lambda p, c, i: later
def scaled(k): return lambda p, c, i: k * len(c)
def nested(p, c, i):
    def inner(x): return LISTED
    return max(map(inner, c))
def wraps(f):
    @functools.wraps(f)
    def inner(*a): return f(*a)
    return inner
@wraps
def decorated(p, c, i): return {v}
@functools.lru_cache(maxsize=9)
def cached(p, c, i): return {v}
def tried(p, c, i):
    try:
        x = len(c)
    except {error}:
        x = 0
    return x
def lately(p, c, i):
    import late
    return late.x

CASES = {{
    "constant": lambda p, c, i: {v},
    "global": lambda p, c, i: NUMBER,
    "set": lambda p, c, i: c in NAMES,
    "set constant": lambda p, c, i: c in {{"aa", "bb", "cc", "d{v}"}},
    "mixed set": lambda p, c, i: MIXED,
    "table": lambda p, c, i: TABLE,
    "list in a nested function": nested,
    "array": lambda p, c, i: ARRAY.sum(),
    "pattern": lambda p, c, i: PATTERN.match(c),
    "counter": lambda p, c, i: WORDS,
    "function of a function": lambda p, c, i: deep(c),
    "recursion": lambda p, c, i: even(3),
    "keyword default": keyword,
    "default": default,
    "attribute": attribute,
    "closure": scaled({v}),
    "partial": functools.partial(keyword, k={v}),
    "partial of a function": functools.partial(default),
    "decorated": decorated,
    "cached": cached,
    "object": Held({v}),
    "method": Held({v}).method,
    "slots": Child([{v}]),
    "class attribute": Child(1),
    "static": Child.static,
    "class method": Child.klass,
    "builtin method": {{"a": {v}}}.get,
    "property of a global": lambda p, c, i: SIZED.size,
    "enum": lambda p, c, i: Color.RED,
    "dataclass": SETTINGS,
    "instance of a dataclass": Settings(strict={v}),
    "named tuple": lambda p, c, i: POINT,
    "exception that is caught": tried,
    "helper module": lambda p, c, i: helpers.f(c),
    "function of a helper": imported,
    "helper's function inside": lambda p, c, i: imported(p, c, i),
    "submodule": lambda p, c, i: package.part.f(c),
    "import inside": lately,
    "class of a helper": helpers.Judge(),
}}
SAMES = {{
    "unread": lambda p, c, i: SAME,
    "not a global": lambda p, c, i: i.limit,  # of the same name as one
    "library": lambda p, c, i: string.ascii_letters.count(c) + np.exp(1) + importlib.import_module("json").x,
    "logger": lambda p, c, i: LOG.info(c),
    "builtin": len,
    "empty": unassigned(),
    "name of a function": scaled(1),
}}
for name, function in [*CASES.items(), *SAMES.items()]:
    print(name, fingerprint(function), sep=":")
"""
HELPERS = """
def f(c): return {v}
def imported(p, c, i): return f(c)
class Judge:
    def __call__(self, p, c, i): return 1
"""


def said(folder, v, seed):
    """Fingerprints that a script prints which has this number everywhere, under a hash seed."""
    for name, text in {
        "script.py": SCRIPT, "helpers.py": HELPERS, "late.py": "x = {v}\n", "package/__init__.py": "",
        "package/part.py": "def f(c): return {v}\n",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.format(v=v, error=["IndexError", "KeyError", "LookupError"][v]))
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, str(folder / "script.py")]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert found.returncode == 0, found.stderr
    return dict(line.rsplit(":", 1) for line in found.stdout.splitlines())


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Of one script twice, under different hash seeds and in different folders, and of another."""
    places = [tmp_path_factory.mktemp(name) for name in "abc"]
    return [said(place, v, seed) for place, v, seed in zip(places, (1, 1, 2), (1, 2, 1))]


def test_the_same_reward_is_the_same_in_every_process_and_place(scripts):
    first, again, _ = scripts
    assert first == again and len(first) == 46


def test_whatever_decides_counts_and_nothing_else(scripts):
    first, _, other = scripts
    same = {name for name in first if first[name] == other[name]}
    assert same == {"unread", "not a global", "library", "logger", "builtin", "empty", "name of a function"}


def test_a_second_run_that_takes_its_helpers_from_the_cache_says_the_same(tmp_path):
    """Bytecode from a file shares constants otherwise than freshly compiled one."""
    inner = "    def f(p, c, i): return c in ('a', 'b') or g(c)\n    def g(c): return c in ('a', 'b')\n"
    (tmp_path / "made.py").write_text(f"def make():\n{inner}    return f\n")
    code = "from made import make; from tilth.rewards.fingerprint import fingerprint; print(fingerprint(make()))"
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}, "text": True, "check": True}
    found = {subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, **how).stdout for _ in range(2)}
    assert len(found) == 1 and (tmp_path / "__pycache__").is_dir()


# ---- values in this process ----

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.frozensets(st.text(max_size=2), max_size=3)
    ),
    max_leaves=6,
)


def of(value):
    """A function that reads it."""
    return functools.partial(len, value)


@given(VALUES, VALUES)
def test_values_have_one_fingerprint_if_and_only_if_they_are_the_same(one, other):
    assert (fingerprint(of(one)) == fingerprint(of(other))) == (shape(one) == shape(other))


def shape(value):
    """Value and type, to every depth; without that 1 == 1.0 == True."""
    if isinstance(value, (list, tuple)):
        return type(value), [shape(v) for v in value]
    if isinstance(value, dict):
        return dict, [(k, shape(v)) for k, v in value.items()]
    return type(value), repr(value) if isinstance(value, float) else value


def test_what_goes_in_circles_ends():
    ring, mapping = [1], {}
    ring.append(ring)
    mapping["me"] = mapping

    class Node:
        pass

    a, b = Node(), Node()
    a.other, b.other, a.friends, b.friends = b, a, {a, b}, {a}
    for value in (ring, mapping, a, {a}):
        assert fingerprint(of(value)) == fingerprint(of(value))
    many = {f"f{i}": None for i in range(30)}  # all call all: no path through them is walked twice
    code = "\n".join(f"def f{i}(p, c, i): return {' + '.join(f'f{j}(p, c, i)' for j in range(30))}" for i in range(30))
    exec(code, many)
    assert fingerprint(many["f0"]) == fingerprint(many["f0"])


def test_tensors_count_by_their_values():
    import torch

    assert fingerprint(of(torch.ones(3))) == fingerprint(of(torch.ones(3))) != fingerprint(of(torch.zeros(3)))
    layer = torch.nn.Linear(2, 2)
    before = fingerprint(of(layer))
    assert before == fingerprint(of(layer))
    with torch.no_grad():
        layer.weight += 1
    assert before != fingerprint(of(layer))


def test_of_what_cannot_be_pickled_the_type_counts():
    lock = fingerprint(of(threading.Lock()))
    assert lock == fingerprint(of(threading.Lock())) != fingerprint(of(threading.Event()))


def test_a_module_from_a_path_counts_by_its_file(tmp_path):
    found = []
    for text in ("X = 1", "X = 1", "X = 2"):
        (tmp_path / "loaded.py").write_text(text)
        module = types.ModuleType("loaded_by_hand")
        module.__file__ = str(tmp_path / "loaded.py")
        found.append(fingerprint(of(module)))
    assert found[0] == found[1] != found[2]


def test_the_tests_own_directory_is_the_users_own():
    imports = Imports()
    imports.module("tests.flows.tiny")
    assert {"tests", "tests.flows", "tests.flows.tiny"} <= set(imports.found)
    assert not any(name.startswith(("tilth", "numpy", "json")) for name in imports.found), Path.cwd()
