"""Who runs what of ``-n``: one process all tests of Ray, one all of the pool, any process a whole file of the rest; and
that no test leaves its process other than it was."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import surroundings

ROOT = Path(__file__).parents[1]
FILE = """
import os, pytest
from pathlib import Path

@pytest.fixture(autouse=True)
def noted(request):
    Path(os.environ["SEEN"], f"{request.node.name}-NUMBER").write_text(os.environ["PYTEST_XDIST_WORKER"])

@pytest.mark.dist
def test_pool(pool): ...

@pytest.mark.ray
@pytest.mark.dist
def test_ray(): ...

def test_first(): ...

def test_second(): ...
"""
LOST = """
import pytest
from pathlib import Path

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config):
    if hasattr(config, "workerinput"):
        Path(config.workerinput["groups"]).write_text("{}")
"""
"""Before the process says that it has collected: from then on the groups may be read."""


def seen(folder, conftest=""):
    """Processes that ran each kind of test, and each file's plain tests."""
    (folder / "seen").mkdir()
    (folder / "conftest.py").write_text(conftest)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    dist\n    ray\n")
    for number in range(4):
        (folder / f"test_{number}.py").write_text(FILE.replace("NUMBER", str(number)))
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "2", "--dist", "loadgroup", "-q", folder]
    command += ["--no-loadscope-reorder", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": path, "SEEN": str(folder / "seen")}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and "processor seconds: " in ran.stdout, ran.stdout + ran.stderr
    return {file.name: file.read_text() for file in (folder / "seen").iterdir()}


def processes(found, kind):
    return {process for name, process in found.items() if name.startswith(f"test_{kind}-")}


def test_groups_have_one_process_each_and_files_stay_together(tmp_path):
    found = seen(tmp_path)
    assert len(found) == 16 and len(set(found.values())) == 2
    assert len(processes(found, "pool")) == len(processes(found, "ray")) == 1
    assert all(found[f"test_first-{n}"] == found[f"test_second-{n}"] for n in range(4))


@pytest.mark.slow
def test_groups_that_got_lost_would_be_seen(tmp_path):
    assert len(processes(seen(tmp_path, LOST), "pool")) == 2


@pytest.mark.parametrize(
    ("change", "put_back"),
    [
        (lambda: os.environ.update(LEFT="1"), lambda: os.environ.pop("LEFT")),
        (lambda: os.chdir("/"), lambda here=os.getcwd(): os.chdir(here)),
        (lambda: signal.signal(signal.SIGUSR2, print), lambda: signal.signal(signal.SIGUSR2, signal.SIG_DFL)),
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    ],
)
def test_what_a_test_leaves_behind_is_seen(change, put_back):
    before = surroundings(torch)
    change()
    after = surroundings(torch)
    put_back()
    assert after != before == surroundings(torch)
