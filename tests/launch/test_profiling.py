"""Profiles of a run's steps: when they begin and end, who may ask, what goes wrong, and a run that does not notice."""

import gzip
import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.flows.tiny import Recorder, numbers, recipe, run, same, stand_in, weights
from tilth.analysis.events import load, profiled
from tilth.config.load import from_dict
from tilth.core.errors import DataError, PluginError
from tilth.core.lines import Lines, read_lines
from tilth.launch import profiling
from tilth.launch.profiling import (
    FOLDER,
    LOG,
    REQUEST,
    ProfileRequest,
    Profiling,
    ask,
    follow,
    running_attempt,
    take_back,
)
from tilth.runs.directory import RunDir
from tilth.runs.signals import StopRequest
from tilth.trace import capture
from tilth.trace.capture import Captured


class Workers:
    """A cluster that writes down what it is asked: ("begin", ranks, memory), ("end", ranks, name)."""

    def __init__(self, refuse=(), lose=()):
        self.refuse, self.lose, self.calls = refuse, lose, []

    def profile(self, ranks, memory=False):
        self.calls.append(("begin", tuple(ranks), memory))
        return {rank: "RuntimeError: no" for rank in ranks if rank in self.refuse}

    def profiled(self, ranks, stem):
        self.calls.append(("end", tuple(ranks), stem and stem.name))
        return {
            rank: Captured(error="OSError: full") if rank in self.lose else Captured(f"{stem}-rank-{rank}.json.gz", 7)
            for rank in ranks
        }


class Watched:
    """A Profiling of a run of two workers in a folder, and what it has said."""

    def __init__(self, folder, profile="", ranks=(0,), workers=None, begin=0, attempt=1):
        made = from_dict({
            "cluster": {"backend": "local", "workers": 2},
            "run": {"profile": profile, "profile_ranks": list(ranks)},
        })  # fmt: skip
        self.folder, self.workers, self.stop, self.said = folder, workers or Workers(), StopRequest(), []
        self.profiling = Profiling(self.workers, made, folder, attempt, self.stop)
        self.profiling.on_run_start(stand_in(folder, begin, self.said.append))

    def steps(self, *numbers):
        for step in numbers:
            self.profiling.on_step_end(stand_in(), step, {})
        return self.workers.calls

    def ask(self, steps=2, ranks=(0,), memory=False, name="mine"):
        path = self.folder / FOLDER
        path.mkdir(exist_ok=True)
        asked = {"id": name, "steps": steps, "ranks": list(ranks), "memory": memory, "attempt": 1}
        (path / REQUEST).write_text(json.dumps(asked))

    @property
    def log(self):
        return read_lines(self.folder / FOLDER / LOG)

    @property
    def waiting(self):
        return (self.folder / FOLDER / REQUEST).exists()


# ---- as the recipe plans ----


@pytest.mark.parametrize(
    ("profile", "begin", "want"),
    [
        ("3:5", 0, {2: ("begin", (0,), False), 4: ("end", (0,), "steps-3-4")}),
        ("1:2", 0, {0: ("begin", (0,), False), 1: ("end", (0,), "steps-1-1")}),
        ("2:7", 3, {3: ("begin", (0,), False), 6: ("end", (0,), "steps-4-6")}),  # a resume in its middle
        ("2:4", 3, {}),
        ("10:11", 0, {}),
        ("", 0, {}),
    ],
)
def test_planned_steps_are_recorded_whole(tmp_path, profile, begin, want):
    found = Watched(tmp_path, profile, begin=begin)
    seen = {begin: found.workers.calls[-1]} if found.workers.calls else {}
    for step in range(begin + 1, 9):
        before = len(found.workers.calls)
        found.steps(step)
        if len(found.workers.calls) > before:
            (seen[step],) = found.workers.calls[before:]
    assert seen == want


def test_what_was_planned_on_two_ranks_is_said_and_kept(tmp_path):
    found = Watched(tmp_path, "2:4", (1, 0))
    found.steps(1, 2, 3)
    assert [(line["id"], line["state"], line["first"], line["last"]) for line in found.log] == [
        ("recipe", "capturing", 2, 3),
        ("recipe", "done", 2, 3),
    ]
    files = found.log[1]["files"]
    assert {rank: Path(made["path"]).name for rank, made in files.items()} == {
        "1": "steps-2-3-rank-1.json.gz",
        "0": "steps-2-3-rank-0.json.gz",
    }
    assert found.said[0] == "profiling steps 2 to 3 on ranks 1, 0; they take longer"
    assert found.said[1].startswith("profiled steps 2 to 3 on ranks 1, 0: ")


