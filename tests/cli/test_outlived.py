"""What becomes of commands whose reader leaves, whose terminal is closed or whose disk is full: real processes."""

import contextlib
import json
import os
import shlex
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.cli.test_whole import ENVIRONMENT, LOST, SMALL, TILTH, tilth
from tests.patience import patience
from tilth.runs.readers import read_metrics

pytestmark = pytest.mark.usefixtures("hangups")


def started(folder, *arguments, **streams):
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.Popen([*TILTH, *arguments], cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, **given)


def run(folder, *more, **streams):
    return started(folder, "run", "addition-grpo", *SMALL, "algorithm.steps=3", "run.name=a", *more, **streams)


def check_finished(folder):
    """The run went its whole way, and its log says once that nobody watched."""
    log = (folder / "runs/a/log.txt").read_text()
    assert json.loads((folder / "runs/a/run.json").read_text())["state"] == "finished"
    assert (folder / "runs/a/metrics.jsonl").read_text().count("\n") == 7
    assert log.count(LOST) == 1 and (folder / "runs/a/report.html").is_file()
    return log


def nobody():
    """The end of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "wb")


@pytest.mark.slow
def test_a_run_goes_on_when_its_reader_leaves(tmp_path):
    with run(tmp_path, stderr=subprocess.STDOUT) as process:
        assert b"runs/a" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    assert "Broken pipe" in check_finished(tmp_path)


@pytest.mark.parametrize(
    "where", [pytest.param("/dev/full", id="full"), pytest.param(None, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.slow
def test_a_run_goes_on_where_nothing_can_be_written_from_the_start(tmp_path, where):
    with open(where, "wb") if where else nobody() as out, run(tmp_path, stdout=out) as process:
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, b"")
    check_finished(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    short = ["supervised.steps=1", "algorithm.steps=1", "run.name=a"]
    code, _, errors = tilth(folder, "run", "addition-grpo", *SMALL, *short)
    assert code == 0, errors
    return folder


PRINTS = [["show", "runs/a", "--json"], ["top", "runs/a", "--once"], ["ckpt", "ls", "runs/a"], ["show", "runs/a"],
          ["trace", "runs/a"], ["layout", "addition-grpo"]]  # fmt: skip
SOME = [pytest.param(words, marks=[pytest.mark.slow] * (number > 0)) for number, words in enumerate(PRINTS)]
"""The others are processes that import torch or read a run's events, and end in the same place."""


@pytest.mark.parametrize("command", SOME, ids=" ".join)
def test_a_command_that_only_prints_ends_as_by_a_broken_pipe(finished, command):
    with nobody() as out, started(finished, *command, stdout=out) as process:
        _, errors = process.communicate(timeout=60)
    assert errors == b"" and process.returncode == 141


@pytest.mark.parametrize("command", SOME, ids=" ".join)
def test_a_reader_of_the_first_line_alone_is_no_error(finished, command):
    line = f"set -o pipefail; {shlex.join([*TILTH, *command])} | head -1"
    ended = subprocess.run(["bash", "-c", line], cwd=finished, env=ENVIRONMENT, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"") and ended.stdout.count(b"\n") == 1


FULL = [["show", "runs/a"], ["--help"]]
FULL += [pytest.param(words, marks=pytest.mark.slow) for words in (["--version"], ["layout", "--help"])]


@pytest.mark.parametrize("command", FULL, ids=" ".join)
def test_a_command_that_only_prints_says_that_the_disk_is_full(finished, command):
    with open("/dev/full", "wb") as out, started(finished, *command, stdout=out) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and b"No space left" in errors and errors.count(b"\n") == 1


def test_versions_that_nobody_reads_end_as_by_a_broken_pipe(tmp_path):
    with nobody() as out, started(tmp_path, "--version", stdout=out) as process:
        _, errors = process.communicate(timeout=60)
    assert errors == b"" and process.returncode == 141


def test_an_error_that_nobody_reads_is_still_an_exit_code(tmp_path):
    with nobody() as out, started(tmp_path, "show", "nowhere", stdout=out, stderr=out) as process:
        assert process.wait(60) == 2
    assert not list(Path(tmp_path).iterdir())


