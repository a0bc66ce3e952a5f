"""SIGKILL at any moment, the same command again: the same run, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from tests.errors import raises
from tests.flows import tiny
from tests.flows.killed import POINTS
from tests.flows.test_resume_exact import benchmark
from tilth.runs.readers import read_state
from tilth.runs.signals import Interrupted

ROOT = Path(__file__).parents[2]


def child(folder, point="none", call=0, flow="grpo"):
    command = [*forked.python(), "-m", "tests.flows.killed", str(folder), point, str(call), flow]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def finish(process):
    _, said = process.communicate(timeout=120)
    return process.returncode, said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The uninterrupted run."""
    return tiny.run(tiny.recipe(tmp_path_factory.mktemp("whole"))).directory


def assert_same_run(folder, whole):
    (directory,) = [p for p in folder.iterdir() if (p / "run.json").exists()]
    assert benchmark().differences(directory, whole) == []


def kill_and_resume(folder, point, call, flow="grpo"):
    code, said = finish(child(folder, point, call, flow))
    assert code == -signal.SIGKILL, f"{point} {call} was never reached: {said}"
    code, said = finish(child(folder, flow=flow))
    assert code == 0, said


AIMS = [(2, "training"), (4, "saving"), (8, "generating")]


@pytest.mark.slow
def test_killed_from_outside_and_resumed_each_time(tmp_path, whole):
    """In the middle of an update, of a save and of a generation, wherever the process happens to be in it."""
    tools = benchmark()
    work = ["-m", "tests.flows.killed", str(tmp_path), "none", "0"]
    for step, aim in AIMS:
        _, phase = tools.kill(tools.Child(tmp_path, [sys.executable, *work], "tiny-001"), tools.Moment(step, 0.0, aim))
        assert aim in phase, f"it ended before it was killed while {aim}"
        assert read_state(tmp_path / "tiny-001")["state"] == "interrupted"
    tools.Child(tmp_path, [*forked.python(), *work], "tiny-001").end()
    assert len(read_state(tmp_path / "tiny-001")["attempts"]) == len(AIMS) + 1
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize("point", sorted(POINTS.keys() - {"critic"}))  # its flow has rows of its own, below
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_killed_at_every_point_before_and_after_the_work(tmp_path, whole, point, call):
    kill_and_resume(tmp_path, point, call)
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_killed_at_twenty_random_moments_one_after_another(tmp_path, whole):
    """Each attempt lives a little and dies; the last one is let through."""
    dice = random.Random(0)
    for _ in range(20):
        process = child(tmp_path)
        time.sleep(2.0 + dice.random() * 3.0)
        process.kill()
        process.communicate()
    code, said = finish(child(tmp_path))
    if code == 0 and len(list(tmp_path.iterdir())) > 1:
        pytest.skip("an attempt finished before its kill: the machine is too quick for these moments")
    assert code == 0, said
    assert_same_run(tmp_path, whole)


@pytest.mark.slow
def test_episodes_killed_at_ten_random_moments(tmp_path):
    """Each attempt dies in the middle of a step's episodes; what environments had said is not asked again."""
    code, said = finish(child(tmp_path / "whole", flow="episodes"))
    assert code == 0, said
    dice = random.Random(1)
    for _ in range(10):
        code, said = finish(child(tmp_path / "killed", "generating", dice.randint(5, 40), "episodes"))
        assert code == -signal.SIGKILL, said
    code, said = finish(child(tmp_path / "killed", flow="episodes"))
    assert code == 0, said
    assert_same_run(tmp_path / "killed", tmp_path / "whole" / "tiny-001")


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["sft", "pretrain"])
def test_a_supervised_flow_that_was_killed_goes_on_bit_for_bit(tmp_path, flow):
    code, said = finish(child(tmp_path / "whole", flow=flow))
    assert code == 0, said
    kill_and_resume(tmp_path / "killed", "training", 6, flow)
    assert_same_run(tmp_path / "killed", tmp_path / "whole" / f"{flow}-001")


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["sft", "scored", "pretrain"])
@pytest.mark.parametrize("point", ["training", "writing", "renaming", "flushing", "committing"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_supervised_flow_killed_at_every_point(tmp_path, flow, point, call):
    code, said = finish(child(tmp_path / "whole", flow=flow))
    assert code == 0, said
    kill_and_resume(tmp_path / "killed", point, call, flow)
    (whole,) = (tmp_path / "whole").glob("*-001")
    assert_same_run(tmp_path / "killed", whole)


@pytest.mark.slow
def test_a_forgotten_optimizer_would_be_seen(tmp_path, whole, monkeypatch):
    """The comparison above can fail: resume with fresh optimizer state and the weights differ."""
    import tilth.launch.life as launch

    assert finish(child(tmp_path, "training", 11))[0] == -signal.SIGKILL

    def forgets(checkpoint, roles, directory):
        checkpoint.restore("model", tiny.worker(roles.policy).engine.sharded.parameters)

    monkeypatch.setattr(launch, "_load", forgets)
    result = tiny.run(tiny.recipe(tmp_path))
    assert tiny.weights(result.directory) != tiny.weights(whole)


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGTERM))]
)
@pytest.mark.usefixtures("hangups")
def test_a_signal_saves_says_how_to_go_on_and_the_run_continues(tmp_path, whole, number):
    def interrupt(record):
        if record["step"] == 5:
            os.kill(os.getpid(), number)

    watcher = tiny.Recorder(at_step=interrupt)
    with raises(Interrupted, "stop"):
        tiny.run(tiny.recipe(tmp_path), callbacks=[watcher])
    (directory,) = tmp_path.iterdir()
    assert read_state(directory)["state"] == "interrupted"
    stopped = watcher.records[-1]["step"]
    assert stopped in (5, 6) and (directory / "checkpoints" / f"step-{stopped:06d}").is_dir()
    again = tiny.Recorder()
    tiny.run(tiny.recipe(tmp_path), callbacks=[again])
    assert again.records[0]["step"] == stopped + 1
    assert any("continu" in m for m in again.messages)
    assert_same_run(tmp_path, whole)


def test_signal_handlers_are_given_back(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    tiny.run(tiny.recipe(tmp_path, algorithm={"steps": 1}, supervised={"steps": 1}))
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_hangup_that_is_ignored_changes_nothing(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        watcher = tiny.Recorder(at_step=lambda record: signal.raise_signal(signal.SIGHUP))
        tiny.run(tiny.recipe(tmp_path, algorithm={"steps": 1}, supervised={"steps": 1}), callbacks=[watcher])
        assert len(watcher.records) == 2 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_run_that_was_killed_is_told_when_it_goes_on(tmp_path):
    code, _ = finish(child(tmp_path, "training", "9"))
    assert code == -signal.SIGKILL
    watcher = tiny.Recorder()
    result = tiny.run(tiny.recipe(tmp_path), callbacks=[watcher])
    assert sum("attempt 1 ended without a word after step " in text for text in watcher.messages) == 1
    log = (result.directory / "log.txt").read_text()
    assert log.count("ended without a word") == 1 and log.rstrip().endswith("attempt 2 finished after step 12")
