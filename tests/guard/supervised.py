"""A plugin for runs whose controller dies: ``DEATHS`` is a file with the steps after which it kills itself, in turn.

"end" is after the end of the run; "N:stop" stops it after step N, "N:asked" lets it be asked to end before.
"""

import os
import signal
from pathlib import Path

import tilth


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
            if how == "asked":
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)

    def on_run_end(self, run, summary):
        deaths = Path(os.environ["DEATHS"])
        if deaths.exists() and deaths.read_text().split() == ["end"]:
            os.kill(os.getpid(), signal.SIGKILL)