LOCAL = ["cluster.backend=local", "cluster.workers=2", "policy.layout.fsdp=2"]
RAY = [*LOCAL, "cluster.backend=ray"]
WITH_RAY = [pytest.mark.ray, pytest.mark.dist, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not there")]
RARELY = [
    pytest.param([], id="inline"),
    pytest.param(LOCAL, id="local", marks=[pytest.mark.dist, pytest.mark.slow]),
    pytest.param(RAY, id="ray", marks=[*WITH_RAY, pytest.mark.slow]),
]


class Terminal:
    """A terminal whose shell runs one command in the foreground."""

    def __init__(self, folder, *arguments, before="", python=TILTH[:1]):
        self.master, slave = os.openpty()
        self.run = folder / "runs/a"
        # A session's leader that opens a terminal without one of its own gets it as its controlling terminal.
        line = f"exec <>{os.ttyname(slave)} >&0 2>&0; {before} {shlex.join([*python, *TILTH[1:], *arguments])}; true"
        self.shell = subprocess.Popen(["sh", "-c", line], cwd=folder, env=ENVIRONMENT, start_new_session=True)
        os.set_blocking(self.master, False)
        self.shown = b""
        self.pid = 0
        self._until(lambda: self._steps() > 6, 120)
        os.close(slave)  # a terminal that nobody has open yet is one that is closed
        self.pid = json.loads((self.run / "run.json").read_text())["pid"]

    def _steps(self):
        path = self.run / "metrics.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0

    def _until(self, condition, seconds):
        end = time.monotonic() + patience(seconds)
        while not condition():
            with contextlib.suppress(BlockingIOError):
                self.shown += os.read(self.master, 1 << 16) if self.master else b""
            gone = self.pid and not psutil.pid_exists(self.pid)
            assert self.shell.poll() is None or gone or self.pid, self.shown.decode()
            assert time.monotonic() < end, self.shown.decode()
            time.sleep(0.02)

    def close(self):
        os.close(self.master)
        self.master = 0

    def ended(self, seconds=60):
        """The state of the run when its process is gone."""
        self._until(lambda: not psutil.pid_exists(self.pid), seconds)
        self.shell.wait(10)
        return json.loads((self.run / "run.json").read_text())


def saved(run, state):
    """Every committed step is in a checkpoint, and how the run ended is in its log."""
    steps = read_metrics(run)[-1]["step"]
    assert (state["state"], state["saved"]) == ("interrupted", steps), (run / "log.txt").read_text()
    assert (run / f"checkpoints/step-{steps:06d}").is_dir()
    return steps


@pytest.mark.parametrize("backend", RARELY)
def test_a_closed_terminal_ends_a_run_with_everything_saved(tmp_path, backend):
    python = TILTH[:1] if backend else forked.python()  # a supervisor is the parent of what it starts
    command = ["run", "addition-grpo", *SMALL, *backend, "algorithm.steps=2000", "run.name=a"]
    terminal = Terminal(tmp_path, *command, python=python)
    terminal.close()
    assert saved(terminal.run, terminal.ended()) > 6


@pytest.mark.parametrize("backend", RARELY)
@pytest.mark.slow
def test_ctrl_c_at_a_terminal_reaches_the_controller_alone(tmp_path, backend):
    terminal = Terminal(tmp_path, "run", "addition-grpo", *SMALL, *backend, "algorithm.steps=2000", "run.name=a")
    os.write(terminal.master, b"\x03")
    assert saved(terminal.run, terminal.ended()) > 6
    assert b"error" not in terminal.shown


@pytest.mark.parametrize("backend", RARELY)
@pytest.mark.slow
def test_a_run_that_ignores_the_hangup_goes_on_without_its_terminal(tmp_path, backend):
    command = ["run", "addition-grpo", *SMALL, *backend, "algorithm.steps=14", "run.name=a"]
    terminal = Terminal(tmp_path, *command, before="trap '' HUP;")
    terminal.close()
    assert terminal.ended(120)["state"] == "finished"
    assert (terminal.run / "log.txt").read_text().count(LOST) <= 1  # few steps are not drawn at all
    assert len(read_metrics(terminal.run)) == 18
