"""Training adapters beside full training and beside PEFT on transformers, and serving many at once.

    python benchmarks/lora.py [--quick] [--json PATH] [--model 6M] [--rank 16] [--rounds N] [--device cpu] [--serve]

Contenders: ``TrainEngine`` that learns all weights ("tilth full") or adapters of all ``*_proj`` ("tilth lora"); PEFT on
``Qwen3ForCausalLM`` with the same targets, rank, scale and initial A, in a plain loop with fused AdamW and clipping
("peft lora"; left out with a line where peft is not installed). Work: 16 sequences of 256 tokens a step, next-token
loss, fp32, as in ``train.py``.

Checked before anything is timed: the losses of the first three steps of both with adapters are equal within 2e-4.
Steps alternate in one process, a figure is the best of all rounds. Peak memory: each contender once in a process of its
own, less what the process had before it built its model.

--serve: the native engine instead, 64 requests of 64 prompt tokens and 64 new ones, of which none has an adapter
("base"), all have one ("1 adapter"), or 4 each have one of 16 ("16 adapters"). Checked before: the tokens of the mixed
requests are those of each adapter alone. Alternating rounds, the best counts.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import importlib.util
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import psutil
import torch
from driver import benchmark_parser, write_rows
from machine import config_of, peak_allocated, random_model, wait
from work import same_work

from tilth.config.schema import LoraConfig, OptimizerConfig
from tilth.core.batch import Jagged
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.models.config import DecoderConfig
from tilth.models.converters import LowRank, converted
from tilth.plan.lora import adapter_shapes, is_adapter
from tilth.training.engine import TrainEngine, negative_log_likelihood

LR, CLIP, CHECKED, TOLERANCE = 1e-3, 1.0, 3, 2e-4
Step = Callable[[int], tuple[float, int]]
"""Train on batch i, or generate: a number to compare, and the tokens of it."""
ADAPTERS = 16
CONTENDERS = ("tilth full", "tilth lora", "peft lora")


def batches(vocabulary: int, rows: int) -> list[np.ndarray]:
    """ids, int64 [rows, 256] each."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, (rows, 256)) for _ in range(CHECKED)]


def tilth(config: DecoderConfig, lora: LoraConfig | None, work: list[np.ndarray], device: str) -> tuple[Step, int]:
    """Our engine; and the elements that it learns."""
    model = random_model(config, torch.float32, device)
    if lora is not None:
        with torch.device(device):
            model = converted(model, [LowRank(lora)])
        for name, p in model.named_parameters():
            if is_adapter(name):
                model.init_parameter_(name, p.data, 0)
    section = OptimizerConfig(lr=LR, betas=(0.9, 0.95), clip_norm=CLIP)
    engine = TrainEngine(model, section, total_steps=10**6, micro_tokens=16_384)

    def step(i: int) -> tuple[float, int]:
        rows = work[i % len(work)]
        mask = np.tile(np.r_[0, np.ones(rows.shape[1] - 1)], len(rows)).astype(np.uint8)
        loss = negative_log_likelihood(float(mask.sum()))
        found = engine.update(Jagged.of(list(rows)), mask, {}, loss, entropy=False)
        return found.loss, found.tokens

    return step, sum(p.numel() for p in engine.optimizers.parameters.values())


