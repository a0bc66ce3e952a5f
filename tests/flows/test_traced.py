"""Recording changes no number of a run, and the events of real workers tell every communication of theirs."""

from collections import Counter, defaultdict

import pytest

from tests.errors import raises
from tests.flows import tiny
from tilth.analysis.read import read_events
from tilth.cluster.controller.cluster import Cluster
from tilth.cluster.worker.executor import Executor
from tilth.core.errors import PluginError, StorageError, WorkerLost
from tilth.runs.readers import read_metrics, read_state
from tilth.trace import Recorder, recorder
from tilth.trace.writer import PartWriter

COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"}
SECTIONS = {"supervised": {"steps": 2}, "algorithm": {"minibatches": 2, "kl_coef": 0.05, "steps": 2}}
THREE = {
    "cluster": {"backend": "local", "pools": {"learn": 2, "speak": 1}},
    "policy": {"pool": "learn", "layout": {"fsdp": 2}},
    "reference": {"pool": "learn"},
    "rollout": {"pool": "speak"},
    "reward": {"pool": "speak"},
}


def quietly(folder, monkeypatch, **sections):
    """A run that writes no events, on any rank."""
    with monkeypatch.context() as patch:
        patch.setattr(Cluster, "trace", lambda self, path, attempt, planned=False: None)
        patch.setattr(Recorder, "start", lambda self, *args, **kwargs: None)
        patch.setattr(Recorder, "stop", lambda self: None)
        made = tiny.run(tiny.recipe(folder, **SECTIONS, **sections))
    assert not list((made.directory / "events").glob("*.parquet")) and not recorder.recording
    return made


def check_same(told, quiet) -> None:
    assert tiny.same(tiny.numbers(told.directory), tiny.numbers(quiet.directory))
    assert tiny.weights(told.directory) == tiny.weights(quiet.directory)
    assert all(m["loss"] == m["loss"] for m in read_metrics(told.directory) if "loss" in m)


def test_recording_changes_no_number_and_no_weight(tmp_path, monkeypatch):
    told = tiny.run(tiny.recipe(tmp_path / "told", **SECTIONS))
    check_same(told, quietly(tmp_path / "quiet", monkeypatch))
    events = read_events(told.directory).to_pylist()
    assert not {e["op"] for e in events} & (COLLECTIVES | {"padding"})
    assert {"forward", "backward", "infer", "prefill", "decode", "load"} <= {e["op"] for e in events}
    calls = {e["id"] for e in events if e["op"] == "call"}
    assert len(calls) > 50 and {e["role"] for e in events if e["op"] == "forward"} == {"policy"}


@pytest.mark.dist
@pytest.mark.slow
def test_workers_tell_every_communication_and_nothing_changes(tmp_path, monkeypatch):
    told = tiny.run(tiny.recipe(tmp_path / "told", **SECTIONS, **THREE))
    check_same(told, quietly(tmp_path / "quiet", monkeypatch, **THREE))
    events = read_events(told.directory).to_pylist()
    by_id = {(e["rank"], e["id"]): e for e in events}
    seen: dict = defaultdict(dict)
    for e in events:
        if e["op"] in COLLECTIVES:
            size = 0 if e["op"] == "all_to_all" else e["bytes"]  # of which each rank sends its own
            seen[e["detail"], e["seq"]][e["rank"]] = (e["op"], size, e["role"], e["step"])
            top = e
            while top["parent"] >= 0:
                top = by_id[e["rank"], top["parent"]]
            assert top["op"] == "call" and (top["role"], top["place"]) == (e["role"], e["place"])
    for (detail, _), members in seen.items():
        assert sorted(members) == sorted(map(int, detail.split(","))) and len(set(members.values())) == 1
    kinds = Counter((detail, next(iter(members.values()))[2]) for (detail, _), members in seen.items())
    assert (
        set(kinds) == {("0,1", "policy"), ("0,1", "weight_sync"), ("0,1,2", "weight_sync")} and min(kinds.values()) > 3
    )
    numbers = defaultdict(list)
    for detail, number in seen:
        numbers[detail].append(number)
    assert all(sorted(found) == list(range(len(found))) for found in numbers.values())


def test_a_trace_that_cannot_be_written_takes_no_result_away(tmp_path, monkeypatch):
    def full(self, *args):
        raise StorageError("cannot write events: No space left")

    watcher = tiny.Recorder()
    monkeypatch.setattr(PartWriter, "write", full)
    made = tiny.run(tiny.recipe(tmp_path, **SECTIONS), callbacks=[watcher])
    assert read_state(made.directory)["state"] == "finished" and made.reward is not None
    assert watcher.ended == made.summary and "No space left" in watcher.messages[-1]
    assert "events were dropped: cannot write events" in (made.directory / "log.txt").read_text()


@pytest.mark.slow
def test_nor_does_that_of_a_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(Executor, "_end", lambda self: "the trace of this run has holes")
    made = tiny.run(tiny.recipe(tmp_path, **SECTIONS), callbacks=[watcher := tiny.Recorder()])
    assert watcher.ended == made.summary and watcher.messages[-1] == "rank 0: the trace of this run has holes"
    assert "rank 0: the trace" in (made.directory / "log.txt").read_text()


def test_a_trace_that_cannot_be_written_hides_no_error(tmp_path, monkeypatch):
    def full(self, *args):
        raise StorageError("cannot write events: No space left")

    def fails(record):
        raise KeyError("its own")

    monkeypatch.setattr(PartWriter, "write", full)
    with raises(PluginError, "Recorder.on_step_end"):
        tiny.run(tiny.recipe(tmp_path, **SECTIONS), callbacks=[tiny.Recorder(fails)])
    assert not recorder.recording


def test_a_worker_that_is_lost_while_clocks_are_compared_loses_no_step(tmp_path, monkeypatch):
    class Lost:
        asked = 0

        def now_and_then(self):
            self.asked += 1
            if self.asked == 3:
                raise WorkerLost("rank 0: gone", key="cluster.clock")

        def end(self):
            pass

        def close(self):
            pass

    def trace(self, path, attempt, planned=False):
        self._clocks = Lost()

    monkeypatch.setattr(Cluster, "trace", trace)
    with raises(WorkerLost, "cluster.clock"):
        tiny.run(tiny.recipe(tmp_path, **SECTIONS))
    (directory,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    assert [m["step"] for m in read_metrics(directory)] == [1, 2, 3]
