"""Rollouts with suffix drafts beside plain ones: passes for each token, and tokens per second of processor time.

    python benchmarks/speculate.py [--quick] [--json PATH]

Case "grpo": a small model learns to sort lists (supervised), then a GRPO run of two epochs over the same prompts gives
the policies of its first and its second epoch. An engine generates with the first one, then takes the second one's
weights and generates for the same prompts anew, with other random numbers: this second epoch is timed, plain and with
drafts (``rollout.speculate = suffix`` and ``tree``; "apart": suffix with ``rollout.draft.apart``), by rows at once and
in fp32 and bf16. Case "model": the same by chains of a drafting model (``rollout.speculate = model``), here and apart,
which learned to sort as the first one did and is 32 wide with one layer. Case "again": a random model
of 13M parameters generates the same twice, so that every draft is right: a bound. Case "random": its first and only
epoch at temperature 1, where nothing repeats: what drafts cost if they do not pay. Case "ahead": the first policy gives
four answers to each prompt, one prompt after the other, with drafts, without and with ``rollout.run_ahead``.

Checked first: in parity mode the completions of the second epoch, their log-probs included, are those of plain decoding
bit for bit (10,240 of them; fewer with --quick). Contenders of a ratio generate equal numbers of tokens within 2 %:
outside parity mode passes of other shapes round otherwise, so a few completions part. One thread; contenders alternate;
seconds are of the engine's process on the processor, beside them those of the clock and of a drafter's own process, the
least of two rounds.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from driver import benchmark_parser, write_rows
from machine import DTYPES, config_of, random_model
from torch import Tensor
from work import same_work

import tilth
from tilth.config.schema import DraftConfig
from tilth.core.trajectory import Trajectory
from tilth.engines.apart import ApartDrafter
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.launch.workers import model_drafter
from tilth.models.config import DecoderConfig
from tilth.runs.models import load_model

CONTEXT, LENGTH, GROUP = 64, 7, 8
CONTENDERS = ("plain", "suffix", "tree", "apart")
MODELS = ("plain", "model", "model_apart")
Weights = dict[str, Tensor]
Row = dict[str, Any]
Play = Callable[[], list[Trajectory]]


def close(prompt: str, completion: str, info: dict[str, Any]) -> float:
    """Share of the numbers that are in their place."""
    right = info["answer"].split(",")
    return sum(a == b for a, b in zip(completion.split(","), right)) / len(right)


def records(count: int) -> list[dict[str, str]]:
    """Lists to sort, each with its answer."""
    lists = np.random.default_rng(1).integers(0, 100, (count, LENGTH)).tolist()
    return [{"prompt": ",".join(map(str, n)) + "=", "answer": ",".join(map(str, sorted(n)))} for n in lists]


def policies(folder: Path, quick: bool) -> tuple[DecoderConfig, list[Weights], list[list[int]], int, str]:
    """Train, and return the policies after the first and the second epoch, the prompts, the end token, and the folder
    of the drafting model."""
    prompts, steps = (8, 2) if quick else (16, 4)
    more: dict[str, Any] = {"live": False, "train": {"threads": 1}, "optimizer": {"name": "muon", "lr": 3e-4}}
    shape = {"family": "qwen3", "hidden": 96, "layers": 3, "heads": 4, "context": CONTEXT}
    base, small = (
        tilth.train(
            "sorting", flow="sft", name=name, model={**shape, **other}, keys={"data.digits": 2, "data.length": LENGTH},
            supervised={"steps": 20 if quick else 250, "batch": 64, "lr": 2e-3, "check_every": 1000},
            run={"dir": str(folder), "eval_prompts": 8}, rollout={"max_tokens": 24}, **more,
        )
        for name, other in (("sft", {}), ("small", {"hidden": 32, "layers": 1}))
    )  # fmt: skip
    given = records(prompts * steps)
    found = tilth.train(
        given, close, flow="grpo", name="grpo", model={"path": str(base.directory), "context": CONTEXT},
        rollout={"prompts": prompts, "group": GROUP, "max_tokens": 24}, algorithm={"steps": 2 * steps},
        run={"dir": str(folder), "eval_every": 1000, "eval_prompts": 8, "save_every": steps, "keep_every": steps},
        keys={"data.holdout": 0.0}, **more,
    )  # fmt: skip
    models = [load_model(f"{found.directory}@{step}") for step in (steps, 2 * steps)]
    tokenizer = models[0].tokenizer
    assert tokenizer is not None
    texts = [tokenizer.encode(record["prompt"]) for record in given]
    weights = [{name: model.tensors[name].float() for name in model.tensors} for model in models]
    return models[0].config, weights, texts, tokenizer.eos_id, str(small.directory)


def requests(prompts: Sequence[Sequence[int]], epoch: int, params: SamplingParams) -> list[Request]:
    """Samples of an epoch, in groups."""
    first = epoch * len(prompts) * GROUP
    return [Request(first + i, prompts[i // GROUP], params) for i in range(len(prompts) * GROUP)]


def engine(
    config: DecoderConfig, rows: int, dtype: torch.dtype, how: str, parity: bool = False, path: str = ""
) -> Engine:
    """An engine, plain or with drafts. path: of a drafting model."""
    drafts: dict[str, Any] = {"draft": DraftConfig(apart="apart" in how), "branches": how == "tree"}
    if path:
        own: dict[str, Any] = {"dtype": dtype, "tokens": DraftConfig().tokens, "layers": config.num_layers}
        drafts["drafter"] = partial(model_drafter, path, device="cpu", **own)
    drafts = {} if how == "plain" else drafts
    return Engine(config, EngineOptions(max_rows=rows, dtype=dtype, parity=parity, max_length=CONTEXT * 4, **drafts))


def drafter_seconds(one: Engine) -> float:
    """Processor seconds of the process of a drafter apart, once it has caught up; 0 without one."""
    drafter = None if one._speculation is None else one._speculation._drafter
    if not isinstance(drafter, ApartDrafter):
        return 0.0
    while not drafter.caught_up:
        time.sleep(0.05)
    times = psutil.Process(drafter.pid).cpu_times()
    return times.user + times.system


def timed(made: Callable[[str], tuple[Engine, Play]], contenders: Sequence[str], rounds: int) -> Row:
    """Figures of contenders, and ratios to the first one, for engines that stand before what is timed."""
    best, clock, beside = (dict.fromkeys(contenders, np.inf) for _ in range(3))
    said: dict[str, list[Trajectory]] = {}
    stats = {}
    for _ in range(rounds):
        for how in contenders:
            one, play = made(how)
            before = drafter_seconds(one)
            one.stats(reset=True)
            begin, began = time.process_time(), time.perf_counter()
            said[how] = play()
            best[how] = min(best[how], time.process_time() - begin)
            clock[how] = min(clock[how], time.perf_counter() - began)
            stats[how] = one.stats()
            beside[how] = min(beside[how], drafter_seconds(one) - before)
    tokens = {how: sum(t.completion_length for t in found) for how, found in said.items()}
    same_work({how: {"generated_tokens": count} for how, count in tokens.items()}, within=0.02)
    first, *others = contenders
    row: Row = {"tokens": tokens[first], f"{first}_tokens_per_second": tokens[first] / best[first]}
    row[f"{first}_clock_tokens_per_second"] = tokens[first] / clock[first]
    for how in others:
        equal = np.mean([np.array_equal(a.tokens, b.tokens) for a, b in zip(said[first], said[how])])
        row[f"{how}_tokens_per_second"] = tokens[how] / best[how]
        row[f"{how}_over_{first}"] = tokens[how] / best[how] / row[f"{first}_tokens_per_second"]
        row[f"{how}_clock_over_{first}"] = tokens[how] / clock[how] / row[f"{first}_clock_tokens_per_second"]
        row[f"{how}_equal_completions_share"] = float(equal)
    for how in contenders:
        row[f"{how}_passes_per_token"] = stats[how].passes_per_token
        row[f"{how}_acceptance_share"] = stats[how].acceptance
        row[f"{how}_drafted_tokens"] = stats[how].drafted_tokens
        row[f"{how}_ahead_tokens"] = stats[how].ahead_tokens
        row[f"{how}_undrafted_passes"] = stats[how].undrafted_passes
        row[f"{how}_drafter_seconds"] = beside[how]
    return row


def check_parity(
    config: DecoderConfig,
    weights: Sequence[Weights],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    least: int,
) -> Row:
    """Compare bits of later epochs, ``least`` completions at least."""
    every = {how: engine(config, 64, torch.float32, how, parity=True) for how in CONTENDERS}
    for one in every.values():
        drafter_seconds(one)  # waits until it is there
    count = epoch = 0
    while count < least:
        for one in every.values():
            one.update_weights(weights[min(epoch, 1)], version=epoch)
        plain, *drafted = (one.generate(requests(prompts, epoch, params)) for one in every.values())
        for how, found in zip(CONTENDERS[1:], drafted):
            for a, b in zip(plain, found):
                if not (np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)):
                    raise AssertionError(f"completion {a.id} of epoch {epoch} differs with {how} drafts")
        count, epoch = count + len(plain), epoch + 1
    row: Row = {"case": "parity", "equal_completions": count}
    for how in CONTENDERS[1:]:
        row[f"{how}_accepted_tokens"] = every[how].stats().accepted_tokens
        row[f"{how}_passes_per_token"] = every[how].stats().passes_per_token
    return row


def grpo(folder: Path, quick: bool) -> list[Row]:
    """Rows of the case "grpo", after the check of parity."""
    config, weights, prompts, end, small = policies(folder, quick)
    params = SamplingParams(max_tokens=24, stop_tokens=(end,))
    rows = [check_parity(config, weights, prompts, params, 256 if quick else 10_240)]
    print(rows[0], flush=True)
    for name, dtype in DTYPES.items():
        for width, path in product((8,) if quick else (8, 64), ("", small)):

            def made(how: str, width: int = width, dtype: torch.dtype = dtype, path: str = path) -> tuple[Engine, Play]:
                one = engine(config, width, dtype, how, path=path)
                if how != "plain":  # a plain engine keeps nothing of an epoch
                    one.update_weights(weights[0], version=0)
                    one.generate(requests(prompts, 0, params))
                one.update_weights(weights[1], version=1)
                return one, lambda: one.generate(requests(prompts, 1, params))

            found = timed(made, MODELS if path else CONTENDERS, 1 if quick else 2)
            rows.append({"case": "model" if path else "grpo", "dtype": name, "rows": width, **found})
            print(rows[-1], flush=True)
    rows.append({"case": "ahead", "dtype": "fp32", "rows": 8, **run_ahead(config, weights[0], prompts, params, quick)})
    print(rows[-1], flush=True)
    return rows


def run_ahead(
    config: DecoderConfig, weights: Weights, prompts: Sequence[Sequence[int]], params: SamplingParams, quick: bool
) -> Row:
    """Figures of a first epoch in steps of half a group, without and with the answer to the prompt of the next."""
    greedy = replace(params, temperature=0.0)

    def made(how: str) -> tuple[Engine, Play]:
        one = engine(config, GROUP, torch.float32, "suffix")
        one.update_weights(weights, version=0)

        def play() -> list[Trajectory]:
            found = list[Trajectory]()
            for step, prompt in enumerate(prompts):
                then = prompts[step + 1 : step + 2] if how == "ahead" else []
                one.run_ahead([Request(0, prompt, greedy) for prompt in then])
                found += one.generate(requests([prompt], step, params)[: GROUP // 2])
            return found

        return one, play

    return timed(made, ("suffix", "ahead"), 1 if quick else 3)


def bounds(quick: bool) -> list[Row]:
    """Rows of the cases "again" and "random"."""
    config, rows = config_of("6M" if quick else "13M"), []
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (4, 16)).tolist()
    params = SamplingParams(max_tokens=24 if quick else 96)
    for name, dtype in DTYPES.items():
        weights = dict(random_model(config, dtype, "cpu").named_parameters())
        for case in ("again", "random"):

            def made(
                how: str, case: str = case, dtype: torch.dtype = dtype, weights: Any = weights
            ) -> tuple[Engine, Play]:
                one = engine(config, 8, dtype, how)
                one.update_weights(weights, version=0)
                if how != "plain" and case == "again":
                    one.generate(requests(prompts, 0, params))
                return one, lambda: one.generate(requests(prompts, 0, params))

            rows.append({"case": case, "dtype": name, "rows": 8, **timed(made, CONTENDERS, 1 if quick else 2)})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    options = benchmark_parser(__doc__, "two steps an epoch, few completions, one round").parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = grpo(Path(folder), options.quick)
    write_rows(options.json, rows)
    rows += bounds(options.quick)
    write_rows(options.json, rows)


if __name__ == "__main__":
    main()
