"""What becomes of commands whose reader leaves, whose terminal is closed or whose disk is full: real processes."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_whole import ENVIRONMENT, SMALL, TILTH

LOST = "nobody reads"


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


def test_a_run_goes_on_when_its_reader_leaves(tmp_path):
    with run(tmp_path, stderr=subprocess.STDOUT) as process:
        assert b"runs/a" in process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 0
    assert "Broken pipe" in check_finished(tmp_path)


@pytest.mark.parametrize("where", [pytest.param("/dev/full", id="full"), None], ids=str)
def test_a_run_goes_on_where_nothing_can_be_written_from_the_start(tmp_path, where):
    with open(where, "wb") if where else nobody() as out, run(tmp_path, stdout=out) as process:
        _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, b"")
    check_finished(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    with run(folder) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0 and LOST not in (folder / "runs/a/log.txt").read_text(), errors
    return folder


PRINTS = [["show", "runs/a"], ["show", "runs/a", "--json"], ["ckpt", "ls", "runs/a"], ["trace", "runs/a"],
          ["top", "runs/a", "--once"], ["layout", "addition-grpo"]]  # fmt: skip


@pytest.mark.parametrize("command", PRINTS, ids=" ".join)
def test_a_command_that_only_prints_ends_as_by_a_broken_pipe(finished, command):
    with nobody() as out, started(finished, *command, stdout=out) as process:
        _, errors = process.communicate(timeout=60)
    assert errors == b"" and process.returncode == 141


def test_a_command_that_only_prints_says_that_the_disk_is_full(finished):
    with open("/dev/full", "wb") as out, started(finished, "show", "runs/a", stdout=out) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and b"No space left" in errors and errors.count(b"\n") == 1


def test_an_error_that_nobody_reads_is_still_an_exit_code(tmp_path):
    with nobody() as out, started(tmp_path, "show", "nowhere", stdout=out, stderr=out) as process:
        assert process.wait(60) == 2
    assert not list(Path(tmp_path).iterdir())
