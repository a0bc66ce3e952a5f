"""Learning curves of the algorithms on one task, from one checkpoint, at equal generated tokens, over several seeds.

    python benchmarks/learning.py [--quick] [--json PATH] [--svg PATH] [--seeds 3] [--only grpo,dapo] [--jobs 2]
                                  [--folder DIR] [--lr LR] [--budget TOKENS] [--sweep]

A tiny model learns to sort short lists from given answers until it is right about half of the time; every run goes on
from that one checkpoint. A run goes on until it has generated its budget of tokens, however many steps that takes:
samples that dynamic sampling throws away, ReMax's greedy answers and VAPO's value pre-training count. Accuracy is that
of greedy answers to the same held-out prompts, read off between the two evaluations around the budget.

A variant is compared with its parent (an ablation with the whole, the others with GRPO): the difference of the means
over seeds beside the spread of a seed; "no difference" below twice its standard error. One learning rate holds for all,
critics have twice as much; ``--sweep`` prints the sweep of GRPO, on a seed of its own, that it comes from. Each run is
a process with one thread in a folder of its own; with --folder runs that are there already are not made again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import learning_figures as figures
import learning_plot as plot
from driver import benchmark_parser, write_rows
from learning_task import QUICK as QUICK_TASK
from learning_task import WARM, Task, base, warm_up, write
from learning_variants import GRPO, QUICK, VARIANTS, Variant, chosen, keys_of

HERE = Path(__file__).parent
BUDGET, QUICK_BUDGET = 100_000, 12_000
LR = 1e-4
SWEEP, SWEEP_SEED = (3e-5, 1e-4, 2e-4, 4e-4), 100
Result = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What one call of this script runs."""

    folder: Path
    task: Task
    budget: int
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]
    jobs: int
    lr: float


def environment() -> dict[str, str]:
    """One thread for each run."""
    source = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000", "PYTHONPATH": source}


def run(folder: Path, name: str, keys: Mapping[str, Any], budget: float) -> Result:
    """One run in a process of its own, or what it left when it was made before. RuntimeError with what it said."""
    place = folder / "results"
    place.mkdir(parents=True, exist_ok=True)
    given, result, log = (place / f"{name}{end}" for end in (".keys.json", ".json", ".log"))
    if kept(result, keys, budget):
        return {**json.loads(result.read_text()), "kept": True}
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)  # what was stopped in the middle
    given.write_text(json.dumps(keys))
    result.unlink(missing_ok=True)
    words = [sys.executable, str(HERE / "learning_run.py"), str(given), str(result), str(budget)]
    with log.open("w") as out:
        ended = subprocess.run(words, stdout=out, stderr=subprocess.STDOUT, env=environment())
    if ended.returncode or not result.exists():
        said = [line for line in log.read_text().splitlines() if line.strip()]
        raise RuntimeError(f"{name} failed: {' | '.join(said[-2:])}\n  again: PYTHONPATH=src {' '.join(words)}")
    found: Result = json.loads(result.read_text())
    return found


def kept(result: Path, keys: Mapping[str, Any], budget: float) -> bool:
    """Whether this very run was made before."""
    if not result.is_file():
        return False
    found = json.loads(result.read_text())
    return bool(found["keys"] == json.loads(json.dumps(keys)) and found["budget"] == budget)


def warm(plan: Plan) -> None:
    """The data and the checkpoint that all share."""
    write(plan.task, plan.folder)
    try:
        found = run(plan.folder, WARM, warm_up(plan.task, plan.folder), 0)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    accuracy, spent = found["points"][-1][2], found["wall_seconds"]
    print(f"warm-up: {found['steps']} steps, {spent:.0f} s, greedy held-out accuracy {accuracy:.3f}", flush=True)


def start(plan: Plan, variant: Variant, seed: int) -> Result:
    """One run of a variant, and a line about it."""
    name = f"{variant.slug}-{plan.lr:g}-{seed}"
    own = {"seed": seed, "model.path": str(plan.folder / "runs" / WARM), "run.name": name}
    try:
        found = run(plan.folder, name, base(plan.task, plan.folder) | keys_of(variant, plan.lr) | own, plan.budget)
    except RuntimeError as error:
        print(f"  {error}", flush=True)
        return {"title": variant.title, "seed": seed, "error": str(error)}
    final = figures.at(figures.curve(found["points"]), plan.budget)
    print(
        f"  {variant.title}, seed {seed}: {found['points'][0][2]:.3f} -> {final:.3f}, {found['steps']} steps, "
        f"{found['tokens']:,.0f} tokens, {found['wall_seconds']:.0f} s{' (made before)' if 'kept' in found else ''}",
        flush=True,
    )
    return {"title": variant.title, "seed": seed, **found}


def everything(plan: Plan) -> list[Result]:
    """All runs, seed by seed, so that a slow stretch of the machine meets all variants alike."""
    with ThreadPoolExecutor(plan.jobs) as pool:
        waiting = [pool.submit(start, plan, v, seed) for seed in plan.seeds for v in plan.variants]
        return [found.result() for found in waiting]


def by_title(plan: Plan, results: Sequence[Result]) -> dict[str, list[Result]]:
    """Runs that came to their end, in the order of the variants."""
    right = [r for r in results if "error" not in r]
    return {v.title: [r for r in right if r["title"] == v.title] for v in plan.variants}


