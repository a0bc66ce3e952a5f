"""A run with loaders that something is killed of after most steps: FOLDER SEED LOADERS SHADOWS; the same command again.

consumed.jsonl in the folder has the samples of each step that began, killed.jsonl what was killed behind which step.
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tilth.config.imports import end_uncollected, uncollected

with uncollected():
    from tests.flows import tiny
    from tests.flows.test_mixture import recipe
    from tilth.flows.run import Run

STEPS = 26
WORKERS = {"cluster": {"backend": "local", "workers": 2}, "policy": {"layout": {"fsdp": 2}}}


def note(file, value):
    with file.open("a") as opened:
        opened.write(json.dumps(value) + "\n")


def noted(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def made(folder, **data):
    parts = json.loads((folder / "parts.json").read_text())
    run = {"dir": str(folder), "save_every": 3}
    return recipe(folder, parts, **WORKERS, supervised={"steps": STEPS}, run=run, data=data)


def loaders_here(pid=None, **how):
    """Loader processes that run below this process, or below another one. how: of ``psutil``."""
    found = []
    for process in psutil.Process(pid).children(**how):
        with suppress(psutil.NoSuchProcess):  # or a zombie, which is one
            if "tilth.roles.source_loader:main" in " ".join(process.cmdline()):
                found.append(process)
    return found


class Kill(tiny.Recorder):
    """Kills a loader, a worker or this process, once behind each step."""

    def __init__(self, folder, seed):
        super().__init__()
        self.file = folder / "killed.jsonl"
        self.what = random.Random(seed).choices(["loader", "worker", "controller", ""], [14, 3, 2, 1], k=STEPS)

    def on_step_end(self, run, step, metrics):
        what = self.what[step - 1]
        if not what or step == STEPS or step in {one["step"] for one in noted(self.file)}:
            return
        if what == "loader":
            while not (here := loaders_here(recursive=True)):  # the one that was killed before is not here again
                time.sleep(0.05)
            victim = random.choice(here).pid
        else:
            victim = run.policy._dispatch.backend.probe(random.randrange(2)).pid if what == "worker" else os.getpid()
        note(self.file, {"step": step, "what": what})
        os.kill(victim, signal.SIGKILL)


def main():
    folder, seed, loaders, shadows = Path(sys.argv[1]), *map(int, sys.argv[2:])
    whole = Run._given

    def given(self, kind, count):
        for batch in whole(self, kind, count):
            note(folder / "consumed.jsonl", {"step": self.state.step + 1, "ids": batch["prompt"].tolist()})
            yield batch

    Run._given = given
    allow = ["data.loaders", "data.shadows"]
    tiny.run(made(folder, loaders=loaders, shadows=shadows), reward=None, callbacks=[Kill(folder, seed)], allow=allow)


if __name__ == "__main__":
    end_uncollected()
    main()
