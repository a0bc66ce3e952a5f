"""The benchmark of injected causes: what is injected is what is said, and what is counted is what was found."""

import gc
import json
import time
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from tests.scripts import SCRIPTS, script
from tilth.analysis.whatif import Finding
from tilth.models.inputs import ModelInput

causes = script("causes.py")


@pytest.fixture
def inject(monkeypatch):
    """The module as a process of a run has it, by its cause; without the finder of modules."""

    def made(case, **more):
        monkeypatch.setenv("CAUSE", "{}")
        monkeypatch.delitem(__import__("sys").modules, "benchmarks/causes_inject/sitecustomize.py", raising=False)
        module = script("causes_inject/sitecustomize.py")
        module.CAUSE = json.loads(json.dumps({**case.injected(), **more}))
        return module

    return made


def case(cause, work="real"):
    return causes.Case("case", cause, work)


def test_windows_take_turns_and_begin_without(inject):
    module = inject(case(causes.NONE))
    off, on = causes.windows_of(5)
    assert [w.start for w in off] == [1, 41, 81] and [w.start for w in on] == [21, 61]
    assert all(not module.on(step) for window in off for step in window)
    assert all(module.on(step) for window in on for step in window)
    assert not module.on(-1) and not module.on(0)


def test_only_its_rank_is_struck(inject):
    module = inject(case(causes.slow(1, 1.5)))
    for rank, step, struck in ((1, 21, True), (0, 21, False), (1, 20, False), (1, -1, False)):
        module.State.rank, module.State.step = rank, step
        assert module.mine("slow") is struck and not module.mine("gc")


def burn(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
    return "found"


@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_a_slow_rank_takes_so_much_more_of_the_processor(inject, factor):
    module = inject(case(causes.slow(0, factor)))
    module.State.rank, module.State.step = 0, 21
    work = module.slowed(burn, lambda *_: 0.0)
    began = time.thread_time()
    assert work(0.02) == "found"
    assert 0.02 * factor <= time.thread_time() - began


@pytest.mark.parametrize(("step", "factor"), [(21, 2.0), (1, 1.0)])
def test_calibrated_sleep_is_longer_on_a_slow_rank(inject, monkeypatch, step, factor):
    module, slept = inject(case(causes.slow(0, 2.0), "sleep")), []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    module.State.rank, module.State.step = 0, step
    module.slowed(lambda model, ids: None, module.Sleep.forward)(
        SimpleNamespace(training=True), ModelInput(torch.zeros(100))
    )
    module.slowed(lambda loss: None, module.Sleep.backward)(None)
    base, slope = causes.SLEEP
    assert slept == pytest.approx([factor * (base + 100 * slope), 2 * factor * (base + 100 * slope)])


def test_nothing_sleeps_where_nothing_is_learned(inject):
    module = inject(case(causes.NONE, "sleep"))
    assert module.Sleep.forward(SimpleNamespace(training=False), ModelInput(torch.zeros(100))) == 0


def test_garbage_is_collected_once_a_step(inject, monkeypatch):
    module, collected = inject(case(causes.garbage(0, 10, every=2))), []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(module.State.step))
    forward = module.collecting(lambda: None)
    module.State.rank = 0
    for step in range(19, 27):
        module.State.step = step
        forward()
        forward()
    assert collected == [22, 24, 26]


def test_a_throttled_collective_takes_the_time_of_its_bytes_once(inject, monkeypatch):
    module, slept = inject(case(causes.network(1e6, 0.01))), []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    inner = module.throttled(lambda tensors: tensors)
    outer = module.throttled(inner)  # one collective of torch calls another
    tensor = np.zeros(500, np.float64)
    module.State.step = 21
    outer([tensor, tensor])
    module.State.step = 41
    outer([tensor, tensor])
    module.State.step = 21
    module.throttled(lambda output, input: None)(output=tensor, input=[tensor, tensor])
    assert slept == pytest.approx([0.01 + 8000 / 1e6, 0.01 + 4000 / 1e6])


