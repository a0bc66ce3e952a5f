"""What memory a process may take, by files of cgroups, and what failed allocations of every library say."""

import errno
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch

from tilth.core import memory
from tilth.core.memory import Room, core_limit, host_memory, is_out_of_memory, no_memory, oom_kills, wanted

GB = 10**9


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GB, available=50 * GB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=GB, free=GB))


def group(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def own(tmp_path, *lines):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "self").write_text("".join(f"{line}\n" for line in lines))
    return tmp_path / "groups", tmp_path / "self"


def test_without_cgroups_it_is_the_machine_with_its_swap(machine, tmp_path):
    assert host_memory(tmp_path, tmp_path / "none") == Room(65 * GB, 51 * GB, "this machine")


def test_the_nearest_bound_of_v2_counts_and_pages_of_files_are_free(machine, tmp_path):
    groups, me = own(tmp_path, "0::/outer/inner")
    group(groups / "outer", memory__max=8 * GB, memory__current=2 * GB)
    group(groups / "outer/inner", memory__max="max", memory__current=GB)
    assert host_memory(groups, me)[:2] == (8 * GB, 6 * GB)
    group(
        groups / "outer/inner", memory__max=4 * GB, memory__current=3 * GB, memory__stat=f"anon 5\ninactive_file {GB}"
    )
    assert host_memory(groups, me) == Room(4 * GB, 2 * GB, "the cgroup's memory.max")
    group(groups / "outer", memory__current=7 * GB)
    assert host_memory(groups, me)[:2] == (4 * GB, GB)  # others in the outer one have taken the rest


def test_v1_has_other_files_and_a_huge_number_for_none(machine, tmp_path):
    groups, me = own(tmp_path, "5:cpu,cpuacct:/x", "4:memory:/docker/abc")
    inside = groups / "memory"  # in a container the path of the machine is not visible
    group(inside, memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GB)
    assert host_memory(groups, me).where == "this machine"
    group(
        inside, memory__limit_in_bytes=2 * GB, memory__usage_in_bytes=GB, memory__stat=f"total_inactive_file {GB // 2}"
    )
    assert host_memory(groups, me)[:2] == (2 * GB, GB + GB // 2)


def test_kills_for_want_of_memory_are_counted(tmp_path):
    groups, me = own(tmp_path, "0::/")
    assert oom_kills(groups, me, tmp_path / "none") is None
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 2\n")
    assert oom_kills(groups, me, tmp_path / "vmstat") == 2
    group(groups, memory__events="low 0\noom 3\noom_kill 3")
    assert oom_kills(groups, me, tmp_path / "vmstat") == 3


def raised(work):
    with pytest.raises(Exception) as caught:
        work()
    return caught.value


@pytest.mark.parametrize(
    "work",
    [
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: np.empty(1 << 60, np.uint8),
        lambda: pa.allocate_buffer(1 << 60),
        lambda: bytearray(1 << 60),
    ],
    ids=["torch", "numpy", "pyarrow", "python"],
)
def test_what_libraries_raise_where_there_is_no_memory(work):
    error = raised(work)
    assert is_out_of_memory(error) and not str(no_memory(error)).count("\n")


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2500000000 bytes."),
            "2,500 MB",
        ),
        (RuntimeError("std::bad_alloc"), ""),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "2.00 GiB"),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), ""),
        (pa.ArrowMemoryError("malloc of size 64000000 failed"), "64 MB"),
    ],
)
def test_how_much_was_wanted(error, size):
    assert is_out_of_memory(error) and wanted(error) == size


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes"), OSError(errno.ENOSPC, "full"), ValueError("x")]
)
def test_other_errors_are_not_about_memory(error):
    assert not is_out_of_memory(error)


def test_a_limit_of_addresses_is_named():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 * 10**9, 2 * 10**9))\n"
        "from tilth.core.memory import no_memory\nprint(no_memory(MemoryError()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert "2 GB of addresses" in done.stdout and memory.no_memory(MemoryError()).startswith(
        "no memory for what it needs"
    )


def test_cores_are_those_that_a_cgroup_grants(tmp_path):
    groups, me = own(tmp_path, "0::/outer/inner")
    assert core_limit(groups, me) == math.inf
    group(groups / "outer/inner", cpu__max="max 100000")
    assert core_limit(groups, me) == math.inf
    group(groups / "outer", cpu__max="150000 100000")
    assert core_limit(groups, me) == 1.5
    groups, me = own(tmp_path / "v1", "5:cpu,cpuacct:/x", "4:memory:/docker/abc")
    group(groups / "cpu,cpuacct/x", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    group(groups / "memory/docker/abc", cpu__max="1 100000")
    assert core_limit(groups, me) == math.inf
    group(groups / "cpu,cpuacct", cpu__cfs_quota_us=300000, cpu__cfs_period_us=100000)
    assert core_limit(groups, me) == 3
