"""A process that saves and is told where to die: ``ROOT STEP STAGE CALL RANKS RANK [FOLDER]``.

It is one rank of RANKS; rank 0 is the controller too. At the CALL-th time that STAGE begins it gets SIGKILL.
"""

import os
import signal
import sys

from tests.checkpoint.make import group_of, tensor
from tilth.checkpoint import Commit, Saver, begin_save, prune, stages
from tilth.core.layout import Layout, Mesh, Replicate, Shard


def whole(step):
    """What is saved: its values tell the step."""
    return {"w": tensor((8, 200), salt=str(step)), "b": tensor((5,), salt=str(step))}


def layouts(ranks):
    """The matrix is split, the vector is everywhere."""
    mesh = Mesh(("fsdp",), (ranks,))
    return {"w": Layout(mesh, (Shard(0),), (8, 200)), "b": Layout(mesh, (Replicate(),), (5,))}


def die_at(stage, call):
    """Replace what is called as a stage begins."""
    calls = [0]

    def reached(name, path):
        calls[0] += name == stage
        if name == stage and calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)

    stages.stage = reached


def work(root, step, ranks, rank, folder=""):
    """Save this rank's part in the background; the controller commits."""
    folder = folder or begin_save(root, step)
    saver = Saver()
    saver.start(folder, {"g": group_of(whole(step), layouts(ranks), rank)}, rank, str(rank))
    if rank == 0:
        Commit(folder, {"g": range(ranks)}, {"step": step}, then=lambda path: prune(root, 1)).wait(60)
    saver.wait()


def main():
    """See above."""
    root, step, stage, call, ranks, rank, *folder = sys.argv[1:]
    die_at(stage, int(call))
    work(root, int(step), int(ranks), int(rank), *folder)


if __name__ == "__main__":
    main()
