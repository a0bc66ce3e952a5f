"""The benchmark that kills runs and compares them: that it sees every difference, and where it strikes."""

import json
import shutil
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.flows import tiny
from tests.scripts import script
from tilth.checkpoint import latest, mark_best, open_checkpoint, save
from tilth.runs.readers import read_metrics


def benchmark():
    """The script that kills and compares."""
    return script("resume_exact.py")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny.run(tiny.recipe(tmp_path_factory.mktemp("whole"), train={"ema": 0.9})).directory


@pytest.fixture
def other(whole, tmp_path):
    """A copy, to be changed."""
    return Path(shutil.copytree(whole, tmp_path / "other"))


def resave(run, *, tensor=None, objects=None):
    """Write the last checkpoint again, with one bit of a tensor flipped or other objects."""
    path = latest(run / "checkpoints")
    before = open_checkpoint(path)
    groups = {g: {n: before.read(g, n) for n in before.names(g)} for g in before.groups}
    if tensor:
        groups[tensor[0]][tensor[1]].view(-1).view(torch.uint8)[0] ^= 1
    found = {**before.objects, **(objects or {})}
    shutil.rmtree(path)
    save(path.parent, before.step, groups, found)


def test_a_copy_is_equal_and_so_is_a_checkpoint_that_was_written_again(whole, other):
    assert benchmark().differences(other, whole) == []
    resave(other)
    assert benchmark().differences(other, whole) == []


@pytest.mark.parametrize("group", ["model", "optimizer", "ema"])
def test_one_bit_of_a_tensor_is_seen(whole, other, group):
    name = open_checkpoint(latest(whole / "checkpoints")).names(group)[-1]
    resave(other, tensor=(group, name))
    assert benchmark().differences(other, whole) == [f"{group}/{name}"]


def test_another_object_is_seen(whole, other):
    resave(other, objects={"progress": {"step": 1}})
    (said,) = benchmark().differences(other, whole)
    assert said.startswith("object progress: ")


def test_the_number_of_the_attempt_is_no_difference(whole, other):
    objects = open_checkpoint(latest(whole / "checkpoints")).objects
    resave(other, objects={"events": {**objects["events"], "attempt": 9}})
    assert benchmark().differences(other, whole) == []
    resave(other, objects={"events": {**objects["events"], "step": 9}})
    (said,) = benchmark().differences(other, whole)
    assert said.startswith("object events: ")


def test_another_last_checkpoint_is_seen(whole, other):
    shutil.rmtree(latest(other / "checkpoints"))
    assert any(said.startswith("last checkpoint") for said in benchmark().differences(other, whole))


def test_another_best_is_seen(whole, other):
    mark_best(other / "checkpoints", {"step": 3, "metric": "accuracy/heldout", "value": 2.0})
    assert any(said.startswith("best ") for said in benchmark().differences(other, whole))


def rewrite(run, change):
    records = read_metrics(run)
    change(records)
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_metrics_are_compared_but_for_those_of_time_and_memory(whole, other):
    timely = {"seconds": 1e9, "attempt": 7, "time/update": 1e9, "tokens_per_second/train": 1.0, "mfu": 1.0}
    timely |= {"balance/idle": 1}
    rewrite(other, lambda records: [r.update(timely, **{"memory/rss": 1}) for r in records])
    assert benchmark().differences(other, whole) == []
    rewrite(other, lambda records: records[4].update(loss=1.0))
    (said,) = benchmark().differences(other, whole)
    assert said.startswith("1 records of metrics, first step 5 loss: 1.0 and ")


def test_a_missing_record_and_a_missing_metric_are_seen(whole, other):
    rewrite(other, lambda records: records[0].pop("lr"))
    (said,) = benchmark().differences(other, whole)
    assert said.startswith("1 records of metrics, first step 1 lr: None and ")
    rewrite(other, lambda records: records.pop())
    assert any("records of metrics" in said for said in benchmark().differences(other, whole))


