"""The demo (recipe addition-grpo) from start to end: what it learns, how long it takes, how far both engines differ.

    python benchmarks/demo.py [--quick] [--json PATH] [--seeds 0,1,2]

Runs the recipe as a command of its own for each seed in fp32, and for the first seed also in bf16 and in parity mode.
``--quick`` makes miniatures of a few steps: the mismatch is real, the accuracies mean nothing.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from driver import benchmark_parser, write_rows

TILTH = [sys.executable, "-c", "from tilth.cli.main import main; main()"]
MODES = {"fp32": (), "bf16": ("train.precision=bf16",), "parity": ("train.parity=true",)}
QUICK = (
    "supervised.steps=10",
    "algorithm.steps=5",
    "model.hidden=64",
    "model.layers=2",
    "rollout.prompts=16",
    "algorithm.drop_flat=false",
)
COLUMNS = {
    "steps": "steps",
    "accuracy_first": "accuracy_first_share",
    "accuracy_last": "accuracy_last_share",
    "mismatch_max": "mismatch_max_nats",
    "mismatch_mean": "mismatch_mean_of_worst_step_nats",
    "tokens_per_second_generate": "generation_tokens_per_second",
    "tokens_per_second_train": "training_tokens_per_second",
    "memory_predicted": "memory_predicted_bytes",
    "memory_peak": "memory_peak_bytes",
    "rewards_missing": "rewards_missing",
}


def run(folder: Path, mode: str, seed: int, quick: bool) -> dict[str, object]:
    """One run as a row."""
    name = f"{mode}-{seed}"
    keys = [*MODES[mode], f"seed={seed}", f"run.dir={folder}", f"run.name={name}", *(QUICK if quick else ())]
    started = time.perf_counter()
    subprocess.run([*TILTH, "run", "addition-grpo", *keys], check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    shown = subprocess.run([*TILTH, "show", str(folder / name), "--json"], check=True, capture_output=True, text=True)
    summary = json.loads(shown.stdout)
    row: dict[str, object] = {"mode": mode, "seed": seed, "quick": quick, "wall_seconds": round(seconds, 1)}
    return row | {column: summary[key] for key, column in COLUMNS.items()}


def line(row: dict[str, object]) -> str:
    """A row for people."""

    def number(key: str, form: str) -> str:
        value = row[key]
        return "-" if value is None else format(value, form)

    return (
        f"{row['mode']:8} {row['seed']:4} {number('wall_seconds', '8.1f')} {number('accuracy_first_share', '8.3f')} "
        f"{number('accuracy_last_share', '8.3f')} {number('mismatch_max_nats', '10.1e')} "
        f"{number('mismatch_mean_of_worst_step_nats', '10.1e')} {number('generation_tokens_per_second', '10,.0f')} "
        f"{number('training_tokens_per_second', '10,.0f')} {float(row['memory_peak_bytes']) / 1e6:8,.0f}"  # type: ignore[arg-type]
    )


def main() -> None:
    parser = benchmark_parser(__doc__, "one seed, few steps")
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    seeds = [int(s) for s in options.seeds.split(",")][: 1 if options.quick else None]
    plan = [("fp32", s) for s in seeds] + [("bf16", seeds[0]), ("parity", seeds[0])]
    print("mode     seed  seconds    first     last   mismatch  worst mean   gen tok/s train tok/s  peak MB")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for mode, seed in plan:
            rows.append(run(Path(folder), mode, seed, options.quick))
            print(line(rows[-1]), flush=True)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
