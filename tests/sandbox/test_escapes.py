"""What a program can do on this machine, it cannot do in the sandbox."""

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import tilth
from tests.patience import patience
from tests.sandbox.escapes import ESCAPES
from tilth.sandbox.kernel import SandboxError
from tilth.sandbox.run import Sandbox, SandboxLimits

LIMITS = SandboxLimits(seconds=1.0, cpu=1, memory=400 << 20, processes=16, files=16 << 20, output=1 << 20)
CALLS = platform.machine() == "x86_64"
"""Numbers of system calls in the attempts are those of this machine."""
NEEDS_ROOT = {
    "write where programs are", "write beside the folder", "make a device", "climb out of a new root", "become root",
    "mount",
    "another's namespace", "the clock", "the host's name", "a higher priority", "write a setting of the kernel",
    "read another's environment", "take another's descriptor", "trace another process", "read another's memory", "bpf",
    "performance counters", "the kernel's log", "raise a limit",
}  # fmt: skip
"""What an ordinary user cannot do outside either."""
pytestmark = [pytest.mark.dist, pytest.mark.skipif(sys.platform != "linux", reason="sandboxes are Linux's")]


@pytest.fixture(scope="module")
def sandbox():
    try:
        made = Sandbox(LIMITS)
    except SandboxError as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """A victim, a server, a secret and so on: values for the names in attempts."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text("secret")
    (folder / "shared").mkdir()
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    server = socket.create_server(("127.0.0.1", 0))
    server.listen(16)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0tilth-{os.getpid()}")
    abstract.listen(4)
    key = 0x7000 + os.getpid() % 4096
    libc = __import__("ctypes").CDLL(None)
    shared = libc.shmget(key, 4096, 0o1666)
    read, write = os.pipe()
    os.set_inheritable(read, True)
    yield {
        "PID": victim.pid, "PORT": server.getsockname()[1], "SECRET": folder / "secret", "NAME": f"tilth-{os.getpid()}",
        "KEY": key, "FD": read, "SHARED": folder / "shared",
        "SOURCE": Path(tilth.__file__).parents[1],
    }  # fmt: skip
    victim.kill()
    victim.wait()
    for one in (server, abstract):
        one.close()
    libc.shmctl(shared, 0, None)
    os.close(read)
    os.close(write)


def attempt(name, scene, shared):
    program = ESCAPES[name]
    for word, value in {**scene, "SHARED": shared}.items():
        program = program.replace(word, str(value)) if word != "FD" else program.replace("FD in", f"{value} in")
    return program


def outside(program, scene, folder):
    environment = {**os.environ, "TILTH_TOKEN": "secret"}
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True,
        pass_fds=(scene["FD"],), timeout=patience(60),
    ).stdout  # fmt: skip


SELDOM = {"without end", "sleep without end", "much memory", "many threads", "empty files without number"}
"""Limits that test_run.py has, too, and one that takes as long as ten others."""
ATTEMPTS = [pytest.param(n, marks=[pytest.mark.slow] * (n in SELDOM)) for n in ESCAPES if n != "outlive the program"]


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_succeeds_outside_and_not_inside(sandbox, scene, tmp_path, name):
    if not CALLS and "libc" in ESCAPES[name]:
        pytest.skip("numbers of system calls of x86_64")
    said = [outside(attempt(name, scene, tmp_path), scene, tmp_path) for _ in range(1 + name.startswith("leave"))]
    if os.geteuid() == 0 or name not in NEEDS_ROOT:
        assert "ESCAPED" in said[-1] or name in UNUSUAL
    for _ in range(2):  # the second finds what the first has left
        found = sandbox.run(attempt(name, scene, "/tmp"))
        assert "ESCAPED" not in found.stdout and found.state != "ok", found


UNUSUAL = {
    "another's namespace",
    "bpf",
    "performance counters",
    "userfaultfd",
    "io_uring",
    "the keyring",
    "the kernel's log",
    "use up the host's asynchronous requests",
    "watch all files",
    "a call that the filter does not know",
}
"""What a host may forbid everybody."""


def test_nothing_outlives_the_program(sandbox, scene, tmp_path):
    outside(attempt("outlive the program", scene, tmp_path), scene, tmp_path)
    until = time.monotonic() + 20
    while not (tmp_path / "late").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    program = attempt("outlive the program", scene, "/tmp").replace("0.8", "600")
    found = sandbox.run(program, limits=SandboxLimits(seconds=60))
    assert found.stdout == "LATER\n" and found.state == "ok"


def test_there_are_enough():
    assert len(ESCAPES) >= 40 and len(NEEDS_ROOT - set(ESCAPES)) == 0


SUBMOUNT = """
import os, sys
from tilth.sandbox import kernel
from tilth.sandbox.run import Sandbox
kernel.unshare(kernel.NEWNS)
kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
kernel.mount("tmpfs", "/usr/local", "tmpfs", 0, "mode=777")
program = "import os; open('/usr/local/escape', 'w').write('x'); os.remove('/usr/local/escape'); print('ESCAPED')"
exec(program)
with Sandbox() as sandbox:
    found = sandbox.run(program)
print(found.state, found.stdout, found.stderr.strip().splitlines()[-1:])
"""
"""Mounts a folder that everybody may write to below one that programs see, where nobody else sees it."""


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.isdir("/usr/local"), reason="needs root, to mount")
def test_what_is_mounted_below_a_shared_folder_cannot_be_written_to(sandbox):
    said = subprocess.run([sys.executable, "-c", SUBMOUNT], capture_output=True, text=True, timeout=60, check=True)
    first, *rest = said.stdout.splitlines()
    assert first == "ESCAPED" and rest[0].startswith("error") and "Read-only" in rest[-1], said.stdout


SOURCES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tilth.sandbox import run
program = f"assert 'def ' in open({str(Path(run.__file__).parents[1] / 'rewards' / 'verifiers.py')!r}).read(); print('ESCAPED')"
exec(program)
with run.Sandbox() as sandbox:
    print(sandbox.run(program).stderr)
"""  # noqa: E501


def test_a_program_cannot_read_the_rewards_that_judge_it(sandbox):
    """Tilth stands where no folder of the sandbox covers it by chance."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        shutil.copytree(Path(tilth.__file__).parent, f"{folder}/tilth")
        said = subprocess.run(
            [sys.executable, "-c", SOURCES, folder], capture_output=True, text=True, timeout=60, check=True
        )
    assert said.stdout.startswith("ESCAPED\nTraceback") and "FileNotFoundError" in said.stdout, said.stdout