def test_trajectories_are_compared(whole, other):
    file = sorted((other / "trajectories").glob("*.parquet"))[0]
    table = pq.read_table(file)
    column = table.schema.get_field_index("reward")
    changed = pa.array([9.0] * table.num_rows, table.schema.field(column).type)
    pq.write_table(table.set_column(column, table.schema.field(column), changed), file)
    assert benchmark().differences(other, whole) == ["trajectories: columns ['reward']"]


def test_state_and_model_files_are_compared(whole, other):
    state = json.loads((other / "run.json").read_text())
    (other / "run.json").write_text(json.dumps({**state, "state": "failed"}))
    (other / "model/tokenizer.json").write_text("{}")
    assert benchmark().differences(other, whole) == ["state failed", "model/tokenizer.json"]


def test_bits_decide_not_values():
    same = benchmark().same_bits
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert same(nan, nan.clone()) and not same(zero, -zero)
    assert not same(zero, zero.double()) and not same(zero, torch.zeros(1, 1))
    assert same(torch.tensor(3), torch.tensor(3)) and not same(torch.tensor(3), torch.tensor(4))


def test_moments_are_drawn_over_the_whole_run_and_every_second_one_is_aimed(whole):
    tools = benchmark()
    found, times = tools.moments("a", 200, whole), [0.0, *(r["seconds"] for r in read_metrics(whole))]
    assert found == tools.moments("a", 200, whole) != tools.moments("b", 200, whole)
    aims = ["saving", "generating", "publishing", "training"]
    assert [m.aim for m in found[:8]] == [aim for other in aims for aim in ("", other)]
    hit = {m.step for m in found}  # by time, so a short step may be missed
    assert hit <= set(range(len(times))) and len(hit) > len(times) / 2
    for moment, until in [(m, times[m.step + 1]) for m in found if m.step + 1 < len(times)]:
        assert 0 <= moment.after <= until - times[moment.step]


def called(place, inner):
    """Call ``inner`` from a function of this file and name."""
    file, name = place.split()
    space = {"inner": inner}
    exec(compile(f"def {name}():\n    return inner()", f"/x/tilth/{file}", "exec"), space)
    return space[name]()


LOOP = "flows/policy_gradient.py policy_gradient"


@pytest.mark.parametrize(
    "stack, said",
    [
        (["flows/run.py save"], "saving"),
        (["flows/heldout.py evaluate", "flows/sampler.py generate_and_score", "engines/engine.py step"], "evaluating"),
        (["flows/heldout.py evaluate", "flows/run.py sync_weights", "roles/weight_sync.py relay"], "publishing"),
        ([LOOP, "flows/sampler.py generate_and_score"], "generating"),
        ([LOOP, "flows/step_log.py flush"], "training"),
        (
            [LOOP, "roles/policy.py update", "training/engine.py update"],
            "training",
        ),
        ([LOOP], "in a step"),
        (["launch/build.py build"], "starting or ending"),
    ],
)
def test_the_phase_is_what_the_main_thread_is_in(stack, said):
    def ask():
        return script("watch/sitecustomize.py").describe(threading.get_ident())

    for place in reversed(stack):
        ask = (lambda place, inner: lambda: called(place, inner))(place, ask)
    assert ask() == said


def test_a_thread_at_work_on_a_checkpoint_is_seen_and_one_that_waits_is_not():
    describe = script("watch/sitecustomize.py").describe
    busy, go = threading.Event(), [True]

    def works():
        busy.set()
        while go[0]:
            pass

    for inner, behind in [(works, True), (lambda: (busy.set(), idle.wait()), False)]:
        idle = threading.Event()
        thread = threading.Thread(target=called, args=("checkpoint/saver.py write", inner))
        thread.start()
        assert busy.wait(10)
        assert described(describe, behind) == ("starting or ending, saving behind" if behind else "starting or ending")
        go[0], _ = False, idle.set()
        thread.join(10)
        busy.clear()


def described(describe, behind):
    """What is said once the thread has come to where it stays: a few looks."""
    for _ in range(100):
        said = describe(threading.get_ident())
        if ("behind" in said) == behind:
            return said
    return said
