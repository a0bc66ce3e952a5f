"""A fork in place of a Python process: what it is given, how it ends, and that nothing is left of it."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.cluster.backends.test_local import gone
from tilth.cluster.backends import fork_server, local


def run(*arguments, **how):
    return subprocess.run([*forked.python(), *arguments], capture_output=True, text=True, **how)


def test_arguments_environment_folder_input_and_files_are_its_own(tmp_path):
    reader, writer = os.pipe()
    code = f"import json, os, sys; os.write({writer}, b'x'); print('torch' in sys.modules, file=sys.stderr)\n"
    code += "print(json.dumps([sys.argv, os.environ['A'], 'HOME' in os.environ, os.getcwd(), input(), sys.path[0]]))"
    given = {"env": {"A": "ü\n𝄞"}, "cwd": tmp_path, "input": "said\n", "pass_fds": [writer]}
    done = run("-c", code, "a b", "'", **given)
    os.close(writer)
    assert json.loads(done.stdout) == [["-c", "a b", "'"], "ü\n𝄞", False, str(tmp_path), "said", ""]
    assert done.stderr == "True\n" and os.read(reader, 9) == b"x"
    os.close(reader)


def test_a_module_and_a_file_find_their_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("NUMBER = 3")
    (tmp_path / "mine.py").write_text("import sys, neighbour; print(__name__, sys.argv[1:], neighbour.NUMBER)")
    assert run("mine.py", "x", cwd=tmp_path).stdout == run("-m", "mine", "x", cwd=tmp_path).stdout
    assert run(str(tmp_path / "mine.py"), "x").stdout == "__main__ ['x'] 3\n"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os._exit(5)", 5, ""),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
        ("import atexit, sys; atexit.register(print, 'end', file=sys.stderr)", 0, "end\n"),
    ],
)
def test_it_ends_as_python_does(code, status, said):
    done = run("-c", code)
    assert done.returncode == status and done.stderr.endswith(said)


def test_clients_that_end_before_they_have_asked_leave_it_at_work():
    place = forked.python()[-2]
    for words in (b"", b"{'name': "):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(place)
            client.sendall(words)
    assert run("-c", "print(1)").stdout == "1\n"


def test_signals_reach_it_and_it_goes_with_its_client():
    code = "import time; print(1, flush=True); time.sleep(60)"
    for end, status in ((subprocess.Popen.terminate, -signal.SIGTERM), (subprocess.Popen.kill, -signal.SIGKILL)):
        process = subprocess.Popen([*forked.python(), "-c", code], stdout=subprocess.PIPE)
        process.stdout.readline()
        pid = forked.pid(process)
        assert pid != process.pid and os.path.exists(f"/proc/{pid}")
        end(process)
        assert process.wait(20) == status
        if psutil.pid_exists(pid):
            gone([psutil.Process(pid)])


def test_fork_servers_of_workers_are_forks_but_where_libraries_would_load_in_another_way(monkeypatch):
    alike = {**fork_server.loaded_by(os.environ), "PYTHONPATH": str(Path(__file__).parent)}
    assert fork_server.command(alike)[: len(forked.python()) - 1] == forked.python()[:-1]
    monkeypatch.setenv("TORCH_LOGS", "dynamo")
    assert fork_server.command({**local.environment(2), "TORCH_LOGS": "all"})[1:3] == ["-u", "-P"]
