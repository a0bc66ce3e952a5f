"""Metrics as columns: equal to the records, however they are read, replaced and torn."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.ui.fake import recipe
from tests.ui.web.runs import lines
from tilth.runs.directory import RunDir
from tilth.runs.metrics import KEYS
from tilth.runs.readers import read_metrics, summarise
from tilth.ui.web import metric_table
from tilth.ui.web.follow import FollowedRun
from tilth.ui.web.metric_table import MetricTable
from tilth.ui.web.views import points_of

NAMES = ("loss", "reward/mean", "reward/heldout", "accuracy/heldout", "reward/heldout/low", "reward/heldout/high",
         "loss/heldout", "accuracy/pairs", "reward/heldout/part/x", "tokens_per_second/generate", "time/generate",
         "reward/missing", "mismatch/max", "padding", "memory/peak", "samples")  # fmt: skip
numbers = st.one_of(st.none(), st.floats(0, 1e9, allow_nan=False), st.integers(0, 1 << 40))
records = st.lists(
    st.fixed_dictionaries(
        {"step": st.integers(1, 30), "attempt": st.integers(1, 3),
         "phase": st.sampled_from(["warmup", "values", "grpo"]), "seconds": st.floats(0, 1e6),
         "phase_steps": st.integers(1, 9)},
        optional={name: numbers for name in NAMES},
    ),
    max_size=12,
)  # fmt: skip


def same(table, wanted):
    """True if a table holds exactly these records."""
    found = [table.record(row) for row in range(len(table))]
    given = [{k: v for k, v in record.items() if v is not None} for record in wanted]
    return found == given


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with RunDir.create(recipe(tmp_path_factory.mktemp("runs")), "any") as made:
        pass
    return made.path


@settings(max_examples=examples(400), deadline=None)
@given(records, records, st.sampled_from([0, 1 << 16]), st.sampled_from([256, 16 << 20]))
def test_it_holds_the_records_and_their_summary(run, first, more, few, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metric_table, "FEW", few)  # 0: Arrow reads them
        patch.setattr(metric_table, "BLOCK", max(block, 1200))
        path = run / "metrics.jsonl"
        lines(path, *first)
        table = MetricTable(path)
        assert table.new()[0] == first[-100:]
        late = table.version[2]
        with open(path, "a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in more))
        assert table.new() == (more[-100:], False)
        assert same(table, read_metrics(run)) and not table.unread
        whole = MetricTable(path)
        whole.new()
        assert whole.version == table.version
        newest = max((record["step"] for record in first), default=0)
        rising = [newest, *(record["step"] for record in more)]
        assert (table.version[2] == late) == all(a < b for a, b in itertools.pairwise(rising))
        shown, wanted = summarise(run, table.steps()), summarise(run)
        assert shown == wanted


def test_lines_that_are_no_steps_are_counted(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 2.0}\n{"ste\n[1]\n{"step": true}\n{"step": 2, "loss": "x", "a": [1]}\n{"step": 3'
    )
    table = MetricTable(path)
    assert len(table.new()[0]) == 2 and table.unread == 3 and len(table) == 2
    with open(path, "a") as file:
        file.write(', "loss": 5}\n')
    table.new()
    assert table.column("loss").tolist()[::2] == [2.0, 5.0] and np.isnan(table.column("loss")[1])


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    table = MetricTable(path)
    assert table.new() == ([], False)
    lines(path, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0})
    assert table.new()[1] is True and len(table) == 2
    lines(tmp_path / "new", {"step": 1, "loss": 7.0})
    (tmp_path / "new").rename(path)
    assert table.new()[1] is True and table.column("loss").tolist() == [7.0]
    path.unlink()
    assert table.new() == ([], True) and len(table) == 0


@pytest.mark.parametrize("longer", [0, 1])
def test_a_file_that_was_written_anew_in_its_place_is_read_anew(tmp_path, longer):
    """As one in the inode of a run that was removed."""
    path = tmp_path / "metrics.jsonl"
    first = [{"step": step, "loss": step + 0.1} for step in range(1, 6)]
    other = [{"step": step, "loss": step + 0.2} for step in range(1, 6 + longer)]
    lines(path, *first)
    table = MetricTable(path)
    table.new()
    version, inode = table.version, path.stat().st_ino
    lines(path, *other)
    assert path.stat().st_ino == inode and table.new()[1]
    assert same(table, other) and table.version[0] != version[0]


def test_a_page_reads_whole_columns_while_another_reads_on(run, monkeypatch):
    records = [{"step": step, "attempt": 1, "phase": "grpo", "loss": float(step)} for step in range(1, 601)]
    lines(run / "metrics.jsonl", *records[:200])
    followed, seen, convert = FollowedRun(run), [], metric_table._numbers
    followed.refresh()

    def between(values):
        seen.append((followed.table.version, points_of(followed.table, "loss")[1].tolist()))
        return convert(values)

    monkeypatch.setattr(metric_table, "_numbers", between)
    before = followed.table.version
    with open(run / "metrics.jsonl", "a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in [*records[200:], records[99]]))
    followed.refresh()
    assert len(seen) > 1 and all(one == (before, [r["loss"] for r in records[:200]]) for one in seen)
    assert same(followed.table, records)


def test_keys_are_no_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines(path, dict.fromkeys(KEYS, 1) | {"phase": "grpo", "loss": 1.0})
    table = MetricTable(path)
    table.new()
    assert table.names == ["loss"] and table.phase_steps() == {"GRPO": 1}
