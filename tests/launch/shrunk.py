"""A plugin for runs that lose a worker: it is killed after step 3, and none can start in its place.

With ``GROWS``, a file, all workers are asked for again at once: the first time it fails, and the file is removed.
"""

import os
import signal
from pathlib import Path

import tilth
from tilth.cluster.backends.local import LocalBackend
from tilth.core.errors import WorkerLost
from tilth.launch import hot_update

replace = LocalBackend.replace


def refuse(self, ranks, evicted=()):
    if ranks and len(self.links) == 4:
        raise WorkerLost(f"rank {ranks[0]}, start: its machine is gone", key="cluster.start")
    replace(self, ranks, evicted)


@tilth.callback("loses")
class Loses(tilth.Callback):
    def on_run_start(self, run):
        LocalBackend.replace = refuse
        if name := os.environ.get("GROWS"):
            hot_update.GROWS = 0.0
            if run.state.step and run.recipe.cluster.workers == 4 and Path(name).exists():
                Path(name).unlink()
                raise WorkerLost("its machine is still gone", key="cluster.start")

    def on_step_end(self, run, step, metrics):
        if step == 3 and run.recipe.cluster.workers == 4:
            os.kill(run.policy._dispatch.backend.probe(3).pid, signal.SIGKILL)
