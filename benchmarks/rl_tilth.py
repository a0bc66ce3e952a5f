"""Tilth's side of ``rl_vs_trl.py``: ``tilth.train`` as a user calls it; figures from the run's own metrics.

python benchmarks/rl_tilth.py TASK.json RESULT.json [compile]
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rl_task import Task, cores, low_share, peak_bytes, print_of
from shapes import CONTEXT, SHAPES

import tilth
from tilth.runs.readers import read_metrics, read_trajectories

PARTS = {
    "generate": ("generate",),
    "score": ("score",),
    "old log-probs": ("logprobs",),
    "update": ("update",),
    "publish": ("publish", "verify"),
}


class Watch(tilth.Callback):
    """CPU time of this process at the end of each step."""

    def __init__(self) -> None:
        self.cpu: list[float] = []

    def on_step_end(self, run: Any, step: int, metrics: dict[str, Any]) -> None:
        self.cpu.append(time.process_time())


ENGINE = Path(__file__).with_name("rl_engine.py")


def run(task: Task, compile: bool, runs: str) -> dict[str, Any]:
    """Train, and read what the run wrote."""
    vocabulary = SHAPES[task.shape]["vocab_size"]
    began, watch = time.perf_counter(), Watch()
    found = tilth.train(
        task.texts,
        lambda prompt, completion, info: low_share(completion, vocabulary),
        callbacks=[watch],
        live=False,
        model={"path": task.folder, "context": CONTEXT},
        keys={"data.holdout": 0.0, "plugins": [str(ENGINE)]},
        rollout={"prompts": task.prompts, "group": task.group, "max_tokens": task.longest, "max_rows": task.samples,
                 "compile": compile, "engine": "given_lengths", "options": {"task": sys.argv[1]}},
        algorithm={"steps": task.steps, "drop_flat": False},
        optimizer={"lr": task.lr, "betas": task.betas, "weight_decay": 0.0, "clip_norm": task.clip},
        train={"precision": task.precision, "threads": cores(task.threads), "compile": compile,
               "device": task.device},
        run={"dir": runs, "save_every": 10**6},
    )  # fmt: skip
    whole = time.perf_counter() - began
    return {"whole_seconds": whole, "steps": steps(task, found.directory, watch.cpu)} | told(found.directory)


def steps(task: Task, directory: Path, cpu: list[float]) -> list[dict[str, Any]]:
    """One record for each step; its seconds are those between two commits, so nothing of a run is left out."""
    records = read_metrics(directory)
    asked = [task.texts[i] for i in _prompts(directory)]
    found, before = [], 0.0
    for i, record in enumerate(records):
        seconds = record["seconds"] - before if i else record["time/step"]
        spent = cpu[i] - cpu[i - 1] if i else seconds
        before = record["seconds"]
        parts = {name: sum(record.get(f"time/{op}", 0.0) for op in ops) for name, ops in PARTS.items()}
        mine = asked[i * task.samples : (i + 1) * task.samples : task.group]
        found.append({
            "seconds": seconds, "parts": parts, "reward": record["reward/mean"], "prompts": print_of(mine),
            "generated": record["tokens/generated"], "trained": record["tokens/trained"],
            "cpu_seconds": spent, "grad_norm": record["grad_norm"],
        })  # fmt: skip
    return found


def _prompts(directory: Path) -> list[int]:
    return [int(i) for i in read_trajectories(directory).column("prompt").to_pylist()]


def told(directory: Path) -> dict[str, Any]:
    """What the run said of compiling."""
    lines = (directory / "log.txt").read_text().splitlines()
    seconds = [float(line.rsplit("compiling took", 1)[1].split()[0]) for line in lines if "compiling took" in line]
    return {"compile_seconds": sum(seconds)}


def main() -> None:
    task = Task.load(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as runs:
        result = run(task, "compile" in sys.argv[3:], runs)
    Path(sys.argv[2]).write_text(json.dumps(result | {"peak_bytes": peak_bytes(task.device)}))


if __name__ == "__main__":
    main()
