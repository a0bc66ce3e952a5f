"""The newest files of a trace: a step is told once all of it was read, however many files that takes."""

import itertools

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.tree import s, table
from tests.examples import examples
from tilth.analysis.events import from_table
from tilth.analysis.recent import recent, told
from tilth.analysis.time_breakdown import account

CALLS = 6


def step(number, start, rank=0):
    """A step of 100 ns: generate, the longest, ends early; evaluate is its last part."""
    return s("step", start, start + 100, s("call", start, start + 62, s("generate", start + 1, start + 60)),
             s("evaluate", start + 70, start + 99), rank=rank, step=number)  # fmt: skip


def keep(folder, roots, cuts, attempt=1):
    """Files as the recorder writes them: at each of the moments ``cuts`` all that has ended since the last."""
    folder.mkdir(exist_ok=True)
    whole = table(*roots)
    end = pc.add(whole["start"], whole["duration"])
    for rank in set(whole["rank"].to_pylist()):
        for part, (low, high) in enumerate(itertools.pairwise([-(10**9), *cuts, 10**9]), 1):
            rows = pc.and_(pc.equal(whole["rank"], rank), pc.and_(pc.greater(end, low), pc.less_equal(end, high)))
            if found := whole.filter(rows):
                pq.write_table(found, folder / f"attempt-{attempt}-rank-{rank}-{part:06d}.parquet")


def test_a_step_whose_children_lie_in_an_earlier_file_is_read_back_to_its_start(tmp_path):
    keep(tmp_path / "events", [step(i, 100 * i) for i in range(1, 5)], [180, 265, 365, 450])
    events, steps = recent(tmp_path)
    assert 4 in steps
    shares = account(events, range(4, 5)).parts
    assert shares == pytest.approx({"generate": 59e-9, "evaluate": 29e-9, "other": 12e-9})


def test_a_step_longer_than_many_files_is_read_as_a_whole(tmp_path):
    keep(tmp_path / "events", [step(1, 100), step(2, 200)], range(110, 300, 7))
    events, steps = recent(tmp_path)
    assert steps == range(2, 3) or steps == range(1, 3)
    assert account(events, range(2, 3)).parts["generate"] == pytest.approx(59e-9)


def test_of_many_steps_few_files_are_read(tmp_path):
    keep(tmp_path / "events", [step(i, 100 * i) for i in range(1, 150)], range(150, 15000, 100))
    events, steps = recent(tmp_path)
    assert steps[-1] == 149 and len(events) < 40


def test_a_file_in_the_midst_that_cannot_be_read_is_no_hole(tmp_path):
    keep(tmp_path / "events", [step(i, 100 * i) for i in range(1, 5)], [180, 265, 365, 450])
    (tmp_path / "events" / "attempt-1-rank-0-000004.parquet").write_bytes(b"PAR1")
    _, steps = recent(tmp_path)
    assert not len(steps)  # the last file has the end of step 4 alone


def test_the_newest_file_may_be_torn(tmp_path):
    keep(tmp_path / "events", [step(i, 100 * i) for i in range(1, 5)], [205, 305, 405])
    (tmp_path / "events" / "attempt-1-rank-0-000005.parquet").write_bytes(b"PAR1")
    assert recent(tmp_path)[1][-1] == 4


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_whatever_is_cut_off_what_is_told_is_as_in_the_whole(data):
    roots = [step(i, 100 * i) for i in range(1, CALLS)]
    whole = table(*roots)
    ends = pc.add(whole["start"], whole["duration"]).to_pylist()
    cut = data.draw(st.integers(100, 100 * CALLS - 1))
    events = from_table(whole.filter([end > cut for end in ends]))
    steps = told(events, {0})
    assert set(steps) == {i for i in range(1, CALLS) if 100 * i >= min(end for end in ends if end > cut)}
    for i in steps:
        parts = account(events, range(i, i + 1)).parts
        assert parts == pytest.approx(account(from_table(whole), range(i, i + 1)).parts)
