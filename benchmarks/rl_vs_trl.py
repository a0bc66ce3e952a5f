"""GRPO beside TRL's ``GRPOTrainer``: seconds per step, tokens/s, time to the same reward, memory; part by part.

    python benchmarks/rl_vs_trl.py [--quick] [--json PATH] [--threads N] [--cases "fp32 equal,bf16 heavy"]
                                   [--contenders NAMES] [--shape 6M] [--device cpu]

The interpreter needs Tilth, and TRL 1.16 in the same environment (but for ``--contenders "tilth,tilth compiled"``).
TRL is no dependency of ours, so make one beside the repository (the constraints keep both on the same torch):

    python3.11 -m venv /tmp/rivals
    PIP_CONSTRAINT=constraints.txt /tmp/rivals/bin/pip install -e . "trl==1.16.*" accelerate datasets
    /tmp/rivals/bin/python benchmarks/rl_vs_trl.py

What is the same for all: a Qwen3-shaped model (6M: hidden 256, 6 layers, 4 heads, ffn 688, 4,096 tokens) whose random
weights ``transformers`` saved once; 16 prompts of 16 tokens a step in the same order, 8 completions each; the reward
(share of words of the first quarter of the vocabulary, scored in a process of its own by Tilth, in line by TRL);
advantages by group mean and standard deviation; the clipped loss averaged over all tokens of the batch; AdamW with lr,
betas 0.9 and 0.95, no weight decay, gradients clipped to norm 1; temperature 1, one optimizer step a batch. bf16 is
TRL's autocast and our ``train.precision=bf16`` (fp32 parameters both). Tilth runs with all its checks, writes its
trajectories, metrics and spans, and its seconds are those between two committed steps; TRL writes nothing.

Lengths. *Equal*: 48 tokens, no end token. *Heavy*: the shipped heavy-tailed ``lengths.json``, completion i of step s
ends at its own given length, the same for all. For that each engine is told from outside: our requests get their
``max_tokens`` from an engine that a plugin declares (``rl_engine.py``); TRL's ``generate`` gets a logits processor that
makes the end token certain at that place and impossible before it (TRL knows the end of a row by that token). Both
generate and learn exactly these tokens; TRL, as any padded batch, computes every row up to the longest one. (Its
continuous batching for CPUs takes no such rule and took 15 s for four rows, so it is not among the contenders.)

Checked before anything is timed (``rl_check.py``): both models give the same log-probs to the same ids, and both losses
the same value and gradient on one batch. After each run: the same prompts in every step, and as many tokens generated
by each, as each counts them.

Contenders are processes of their own and run in turn, ``--rounds`` times. A figure is the median over steps of the
better round, the first two steps (warm-up, compilation) left out. CPU seconds are those of the main process, all its
threads: of use where other work disturbs the wall clock. Time to the same reward counts all steps and
compilation; start-up (imports, loading) is listed apart. Peak memory is that of the process and its largest child.

Where the machine is shared, believe the ratios and CPU seconds only. ``--quick`` shows that it runs, no more: one
case with 16 completions a step.

On a GPU: ``--device cuda --shape 0.5B`` (or 7B) ``--cases "bf16 equal,bf16 heavy"``; contender "tilth compiled" then
uses CUDA graphs for decoding. That option has never been run: no GPU was at hand.
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from driver import benchmark_parser, write_rows
from rl_task import Task, cores, save_model, words
from shapes import SHAPES
from work import same_work

HERE = Path(__file__).parent
GOALS = {"fp32 equal": 1.5, "bf16 equal": 1.8, "fp32 heavy": 4.0, "bf16 heavy": 4.0}
QUICK_CASES = "bf16 heavy"
QUICK: dict[str, Any] = {"prompts": 4, "group": 4, "tokens": 16}
CONTENDERS = {
    "trl": ("rl_trl.py",),
    "tilth": ("rl_tilth.py",),
    "tilth compiled": ("rl_tilth.py", "compile"),
}
NEEDED = ("trl", "accelerate", "datasets")
"""By TRL's side."""
SKIP = 2
TARGET = 0.6


def prepare(task: Task, count: int = 512) -> None:
    """The model, the prompts and the order in which Tilth will draw them."""
    import numpy as np

    from tilth.core.random import stream
    from tilth.data.prompts import PromptSet

    save_model(Path(task.folder), task.shape)
    vocabulary = json.loads((Path(task.folder) / "config.json").read_text())["vocab_size"]
    table = np.random.default_rng(0).integers(2, vocabulary, (count, task.prompt_tokens))
    texts = [words(row) for row in table]
    train, _ = PromptSet.of(texts).split(0.0)
    drawn = train.take(stream(0, "prompts"), 0, task.steps * task.prompts)
    order = drawn.reshape(task.steps, task.prompts).tolist()
    (Path(task.folder) / "prompts.json").write_text(json.dumps({"texts": texts, "order": order}))


