"""A run directory as a demo would leave it: curves, samples, events, a plan. Everything follows from the seed."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.analysis.tree import s, table
from tilth.config.load import from_dict
from tilth.core.batch import Batch
from tilth.data.tokenizer import Tokenizer
from tilth.runs.directory import RunDir

ENVIRONMENT = {
    "python": "3.12.3", "platform": "Linux-6.8-x86_64", "packages": {"tilth": "0.1.0", "torch": "2.13.0"},
    "cpu": "AMD EPYC 7B13", "cores": 2, "logical_cores": 2, "threads": 2, "memory": 8_200_000_000, "accelerator": None,
}  # fmt: skip
PLAN = {
    "parameters": 806_000, "train_prompts": 900_000, "heldout_prompts": 100_000, "supervised_steps": 250, "steps": 400,
    "prompts": 25_600, "samples": 204_800, "optimizer_steps": 650, "tokens_per_step": 8704, "memory_peak": 771_000_000,
    "memory": {"interpreter and libraries": 450_887_680, "parameters": 3_224_000, "gradients": 3_224_000,
               "optimizer state": 6_448_000, "KV cache": 67_108_864, "activations": 190_000_000},
}  # fmt: skip


def recipe(root: Path):
    return from_dict(
        {
            "run": {"dir": str(root)},
            "supervised": {"steps": 250, "until": 0.6},
            "algorithm": {"steps": 400},
            "data": {"source": "addition"},
        }
    )


def fake_run(root: Path, *, warmup=180, steps=400, seed=0, end="finished", missing=0, hostile=""):
    """Make ``root/demo-001`` and return its path. ``hostile``: text that a policy wrote in every completion."""
    rng = np.random.default_rng(seed)
    with RunDir.create(recipe(root), "addition-grpo") as run:
        run.update(environment=ENVIRONMENT)
        run.set_plan(PLAN)
        tokenizer = Tokenizer.characters("0123456789+=")
        (run.path / "model").mkdir()
        tokenizer.save(run.path / "model")
        run._earlier = 0.0
        events = []
        clock = 0.0
        for step in range(1, warmup + steps + 1):
            warm = step <= warmup
            record = _warm(step, warmup, rng) if warm else _grpo(step - warmup, steps, rng)
            if not warm:
                run.trajectories.add(_rows(step, record["skill"], tokenizer, rng, hostile, missing))
                record["reward/missing"] = float(missing)
                if missing:
                    lost = {"value": None, "status": "timeout", "reason": "took longer than 10 s"}
                    run.journal.write(step, _unrewarded(step), {step: lost})
            record.pop("skill")
            record |= {"step": step, "phase": "warmup" if warm else "grpo", "memory/peak": 742e6}
            record |= {"phase_step": step - (not warm) * warmup, "phase_steps": 250 if warm else 400}
            clock += record["time/step"]
            run._earlier, run._began = clock, _now()
            run.commit_step(record)
            events.append(_events(step, clock, record))
            if step % 25 == 0:
                run.flush()
        if events:
            pq.write_table(table(*events), run.events / "attempt-1-rank-0-000001.parquet")
        if end:
            run.end(end)
            run.update(memory={"predicted": PLAN["memory_peak"], "peak": 742_000_000})
        else:
            run._state["state"] = "running"
            run.flush()
            run.update()
    return run.path


def _unrewarded(trajectory: int) -> Batch:
    """The row of a sample whose reward is missing."""
    rows = {"id": np.array([trajectory]), "identity": np.array([1], np.uint32), "reward": np.array([np.nan])}
    return Batch(rows)


def _now() -> float:
    import time

    return time.monotonic()


def _warm(step, warmup, rng):
    x = step / max(warmup, 1)
    skill = 0.62 / (1 + math.exp(-18 * (x - 0.72)))
    record = {
        "skill": skill, "loss": 2.4 * math.exp(-2.2 * x) + 0.35 - 0.3 * skill + 0.03 * rng.random(), "lr": 2e-3,
        "grad_norm": 0.8 + 0.3 * rng.random(), "tokens/trained": 3328.0,
        "tokens_per_second/train": 26500 + 900 * rng.normal(), "memory/rss": 610e6 + 1e5 * step,
        "time/update": 0.082 + 0.004 * rng.random(), "time/publish": 0.002, "time/other": 0.001,
    }  # fmt: skip
    record["time/evaluate"] = 0.14 if step % 10 == 0 else 0.0
    if step % 10 == 0 or step == 1:
        record["accuracy/heldout"] = round(skill * 512) / 512
    record["time/step"] = sum(v for k, v in record.items() if k.startswith("time/"))
    return record


def _grpo(step, steps, rng):
    x = step / max(steps, 1)
    skill = 0.62 + 0.358 * (1 - math.exp(-3.6 * x))
    reward = min(skill - 0.13 * (1 - x) ** 2 + 0.012 * rng.normal(), 1.0)
    record = {
        "skill": skill, "reward/mean": reward, "samples": 512.0, "loss": 0.004 * rng.normal(),
        "entropy": 0.32 * math.exp(-2.6 * x) + 0.04 + 0.006 * rng.random(),
        "length/mean": 5.0 + 0.04 * (1 - x) * rng.random(), "length/max": 8.0 if rng.random() < 0.5 * (1 - x) else 5.0,
        "length/cut": 0.004 * (1 - x), "grad_norm": 0.25 + 0.35 * (1 - x) + 0.06 * rng.random(), "lr": 5e-4,
        "groups/flat": 0.25 + 0.55 * x + 0.04 * rng.normal(), "ratio": 1.0, "clip_low": 0.0, "clip_high": 0.0,
        "mismatch/max": 10 ** (-5.6 + 0.25 * rng.normal()), "mismatch/mean": 10 ** (-7.2 + 0.1 * rng.normal()),
        "tokens/generated": 2560.0, "tokens/trained": 6656.0 * (1 - x / 2),
        "tokens_per_second/generate": 16800 + 500 * rng.normal() - (2500 if rng.random() < 0.02 else 0),
        "tokens_per_second/train": 27400 + 700 * rng.normal(), "memory/rss": 655e6 + 2e6 * x,
        "time/generate": 0.15 + 0.006 * rng.random(), "time/update": 0.12 * (1 - x / 2) + 0.01 * rng.random(),
        "time/score": 0.011, "time/advantages": 0.004, "time/publish": 0.003, "time/verify": 0.002, "time/other": 0.006,
    }  # fmt: skip
    record["time/evaluate"] = 0.16 if step % 25 == 0 else 0.0
    if step % 25 == 0 or step == 1:
        record["accuracy/heldout"] = round(min(skill, 0.98) * 512) / 512
    record["time/step"] = sum(v for k, v in record.items() if k.startswith("time/"))
    return record


def _rows(step, skill, tokenizer, rng, hostile, missing, prompts=4, group=8):
    rows = []
    for p in range(prompts):
        a, b = rng.integers(0, 1000, 2)
        for _ in range(group):
            right = rng.random() < skill
            said = f"{a + b + (0 if right else int(rng.choice([1, -1, 10, 100]))) % 10000:04d}"
            asked = tokenizer.encode(f"{a:03d}+{b:03d}=")
            ids = [*tokenizer.encode(said), tokenizer.eos_id]
            sure = np.where(rng.random(len(ids)) < (0.15 if right else 0.5), rng.uniform(0.02, 0.9, len(ids)), 0.995)
            logprobs = np.concatenate([np.zeros(len(asked)), np.log(sure)])
            rows.append(
                {
                    "step": step, "id": len(rows) + step * 100, "group": step * 10 + p, "prompt": int(a * 1000 + b),
                    "prompt_text": f"{a:03d}+{b:03d}={hostile}", "text": said + hostile, "answer": f"{a + b:04d}",
                    "tokens": asked + ids, "prompt_length": len(asked), "finish": "stop", "version": step,
                    "reward": None if len(rows) < missing else float(right), "logprobs": logprobs.tolist(),
                }
            )  # fmt: skip
    return pa.Table.from_pylist(rows)


def _events(step, clock, record):
    """Spans of a step: its phases, with what runs inside the two large ones."""
    begin = at = int((clock - record["time/step"]) * 1e9)
    inside = {
        "generate": (("decode", 0.72), ("prefill", 0.11), ("sample", 0.12)),
        "update": (("forward", 0.36), ("backward", 0.5), ("optimizer", 0.1)),
    }
    phases = []
    for name in (k[5:] for k in record if k.startswith("time/") and k not in ("time/step", "time/other")):
        took = int(record[f"time/{name}"] * 1e9)
        if not took:
            continue
        parts, start = [], at
        for part, share in inside.get(name, ()):
            parts.append(s(part, start, start + int(took * share), micro_batch=0, tokens=2560, flops=1e9))
            start += int(took * share)
        phases.append(s(name, at, at + took, *parts, tokens=2560))
        at += took
    return s("step", begin, begin + int(record["time/step"] * 1e9), *phases, rank=0, step=step)
