"""The doctor measures, and advises by what it found."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from tilth.cli import doctor
from tilth.cli.doctor import Findings, Product, advise, cpu_features, lines
from tilth.cli.main import app

PLAIN = [Product("fp32 highest", 100.0, 1e-7), Product("fp32 medium", 100.0, 1e-7), Product("bf16", 100.0, 4e-3)]
WELL = Findings("3.11.7", "2.13.0", [], 2, 2, 2, 0.1, 8 * 10**9, 4 * 10**9, None, 50 * 10**9, True, PLAIN, 1.5)


def advised(**changes):
    return " / ".join(advise(replace(WELL, **changes)))


def test_a_well_machine_needs_no_advice():
    assert advised() == "" and WELL.able and lines(WELL)[-1] == "nothing to repair"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"run_error": "out of luck"}, "failed: out of luck"),
        ({"namesake": "3.2.1 in /site"}, "pip uninstall tilth"),
        ({"disk_writable": False}, "set run.dir"),
        ({"disk_free": 10**9}, "only 1.0 GB"),
        ({"load": 5.0}, "other programs are busy"),
        ({"gpu": "H200"}, "GPU is used"),
        (
            {"products": [PLAIN[0], Product("m", 200.0, 2e-7), PLAIN[2]]},
            "medium multiplies 2.0 x faster here and is as exact",
        ),
        ({"products": [PLAIN[0], Product("m", 300.0, 4e-3), PLAIN[2]]}, "less exact (4e-03)"),
        ({"products": [*PLAIN[:2], Product("bf16", 400.0, 4e-3)]}, "bf16 multiplies 4.0 x faster"),
    ],
)
def test_advice(changes, part):
    assert part in advised(**changes)


def test_able_to_run_or_not():
    assert not replace(WELL, run_error="x").able and not replace(WELL, disk_writable=False).able


def test_products_are_measured_and_leave_the_setting_as_it_was(monkeypatch):
    monkeypatch.setattr(doctor, "_SIZE", 64)
    monkeypatch.setattr(doctor, "_SECONDS", 0.01)
    before = torch.get_float32_matmul_precision()
    exact, _, half = doctor.products()
    assert torch.get_float32_matmul_precision() == before
    assert exact.gflops > 0 and exact.error < 1e-5 < half.error < 0.1


def test_cpu_features(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor: 0\nflags\t\t: fpu avx2 amx_bf16 avx512f\nflags: none\n")
    assert cpu_features(path) == ["avx2", "avx512f", "amx_bf16"] and cpu_features(tmp_path / "none") == []


@pytest.mark.parametrize(("outcome", "code"), [((1.0, None), 0), ((None, "no luck"), 1)])
def test_command(monkeypatch, outcome, code):
    monkeypatch.setattr(doctor, "_SIZE", 64)
    monkeypatch.setattr(doctor, "_SECONDS", 0.01)
    monkeypatch.setattr(doctor, "try_run", lambda: outcome)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == code and "GFLOP/s" in result.stdout
    found = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert found["run_error"] == outcome[1] and len(found["products"]) == 3


def test_the_miniature_run_works_here():
    _, error = doctor.try_run()
    assert error is None


def test_the_miniature_run_reports_what_fails(monkeypatch):
    from tilth.core.errors import ModelError

    def fail(*args, **kwargs):
        raise ModelError("broken")

    monkeypatch.setattr(doctor, "run_recipe", fail)
    assert doctor.try_run() == (None, "broken")
