"""Training tokens/s and MFU: ``TrainEngine`` beside a plain PyTorch loop and the Hugging Face ``Trainer``.

    python benchmarks/train.py [--quick] [--json PATH] [--threads N] [--models 6M,50M] [--dtypes fp32,bf16]
                               [--cases equal,heavy] [--contenders NAMES] [--rounds N] [--device cpu] [--apart]

Contenders: ``TrainEngine`` with its log-probs, checks and spans, eager and compiled; the same decoder written plainly
(``plain_model.py``: batch [B, T], causal SDPA, cross-entropy over all logits, fused AdamW, clipping), eager and
compiled; the ``Trainer`` of ``transformers`` on ``Qwen3ForCausalLM`` (needs ``accelerate``; left out without it: see
``rl_vs_trl.py`` for an environment with both). Where lengths differ, the plain loop and the Trainer pad each batch to
its longest sequence, as their users do without more work.

Work: one step learns from one batch, next-token loss averaged over its tokens. Equal: 16 sequences of 256 tokens.
Heavy: 64 sequences of the heavy-tailed ``lengths.json`` plus a prompt of 16 tokens. AdamW, lr 1e-3, betas 0.9 and
0.95, no weight decay, gradients clipped to norm 1. bf16: fp32 parameters, autocast for the Trainer and the plain loop.

Checked before anything is timed: from the same weights and data the losses of the first three steps are equal, within
2e-4 (fp32) or 3e-2 (bf16) of the Trainer's or, without it, the plain loop's.

Only real tokens count. MFU: the FLOPs that the mathematics of these tokens asks for (``plan/shape.py``) over the
measured rate of a square matmul in the same dtype (``training/engine.py``). Runs alternate, a figure is the best step
of all rounds; the first step (with compilation) is listed apart. Memory: each contender once in a process of its own.

On a GPU (``--device cuda --models 0.5B,1.5B --dtypes bf16 --apart``) batches are twice as large. ``--apart``: each
contender is timed in a process of its own, since their weights and states would not fit beside one another. One that
fails there, for want of memory say, is a row with its error.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from driver import benchmark_parser, write_rows
from machine import DTYPES, config_of, peak_allocated, random_model, wait
from plain_model import PlainModel
from torch import Tensor
from work import same_work

from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.models.config import DecoderConfig
from tilth.plan.shape import sequence_flops
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.rate import measured_flops

HERE = Path(__file__).parent
TOLERANCE = {"fp32": 2e-4, "bf16": 3e-2}
LR, BETAS, CLIP = 1e-3, (0.9, 0.95), 1.0
CHECKED = 3
Step = Callable[[int], tuple[float, int]]
"""Train on batch i; the loss before the step, and the tokens that were trained on."""


@dataclass(frozen=True)
class Work:
    """Batches of sequences, each int64 [length]."""

    name: str
    batches: list[list[np.ndarray]]

    @property
    def lengths(self) -> np.ndarray:
        """Of all sequences of the first batch (all batches are alike): int64 [n]."""
        return np.array([len(row) for row in self.batches[0]])

    @property
    def tokens(self) -> int:
        """Real tokens of a batch."""
        return int(self.lengths.sum())


@dataclass(frozen=True)
class Setting:
    """What is the same for all contenders."""

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device

    def autocast(self) -> Any:
        """bf16 for those who keep fp32 modules."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.dtype == torch.bfloat16 else nullcontext()

    def weights(self) -> dict[str, Tensor]:
        """Initial parameters by their Hugging Face names, fp32."""
        model = random_model(self.config, torch.float32, self.device)
        return {name: p.detach() for name, p in model.named_parameters()}


