"""The pool: whatever a call does, it costs its own reward only, nothing hangs, and no process is left behind."""

import ctypes
import functools
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import cloudpickle
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tilth.core.errors import RewardError
from tilth.rewards import process_pool
from tilth.rewards.process import ScoringProgress
from tilth.rewards.process_pool import Outcome, RewardPool

LIMIT = 0.5
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a process need not import what only the tests need


def hold_the_gil():
    """Minutes of backtracking in C code that never lets go of the interpreter."""
    re.match(r"(a+)+$", "a" * 60 + "b")


DEEDS = {
    "ok": lambda: 1.5,
    "parts": lambda: {"reward": True, "length": 3, "style": "good"},
    "raise": lambda: 1 / 0,
    "nan": lambda: math.nan,
    "none": lambda: None,
    "text": lambda: "1.0",
    "exit": lambda: os._exit(3),
    "fork": lambda: float(os.fork() >= 0),
    "leave": lambda: sys.exit(4),
    "segfault": lambda: ctypes.string_at(0),
    "sleep": lambda: time.sleep(60),
    "gil": hold_the_gil,
    "input": lambda: input(),
    "pid": lambda: os.getpid(),
    "torch": lambda: "torch" in sys.modules,
    "threads": lambda: int(os.environ["OMP_NUM_THREADS"]),
}


def deed(prompt, completion, info):
    """Does what the completion says, and notes its calls in a file."""
    if "notes" in info:
        with open(info["notes"], "a") as notes:
            notes.write(f"{prompt}\n")
    if "seconds" in info:
        time.sleep(info["seconds"])
    return DEEDS[completion]()


def items(*completions, **info):
    return [(i, f"p{i}", c, info) for i, c in enumerate(completions)]


def pids(pool):
    return [child.pid for child in pool._children]


def gone(pid):
    """No such process, not even a zombie."""
    return not psutil.pid_exists(pid)


def becomes_true(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture(scope="module")
def pool():
    with RewardPool(deed, timeout=LIMIT) as one:
        yield one
        seen = pids(one)
    assert all(map(gone, seen))


@pytest.fixture(scope="module")
def pair():
    with RewardPool(deed, workers=2, timeout=LIMIT) as two:
        yield two


def summary(outcomes):
    return [(o.value, o.status) for o in outcomes]


def test_values_and_parts(pool):
    ok, parts = pool.score(items("ok", "parts"))
    assert ok == Outcome(1.5, seconds=ok.seconds) and ok.seconds > 0
    assert parts.value == 1 and parts.parts["length"] == 3 and math.isnan(parts.parts["style"])
    assert Outcome(**asdict(ok)) == ok
    assert pool.score([]) == []


def test_a_fork_that_comes_back_scores_nothing(pool):
    assert (
        summary(pool.score(items("fork", "ok"))) == summary(pool.score(items("fork", "ok"))) == [(1, "ok"), (1.5, "ok")]
    )


@pytest.mark.parametrize(
    "completion, status, reason",
    [
        ("raise", "error", "ZeroDivisionError: division by zero at test_process_pool.py:"),
        ("unheard of", "error", "KeyError: 'unheard of'"),
        ("leave", "error", "SystemExit: 4"),
        ("input", "error", "EOFError"),
        ("nan", "invalid", "returned nan"),
        ("none", "invalid", "returned None"),
        ("text", "invalid", "returned a str"),
        ("exit", "died", "its process died with exit code 3"),
        ("segfault", "died", "its process was killed by SIGSEGV"),
        ("sleep", "timeout", "took longer than 0.5 s"),
        ("gil", "timeout", "took longer than 0.5 s"),
    ],
)
def test_a_bad_call_costs_its_own_reward_only(pool, completion, status, reason):
    before = pids(pool)
    outcomes = pool.score(items("ok", "parts", completion, "ok"))
    assert [o.value for o in outcomes] == [1.5, 1.0, None, 1.5]
    assert outcomes[2].status == status and outcomes[2].reason.startswith(reason)
    if status in ("died", "timeout"):
        assert all(map(gone, before)), "killed and reaped"
    if status == "timeout":
        assert LIMIT <= outcomes[2].seconds < LIMIT + 10


EXPECTED = {
    "ok": (1.5, "ok"),
    "parts": (1.0, "ok"),
    "raise": (None, "error"),
    "nan": (None, "invalid"),
    "exit": (None, "died"),
    "sleep": (None, "timeout"),
}


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.sampled_from([*EXPECTED, *["ok", "parts", "raise"] * 4]), max_size=24), st.booleans())
def test_outcomes_are_in_the_order_of_items(pool, pair, completions, two):
    outcomes = (pair if two else pool).score(items(*completions))
    assert summary(outcomes) == [EXPECTED[c] for c in completions]


