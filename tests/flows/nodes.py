"""A run whose engines are on other nodes than the policy: on a Ray cluster by python -m tests.flows.nodes FOLDER
ADDRESS [NODES], which prints the run's directory; on one machine by the factories here, with a relay in another folder.

NODES: process ids; that of the only engine is lost after a step, and a spare on another node takes its place.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.flows import tiny
from tests.flows.lost_node import Lose
from tests.flows.test_async_cluster import PLACED, POOLS
from tests.flows.test_async_sampler import recipe
from tilth.launch import workers


def far(folder, cluster=(), rollout=(), **more):
    """A recipe with two replicas, bf16 and small updates; here every other rank is on the second node."""
    placed = {**PLACED, "whole_every": 3, **dict(rollout)}
    where = {"cluster": {**POOLS, **dict(cluster)}, "train": {"precision": "bf16"}, "optimizer": {"lr": 1e-6}}
    return recipe(folder, 2, rollout=placed, **where, **more)


def __getattr__(name: str) -> Any:
    return getattr(workers, name)


def weight_sync(context, recipe, config, source, targets):
    """Make the role as it is on its node."""
    folder = Path(context.folder) / "far"
    if context.rank % 2:
        folder.mkdir(exist_ok=True)
        context = replace(context, folder=str(folder))
    return workers.weight_sync(context, recipe, config, source, targets)


if __name__ == "__main__":
    folder, address, *lost = sys.argv[1:]
    cluster, more = {"backend": "ray", "address": address}, {}
    if lost:
        more = {"guard": {"spares": 1}, "rollout": {"layout": {"dp": 1}}}
        cluster["pools"] = {"train": 1, "rollout": 1}
    lose = [Lose(json.loads(nodes), {3: 1}, "nodes") for nodes in lost]
    print(tiny.run(far(Path(folder), cluster, **more), callbacks=lose).directory)
