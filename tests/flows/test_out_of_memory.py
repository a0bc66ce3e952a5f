"""Memory that cannot be had, in real processes: one sentence with role and key, the run goes on afterwards."""

import json
import os
import subprocess
import sys

import pytest

from tests import forked
from tests.errors import raises
from tests.flows import tiny
from tilth.core.errors import OutOfMemory, RecipeError
from tilth.core.memory import Room
from tilth.runs.readers import read_metrics

LIMITED = """
import resource, sys
import tilth.launch.life
from tilth.cli.main import main
from tilth.flows.run import Run
log_update = Run.log_update
def tighten(run, *rest):
    found = log_update(run, *rest)
    if run.state.step == 0:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (now + 10**8, resource.RLIM_INFINITY))
    return found
if sys.argv.pop(1) == "limited":
    Run.log_update = tighten
main()
"""


def tilth(mode, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [*forked.python(), "-c", LIMITED, mode, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_an_allocation_that_fails_is_a_sentence_and_the_run_goes_on(tmp_path):
    """The first step fits; then the process may have little more, and the next one wants tensors of 40 MB each."""
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"prompt": "a", "answer": "b" * (10 if i % 2 else 9)}) for i in range(40))
    )
    keys = [
        "addition-grpo", "flow=sft", f"data.source={tmp_path / 'data.jsonl'}", f"run.dir={tmp_path}", "run.name=it",
        "model.layers=1", "model.context=16", "rollout.max_tokens=4", "data.holdout=0.0", "supervised.steps=2",
        "supervised.until=1.0", "supervised.batch=2400", "run.save_every=1", "train.micro_tokens=100000",
        "train.threads=1",
    ]  # fmt: skip
    failed = tilth("limited", "run", *keys)
    assert failed.returncode == 2 and "Traceback" not in failed.stdout + failed.stderr, failed.stderr
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("error:")]
    assert "role policy" in line and "train.micro_tokens" in line and "MB" in line and "continues in" in line
    state = json.loads((tmp_path / "it" / "run.json").read_text())
    assert state["state"] == "failed"
    smaller = [key if not key.startswith("train.micro") else "train.micro_tokens=2000" for key in keys]
    again = tilth("free", "run", *smaller, "--allow", "train.micro_tokens")
    assert again.returncode == 0, again.stderr
    assert [record["step"] for record in read_metrics(tmp_path / "it")] == [1, 2]


def test_what_can_never_fit_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.launch.build.rooms", lambda recipe: (Room(10**4, 10**4, "this machine"), []))
    with raises(RecipeError, "memory"):
        tiny.run(tiny.recipe(tmp_path))
    assert not list(tmp_path.iterdir())


def test_what_may_not_fit_is_told_at_once_and_stands_in_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr("tilth.launch.build.rooms", lambda recipe: (Room(10**9, 10**5, "this machine"), []))
    watcher = tiny.Recorder()
    made = tiny.recipe(tmp_path, supervised={"steps": 1}, algorithm={"steps": 1})
    result = tiny.run(made, callbacks=[watcher])
    assert watcher.messages[0].startswith("memory may run out")
    assert "memory may run out" in (result.directory / "log.txt").read_text()


@pytest.mark.parametrize("backend", ["inline", "local"])
def test_a_role_that_finds_no_memory_is_named(tmp_path, monkeypatch, backend):
    from tilth.cluster.controller.cluster import open_cluster
    from tilth.core.layout import Mesh

    with open_cluster(backend, 1) as cluster, raises(OutOfMemory, "greedy.take") as caught:
        cluster.group("greedy", "tests.flows.greedy:greedy", {}, Mesh(("dp",), (1,))).take(1 << 60)
    assert caught.value.role == "greedy" and "\n" not in str(caught.value)
