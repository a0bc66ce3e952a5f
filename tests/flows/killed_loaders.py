"""A run with loaders that something is killed of after most steps: FOLDER SEED ATTEMPT BALANCE; the same command again.

killed.jsonl in the folder has what was killed behind which step, consumed.jsonl the samples of each step that began,
and behind them those that each rank has learned from.
"""

import json
import math
import os
import random
import signal
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

import psutil

from tilth.config.imports import end_uncollected, uncollected

with uncollected():
    from tests.flows import tiny
    from tests.flows.test_mixture import recipe
    from tilth.flows.run import Run

STEPS = 26
WORKERS = {"cluster": {"backend": "local", "workers": 2}, "policy": {"layout": {"fsdp": 2}}}
LAYOUTS = [{"dp": 2}, {"hdp": 4}, {}, {"hdp": 2}, {"dp": 4}]
"""Layouts of the attempts of a run, in turn, where its ranks change."""
PLUGIN = """
import functools, json, pathlib, sys
from tilth.trace.spans import current_step

file = pathlib.Path(__file__).with_name("consumed.jsonl")

def noted(sft_step):
    @functools.wraps(sft_step)  # with how the call is split
    def step(self, batch, **how):
        found = sft_step(self, batch, **how)
        with file.open("a") as opened:
            opened.write(json.dumps({"step": current_step(), "learned": batch["prompt"].tolist()}) + "\\n")
        return found

    return step

if "torch" in sys.modules:  # it is not in loaders, which start in a tenth of the time without
    from tilth.roles.policy import PolicyWorker
    PolicyWorker.sft_step = noted(PolicyWorker.sft_step)
"""


def note(file, value):
    with file.open("a") as opened:
        opened.write(json.dumps(value) + "\n")


def noted(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def made(folder, layout, balance="tokens", steps=STEPS, **data):
    """layout: of the policy. Each of its ranks takes 12 tokens at a time, which some samples are longer than."""
    parts = json.loads((folder / "parts.json").read_text())
    (folder / "learned.py").write_text(PLUGIN)
    sections = {"plugins": [str(folder / "learned.py")], "supervised": {"steps": steps}, "guard": {"restarts": 64}}
    sections["run"] = {"dir": str(folder), "save_every": 3}
    sections["train"] = {"threads": 1, "balance": balance, "micro_tokens": 12}
    cluster = {"backend": "local", "workers": math.prod(layout.values())}
    return recipe(folder, parts, policy={"layout": layout}, cluster=cluster, data=data, **sections)


def loaders_here(pid=None, **how):
    """Loader processes that run below this process, or below another one. how: of ``psutil``."""
    found = []
    for process in psutil.Process(pid).children(**how):
        with suppress(psutil.NoSuchProcess):  # or a zombie, which is one
            if "tilth.roles.source_loader:main" in " ".join(process.cmdline()):
                found.append(process)
    return found


class Kill(tiny.Recorder):
    """Kills a loader, a worker or this process, once behind each step; what: by step, "": nothing."""

    def __init__(self, folder, what):
        super().__init__()
        self.file, self.what = folder / "killed.jsonl", what

    @classmethod
    def drawn(cls, folder, seed, *, ranks_change):
        """ranks_change: more often this process."""
        weights = [8, 4, 7, 1] if ranks_change else [14, 3, 2, 1]
        return cls(folder, random.Random(seed).choices(["loader", "worker", "controller", ""], weights, k=STEPS))

    def on_step_end(self, run, step, metrics):
        what = self.what[step - 1]
        if not what or step == len(self.what) or step in {one["step"] for one in noted(self.file)}:
            return
        workers = [run.policy._dispatch.backend.probe(rank).pid for rank in range(run.recipe.cluster.workers)]
        if what == "loader":
            until = time.monotonic() + 60
            while not (here := [one for pid in workers for one in loaders_here(pid, recursive=True)]):
                assert time.monotonic() < until, "no loader began within a minute"
                time.sleep(0.05)  # the one that was killed before is not here again
            victim = random.choice(here).pid
        else:
            victim = random.choice(workers) if what == "worker" else os.getpid()
        note(self.file, {"step": step, "what": what})
        os.kill(victim, signal.SIGKILL)


@contextmanager
def begins_noted(folder):
    """Write down the samples of each step that begins."""
    whole = Run._given

    def given(self, kind, count):
        for batch in whole(self, kind, count):
            note(folder / "consumed.jsonl", {"step": self.state.step + 1, "ids": batch["prompt"].tolist()})
            yield batch

    with patch.object(Run, "_given", given):
        yield


def consumed(folder):
    """Return (step, samples, those that ranks have learned from) of each step that began."""
    found = []
    for line in noted(folder / "consumed.jsonl"):
        if "ids" in line:
            found.append((line["step"], line["ids"], []))
        elif found and line["step"] == found[-1][0]:
            found[-1][2].extend(line["learned"])
    return found


def main():
    folder, seed, attempt, balance = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    allow = ["data.loaders", "data.shadows", "cluster", "policy"]
    layout = LAYOUTS[attempt % len(LAYOUTS)] if balance else {"fsdp": 2}
    kill = Kill.drawn(folder, seed, ranks_change=bool(balance))
    run = made(folder, layout, *balance, loaders=1 + attempt % 3, shadows=attempt % 2)
    with begins_noted(folder):
        tiny.run(run, reward=None, callbacks=[kill], allow=allow)


if __name__ == "__main__":
    end_uncollected()
    main()
