"""A run whose engines are on other nodes than the policy: on a Ray cluster by python -m tests.flows.nodes FOLDER
ADDRESS [NODES], which prints the run's directory; on one machine by the factories here, with a relay in another folder,
where a file can end a transfer.

NODES: process ids; that of the only engine is lost after a step, and a spare on another node takes its place.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.flows import tiny
from tests.flows.lost_node import Lose
from tests.flows.test_async_cluster import PLACED, POOLS
from tests.flows.test_async_sampler import recipe
from tilth.launch import workers
from tilth.roles import relay_sync
from tilth.roles.relay import Relay


def far(folder, cluster=(), rollout=(), **more):
    """A recipe with two replicas, bf16 and small updates; here every other rank is on the second node."""
    placed = {**PLACED, "whole_every": 3, **dict(rollout)}
    where = {"cluster": {**POOLS, **dict(cluster)}, "train": {"precision": "bf16"}, "optimizer": {"lr": 1e-6}}
    return recipe(folder, 2, rollout=placed, **{**where, **more})


def __getattr__(name: str) -> Any:
    return getattr(workers, name)


TRANSFERS, REMOVED = ("publish", "pack", "unpack", "pull"), "removed"


def _fragile(name):
    plain = getattr(Relay, name)

    def transfer(self, *given, **how):
        if (share := self.asked(name)) is not None:
            self.left = int(share * len(self.pieces))
        if name == "pull" and self.asked(REMOVED) is not None:
            self.remove()
        return plain(self, *given, **how)

    return transfer


class FragileRelay(Relay):
    """Ends its process in the middle of a transfer, or its own file, once for each file of this name in ``folder``."""

    publish, pack, unpack, pull = map(_fragile, TRANSFERS)
    folder = Path()
    left: int | None = None
    """Pieces that it still touches."""

    def asked(self, name):
        """Return what a file holds, which no other process gets; None without one."""
        mine = self.folder / f"{name}.{os.getpid()}"
        with suppress(FileNotFoundError):
            (self.folder / name).rename(mine)
            return float(mine.read_text())

    def _bytes(self, slot, piece):
        if self.left is not None:
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
        return super()._bytes(slot, piece)


def weight_sync(context, recipe, config, source, targets):
    """Make the role as it is on its node."""
    folder = Path(context.folder) / "far"
    if context.rank % 2:
        folder.mkdir(exist_ok=True)
        context = replace(context, folder=str(folder))
    FragileRelay.folder = Path(recipe.run.dir)
    with patch.object(relay_sync, "Relay", FragileRelay):
        return workers.weight_sync(context, recipe, config, source, targets)


if __name__ == "__main__":
    folder, address, *lost = sys.argv[1:]
    cluster, more = {"backend": "ray", "address": address}, {}
    if lost:
        more = {"guard": {"spares": 1}, "rollout": {"layout": {"dp": 1}}}
        cluster["pools"] = {"train": 1, "rollout": 1}
    lose = [Lose(json.loads(nodes), {3: 1}, "nodes") for nodes in lost]
    print(tiny.run(far(Path(folder), cluster, **more), callbacks=lose).directory)
