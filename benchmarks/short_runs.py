"""Measure the processor time of short runs of recipes, from the start of Python to the end of a run.

To compare with another version that lacks this script, copy it there first:

    git worktree add --detach ../before REVISION && cp benchmarks/short_runs.py ../before/benchmarks
    python benchmarks/versions.py ../before --pairs 3 -- short_runs.py

processor_s: user and system seconds of all processes of a run. loss: sum over steps, bit for bit; versions are compared
where it is equal.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from driver import benchmark_parser, write_rows

HERE = Path(__file__).parents[1]
WORDS = ["the", "of", "a", "soil", "seed", "rain", "field", "harvest", "plough", "root", "leaf", "grain", "sun", "worm"]
RECORDS = 2000
GIVEN = ("data.source={folder}/records.jsonl", "supervised.epochs=0", "supervised.steps={steps}")
RECIPES = {"sft": GIVEN, "pretrain": GIVEN, "addition-grpo": ("supervised.steps={steps}", "algorithm.steps={steps}")}
"""Recipe -> its keys for a short run."""


def make_records(folder: Path) -> None:
    """Write prompts with answers of 5 to 40 words."""
    rng = np.random.default_rng(0)
    texts = [[" ".join(rng.choice(WORDS, rng.integers(5, 40))) for _ in range(2)] for _ in range(RECORDS)]
    lines = [json.dumps({"prompt": f"{i} {prompt}", "answer": answer}) for i, (prompt, answer) in enumerate(texts)]
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")


def measured(recipe: str, folder: Path, steps: int) -> dict[str, Any]:
    """Run a recipe in a fresh folder; return its row."""
    keys = [key.format(folder=folder, steps=steps) for key in RECIPES[recipe]]
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        keys += ["run.eval_prompts=8", "train.threads=1", f"run.dir={runs}"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-m", "tilth", "run", str(HERE / "recipes" / f"{recipe}.toml"), *keys],
            check=True,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        (metrics,) = Path(runs).glob("*/metrics.jsonl")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    loss = float(sum(record.get("loss", 0.0) for record in records))
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"recipe": recipe, "loss": loss.hex(), "steps": len(records), "processor_s": seconds}


def main() -> None:
    """Print and write a row for each recipe."""
    parser = benchmark_parser(__doc__, "two steps of sft")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="what is run, by commas")
    parser.add_argument("--steps", type=int, default=4, help="steps of each phase")
    chosen = parser.parse_args()
    names, steps = (["sft"], 2) if chosen.quick else (chosen.recipes.split(","), chosen.steps)
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        make_records(Path(name))
        for recipe in names:
            rows.append(measured(recipe, Path(name), steps))
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
            write_rows(chosen.json, rows)


if __name__ == "__main__":
    main()
