"""What the recipes with environments learn: seeds, and controls whose rows get rewards of other groups of their step.

    python benchmarks/agents_learning.py [--quick] [--json PATH] [--recipes code-sandbox,retrieval] [--seeds 0,1,2]
                                         [--folder DIR] [--controls N]

Each run is the recipe as it is shipped, on one thread. Its control begins with the weights that the warm-up of the same
seed ended with; of several, control k draws prompts, samples and other rows by 100 k + seed. Greedy: share of 256
held-out episodes that succeed, before and after the part that learns by rewards; the seed decides which ones are held
out of which draw. Sampled: the same share of the episodes that a step trains on, each of a new prompt, in its first
step and over its last three; without a part ``correct`` the reward is that share. ``--folder`` keeps the runs, and
makes only those that are not there.
"""

import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from driver import benchmark_parser, write_rows

import tilth
from tilth.runs.readers import read_metrics

RECIPES = ("calculator-tools", "code-sandbox", "retrieval", "word-game")
SHUFFLED = Path(__file__).with_name("agents_shuffled.py")
EPISODES = 256
QUICK = ("supervised.steps=4", "algorithm.steps=2", "rollout.prompts=2", "run.eval_prompts=8")
PART = "reward/part/correct"
ACCURACY = "accuracy/heldout"


def warm_steps(recipe: str) -> int:
    """Return the steps of a shipped recipe's warm-up."""
    path = Path(tilth.__file__).parent / "recipes" / f"{recipe}.toml"
    return int(tomllib.loads(path.read_text())["supervised"]["steps"])


def run(recipe: str, name: str, folder: Path, keys: Sequence[str]) -> Path:
    """Run a recipe, unless its run is there and complete. Returns its directory."""
    if (folder / name / "report.html").exists():
        return folder / name
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = [f"run.dir={folder}", f"run.name={name}", "train.threads=1", *keys]
    done = subprocess.run(
        [sys.executable, "-m", "tilth", "run", recipe, *given], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr.strip() or done.stdout.strip()}")
    return folder / name


def figures(directory: Path) -> dict[str, float]:
    """Return what the main phase of a run has learned, in shares."""
    main = [r for r in read_metrics(directory) if r["phase"] != "warmup"]
    greedy = [float(r[ACCURACY]) for r in main if r.get(ACCURACY) is not None]
    sampled = [float(r[PART] if r.get(PART) is not None else r["reward/mean"]) for r in main]
    return {
        "greedy_before": greedy[0], "greedy_after": greedy[-1], "sampled_before": sampled[0],
        "sampled_after": fmean(sampled[-3:]), "steps": len(main),
        "step_seconds": sum(float(r.get("time/step") or 0.0) for r in main),
    }  # fmt: skip


def beside(recipe: str, seed: int, folder: Path, keys: Sequence[str], warm: int, controls: int) -> list[dict[str, Any]]:
    """Run a recipe and its controls; return their rows."""
    rows = []
    keep = (f"run.eval_prompts={EPISODES}", "run.eval_every=0", f"run.keep_every={warm}", *keys)
    for control in range(controls + 1):
        drawn = seed + 100 * max(control - 1, 0)
        began, name = time.monotonic(), f"{recipe}-{seed}{f'-shuffled-{drawn}' if control else ''}"
        start = (
            f"model.path={folder / f'{recipe}-{seed}'}@{warm}", "data.tokenizer=", "supervised.steps=0",
            f"plugins=['{SHUFFLED}']", "algorithm.advantage=shuffled",
        )  # fmt: skip
        found = run(recipe, name, folder, (*keep, f"seed={drawn}", *(start if control else ())))
        about = {"recipe": recipe, "seed": seed, "drawn": drawn, "rewards": "others'" if control else "its own"}
        rows.append(about | figures(found) | {"wall_seconds": time.monotonic() - began})
        show(rows[-1])
    return rows


def show(row: Mapping[str, Any]) -> None:
    """Print a row."""
    parts = (f"{name} {row[f'{name}_before']:6.1%} -> {row[f'{name}_after']:6.1%}" for name in ("greedy", "sampled"))
    about = f"{row['recipe']:16s} seed {row['seed']} ({row['drawn']})  rewards {row['rewards']:8s}"
    print(about, *parts, f"{row['steps']} steps", f"{row['wall_seconds']:.0f} s", sep="  ", flush=True)


def main() -> None:
    parser = benchmark_parser(__doc__, "one recipe, two steps; says nothing")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--controls", type=int, default=1, help="of each seed")
    options = parser.parse_args()
    recipes, seeds = options.recipes.split(","), [int(seed) for seed in options.seeds.split(",")]
    if options.quick:
        recipes, seeds = ["retrieval"], [0]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in seeds:
            for recipe in recipes:
                keys, warm = (QUICK, 4) if options.quick else ((), warm_steps(recipe))
                rows += beside(recipe, seed, options.folder or Path(temporary), keys, warm, options.controls)
                write_rows(options.json, rows)


if __name__ == "__main__":
    main()
