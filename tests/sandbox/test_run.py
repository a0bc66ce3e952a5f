"""A sandbox runs programs and says what became of them."""

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import tilth
from tests.errors import raises
from tests.sandbox.cheats import CHEATS
from tilth.core.errors import RewardError
from tilth.rewards.functions import load_reward
from tilth.sandbox.kernel import SandboxError
from tilth.sandbox.run import Sandbox, SandboxLimits
from tilth.sandbox.zygote import READY

pytestmark = [pytest.mark.dist, pytest.mark.skipif(sys.platform != "linux", reason="sandboxes are Linux's")]


@pytest.fixture(scope="module")
def sandbox():
    try:
        made = Sandbox(SandboxLimits(seconds=2.0, cpu=1))
    except SandboxError as error:
        pytest.skip(str(error))
    with made:
        yield made


PROGRAMS = [
    ("print('a'); import sys; print('b', file=sys.stderr)", "ok", "", 0),
    ("import sys; sys.exit(7)", "error", "", 7),
    ("raise ValueError", "error", "", 1),
    ("import os; os.abort()", "error", "", 134),
    ("while True: pass", "limit", "cpu", 152),
    ("import time; time.sleep(9)", "limit", "seconds", 137),
    ("x = bytearray(1 << 30)", "limit", "memory", 78),
    ("import os; os._exit(78)", "error", "", 78),
    ("import os; os._exit(152)", "error", "", 152),
    ("open('f', 'wb').write(bytes(20 << 20))", "error", "", 1),
    ("print('x' * (2 << 20))", "limit", "output", 137),
    ("import os, time; os.close(1); os.close(2); time.sleep(9)", "limit", "seconds", 137),
    ("(", "error", "", 1),
]


@pytest.mark.parametrize("program, state, limit, code", PROGRAMS)
def test_what_became_of_a_program(sandbox, program, state, limit, code):
    found = sandbox.run(program, limits=SandboxLimits(seconds=0.5 if "sleep" in program else 60.0, cpu=1))
    assert (found.state, found.limit, found.code) == (state, limit, code), found


def test_input_and_files(sandbox):
    found = sandbox.run("print(input(), open('d/a').read(), __name__)", stdin="x\n", files={"d/a": "é"})
    assert found.stdout == "x é __main__\n" and not found.stderr
    with raises(SandboxError, "sandbox.files"):
        sandbox.run("", files={"../a": ""})
    for name in ("", ".", "a\0"):
        with raises(SandboxError, "sandbox.files"):
            sandbox.run("", files={name: ""})
    with raises(SandboxError, "sandbox.text"):
        sandbox.run("", stdin="\ud800")
    with raises(SandboxError, "sandbox.memory"):
        SandboxLimits(memory=0)


@pytest.mark.parametrize("stdin", ["", "abc", "x" * (1 << 20)])
def test_a_program_reads_its_input_to_the_end(sandbox, stdin):
    assert sandbox.run("import sys; print(len(sys.stdin.read()))", stdin=stdin).stdout == f"{len(stdin)}\n"


def test_a_program_ends_as_one_of_an_interpreter(sandbox):
    late = "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()\n"
    found = sandbox.run(f"{late}import atexit; atexit.register(print, 'last'); print('first')")
    assert found.stdout.split() == ["first", "late", "last"]
    stored = "import pickle\nclass A: x = 3\nprint(pickle.loads(pickle.dumps(A())).x)"
    assert sandbox.run(stored).stdout == "3\n"
    assert (
        "Ran 1 test"
        in sandbox.run("import unittest\nclass T(unittest.TestCase):\n    def test(self): pass\nunittest.main()").stderr
    )


FORKS = "import os, time\nfor i in range(11):\n    if os.fork() == 0: time.sleep(9); os._exit(0)\ntime.sleep(9)"


def beside_many(sandbox):
    """Outcomes of programs with processes of their own, beside one that has almost as many as it may."""
    greedy = threading.Thread(target=sandbox.run, args=(FORKS,), kwargs={"limits": SandboxLimits(seconds=3.0)})
    greedy.start()
    while greedy.is_alive():
        yield sandbox.run(FORKS.replace("9", "0"))
    greedy.join()


def test_a_program_with_many_processes_leaves_others_their_limit(sandbox):
    for found in beside_many(sandbox):
        assert found.state == "ok", found


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not os.access("/usr/bin/python3.11", os.X_OK), reason="becomes another user")
def test_without_root_programs_leave_others_their_limit_too():
    """Its processes are counted in a namespace of users of its own."""
    paths = [str(Path(module.__file__).parents[1]) for module in (tilth, psutil)]
    code = f"import sys, threading; sys.path[:0] = {paths}\n"
    code += f"from tilth.sandbox.run import Sandbox, SandboxLimits\nFORKS = {FORKS!r}\n{inspect.getsource(beside_many)}"
    code += "found = list(beside_many(Sandbox()))\nassert found and all(one.state == 'ok' for one in found), found"
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3.11", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert not done.returncode, done.stderr