def test_the_longest_rows_go_to_one_rank_and_none_is_lost(inject, monkeypatch):
    module, at = inject(case(causes.lengths(0))), [21]
    monkeypatch.setattr("tilth.trace.spans.current_step", lambda: at[0])
    batch = ModuleType("batch")
    batch.divide = lambda lengths, groups, parts: "fair"
    module.deal_unevenly(batch)
    lengths = np.array([5, 90, 7, 80, 60, 6, 8, 70])
    dealt = batch.divide(lengths, None, 2)
    assert [rows.tolist() for rows in dealt] == [[1, 3, 4, 7], [0, 2, 5, 6]]
    at[0] = 1
    assert batch.divide(lengths, None, 2) == "fair"


def test_modules_are_changed_when_they_are_imported(inject, monkeypatch, tmp_path):
    (tmp_path / "quite_new.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = inject(case(causes.NONE))
    monkeypatch.setattr(module, "AFTER", {"quite_new": lambda found: setattr(found, "value", 2)})
    monkeypatch.setattr("sys.meta_path", [module.Finder(), *__import__("sys").meta_path])
    assert __import__("quite_new").value == 2


def test_every_module_that_is_changed_has_what_is_changed():
    """The names that the injection takes hold of are in the source: a renamed method would make it do nothing."""
    from tilth.cluster.worker.executor import Executor
    from tilth.models.decoder import Decoder
    from tilth.plan import batch
    from tilth.training.optim import Optimizers

    assert callable(Executor._run) and callable(batch.divide) and callable(Decoder.forward)
    assert callable(Optimizers.step) and (SCRIPTS / "causes_inject" / "sitecustomize.py").is_file()


def test_a_run_is_right_if_each_window_names_the_cause_and_its_rank():
    row = causes.Row("a", "real", 2, "slow-worker@1", 0.3, 0.2, ["slow-worker@1", "slow-worker@1"])
    assert row.right
    row.named[1] = "slow-worker@0"
    assert not row.right


def test_predictions_count_where_the_machine_was_steady(capsys):
    row = causes.Row(
        "a", "real", 2, "slow-worker@1", 0.3, 0.2, ["slow-worker@1"] * 2, ["none", "none", "communication"],
        predicted_seconds=[0.22, 0.5], measured_seconds=[0.2, 0.2], steady=[True, False],
    )  # fmt: skip
    assert row.errors == pytest.approx([0.1])
    causes.tell([row])
    told = capsys.readouterr().out
    assert "1 of 1 runs right; nothing in 2 of 3 windows" in told and "1 of 2 windows steady" in told


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ((), ("none", 0.25)),
        ((Finding("slow-worker", 0.9, "", ({"rank": 1},), 0.2), Finding("controller", 0.1, "", (), 0.3)),
         ("slow-worker@1", 0.2)),
        ((Finding("communication", 0.9, "", ({"optype": "send"},), 0.2),), ("communication", 0.2)),
    ],
)  # fmt: skip
def test_the_likeliest_of_a_window(monkeypatch, findings, expected):
    found = SimpleNamespace(error=-0.01, replayed=np.array([0.2, 0.25, 0.4]))
    seen = []

    def analyse(run, steps):
        seen.append(steps)
        return None, found, SimpleNamespace(findings=findings)

    monkeypatch.setattr(causes, "analyse", analyse)
    row = causes.Row("a", "real", 2, "none", 0.3, 0.2)
    assert causes.likeliest(row, None, range(21, 41)) == expected
    assert row.model_error == 0.01 and seen == [range(21 + causes.WARM, 41)]


def test_answers_are_the_same_each_time(tmp_path):
    one, other = (causes.answers(tmp_path / name, 0.7).read_text() for name in ("a", "b"))
    assert one == other
    sizes = [len(json.loads(line)["answer"]) for line in one.splitlines()]
    assert min(sizes) >= 8 and max(sizes) <= 450 and np.std(np.log(sizes)) == pytest.approx(0.7, abs=0.1)