def test_finished_work_of_a_lost_chunk_is_kept(pool, tmp_path):
    """Calls of 20 ms each: results arrive one by one, so the hang costs itself and nothing is scored twice."""
    notes = tmp_path / "calls"
    outcomes = pool.score(items("ok", "ok", "ok", "sleep", "ok", "exit", "ok", notes=str(notes), seconds=0.02))
    assert summary(outcomes) == [EXPECTED[c] for c in ("ok", "ok", "ok", "sleep", "ok", "exit", "ok")]
    assert notes.read_text().split() == [f"p{i}" for i in range(7)]


def test_known_outcomes_are_not_scored_again(pool, tmp_path):
    notes = tmp_path / "calls"
    first = pool.score(items("ok", "sleep", "ok"))
    journal = {i: Outcome(**asdict(o)) for i, o in enumerate(first) if o.value is None}
    again = pool.score(items("ok", "ok", "ok", notes=str(notes)), known=journal)
    assert again[1] == first[1] and [o.value for o in again] == [1.5, None, 1.5]
    assert notes.read_text().split() == ["p0", "p2"]
    assert pool.score(items("raise"), known={0: Outcome(9.0)})[0].value == 9


def test_a_hang_does_not_stop_the_other_process(pair):
    outcomes = pair.score(items("sleep", *["ok"] * 30, seconds=0.005))
    assert summary(outcomes) == [EXPECTED["sleep"], *[EXPECTED["ok"]] * 30]


def test_work_is_shared(pair):
    pair.ready()
    values = [o.value for o in pair.score(items(*["pid"] * 40, seconds=0.005))]
    assert set(values) == set(map(float, pids(pair)))


def test_children_import_no_torch_and_have_one_thread():
    with RewardPool(lambda p, c, i: {"reward": "torch" in sys.modules or "numpy" in sys.modules}) as pool:
        assert pool.score(items("x"))[0].value == 0
    with RewardPool(lambda p, c, i: int(os.environ["OMP_NUM_THREADS"]) + threading.active_count()) as pool:
        assert pool.score(items("x"))[0].value == 2


def test_functions_by_value():
    def closure(scale):
        def inner(prompt, completion, info):
            return scale * len(completion)

        return inner

    def offset(prompt, completion, info, extra):
        return extra

    for function, value in [
        (lambda prompt, completion, info: info["x"], 4.0),
        (closure(2.0), 6.0),
        (functools.partial(offset, extra=7), 7.0),
        (deed, None),
    ]:
        with RewardPool(function) as pool:
            assert pool.score([(0, "p", "abc", {"x": 4})])[0].value == value


def test_functions_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "helper.py").write_text("FACTOR = 2\n")
    (tmp_path / "mine.py").write_text(
        "import helper\ndef length(p, c, i):\n    print('hello from', c)\n    return helper.FACTOR * len(c)\n"
    )
    log = tmp_path / "log.txt"
    with RewardPool("mine.py:length", quiet=True) as pool:
        pool.print_to(log)
        assert pool.score(items("abc"))[0].value == 6
    assert log.read_text() == "hello from abc\n"
    with RewardPool("addition") as pool:
        assert pool.score([(0, "1+2=", "3", {"answer": "3"}), (1, "1+2=", "4", {"answer": "3"})])[1].value == 0


def test_several_rewards_with_their_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import os, time\n"
        "def style(prompt, completion, info):\n"
        "    if 'hang' in completion:\n        time.sleep(60)\n"
        "    if 'exit' in completion:\n        os._exit(3)\n"
        "    if 'fail' in completion:\n        raise ValueError('no licence')\n"
        "    return None if 'none' in completion else {'reward': 0.5, 'torch': 'torch' in __import__('sys').modules}\n"
    )
    spec = {"gsm8k": 1.0, "regex:^so": 0.25, "mine.py:style": 0.1}
    said = ["so #### 5", "none #### 5", "fail #### 5", "hang", "exit", "#### 6"]
    with RewardPool(spec, workers=2, timeout=LIMIT) as pool:
        found = pool.score([(i, "q", text, {"answer": "#### 5"}) for i, text in enumerate(said)])
    assert [o.value for o in found] == [pytest.approx(1.3), None, None, None, None, pytest.approx(0.05)]
    assert found[0].parts == {"gsm8k": 1, "regex": 1, "style": 0.5, "correct": 1, "format": 1, "torch": 0}
    assert found[1].reason == "style: returned None" and found[1].status == "invalid"
    assert found[2].reason == "ValueError: no licence at mine.py:8 (in reward style)" and found[2].status == "error"
    assert [o.status for o in found[3:5]] == ["timeout", "died"]
    assert found[3].reason == "style: took longer than 0.5 s"
    assert found[4].reason == "style: its process died with exit code 3"
    assert [found[0].value, found[-1].parts["correct"], found[-1].parts["format"]] == [pytest.approx(1.3), 0, 1]


