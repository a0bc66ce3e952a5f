"""Training service: clients at once, the price of the wire, and kills in every phase.

    python benchmarks/service.py [--quick] [--json PATH] [--steps N] [--clients 1,2,8] [--cookbook PYTHON]

Work: each client trains an adapter of rank 8 of one small base (hidden 64, 4 layers, vocabulary 96) with the tinker
SDK, on 8 sequences of 64 tokens a step (``forward_backward``, then ``optim_step``; both are sent before either is
awaited). "in process" is the same loop on ``TrainedModel``, without SDK, HTTP, queues and disk. The server is a process
of its own with the command's own code (worker inline); a figure is over all steps after the first two. fairness: steps
of the slowest client over those of the fastest in the time in which all were at work. Processor
time is the server's alone.

Kills: a loop of snapshots, samples, passes and steps against a server that is killed (SIGKILL) and started again once
in each phase of each step; its weights and optimizer state are compared with an undisturbed server's, bit for bit.

--cookbook: a Python that has tinker-cookbook[math-rl] 0.5.8. Its recipes ``rl_loop`` and ``sl_loop`` run unmodified in
a folder with model and data of their names (``service_world``); reward and loss of the first and last steps are shown.
"""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
import torch
from driver import benchmark_parser, write_rows
from service_world import NAME, make_world
from tinker import types
from work import same_work

from tilth.config.schema import LoraConfig
from tilth.data.tokenizer import Tokenizer
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.hf import save_pretrained
from tilth.runs.models import load_model
from tilth.serve.tinker.base import ALPHA, TARGETS
from tilth.serve.tinker.folders import CheckpointPath
from tilth.serve.tinker.wire import Datum
from tilth.serve.tinker.worker import AdamStep, ModelSpec, SharedBase, TrainedModel, read_state

RANK, ROWS, LENGTH = 8, 8, 64
WARM = 2
"""First steps, which no figure has."""
PATIENCE = 180.0
"""Seconds for a server to begin, or to end; a busy machine needs 50 of them."""
ADAM = types.AdamParams(learning_rate=1e-3)
PHASES = ("snapshot", "sample", "passes", "step", "save")
PROMPT = [5, 6, 7, 8]


def small_base(folder: Path) -> Path:
    """Write the base model."""
    tokenizer = Tokenizer.characters("".join(map(chr, range(33, 127))))
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "head_dim": 16,
    }
    config = DecoderConfig(tokenizer.vocab_size, **sizes, family="qwen3", qk_norm=True, max_positions=256)
    model = Decoder(config)
    model.init_weights_(0)
    save_pretrained(folder, config, dict(model.named_parameters()), tokenizer=tokenizer)
    return folder


class ServerProcess:
    """``tilth serve MODEL --train`` in a process of its own, on one port however often it is started."""

    def __init__(self, model: Path, state: Path, name: str) -> None:
        with socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            self.port = door.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [sys.executable, "-m", "tilth", "serve", str(model), "--train", "--state", str(state)]
        self.command += ["--port", str(self.port), "--name", name, "--backend", "inline"]
        self.errors = state.with_name(f"{state.name}.errors")
        self.kills = 0
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with open(self.errors, "ab") as errors:
            self.process = subprocess.Popen(self.command, stderr=errors)
        until = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < until:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/api/v1/healthz").status_code == 200:
                    return
            time.sleep(0.05)
        code = self.process.poll()
        self.process.kill()
        happened = f"did not answer for {PATIENCE} s" if code is None else f"ended with {code}"
        raise RuntimeError(f"{' '.join(self.command)} {happened}:\n{self.errors.read_text()}")

    def kill(self) -> None:
        """Kill it and start it again."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.kills += 1
        self.start()

    def cpu(self) -> float:
        """Processor seconds that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(PATIENCE)


@contextmanager
def served(model: Path, state: Path, name: str) -> Iterator[ServerProcess]:
    """A server for a block."""
    server = ServerProcess(model, state, name)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def connected(url: str) -> Iterator[tinker.ServiceClient]:
    """A client for a block; afterwards it sends no heartbeats."""
    client = tinker.ServiceClient(base_url=url, api_key="tml-none")
    yield client
    client.close("success").result(PATIENCE)


def rows(step: int) -> list[np.ndarray]:
    """Sequences of a step, int64 [LENGTH + 1] each."""
    return list(np.random.default_rng(step).integers(3, 90, (ROWS, LENGTH + 1)))


def datum(row: np.ndarray) -> types.Datum:
    """Return a sequence for the SDK."""
    weights = np.ones(LENGTH, np.float32)
    columns: Any = {"target_tokens": row[1:], "weights": weights}
    return types.Datum(types.ModelInput.from_ints(row[:-1].tolist()), columns)


