"""The file of rounds: what comes back, what a kill or a full disk leaves, and bad lines by name."""

import io
import json

import numpy as np
import pytest

from tests.errors import raises
from tilth.core.errors import DataError, StorageError
from tilth.trace import clock_samples, recorder
from tilth.trace.clock_samples import Origin, RoundsFile, events_folder, origin, read_rounds, rounds_path, steady_clock

ORIGINS = {0: Origin(5, "boot time", "here", 10), 1: Origin(7, "", "there", 11, False)}


def written(folder):
    file = RoundsFile(folder, 2)
    file.introduce(ORIGINS)
    file.add({0: [(1, 2, 3), (4, 5, 6)]})
    file.add({0: [(7, 8, 9)], 1: []})
    file.close()
    return rounds_path(folder, 2)


def test_round_trip(tmp_path):
    path = written(tmp_path / "events")
    assert path.name == "attempt-2-clocks.jsonl"
    found = read_rounds(tmp_path / "events", 2)
    assert {rank: about.origin for rank, about in found.items()} == ORIGINS
    assert [b.tolist() for b in found[0].bursts] == [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9]]]
    assert found[0].bursts[0].dtype == np.int64 and found[1].bursts == []
    assert read_rounds(tmp_path / "events", 1) == {}


def test_a_torn_last_line_is_left_out(tmp_path):
    path = written(tmp_path)
    whole = path.read_text()
    for lines in range(2, 5):
        kept = whole.index(whole.split("\n")[lines])
        for torn in (0, 1, 9):
            path.write_text(whole[: kept + torn])
            assert [len(b) for b in read_rounds(tmp_path, 2)[0].bursts] == [2, 1][: lines - 2]


@pytest.mark.parametrize(
    "line",
    ["nonsense", "[]", '{"rank": 0}', '{"rank": "a", "rounds": []}', '{"rank": 9, "rounds": [[1, 2, 3]]}',
     '{"rank": 0, "rounds": [[1, 2]]}', '{"rank": 0, "rounds": [[1, 2, "x"]]}', '{"rounds": [[1, 2, 3]]}',
     '{"rank": 0, "epoch": 1, "clock": "", "host": "", "pid": 1, "more": 2}'],
)  # fmt: skip
def test_a_line_that_is_none_is_named(tmp_path, line):
    path = written(tmp_path)
    good = path.read_text()
    path.write_text(good + line + "\n" + good.splitlines()[-1] + "\n")
    with raises(DataError, "attempt-2-clocks.jsonl.6"):
        read_rounds(tmp_path, 2)
    whole = path.with_name("attempt-3-clocks.jsonl")
    whole.write_text(good)
    path.write_text(good + line + "\n")  # torn by a kill: the last line is skipped
    found, want = read_rounds(tmp_path, 2), read_rounds(tmp_path, 3)
    assert {r: [b.tolist() for b in a.bursts] for r, a in found.items()} == {
        r: [b.tolist() for b in a.bursts] for r, a in want.items()
    }


def test_of_a_long_run_the_newest_rounds_alone_are_read(tmp_path):
    """Two workers are asked every 20 s for a day; one is replaced in between."""
    second, day = 10**9, 24 * 180
    file = RoundsFile(tmp_path, 2)
    file.introduce(ORIGINS)
    file.add({0: [(0, 0, 0)]})
    with rounds_path(tmp_path, 2).open("a") as torn:
        torn.write("this would be no round of clocks\n")
    for k in range(1, day):
        if k == 700:
            file.introduce({1: ORIGINS[1]._replace(pid=99)})
        file.add({rank: [(20 * k * second, 5, 20 * k * second + 9)] for rank in ORIGINS})
    file.close()
    with raises(DataError, "attempt-2-clocks.jsonl.4"):
        read_rounds(tmp_path, 2)
    for since, least in ((20 * (day - 300) * second, 300), (10**20, clock_samples.FEW)):
        found = read_rounds(tmp_path, 2, since)
        assert found[1].origin.pid == 99 and found[0].origin == ORIGINS[0]
        for about in found.values():
            assert least <= len(about.bursts) <= least + clock_samples.BEFORE // (20 * second) + 1
            assert about.bursts[-1].tolist() == [[20 * (day - 1) * second, 5, 20 * (day - 1) * second + 9]]
    with raises(DataError, "attempt-2-clocks.jsonl.4"):
        read_rounds(tmp_path, 2, 0)


def test_rounds_since_a_time_are_all_of_a_short_run(tmp_path):
    written(tmp_path)
    some, everything = read_rounds(tmp_path, 2, 10**18), read_rounds(tmp_path, 2)
    assert {r: [b.tolist() for b in a.bursts] for r, a in some.items()} == {
        r: [b.tolist() for b in a.bursts] for r, a in everything.items()
    }


def test_a_file_that_is_no_text(tmp_path):
    rounds_path(tmp_path, 1).write_bytes(b"\xff\xfe\xff\n")
    with raises(DataError, "attempt-1-clocks.jsonl"):
        read_rounds(tmp_path, 1)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "events").write_text("")
    with raises(StorageError, "attempt-0-clocks.jsonl"):
        RoundsFile(tmp_path / "events", 0)


def test_a_disk_that_is_full_for_a_while_loses_no_round(tmp_path):
    class Full(io.FileIO):
        room = 30

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            took = super().write(data[: self.room])
            self.room -= took
            return took

    file, plain = RoundsFile(tmp_path, 0), RoundsFile(tmp_path, 1)
    file._file = full = Full(rounds_path(tmp_path, 0), "a")
    for number in range(4):
        full.room = max(full.room, 1000 * (number == 2))
        for one in (file, plain):
            one.introduce({0: origin()}) if not number else one.add({0: [(number, 2, 3)]})
        if number == 1:
            assert rounds_path(tmp_path, 0).stat().st_size == 30
    for one in (file, plain, file):
        one.close()
    assert rounds_path(tmp_path, 0).read_text() == rounds_path(tmp_path, 1).read_text()


def test_origin_says_where_the_events_of_this_process_begin(tmp_path, monkeypatch):
    assert origin().epoch == 0
    with recorder.to(tmp_path, interval=60):
        here = origin()
        assert here.epoch == recorder.epoch > 10**18
    assert here.clock == steady_clock() and here.waits
    assert json.loads(json.dumps(here._asdict())) == here._asdict()

    class Torch:
        class cuda:
            is_initialized = staticmethod(lambda: True)

    monkeypatch.setitem(clock_samples.sys.modules, "torch", Torch)
    assert not origin().waits


def test_steady_clock_is_one_for_all_processes_of_a_machine(monkeypatch):
    assert steady_clock() == steady_clock()
    monkeypatch.setattr(clock_samples.os, "readlink", lambda path: (_ for _ in ()).throw(FileNotFoundError()))
    assert steady_clock() == ""


def test_where_events_lie(tmp_path):
    (tmp_path / "events").mkdir()
    assert events_folder(tmp_path) == events_folder(tmp_path / "events") == tmp_path / "events"
    assert events_folder(tmp_path / "events" / "attempt-0-rank-0-000001.parquet") == tmp_path / "events"
