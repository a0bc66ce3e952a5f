"""Rows of the fault matrix of ``faults.py``: which faults happen, and what a run must say about them."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Fault = dict[str, Any]
"""after: a step; delay: seconds after it; kind, rank; at: a moment instead of a time; workers: how many there are."""
Draw = Callable[[random.Random, int, list[int], int], list[Fault]]
"""(random, workers, steps, first seed) -> faults of one run, one or more after each of these steps."""
MOMENTS = (
    "forward", "backward", "reduce_scatter", "optimizer", "policy.save", "save.background", "policy.snapshot",
    "decode", "weight_sync.sync", "policy.advantages",
)  # fmt: skip
"""Where row 2 kills, in turn."""


@dataclass(frozen=True)
class Row:
    """One kind of fault. kinds: of verdicts that are right; () if no recovery may happen."""

    number: int
    name: str
    draw: Draw
    kinds: tuple[str, ...]
    named: bool = True
    """A right verdict has the rank of the fault, and no other."""
    told: str = ""
    """Pattern of messages that are as good as a verdict, where the run goes on without a recovery."""
    prepare: Callable[[Path, random.Random], None] | None = None
    """Called before the command is started again after the controller was killed."""
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys of the recipe that are different, by section."""
    per_run: int = 20
    """Faults in one run, one after another at different steps, so that all share its start."""
    equal: str = "plain"
    """Run to which it must be equal: plain, undisturbed; twin, with the same faults on the next rank; "": none."""
    mount: int = 0
    """Size of a file system of its own in MB; 0: none."""
    shared: int = 0
    """Size in MB of a /dev/shm of its own, which no other process sees; 0: that of the machine. A session uses one
    with 1 GiB free only."""
    workers: int = 0
    """0: as many as asked for."""


def each(*kinds: str, at: tuple[str, ...] = (), rank: int | None = None, delay: float = 0.3) -> Draw:
    """Faults of these kinds in turn, on random ranks, at random times of the next step or at these moments in turn."""

    def draw(rng: random.Random, workers: int, steps: list[int], first: int) -> list[Fault]:
        return [
            {
                "after": step, "delay": 0.0 if at else rng.uniform(0.0, delay), "kind": kinds[i % len(kinds)],
                "rank": rng.randrange(workers) if rank is None else rank, "workers": workers,
                "at": at[i % len(at)] if at else "",
            }
            for i, step in enumerate(steps, first)
        ]  # fmt: skip

    return draw


def while_restoring(rng: random.Random, workers: int, steps: list[int], first: int) -> list[Fault]:
    """Kill one rank, and another one while it loads its state."""
    found = []
    for step in steps:
        one, other = rng.sample(range(workers), 2)
        found.append({"after": step, "delay": 0.0, "kind": "kill", "rank": other, "at": "policy.load"})
        found.append({"after": step, "delay": 0.2, "kind": "kill", "rank": one})
    return found


def damage(folder: Path, rng: random.Random) -> None:
    """Damage the newest checkpoint of several: a byte, the end, or a whole file is lost."""
    *older, newest = [None, *sorted(folder.glob("runs/*/checkpoints/step-*"))]
    if newest is None or len(older) < 2:
        return
    file = rng.choice(sorted(newest.glob("*.safetensors")))
    way = rng.choice(("byte", "end", "file"))
    if way == "file":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    if way == "byte":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data[: len(data) // 2] if way == "end" else data)


FULL = r"No space left|Read-only|cannot write|File too large|disk"
BESIDE: dict[str, dict[str, Any]] = {
    "cluster": {"pools": {"learn": 2, "speak": 2}},
    "policy": {"layout": {"fsdp": 2}},
    "rollout": {"pool": "speak"},
}
"""Engines on a pool of their own."""
ROWS = [
    Row(1, "a rank is killed", each("kill"), ("crash",)),
    Row(1, "all ranks are killed", each("kill-all"), ("crash",), named=False),
    Row(1, "the controller is killed, same command again", each("kill-controller"), ()),
    Row(2, "a rank is killed at a named moment", each("kill", at=MOMENTS), ("crash",)),
    Row(3, "a rank is stopped", each("stop"), ("hang",)),
    Row(3, "a rank loops without end", each("busy"), ("hang",)),
    Row(3, "a rank holds the GIL", each("gil"), ("hang",)),
    Row(3, "a rank reads and never gets an answer", each("block"), ("hang",)),
    Row(4, "a collective that no other rank calls", each("collective", at=("reduce",)), ("collective",)),
    Row(6, "NaN in a weight of one rank", each("nan"), ("not-finite", "corruption"), named=False),
    Row(6, "NaN in a gradient of one rank", each("nan-gradient", at=("optimizer",)), (), told="left out",
        equal="twin"),
    Row(7, "a bit of a weight of one rank flips", each("flip"), ("corruption",)),
    Row(7, "a bit of a gradient of one rank flips", each("flip-gradient", at=("optimizer",)), ("corruption",)),
    Row(8, "checkpoint damaged, controller killed", each("kill-controller"), (), prepare=damage),
    Row(9, "a rank's writes fail", each("disk-full"), ("storage",), told=FULL),
    Row(9, "the run's disk is full for 4 s", each("fill"), (), told=FULL, mount=64, per_run=5),
    Row(9, "the run's disk is read-only for 4 s", each("read-only"), (), told=FULL, mount=64, per_run=5),
    Row(11, "the kernel kills a rank that exceeds its memory", each("oom-kill"), ("out-of-memory",)),
    Row(11, "a rank can open no further file", each("files"), ("files",)),
    Row(11, "/dev/shm is full for 4 s", each("fill-shared"), ("storage", "error", "crash", "out-of-memory"),
        named=False, told=FULL, shared=1200, per_run=5),
    Row(12, "a process of the reward is killed", each("kill-reward"), ()),
    Row(12, "the worker that loads data is killed while it does", each("kill", at=("loader.encode",), rank=0),
        ("crash",)),
    Row(12, "an engine's worker is killed beside the trainer", each("kill", rank=3), ("crash",), keys=BESIDE,
        workers=4),
    Row(13, "a second rank is killed while state is restored", while_restoring, ("crash",)),
    Row(14, "any of kill, stop, busy, GIL, exception", each("kill", "stop", "busy", "gil", "exception"),
        ("crash", "hang", "error"), named=False),
    Row(15, "no fault: all processes stand still 4 s", each("freeze"), ()),
    Row(15, "no fault: the controller stands still 4 s", each("freeze-controller"), ()),
    Row(15, "no fault: a reward takes 4 s", each("slow-reward"), ()),
    Row(15, "no fault: garbage collections", each("collect"), ()),
    Row(15, "no fault: a checkpoint takes 4 s to copy or to write",
        each("pause", at=("policy.save", "save.background")), ()),
    Row(15, "no fault: wall clocks jump an hour", each("clocks"), ()),
    Row(15, "no fault: the machine computes something else", each("load"), ()),
    Row(15, "no fault: long evaluations", each("slow-reward"), (),
        keys={"run": {"eval_every": 1, "eval_prompts": 64}}),
    Row(15, "no fault: torch.compile", each("collect"), (), keys={"train": {"compile": True}}, workers=2),
]  # fmt: skip
SLOW = 5
"""Number of the row of slow ranks, which ``faults_slow`` measures."""
QUICK = ("a rank is killed", "a rank is killed at a named moment", "a bit of a weight of one rank flips",
         "a rank is stopped")  # fmt: skip
"""Rows of --quick."""