def peft(config: DecoderConfig, lora: LoraConfig, work: list[np.ndarray], device: str) -> tuple[Step, int]:
    """PEFT with our initial weights and adapters; and the elements that it learns."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    ours = random_model(config, torch.float32, "cpu")
    base = Qwen3ForCausalLM(Qwen3Config(**config.to_hf()))
    base.load_state_dict(dict(ours.named_parameters()), strict=False)
    base.tie_weights()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, PeftConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules=targets))
    ours = converted(ours, [LowRank(lora)])
    own, first = dict(model.named_parameters()), [n for n, _ in ours.named_parameters() if n.endswith(".lora.A")]
    for name in first:
        ours.init_parameter_(name, ours.get_parameter(name).data, 0)
        there = f"base_model.model.{name.removesuffix('.lora.A')}.lora_A.default.weight"
        own[there].data.copy_(ours.get_parameter(name).data)
    del ours
    model.to(device)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(i: int) -> tuple[float, int]:
        ids = torch.from_numpy(work[i % len(work)]).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), ids.numel()

    return step, sum(p.numel() for p in learned)


def contender(name: str, options: Any) -> tuple[Step, int]:
    """By its name in the table: a step, and the elements that are learned."""
    config, lora = config_of(options.model), LoraConfig(rank=options.rank)
    work = batches(config.vocab_size, 4 if options.quick else 16)
    if name == "peft lora":
        return peft(config, lora, work, options.device)
    return tilth(config, lora if name == "tilth lora" else None, work, options.device)


def memory_of(name: str, options: Any) -> int:
    """Peak bytes of a process of its own that builds the contender and runs three steps."""
    command = [sys.executable, __file__, "--memory-of", name, "--model", options.model, "--rank", str(options.rank)]
    command += ["--device", options.device, *(["--quick"] if options.quick else [])]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure_memory(name: str, options: Any) -> int:
    """What ``memory_of`` starts."""
    if name == "peft lora":
        import peft
        import transformers.models.qwen3  # noqa: F401  # imported before the bytes are taken

        assert peft
    before = psutil.Process().memory_info().rss
    step, _ = contender(name, options)
    for i in range(3):
        step(i)
    allocated = peak_allocated(options.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before if allocated is None else allocated


def timed(step: Step, i: int, device: str) -> tuple[float, float, int]:
    """Wall seconds, processor seconds and tokens of one step."""
    wait(device)
    wall, cpu = time.perf_counter(), time.process_time()
    _, tokens = step(i)
    wait(device)
    return time.perf_counter() - wall, time.process_time() - cpu, tokens


def done(times: dict[str, list[tuple[float, float, int]]]) -> int:
    """Tokens of a step, the same for all contenders."""
    amounts = {name: [tokens for _, _, tokens in steps] for name, steps in times.items()}
    same_work({name: {"steps": len(each), "tokens": sum(each)} for name, each in amounts.items()})
    return next(iter(amounts.values()))[0]


def completed(engine: Engine, asked: list[Request], _: int) -> tuple[float, int]:
    """Generate all; the number of completions, and their tokens."""
    found = engine.generate(asked)
    return float(len(found)), sum(t.completion_length for t in found)


def serving(options: Any) -> list[dict[str, Any]]:
    """Rows of the engine with requests of no, one and many adapters."""
    config, lora, rows = config_of(options.model), LoraConfig(rank=options.rank), 16 if options.quick else 64
    engine = Engine(config, EngineOptions(max_rows=64, max_length=256, device=options.device))
    engine.update_weights(random_model(config, torch.float32, options.device).named_parameters(), version=1)
    for i in range(ADAPTERS):
        generator = torch.Generator().manual_seed(i)
        shapes = adapter_shapes(config, lora).items()
        engine.load_adapter(f"a{i}", lora, {n: 0.02 * torch.randn(size, generator=generator) for n, size in shapes})
    params = SamplingParams(max_tokens=8 if options.quick else 64)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (rows, 64))
    cases = {"base": [""], "1 adapter": ["a0"], f"{ADAPTERS} adapters": [f"a{i}" for i in range(ADAPTERS)]}

    def requests(names: list[str]) -> list[Request]:
        return [Request(i, prompt, params, adapter=names[i % len(names)]) for i, prompt in enumerate(prompts)]

    mixed = {t.id: t for t in engine.generate(requests(cases[f"{ADAPTERS} adapters"]))}
    for name in ("a0", "a1"):
        alone = engine.generate([r for r in requests(cases[f"{ADAPTERS} adapters"]) if r.adapter == name])
        wrong = sum(not np.array_equal(t.tokens, mixed[t.id].tokens) for t in alone)
        assert wrong <= len(alone) // 8, f"{wrong} of {len(alone)} requests of {name} have other tokens alone"
    times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in cases}
    for _ in range(2 if options.quick else options.rounds):
        for name, adapters in cases.items():
            engine.reset_prefix_cache()
            asked = requests(adapters)
            times[name].append(timed(partial(completed, engine, asked), 0, options.device))
    found, new = [], done(times)
    for name in cases:
        wall, cpu, _ = (min(column) for column in zip(*times[name]))
        row = {"contender": f"serve {name}", "model": options.model, "rank": options.rank, "seconds": wall}
        found.append(row | {"cpu_seconds": cpu, "tokens_per_second": new / wall, "tokens_per_cpu_second": new / cpu})
        found[-1]["base_over_it"] = found[0]["cpu_seconds"] / cpu
        print(
            f"{row['contender']:18} {new / wall:,.0f} tokens/s  {new / cpu:,.0f} tokens per processor second "
            f"(x base {found[-1]['base_over_it']:.2f}); adapters hold {engine.adapter_bytes / 1e6:.1f} MB"
        )
    return found


def main() -> None:
    parser = benchmark_parser(__doc__, "4 sequences a step, two rounds")
    parser.add_argument("--model", default="6M", help="shape of shapes.py")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--serve", action="store_true", help="serve adapters instead of training them")
    parser.add_argument("--memory-of", choices=CONTENDERS, help="only print the peak bytes of this contender")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(measure_memory(options.memory_of, options))
        return
    if options.serve:
        write_rows(options.json, serving(options))
        return
    names = [name for name in CONTENDERS if name != "peft lora" or importlib.util.find_spec("peft")]
    if "peft lora" not in names:
        print("peft is not installed here, so it is left out")
    made = {name: contender(name, options) for name in names}
    first = {name: [step(i)[0] for i in range(CHECKED)] for name, (step, _) in made.items()}
    if "peft lora" in made:
        apart = max(abs(a - b) for a, b in zip(first["tilth lora"], first["peft lora"]))
        assert apart < TOLERANCE, f"losses differ: {first}"
    times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in names}
    for i in range(2 if options.quick else options.rounds):
        for name, (step, _) in made.items():
            times[name].append(timed(step, i, options.device))
    rows, tokens = list[dict[str, Any]](), done(times)
    for name in names:
        wall, cpu, _ = (min(column) for column in zip(*times[name]))
        rows.append(
            {
                "contender": name,
                "model": options.model,
                "rank": 0 if name == "tilth full" else options.rank,
                "learned_parameters": made[name][1],
                "step_seconds": wall,
                "step_cpu_seconds": cpu,
                "tokens_per_second": tokens / wall,
                "peak_memory_bytes": memory_of(name, options),
                "first_losses": first[name],
            }
        )
    full = rows[0]
    for row in rows:
        row["step_over_full"] = row["step_seconds"] / full["step_seconds"]
        row["memory_over_full"] = row["peak_memory_bytes"] / full["peak_memory_bytes"]
        print(
            f"{row['contender']:12} {row['learned_parameters']:>12,} learned  {row['step_seconds']:.3f} s "
            f"(cpu {row['step_cpu_seconds']:.3f} s, x full {row['step_over_full']:.2f})  "
            f"{row['peak_memory_bytes'] / 1e6:,.0f} MB (x full {row['memory_over_full']:.2f})"
        )
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
