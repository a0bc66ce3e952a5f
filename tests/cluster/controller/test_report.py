"""The report of a call over its limit, from stacks as faulthandler writes them."""

from tilth.cluster.backends.base import Call, Probe
from tilth.cluster.controller.report import FRAMES, overdue

CALL = Call("policy", "update")
MAIN = [f'  File "/x/main.py", line {n} in f{n}' for n in range(FRAMES + 3)]
RECEIVE = """Thread 0x01 (most recent call first):
  File "/py/multiprocessing/connection.py", line 378 in _recv
  File "/x/tilth/cluster/worker/local_worker.py", line 81 in _receive
"""
WRITER = """Thread 0x02 (most recent call first):
  File "/py/threading.py", line 324 in wait
  File "/x/tilth/trace/spans.py", line 300 in _run
"""
IDLE = """Thread 0x03 (most recent call first):
  File "/py/concurrent/futures/thread.py", line 81 in _worker
  File "/py/threading.py", line 1002 in _bootstrap
"""
BUSY = """Thread 0x04 (most recent call first):
  File "/x/reward.py", line 7 in judge
  File "/py/concurrent/futures/thread.py", line 58 in run
  File "/py/concurrent/futures/thread.py", line 83 in _worker
"""
STACK = "\n".join([IDLE, BUSY, WRITER, RECEIVE, "Current thread 0x09 (most recent call first):", *MAIN, ""])


def report(*probes, late=None):
    return str(overdue(late or {1: CALL}, probes, 2.0)).splitlines()


def probe(rank, state="sleeping", phase="", stack=STACK):
    return Probe(rank, 100 + rank, state, phase, stack)


def test_of_the_late_rank_all_threads_that_work_and_of_others_the_end_of_the_main_thread():
    told = report(probe(0), probe(1, phase="policy.update (for 2.0 s)"))
    assert told[:2] == [
        "role policy, rank 1, update: no answer within 2 s (cluster.timeout)",
        "  rank 1 (process 101, sleeping): in policy.update (for 2.0 s)",
    ]
    cut = told.index("  rank 0 (process 100, sleeping): between calls")
    assert told[2:cut] == [f"    {line}" for line in [*MAIN, "another thread:", *BUSY.splitlines()[1:]]]
    assert told[cut + 1 :] == [f"    {line}" for line in [*MAIN[:FRAMES], "  ... and 3 frames that called these"]]


def test_stopped_ranks_come_first_and_say_how_they_go_on():
    told = report(probe(0), probe(1, phase="policy.update (for 2.0 s)"), probe(2, "stopped", stack=""))
    assert [line for line in told if line.startswith("  rank")] == [
        "  rank 2 (process 102, stopped): stopped by a signal; kill -CONT 102 lets it go on",
        "  rank 1 (process 101, sleeping): in policy.update (for 2.0 s)",
        "  rank 0 (process 100, sleeping): between calls",
    ]


def test_a_late_rank_that_is_elsewhere_has_not_begun():
    assert report(probe(1))[1].endswith("sleeping): has not begun policy.update")
    elsewhere = "policy.update_more (for 2.0 s)"
    assert report(probe(1, phase=elsewhere))[1].endswith(f"in {elsewhere}; has not begun policy.update")
    create = Call("", "create", ("policy", "m:f"))
    assert report(probe(1), late={1: create})[1].endswith(": has not begun create policy")


def test_of_a_rank_that_imports_the_files_that_import_are_shown():
    frozen = [f'  File "<frozen importlib._bootstrap{end}>", line 9 in _load' for end in ("_external", "", "")]
    files = [f'  File "/py/torch/{name}.py", line 1 in <module>' for name in "cba"]
    frames = [line for file in files for line in (*frozen, file)]
    stack = "\n".join([RECEIVE, "Current thread 0x09 (most recent call first):", *frames, "  ...", ""])
    told = report(probe(0, stack=stack), probe(1, phase="import policy (for 2.0 s)", stack=stack))
    assert told[1].endswith("in import policy (for 2.0 s); has not begun policy.update; still importing modules")
    shown = [f"    {line}" for line in [*files, "  ..."]]
    assert told[2:6] == shown and told[7:] == shown
    assert "importing" not in report(probe(1))[1]


def test_of_a_call_that_may_take_longer_its_own_limit_is_told():
    create, imports = (Call("", name, ("policy", "m"), least=least) for name, least in (("create", 0), ("import", 9.0)))
    assert report(probe(1), late={1: imports})[0] == "role policy, rank 1, import: no answer within 9 s"
    assert report(probe(1), late={1: create})[0].endswith("no answer within 2 s (cluster.timeout)")


def test_what_is_no_stack_is_shown_as_it_is():
    for rank in (0, 1):
        told = report(probe(rank, "gone", stack="machine 10.0.0.2 does not answer"))
        assert told[-1] == "    machine 10.0.0.2 does not answer"


def test_calls_that_end_while_the_report_is_made_leave_an_error():
    assert overdue({}, [], 5.0).key == "cluster.timeout"
