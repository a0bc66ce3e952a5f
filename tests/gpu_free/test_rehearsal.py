"""The tests of a GPU, on a pretended one: in a process of its own, which pretends from its start."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_tests_of_a_gpu_pass_on_a_pretended_one(which):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu_free.device", "-m", f"gpu and {which}"]
    ran = subprocess.run([*command, "tests/test_gpu.py", "tests/gpu_free"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-8000:] + ran.stderr[-2000:]
