"""``tilth trace whatif RUN``: its JSON, what a person reads, the picture, and bad input in one line."""

import json
import xml.dom.minidom

import pyarrow.parquet as pq
import pytest
from tilth_studies.run_whatif import what_if_run
from typer.testing import CliRunner

from tests.analysis.run_jobs import Job
from tests.analysis.test_run_whatif import pair
from tests.studies.test_trace_whatif import KEYS
from tilth.analysis.run_trace import open_run
from tilth.analysis.run_whatif import analyse_events
from tilth.cli.main import app


def call(*arguments):
    return CliRunner().invoke(app, ["trace", "whatif", *map(str, arguments)])


def written(path, job):
    (path / "events").mkdir(parents=True)
    pq.write_table(job.table(), path / "events" / "attempt-1-rank-0-000001.parquet")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return written(tmp_path_factory.mktemp("runs") / "slow", pair(1.5, steps=6))


def test_json_has_the_keys_of_foreign_traces_and_more(run):
    result = call(run, "--json", "--steps", "2:5", "--bandwidth", "1GB/s")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    model, _, cause = analyse_events(open_run(run).events, range(2, 5))
    found = what_if_run(model)
    assert list(said)[: len(KEYS)] == KEYS
    assert (said["slowdown"], said["ideal_step"]) == (found.slowdown, found.ideal.mean())
    assert said["by_stage"] == {} and said["m_s"] == 0 and said["m_w"] == found.m_w.share
    assert said["by_dp"] == {"0": found.by_dp[0].mean, "1": found.by_dp[1].mean}
    worst = said["by_worker"][0]
    assert worst == {"dp": 1, "stage": 0, "rank": 1, "exact": found.exact[1], "shortcut": found.exact[1]}
    assert said["by_axis"] == {"dp": said["by_dp"]}
    assert said["steps"] == {"first": 2, "last": 4, "count": 3} and said["left_out"] == []
    assert said["step"] == pytest.approx(found.recorded.mean()) and abs(said["model_error"]) < 0.01
    (finding,) = said["cause"]["findings"]
    assert (finding["kind"], finding["where"]) == ("slow-worker", [{"dp": 1, "stage": 0, "rank": 1}])
    assert finding["seconds"] == cause.findings[0].seconds == pytest.approx(6.0 + 0.1 + 0.05 + 0.05, rel=0.02)
    assert said["other_network"] < said["step"]
    assert said["assumed"] == ["all_reduce among 2 ranks: 4,000,000 to 4,000,000 bytes"]
    assert json.loads(call(run, "--json").stdout)["assumed"] == []


def test_what_a_person_reads(run):
    text = call(run).stdout
    assert "2 workers; steps 1 to 6" in text and "slowdown S 1.1948" in text
    assert "error of the model 0.00 % (recorded over a replay with usual delays of dispatch; worst step 0.00 %)" in text
    assert "cause: slow worker: rank 1 takes 1.50 times as long as its peers" in text
    assert "on the other network" not in text
    faster = call(run, "--latency", "0us", "--bandwidth", "100Gbit").stdout
    assert "wait for bandwidth alone" not in faster
    alone = " ".join(call(run, "--bandwidth", "100Gbit").stdout.split())
    assert "wait for bandwidth alone and never for latency" in alone
    assert "all_reduce among 2 ranks: 4,000,000 to 4,000,000 bytes" in alone
    assert "on the other network a step takes 9.1 s" in faster or "on the other network a step takes 9.0" in faster


def test_picture(run, tmp_path):
    assert call(run, "--svg", tmp_path / "heat.svg").exit_code == 0
    page = xml.dom.minidom.parse(str(tmp_path / "heat.svg"))
    titles = [t.firstChild.data for t in page.getElementsByTagName("title")]
    assert "dp 1 (rank 1): 1.195" in "".join(titles)


def test_one_process(tmp_path):
    job = Job(0)
    for _ in range(3):
        with job:
            job.think(1.0, "generate")
            job.think(0.5, "update")
    run = written(tmp_path / "inline", job)
    text = call(run).stdout
    assert "inline: one process, so there are no peers to compare it with" in text and "worker" not in text
    refused = call(run, "--svg", tmp_path / "heat.svg")
    assert refused.exit_code == 2 and refused.stderr.startswith("error: --svg") and "no workers" in refused.stderr
    assert json.loads(call(run, "--json").stdout)["by_worker"] == []


def test_bad_input_is_one_line(run, tmp_path):
    (tmp_path / "empty" / "events").mkdir(parents=True)
    begun = Job(2)
    begun.step_number = 1
    begun.do("policy.update", {0: [("update", 1.0)], 1: [("update", 1.0)]})
    for arguments, words in [
        ((tmp_path / "empty",), "has no events yet"),
        ((written(tmp_path / "begun", begun),), "no step of the run has ended yet"),
        ((run, "--steps", "50:60"), "no events of steps 50:60; its steps are 1 to 6"),
        ((run, "--bandwidth", "fast"), "bandwidth 'fast' is not of the form 10Gbit"),
        ((run, "--latency", "0"), "latency '0' is not of the form 50us"),
        ((run, "--meta", tmp_path / "m.yaml"), "error: --meta"),
        ((tmp_path / "file.parquet", "--steps", "1:2"), "need a RUN"),
        ((run, "--svg", tmp_path / "no" / "heat.svg"), "cannot write"),
    ]:
        result = call(*arguments)
        assert result.exit_code == 2 and words in result.stderr, (arguments, result.output)
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_a_loss_that_no_cause_explains_is_called_jitter(tmp_path):
    job = Job(2)
    for i in range(8):
        with job:
            job.do("policy.update", {r: [("update", 1.5 if (i + r) % 2 else 1.0)] for r in (0, 1)})
    text = " ".join(call(written(tmp_path / "jitter", job)).stdout.split())
    assert "is scattered over ranks and steps (jitter: now the one is slow, now the other)" in text
    assert "of 2 mended: each step ideal for its own work, jitter included)" in text
    assert "both of the loss" not in text


def test_one_of_a_thing_is_no_plural(tmp_path):
    job = Job(1)
    for _ in range(3):
        with job:
            job.do("policy.update", {0: [("update", 1.0)]})
    text = call(written(tmp_path / "one", job)).stdout
    assert "1 worker;" in text and "1 workers" not in text