@pytest.mark.parametrize("spec", ["countdown:0.1", pytest.param({"countdown:0.1": 1.0}, marks=pytest.mark.slow)])
def test_a_verifier_by_name_and_by_value_give_the_same(spec):
    from tilth.rewards.functions import load_reward

    asked = [(i, "3,25,7=54:", text, {}) for i, text in enumerate(["(25-7)*3", "25-7*3", "25", ""])]
    with RewardPool(spec) as by_name, RewardPool(load_reward(spec)) as by_value:
        found = [[(o.value, o.parts) for o in pool.score(asked)] for pool in (by_name, by_value)]
    assert found[0] == found[1] and [value for value, _ in found[0]] == [1, 0.1, 0, 0]


@pytest.mark.slow
def test_a_pattern_that_backtracks_without_end_meets_the_time_limit():
    with RewardPool("regex:(a+)+$", timeout=LIMIT) as pool:
        hung, fine = pool.score([(0, "", "a" * 60 + "b", {}), (1, "", "a", {})])
    assert hung.status == "timeout" and fine.value == 1 and hung.reason == "took longer than 0.5 s"


@pytest.mark.slow
def test_of_several_by_value_the_one_that_hangs_is_named():
    from tilth.rewards.functions import load_reward

    with RewardPool(load_reward({"regex:b": 1.0, "regex:(a+)+$": 1.0}), timeout=LIMIT) as pool:
        hung, fine = pool.score([(0, "", "a" * 60 + "c", {}), (1, "", "ab", {})])
    assert hung.reason == "regex:(a+)+$: took longer than 0.5 s" and fine.value == 1


def test_a_function_of_a_module_that_only_this_process_has(tmp_path):
    from tilth.rewards.functions import load_reward

    (tmp_path / "elsewhere.py").write_text("K = 3\ndef times(p, c, i):\n    return K * len(c)\n")
    with RewardPool(load_reward(f"{tmp_path}/elsewhere.py:times")) as pool:
        assert pool.score(items("ab"))[0].value == 6


def test_printing_does_not_disturb(tmp_path):
    def noisy(prompt, completion, info):
        print("x" * 10_000)
        os.write(1, b"raw\n")
        os.system("echo shell; cat > /dev/null")
        return 1.0

    log = tmp_path / "log.txt"
    with RewardPool(noisy, quiet=True) as pool:
        pool.print_to(log)
        assert [o.value for o in pool.score(items(*"abc"))] == [1, 1, 1]
    text = log.read_text()
    assert text.count("x" * 10_000) == text.count("raw") == text.count("shell") == 3


def test_large_items_and_results():
    with RewardPool(lambda p, c, i: {"reward": len(c), **{str(k): k for k in range(2000)}}, workers=2) as pool:
        outcomes = pool.score([(i, "p", "x" * 1_000_000, {}) for i in range(24)])
    assert all(o.value == 1_000_000 and len(o.parts) == 2000 for o in outcomes)


class Unsendable:
    def __reduce__(self):
        raise TypeError("not for travel")


class Unreadable:
    def __reduce__(self):
        return (int, ("no number",))


def test_items_that_cannot_travel(pool):
    every = [
        (0, "p", "ok", {}),
        (1, "p", "ok", {"x": Unsendable()}),
        (2, "p", "ok", {}),
        (3, "p", "ok", {"x": Unreadable()}),
    ]
    outcomes = pool.score(every)
    assert [o.value for o in outcomes] == [1.5, None, 1.5, None]
    assert outcomes[1].reason.startswith("cannot be sent to its process: TypeError: not for travel")
    assert outcomes[3].reason.startswith("cannot be rebuilt in its process: ValueError")


def test_a_process_that_dies_idle_is_replaced(pool):
    pool.score(items("ok"))
    os.kill(pids(pool)[0], signal.SIGKILL)
    time.sleep(0.05)
    assert summary(pool.score(items(*["ok"] * 5))) == [EXPECTED["ok"]] * 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_all_processes_get_costs_no_reward(number):
    def hit(prompt, completion, info):
        os.kill(os.getpid(), number)
        return 1.0

    with RewardPool(hit) as pool:
        before = pids(pool)
        assert summary(pool.score(items("a", "b"))) == [(1.0, "ok"), (1.0, "ok")] and pids(pool) == before


