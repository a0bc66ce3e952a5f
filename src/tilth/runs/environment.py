"""Where a run ran: what its numbers depend on besides the recipe. Reads no repository and imports nothing heavy."""

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import psutil

import tilth

DISTRIBUTION = "tilth-train"
PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "pyarrow")


def environment() -> dict[str, Any]:
    """Python, packages, machine, cores, threads, memory in bytes; the accelerator if torch is loaded and sees one."""
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def namesake(path: Sequence[str] | None = None) -> str | None:
    """Version and place of an installed distribution ``tilth``: on PyPI that name is another project's.

    An installation of this package from before it was called ``DISTRIBUTION`` has that name too. path: where to look;
    default: where Python does.
    """
    found = distributions(name="tilth") if path is None else distributions(name="tilth", path=list(path))
    return next((f"{one.version} in {one.locate_file('')}" for one in found), None)


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
