"""A plugin for runs on Ray that lose a node after step 3: ``NODES`` are the process ids of the nodes."""

import json
import os
from types import SimpleNamespace

import tilth
from tests.flows.lost_node import Lose


@tilth.callback("loses")
class Loses(tilth.Callback):
    def on_step_end(self, run, step, metrics):
        if step == 3 and run.recipe.cluster.workers == 3:
            lose = Lose(json.loads(os.environ["NODES"]), {3: 2}, "nodes")
            lose.on_step_end(SimpleNamespace(snapshots=None, policy=run.policy), step, metrics)