def in_process(model: Path, steps: int) -> tuple[float, float, int]:
    """Run the loop without a server; return its steps a second, processor seconds and tokens of a step."""
    loaded = load_model(model)
    targets = tuple(name for names in TARGETS.values() for name in names)
    spec = ModelSpec(LoraConfig(rank=RANK, alpha=ALPHA, targets=targets), 0)
    trained = TrainedModel(SharedBase(loaded.config, loaded.tensors), spec)
    begun = cpu = 0.0
    tokens = 0
    for step in range(steps + WARM):
        if step == WARM:
            begun, cpu, tokens = time.perf_counter(), time.process_time(), 0
        data = [Datum(r[:-1], {"target_tokens": r[1:], "weights": np.ones(LENGTH, np.float32)}) for r in rows(step)]
        logprobs, _ = trained.forward_backward(data, "cross_entropy", {}, forward_only=False)
        tokens += sum(map(len, logprobs))
        trained.step(AdamStep(1e-3, (0.9, 0.95), 1e-12, 0.0, 0.0))
    return steps / (time.perf_counter() - begun), (time.process_time() - cpu) / steps, tokens // steps


def one_client(url: str, seed: int, steps: int, ready: threading.Barrier) -> tuple[list[float], int]:
    """Train one adapter; return when its first step began and when each ended, and the tokens with log-probs."""
    with connected(url) as client:
        tokens = 0
        trained, ends = client.create_lora_training_client("base", rank=RANK, seed=seed).result(), []
        for step in range(steps + WARM):
            if step == WARM:
                ready.wait(PATIENCE)
                ends.append(time.perf_counter())
            passed, done = (
                trained.forward_backward([*map(datum, rows(step))], "cross_entropy"),
                trained.optim_step(ADAM),
            )
            outputs = passed.result().loss_fn_outputs
            done.result()
            if step >= WARM:
                ends.append(time.perf_counter())
                tokens += sum(len(output["logprobs"].data) for output in outputs)
        return ends, tokens


def many_clients(server: ServerProcess, count: int, steps: int) -> dict[str, Any]:
    """Train ``count`` adapters at once; return the figures."""
    ready, before = threading.Barrier(count), server.cpu()
    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(lambda seed: one_client(server.url, seed, steps, ready), range(count)))
    ends = [one for one, _ in found]
    begin, until = max(one[0] for one in ends), min(one[-1] for one in ends)
    done = [sum(begin < at <= until for at in one) for one in ends]
    last = max(one[-1] for one in ends)
    row: dict[str, Any] = {"what": "clients", "clients": count, "steps": steps * count}
    row["tokens_per_step"] = sum(tokens for _, tokens in found) / (steps * count)
    row |= {"steps_per_second": steps * count / (last - begin), "fairness": min(done) / max(done)}
    row["server_cpu_seconds_per_step"] = (server.cpu() - before) / (count * (steps + WARM))
    return row | {"steps_per_second_per_client": row["steps_per_second"] / count}


def rl_loop(client: tinker.ServiceClient, steps: int, strike: Callable[[str], None]) -> Path:
    """Run a loop with every phase; return the state that it saves."""
    trained = client.create_lora_training_client("base", rank=RANK, seed=1).result()
    for step in range(steps):
        sampler = trained.save_weights_and_get_sampling_client().result()
        strike("snapshot")
        params = types.SamplingParams(max_tokens=12, seed=step)
        answer = sampler.sample(types.ModelInput.from_ints(PROMPT), 4, params)
        strike("sample")
        data = []
        for number, one in enumerate(answer.result().sequences):
            tokens = PROMPT + one.tokens
            columns: dict[str, Any] = {"target_tokens": np.array(tokens[1:])}
            columns["logprobs"] = np.array([0.0] * (len(PROMPT) - 1) + list(one.logprobs or []), np.float32)
            columns["advantages"] = np.full(len(tokens) - 1, 1.0 - number % 2 * 2, np.float32)
            data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), columns))
        passed = trained.forward_backward(data, "importance_sampling")
        strike("passes")
        passed.result()
        passed, done = trained.forward_backward([*map(datum, rows(step))], "cross_entropy"), trained.optim_step(ADAM)
        strike("step")
        passed.result(), done.result()
    strike("save")
    path = trained.save_state("end").result().path
    return Path(*CheckpointPath.read(path))


