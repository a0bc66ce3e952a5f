"""The environment of a run: software and hardware that its numbers depend on. Imports nothing heavy."""

import os
import platform
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import psutil

import tilth

DISTRIBUTION = "tilth-train"
PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "pyarrow")


def environment() -> dict[str, Any]:
    """Return Python, packages, machine, cores, threads, memory in bytes; the accelerator if torch is loaded."""
    torch = sys.modules.get("torch")
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"tilth": tilth.__version__} | {name: v for name in PACKAGES if (v := _version(name))},
        "cpu": cpu_model(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "logical_cores": os.cpu_count(),
        "threads": torch.get_num_threads() if torch else None,
        "memory": psutil.virtual_memory().total,
        "accelerator": None,
    }
    if torch and torch.cuda.is_available():
        found["accelerator"] = torch.cuda.get_device_name()
    return found


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def namesake(path: Sequence[str] | None = None) -> str | None:
    """Return version and place of an installed distribution ``tilth``, which on PyPI is another project.

    An installation of this package from before it was named ``DISTRIBUTION`` also has that name. path: folders to
    search; default: ``sys.path``.
    """
    found = distributions(name="tilth") if path is None else distributions(name="tilth", path=list(path))
    return next((f"{one.version} in {one.locate_file('')}" for one in found), None)


def cpu_model() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
