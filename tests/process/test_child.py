"""Children: what they started ends with them, they end with who started them, and how they ended is said."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tilth.process.child import Child, ChildPool, PipedChild, death, finalize, how_ended, ready
from tilth.process.output import OutputFile

SLEEPS = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"


def echo(requests, replies, again):
    """Answer each request with what came, ``again`` times; a request of a number ends with that exit code."""
    from tilth.process.frames import frame, read_frame

    print("heard", flush=True)
    while (body := read_frame(requests)) is not None:
        if body.isdigit():
            os._exit(int(body))
        replies.write(frame(body) * again)
        replies.flush()


def started(*arguments, **more):
    return PipedChild(f"{__name__}:echo", *arguments, **more)


def gone(pid):
    until = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def answers(child, count):
    found = []
    while len(found) < count:
        assert ready([child], 30.0)
        assert child.write() and child.read()
        found += child.bodies()
    return found


def test_a_large_message_goes_there_and_back_and_output_is_apart(capfd):
    big = b"x" * (1 << 20)
    child = started([2], b"hello")
    assert answers(child, 2) == [b"hello"] * 2
    child.send(big)
    assert answers(child, 2) == [big] * 2
    assert child.kill() == child.kill() == -signal.SIGKILL and not child.alive()
    assert capfd.readouterr() == ("", "heard\n")


@pytest.mark.parametrize("session", [True, False])
def test_what_a_child_started_ends_with_it(session):
    """Where it has a session of its own."""
    output = OutputFile()
    child = Child([sys.executable, "-c", SLEEPS], os.environ, stdout=output, session=session)
    while not (pid := output.tail(1)):
        time.sleep(0.01)
    assert child.kill() == -signal.SIGKILL and gone(child.pid)
    assert gone(int(pid)) if session else psutil.pid_exists(int(pid))
    if not session:
        os.kill(int(pid), signal.SIGKILL)


def test_a_child_is_told_once_and_may_end_by_itself():
    child = Child([sys.executable, "-c", "import sys; sys.exit(len(sys.stdin.read()))"], os.environ)
    assert child.wait(0.0) is None and child.alive()
    child.tell(b"abc")
    assert child.wait(30.0) == 3 and death(3) == "died with exit code 3"
    child.end(0.0)
    hangs = Child([sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
    hangs.end(0.05)
    assert death(hangs.kill()) == "was killed by SIGKILL"


STARTS = f"""
import os, time
from tests.process.test_child import answers, started
child = started([1], b"a")
answers(child, 1)
print(child.pid, flush=True)
os.kill(child.pid, {int(signal.SIGSTOP)})  # it sees no end of its pipe
time.sleep(60)
"""


def test_a_child_that_is_stopped_ends_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert gone(pid)


def test_a_pool_ends_its_children_in_its_own_process_alone():
    pool = ChildPool(lambda output: started([1], b"a", output))
    child = pool.start()
    if (fork := os.fork()) == 0:
        pool.close()
        os._exit(0)
    assert os.waitpid(fork, 0)[1] == 0 and pool.alive
    assert answers(child, 1) == [b"a"]
    pool.close()
    pool.close()
    assert gone(child.pid) and not pool.alive and not pool.children


def test_what_is_to_be_closed_is_closed_once():
    class Owner:
        pass

    owner, closed = Owner(), []
    closing = finalize(owner, closed.append, 1)
    closing()
    closing()
    finalize(owner, closed.append, 2)
    del owner
    assert closed == [1, 2]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [(2, 3, "memory ran out: the kernel"), (2, 2, "not since memory ran out"), (None, 3, "often"), (2, None, "often")],
)
def test_who_was_killed_for_want_of_memory_is_told_so(monkeypatch, before, now, said):
    monkeypatch.setattr("tilth.process.child.oom_kills", lambda: now)
    assert said in how_ended(-signal.SIGKILL, before)
    assert "memory" not in how_ended(-signal.SIGTERM, before) + how_ended(3, before)