def test_a_pool_of_processes_works(sandbox):
    pool = "import multiprocessing as m\nwith m.Pool(3) as pool: print(pool.map(abs, [-1, 2]))"
    assert sandbox.run(pool).stdout == "[1, 2]\n"


def test_programs_side_by_side(sandbox):
    found = {}
    work = [
        threading.Thread(target=lambda i=i: found.update({i: sandbox.run(f"print({i})").stdout})) for i in range(12)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert found == {i: f"{i}\n" for i in range(12)}


@pytest.fixture
def own():
    """A sandbox of this test alone."""
    try:
        made = Sandbox(SandboxLimits(seconds=2.0, cpu=1))
    except SandboxError as error:
        pytest.skip(str(error))
    with made:
        yield made


def children(pid):
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return []


def ended(pid):
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def killed(pids):
    """Kill processes and wait until they have ended."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while not all(map(ended, pids)):
        time.sleep(0.01)


def forks(own, busy=0):
    """Forks of a sandbox, once so many run a program and those that wait for one have their process 1."""
    while len(found := [pid for pid in children(own._process.pid) if children(pid)]) != READY + busy:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    "dies",
    [
        lambda own: killed([own._process.pid]),
        lambda own: killed(forks(own)),
        lambda own: killed([first for fork in forks(own) for first in children(fork)]),
    ],
    ids=["first process", "waiting forks", "their process 1"],
)
def test_a_sandbox_goes_on_when_processes_of_it_die(own, dies):
    for _ in range(2):
        dies(own)
        assert [own.run("print(1)").stdout for _ in range(3)] == ["1\n"] * 3


ORPHAN = """
import os
from tilth.sandbox import zygote
zygote.kernel.prctl = zygote.kernel.mount = zygote.kernel.call = lambda *ignored: 0
zygote._program = lambda *ignored: os._exit(0)
(asked, request), (ended, alive), (read, stdin), (stdout, out), (stderr, err) = (os.pipe() for _ in range(5))
child = os.fork()
if child == 0:
    for fd in (request, ended, stdin, stdout, stderr):
        os.close(fd)
    try:
        zygote._first(asked, alive, [read, out, err], 0)
    finally:
        os._exit(77)
for fd in (request, ended, stdin, stdout, stderr):
    os.close(fd)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_process_1_ends_when_its_fork_died_before_it_could_ask_to_die_with_it():
    assert int(subprocess.check_output([sys.executable, "-c", ORPHAN])) != 77, (
        "it goes on as a fork, and takes a request"
    )


@pytest.mark.parametrize("times", [1, 2])
def test_a_program_whose_watcher_dies_runs_again_once(own, times):
    found = []

    def run():
        try:
            found.append(own.run("import time; time.sleep(0.8); print(1)").stdout)
        except SandboxError as error:
            found.append(error.key)

    forks(own)
    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(times):
        killed(forks(own, busy=1))
    thread.join()
    assert found == [["1\n"], ["sandbox.answer"]][times - 1]


def test_threads_share_a_sandbox_that_has_to_begin_again(own):
    found = []
    killed([own._process.pid])
    work = [threading.Thread(target=lambda: found.append(own.run("print(1)").stdout)) for _ in range(6)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert found == ["1\n"] * 6


def test_a_closed_sandbox_says_so(own):
    own.close()
    own.close()
    with raises(SandboxError, "sandbox.closed"):
        own.run("print(1)")


def test_unit_tests_judge_a_program(sandbox):
    judge, tests = load_reward("unit_tests"), {"tests": "assert double(4) == 8"}
    assert judge("", "Sure:\n```python\ndef double(x):\n    return 2 * x\n```", tests)["reward"] == 1.0
    assert judge("", "def double(x): return x", tests) == {"reward": 0.0, "correct": 0.0, "format": 1.0}
    assert judge("", "import os; os._exit(0)", tests)["reward"] == 0.0
    assert judge("", "def double(x", tests)["format"] == 0.0
    assert judge.check({}) and judge.check({"tests": "("}) and not judge.check(tests)


RIGHT = "def f(x): return x * x + 1"


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_that_cheats_does_not_pass(sandbox, name):
    judge, (program, tests) = load_reward("unit_tests"), CHEATS[name]
    assert judge("", program, {"tests": tests})["reward"] == 0.0


def test_a_right_program_passes_the_tests_of_all_cheats(sandbox):
    judge = load_reward("unit_tests")
    for tests in {tests for _, tests in CHEATS.values()}:
        assert judge("", RIGHT, {"tests": tests})["reward"] == 1.0, tests


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "def test_f():\n    assert f(2) == 5",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 5)\n"
        "if __name__ == '__main__': unittest.main()",
        "try:\n    assert f(2) == 5\nexcept Exception: pass",
    ],
)
def test_tests_that_an_empty_program_passes_judge_none(sandbox, tests):
    with raises(RewardError, "tests.empty"):
        load_reward("unit_tests")("", RIGHT, {"tests": tests})


