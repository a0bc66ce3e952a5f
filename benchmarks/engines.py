"""Generation by vLLM beside the native engine: one export's greedy answers, and a GRPO run with the same seed.

    python benchmarks/engines.py [--quick] [--json PATH] [--python PATH]

The run learns to add in a process of its own for each engine; tokens are drawn by the same random numbers, so rewards
differ only where a rounding changed a token. Its export is then loaded by vLLM itself, without any of Tilth's code, and
by transformers: greedy answers and log-probs of all four must agree.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from driver import benchmark_parser, write_rows
from transformers import AutoModelForCausalLM

from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.runs.models import load_model, make_engine
from tilth.runs.readers import read_metrics

SETTINGS = ["data.digits=2", "model.hidden=64", "model.layers=2", "model.heads=2", "rollout.prompts=16"]
SETTINGS += ["supervised.until=0.3"]  # so that there is something to reward
TOKENS = 6
PLAIN = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts, most = json.loads(sys.argv[1])
engine = LLM(folder, dtype="float32", max_model_len=32, max_num_seqs=64, enforce_eager=True, skip_tokenizer_init=True,
             kv_cache_memory_bytes=1 << 25)
params = SamplingParams(temperature=0, max_tokens=most, logprobs=0, ignore_eos=True, detokenize=False)
found = [a.outputs[0] for a in engine.generate([{"prompt_token_ids": p} for p in prompts], params)]
tokens = [list(one.token_ids) for one in found]
logprobs = [[step[token].logprob for step, token in zip(one.logprobs, one.token_ids)] for one in found]
print("FOUND" + json.dumps([tokens, logprobs]))
"""
Answers = tuple[list[list[int]], list[list[float]]]


def learn(folder: Path, engine: str, python: str, steps: int, warmup: int) -> list[dict[str, Any]]:
    """Run the recipe and return the records of its steps of reinforcement learning."""
    chosen = [f"rollout.engine={engine}", *([f"rollout.python={python}"] if engine != "native" else [])]
    more = [f"algorithm.steps={steps}", f"supervised.steps={warmup}", f"run.dir={folder}", f"run.name={engine}"]
    command = [sys.executable, "-m", "tilth", "run", "addition-grpo", *SETTINGS, *chosen, *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{engine}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [dict(r) for r in read_metrics(folder / engine) if r["phase"] == "grpo"]


def by_transformers(folder: Path, prompts: list[list[int]]) -> Answers:
    """Greedy answers of the exported model, one prompt after another."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens, logprobs = list[list[int]](), list[list[float]]()
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(TOKENS):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        with torch.no_grad():
            every = model(ids).logits[0, :-1].log_softmax(-1)
        own = ids[0, len(prompt) :]
        tokens.append(own.tolist())
        logprobs.append(every[len(prompt) - 1 :].gather(1, own[:, None])[:, 0].tolist())
    return tokens, logprobs


def by_engine(run: Path, prompts: list[list[int]]) -> Answers:
    """Greedy answers of the engine that the run had."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    engine = make_engine(load_model(run), EngineOptions(max_rows=64, max_length=32))
    found = engine.generate([Request(i, prompt, params) for i, prompt in enumerate(prompts)])
    return (
        [t.tokens[t.prompt_length :].tolist() for t in found],
        [t.logprobs[t.prompt_length :].tolist() for t in found],
    )


def by_vllm(folder: Path, python: str, prompts: list[list[int]]) -> Answers:
    """Greedy answers of vLLM's own offline class."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1"}
    asked = json.dumps([str(folder), prompts, TOKENS])
    done = subprocess.run(
        [python, "-P", "-c", PLAIN, asked], capture_output=True, text=True, env=environment, start_new_session=True
    )
    for line in done.stdout.splitlines():
        if line.startswith("FOUND"):
            tokens, logprobs = json.loads(line.removeprefix("FOUND"))
            return tokens, logprobs
    raise SystemExit(f"vLLM does not load the export:\n{done.stderr[-3000:]}")


def export_rows(folder: Path, python: str) -> list[dict[str, Any]]:
    """Compare the answers of the export of the run that vLLM generated for."""
    out = folder / "export"
    subprocess.run([sys.executable, "-m", "tilth", "export", folder / "vllm", out], check=True, capture_output=True)
    size = json.loads((out / "config.json").read_text())["vocab_size"]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, size, int(rng.integers(2, 20))).tolist() for _ in range(32)]
    tokens, logprobs = by_transformers(out, prompts)
    rows = []
    answers = {
        "native": by_engine(folder / "native", prompts) if _equal_weights(folder) else None,
        "rollout.engine=vllm": by_engine(folder / "vllm", prompts),
        "vllm.LLM": by_vllm(out, python, prompts),
    }
    for name, found in answers.items():
        if found is not None:
            apart = float(np.abs(np.array(found[1]) - np.array(logprobs)).max())
            rows.append({"name": name, "prompts": len(prompts), "equal": found[0] == tokens, "logprobs": apart})
            print(f"{name:20s} greedy tokens of transformers: {found[0] == tokens}, log-probs differ by {apart:.1e}")
    return rows


def _equal_weights(folder: Path) -> bool:
    """Return True if both runs learnt the very same weights."""
    ours, theirs = (load_model(folder / name).tensors for name in ("native", "vllm"))
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def main() -> None:
    parser = benchmark_parser(__doc__, "4 steps")
    parser.add_argument("--python", default=os.environ.get("TILTH_VLLM_PYTHON", ""), help="interpreter that has vLLM")
    options = parser.parse_args()
    if not options.python:
        print("left out: no vLLM; give --python or TILTH_VLLM_PYTHON, the interpreter of an environment that has it")
        write_rows(options.json, [{"left_out": "no --python with vLLM"}])
        return
    steps, warmup = (4, 10) if options.quick else (30, 400)
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: learn(Path(folder), name, options.python, steps, warmup) for name in ("native", "vllm")}
        rows: list[dict[str, Any]] = []
        for ours, theirs in zip(runs["native"], runs["vllm"], strict=True):
            row = {"step": ours["phase_step"]}
            for name, r in (("native", ours), ("vllm", theirs)):
                row |= {f"{name}_reward": r["reward/mean"], f"{name}_mismatch": r.get("mismatch/max")}
                row |= {f"{name}_generate_seconds": r["time/generate"]}
                row |= {f"{name}_sync_seconds": r["time/publish"] + r["time/verify"]}
            rows.append(row)
            print("  ".join(f"{k} {v:.3g}" if v is not None else f"{k} -" for k, v in row.items()), flush=True)
        rows += export_rows(Path(folder), options.python)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
