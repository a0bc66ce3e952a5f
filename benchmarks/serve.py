"""A server with 1, 8 and 64 clients beside ``transformers serve`` and CPU vLLM, and clients that vanish at random.

    python benchmarks/serve.py [--quick] [--json PATH] [--vllm PYTHON] [--only SERVER,...]

All serve one random model of family qwen3 in float32 from one directory; greedy completions are compared before
anything is timed (some servers leave out a cut character at the end), and each client asks for a stream, reads it to
its end and asks again. --vllm: Python of an environment with vLLM for CPUs. Then, for --seconds, 64 clients of the own
server leave within a stream, before its first token or never; what the processes hold before and afterwards is
compared, and completions with those of a client alone.
"""

import asyncio
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import psutil
from driver import benchmark_parser, write_rows
from work import same_work

from tilth.data.tokenizer import Tokenizer
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.hf import save_pretrained

CLIENTS = (1, 8, 64)
TOKENS = 32
WORDS = ["what", "is", "it", "that", "we", "say", "when", "they", "ask", "how", "many", "old", "ones", "are", "there"]


def make_model(folder: Path, quick: bool) -> None:
    """Write a random model whose predictions are far from uniform, and a tokenizer of words."""
    tokenizer = Tokenizer.train([" ".join(WORDS)] * 3, 400)
    size = (64, 128, 2, 4) if quick else (256, 768, 6, 8)
    config = DecoderConfig(tokenizer.vocab_size, *size, qk_norm=True, tie_embeddings=True, max_positions=512)
    model = Decoder(config)
    model.init_weights_(0)
    tensors = {name: p.detach() * (6.0 if p.ndim == 2 else 1.0) for name, p in model.named_parameters()}
    ends = {"eos_token_id": tokenizer.eos_id}  # without it transformers writes on behind the end token
    save_pretrained(folder, config, tensors, tokenizer=tokenizer, token_ids=ends)


def prompts() -> list[str]:
    chance = random.Random(0)
    return [" ".join(chance.choices(WORDS, k=chance.randrange(8, 40))) for _ in range(64)]


@contextmanager
def started(command: list[str], port: int, log: Path) -> Iterator[psutil.Process]:
    """A server that answers, ended at the end."""
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            late = time.monotonic() + 300
            while True:
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                        break
                except httpx.HTTPError:
                    if process.poll() is not None or time.monotonic() > late:
                        raise SystemExit(f"{command[:4]} does not answer: {log.read_text()[-2000:]}") from None
                    time.sleep(0.3)
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def commands(model: str, vllm: str, port: int, quick: bool = True) -> dict[str, list[str]]:
    found = {
        "tilth": [sys.executable, "-m", "tilth", "serve", model, "--port", str(port)],
        "tilth fast": [sys.executable, "-m", "tilth", "serve", model, "--port", str(port), "--fast"],
        "transformers": [
            str(Path(sys.executable).with_name("transformers")), "serve", model, "--port", str(port),
            "--host", "127.0.0.1", "--device", "cpu", "--dtype", "float32",
        ],
    }  # fmt: skip
    batched = [
        *found["transformers"],
        "--continuous-batching",
        "--cb-num-blocks",
        "512",
        "--cb-max-batch-tokens",
        "2048",
    ]
    if not quick:
        found["transformers batched"] = batched
    if vllm:
        found["vllm"] = [
            vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port),
            "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "64",
            "--gpu-memory-utilization", "0.3",  # of the memory of the machine, on a CPU too
        ]  # fmt: skip
    return found


async def one(client: openai.AsyncOpenAI, model: str, prompt: str) -> tuple[str, float, float, int]:
    """Return the text, seconds to the first token and to the end, and the number of tokens."""
    begin, first, text, tokens = time.perf_counter(), 0.0, "", 0
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=TOKENS, temperature=0.0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    async for part in stream:
        if part.choices and part.choices[0].text and not first:
            first = time.perf_counter() - begin
        text += part.choices[0].text if part.choices else ""
        tokens = part.usage.completion_tokens if part.usage else tokens
    return text, first, time.perf_counter() - begin, tokens


async def measured(address: str, model: str, clients: int, each: int) -> dict[str, float]:
    """Return tokens per second and seconds to the first token of so many clients."""
    asked = prompts()
    async with openai.AsyncOpenAI(base_url=address, api_key="none", timeout=600, max_retries=0) as client:

        async def run(number: int) -> list[tuple[str, float, float, int]]:
            return [await one(client, model, asked[(number + i * clients) % len(asked)]) for i in range(each)]

        begin = time.perf_counter()
        found = [row for rows in await asyncio.gather(*map(run, range(clients))) for row in rows]
        seconds = time.perf_counter() - begin
    firsts = np.array([row[1] for row in found])
    return {
        "generated_tokens": sum(row[3] for row in found),
        "tokens_per_second": sum(row[3] for row in found) / seconds,
        "first_median": float(np.median(firsts)),
        "first_p95": float(np.percentile(firsts, 95)),
    }


async def greedy(address: str, model: str) -> list[str]:
    async with openai.AsyncOpenAI(base_url=address, api_key="none", timeout=600, max_retries=0) as client:
        return [(await one(client, model, prompt))[0].rstrip("\N{REPLACEMENT CHARACTER}") for prompt in prompts()[:8]]


