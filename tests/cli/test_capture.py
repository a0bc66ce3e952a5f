"""``tilth trace capture``: what it asks of a run, what it says meanwhile and at the end, and what cannot be."""

import json
import threading

import pytest
from typer.testing import CliRunner

from tilth.cli import capture
from tilth.cli.main import app
from tilth.config.load import from_dict
from tilth.core.lines import Lines
from tilth.launch import profiling
from tilth.launch.profiling import FOLDER, LOG, REQUEST
from tilth.runs.directory import RunDir


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of two workers that goes on in this process and takes no steps."""
    monkeypatch.setattr(profiling, "PERIOD", 0.01)
    made = from_dict({"run": {"dir": str(tmp_path)}, "cluster": {"backend": "local", "workers": 2}})
    with RunDir.create(made, "demo") as directory:
        yield directory


def call(*arguments):
    return CliRunner().invoke(app, ["trace", "capture", *map(str, arguments)])


def answered(directory, *lines, then=lambda: None):
    """The answers to the next request, given by another thread; what was asked for comes out."""
    asked = {}

    def serve():
        path = directory.path / FOLDER / REQUEST
        while not path.exists():
            threading.Event().wait(0.005)
        asked.update(json.loads(path.read_text()))
        path.unlink()
        for line in lines:
            log = Lines(directory.path / FOLDER / LOG)
            log.append(json.dumps({"id": asked["id"], "errors": {}, **line}))
            log.close()
        then()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return asked, thread


BEGUN = {"state": "capturing", "first": 7, "last": 8}
DONE = {"state": "done", "first": 7, "last": 8, "files": {"0": {"path": "RUN/profiles/a.json.gz", "bytes": 2_500_000}}}


def test_it_asks_waits_and_says_where_the_profiles_are(run):
    asked, thread = answered(run, BEGUN, DONE)
    result = call(run.path, "--steps", 2, "--ranks", "0,1", "--memory")
    thread.join()
    assert {k: v for k, v in asked.items() if k != "id"} == {"steps": 2, "ranks": [0, 1], "memory": True, "attempt": 1}
    assert result.exit_code == 0 and result.stdout.splitlines() == [
        f"asked {run.path} for its next 2 steps; Ctrl-C takes that back",
        "recording steps 7 to 8, which takes longer than without",
        "RUN/profiles/a.json.gz  2.5 MB",
        "they open at https://ui.perfetto.dev, or in chrome://tracing",
    ]


def test_without_options_it_is_three_steps_on_rank_0(run):
    asked, thread = answered(run, BEGUN, DONE)
    assert call(run.path).exit_code == 0
    thread.join()
    assert (asked["steps"], asked["ranks"], asked["memory"]) == (3, [0], False)


def test_ranks_without_a_profile_are_named_beside_the_others(run):
    _, thread = answered(run, {**DONE, "errors": {"1": "OSError: no space"}})
    result = call(run.path, "--steps", 1, "--ranks", "0,1")
    thread.join()
    assert result.exit_code == 0 and "asked" in result.stdout and "its next step;" in result.stdout
    assert "rank 1: nothing: OSError: no space" in result.stdout


def test_json_is_the_one_thing_that_is_printed(run):
    _, thread = answered(run, BEGUN, DONE)
    found = json.loads(call(run.path, "--json").stdout)
    thread.join()
    assert found["state"] == "done" and found["files"] == DONE["files"] and found["errors"] == {}


def test_a_failure_is_one_line_and_exit_code_2(run):
    _, thread = answered(run, {"state": "failed", "error": "RuntimeError: no CUPTI"})
    result = call(run.path)
    thread.join()
    assert (
        result.exit_code == 2 and result.stderr == f"error: {run.path}: nothing was profiled: RuntimeError: no CUPTI\n"
    )


def test_a_run_that_ends_meanwhile_is_named(run):
    _, thread = answered(run, BEGUN, then=lambda: run.end("finished"))
    result = call(run.path)
    thread.join()
    assert result.exit_code == 2 and "has ended before its steps were profiled" in result.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--steps", "0"], "--steps 0: 1 to 100 steps"),
        (["--steps", "101"], "--steps 101: 1 to 100 steps"),
        (["--ranks", "0,2"], "--ranks: there is no rank 2; the workers are ranks 0 to 1"),
        (["--ranks", ""], "--ranks '' is not of the form 0,1"),
        (["--ranks", "0,,1"], "--ranks '0,,1' is not"),
        (["--ranks", "-1"], "--ranks '-1' is not"),
        (["--ranks", "all"], "--ranks 'all' is not"),
    ],
)
def test_what_cannot_be_is_named_at_once_and_not_asked(run, options, told):
    result = call(run.path, *options)
    assert result.exit_code == 2 and told in result.stderr and result.stderr.count("\n") == 1
    assert not (run.path / FOLDER / REQUEST).exists()


def test_a_finished_run_and_what_is_no_run_are_named(run, tmp_path):
    run.end("finished")
    result = call(run.path)
    assert result.exit_code == 2 and "is finished: only steps of an active run" in result.stderr
    result = call(tmp_path / "nothing")
    assert result.exit_code == 2 and "nothing is not a run" in result.stderr


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_takes_back_what_has_not_begun(run, monkeypatch, begun):
    def interrupt(path, request):
        if begun:
            (path / FOLDER / REQUEST).unlink()
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(capture, "follow", interrupt)
    result = call(run.path)
    assert result.exit_code == 130 and not (run.path / FOLDER / REQUEST).exists()
    assert ("it has begun; the profiles will be in" in result.stderr) == begun