def test_tests_that_execute_an_answer_are_refused_before_a_run():
    judge = load_reward("unit_tests")
    for line in ("import pickle\npickle.loads(f(2))", "from pickle import loads", "assert eval(f('2+3')) == 5"):
        assert judge.check({"tests": line}), line
    assert not judge.check({"tests": "import ast\nassert ast.literal_eval(f(2)) == 5"})


def test_values_of_the_standard_library_are_compared_as_they_are(sandbox):
    program = """
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
def groups(words):
    found = defaultdict(list)
    for word in words: found[len(word)].append(word)
    return found
def counts(x): return Counter(x), OrderedDict({x: 1}), deque(x, 3)
def half(x): return Fraction(x, 2), Decimal(x) / 2, 2 ** 20000, -(2 ** 63)
def rest(x): return x % 10
"""
    tests = """
from collections import deque
assert groups(["a", "bc", "d"]) == {1: ["a", "d"], 2: ["bc"]}
assert counts("aab") == ({"a": 2, "b": 1}, {"aab": 1}, deque("aab"))
assert half(3) == (1.5, 1.5, 2 ** 20000, -(2 ** 63)) and rest(10 ** 6000 + 7) == 7
"""
    assert load_reward("unit_tests")("", program, {"tests": tests})["reward"] == 1.0


def test_tests_see_what_a_program_made(sandbox):
    judge = load_reward("unit_tests")
    program = """
import math
LIMIT, ODD = 3.5, float("inf")
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __add__(self, other): return len(self) + len(other)
def upto(n): yield from range(n)
def fails(): raise KeyError("k")
def both(x, *, y=(1, {2: b"3"})): return x, y, {1, 2}
class Money:
    def __init__(self, of): self.of = of
    def __eq__(self, other): return self.of == other.of
    def __lt__(self, other): return self.of < other.of
    def __sub__(self, other): return Money(self.of - getattr(other, "of", other))
"""
    tests = """
assert decimal.Decimal("2.5") + 1 == LIMIT and ODD == math.inf and math.sqrt(4) == 2
s = Stack().push(1).push("b")
assert s.pop() == "b" and len(s) == 1 and s.items == [1] and s + Stack() == 1
assert s == s and s != 1 and list(upto(3)) == [0, 1, 2]
def test_errors():
    try:
        fails()
    except KeyError:
        return True
assert Money(3) - 1 == Money(2) and Money(1) < Money(2) and not Money(2) - Money(1) < Money(1)
assert [next(it) for it in [iter(upto(1))]] == [0] and next(upto(0), 7) == 7
assert test_errors() and both([None]) == ([None], (1, {2: b"3"}), {1, 2}) and both(0, y=1)[1] == 1
"""
    assert judge("", program, {"tests": tests})["reward"] == 1.0
    assert judge("", program, {"tests": tests + "assert Stack().pop()"})["reward"] == 0.0


def test_plain_values_of_derived_classes_equal_plain_values(sandbox):
    judge = load_reward("unit_tests")
    program = """
import collections, enum
P = collections.namedtuple("P", "x y")
class Two(enum.IntEnum): B = 2
class Word(str, enum.Enum): A = "a"
def count(text): return collections.Counter(text)
def groups(*words):
    found = collections.defaultdict(list)
    for word in words: found[word[0]].append(word)
    return found
def ordered(): return collections.OrderedDict(b=count("x"), a=P(1, (2,)))
class Stack(list): pass
"""
    tests = """
assert count("aab") == {"a": 2, "b": 1} and {"a": 2, "b": 1} == count("aab") and count("a") != {"a": 2}
assert groups("ab", "ac", "b") == {"a": ["ab", "ac"], "b": ["b"]}
assert ordered() == {"a": (1, (2,)), "b": {"x": 1}} and P(1, 2) == (1, 2) and P(1, 2) in {(1, 2)} and P(1, 2) != [1, 2]
assert Two.B == 2 and Word.A == "a" and Stack([1]) == [1] and [count("a")] == [{"a": 1}]
c = count("a")
c["b"] = 3
assert c == {"a": 1, "b": 3}
"""
    assert judge("", program, {"tests": tests})["reward"] == 1.0
    assert judge("", program, {"tests": 'assert count("aab") == {"a": 2}'})["reward"] == 0.0


def test_sources_may_lie_where_the_root_would_be_built(tmp_path):
    from tilth.sandbox.zygote import ROOTS, _root

    assert _root([f"{ROOTS[0]}/python", "/usr"]) != ROOTS[0]
    with raises(SandboxError, "sandbox.root"):
        _root([f"{folder}/x" for folder in ROOTS])


def test_it_outlives_the_thread_that_made_it():
    made = []

    def make():
        with contextlib.suppress(SandboxError):
            made.append(Sandbox())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if not made:
        pytest.skip("no sandbox on this machine")
    with made[0] as one:
        assert one.run("print(1)").stdout == "1\n"


def test_threads_share_the_sandbox_of_unit_tests(sandbox):
    judge, found = load_reward("unit_tests"), []
    work = [
        threading.Thread(target=lambda: found.append(judge("", "x = 1", {"tests": "assert x"})["reward"]))
        for _ in range(8)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert found == [1.0] * 8