def kills(model: Path, folder: Path, steps: int) -> list[dict[str, Any]]:
    """Kill servers in every phase; return whether their weights are those of an undisturbed one."""

    def outcome(phase: str) -> tuple[dict[str, torch.Tensor], int, float]:
        state, begun = folder / f"killed-{phase}", time.perf_counter()
        with served(model, state, "base") as server, connected(server.url) as client:
            place = rl_loop(client, steps, lambda now: server.kill() if now == phase else None)
            spent = time.perf_counter() - begun
            return read_state(state / "checkpoints" / place)[0], server.kills, spent

    calm, _, calm_seconds = outcome("never")
    found = []
    for phase in PHASES:
        state, count, spent = outcome(phase)
        equal = state.keys() == calm.keys() and all(torch.equal(state[name], calm[name]) for name in calm)
        row = {"what": "kills", "phase": phase, "kills": count, "tensors": len(calm), "equal": equal}
        found.append({**row, "seconds": spent, "undisturbed_seconds": calm_seconds})
    return found


def beside(alone: tuple[float, float, int], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Print figures of clients beside those of the loop in this process, measured just before; return both rows."""
    rate, spent, tokens = alone
    same_work({"in process": {"tokens": tokens}, "clients": {"tokens": row["tokens_per_step"]}})
    row |= {"over_in_process": row["steps_per_second"] / rate}
    print(
        f"{row['clients']} clients  {row['steps_per_second']:7.2f} steps/s in all, fairness {row['fairness']:.2f}, "
        f"{row['server_cpu_seconds_per_step'] * 1e3:.0f} ms of processor a step; in process {rate:7.2f} steps/s, "
        f"{spent * 1e3:.0f} ms; {row['over_in_process']:.2f} of its rate"
    )
    inside = {"what": "in process", "clients": 1, "steps_per_second": rate, "cpu_seconds_per_step": spent}
    return [inside, row]


RECIPES = {
    "rl_loop": (
        "reward/total",
        "batch_size=16 group_size=16 learning_rate=2e-3 lora_rank=8 max_tokens=12 max_steps=30",
    ),
    "sl_loop": ("train_mean_nll", "batch_size=16 learning_rate=2e-3 lora_rank=8 max_steps=30"),
}
"""Recipe -> metric that it learns, and its own options."""


def recipes(python: str, folder: Path) -> list[dict[str, Any]]:
    """Run the cookbook's recipes, unmodified; return their metric over the first and last five steps."""
    model, found = make_world(folder / "world"), []
    with served(model, folder / "recipes", NAME) as server:
        outside = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        outside |= {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-none", "HF_HUB_OFFLINE": "1"}
        outside |= {"HF_HOME": str(folder / "hf")}
        for name, (metric, options) in RECIPES.items():
            command = [python, "-m", f"tinker_cookbook.recipes.{name}", f"model_name={NAME}", *options.split()]
            command += ["batch_size=16", "lora_rank=8"]
            command += [f"log_path={folder / name}"]
            subprocess.run(command, cwd=folder / "world", env=outside, check=True, capture_output=True)
            lines = (folder / name / "metrics.jsonl").read_text().splitlines()
            values = [row[metric] for row in map(json.loads, lines) if metric in row]
            first, last = float(np.mean(values[:5])), float(np.mean(values[-5:]))
            found.append({"what": "recipe", "recipe": name, "metric": metric, "first": first, "last": last})
            found[-1] |= {"steps": len(values), "values": values}
    return found


def main() -> None:
    """Print a line for each figure."""
    parser = benchmark_parser(__doc__, "4 steps of 1 and 2 clients, no kills")
    parser.add_argument("--steps", type=int, default=40, help="steps of each client")
    parser.add_argument("--clients", default="1,2,8", help="numbers of clients at once")
    parser.add_argument("--cookbook", default="", help="Python with tinker-cookbook[math-rl]")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = 4 if options.quick else options.steps
    with tempfile.TemporaryDirectory(prefix="tilth-service-") as made:
        folder = Path(made)
        model = small_base(folder / "base")
        counts = [1, 2] if options.quick else [*map(int, options.clients.split(","))]
        every = list[dict[str, Any]]()
        with served(model, folder / "state", "base") as server:
            for count in counts:
                every += beside(in_process(model, steps), many_clients(server, count, steps))
        if not options.quick:
            for row in kills(model, folder, 3):
                every.append(row)
                verdict = "equal" if row["equal"] else "DIFFERENT"
                print(f"killed {row['kills']} times in {row['phase']:9} {verdict} bit for bit")
        for row in recipes(options.cookbook, folder) if options.cookbook else []:
            every.append(row)
            print(f"{row['recipe']:9} {row['metric']}: {row['first']:.3f} -> {row['last']:.3f} in {row['steps']} steps")
    write_rows(options.json, every)


if __name__ == "__main__":
    main()