def start(script: str, task: Task, *words: str) -> dict[str, Any]:
    """Run a contender in a process of its own; its result, or its last words as an error."""
    folder = Path(task.folder)
    task.save(folder / "task.json")
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    threads = str(cores(task.threads))
    source = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {
        "OMP_NUM_THREADS": threads,
        "GOMP_SPINCOUNT": "1000",
        "PYTHONPATH": source,
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(HERE / script), str(folder / "task.json"), str(result), *words]
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    if ended.returncode or not result.exists():
        said = [line for line in (ended.stderr + ended.stdout).splitlines() if line.strip()]
        raise RuntimeError(f"{' '.join(command[1:2] + list(words))} failed: {' | '.join(said[-3:])}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def check(task: Task) -> None:
    """Stop unless both compute the same."""
    found = start("rl_check.py", task)
    figures = ", ".join(f"{k} {found[k]:.1e} (bound {found['bounds'][k]:g})" for k in found["bounds"])
    print(f"  same computation: {figures}", flush=True)
    if not found["right"]:
        raise SystemExit("the contenders do not compute the same; nothing was timed")


def figures(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One row: the better round's medians, the time to the target of the quickest one, the greatest memory."""
    rows = [_figures(run) for run in runs]
    best = min(rows, key=lambda r: r["seconds_per_step"])
    reached = [r["seconds_to_target"] for r in rows if r["seconds_to_target"] is not None]
    peak = max(r["peak_bytes"] for r in rows)
    return {"contender": name, **best, "seconds_to_target": min(reached, default=None), "peak_bytes": peak}


def _figures(run: dict[str, Any]) -> dict[str, Any]:
    warm = run["steps"][SKIP:]
    seconds = statistics.median(s["seconds"] for s in warm)
    parts = {p: statistics.median(s["parts"].get(p, 0.0) for s in warm) for p in run["steps"][-1]["parts"]}
    parts["rest"] = max(seconds - sum(parts.values()), 0.0)
    mean = {k: statistics.mean(s[k] for s in warm) for k in ("generated", "trained")}
    whole = sum(s["seconds"] for s in run["steps"])
    return {
        "seconds_per_step": round(seconds, 4),
        "mean_seconds_per_step": round(statistics.mean(s["seconds"] for s in warm), 4),
        "cpu_seconds_per_step": round(statistics.median(s["cpu_seconds"] for s in warm), 4),
        "parts": {k: round(v, 4) for k, v in parts.items()},
        "generated_tokens_per_second": round(mean["generated"] / parts["generate"]),
        "trained_tokens_per_second": round(mean["trained"] / parts["update"]),
        "reward_first": round(run["steps"][0]["reward"], 4),
        "reward_last": round(run["steps"][-1]["reward"], 4),
        "seconds_to_target": _to_target(run["steps"]),
        "compile_seconds": round(run["compile_seconds"], 1),
        "start_seconds": round(run["whole_seconds"] - whole, 1),
        "peak_bytes": run["peak_bytes"],
        "prompts": [s["prompts"] for s in run["steps"]],
        "generated_tokens": sum(s["generated"] for s in run["steps"]),
        "steps": len(run["steps"]),
    }


def _to_target(steps: list[dict[str, Any]]) -> float | None:
    passed = 0.0
    for step in steps:
        passed += step["seconds"]
        if step["reward"] >= TARGET:
            return round(passed, 1)
    return None


def race(task: Task, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """All contenders in turn; those that cannot run are told and left out."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in list(runs):
            try:
                runs[name].append(start(CONTENDERS[name][0], task, *CONTENDERS[name][1:]))
            except RuntimeError as error:
                if name == "tilth":
                    raise
                print(f"  {name} left out: {error}", flush=True)
                del runs[name]
                continue
            print(f"  round {turn + 1} {name}: {_figures(runs[name][-1])['seconds_per_step']:.3f} s a step", flush=True)
    rows = [figures(name, found) for name, found in runs.items()]
    asked = {tuple(row.pop("prompts")) for row in rows}
    assert len(asked) == 1, "the contenders were not asked the same prompts"
    same_work({row["contender"]: {kind: row[kind] for kind in ("steps", "generated_tokens")} for row in rows})
    return rows


def explain(rows: list[dict[str, Any]], goal: float) -> None:
    """The table, and where the difference comes from; without TRL there is none."""
    theirs = {row["contender"]: row for row in rows}.get("trl")
    parts = ["generate", "score", "old log-probs", "update", "publish", "rest"]
    heads = " ".join(f"{p:>13}" for p in parts)
    print(f"  {'contender':15} {'s/step':>7} {'x trl':>6} {'cpu s':>7} {'x trl':>6}  {heads}"
          "  gen tok/s train tok/s  to target  reward  compile  start  peak MB")  # fmt: skip
    for row in rows:
        for key, column in (("over_trl_cpu", "cpu_seconds_per_step"), ("over_trl", "seconds_per_step")):
            row[key] = round(theirs[column] / row[column], 2) if theirs else None
        over, over_cpu = (f"{row[key] or math.nan:6.2f}" for key in ("over_trl", "over_trl_cpu"))
        seconds = " ".join(f"{row['parts'].get(p, 0.0):13.3f}" for p in parts)
        target = "-" if row["seconds_to_target"] is None else f"{row['seconds_to_target']:.1f}"
        print(
            f"  {row['contender']:15} {row['seconds_per_step']:7.3f} {over} "
            f"{row['cpu_seconds_per_step']:7.3f} {over_cpu}  {seconds}  "
            f"{row['generated_tokens_per_second']:9,} {row['trained_tokens_per_second']:11,}  {target:>9}  "
            f"{row['reward_last']:6.3f}  {row['compile_seconds']:7.1f}  {row['start_seconds']:5.1f}  "
            f"{row['peak_bytes'] / 1e6:7,.0f}"
        )
    if theirs is None:
        return
    for row in (r for r in rows if r["contender"].startswith("tilth")):
        gains = {p: theirs["parts"].get(p, 0.0) - row["parts"].get(p, 0.0) for p in parts}
        said = ", ".join(f"{p} {gain:+.3f} s" for p, gain in gains.items() if abs(gain) >= 0.0005)
        verdict = "reached" if row["over_trl"] >= goal else "missed"
        print(f"  {row['contender']}: {row['over_trl']:.2f}x (goal {goal}: {verdict}). TRL spends more in: {said}")


WHY = """Where the difference comes from:
  generate: our engine computes a prompt once for its samples, keeps keys and values in a slab (Hugging Face's cache is
    copied at every token) and drops rows that have ended; TRL's rows go on to the longest of the batch.
  update: prompts of a group are computed once, sequences are packed, so no padding goes through the model.
  old log-probs: neither computes them (one optimizer step a batch).
  publish: the price of two sets of weights: ours are copied into the engine and verified by checksum at every step.
  rest: between phases; ours includes metrics, trajectories and the check of every log-prob against the engine's."""


def cases(args: argparse.Namespace, folder: str) -> dict[str, Task]:
    """Name -> task."""
    size: dict[str, Any] = QUICK if args.quick else {}
    base = Task(folder, shape=args.shape, threads=args.threads, device=args.device, **size)
    found = {}
    for name in (args.cases or (QUICK_CASES if args.quick else ",".join(GOALS))).split(","):
        precision, lengths = name.strip().split()
        heavy = lengths == "heavy"
        steps = args.steps or (SKIP + 1 if args.quick else 12 if heavy else 40)
        found[f"{precision} {lengths}"] = replace(base, precision=precision, heavy=heavy, steps=steps)
    return found


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = benchmark_parser(__doc__, "3 small steps, one round, nothing compiled; figures mean little")
    parser.add_argument("--threads", type=int, default=0, help="0: one for each core")
    parser.add_argument("--cases", default="", help=f"default {','.join(GOALS)}; with --quick {QUICK_CASES}")
    parser.add_argument("--contenders", default="", help="comma-separated; default: all that fit the case")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps of a run; 0: 40, heavy 12")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shape", default="6M", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def contenders(args: argparse.Namespace) -> list[str]:
    """Who runs: nothing compiled in a quick race."""
    if args.contenders:
        return [name.strip() for name in args.contenders.split(",")]
    return ["trl", "tilth"] + ([] if args.quick else ["tilth compiled"])


def main() -> None:
    args = options()
    missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
    if missing and "trl" in contenders(args):
        raise SystemExit(f"not installed here: {', '.join(missing)}\n{__doc__.split('What is the same')[0].strip()}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        plan = cases(args, folder)
        prepare(replace(next(iter(plan.values())), steps=max(t.steps for t in plan.values())))
        for name, task in plan.items():
            print(f"{name} lengths, {task.shape}, {cores(task.threads)} threads, {task.steps} steps", flush=True)
            if "trl" in contenders(args):
                check(task)
            new = race(task, contenders(args), 1 if args.quick else args.rounds)
            explain(new, GOALS.get(name, 1.0))
            rows += [{"case": name, "shape": task.shape, "threads": cores(task.threads), **row} for row in new]
            write_rows(args.json, rows)
    if "trl" in contenders(args):
        print(WHY)


if __name__ == "__main__":
    main()