def test_a_plan_that_a_run_never_came_to_is_said_at_its_end(tmp_path):
    found = Watched(tmp_path, "9:11")
    found.steps(1, 2)
    found.profiling.conclude()
    assert found.said == ["run.profile = 9:11: the run came to its end after step 2"]


# ---- as asked for ----


@given(begin=st.integers(0, 5), asked_after=st.integers(0, 6), steps=st.integers(1, 5), ends=st.integers(8, 14))
def test_what_is_asked_for_is_the_very_next_steps(tmp_path_factory, begin, asked_after, steps, ends):
    found = Watched(tmp_path_factory.mktemp("run"), begin=begin)
    last = begin + asked_after
    found.steps(*range(begin + 1, last + 1))
    assert found.workers.calls == []
    found.ask(steps, (1,), memory=True)
    found.steps(*range(last + 1, ends + 1))  # the step that is under way is not the next
    found.profiling.conclude()
    if last + 1 > ends:
        return
    first, until = last + 2, min(last + 1 + steps, ends)
    name = f"steps-{first}-{until}" if first <= ends else None
    assert found.workers.calls == [("begin", (1,), True), ("end", (1,), name)]
    assert [line["state"] for line in found.log] == ["capturing", "done" if name else "failed"]
    assert not found.waiting


def test_one_after_the_other(tmp_path):
    found = Watched(tmp_path)
    found.ask(2, name="first")
    found.steps(1, 2)
    found.ask(1, name="second")
    found.steps(3, 4, 5)
    assert [c[0] for c in found.workers.calls] == ["begin", "end", "begin", "end"]
    assert [(line["id"], line["first"], line["last"]) for line in found.log if line["state"] == "done"] == [
        ("first", 2, 3),
        ("second", 4, 4),
    ]


def test_a_plan_goes_before_what_is_asked_for(tmp_path):
    found = Watched(tmp_path, "2:4")
    found.ask(1)
    found.steps(1, 2, 3, 4)
    assert [line["id"] for line in found.log if line["state"] == "done"] == ["recipe", "mine"]


def test_a_request_of_an_earlier_attempt_is_void(tmp_path):
    Watched(tmp_path).ask(2)
    found = Watched(tmp_path, begin=4, attempt=2)
    found.steps(5, 6)
    assert found.workers.calls == [] and not found.waiting and found.said == []


def test_who_asks_before_the_first_step_gets_it(tmp_path):
    Watched(tmp_path).ask(1)  # while the run is being built
    found = Watched(tmp_path)
    found.steps(1)
    assert found.workers.calls == [("begin", (0,), False), ("end", (0,), "steps-1-1")]


def test_who_asks_after_the_last_step_is_answered(tmp_path):
    found = Watched(tmp_path)
    found.steps(1)
    found.ask()
    found.profiling.conclude()
    assert found.workers.calls == []
    assert found.log == [{"id": "mine", "state": "failed", "error": profiling.TOO_LATE}]


def test_a_stopped_run_keeps_what_it_has_and_begins_nothing(tmp_path):
    found = Watched(tmp_path)
    found.ask(5)
    found.steps(1, 2)
    found.stop.requested = True
    found.ask(1, name="late")
    found.steps(3)
    assert found.workers.calls[-1] == ("end", (0,), "steps-2-3") and len(found.workers.calls) == 2


# ---- what goes wrong ----


def test_ranks_that_cannot_be_profiled_are_named_and_the_others_go_on(tmp_path):
    found = Watched(tmp_path, workers=Workers(refuse=(0,)))
    found.ask(1, (0, 1))
    found.steps(1, 2)
    assert found.workers.calls == [("begin", (0, 1), False), ("end", (1,), "steps-2-2")]
    assert found.log[1]["errors"] == {"0": "RuntimeError: no"} and list(found.log[1]["files"]) == ["1"]


@pytest.mark.parametrize("workers", [Workers(refuse=(0,)), Workers(lose=(0,))], ids=["begin", "end"])
def test_a_profile_that_cannot_be_had_is_told_and_the_run_goes_on(tmp_path, workers):
    found = Watched(tmp_path, workers=workers)
    found.ask(1)
    found.steps(1, 2, 3)
    assert found.log[-1]["state"] == "failed" and found.log[-1]["error"] in ("RuntimeError: no", "OSError: full")
    assert found.said[-1].startswith("step 2 could not be profiled: ") and found.said[-1].endswith("the run goes on")
    found.ask(1)
    assert found.steps(4)[-1][0] == "begin"


