"""The distribution is called tilth-train: on PyPI tilth is another project's, and nothing leads there."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tilth
from tilth.runs.environment import DISTRIBUTION, environment, namesake

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KINDS = (
    "README.md",
    "Makefile",
    "*.toml",
    "docs/**/*.md",
    "src/**/*.py",
    "src/**/*.toml",
    "tests/**/*.py",
    "benchmarks/**/*.py",
)
TEXTS = sorted({path for kind in KINDS for path in ROOT.glob(kind)})
ANOTHER = re.compile(
    r"(?<![\w./-])tilth\[\w"  # an extra of it
    r"|\bpip3?\s+(install|download|wheel)\b[^\n`#;&]*?[ '\"]tilth(?![\w/.-])"
    r"|\b(uv|pipx|poetry|conda)\s+(add|install|pip|tool|run)\b[^\n`#;&]*?[ '\"]tilth(?![\w/.-])"
    r"|\bpip3?\s+(install|download|wheel)\b[^\n`#;&]*?[ '\"]tilth-train(?!\[?[\w,]*\]? @ )"  # until it is published
)


def leading_astray(path):
    text = path.read_text()
    if not any(word in text for word in ("tilth[", "install", "download", "wheel", " add ", " pip", " tool", " run ")):
        return []
    text = re.sub(r"[\"']\s*\n\s*f?[\"']", "", text)  # texts that go on in the next line
    return [match[0] for match in ANOTHER.finditer(text)]


def test_nothing_leads_to_another_project_s_package():
    assert len(TEXTS) > 300
    found = {str(path): leading_astray(path) for path in TEXTS if path != Path(__file__)}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line",
    ["pip install tilth", "pip install 'tilth[ray]'", "tilth[wandb]", "pip install -U tilth torch", 
     "uv pip install tilth", "pip install tilth-train", "pip install 'tilth-train[ray]'", "pip install tilth==0.1"],
)  # fmt: skip
def test_what_leads_there_is_seen(line):
    assert ANOTHER.search(line)


@pytest.mark.parametrize(
    "line",
    ["pip install .", "pip install '.[ray]'", "pip install -e src/tilth", "the extra tilth-train[ray]", "tilth run x",
     "pip install 'tilth-train[ray] @ git+https://example.org/a.git'", 
     "pip install dist/tilth_train-0.1.0-py3-none-any.whl"],
)  # fmt: skip
def test_what_installs_this_one_is_not(line):
    assert not ANOTHER.search(line)


def test_its_name_extras_version_and_command():
    assert PROJECT["name"] == DISTRIBUTION == "tilth-train" and PROJECT["version"] == tilth.__version__
    extras = PROJECT["optional-dependencies"]
    own = [name for names in extras.values() for name in names if name.startswith("tilth")]
    assert own == ["tilth-train[tensorboard,wandb,prometheus,ray,rewards,schema,gymnasium,mcp,serve,ui]"]
    assert {"ray", "wandb"} < set(extras)
    assert PROJECT["scripts"] == {"tilth": "tilth.cli.main:main"}


def test_a_run_keeps_the_version_of_the_package_that_it_runs(monkeypatch):
    monkeypatch.setattr(tilth, "__version__", "9.9")
    assert environment()["packages"]["tilth"] == "9.9"


def installed(folder, name, version):
    """A distribution of this name, as pip leaves it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_other_distribution_is_found_beside_this_one(tmp_path):
    installed(tmp_path, "tilth_train", "0.1.0")
    assert namesake([str(tmp_path)]) is None
    installed(tmp_path, "tilth", "3.2.1")
    assert namesake([str(tmp_path)]) == f"3.2.1 in {tmp_path}"


# -- make, in an environment of before ---------------------------------------------------------------------------------


def a_clone(folder):
    """What of this folder an installation needs, with the package's first file only."""
    (folder / "src" / "tilth" / "cli").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "src/tilth/__init__.py"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "src/tilth/cli/__init__.py").touch()
    (folder / "src/tilth/cli/main.py").write_text("import tilth\n\ndef main(): print(tilth.__version__)\n")
    return folder


PLAIN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def make(clone):
    found = subprocess.run(
        ["make", ".venv/.runtime", f"PYTHON={sys.executable}", "PIP_FLAGS=--no-deps"],
        cwd=clone, env=PLAIN, capture_output=True, text=True,
    )  # fmt: skip
    if found.returncode and "setuptools" in found.stderr:
        pytest.skip("pip finds no setuptools here: " + found.stderr.strip().splitlines()[-1])
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_make_mends_an_environment_in_which_the_package_has_its_former_name(tmp_path):
    clone = a_clone(tmp_path / "clone")
    now = (clone / "pyproject.toml").read_text()
    (clone / "pyproject.toml").write_text(now.replace('name = "tilth-train"', 'name = "tilth"'))
    make(clone)
    packages = next((clone / ".venv/lib").glob("python3*")) / "site-packages"
    there = [str(packages), str(clone / "src")]  # the second: what an editable installation adds
    assert namesake(there) is not None
    (clone / "pyproject.toml").write_text(now)
    make(clone)
    assert namesake(there) is None
    assert {d.name for d in distributions(path=there)} >= {DISTRIBUTION}
    ran = subprocess.run([clone / ".venv/bin/tilth"], env=PLAIN, capture_output=True, text=True)
    assert ran.stdout == f"{tilth.__version__}\n", ran.stderr


def test_the_extras_that_are_asked_for_exist_in_what_is_installed():
    asked = [Requirement(text) for texts in PROJECT["optional-dependencies"].values() for text in texts]
    there = {found.name.lower(): found.metadata.get_all("Provides-Extra") or () for found in distributions()}
    assert any(one.extras for one in asked)
    for one in asked:
        assert one.name.lower() not in there or one.extras <= set(there[one.name.lower()]), one
