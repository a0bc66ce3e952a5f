"""Faults of drills: who may ask for them, where they strike, and that nothing of them stays."""

import json
import math
import os
import threading
from types import SimpleNamespace

import psutil
import pytest
import torch
from tilth_studies import drill as inject
from tilth_studies import strike
from typer.testing import CliRunner

from tests.errors import raises
from tests.flows import tiny
from tilth.cli.main import app
from tilth.cluster.backends.probe import StatusBoard
from tilth.cluster.backends.session_dir import SessionDir
from tilth.cluster.backends.store import FolderStore
from tilth.core.errors import DataError, WorkerLost
from tilth.flows.callbacks import Callback
from tilth.parallel.dims import ParallelDims
from tilth.roles.state import Learner
from tilth.runs.directory import RECOVERIES, RunDir
from tilth.trace.spans import span


@pytest.fixture
def session():
    made = SessionDir.create()
    StatusBoard.create(made.board, 2).close()
    yield made
    made.remove()


@pytest.fixture
def executor(session):
    """What a fault sees of a worker that trains four weights."""
    learner = Learner.__new__(Learner)
    parameters = dict(torch.nn.Linear(2, 2, bias=False).named_parameters())
    learner.engine = SimpleNamespace(optimizers=SimpleNamespace(parameters=parameters))
    return SimpleNamespace(rank=1, store=FolderStore(session.payload, "1"), roles={"policy": learner})


def weight(executor):
    return executor.roles["policy"].engine.optimizers.parameters["weight"].detach().flatten()


def test_a_fault_strikes_once_at_the_begin_of_its_operation_and_leaves_the_spans_as_they_were(session, executor):
    plain = span.__enter__
    strike.strike(executor, "exception", "optimizer", session.key.hex())
    with span("call"), span("forward"):
        assert span.__enter__ is not plain
    outer = span("call")
    with pytest.raises(strike.InjectedFault), outer, span("optimizer"):
        raise AssertionError("the block has begun")
    assert span.__enter__ is plain and outer.duration >= 0
    with span("optimizer"):
        pass


def test_a_fault_may_wait_for_a_call_by_its_name(session, executor):
    strike.strike(executor, "exception", "policy.save", session.key.hex())
    with span("call", detail="policy.load"):
        pass
    with pytest.raises(strike.InjectedFault), span("call", detail="policy.save"):
        pass


@pytest.mark.parametrize("at", ["nowhere.call", "policy.call"])
def test_a_call_that_no_role_of_the_worker_answers_is_refused(session, executor, at):
    plain = span.__enter__
    with raises(DataError, "--at.call") as told:
        strike.strike(executor, "kill", at, session.key.hex())
    assert "policy.save" in str(told.value) and span.__enter__ is plain


def test_weights_become_nan_or_differ_in_one_bit(session, executor):
    before, values = weight(executor).clone(), []
    for kind in ("flip", "flip", "nan"):
        strike.strike(executor, kind, "call", session.key.hex())
        with span("call"):
            pass
        values.append(float(weight(executor)[0]))
    assert math.isfinite(values[0]) and values[:2] != [values[1]] * 2 and values[1] == before[0]
    assert math.isnan(weight(executor)[0]) and torch.equal(weight(executor)[1:], before[1:])


def test_gradients_become_nan_or_differ_in_one_bit_where_there_are_some(session, executor):
    (parameter,) = executor.roles["policy"].engine.optimizers.parameters.values()
    with raises(DataError, "--at"), span("call"):
        strike.strike(executor, "nan-gradient", "optimizer", session.key.hex())
        with span("optimizer"):
            pass
    parameter.grad = torch.ones(2, 2)
    for kind, first in (("flip-gradient", 1.5), ("nan-gradient", float("nan"))):
        strike.strike(executor, kind, "optimizer", session.key.hex())
        with span("optimizer"):
            pass
        assert str(parameter.grad.flatten().tolist()) == str([first, 1.0, 1.0, 1.0])


def test_a_slow_rank_stays_slow_and_a_clock_jumps(session, executor, monkeypatch):
    plain, slept = span.__enter__, []
    monkeypatch.setattr(span, "__enter__", plain)
    monkeypatch.setattr(strike.time, "time", strike.time.time)
    monkeypatch.setattr(strike.time, "sleep", slept.append)
    for kind in ("slow", "pause", "clock"):
        before = strike.time.time()
        strike.strike(executor, kind, "call", session.key.hex())
        with span("call"):
            pass
    for op in ("forward", "backward", "forward"):
        with span(op):
            pass
    assert slept == [inject.PAUSE, strike.SLOWER, strike.SLOWER]
    assert strike.HOUR <= strike.time.time() - before


