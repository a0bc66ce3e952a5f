"""The supervisor of a controller: real commands whose controller, or who themselves, are killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.cli.test_whole import ENVIRONMENT, TILTH
from tests.errors import raises
from tests.flows import tiny
from tests.launch.test_survive import assert_same_run
from tests.patience import patience
from tilth.config.load import load_recipe
from tilth.core.errors import WorkerLost
from tilth.launch import supervisor
from tilth.launch.supervisor import BEAT, PULSE, TICK, Death, Inherited, PulseWatch, Supervisor
from tilth.runs.directory import RECOVERIES, note_failed
from tilth.runs.readers import read_metrics, read_recoveries, read_state, summarise
from tilth.ui.result import RunResult

PLUGIN = str(Path(__file__).with_name("supervised.py"))
RECIPE = [
    *("model.hidden=16", "model.layers=1", "model.heads=2", "model.ffn=32", "data.digits=1", "supervised.steps=2"),
    *("supervised.batch=16", "rollout.prompts=4", "rollout.group=4", "rollout.max_tokens=4", "algorithm.steps=6"),
    *("run.eval_prompts=8", "run.eval_every=0", "run.save_every=100", "train.threads=1", "algorithm.drop_flat=false"),
    *("cluster.backend=local", "cluster.workers=2", "policy.layout.fsdp=2", "run.name=a", f'plugins=["{PLUGIN}"]'),
]

THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
"""Starts a thread in each process before it blocks signals, as libraries do."""


def start(folder, *more, deaths=""):
    (folder / "deaths").write_text(deaths)
    arguments = [*TILTH, "run", "addition-grpo", *RECIPE, *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        arguments, cwd=folder, env={**ENVIRONMENT, "DEATHS": str(folder / "deaths")}, start_new_session=True, **pipes
    )


def supervisor_in(folder, restarts=8, note=lambda run, record: None):
    """A supervisor with its folder of the handover, and no process."""
    one = Supervisor(restarts, 120.0, note)
    one._scratch = folder
    one._requested = time.monotonic()
    return one


def recoveries(folder):
    return [json.loads(line) for line in (folder / "runs/a" / RECOVERIES).read_text().splitlines()]


def assert_undisturbed(folder, monkeypatch):
    """The run in the folder is that of a controller that nobody kills."""
    plain = folder / "plain"
    plain.mkdir()
    monkeypatch.chdir(plain)
    monkeypatch.setenv("DEATHS", str(plain / "deaths"))
    undisturbed = tiny.run_recipe(load_recipe("addition-grpo", RECIPE), name="addition-grpo")
    assert_same_run(RunResult(folder / "runs/a", {}), undisturbed)


def wait_for_step(folder, process, step):
    until = time.monotonic() + patience(60)
    while not any(record["step"] >= step for record in read_metrics(folder / "runs/a")):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.05)


def assert_nothing_left(folder, processes):
    psutil.wait_procs(processes, timeout=patience(10))
    assert not [one for one in processes if one.is_running()]
    until, scratch = time.monotonic() + patience(10), Path((folder / "scratch").read_text())
    while scratch.parent.exists():
        assert time.monotonic() < until, list(scratch.rglob("*"))
        time.sleep(0.05)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("thread", "deaths", "server"),
    [
        (THREAD, [7], ""),
        pytest.param(THREAD, [4, 7], "2:server ", marks=pytest.mark.slow),
        pytest.param("", [4, 7], "", marks=pytest.mark.slow),
    ],
    ids=["thread", "twice, and the server", "no thread"],
)
def test_a_killed_controller_is_started_again_and_goes_on_from_memory_with_the_same_bits(
    tmp_path, monkeypatch, thread, deaths, server
):
    """thread: takes the fork server's signals too; when the server ends, nobody waits for its signal. server: the fork
    server is killed long before the controller."""
    (tmp_path / "sitecustomize.py").write_text(thread)
    paths = os.pathsep.join(filter(None, [str(tmp_path), ENVIRONMENT.get("PYTHONPATH", "")]))
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", paths)
    with start(tmp_path, deaths=server + " ".join(map(str, deaths))) as process:
        _, errors = process.communicate(timeout=patience(120))
        assert process.returncode == 0, errors
    assert_nothing_left(tmp_path, [])
    found = recoveries(tmp_path)
    assert [(one["kind"], one["step"]) for one in found] == [("controller", step) for step in deaths]
    assert all(one["seconds"] > 0 and "SIGKILL" in one["evidence"] for one in found)
    assert errors.count("another one goes on") == len(deaths)
    assert errors.count("another one is started") == bool(server)
    log = (tmp_path / "runs/a/log.txt").read_text()
    assert log.count("from memory") == len(deaths)  # there is no checkpoint on disk
    attempts = read_state(tmp_path / "runs/a")["attempts"]
    assert [one["state"] for one in attempts] == [*["recovered"] * len(deaths), "finished"]
    assert [one["from_step"] for one in attempts] == [0, *(n - 1 for n in deaths)]  # it dies before its step's snapshot
    assert [one["kind"] for one in summarise(tmp_path / "runs/a")["recoveries"]] == ["controller"] * len(deaths)

    assert_undisturbed(tmp_path, monkeypatch)


@pytest.mark.dist
@pytest.mark.slow
def test_a_controller_that_dies_twice_after_one_step_ends_the_run(tmp_path):
    with start(tmp_path, deaths="3 3") as process:
        _, errors = process.communicate(timeout=patience(120))
    assert process.returncode == 2 and "it has happened 2 times at this step" in errors
    assert [(one["step"], one["action"]) for one in recoveries(tmp_path)] == [(3, "replace"), (3, "stop")]
    assert_nothing_left(tmp_path, [])
    with start(tmp_path) as process:  # the same command goes on
        _, errors = process.communicate(timeout=patience(120))
    assert process.returncode == 0, errors


@pytest.mark.dist
@pytest.mark.slow
def test_workers_that_die_while_controllers_begin_do_not_end_the_run(tmp_path, monkeypatch):
    """One at the first start, another while the run recovers from the death of its controller and fork server."""
    (tmp_path / "doomed").touch()
    with start(tmp_path, deaths="4:all") as process:
        _, errors = process.communicate(timeout=patience(240))
    assert process.returncode == 0, errors
    found = [(one["step"], one["action"], "could not begin" in one["evidence"]) for one in recoveries(tmp_path)]
    assert found == [(0, "replace", True), (4, "replace", False), (4, "replace", True)]
    assert "\nerror" not in errors and errors.count("another one goes on") == 3
    assert_nothing_left(tmp_path, [])
    assert_undisturbed(tmp_path, monkeypatch)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_is_left_of_a_supervisor_that_is_killed(tmp_path, stopped):
    with start(tmp_path, "algorithm.steps=500") as process:
        wait_for_step(tmp_path, process, 3)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 5  # fork server, controller, its reaper, two workers
        if stopped:
            os.kill(read_state(tmp_path / "runs/a")["pid"], signal.SIGSTOP)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert_nothing_left(tmp_path, family)
    assert read_state(tmp_path / "runs/a")["state"] == "interrupted"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_run_with_everything_saved(tmp_path, number):
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("these tests ignore it, as under nohup, and so does what they start")
    with start(tmp_path, "algorithm.steps=500") as process:
        wait_for_step(tmp_path, process, 3)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        _, errors = process.communicate(timeout=patience(60))
        assert process.returncode == 130 and "everything is saved" in errors
        assert_nothing_left(tmp_path, family)


@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_controller_of_workers_on_ray_goes_on_from_memory_with_the_same_bits(tmp_path, monkeypatch):
    with start(tmp_path, "cluster.backend=ray", deaths="4") as process:
        _, errors = process.communicate(timeout=patience(240))
    assert process.returncode == 0, errors
    (found,) = recoveries(tmp_path)
    assert (found["kind"], found["step"]) == ("controller", 4)
    assert (tmp_path / "runs/a/log.txt").read_text().count("from memory") == 1
    assert_undisturbed(tmp_path, monkeypatch)


@pytest.mark.dist
@pytest.mark.slow
def test_a_controller_that_is_stopped_is_replaced(tmp_path):
    with start(tmp_path, "guard.hang_after=1", deaths="4:stop") as process:
        _, errors = process.communicate(timeout=patience(120))
    assert process.returncode == 0, errors
    (found,) = recoveries(tmp_path)
    assert (found["kind"], found["step"]) == ("controller", 4) and "a signal has stopped it" in found["evidence"]
    assert_nothing_left(tmp_path, [])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(
    ("deaths", "code", "said"), [("end", 0, "had finished"), ("4:asked", 137, "SIGTERM had asked")]
)
def test_a_controller_whose_run_is_at_its_end_is_not_started_again(tmp_path, deaths, code, said):
    with start(tmp_path, deaths=deaths) as process:
        _, errors = process.communicate(timeout=patience(120))
    assert process.returncode == code and said in errors and "another one" not in errors
    assert_nothing_left(tmp_path, [])


@pytest.mark.parametrize(
    ("state", "asked", "code"), [("finished", "", 0), ("running", "SIGTERM", 137), ("running", "", None)]
)
def test_what_ends_a_run_is_no_death_of_its_controller(tmp_path, state, asked, code):
    one, handed = supervisor_in(tmp_path), Inherited(str(tmp_path))
    handed.enter(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"state": state}))
    if asked:
        handed.ask(signal.Signals[asked])
    assert one._ended(-signal.SIGKILL) == code


@pytest.fixture
def standstill(tmp_path):
    """A process that beats, and what watches it."""
    program = "import sys; from tilth.launch.supervisor import Inherited; Inherited(sys.argv[1]).beat(); input()"
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, env=around) as child:
        until = time.monotonic() + patience(30)
        while not (tmp_path / PULSE).exists() or not (tmp_path / PULSE).read_bytes():
            assert time.monotonic() < until
            time.sleep(0.05)
        yield child, PulseWatch(tmp_path / PULSE, psutil.Process(child.pid))
        child.kill()


def test_only_a_controller_that_stands_still_is_taken_to_hang(standstill, monkeypatch):
    child, watch = standstill
    watch.look()
    time.sleep(3 * BEAT)
    watch.look()
    assert watch.seconds == 0.0  # it waits for input, as in a debugger
    child.send_signal(signal.SIGSTOP)
    while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    watch.look()
    watch.look()
    now = time.monotonic()
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now + 3600.0)  # the machine slept
    before = watch.seconds
    watch.look()
    assert before < watch.seconds <= before + 2 * TICK and "stopped" in watch.evidence()
    monkeypatch.undo()
    child.send_signal(signal.SIGCONT)
    until = time.monotonic() + patience(10)
    while watch.seconds:
        assert time.monotonic() < until
        time.sleep(BEAT)
        watch.look()


class Server:
    """A fork server that does what a test lets it do; it has ended."""

    def __init__(self):
        self.socket, self.theirs = socket.socketpair()
        self.process = SimpleNamespace(pid=os.getpid(), returncode=-signal.SIGKILL, kill=lambda: None)

    def ending(self):
        return "it has ended"


def test_a_fork_server_that_ends_with_a_request_unread_is_asked_again_as_another(tmp_path, monkeypatch):
    one, made = supervisor_in(tmp_path), []
    one._server = Server()
    monkeypatch.setattr(one, "_serve", lambda: made.append(Server()) or made[-1])

    def wait():
        if made:
            made[-1].theirs.sendall(b'{"controller": 4321}\n')
        else:
            one._server.theirs.close()  # what it was sent is lost
        one._hear()
        return 0

    monkeypatch.setattr(one, "_wait", wait)
    assert one._control(Inherited(str(tmp_path))) == (0, "")
    assert len(made) == 1 and one._child == 4321
    one._child = 0
    monkeypatch.setattr(one, "_wait", lambda: one._server.theirs.close() or one._hear())
    with raises(WorkerLost, "launch.supervisor"):  # two in a row are no chance
        one._control(Inherited(str(tmp_path)))
    assert len(made) == 2


def test_a_fork_server_that_has_made_a_controller_is_replaced_when_it_ends_and_no_other(tmp_path, monkeypatch):
    one, made = supervisor_in(tmp_path), []
    one._server = one._served = Server()
    one._child = 4321
    monkeypatch.setattr(one, "_serve", lambda: made.append(Server()) or made[-1])
    monkeypatch.setattr(supervisor.os, "waitpid", lambda *_: (0, 0))
    for _ in range(3):
        assert one._reap() is None
    assert made == [one._server]


def test_a_fork_server_that_makes_no_controller_is_killed(tmp_path, monkeypatch):
    one, killed = supervisor_in(tmp_path), []
    one._server = Server()
    monkeypatch.setattr(one._server.process, "kill", lambda: killed.append(True))
    one._look()
    assert not killed
    one._requested -= patience(supervisor.START)
    one._look()
    assert killed


def test_a_worker_that_is_lost_while_a_controller_begins_is_a_death_of_its_own(tmp_path):
    noted, handed = [], Inherited(str(tmp_path))
    one = supervisor_in(tmp_path, note=lambda run, record: noted.append((run, record)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 4}\n')
    handed.enter(tmp_path)
    handed.begin()
    assert not handed.fall(WorkerLost("of a run that goes on", key="policy.update"))
    first = one._after(-signal.SIGKILL).death
    (tmp_path / supervisor.BEGUN).unlink()
    assert handed.fall(WorkerLost("rank 1 was killed\nthe same command continues", key="policy.import"))
    second = one._after(1).death
    noted_by = time.monotonic()
    assert "rank 1 was killed" in second.evidence and "command" not in second.evidence
    assert (second.step, second.lost) == (4, 0.0)  # what was lost since the commit is counted once
    ((run, record),) = noted
    assert run == str(tmp_path) and record["evidence"] == first.evidence and record["action"] == "replace"
    assert second.at - first.at - 0.001 <= record["seconds"] <= noted_by - first.at + 0.001  # it is rounded
    with raises(WorkerLost, "guard.controller"):
        one._after(1)
    assert [record["action"] for _, record in noted] == ["replace", "replace", "stop"]
    assert summarised(tmp_path, noted) == [("controller", 4)] * 3
    handed.ask(signal.SIGTERM)
    assert not handed.fall(WorkerLost("somebody has asked it to end", key="policy.import"))


def summarised(folder, noted):
    """What readers find of failed recoveries that were noted."""
    (folder / "run.json").write_text('{"state": "interrupted", "digest": "", "attempt": 7}')
    for run, record in noted:
        note_failed(Path(run), record)
    assert {one["attempt"] for one in read_recoveries(folder)} == {7}
    return [(one["kind"], one["step"]) for one in summarise(folder)["recoveries"]]


@pytest.mark.parametrize("tail", [b'\x00\xffgarbage{"step":\n', b"[1]\n{}\n", b"[" * 100_000 + b"\n", b'{"step": 3'])
def test_the_last_line_that_is_a_record_counts_whatever_follows_it(tmp_path, tail):
    one = supervisor_in(tmp_path)
    Inherited(str(tmp_path)).enter(tmp_path)
    (tmp_path / "run.json").write_bytes(tail)
    assert one._ended(-signal.SIGKILL) is None
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    assert one._after(-signal.SIGKILL).death.step == 2
    (tmp_path / "metrics.jsonl").write_bytes(tail)
    assert one._after(-signal.SIGKILL).death.step == 0


def test_a_wall_clock_that_jumps_loses_no_time(tmp_path):
    one, handed = supervisor_in(tmp_path), Inherited(str(tmp_path))
    handed.enter(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    handed.begin()
    for step, jump in enumerate((-7200, 7200), 1):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": {step}}}\n')
        os.utime(tmp_path / "metrics.jsonl", (time.time() + jump,) * 2)
        assert 0.0 <= one._after(-signal.SIGKILL).death.lost < 60.0


@pytest.mark.slow
def test_a_mistake_in_the_recipe_is_told_as_ever(tmp_path):
    with start(tmp_path, "policy.layout.fsdp=3") as process:
        _, errors = process.communicate(timeout=patience(60))
    assert process.returncode == 2 and "policy.layout" in errors and errors.count("error") == 1


def test_two_deaths_after_one_step_are_hopeless(tmp_path, monkeypatch):
    one, handed = supervisor_in(tmp_path), Inherited(str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    handed.enter(tmp_path)
    again = one._after(-signal.SIGKILL)
    assert (again.run, again.death.step) == (str(tmp_path), 2) and again.death.lost >= 0
    assert Inherited.of(json.loads(json.dumps(asdict(again)))) == again
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    assert one._after(-signal.SIGSEGV).death.step == 3
    with raises(WorkerLost, "guard.controller"):
        one._after(-signal.SIGSEGV)


def test_more_deaths_than_restarts_end_the_run(tmp_path):
    one = supervisor_in(tmp_path, restarts=1)
    Inherited(str(tmp_path)).enter(tmp_path)
    before, death = time.monotonic(), one._after(-signal.SIGKILL).death
    assert death == Death(death.at, 0, 0.0, *_words()) and before <= death.at <= time.monotonic()
    (tmp_path / "metrics.jsonl").write_text('{"step": 9}\n')
    with raises(WorkerLost, "guard.controller"):
        one._after(-signal.SIGKILL)


def _words():
    return (f"the controller {supervisor.how_ended(-signal.SIGKILL, supervisor.oom_kills())}",)
