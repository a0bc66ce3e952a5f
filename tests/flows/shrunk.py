"""A plugin for runs that lose a worker for ever: it is killed after step 3, and none can start in its place."""

import os
import signal

import tilth
from tilth.cluster.backends.local import LocalBackend
from tilth.core.errors import WorkerLost

replace = LocalBackend.replace


def refuse(self, ranks, evicted=()):
    if ranks and len(self.links) == 4:
        raise WorkerLost(f"rank {ranks[0]}, start: its machine is gone", key="cluster.start")
    replace(self, ranks, evicted)


@tilth.callback("loses")
class Loses(tilth.Callback):
    def on_run_start(self, run):
        LocalBackend.replace = refuse

    def on_step_end(self, run, step, metrics):
        if step == 3 and run.recipe.cluster.workers == 4:
            os.kill(run.policy._dispatch.backend.probe(3).pid, signal.SIGKILL)
