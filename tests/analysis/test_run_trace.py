"""Which attempt is read, and what of a trace that is missing is told: parts, ranks, the controller."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.analysis.tree import s, table, two_workers
from tests.cli.test_trace_run import make
from tests.errors import raises
from tilth.analysis.events import load
from tilth.analysis.run_trace import gaps, open_run
from tilth.cli.main import app
from tilth.core.errors import DataError
from tilth.trace.clock_samples import rounds_path
from tilth.ui.report import write_report

PARTS = 6


def write(folder, roots, attempt=1, parts=PARTS):
    """Each rank's events in so many files, by time of their ends, and who was there."""
    events = folder / "events"
    events.mkdir(parents=True, exist_ok=True)
    whole = table(*roots)
    for rank in {root["rank"] for root in roots}:
        rows = [row | {"attempt": attempt} for row in whole.to_pylist() if row["rank"] == rank]
        rows.sort(key=lambda row: row["start"] + row["duration"])
        for part in range(1, parts + 1):
            mine = rows[(part - 1) * len(rows) // parts : part * len(rows) // parts]
            made = pa.Table.from_pylist(mine, schema=whole.schema)
            pq.write_table(made, events / f"attempt-{attempt}-rank-{rank}-{part:06d}.parquet")
    with rounds_path(events, attempt).open("w") as file:
        for rank in sorted({root["rank"] for root in roots}):
            file.write(json.dumps({"rank": rank, "epoch": 0, "clock": "one", "host": "vm", "pid": 1}) + "\n")
    return folder


def said(*arguments):
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run", two_workers())


def part(run, rank, number, attempt=1):
    return run / "events" / f"attempt-{attempt}-rank-{rank}-{number:06d}.parquet"


COMMANDS = [(), ("whatif",), ("export",), ("costs",)]


@pytest.mark.parametrize("command", COMMANDS)
def test_of_a_whole_trace_nothing_is_said(run, command):
    assert gaps(run, 1) == []
    assert "missing" not in said(*command, run).output.replace("calls are missing", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_part_that_is_gone_is_told(run, command):
    part(run, 1, 3).unlink()
    assert "of rank 1 part 3 is missing" in " ".join(said(*command, run).output.split())


def test_many_parts_are_counted_and_a_torn_last_one_is_named(run):
    for number in (1, 2, 3, 4, 5):
        part(run, 0, number).unlink()
    part(run, 2, 6).write_bytes(b"PAR1 torn")
    assert gaps(run, 1) == [
        "of rank 0 parts 1, 2, 3 and 2 more are missing: what it did then looks like waiting",
        "of rank 2 the last part (6) is torn and left out",
    ]


@pytest.mark.parametrize("command", [(), ("export",), ("costs",)])
def test_a_rank_without_any_events_is_told(run, command):
    for number in range(1, PARTS + 1):
        part(run, 1, number).unlink()
    output = " ".join(said(*command, run).output.split())
    assert "there are no events of rank 1 of 2: no file of it is there" in output


def test_without_the_clocks_the_recipe_says_who_was_there(run):
    rounds_path(run / "events", 1).unlink()
    for number in range(1, PARTS + 1):
        part(run, 1, number).unlink()
    assert gaps(run, 1) == []  # nobody knows
    (run / "recipe.toml").write_text('[cluster]\nbackend = "local"\nworkers = 2\n')
    assert gaps(run, 1) == ["there are no events of rank 1 of 2: no file of it is there"]
    (run / "recipe.toml").write_text("[cluster\n")
    assert gaps(run, 1) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_controllers_files_are_gone(run, command):
    for number in range(1, PARTS + 1):
        part(run, 2, number).unlink()
    result = said(*command, run)
    assert result.exit_code == 2 and result.stdout == ""
    assert "there are no events of the controller (rank 2): no file of it is there" in result.output
    assert "no step has ended yet" not in result.output


def test_the_report_tells_it_too(tmp_path):
    records = [{"step": 1, "time/step": 1.0}, {"step": 2, "time/step": 1.0}]
    run = write(make(tmp_path, records=records), two_workers())
    assert "is missing" not in write_report(run).read_text()
    part(run, 1, 3).unlink()
    assert "of rank 1 part 3 is missing" in write_report(run).read_text()


BEGUN = [s("call", 5, 25, rank=0, seq=1, step=3), s("call", 5, 25, rank=1, seq=1, step=3), s("save", 1, 4, rank=2)]


def test_before_its_first_step_a_continuation_shows_the_attempt_before(run):
    write(run, BEGUN, attempt=2, parts=1)
    opened = open_run(run)
    assert opened.events.attempt == 1 and opened.events.steps == (1, 2)
    assert opened.notes == ("no step of attempt 2 has ended yet: this is attempt 1",)
    found = json.loads(said(run, "--json").stdout)
    assert found["attempt"] == 1 and found["notes"] == list(opened.notes)
    assert load(run).attempt == 2  # who reads by himself gets what he asks for


def test_an_attempt_can_be_chosen(run):
    later = [s("step", 10, 50, rank=2, step=3), s("call", 12, 48, rank=0, step=3, seq=1),
             s("call", 12, 48, rank=1, step=3, seq=1)]  # fmt: skip
    write(run, later, attempt=2, parts=1)
    for command in COMMANDS[:1] + COMMANDS[2:3]:
        assert said(*command, run).exit_code == said(*command, run, "--attempt", "1").exit_code == 0
    assert json.loads(said(run, "--json").stdout)["steps"]["first"] == 3
    assert json.loads(said(run, "--attempt", "1", "--json").stdout)["steps"]["last"] == 2
    assert json.loads(said("whatif", run, "--attempt", "1", "--json").stdout)["attempt"] == 1
    for command in COMMANDS:
        wrong = said(*command, run, "--steps", "1")
        assert wrong.exit_code == 2 and "--attempt 1" in wrong.output and "its steps are 3 to 3" in wrong.output
        assert "no attempt 7; there are 1, 2" in said(*command, run, "--attempt", "7").output


def test_no_sentence_breaks_off(tmp_path):
    run = write(tmp_path / "run", BEGUN, parts=1)
    for command in COMMANDS:
        result = said(*command, run, "--steps", "40")
        assert result.exit_code == 2 and "step" in result.output.splitlines()[-1]
        assert "there are\n" not in result.output and "0 to 0" not in result.output
    with raises(DataError, "steps"):
        open_run(run, steps=range(40, 41))
