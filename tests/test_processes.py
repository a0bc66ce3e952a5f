"""Which of several processes runs what: one all tests of Ray, one all of the pool, any a whole file of the rest; what
dies with one; and that no test leaves its process other than it was."""

import os
import re
import signal
import subprocess

import pytest
import torch

from tests import forked
from tests.conftest import surroundings

FILE = """
import os, pytest, time
from pathlib import Path

SEEN = Path(os.environ["SEEN"])

@pytest.fixture(autouse=True)
def noted(request):
    SEEN.joinpath(f"{request.node.name}-NUMBER").write_text(str(os.getpid()))

@pytest.mark.dist
def test_pool(pool): ...

@pytest.mark.ray
@pytest.mark.dist
def test_ray(): ...

def test_first(tmp_path):
    until = time.monotonic() + 100
    while len({file.read_text() for file in SEEN.iterdir()} - {""}) < 2 and time.monotonic() < until:
        time.sleep(0.01)  # else one process may have ended all before the other one begins

def test_second(tmp_path): ...
"""
DYING = """
import os, pytest, warnings

@pytest.fixture(scope="session")
def kept():
    yield
    open("ended", "a").write("x")

def test_before(kept): warnings.warn("seen")

def test_dies(): os.kill(os.getpid(), 9)

def test_after(kept): print("told"); assert False

def test_last(): ...
"""


def run(folder, *options):
    """Run the tests of a folder in two processes."""
    (folder / "seen").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    dist\n    ray\n    slow\n    gpu\n")
    command = [*forked.python(), "-m", "pytest", "-p", "tests.conftest", "--processes", "2", "-q", *options, folder]
    environment = {**os.environ, "SEEN": str(folder / "seen")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def processes(found, kind):
    return {process for name, process in found.items() if name.startswith(f"test_{kind}-")}


def test_groups_have_one_process_each_and_files_stay_together(tmp_path):
    for number in range(4):
        (tmp_path / f"test_{number}.py").write_text(FILE.replace("NUMBER", str(number)))
    ran = run(tmp_path)
    assert ran.returncode == 0 and "16 passed" in ran.stdout, ran.stdout + ran.stderr
    assert re.search(r"processor seconds: \d+ of all tests, \d+ before them", ran.stdout)
    found = {file.name: file.read_text() for file in (tmp_path / "seen").iterdir()}
    assert len(found) == 16 and len(set(found.values())) == 2
    assert len(processes(found, "pool")) == len(processes(found, "ray")) == 1
    assert all(found[f"test_first-{n}"] == found[f"test_second-{n}"] for n in range(4))


@pytest.mark.parametrize(("how", "code"), [("os.kill(os.getpid(), 9)", -9), ("os._exit(0)", 0)])
def test_a_process_that_dies_fails_its_test_and_another_goes_on(tmp_path, how, code):
    (tmp_path / "test_dying.py").write_text(DYING.replace("os.kill(os.getpid(), 9)", how))
    ran = run(tmp_path)
    assert ran.returncode == 1 and "2 failed, 2 passed" in ran.stdout, ran.stdout + ran.stderr
    assert f"test_dies - the process that ran this test ended with {code}" in ran.stdout
    assert "told" in ran.stdout and "UserWarning: seen" in ran.stdout
    assert (tmp_path / "ended").read_text() == "x"  # by the second process


@pytest.mark.slow
def test_the_first_failure_may_end_all(tmp_path):
    (tmp_path / "test_dying.py").write_text(DYING)
    (tmp_path / "test_other.py").write_text("import time\ndef test_long(): time.sleep(100)")
    ran = run(tmp_path, "-x")
    assert "1 failed, 1 passed" in ran.stdout and "stopping after 1 failures" in ran.stdout, ran.stdout + ran.stderr


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
