"""``tilth guard locate``: what a person reads, its JSON, and bad input in one line."""

import json

import pytest
from typer.testing import CliRunner

from tilth.cli.main import app


def call(*arguments):
    return CliRunner().invoke(app, ["guard", "locate", *map(str, arguments)])


def dump(enqueued, completed):
    status = {
        "last_enqueued_collective": enqueued,
        "last_started_collective": -1,
        "last_completed_collective": completed,
    }
    config = {"0": {"desc": "dp", "ranks": "[0, 1, 2]"}}
    return json.dumps({"version": "2.9", "pg_config": config, "pg_status": {"0": status}, "entries": []})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "_dump_0").write_text(dump(8, 7))
    (tmp_path / "_dump_1").write_text(dump(8, 7))
    (tmp_path / "_dump_2").write_text(dump(7, 7))
    return tmp_path


def test_the_late_rank_is_named(folder):
    done = call(folder)
    assert done.exit_code == 0 and "hang: rank 2\n" in done.output and "ranks 0, 1 wait" in done.output
    found = json.loads(call(folder, "--json").output)
    assert (found["verdict"]["ranks"], found["silent"], found["dumps"]) == ([2], [], [0, 1, 2])


def test_a_rank_without_a_dump_is_silent(folder):
    (folder / "_dump_2").unlink()
    assert "2 dumps, none of rank 2" in call(folder).output
    assert json.loads(call(folder, "--json").output)["verdict"]["ranks"] == [2]


def test_a_healthy_job(folder):
    for rank in range(3):
        (folder / f"_dump_{rank}").write_text(dump(8, 8))
    assert call(folder).output == "3 dumps\nno rank waits for another one\n"
    assert json.loads(call(folder, "--json").output)["verdict"] is None


def test_bad_input_is_one_line(folder, tmp_path):
    (folder / "_dump_1").write_text("{}")
    done = call(folder)
    assert done.exit_code == 2 and "_dump_1: version is missing" in done.output
    assert call(tmp_path / "none").exit_code == 2
