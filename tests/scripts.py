"""The scripts of the benchmarks, as modules: what they compute is tested like everything else."""

import importlib.util
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


def script(file):
    """A script by the name of its file; loaded once."""
    name = f"benchmarks/{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
