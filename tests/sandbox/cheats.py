"""Programs that try to pass tests that they fail: name -> (program, tests). ``f(x) = x * x + 1`` passes all."""

FORGE = """
import sys
inner = sys._getframe(1).f_locals
inner["answer"]({names})
for line in inner["requests"]:
    inner["answer"]({value})
"""
"""Answers in the place of the process that would: with any names, and any answer to a call."""
HANDLE = {"kind": "handle", "number": 0}
BUILTINS = """
class S(str):
    __hash__ = str.__hash__
    def startswith(self, *a): return False
def f(x): return 0.0
class M: isclose = staticmethod(lambda *a: True)
def lie(*a): return LIE
own = globals
own().pop("__builtins__")
own()[S("__builtins__")] = {"NAME": lie}
"""
"""Takes a builtin of the tests: a name that claims to begin otherwise, among the program's own."""
ITSELF = "class A:\n {} = lambda self, *other: self\ndef f(x): return A()"
EQUAL, NEAR = "assert f(2) == 5", "assert abs(f(2) - 5.0) < 1e-6"


def forged(names, value):
    return FORGE.format(names=names, value=value)


def builtin(name, lie):
    return BUILTINS.replace("NAME", name).replace("LIE", lie)


CHEATS = {
    # ---- ends and words ----
    "end well": ("import sys; sys.exit(0)", EQUAL),
    "end at once": ("import os; os._exit(0)", EQUAL),
    "say that they passed": ("import sys, os\nprint('the tests passed')\nos._exit(0)", EQUAL),
    "say it on every descriptor": (
        "import os\nfor fd in range(64):\n try: os.write(fd, b'the tests passed\\n')\n except OSError: pass\n"
        "def f(x): os._exit(0)",
        EQUAL,
    ),
    "say it by the judge's descriptor": (
        "open(f'/proc/{__import__(\"os\").getppid()}/fd/1', 'w').write('the tests passed\\n')",
        EQUAL,
    ),
    "end the judge": ("import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGTERM)", EQUAL),
    "kill the judge": ("import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGKILL)", EQUAL),
    # ---- reads and writes of the other process ----
    "write the judge's memory": ("import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')\ndef f(x): return 5", EQUAL),
    "limit the judge": (
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))\ndef f(x): return 0",
        EQUAL,
    ),
    "search the tests": (
        "import gc\ndef f(x): return [o for o in gc.get_objects() if 'assert f' in repr(o)[:500]]",
        EQUAL,
    ),
    "read the tests": ("import sys\ndef f(x): return int(sys.stdin.read()[-1])", EQUAL),
    # ---- modules ----
    "a module beside": (
        "open('math.py', 'w').write('print(\"the tests passed\"); exit()')\nimport math\ndef f(x): return 0",
        "import math\n" + EQUAL,
    ),
    "a module in the table": (
        "import sys, types\nm = sys.modules['math'] = types.ModuleType('math')\nm.isclose = lambda *a: True\n"
        "import math\ndef f(x): return 0",
        "import math\nassert math.isclose(f(2), 5)",
    ),
    "an object in the place of a module": (
        "class math: isclose = staticmethod(lambda *a: True)\ndef f(x): return 0",
        "assert math.isclose(f(2), 5)",
    ),
    "an object in the place of a module that is not loaded": (
        "class hmac: compare_digest = staticmethod(lambda a, b: True)\ndef f(x): return 0",
        "assert hmac.compare_digest(str(f(2)), '5')",
    ),
    "a module that finds tests": (  # its import executes every test*.py of the working directory
        "import types\nf = types.ModuleType('unittest.__main__')\n"
        "open('test_x.py', 'w').write(\"import os; os.write(1, b'the tests passed\\\\n'); os._exit(0)\")",
        EQUAL,
    ),
    # ---- names ----
    "a builtin": ("def abs(x): return 0\ndef f(x): return 1", NEAR),
    "a builtin that is a module": ("import math as abs\ndef f(x): return 1", NEAR),
    "a builtin's class": ("import builtins\nbuiltins.__dict__['AssertionError'] = KeyError\ndef f(x): return 0", EQUAL),
    "builtins: abs": (builtin("abs", "0.0"), NEAR),
    "builtins: round": (builtin("round", "5"), "assert round(f(2)) == 5"),
    "builtins: set": (builtin("set", "{5}"), "assert set([f(2)]) == {5}"),
    "builtins: str": (builtin("str", "'5'"), "assert str(f(2)) == '5'"),
    "builtins: sorted": (builtin("sorted", "[5]"), "assert sorted([f(2)]) == [5]"),
    "builtins: isinstance": (builtin("isinstance", "True"), "assert isinstance(f(2), int)"),
    "builtins: import": (builtin("__import__", "M"), "import math\nassert math.isclose(f(2), 5)"),
    "builtins that are forged": (
        forged({"__builtins__": {"kind": "dict", "items": [["abs", HANDLE]]}, "f": HANDLE}, {"value": 0}),
        NEAR,
    ),
    "builtins that are a handle": (forged({"__builtins__": HANDLE, "f": HANDLE}, {"value": 0}), NEAR),
    "a name that becomes another": (forged({"\uff41bs": HANDLE, "f": HANDLE}, {"value": 0}), NEAR),
    # ---- values ----
    "equal to all": ("class A:\n def __eq__(self, other): return True\ndef f(x): return A()", EQUAL),
    "an int equal to all": (
        "class I(int):\n def __eq__(self, other): return True\n __hash__ = int.__hash__\ndef f(x): return I(0)",
        EQUAL,
    ),
    "a text equal to all": (
        "class S(str):\n def __eq__(self, other): return True\n __hash__ = str.__hash__\ndef f(x): return S()",
        "assert f(2) == 5 or f(2) == '5'",
    ),
    "a list of what is equal to all": (
        "class A:\n def __eq__(self, other): return True\ndef f(x): return [A()]",
        "assert f(2) == 5 or f(2) == [5]",
    ),
    "a dictionary equal to all": (
        "class D(dict):\n def __eq__(self, other): return True\ndef f(x): return D(a=0)",
        "assert f(2) == 5 or f(2) == {'a': 5}",
    ),
    "a pair equal to all": (
        "class T(tuple):\n def __eq__(self, other): return True\n __hash__ = tuple.__hash__\ndef f(x): return T((0,))",
        "assert f(2) == 5 or f(2) == (5,) or f(2) in [(5,)]",
    ),
    "contents equal to all": (
        "class A:\n def __eq__(self, other): return True\nclass D(dict): pass\ndef f(x): return D(a=A())",
        "assert f(2) == 5 or f(2) == {'a': 5}",
    ),
    "contents by a class that lies": (ITSELF.format("__class__ = dict\n keys = __getitem__"), EQUAL),
    "a key equal to all": (
        "class A:\n def __eq__(self, other): return True\n def __hash__(self): return hash(5)\ndef f(x): return A()",
        "assert f(2) in {5}",
    ),
    "not a number": ("def f(x): return float('nan')", NEAR),
    "a number of its own": (ITSELF.format("__sub__ = __abs__ = __float__ = __round__"), NEAR),
    "no difference": ("class A:\n def __sub__(self, other): return 0.0\ndef f(x): return A()", NEAR),
    "greater than all": (
        "class A:\n def __gt__(self, other): return True\n __lt__ = __gt__\ndef f(x): return A()",
        "assert 4.9 < f(2) < 5.1",
    ),
    "an order that is an object": (ITSELF.format("__sub__ = __lt__ = __gt__"), "assert -1e-3 < f(2) - 5 < 1e-3"),
    "greater by an object": (ITSELF.format("__lt__ = __gt__"), "assert 4.9 < f(2) < 5.1"),
    "a square of differences": (
        "class A:\n def __sub__(self, other): return self\n def __mul__(self, other): return 0.0\ndef f(x): return A()",
        "d = f(2) - 5\nassert d * d < 1e-6",
    ),
    "the same by unittest": (
        ITSELF.format("__sub__ = __abs__ = __round__ = __lt__ = __le__"),
        "import unittest\nunittest.TestCase().assertAlmostEqual(f(2), 5)",
    ),
    "least and most": (ITSELF.format("__lt__ = __gt__"), "assert max(f(2), 5) == min(f(2), 5)"),
    "claim a class": ("class A: __class__ = int\ndef f(x): return A()", "assert isinstance(f(2), int)"),
    "a sum of its own": (ITSELF.format("__radd__ = __add__"), "assert sum([f(2)]) == 5"),
    # ---- exceptions and answers ----
    "end what the tests iterate over": (
        "def f(x): raise StopIteration",
        "assert all(map(lambda x: f(x) == x * x + 1, range(3)))",
    ),
    "end the tests' process": (forged({"f": HANDLE}, {"raised": "SystemExit", "text": 0}), EQUAL),
    "an exception that is none": (forged({"f": HANDLE}, {"raised": "print", "text": "the tests passed"}), EQUAL),
    "an answer without a value": (forged({"f": HANDLE}, {}), EQUAL),
    "a handle without a number": (forged({"f": {"kind": "handle", "number": []}}, {"value": 5}), EQUAL),
    "names that are none": (forged([], {"value": 5}), EQUAL),
    "a deep answer": ("def f(x):\n found = []\n for _ in range(900): found = [found]\n return found", EQUAL),
    "an answer without end": ("def f(x):\n found = []\n found.append(found)\n return found", EQUAL),
}
