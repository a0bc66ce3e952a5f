"""``tilth guard simulate`` on a small trace."""

import json

from typer.testing import CliRunner

from tilth.cli.main import app


def call(*args):
    return CliRunner().invoke(app, ["guard", "simulate", "addition-grpo", *map(str, args)])


def test_the_table_and_its_json(tmp_path):
    events = [
        {"node_id": f"n{i % 3}", "event_time": i + half / 2, "event_type": kind}
        for i in range(6)
        for half, kind in enumerate(("fault_start", "fault_end"))
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    found = call(
        "--trace", path, "--trace-nodes", 8, "--nodes", 16, "--detect", 2, "run.save_every=3", "--seed", 1, "--json"
    )
    assert found.exit_code == 0, found.output
    table = json.loads(found.stdout)
    assert (table["nodes"], table["incidents"], table["policy"]["interval"]) == (16, 12, 30.0)
    rows = {row["about"]: row["ettr"] for row in table["rows"]}
    assert rows["the recipe's settings"] > rows["without snapshots in memory"] > 0
    text = call("--trace", path, "--trace-nodes", 8).stdout
    assert "ETTR" in text
    measured = [
        {"fault": "a rank is killed", "detect_median": 0.25, "pause_median": 1.5},
        {"fault": "a rank is stopped", "detect_median": 4.0, "hang_after": 3.0},
    ]
    (tmp_path / "measured.json").write_text(json.dumps(measured))
    words = ("--trace", path, "--trace-nodes", 8, "--measured", tmp_path / "measured.json", "guard.hang_after=60")
    policy = json.loads(call(*words, "--json").stdout)["policy"]
    assert (policy["detect"], policy["restart"], policy["hang_after"]) == (0.25, 1.25, 61.0)
    found = call("--trace", path, "--trace-nodes", 8, "--measured", path)
    assert (found.exit_code, "--measured" in found.output or "faults.py" in found.output) == (2, True)


def test_a_trace_that_is_none(tmp_path):
    (tmp_path / "trace.json").write_text("[]")
    found = call("--trace", tmp_path / "trace.json")
    assert (found.exit_code, "no trace of faults" in found.output) == (2, True)
    found = call("--trace", tmp_path / "trace.json", "--without", "hope")
    assert (found.exit_code, "--without" in found.output) == (2, True)
