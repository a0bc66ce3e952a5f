"""Kernels in Triton: their values by the interpreter, what compilers make of them, and when they are chosen."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tilth.core import device as devices
from tilth.core.device import runs_triton, shared_memory, triton_missing
from tilth.models.kernels import KERNELS, chosen
from tilth.plan.kernels import head_stages

ROOT = Path(__file__).parents[3]
INTERPRETED = sorted(Path(__file__).parent.glob("interpreted*.py"))
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: extra triton")
interprets = pytest.mark.skipif(
    find_spec("triton") is not None and tuple(map(int, version("triton").split(".")[:2])) < (3, 8),
    reason="older interpreters read no numbers of numpy 2.4",
)


@needs_triton
@interprets
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_values_in_the_interpreter_are_those_of_the_reference(which):
    command = [sys.executable, "-m", "pytest", "-m", which, "-W", "ignore", *map(str, INTERPRETED)]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout[-8000:] + ran.stderr[-2000:]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
def test_kernels_are_compiled_without_spills(target):
    from tests.models.kernels import compiled

    for name, (kernel, constants) in compiled.KERNELS.items():
        found = compiled.compile_for(target, kernel, constants)
        assert found.spilled == 0 and found.shared <= compiled.MEMORY[target] << 10, (name, found)


@pytest.fixture
def a_gpu(monkeypatch):
    """A GPU that is asked for its capability, and a C compiler."""
    runs_triton.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(devices.shutil, "which", lambda name: f"/bin/{name}")
    yield torch.device("cuda", 0)
    runs_triton.cache_clear()


def as_version(monkeypatch, number):
    monkeypatch.setitem(sys.modules, "triton", None if number is None else SimpleNamespace(__version__=number))


def test_a_cpu_and_an_old_gpu_run_no_kernels(a_gpu, monkeypatch, capsys):
    assert not runs_triton(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not runs_triton(a_gpu) and not capsys.readouterr().err


@pytest.mark.parametrize(("number", "said"), [(None, "is not installed"), ("3.5.1", "Triton 3.5.1 is too old")])
def test_a_missing_triton_is_said_once(number, said, a_gpu, monkeypatch, capsys):
    as_version(monkeypatch, number)
    assert not runs_triton(a_gpu) and not runs_triton(torch.device("cuda", 0))
    assert capsys.readouterr().err.count(said) == 1


def test_a_new_triton_runs_unless_there_is_no_compiler(a_gpu, monkeypatch, capsys):
    as_version(monkeypatch, "3.10.0+git1")
    assert runs_triton(a_gpu) and not capsys.readouterr().err
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert "C compiler" in triton_missing()
    monkeypatch.setenv("CC", "/opt/cc")
    assert "/opt/cc" in triton_missing()


def test_a_kernel_is_chosen_by_device_and_dtype():
    assert all(chosen(name, torch.empty(1, dtype=torch.bfloat16)) is None for name in KERNELS)
    for kernel in KERNELS.values():
        assert find_spec(kernel.module) and find_spec(f"tilth.{kernel.reference}")
        assert torch.float64 not in kernel.dtypes


@pytest.mark.parametrize(("shared", "steps"), [(227, 3), (163, 3), (100, 3), (99, 2), (64, 2), (48, 2)])
def test_a_product_holds_the_steps_that_fit_shared_memory(shared, steps, monkeypatch):
    """Three need 96 KB, and what lies beside them: 99 KB of sm_86, sm_89 and sm_120 hold two."""
    properties = SimpleNamespace(shared_memory_per_block=48 << 10, shared_memory_per_block_optin=shared << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert head_stages(shared_memory(torch.device("cuda", 0))) == steps
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert head_stages(shared_memory(torch.device("cuda", 0))) == 2


@needs_triton
def test_the_head_is_launched_with_these_steps(monkeypatch):
    from tilth.models.kernels import linear_cross_entropy as head

    for steps, shared in ((2, 99), (3, 163)):
        monkeypatch.setattr(head, "shared_memory", lambda device, shared=shared: shared << 10)
        assert head._how(torch.device("cuda", 0))["num_stages"] == steps


def test_a_gpu_gets_the_kernels_of_a_dtype(a_gpu, monkeypatch):
    as_version(monkeypatch, "3.9.0")
    monkeypatch.setattr("tilth.models.kernels.importlib.import_module", lambda name: name.rpartition(".")[2])
    for dtype, found in (
        (torch.bfloat16, {"linear_cross_entropy", "rope_cache"}),
        (torch.float32, {"sampler"}),
        (torch.float64, set()),
    ):
        x = SimpleNamespace(device=a_gpu, dtype=dtype)
        assert {name for name in KERNELS if chosen(name, x) == name} == found