def tell(plan: Plan, results: Sequence[Result]) -> dict[str, Any]:
    """Print the tables; returns all of it as JSON."""
    runs, parents = by_title(plan, results), {v.title: v.parent for v in plan.variants}
    firsts = sorted({round(r["points"][0][2], 6) for some in runs.values() for r in some})
    same = "the same in all runs" if len(firsts) == 1 else "NOT the same in all runs"
    print(f"\naccuracy before the first step: {', '.join(map(str, firsts))} ({same})\n")
    rows = figures.table(runs, parents, plan.budget)
    print(figures.markdown(rows, parents))
    trained_first = {title: some for title, some in runs.items() if any(r["value_tokens"] for r in some)}
    relatives = {parents[title] for title in trained_first} | {t for t, p in parents.items() if p in trained_first}
    beside = {title: some for title, some in runs.items() if title in trained_first or title in relatives}
    uncounted = figures.table(beside, parents, plan.budget, counted=False) if trained_first else []
    if uncounted:
        print("\nThe same where the tokens of value pre-training are not counted:\n")
        print(figures.markdown(uncounted, parents))
    return {
        "budget": plan.budget,
        "lr": plan.lr,
        "seeds": plan.seeds,
        "first": firsts,
        "rows": rows,
        "uncounted": uncounted,
        "runs": list(results),
    }


def as_rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What ``tell`` returns as one list: rows of both tables, and the runs; ``table`` says which."""
    tables = {"all tokens": "rows", "without value pre-training": "uncounted", "runs": "runs"}
    about = {"budget_tokens": found["budget"], "lr": found["lr"]}
    return [{"table": table, **about, **row} for table, key in tables.items() for row in found[key]]


def picture(plan: Plan, results: Sequence[Result]) -> str:
    """The SVG."""
    runs, parents = by_title(plan, results), {v.title: v.parent for v in plan.variants}
    curves = {title: [figures.curve(r["points"]) for r in some] for title, some in runs.items() if some}
    bands = {title: figures.band(some, plan.budget) for title, some in curves.items()}
    what = f"{plan.budget // 1000}k generated tokens from one checkpoint, mean and range over {len(plan.seeds)} seed(s)"
    return plot.draw(bands, parents, title=f"Sorting: {what}")


def sweep(plan: Plan, rates: Sequence[float]) -> None:
    """GRPO at several learning rates, on a seed that no other run has."""
    print("| learning rate | final accuracy % | area % |\n|---:|---:|---:|")
    for rate in rates:
        one = Plan(plan.folder, plan.task, plan.budget, (SWEEP_SEED,), (GRPO,), 1, rate)
        found = start(one, GRPO, SWEEP_SEED)
        if "error" not in found:
            points = figures.curve(found["points"])
            final, area = figures.at(points, plan.budget), figures.area(points, plan.budget)
            print(f"| {rate:g} | {100 * final:.1f} | {100 * area:.1f} |", flush=True)


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = benchmark_parser(__doc__, "an easier task, one seed, a few variants; says nothing")
    parser.add_argument("--svg", type=Path, help="write the plot here")
    parser.add_argument("--seeds", type=int, help="how many; default 3, quick 1")
    parser.add_argument("--only", default="", help="variants, and those that they are compared with; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--folder", type=Path, help="keep data and runs here, and make only those that are not there")
    parser.add_argument("--lr", type=float, default=LR, help="learning rate of all policies; critics have twice it")
    parser.add_argument("--budget", type=int, help=f"generated tokens of a run; default {BUDGET:,}")
    parser.add_argument("--sweep", action="store_true", help="print GRPO at several learning rates, and nothing else")
    return parser.parse_args()


def planned(args: argparse.Namespace, folder: Path) -> Plan:
    """From options to what is run."""
    titles = [v.slug for v in VARIANTS if not args.quick or v.title in QUICK]
    words = [word.strip() for word in args.only.split(",") if word.strip()] or titles
    return Plan(
        folder.resolve(),
        QUICK_TASK if args.quick else Task(),
        args.budget or (QUICK_BUDGET if args.quick else BUDGET),
        tuple(range(args.seeds or (1 if args.quick else 3))),
        tuple(chosen(words)),
        args.jobs,
        args.lr,
    )


def compare(plan: Plan, args: argparse.Namespace) -> bool:
    """Run, print, write. Whether every run came to its end."""
    results = everything(plan)
    found = tell(plan, results)
    write_rows(args.json, as_rows(found))
    if args.svg and any("error" not in r for r in results):
        args.svg.write_text(picture(plan, results))
    return all("error" not in r for r in results)


def main() -> None:
    began = time.monotonic()
    args = options()
    with tempfile.TemporaryDirectory() as temporary:
        plan = planned(args, args.folder or Path(temporary))
        warm(plan)
        if args.sweep:
            return sweep(plan, SWEEP)
        right = compare(plan, args)
    print(f"\n{len(plan.variants)} variants x {len(plan.seeds)} seeds, {time.monotonic() - began:.0f} s in all")
    if not right:
        raise SystemExit("some runs failed; see above")


if __name__ == "__main__":
    main()
