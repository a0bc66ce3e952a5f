"""``.ci/run`` installs a browser where it can, and goes on where it cannot."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "run"
TOOLS = "bash cat chmod dirname grep mktemp rm sh tail tee timeout".split()
BROKEN, WHOLE = "echo no libnss3.so >&2; exit 127", "exit 0"


def installs(browser: str) -> str:
    """A command that writes a browser beside itself."""
    return f"""printf '#!/bin/sh\n{browser}\n' > ${{0%/*}}/chromium; chmod +x ${{0%/*}}/chromium"""


@pytest.mark.parametrize(
    ("user", "there", "apt", "said"),
    [
        (0, None, installs(WHOLE), None),
        (0, BROKEN, installs(WHOLE), None),
        (0, None, installs(BROKEN), "Chromium is installed and does not start (no libnss3.so)"),
        (0, None, "echo E: no network; exit 100", "Chromium cannot be installed (E: no network)"),
        (0, None, "exit 124", "Chromium cannot be installed (it took too long)"),
        (1000, None, installs(WHOLE), "only root can install it"),
        (1000, BROKEN, installs(WHOLE), "only root can install it"),
        (0, None, None, "only root can install it"),
    ],
)
def test_checks_go_on_without_a_browser_that_cannot_be_installed(tmp_path, user, there, apt, said):
    commands = {"make": "echo 3 passed in 1s", "id": f"echo {user}", "apt-get": apt, "chromium": there}
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
    assert ("install" in asked and "chromium" in asked) == (user == 0 and str(apt).startswith("printf"))


def test_a_browser_that_starts_is_not_installed_again(tmp_path):
    for name in ("make", "chromium", "apt-get"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/asked\necho 3 passed in 1s\n")
        (tmp_path / name).chmod(0o755)
    for name in TOOLS:
        (tmp_path / name).symlink_to(shutil.which(name))
    assert subprocess.run([SCRIPT], env={"PATH": str(tmp_path)}).returncode == 0
    assert (tmp_path / "asked").read_text() == "chromium\nmake\n"