def test_what_the_function_started_dies_with_a_hanging_call(tmp_path):
    def starts(prompt, completion, info):
        process = subprocess.Popen(["sleep", "60"])
        Path(info["pid"]).write_text(str(process.pid))
        process.wait()

    with RewardPool(starts, timeout=LIMIT) as pool:
        assert pool.score(items("x", pid=str(tmp_path / "pid")))[0].status == "timeout"
        pid = int((tmp_path / "pid").read_text())
        assert becomes_true(lambda: gone(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_an_interrupted_call_leaves_a_working_pool(pool):
    def interrupt(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            pool.score(items("ok", "sleep", "sleep"))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert summary(pool.score(items("parts", "ok"))) == [EXPECTED["parts"], EXPECTED["ok"]]


def test_processes_outlive_the_thread_that_made_the_pool():
    made = []
    thread = threading.Thread(target=lambda: made.append(RewardPool(deed)))
    thread.start()
    thread.join()
    with made[0] as pool:
        before = pids(pool)
        time.sleep(0.05)
        assert pool.score(items("pid"))[0].value == before[0]


def test_closing(pool):
    with RewardPool(deed, workers=2) as own:
        seen = pids(own)
        assert not any(map(gone, seen))
    own.close()
    assert all(map(gone, seen))
    with raises(RewardError, "closed"):
        own.score(items("ok"))
    with raises(RewardError, "closed"):
        own.ready()
    assert not any(map(gone, pids(pool)))


@pytest.mark.parametrize(
    "function, key",
    [
        ("nowhere.py:f", "nowhere.py"),
        ("additon", "additon"),
        ("regex:(a", "regex.pattern"),
        ({"gsm8k": 1.0, "gsm9k": 0.5}, "gsm9k"),
        ({"gsm8k": "much"}, "reward.function.gsm8k"),
        ({}, "reward.function"),
        ("math:pi", "math:pi.type"),
        (3, "function"),
        (lambda prompt, completion: 0.0, "<lambda>.arguments"),
        ("dies.py:f", "reward.start.died"),
        ("trains.py:f", "trains.py.import"),
    ],
)
def test_a_function_that_cannot_be_had(function, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dies.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "trains.py").write_text("from tilth.rewards.process_pool import RewardPool\nRewardPool('addition')\n")
    before = psutil.Process().children()
    with raises(RewardError, key) as error:
        RewardPool(function, workers=2)
    assert "\n" not in str(error.value) and psutil.Process().children() == before


def test_a_function_that_cannot_travel():
    lock = threading.Lock()
    with raises(RewardError, "function.pickle"):
        RewardPool(lambda p, c, i: lock.locked())
    thing = Unreadable()
    with raises(RewardError, "function.unpickle"):
        RewardPool(lambda p, c, i: thing)


def test_arguments_are_checked():
    with raises(RewardError, "workers"):
        RewardPool(deed, workers=0)
    with raises(RewardError, "timeout"):
        RewardPool(deed, timeout=0)


def test_waiting_can_be_put_off():
    with RewardPool(deed, wait=False) as pool:
        assert pool.score(items("ok"))[0].value == 1.5
    pool = RewardPool("nowhere.py:f", wait=False)
    with raises(RewardError, "nowhere.py"):
        pool.score(items("ok"))


def test_a_process_that_cannot_be_started_again(tmp_path, monkeypatch):
    """The file vanishes while the run goes on: what is left is missing, and the next call may try again."""
    path = tmp_path / "fleeting.py"
    body = "import os\ndef f(p, c, i):\n    if c == 'exit':\n        os._exit(1)\n    return 1.0\n"
    path.write_text(body)
    with RewardPool(f"{path}:f") as pool:
        path.unlink()
        outcomes = pool.score(items("ok", "exit", "ok"))
        assert outcomes[1].reason == "its process died with exit code 1"
        assert outcomes[2].value is None and outcomes[2].status == "died" and "no file" in outcomes[2].reason
        path.write_text(body)
        assert pool.score(items("ok"))[0].value == 1


def test_a_start_that_takes_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(process_pool, "START_SECONDS", 0.3)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(30)\n")
    with raises(RewardError, "reward.start.timeout"):
        RewardPool(f"{tmp_path}/slow.py:f")


def test_a_process_that_waits_long_for_its_function_is_not_late():
    """As where a model is loaded between the start of the pool and the first call."""
    with RewardPool(deed, wait=False) as pool:
        pool._children[0].progress.put(time.monotonic() - 2 * process_pool.START_SECONDS, -1)
        pool.ready()
        assert pool.score(items("ok"))[0].value == 1.5


UNGUARDED = """
    import os, sys
    from tilth.rewards.process_pool import RewardPool

    BONUS = 2

    def reward(prompt, completion, info):
        return BONUS + len(completion)

    pool = RewardPool(reward, workers=2)
    print(*[child.pid for child in pool._children])
    print([o.value for o in pool.score([(0, "p", "abc", {}), (1, "p", "", {})])])
    ENDING
"""


def script(ending):
    return textwrap.dedent(UNGUARDED).replace("ENDING", ending)


@pytest.mark.parametrize("how", ["file", *(pytest.param(how, marks=pytest.mark.slow) for how in ("stdin", "-c"))])
def test_a_script_without_a_guard(tmp_path, how):
    """And without closing the pool: nothing is left when it ends."""
    text = script("")
    (tmp_path / "run.py").write_text(text)
    command = {"file": [str(tmp_path / "run.py")], "stdin": ["-"], "-c": ["-c", text]}[how]
    done = subprocess.run(
        [sys.executable, *command], input=text if how == "stdin" else None, text=True, capture_output=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    children, values = done.stdout.splitlines()
    assert values == "[5.0, 2.0]" and done.stderr == ""
    assert all(gone(int(pid)) for pid in children.split())


@pytest.mark.parametrize("busy", ["", "hold_the_gil"], ids=["idle", "hanging"])
def test_the_run_is_killed(busy):
    """SIGKILL of the parent: idle processes see the end of their pipe, hanging ones are killed by the kernel."""
    ending = "sys.stdout.flush(); import time; time.sleep(60)"
    if busy:
        ending = (
            "import re; sys.stdout.flush(); pool2 = RewardPool(lambda p, c, i: re.match('(a+)+$', 'a' * 60 + 'b'));"
            "print(pool2._children[0].pid, flush=True); pool2.score([(0, '', '', {})])"
        )
    process = subprocess.Popen([sys.executable, "-c", script(ending)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    children = [int(pid) for pid in process.stdout.readline().split()]
    process.stdout.readline()
    if busy:
        children.append(int(process.stdout.readline()))
        time.sleep(0.1)
    assert len(children) == (3 if busy else 2) and not any(map(gone, children))
    process.kill()
    process.wait()
    process.stdout.close()
    assert becomes_true(lambda: all(map(gone, children)))


def test_an_error_of_the_run_leaves_nothing():
    done = subprocess.run(
        [sys.executable, "-c", script("raise SystemExit(5)")], text=True, capture_output=True, timeout=30
    )
    assert done.returncode == 5
    assert all(gone(int(pid)) for pid in done.stdout.splitlines()[0].split())


def test_trivial_calls_go_to_the_processes_in_few_messages(monkeypatch):
    give, chunks = process_pool.ScoringProcess.give, list[int]()
    monkeypatch.setattr(
        process_pool.ScoringProcess, "give", lambda one, chunk, job: (chunks.append(len(chunk)), give(one, chunk, job))
    )
    with RewardPool(lambda p, c, i: float(c == i["answer"]), workers=2) as pool:
        asked = [(i, "12+34=", "0046", {"answer": "0046"}) for i in range(512)]
        assert len(pool.score(asked)) == sum(chunks) == 512
    assert len(chunks) < 32


WRITES = """
import sys, time
from tilth.rewards.process import ScoringProgress
progress, end = ScoringProgress(int(sys.argv[1])), time.monotonic() + 0.3
place = 0
while time.monotonic() < end:
    place = (place + 1) % 1000
    progress.put(time.monotonic(), place)
"""


def test_what_is_at_work_is_never_seen_half_written():
    """A time of 0 would be an item that takes too long: a reward that is lost for nothing."""
    with tempfile.TemporaryFile() as shared:
        shared.truncate(ScoringProgress.NBYTES)
        with closing(ScoringProgress(shared.fileno())) as progress:
            began = time.monotonic()
            progress.put(began, -1)
            fd = shared.fileno()
            writer = subprocess.Popen([sys.executable, "-c", WRITES, str(fd)], pass_fds=[fd])
            seen = set()
            while writer.poll() is None:
                begun, place = progress.get()
                assert began - 0.001 <= begun <= time.monotonic() and -1 <= place < 1000
                seen.add(place)
    assert writer.returncode == 0 and len(seen) > 5