@pytest.mark.parametrize(
    ("steps", "ranks", "told"),
    [
        (0, (0,), "--steps 0: 1 to 100 steps can be profiled at once"),
        (101, (0,), "--steps 101: 1 to 100"),
        (1, (2,), "--ranks: there is no rank 2; the workers are ranks 0 to 1"),
        (1, (), "--ranks: no rank is named"),
    ],
)
def test_a_request_that_cannot_be_is_answered(tmp_path, steps, ranks, told):
    found = Watched(tmp_path)
    found.ask(steps, ranks)
    found.steps(1, 2)
    assert found.workers.calls == [] and found.log[0]["state"] == "failed" and found.log[0]["error"].startswith(told)


STRANGE = [b"", b"{", b"[]", b"7", b"\xff\xfe", b"[" * 100_000, b'{"id": 1}',
           b'{"id": "a", "steps": "2", "ranks": [0], "memory": false, "attempt": 1}',
           b'{"id": "a", "steps": 2, "ranks": [true], "memory": false, "attempt": 1}',
           b'{"id": "a", "steps": 2, "ranks": 0, "memory": false, "attempt": 1}',
           b'{"id": "a", "steps": 2, "ranks": [0], "memory": false, "attempt": null}']  # fmt: skip


@pytest.mark.parametrize("content", STRANGE, ids=lambda content: repr(content[:30]))
def test_what_is_no_request_is_told_once_and_removed(tmp_path, content):
    found = Watched(tmp_path)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / REQUEST).write_bytes(content)
    found.steps(1, 2)
    assert found.workers.calls == [] and len(found.said) == 1 and "is no request" in found.said[0]
    assert not found.waiting


def test_what_cannot_be_removed_is_told_once(tmp_path):
    found = Watched(tmp_path)
    (tmp_path / FOLDER / REQUEST).mkdir(parents=True)
    found.steps(1, 2, 3)
    assert len(found.said) == 2 and "cannot be asked for profiles" in found.said[1]


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path):
    found = Watched(tmp_path, "1:2")
    (tmp_path / FOLDER).write_text("no folder") if not (tmp_path / FOLDER).exists() else None
    (tmp_path / FOLDER / LOG).unlink()
    (tmp_path / FOLDER / LOG).mkdir()
    found.steps(1)
    assert any(text.startswith("cannot write") for text in found.said)


# ---- who asks ----


@pytest.fixture
def going(tmp_path):
    """A run of this process that has come to no step."""
    made = from_dict({"run": {"dir": str(tmp_path)}, "cluster": {"backend": "local", "workers": 2}})
    with RunDir.create(made, "demo") as directory:
        yield directory


def test_a_request_is_there_as_a_whole_and_only_once(going):
    request = ask(going.path, 2, [1, 0, 1], memory=True)
    path = going.path / FOLDER / REQUEST
    assert profiling._request(json.loads(path.read_text())) == request == ProfileRequest(request.id, 2, (1, 0), True, 1)
    with raises(DataError, REQUEST):
        ask(going.path, 1, [0])
    assert [p.name for p in (going.path / FOLDER).iterdir()] == [REQUEST]
    assert take_back(going.path, request) and not path.exists()
    assert not take_back(going.path, request)


def test_another_ones_request_is_not_taken_back(going):
    request = ask(going.path, 1, [0])
    assert not take_back(going.path, ProfileRequest("another", 1, (0,)))
    assert take_back(going.path, request)


@pytest.mark.parametrize(("steps", "ranks", "key"), [(0, [0], "--steps"), (1, [2], "--ranks"), (1, [], "--ranks")])
def test_what_cannot_be_is_told_before_it_is_asked(going, steps, ranks, key):
    with raises(DataError, key):
        ask(going.path, steps, ranks)
    assert not (going.path / FOLDER).exists()


@pytest.mark.parametrize("state", ["finished", "interrupted", "failed"])
def test_a_run_that_does_not_go_on_is_named(going, state):
    going.end(state)
    with raises(DataError, "run.json.state"):
        ask(going.path, 1, [0])


def test_what_is_no_run_is_named(tmp_path):
    with raises(DataError, "run.json"):
        running_attempt(tmp_path)


def test_who_waits_is_told_both_lines_in_order_and_nothing_of_others(going, monkeypatch):
    monkeypatch.setattr(profiling, "PERIOD", 0.01)
    request = ask(going.path, 1, [0])
    lines = [
        {"id": "other", "state": "done"},
        {"id": request.id, "state": "capturing"},
        {"id": "other", "state": "failed"},
        {"id": request.id, "state": "done"},
    ]
    log = Lines(going.path / FOLDER / LOG)

    def write():
        for line in lines:
            log.append(json.dumps(line))
            threading.Event().wait(0.03)

    writer = threading.Thread(target=write)
    writer.start()
    assert list(follow(going.path, request)) == [lines[1], lines[3]]
    writer.join()
    log.close()


def test_who_waits_for_an_attempt_that_is_over_is_told(going):
    request = ask(going.path, 1, [0])
    going.update(attempt=2)
    with raises(DataError, LOG):
        list(follow(going.path, request))