def works(vocabulary: int, device: str, quick: bool = False) -> list[Work]:
    """Equal and heavy-tailed lengths; larger batches on a GPU, an eighth where it must be quick."""
    rng, scale, part = np.random.default_rng(0), 1 if device == "cpu" else 2, 8 if quick else 1
    tail = json.loads((HERE / "lengths.json").read_text())["lengths"]

    def case(name: str, lengths: list[int]) -> Work:
        return Work(name, [[rng.integers(0, vocabulary, n) for n in lengths] for _ in range(CHECKED)])

    heavy = [16 + n for n in (tail * scale)[: 64 * scale // part]]
    return [case("equal", [256] * (16 * scale // part)), case("heavy", heavy)]


def padded(rows: list[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids and labels, int64 [B, T]; labels are -100 on padding."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = labels[i, : len(row)] = torch.from_numpy(row)
    return ids.to(device), labels.to(device)


def tilth_engine(setting: Setting, work: Work, compile: bool) -> Step:
    """Our engine on packed tokens."""
    model = random_model(setting.config, setting.dtype, setting.device)
    section = OptimizerConfig(lr=LR, betas=BETAS, clip_norm=CLIP)
    engine = TrainEngine(model, section, total_steps=10**6, micro_tokens=16_384, compile=compile)

    def step(i: int) -> tuple[float, int]:
        rows = work.batches[i % len(work.batches)]
        mask = np.concatenate([np.r_[0, np.ones(len(r) - 1)] for r in rows]).astype(np.uint8)
        loss = negative_log_likelihood(float(mask.sum()))
        found = engine.update(Jagged.of(rows), mask, {}, loss, entropy=False)
        return found.loss, found.tokens

    return step


def plain_loop(setting: Setting, work: Work, compile: bool) -> Step:
    """What one writes by hand."""
    with setting.device:
        model = PlainModel(setting.config)
    model.load_state_dict(setting.weights(), strict=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    forward = torch.compile(model, dynamic=not _equal(work)) if compile else model

    def step(i: int) -> tuple[float, int]:
        ids, labels = padded(work.batches[i % len(work.batches)], setting.device)
        with setting.autocast():
            logits = forward(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach()), int((labels != -100).sum())

    return step


def _equal(work: Work) -> bool:
    return len(set(work.lengths.tolist())) == 1


def hugging_face(setting: Setting, work: Work, folder: str) -> Step:
    """The Trainer's own training step, driven batch by batch so that runs can alternate."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

    with setting.device:
        model = Qwen3ForCausalLM(Qwen3Config(**setting.config.to_hf()))
    model.load_state_dict(setting.weights(), strict=False)
    model.tie_weights()
    args = TrainingArguments(
        folder, use_cpu=setting.device.type == "cpu", bf16=setting.dtype == torch.bfloat16, learning_rate=LR,
        adam_beta1=BETAS[0], adam_beta2=BETAS[1], weight_decay=0.0, max_grad_norm=CLIP, lr_scheduler_type="constant",
        optim="adamw_torch_fused", report_to="none", max_steps=10**6, per_device_train_batch_size=len(work.batches[0]),
        disable_tqdm=True, save_strategy="no", dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model=model, args=args)
    trainer.create_optimizer_and_scheduler(10**6)
    network, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    network.train()
    trainer.current_gradient_accumulation_steps = 1

    def step(i: int) -> tuple[float, int]:
        ids, labels = padded(work.batches[i % len(work.batches)], setting.device)
        inputs = {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}
        loss = trainer.training_step(network, inputs)
        trainer.accelerator.clip_grad_norm_(network.parameters(), CLIP)
        optimizer.step()
        network.zero_grad()
        return float(loss), int((labels != -100).sum())

    return step


def contender(name: str, setting: Setting, work: Work, folder: str) -> Step:
    """By its name in the table."""
    if name == "hugging face":
        return hugging_face(setting, work, folder)
    make = tilth_engine if name.startswith("tilth") else plain_loop
    return make(setting, work, "compiled" in name)


def names(quick: bool, asked: str) -> list[str]:
    """Who can run here, of those that were asked for (comma-separated, empty: all)."""
    found = ["tilth", "plain"] + ([] if quick else ["tilth compiled", "plain compiled"])
    found += ["hugging face"] if importlib.util.find_spec("accelerate") else []
    return [name for name in found if not asked or name == "plain" or name in asked.split(",")]


def check(dtype: str, losses: dict[str, list[float]]) -> None:
    """Stop unless the first losses of all agree."""
    name = "hugging face" if "hugging face" in losses else "plain"
    for other, found in losses.items():
        gap = max(abs(a - b) for a, b in zip(found, losses.get(name, found)))
        assert gap <= TOLERANCE[dtype], f"{other} and {name} do not learn alike in {dtype}: {found} {losses[name]}"


@dataclass
class Timing:
    """What was seen of one contender: seconds of its first step, losses of the first steps, (seconds, processor time)
    of each later one, and the tokens of all; or why it failed."""

    first: float = 0.0
    losses: list[float] = field(default_factory=list)
    later: list[tuple[float, float]] = field(default_factory=list)
    tokens: int = 0
    peak_bytes: int | None = None
    error: str | None = None

    def begin(self, step: Step, device: torch.device) -> None:
        """The first steps, whose losses are compared."""
        began = time.perf_counter()
        done = [step(0)]
        wait(device)
        self.first = time.perf_counter() - began
        done += [step(i) for i in range(1, CHECKED)]
        wait(device)
        self.losses, self.tokens = [loss for loss, _ in done], sum(tokens for _, tokens in done)

    def add(self, step: Step, i: int, device: torch.device) -> None:
        """One more step."""
        began, cpu = time.perf_counter(), time.process_time()
        _, tokens = step(i)
        wait(device)
        self.tokens += tokens
        self.later.append((time.perf_counter() - began, time.process_time() - cpu))

    @property
    def work(self) -> dict[str, float]:
        """Steps and tokens of all of them."""
        return {"steps": len(self.losses) + len(self.later), "tokens": self.tokens}

    @property
    def best(self) -> tuple[float, float]:
        """Least seconds and least processor time."""
        seconds, cpu = zip(*self.later)
        return min(seconds), min(cpu)


def together(setting: Setting, dtype: str, work: Work, who: list[str], rounds: int) -> dict[str, Timing]:
    """All contenders in this process, in turns."""
    found = {name: Timing() for name in who}
    with tempfile.TemporaryDirectory() as folder:
        steps = {name: contender(name, setting, work, folder) for name in who}
        for name, step in steps.items():
            found[name].begin(step, setting.device)
        check(dtype, {name: timing.losses for name, timing in found.items()})
        for i in range(rounds):
            for name, step in steps.items():
                found[name].add(step, i, setting.device)
    return found


def apart(label: dict[str, Any], work: Work, who: list[str], rounds: int) -> dict[str, Timing]:
    """Each contender in a process of its own, one after another."""
    found = {name: start(label, work.name, name, rounds) for name in who}
    check(label["dtype"], {name: timing.losses for name, timing in found.items() if timing.error is None})
    return found


def measure(
    setting: Setting, label: dict[str, Any], work: Work, found: dict[str, Timing], peak: float
) -> list[dict[str, Any]]:
    """Rows of one case. peak: the device's rate at matmuls, in FLOP/s."""
    flops, rows = sequence_flops(setting.config, work.lengths).both, []
    well = {name: timing.best[0] for name, timing in found.items() if timing.error is None}
    same_work({name: found[name].work for name in well})
    for name, timing in found.items():
        row = {**label, "case": work.name, "contender": name, "tokens": work.tokens, "error": timing.error}
        rows.append(row)
        if name not in well:
            continue
        best, cpu = timing.best
        row |= {
            "seconds": round(best, 4), "cpu_seconds": round(cpu, 4), "tokens_per_second": round(work.tokens / best),
            "mfu": round(flops / best / peak, 3), "peak_gflops": round(peak / 1e9),
            "first_step_seconds": round(timing.first, 2), "peak_bytes": timing.peak_bytes,
            "over_plain": round(well["plain"] / best, 2) if "plain" in well else None,
            "over_trainer": round(well["hugging face"] / best, 2) if "hugging face" in well else None,
            "losses": [round(x, 5) for x in timing.losses],
        }  # fmt: skip
    return rows


def start(label: dict[str, Any], case: str, name: str, rounds: int) -> Timing:
    """This contender alone, in a process of its own, with its greatest memory."""
    one = json.dumps({**label, "case": case, "contender": name, "rounds": rounds})
    ended = subprocess.run([sys.executable, __file__, "--alone", one], capture_output=True, text=True)
    if ended.returncode:
        return Timing(error=(ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1])
    return Timing(**json.loads(ended.stdout.splitlines()[-1]))


def alone(one: dict[str, Any]) -> None:
    """The process that ``start`` starts."""
    from tilth.runs.metrics import resident

    torch.set_num_threads(one["threads"])
    setting, found = make_setting(one["model"], one["dtype"], one["device"]), Timing()
    every = works(setting.config.vocab_size, one["device"], one["quick"])
    work = next(w for w in every if w.name == one["case"])
    with tempfile.TemporaryDirectory() as folder:
        step = contender(one["contender"], setting, work, folder)
        found.begin(step, setting.device)
        for i in range(one["rounds"]):
            found.add(step, i, setting.device)
    found.peak_bytes = peak_allocated(setting.device) or resident()[1]
    print(json.dumps(asdict(found)))


def make_setting(model: str, dtype: str, device: str) -> Setting:
    """From the names of a row."""
    return Setting(config_of(model), DTYPES[dtype], torch.device(device))


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    if row["error"]:
        print(f"{row['model']:5} {row['dtype']:5} {row['case']:6} {row['contender']:15} failed: {row['error']}")
        return
    over = f"{row['over_plain']:.2f}" if row["over_plain"] else "-"
    trainer = f"{row['over_trainer']:.2f}" if row["over_trainer"] else "-"
    memory = f"{row['peak_bytes'] / 1e6:,.0f}" if row.get("peak_bytes") else "-"
    print(
        f"{row['model']:5} {row['dtype']:5} {row['case']:6} {row['contender']:15} {row['tokens_per_second']:>9,} "
        f"{100 * row['mfu']:6.1f} {over:>8} {trainer:>9} {row['cpu_seconds']:7.3f} "
        f"{row['first_step_seconds']:8.1f} {memory:>8}",
        flush=True,
    )


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = benchmark_parser(__doc__, "6M only, small batches, nothing compiled, no memory")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    parser.add_argument("--models", default="6M,50M")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--cases", default="equal,heavy")
    parser.add_argument("--contenders", default="", help="default: all that can run here; plain always does")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--apart", action="store_true", help="each contender in a process of its own")
    parser.add_argument("--alone", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = options()
    if args.alone:
        return alone(json.loads(args.alone))
    if args.threads:
        torch.set_num_threads(args.threads)
    if not importlib.util.find_spec("accelerate"):
        print("accelerate is not installed here, so the Hugging Face Trainer is left out")
    print("model dtype case   contender        tokens/s  MFU %  x plain x trainer   cpu s  first s  peak MB")
    rows, who, rounds = list[dict[str, Any]](), names(args.quick, args.contenders), 1 if args.quick else args.rounds
    for model in ["6M"] if args.quick else args.models.split(","):
        for dtype in args.dtypes.split(","):
            setting = make_setting(model, dtype, args.device)
            label = {"model": model, "dtype": dtype, "threads": torch.get_num_threads(), "device": args.device}
            label["quick"] = args.quick
            peak = measured_flops(setting.device, setting.dtype)
            asked = works(setting.config.vocab_size, args.device, args.quick)
            for work in (w for w in asked if w.name in args.cases.split(",")):
                if args.apart:
                    found = apart(label, work, who, rounds)
                else:
                    found = together(setting, dtype, work, who, rounds)
                    for name, timing in found.items() if not args.quick else ():
                        timing.peak_bytes = start(label, work.name, name, 0).peak_bytes
                for row in measure(setting, label, work, found, peak):
                    rows.append(row)
                    show(row)
                write_rows(args.json, rows)
    sys.exit(any(row["error"] for row in rows if row["contender"].startswith("tilth")))


if __name__ == "__main__":
    main()
