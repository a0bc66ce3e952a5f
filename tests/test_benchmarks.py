"""Every benchmark starts and takes its options, and its quick form gives rows."""

import ast
import importlib.machinery
import importlib.util
import io
import json
import math
import os
import re
import resource
import runpy
import subprocess
import sys
import types
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests import forked
from tests.scripts import SCRIPTS, benchmarks, script
from tilth.config.code import parse

ROOT = SCRIPTS.parent
RIVALS = ("trl", "datasets")
"""What runs beside us and is no dependency of ours."""
SECONDS = 120
"""Of processor time that a quick form may take: a minute on a machine of its own, up to twice that beside others."""
LIMIT = 3000


def stand_in(name):
    """A module from which any class can be imported."""

    def made(attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return type(attribute, (), {})

    module = types.ModuleType(name)
    module.__spec__, module.__getattr__ = importlib.machinery.ModuleSpec(name, None), made
    sys.modules[name] = module


def begin(folder):
    """Import every script of a folder, the benchmarks with --help; prints what each said, or how it failed."""
    sys.path.insert(0, str(folder))
    for name in RIVALS:
        if importlib.util.find_spec(name) is None:
            stand_in(name)
    said, asked = {}, benchmarks(folder)
    for file in sorted(folder.glob("*.py")):
        out, sys.argv = io.StringIO(), [file.name, "--help"]
        try:
            with redirect_stdout(out):
                runpy.run_path(str(file), run_name="__main__" if file.name in asked else file.stem)
            said[file.name] = f"{out.getvalue()} did not end with its help" if file.name in asked else ""
        except SystemExit as ended:
            said[file.name] = f"exit status {ended.code}" if ended.code else out.getvalue()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told
            said[file.name] = f"{type(error).__name__}: {error}"
    print(json.dumps(said))


def begun(folder):
    """What ``begin`` found, in a process of its own."""
    call = f"from pathlib import Path; from tests.test_benchmarks import begin; begin(Path({str(folder)!r}))"
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [*forked.python(), "-c", call], env=env, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def wrong(said, folder):
    """Scripts that do not start, or do not take what every benchmark takes."""
    found = {name for name, text in said.items() if text and not text.startswith("usage: ")}
    options = re.compile(r"\[--quick\].*\[--json [A-Z]+\]", re.DOTALL)
    return found | {name for name in benchmarks(folder) if not options.search(said[name])}


@pytest.mark.slow  # quickly mypy reads what they import
def test_every_script_starts_and_every_benchmark_takes_quick_and_json():
    said = begun(SCRIPTS)
    assert len(said) > 35 and "train.py" in benchmarks()
    assert not {name: said[name] for name in wrong(said, SCRIPTS)}


HELP = """
import argparse
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="PATH")
    parser.parse_args()
"""


def test_what_does_not_start_is_found(tmp_path):
    scripts = {
        "good.py": HELP + "    start('own.py')",
        "part.py": "from trl import GRPOTrainer\nfrom datasets import Dataset",
        "lost.py": "from tilth.data.prompts import NoSuchSet\n" + HELP,
        "gone.py": "import no_such_module",
        "parser.py": HELP.replace("--json", "--quick"),
        "silent.py": HELP.replace("parser.parse_args()", "pass"),
        "plain.py": HELP.replace('    parser.add_argument("--json", metavar="PATH")\n', ""),
        "uses.py": HELP + '    start("worker.py")',
        "worker.py": 'import sys\nif __name__ == "__main__":\n    sys.argv[7]',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
    assert benchmarks(tmp_path) == ["good.py", "lost.py", "parser.py", "plain.py", "silent.py", "uses.py"]
    assert wrong(begun(tmp_path), tmp_path) == {"lost.py", "gone.py", "parser.py", "silent.py", "plain.py"}


@pytest.mark.slow
@pytest.mark.parametrize("name", benchmarks())
def test_the_quick_form_gives_rows(name, tmp_path):
    if name == "rl_vs_trl.py":
        pytest.importorskip("trl")
    if name in ("gsm8k.py", "economy.py", "expand.py") and not (ROOT.parent / "shared" / "data" / "gsm8k").is_dir():
        pytest.skip("its data are not here")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, SCRIPTS / name, "--quick", "--json", tmp_path / "rows.json"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", key) for row in rows for key in row), rows[0].keys()
    assert json.dumps(rows, allow_nan=False) and done.stdout.strip()
    parts = len(script(name).PARTS) if name == "gpu.py" else 1  # each of them another one's quick form
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < parts * SECONDS
    assert [file.name for file in Path(tmp_path).iterdir()] == ["rows.json"]


REPLACED = {
    "async_engine.py": {"engine"},
    "async_rl.py": {"flows_replicas"},
    "corruption.py": {"span", "self.learner.engine", "self.learner.sharded.gradients"},
    "economy.py": {"comm"},
    "strike.py": {"span"},
    "trace_overhead.py": {"span", "launch"},
}
"""Script -> what of the package it changes: faults that it makes, each of which must be found; spans, which have no
switch, in the steps that it counts none in; a period of plans and a meter of bytes that work for all contenders."""
ALONE = {"async_reward.py", "gpu.py", "memory.py"}
"""Ratios of times to one reward, of what others computed, and of a prediction to what was measured."""


CHANGING = ("setattr", "delattr", "__setattr__", "__delattr__", "object", "multiple", "dict", "patch", "setitem")
"""Last names of calls that replace an attribute: unparsing every call takes a second."""
PATCHES = re.compile(r"(.+\.)?(patch(\.(object|multiple|dict))?|setattr|delattr|__(set|del)attr__|setitem)")
"""Calls that replace an attribute of their first argument, or what it names as a text."""
RATIO = re.compile(r"(\w*_)?over_\w*|(\w*_)?(ratio|speedup)s?(_\w*)?|times_\w*")
"""Keys of ratios of contenders."""


def replaced(text):
    """Owners, imported from the package or reached from there, of which a script replaces an attribute."""
    tree, names = parse(text), {"self.learner"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tilth":
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {alias.asname or "tilth" for alias in node.names if alias.name.split(".")[0] == "tilth"}
    owners = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            owners += [target.value for target in targets if isinstance(target, ast.Attribute)]
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in CHANGING:
            first = [*node.args[:1], *(word.value for word in node.keywords if word.arg in ("target", "name"))]
            owners += first[:1] if PATCHES.fullmatch(ast.unparse(node.func)) else []
    texts = {str(own.value) if isinstance(own, ast.Constant) else ast.unparse(own) for own in owners}
    return {text for text in texts if any(text == n or text.startswith(f"{n}.") for n in {*names, "tilth"})}


def compares(text):
    """True if a script writes a ratio of contenders: a key such as over_trl, ratio or decode_speedup."""
    if not any(word in text for word in ("over_", "ratio", "speedup", "times_")):
        return False
    tree = parse(text)
    keys = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    keys += [word.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.keywords]
    return any(isinstance(key, str) and RATIO.fullmatch(key) for key in keys)


def test_no_benchmark_replaces_functions_of_the_package():
    """Runs may call others one day, and the benchmark then measures something else without a word."""
    found = {file.name: owners for file in SCRIPTS.rglob("*.py") if (owners := replaced(file.read_text()))}
    assert found == REPLACED


@pytest.mark.parametrize(
    "line",
    [
        "Engine.generate = f",
        "Engine.limit += 1",
        "setattr(e.Engine, 'poll', f)",
        "tilth.train = f",
        "type.__setattr__(Engine, 'poll', f)",
        "patch.object(Engine, 'poll', f)",
        "unittest.mock.patch.object(target=e.Engine, attribute='poll')",
        "mock.patch.multiple(Engine, poll=f)",
        "mock.patch.multiple('tilth.engines.engine.Engine', poll=f)",
        "mock.patch('tilth.engines.engine.Engine.poll')",
        "patch(target='tilth.engines.engine.Engine', new=f)",
        "mock.patch.dict(e.TABLE, x=f)",
        "monkeypatch.setattr(Engine, 'poll', f)",
        "monkeypatch.setattr('tilth.engines.engine.Engine.poll', f)",
        "pytest.MonkeyPatch().setattr(Engine, 'poll', f)",
    ],
)
def test_a_replaced_function_is_seen(line):
    assert replaced(f"import tilth\nimport tilth.engines.engine as e\nfrom tilth.engines.engine import Engine\n{line}")


def test_what_belongs_to_others_may_be_replaced():
    assert not replaced(
        "from trl import Engine\nfrom tilth.core import batch\nEngine.limit = 3\nbatch = Engine()\nx = 1"
    )


@pytest.mark.parametrize(
    "line",
    ["x['over_trl']", "x = {'ratios': 1}", "x = {f'{how}_speedup': 1}", "row(moved_ratio=1)", "x['times_faster']"],
)
def test_a_ratio_is_seen(line):
    assert compares(line) and not compares("x = {'overlap': 1, 'sometimes_slow': 2, 'rations': 3}")


def test_a_benchmark_that_writes_a_ratio_compares_the_work():
    texts = {file.name: file.read_text() for file in SCRIPTS.glob("*.py")}
    found = {name for name, text in texts.items() if compares(text)}
    assert {"generate.py", "rl_vs_trl.py", "train.py", "versions.py"} <= found
    assert not {name for name in found - ALONE if "same_work(" not in texts[name]}


@pytest.mark.parametrize("other", [{"tokens": 100}, {"tokens": 99, "steps": 3}, {"tokens": math.nan, "steps": 3}])
def test_unequal_work_has_no_ratio(other):
    module = script("work.py")
    module.same_work({"a": {"tokens": 100, "steps": 3}, "b": {"tokens": 100, "steps": 3}})
    with pytest.raises(module.UnequalWork):
        module.same_work({"a": {"tokens": 100, "steps": 3}, "b": other})


def test_work_may_differ_by_a_share():
    module = script("work.py")
    module.same_work({"a": {"bytes": 100}, "b": {"bytes": 104}}, within=0.05)
    with pytest.raises(module.UnequalWork):
        module.same_work({"a": {"bytes": 100}, "b": {"bytes": 106}}, within=0.05)
