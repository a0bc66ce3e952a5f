"""A run on a Ray cluster that loses nodes or workers: python -m tests.flows.lost_node FOLDER ADDRESS NODES AT.

Prints the run's directory, what was said, and the copies of each step. NODES: process ids; AT: step -> rank; "nodes" or
"workers" are lost.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from tests.flows import tiny
from tilth.flows.callbacks import Callback

SECTIONS = {
    "policy": {"layout": {"fsdp": 2}},
    "algorithm": {"kl_coef": 0.05, "minibatches": 2, "steps": 4},
}


class Lose(Callback):
    """Kill the worker of a rank, or its node with all its processes, after a step."""

    def __init__(self, nodes, at, what):
        self.nodes, self.at, self.what, self.copied = nodes, dict(at), what, []

    def on_step_end(self, run, step, metrics):
        if run.snapshots is not None:
            self.copied.append([step, *run.snapshots.copied])
        if (rank := self.at.pop(step, None)) is None:
            return
        pid = run.policy._dispatch.backend.probe(rank).pid
        if self.what == "workers":
            psutil.Process(pid).kill()
            return
        for node in map(psutil.Process, self.nodes):
            family = [node, *node.children(recursive=True)]
            if pid in [process.pid for process in family]:
                for process in family:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                return
        raise AssertionError(f"no node has process {pid}")


if __name__ == "__main__":
    folder, address, nodes, at = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
    cluster = {"backend": "ray", "workers": 2, "address": address}
    lose, seen = Lose(nodes, {int(step): rank for step, rank in at.items()}, sys.argv[5]), tiny.Recorder()
    made = tiny.recipe(folder, **SECTIONS, cluster=cluster, guard={"spares": 1})
    run = tiny.run(made, callbacks=[lose, seen])
    print(json.dumps({"directory": str(run.directory), "messages": seen.messages, "copied": lose.copied}))
