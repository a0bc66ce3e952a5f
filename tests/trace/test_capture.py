"""A capture in this process: what the Chrome trace holds, and that nothing which goes wrong is raised."""

import gzip
import json
import subprocess
import sys

import pytest
import torch

from tests import forked
from tilth.trace import capture
from tilth.trace.capture import Capture


def events(path) -> list[dict]:
    """Complete events ("X") of a trace, in order of time."""
    with gzip.open(path) as file:
        found = json.load(file)["traceEvents"]
    return sorted((e for e in found if e["ph"] == "X"), key=lambda e: e["ts"])


@pytest.fixture
def taken():
    found = Capture()
    yield found
    found.drop()


def work(size=24):
    return torch.ones(size, size) @ torch.ones(size, size)


def test_a_trace_holds_what_was_done_meanwhile_with_shapes_and_nothing_else(taken, tmp_path):
    work(8)
    assert taken.start() == ""
    for _ in range(3):
        work(24)
    made = taken.stop(str(tmp_path / "steps-1-2"))
    work(16)
    assert made.error == "" and made.path == str(tmp_path / "steps-1-2.json.gz")
    assert made.bytes == (tmp_path / "steps-1-2.json.gz").stat().st_size > 0
    products = [e for e in events(made.path) if e["name"] == "aten::mm"]
    assert [e["args"]["Input Dims"] for e in products] == [[[24, 24], [24, 24]]] * 3
    assert all(e["dur"] > 0 for e in products)


def test_a_named_block_lies_around_the_operations_inside(taken, tmp_path):
    with taken.named("before"):
        work()
    taken.start()
    with taken.named("policy.update"):
        work()
    with taken.named("policy.logprobs"):
        pass
    found = events(taken.stop(str(tmp_path / "a")).path)
    names = [e["name"] for e in found]
    assert "before" not in names and names.count("policy.update") == 1 and names.count("policy.logprobs") == 1
    (outer,) = [e for e in found if e["name"] == "policy.update"]
    (product,) = [e for e in found if e["name"] == "aten::mm"]
    assert outer["ts"] <= product["ts"] and product["ts"] + product["dur"] <= outer["ts"] + outer["dur"]


@pytest.mark.parametrize("memory", [False, True])
def test_allocations_are_recorded_where_asked_for(taken, tmp_path, memory):
    taken.start(memory)
    work()
    with gzip.open(taken.stop(str(tmp_path / "a")).path) as file:
        found = [e for e in json.load(file)["traceEvents"] if e["name"] == "[memory]"]
    assert bool(found) == memory
    assert all({"Bytes", "Total Allocated"} <= set(e["args"]) for e in found)


def test_one_after_the_other(taken, tmp_path):
    for size in (8, 12):
        taken.start()
        work(size)
        made = taken.stop(str(tmp_path / f"size-{size}"))
        shapes = {str(e["args"]["Input Dims"]) for e in events(made.path) if e["name"] == "aten::mm"}
        assert shapes == {f"[[{size}, {size}], [{size}, {size}]]"}


def test_a_second_one_is_refused_and_the_first_goes_on(taken, tmp_path):
    taken.start()
    assert taken.start() == "this process is being profiled already"
    work()
    assert events(taken.stop(str(tmp_path / "a")).path)


def test_the_end_of_none_is_told(taken, tmp_path):
    assert taken.stop(str(tmp_path / "a")).error == "nothing is being profiled"
    assert not list(tmp_path.iterdir())


def test_what_is_dropped_leaves_nothing_behind_and_the_next_one_works(taken, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    taken.drop()
    taken.start()
    work(8)
    taken.drop()
    assert not list(tmp_path.iterdir())
    assert taken.start() == ""
    work(12)
    (product,) = [e for e in events(taken.stop(str(tmp_path / "a")).path) if e["name"] == "aten::mm"]
    assert product["args"]["Input Dims"][0] == [12, 12]


# ---- what goes wrong becomes a text ----


def test_a_profiler_that_cannot_begin(taken, monkeypatch):
    def no(memory):
        raise RuntimeError("CUPTI:\n not permitted")

    monkeypatch.setattr(capture, "_started", no)
    assert taken.start() == "RuntimeError: CUPTI: not permitted"
    assert taken.stop("nowhere").error == "nothing is being profiled"


class Broken:
    """A profiler that fails in one of its calls, or writes nothing."""

    def __init__(self, at):
        self.at = at

    def __exit__(self, *_):
        if self.at == "end":
            raise AssertionError("no events")

    def export_chrome_trace(self, path):
        if self.at == "export":
            open(path, "w").write("half of")
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("at", "told"),
    [
        ("end", "AssertionError: no events"),
        ("export", "OSError: [Errno 28] No space left on device"),
        ("silent", "OSError: torch has written nothing to "),
    ],
)
def test_a_profiler_that_cannot_end_leaves_no_file(taken, monkeypatch, tmp_path, at, told):
    monkeypatch.setattr(capture, "_started", lambda memory: Broken(at))
    taken.start()
    made = taken.stop(str(tmp_path / "new" / "a"))
    assert made.error.startswith(told) and made.path == ""
    assert not list(tmp_path.rglob("*.json*"))


def test_a_folder_that_cannot_be_is_told(taken, tmp_path):
    (tmp_path / "file").write_text("")
    taken.start()
    assert taken.stop(str(tmp_path / "file" / "a")).error.startswith(("NotADirectoryError", "FileExistsError"))


def test_a_trace_of_the_same_name_is_replaced_as_a_whole(taken, tmp_path, monkeypatch):
    taken.start()
    work()
    before = taken.stop(str(tmp_path / "a"))
    kept = (tmp_path / "a.json.gz").read_bytes()
    monkeypatch.setattr(capture, "_started", lambda memory: Broken("export"))
    taken.start()
    assert taken.stop(str(tmp_path / "a")).error
    assert (tmp_path / "a.json.gz").read_bytes() == kept and len(kept) == before.bytes


def test_no_torch_before_a_capture_and_silence_while_it_runs(tmp_path):
    before = "from tilth.trace.capture import Capture; taken = Capture()\nwith taken.named('x'): pass\n"
    without = before + "import sys; assert 'torch' not in sys.modules"
    during = before + f"assert not taken.start() and not taken.stop({str(tmp_path / 'a')!r}).error"
    for command in ([sys.executable, "-c", without], [*forked.python(), "-c", during]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