def test_a_collective_alone_needs_ranks_with_other_rows(session, executor):
    executor.roles["policy"].grid = ParallelDims.alone()
    strike.strike(executor, "collective", "call", session.key.hex())
    with raises(DataError, "--rank"), span("call"):
        pass


def test_a_worker_refuses_a_fault_without_its_key(session, executor):
    plain = span.__enter__
    for key in ("", "00" * 32):
        with raises(DataError, "key"):
            strike.strike(executor, "kill", "call", key)
    executor.store = object()  # of a backend without a session directory
    with raises(DataError, "key"):
        strike.strike(executor, "kill", "call", session.key.hex())
    assert span.__enter__ is plain


def test_what_cannot_be_injected_is_refused(session):
    with raises(DataError, "KIND"):
        inject.inject(session, "meteor", 0)
    for rank in (-1, 2):
        with raises(DataError, "--rank"):
            inject.inject(session, "kill", rank)
    with raises(DataError, "--at"):
        inject.inject(session, "kill", 0, at="optimiser")
    with raises(WorkerLost, "guard.inject"):
        inject.inject(session, "kill", 0)
    assert inject.session_of(os.getpid()).path == session.path
    with raises(DataError, "run.json.pid"):
        inject.session_of(1 << 30)


def test_a_role_that_trains_nothing_has_no_weight_to_change(session, executor):
    executor.roles = {"reward": object()}
    strike.strike(executor, "nan", "call", session.key.hex())
    with raises(DataError, "--rank"), span("call"):
        pass


def command(*words):
    return CliRunner().invoke(app, ["guard", "inject", *map(str, words)])


def test_the_command_refuses_runs_that_are_not_active(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil.Process, "open_files", lambda self: [])  # no other test's cluster
    made = tiny.recipe(tmp_path)
    with RunDir.create(made, "demo") as directory:
        refused = command(directory.path, "meteor")
        assert refused.exit_code == 2 and "meteor" in refused.output
        refused = command(directory.path, "kill")
        assert refused.exit_code == 2 and "cluster.backend=local" in refused.output
        directory.update(host="elsewhere")
        assert "elsewhere" in command(directory.path, "kill").output
        directory.end("finished")
    refused = command(directory.path, "kill")
    assert refused.exit_code == 2 and "finished" in refused.output


class Drills(Callback):
    """Run the command beside the run, after some of its steps."""

    def __init__(self, drills):
        self.drills, self.done = dict(drills), []

    def on_step_end(self, run, step, metrics):
        if (words := self.drills.pop(step, None)) is not None:
            given = [run.directory.path, *words, "--json"]
            thread = threading.Thread(target=lambda: self.done.append(json.loads(command(*given).output)))
            thread.start()
            thread.join()


DRILLS = {
    2: (["exception", "--rank", 1], ("error", [])),
    4: (["kill", "--rank", 1, "--at", "optimizer"], ("crash", [1])),
    6: (["gil", "--rank", 0], ("hang", [0])),
}
"""Step -> words of the command, kind of the recovery and ranks that are replaced."""


@pytest.mark.slow  # quickly in tests/launch/test_survive.py
@pytest.mark.dist
@pytest.mark.parametrize("steps", [[2], pytest.param([2, 4, 6], marks=pytest.mark.slow)])
def test_a_run_survives_the_drills_of_another_process(tmp_path, steps):
    drills = Drills({step: DRILLS[step][0] for step in steps})
    sections = {"cluster": {"backend": "local", "workers": 2}, "guard": {"hang_after": 3.0}}
    sections["algorithm"] = {"steps": max(steps)}
    ours = tiny.run(tiny.recipe(tmp_path, **sections), callbacks=[drills])
    found = [json.loads(line) for line in (ours.directory / RECOVERIES).read_text().splitlines()]
    assert [(one["kind"], one["replaced"]) for one in found] == [DRILLS[step][1] for step in steps]
    assert [one["kind"] for one in drills.done] == [DRILLS[step][0][0] for step in steps]
