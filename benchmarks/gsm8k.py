"""From the files of GSM8K to a model that was trained by reinforcement learning, and two runs to compare it with.

    python benchmarks/gsm8k.py [--data ../shared/data/gsm8k] [--quick] [--json PATH] [--keep FOLDER]

Three commands as a user would give them: ``pretrain`` (a tokenizer and a new model on questions and answers as text),
``sft`` on the solutions, ``gsm8k-grpo``. Beside it the same reinforcement learning with the training answers shuffled
(whatever it gains there it does not owe to right answers), and on a random Qwen3 checkpoint that transformers saved.
Correctness and format are those of greedy answers to the test file. ``--quick`` makes miniatures of a few steps.
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from driver import benchmark_parser, write_rows

TILTH = [sys.executable, "-c", "from tilth.cli.main import main; main()"]
COLUMN = 'data.columns.prompt="{question}\\n"'
QUICK = {
    "pretrain": ("supervised.epochs=0", "supervised.steps=6", "supervised.batch=16", "supervised.check_every=3",
                 "model.hidden=64", "model.layers=2", "model.heads=2", "data.tokenizer=bpe:600", "model.context=1024"),
    "sft": ("supervised.epochs=0", "supervised.steps=6", "supervised.batch=16", "model.context=1024"),
    "gsm8k-grpo": ("algorithm.steps=2", "rollout.prompts=4", "rollout.group=4", "rollout.max_tokens=32",
                   "model.context=1024", "algorithm.drop_flat=false", "run.eval_every=1"),
}  # fmt: skip


def lines_of(file: Path, most: int | None) -> list[str]:
    """The first lines of a file of records."""
    return file.read_text(encoding="utf-8").splitlines()[:most]


def shuffled(lines: list[str], seed: int = 0) -> list[str]:
    """The same questions, each with the answer of another one."""
    records = [json.loads(line) for line in lines]
    answers = [r["answer"] for r in records]
    random.Random(seed).shuffle(answers)
    return [json.dumps(r | {"answer": a}) for r, a in zip(records, answers)]


def random_checkpoint(folder: Path, run: Path) -> Path:
    """A Qwen3 of the run's shape with random weights and the run's tokenizer, saved by transformers."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(AutoConfig.from_pretrained(run / "model")).save_pretrained(folder)
    AutoTokenizer.from_pretrained(run / "model").save_pretrained(folder)
    return folder


def run(recipe: str, name: str, keys: list[str], quick: bool) -> dict[str, Any]:
    """One command as a row."""
    command = [*TILTH, "run", recipe, f"run.name={name}", *keys, *(QUICK[recipe] if quick else ())]
    started = time.perf_counter()
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        raise SystemExit(f"{name}: {ended.stderr.strip().splitlines()[-1]}")
    folder = next(key.removeprefix("run.dir=") for key in keys if key.startswith("run.dir="))
    return {"run": name, "quick": quick, "wall_seconds": round(time.perf_counter() - started, 1)} | measured(
        Path(folder) / name
    )


def measured(directory: Path) -> dict[str, Any]:
    """What a run's metrics say, at its beginning and at its end."""
    from tilth.runs.readers import curve, read_metrics

    records = read_metrics(directory)
    row: dict[str, Any] = {"steps": records[-1]["step"]}
    for column, metric in {
        "correct": "reward/heldout/part/correct",
        "format": "reward/heldout/part/format",
        "loss_heldout_nats": "loss/heldout",
        "bits_per_byte": "bits_per_byte/heldout",
    }.items():
        found = curve(records, metric)
        row |= {f"{column}_first": found[0][1], f"{column}_last": found[-1][1]} if found else {}
    for column, metric in {"groups_with_gradient": "groups/gradient", "reward_mean": "reward/mean"}.items():
        values = [value for _, value in curve(records, metric)]
        row |= {column: sum(values) / len(values)} if values else {}
    return row


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    numbers = [
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k not in ("run", "quick")
    ]
    return f"{row['run']:10} " + "  ".join(numbers)


def whole_way(folder: Path, data: Path, quick: bool) -> list[dict[str, Any]]:
    """All runs, in order; each row is printed when it is there."""
    rows: list[dict[str, Any]] = []
    train, test, wrong = (folder / name for name in ("train.jsonl", "test.jsonl", "shuffled.jsonl"))
    train.write_text("\n".join(lines_of(data / "train.jsonl", 200 if quick else None)))
    test.write_text("\n".join(lines_of(data / "test.jsonl", 16 if quick else None)))
    wrong.write_text("\n".join(shuffled(lines_of(train, None))))

    def go(recipe: str, name: str, source: Path, *keys: str) -> None:
        where = [f"run.dir={folder}", f"data.source={source}", f"data.heldout={test}", *keys]
        rows.append(run(recipe, name, where, quick))
        print(line(rows[-1]), flush=True)

    go("pretrain", "pretrain", train, COLUMN)
    go("sft", "sft", train, COLUMN, f"model.path={folder / 'pretrain'}")
    everything = "run.eval_prompts=1319"
    go("gsm8k-grpo", "grpo", train, f"model.path={folder / 'sft'}", everything)
    go("gsm8k-grpo", "shuffled", wrong, f"model.path={folder / 'sft'}", everything)
    checkpoint = random_checkpoint(folder / "random-qwen3", folder / "pretrain")
    go("gsm8k-grpo", "random", train, f"model.path={checkpoint}", "algorithm.steps=2", "run.eval_prompts=64")
    print(f"the whole way (pretrain, sft, grpo): {sum(r['wall_seconds'] for r in rows[:3]):.0f} s")
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__, "200 problems, few steps")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data" / "gsm8k")
    parser.add_argument("--keep", type=Path, help="a folder that the runs stay in")
    options = parser.parse_args()
    if not (options.data / "train.jsonl").is_file():
        raise SystemExit(f"no train.jsonl in {options.data}; give the folder of GSM8K's files with --data")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = whole_way(folder, options.data, options.quick)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