def side_by_side(model: str, args: Any, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    wanted: list[str] = []
    for name, command in commands(model, args.vllm, free_port(), args.quick).items():
        if args.only and name not in args.only.split(","):
            continue
        port = int(command[command.index("--port") + 1])
        address = f"http://127.0.0.1:{port}/v1"
        with started(command, port, folder / f"{name}.log") as process:
            said = asyncio.run(greedy(address, model))
            wanted = wanted or said
            same = sum(a == b for a, b in zip(said, wanted))
            for clients in CLIENTS[: 2 if args.quick else 3]:
                each = (2 if args.quick else 4) if clients < 64 else (1 if args.quick else 2)
                begin = busy(process)
                row = asyncio.run(measured(address, model, clients, each))
                about = {"server": name, "clients": clients, "equal": same, "compared": len(said)}
                rows.append({**about, **row, "processor_seconds": busy(process) - begin})
                alike = [r for r in rows if r["clients"] == clients]
                same_work({r["server"]: {"generated_tokens": r["generated_tokens"]} for r in alike})
                shown = "  ".join(f"{key} {value:.3f}" for key, value in row.items())
                print(f"{name:22s} {clients:3d} clients  {shown}  equal {same}/{len(said)}", flush=True)
                write_rows(args.json, rows)
    return rows


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def busy(process: psutil.Process) -> float:
    """Processor seconds of a server and its processes."""
    return sum(sum(one.cpu_times()[:2]) for one in family(process))


def held(process: psutil.Process, address: str) -> dict[str, float]:
    """What a server holds: memory, files, threads; and what its engine has in flight."""
    every = family(process)
    page = httpx.get(f"{address.removesuffix('/v1')}/metrics", timeout=60).text
    counts = dict(line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#"))
    return {
        "memory_mb": sum(one.memory_info().rss for one in every) / 1e6,
        "files": sum(one.num_fds() for one in every),
        "threads": sum(one.num_threads() for one in every),
        "in_flight": float(counts["tilth_requests_in_flight"]) + float(counts["tilth_engine_in_flight"]),
        "restarts": float(counts["tilth_worker_restarts_total"]),
        "finished": float(counts["tilth_engine_finished"]),
    }


async def vanishing(address: str, model: str, seconds: float, wanted: dict[str, str]) -> dict[str, int]:
    """64 clients until the time is over; counts of those that left, were served and were served wrongly."""
    until, counts = time.monotonic() + seconds, {"served": 0, "left": 0, "failed": 0, "wrong": 0}

    async def come_and_go(client: openai.AsyncOpenAI, number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < until:
            prompt = chance.choice(list(wanted))
            task = asyncio.create_task(one(client, model, prompt))
            await asyncio.wait({task}, timeout=None if chance.random() < 0.3 else chance.expovariate(2.0))
            if not task.done():
                task.cancel()
                counts["left"] += 1
                await asyncio.gather(task, return_exceptions=True)
                continue
            error = task.exception()
            counts["failed"] += error is not None
            counts["served"] += error is None
            counts["wrong"] += error is None and not task.result()[0].startswith(wanted[prompt])

    each_time = {"Connection": "close"}
    async with openai.AsyncOpenAI(
        base_url=address, api_key="none", timeout=600, max_retries=0, default_headers=each_time
    ) as client:
        await asyncio.gather(*(come_and_go(client, number) for number in range(64)))
    return counts


def vanish(model: str, args: Any, folder: Path) -> list[dict[str, Any]]:
    port = free_port()
    address = f"http://127.0.0.1:{port}/v1"
    with started(commands(model, "", port)["tilth"], port, folder / "vanish.log") as process:
        wanted = dict(zip(prompts(), asyncio.run(greedy(address, model))))
        asyncio.run(vanishing(address, model, min(10.0, args.seconds), wanted))  # caches and pools have their sizes
        time.sleep(2.0)
        before = held(process, address)
        counts = asyncio.run(vanishing(address, model, args.seconds, wanted))
        time.sleep(2.0)
        after = held(process, address)
    row = {"clients": 64, "seconds": args.seconds, **counts}
    row |= {f"{key}_before": value for key, value in before.items()} | {f"{key}_after": v for key, v in after.items()}
    print("  ".join(f"{key} {value:g}" for key, value in row.items()))
    return [row]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


def main() -> None:
    parser = benchmark_parser(__doc__, "a smaller model, 1 and 8 clients, those that vanish do so for 10 s")
    parser.add_argument("--vllm", default="", metavar="PYTHON", help="of an environment with vLLM for CPUs")
    parser.add_argument(
        "--only", default="", metavar="SERVER,...", help="of these only; vanishing: clients that vanish"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="how long clients vanish; default: 120, quick: 10")
    args = parser.parse_args()
    args.seconds = args.seconds or (10.0 if args.quick else 120.0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / "model", args.quick)
        rows = side_by_side(str(folder / "model"), args, folder)
        if not args.only or "vanishing" in args.only.split(","):
            rows += vanish(str(folder / "model"), args, folder)
        write_rows(args.json, rows)


if __name__ == "__main__":
    main()
