"""``.ci/run`` installs a browser where it can, and goes on where it cannot."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
TOOLS = "bash cat dirname grep mktemp rm sh tail tee timeout".split()


@pytest.mark.parametrize(
    ("user", "apt", "said"),
    [
        (0, "exit 0", None),
        (0, "echo E: no network; exit 100", "Chromium cannot be installed (E: no network)"),
        (0, "exit 124", "Chromium cannot be installed (it took too long)"),
        (1000, "exit 0", "only root can install it"),
        (0, None, "only root can install it"),
    ],
)
def test_checks_go_on_without_a_browser_that_cannot_be_installed(tmp_path, user, apt, said):
    commands = {"make": "echo 3 passed in 1s", "id": f"echo {user}", "apt-get": apt}
    for name, text in commands.items():
        if text is not None:
            (tmp_path / name).write_text(f'#!/bin/sh\necho "$0 $*" >> {tmp_path}/asked\n{text}\n')
            (tmp_path / name).chmod(0o755)
    for name in TOOLS:
        (tmp_path / name).symlink_to(shutil.which(name))
    found = subprocess.run([SCRIPT], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    *before, last = found.stdout.splitlines()
    assert (found.returncode, last, found.stderr) == (0, "3 passed in 1s", "")
    assert (said is None and before == ["3 passed in 1s"]) or said in before[0]
    asked = (tmp_path / "asked").read_text()
    assert ("install" in asked and "chromium" in asked) == (user == 0 and apt == "exit 0")


def test_a_browser_that_is_there_is_not_installed_again(tmp_path):
    for name in ("make", "chromium", "apt-get"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/asked\necho 3 passed in 1s\n")
        (tmp_path / name).chmod(0o755)
    for name in TOOLS:
        (tmp_path / name).symlink_to(shutil.which(name))
    assert subprocess.run([SCRIPT], env={"PATH": str(tmp_path)}).returncode == 0
    assert (tmp_path / "asked").read_text() == "make\n"
