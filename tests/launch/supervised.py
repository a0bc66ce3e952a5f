"""A plugin for runs whose controller dies: ``DEATHS`` is a file with the steps after which it kills itself, in turn.

"end" is after the end of the run; "N:stop" stops it after step N, "N:asked" lets it be asked to end before,
"N:server" kills the fork server alone, "N:all" the fork server too, and a worker of the next controller: the first one
that finds the file ``doomed`` dies.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil

import tilth

DOOMED = Path(os.environ.get("DEATHS", "deaths")).with_name("doomed")  # a node of Ray that was there before has none
if sys.argv[0] == "tilth.cluster.worker.local_worker":
    with suppress(FileNotFoundError):
        DOOMED.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def kill_server():
    supervisor = psutil.Process(os.getppid())
    (server,) = [one for one in supervisor.children() if "tilth.cluster.worker.fork_server" in " ".join(one.cmdline())
                 and one.pid != os.getpid()]  # fmt: skip
    server.kill()


@tilth.callback("dies")
class Dies(tilth.Callback):
    def on_step_end(self, run, step, metrics):
        deaths = Path(os.environ["DEATHS"])
        deaths.with_name("scratch").write_text(str(run.snapshots.folder))
        left = deaths.read_text().split() if deaths.exists() else []
        if not left or left[0] == "end":
            return
        at, _, how = left[0].partition(":")
        if step >= int(at):
            deaths.write_text(" ".join(left[1:]))
            if how in ("server", "all"):
                kill_server()
            if how == "server":
                return
            if how == "all":
                DOOMED.touch()
            if how == "asked":
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)

    def on_run_end(self, run, summary):
        deaths = Path(os.environ["DEATHS"])
        if deaths.exists() and deaths.read_text().split() == ["end"]:
            os.kill(os.getpid(), signal.SIGKILL)
