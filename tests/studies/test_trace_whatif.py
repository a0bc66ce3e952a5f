"""``tilth trace whatif``: its JSON, what a person reads, the picture, and bad input in one line."""

import json
import os
import subprocess
import sys
import xml.dom.minidom

import numpy as np
import pyarrow.parquet as pq
import pytest
from pipeline_schedules import by_type, orders, synthetic, to_table
from tilth_studies.straggler_format import read_study
from tilth_studies.whatif import what_if
from typer.testing import CliRunner

from tests.errors import raises
from tilth.cli.declare import study
from tilth.cli.main import app
from tilth.core.errors import PluginError
from tilth.ui.heat import colour

KEYS = ["slowdown", "ideal_step", "by_optype", "by_stage", "by_dp", "by_worker", "m_w", "m_s", "cause"]
USUAL = by_type(forward_compute=1.0, backward_compute=2.0, grads_reduce_scatter=0.4, optimizer=0.2)


def call(*arguments):
    return CliRunner().invoke(app, ["trace", "whatif", *map(str, arguments)])


def slow(trace):
    took = np.broadcast_to(USUAL(trace), trace.start.shape).copy()
    took[(trace.stage == 1) & trace.named("forward-compute", "backward-compute"), :, 2] *= 2
    return took


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "job.parquet"
    pq.write_table(to_table(synthetic(orders("1f1b", 4, 8), slow, dp=4, steps=2)), path)
    return path


def test_json_has_these_keys_and_the_numbers_of_the_analysis(file):
    result = call(file, "--json")
    assert result.exit_code == 0
    said, found = json.loads(result.stdout), what_if(read_study(file))
    assert list(said) == KEYS
    assert (said["slowdown"], said["m_w"], said["m_s"]) == (found.slowdown, found.m_w.share, found.m_s.share)
    assert said["ideal_step"] == found.ideal.mean()
    assert said["by_stage"] == {str(i): s.mean for i, s in found.by_stage.items()}
    assert said["by_dp"] == {str(i): s.mean for i, s in found.by_dp.items()}
    assert said["by_optype"]["forward-compute"] == found.by_optype["forward-compute"].mean
    worst = said["by_worker"][0]
    assert len(said["by_worker"]) == 16 and (worst["dp"], worst["stage"], worst["rank"]) == (2, 1, 6)
    assert (worst["exact"], worst["shortcut"]) == (found.exact[1, 2], found.shortcut[1, 2])
    assert said["cause"]["findings"][0]["where"] == [{"dp": 2, "stage": 1, "rank": 6}]
    assert said["cause"]["evidence"]["model_error"] == pytest.approx(0, abs=1e-12)


def test_what_a_person_reads(file):
    text = call(file).stdout
    assert "16 workers (stages 4, dp 4), 2 steps" in text
    assert "cause: slow worker: dp 2 stage 1 (rank 6)" in text
    assert "error of the model 0.00 %" in text and "S exact" in text
    rows = [line for line in text.splitlines() if line.startswith("   stage")]
    assert [row.count("█") > 0 for row in rows] == [False, True, False, False]
    assert rows[1].index("█") == rows[1].rindex("█") - 3 == 19  # the third of four, four characters wide


def test_many_dp_ranks_are_folded_into_the_width(tmp_path):
    pq.write_table(to_table(synthetic(orders("1f1b", 2, 2), slow, dp=200)), tmp_path / "wide.parquet")
    text = call(tmp_path / "wide.parquet").stdout
    assert "a column is the worst of 3" in text
    rows = [line for line in text.splitlines() if line.startswith("   stage")]
    assert max(map(len, rows)) <= 100 and rows[1][11] == "█"


def test_picture(file, tmp_path):
    assert call(file, "--svg", tmp_path / "heat.svg").exit_code == 0
    page = xml.dom.minidom.parse(str(tmp_path / "heat.svg"))
    cells = {t.firstChild.data.split(":")[0]: t.parentNode for t in page.getElementsByTagName("title")}
    assert len(cells) == 16 + 1 and "dp 2 stage 1 (rank 6)" in cells
    fills = {name: node.getAttribute("fill") for name, node in cells.items() if name.startswith("dp")}
    hottest = "#{:02x}{:02x}{:02x}".format(*colour(9.0))
    assert fills.pop("dp 2 stage 1 (rank 6)") == hottest
    assert hottest not in fills.values()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda p: p.write_bytes(p.read_bytes()[:500]), "is truncated or not a Parquet file"),
        (lambda p: pq.write_table(pq.read_table(p).drop_columns(["mb_id", "mc"]), p), "it has no column mc, mb_id"),
        (lambda p: pq.write_table(pq.read_table(p)[:0], p), "the trace is empty"),
        (lambda p: p.unlink(), "no trace at"),
    ],
)
def test_bad_input_is_one_line(file, tmp_path, spoil, message):
    path = tmp_path / "job.parquet"
    path.write_bytes(file.read_bytes())
    spoil(path)
    result = call(path)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_a_meta_that_does_not_fit_and_a_picture_that_cannot_be_written(file, tmp_path):
    (tmp_path / "meta.yaml").write_text("dp_size: 8\n")
    result = call(file, "--meta", tmp_path / "meta.yaml")
    assert result.exit_code == 2 and "says dp_size 8, the column dp_rank of the trace says 4" in result.stderr
    result = call(file, "--svg", tmp_path / "no" / "heat.svg")
    assert result.exit_code == 2 and "cannot write" in result.stderr


def test_no_torch(file):
    code = (
        "import sys; from typer.testing import CliRunner; from tilth.cli.main import app; "
        f"r = CliRunner().invoke(app, ['trace', 'whatif', {str(file)!r}]); print(r.exit_code, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.split() == ["0", "False"]


class Absent:
    """Finder of modules where the studies are not installed."""

    @staticmethod
    def find_spec(name, *_):
        if name == "tilth_studies":
            raise ModuleNotFoundError(name, name=name)


@pytest.mark.parametrize(
    "command", [["trace", "whatif", "FILE"], ["guard", "simulate", "addition-grpo", "--trace", "FILE"]]
)
def test_commands_of_studies_that_are_not_installed_say_so(monkeypatch, command):
    for name in [name for name in sys.modules if name.split(".")[0] == "tilth_studies"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and "pip install . in Tilth's folder" in result.stderr
    with raises(PluginError, "tilth_studies"):
        study("trace_whatif:analyse")