def test_who_waits_for_a_run_that_ends_is_told_and_asks_no_more(going):
    request = ask(going.path, 1, [0])
    going.end("failed")
    with raises(DataError, LOG):
        list(follow(going.path, request))
    assert not (going.path / FOLDER / REQUEST).exists()


# ---- whole runs ----


def names(path) -> set[str]:
    with gzip.open(path) as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


@pytest.mark.slow
def test_a_run_that_is_profiled_learns_the_very_same(tmp_path):
    def asks(record):
        if record["step"] == 4:
            (runs,) = (tmp_path / "profiled").glob("tiny-*")
            ask(runs, 2, [0])

    short = {"supervised": {"steps": 3}, "algorithm": {"steps": 3}}
    plain = run(recipe(tmp_path / "plain", **short)).directory
    watching = Recorder(asks)
    profiled = run(recipe(tmp_path / "profiled", run={"profile": "1:3"}, **short), callbacks=[watching]).directory
    assert weights(plain) == weights(profiled)
    assert same(numbers(plain), numbers(profiled))
    done = [line for line in read_lines(profiled / FOLDER / LOG) if line["state"] == "done"]
    assert [(line["first"], line["last"]) for line in done] == [(1, 2), (5, 6)]
    supervised, sampled = (names(line["files"]["0"]["path"]) for line in done)
    assert {"policy.sft_step", "forward", "aten::mm"} <= supervised and not {
        "rollout.advance",
        "reward.score",
    } & supervised
    assert {"policy.update", "rollout.advance", "decode", "backward", "aten::mm"} <= sampled
    assert sum(text.startswith("profil") for text in watching.messages) == 4
    assert sorted(p.name for p in (profiled / FOLDER).iterdir()) == [
        LOG, "steps-1-2-rank-0.json.gz", "steps-5-6-rank-0.json.gz",
    ]  # fmt: skip


def test_a_profiler_that_fails_in_every_way_ends_no_run(tmp_path, monkeypatch):
    def no(memory):
        raise MemoryError("of the profiler")

    monkeypatch.setattr(capture, "_started", no)
    watching = Recorder()
    made = recipe(tmp_path, supervised={"steps": 3}, algorithm={"steps": 0}, run={"profile": "1:3"})
    directory = run(made, callbacks=[watching]).directory
    told = [text for text in watching.messages if "could not be profiled" in text]
    assert told[0] == "steps 1 to 2 could not be profiled: MemoryError: of the profiler; the run goes on"
    assert watching.ended["state"] == "finished" and len(read_lines(directory / "metrics.jsonl")) == 3


def test_an_error_of_the_run_leaves_no_profiler_behind(tmp_path):
    def fail(record):
        if record["step"] == 2:
            raise KeyError("of the test")

    made = recipe(tmp_path, supervised={"steps": 4}, run={"profile": "1:5"})
    with pytest.raises(PluginError):
        run(made, callbacks=[Recorder(fail)])
    taken = capture.Capture()
    assert taken.start() == "" and taken.stop(str(tmp_path / "next")).error == ""


@pytest.mark.slow
@pytest.mark.dist
def test_workers_are_profiled_on_the_ranks_that_were_named(tmp_path):
    asked = []

    def asks(record):
        if record["step"] == 2:
            (found,) = tmp_path.glob("tiny-*")
            with raises(DataError, "--ranks"):
                ask(found, 1, [2])
            asked.append(ask(found, 1, [1]))

    local = {"cluster": {"backend": "local", "workers": 2}, "policy": {"layout": {"fsdp": 2}}}
    made = recipe(tmp_path, supervised={"steps": 4}, algorithm={"steps": 0}, **local)
    directory = run(made, callbacks=[Recorder(asks)]).directory
    *_, line = follow(directory, asked[0])
    assert (line["first"], line["last"], list(line["files"])) == (3, 3, ["1"])
    assert os.listdir(directory / FOLDER) and [p.name for p in (directory / FOLDER).glob("steps*")] == [
        "steps-3-3-rank-1.json.gz"
    ]
    found = names(line["files"]["1"]["path"])
    assert {"policy.sft_step", "call", "forward"} <= found and any("reduce_scatter" in name for name in found)


@pytest.mark.slow
def test_a_profile_is_named_in_the_trace(tmp_path):
    directory = run(recipe(tmp_path, supervised={"steps": 3}, run={"profile": "2:3"})).directory
    events = load(directory)
    said = events.detail[events.op.is_("profile")]
    assert [said.text(i) for i in range(len(said.codes))] in (["begin", "end"], ["begin", "begin", "end", "end"])
    assert profiled(events).tolist() == [2]
