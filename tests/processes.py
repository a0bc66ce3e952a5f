"""The tests in several processes: forks of the one that has imported and collected them all, which it does once.

    python -m pytest --processes 4

A process takes one file after another, so that a module's fixtures are made once; one process alone takes all tests of
Ray, and one those of the pool. They, and files that start other processes, come first, so that none is left to the end.
"""

import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, pairwise
from multiprocessing.connection import Connection, Pipe, wait
from typing import NoReturn

import pytest

from tests import forked, seconds
from tilth.process.program import die_with

GRACE = 10.0
"""Seconds in which an interrupted process may end its fixtures."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, metavar="N", help="run the tests in N forks of this process")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not session.config.option.processes or session.config.option.collectonly or session.testsfailed:
        return None
    Run(session).run()
    return True


def files(items: list[pytest.Item]) -> list[list[int]]:
    """Return the tests, by number, that a process takes at a time, in the order in which they begin."""
    starting = {item.path for item in items if item.get_closest_marker("dist")}

    def place(item: pytest.Item) -> tuple[int, str]:
        if item.get_closest_marker("ray"):
            return 0, ""
        if item.get_closest_marker("dist") and "pool" in item.fixturenames:
            return 1, ""
        return 2 + (item.path not in starting), str(item.path)

    found: dict[tuple[int, str], list[int]] = {}
    for number, item in enumerate(items):
        found.setdefault(place(item), []).append(number)
    return [found[at] for at in sorted(found)]


class Worker:
    """A fork of this process that runs tests: those that it was given and has not begun, and where it is."""

    def __init__(self, session: pytest.Session) -> None:
        self.left, self.at, self.runs = deque[int](), -1, False
        self.pipe, theirs = Pipe()
        folder, parent = session.config._tmp_path_factory.mktemp("process"), os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            die_with(parent)
            self.pipe.close()
            _work(session, theirs, folder)
        theirs.close()
        self.process = os.pidfd_open(self.pid)

    def messages(self) -> Iterator[tuple]:
        with suppress(EOFError, OSError):  # it has ended, perhaps in the midst of a message
            while self.pipe.poll():
                yield self.pipe.recv()

    def end(self) -> int:
        """Return the exit code, negative for a signal, once the process has ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pipe.close()
        os.close(self.process)
        return code


class Run:
    """A session whose tests run in forks of its process."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.workers = session, list[Worker]()
        self.files = deque(files(session.items))

    def run(self) -> None:
        """Raise Failed or Interrupted where the session is to stop early, as by ``-x``."""
        try:
            for _ in range(min(self.session.config.option.processes, len(self.files))):
                self.workers.append(Worker(self.session))
            while self.workers:
                ready = wait([end for worker in self.workers for end in (worker.pipe, worker.process)])
                for worker in list(self.workers):
                    for message in worker.messages():
                        self._take(worker, *message)
                    if worker.process in ready:
                        self._ended(worker)
        finally:
            self._stop()

    def _take(self, worker: Worker, what: str, *told: object) -> None:
        config = self.session.config
        if what == "asks":
            given = self.files.popleft() if self.files else []
            worker.left.extend(given)
            with suppress(BrokenPipeError):  # it has died since
                worker.pipe.send(given)
        elif what == "begins":
            worker.at, worker.runs = worker.left.popleft(), True
        elif what == "warns":
            message, when, nodeid, location = told
            config.hook.pytest_warning_recorded.call_historic(
                kwargs={"warning_message": message, "when": when, "nodeid": nodeid, "location": location}
            )
        else:
            worker.runs = False
            found = [config.hook.pytest_report_from_serializable(config=config, data=data) for data in told[0]]
            self._report(worker.at, found)

    def _report(self, number: int, reports: list[pytest.TestReport]) -> None:
        item, session = self.session.items[number], self.session
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _ended(self, worker: Worker) -> None:
        """Report a process that died as a failure of the test where it was, and go on in another with what is left."""
        self.workers.remove(worker)
        code = worker.end()
        if not (code or worker.runs or worker.left):
            return
        if worker.at < 0:
            raise RuntimeError(f"a process of the tests ended with {code} before its first test")
        item, why = self.session.items[worker.at], f"the process that ran this test ended with {code}"
        if worker.left:
            self.files.appendleft(list(worker.left))
            self.workers.append(Worker(self.session))
        self._report(worker.at, [pytest.TestReport(item.nodeid, item.location, {}, "failed", why, "call")])

    def _stop(self) -> None:
        """Interrupt the processes that have not ended, as Ctrl-C does."""
        for worker in self.workers:
            os.kill(worker.pid, signal.SIGINT)
        until = time.monotonic() + GRACE
        for worker in self.workers:
            if not wait([worker.process], max(0.0, until - time.monotonic())):
                os.kill(worker.pid, signal.SIGKILL)
            worker.end()


class Told:
    """What a process tells of its tests."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config, self.pipe, self.reports = config, pipe, list[dict]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))

    def pytest_warning_recorded(self, warning_message, when, nodeid, location) -> None:
        w = warning_message
        plain = warnings.WarningMessage(str(w.message), w.category, w.filename, w.lineno)
        self.pipe.send(("warns", plain, when, nodeid, location))


def _work(session: pytest.Session, pipe: Connection, folder) -> NoReturn:
    """Run tests in a fork, and end it."""
    code = 1
    try:
        config, told = session.config, Told(session.config, pipe)
        random.seed()
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files, whose positions all forks would share
        capture.start_global_capturing()
        capture.suspend_global_capture()
        config.get_terminal_writer()._file = open(os.devnull, "w")  # reports go to the first process
        config.pluginmanager.register(told)
        config._tmp_path_factory._basetemp = folder
        forked.start()
        seconds.pytest_collection_finish()
        try:
            _run(session, told)
        finally:
            session._setupstate.teardown_exact(None)
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:  # noqa: BLE001 - shown, and the exit code fails the test where it was
        traceback.print_exc()
    forked.leave(code)


def _run(session: pytest.Session, told: Told) -> None:
    def given() -> Iterator[pytest.Item]:
        while True:
            told.pipe.send(("asks",))
            if not (numbers := told.pipe.recv()):
                return
            yield from (session.items[number] for number in numbers)

    for item, following in pairwise(chain(given(), [None])):  # asks ahead: the session's fixtures end with the last one
        told.reports = []
        told.pipe.send(("begins",))
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        told.pipe.send(("ran", told.reports))
        if session.shouldfail or session.shouldstop:
            return
