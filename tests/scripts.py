"""The scripts of the benchmarks, as modules: what they compute is tested like everything else.

A benchmark is what a person starts: it has a main, and no other script starts it by the name of its file, as they do
with the processes of their own. The rest are modules of these.
"""

import importlib.util
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "benchmarks"


def benchmarks(folder=SCRIPTS):
    """Names of the files that people start."""
    texts = {file.name: file.read_text() for file in sorted(folder.glob("*.py"))}
    mains = [name for name, text in texts.items() if 'if __name__ == "__main__"' in text]
    return [name for name in mains if not any(f'"{name}"' in text for text in texts.values())]


def script(file):
    """A script by the name of its file; loaded once."""
    name = f"benchmarks/{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
