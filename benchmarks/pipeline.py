"""Pipelines: Tilth's stages beside torch.distributed.pipelining, and what of messages and waiting is hidden.

    python benchmarks/pipeline.py [--quick] [--json PATH]

Processes of this machine, gloo, one thread each. Two tables:

- steps: the same parts of a decoder, micro-batches and lengths (equal ones: torch's stages have one shape) learn with
  ours and with torch's schedule. Gradients of both are first compared with those of one process. time, cpu: ours over
  torch's, the fastest step and the processor time of all ranks; both contain AdamW.
- idle: passes that sleep in place of computing, so that shares hold on a busy machine; the messages are real ones.
  formula: idle share of the schedule with messages that take no time; bound: with messages that take as long as one
  here and keep no stage from computing, the least that is possible. Idle shares of ours as it is, with sends that are
  waited for (stages of the interleaved schedule would then wait for each other for ever), with receives that are
  posted when they are needed, and of torch's schedules.

Exit status 1 if gradients differ by more than 1e-4. --quick: two stages, fewer steps.
"""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from driver import benchmark_parser, write_rows
from tilth_studies.pipeline_idle import idle_share
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.layout import Mesh
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims, join
from tilth.parallel.pipeline import Pipe, keep_part
from tilth.parallel.sharded import shard
from tilth.plan.pipeline import SPLIT, Pass, chunks_of, needed, passes, stages_of
from tilth.training.engine import TrainEngine, negative_log_likelihood

THEIRS = {
    "1f1b": ["Schedule1F1B"],
    "interleaved": ["ScheduleInterleaved1F1B"],
    "zero-bubble": ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"],
}
"""Schedules of torch that are compared with each of ours. Its zero-bubble ones have two parts a stage."""
CONFIG = DecoderConfig(
    vocab_size=256, hidden_size=64, intermediate_size=176, num_layers=8, num_heads=4, num_kv_heads=2, qk_norm=True
)
ROWS, LENGTH, MICROS = 4, 64, 8
SECONDS = {"forward": 0.04, "backward": 0.08}
"""Of a pass of a whole stage."""
WIDTH, TOKENS = 512, 2048
MOST = 1e-4


# ---- steps of a decoder ----


def tokens() -> Tensor:
    """Return the token ids of a step: [sequences, LENGTH]."""
    return torch.randint(CONFIG.vocab_size, (ROWS * MICROS, LENGTH), generator=torch.Generator().manual_seed(0))


def loss_with(model: Decoder) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of hidden states [rows, length, width] for torch's schedules."""

    def loss(hidden: Tensor, ids: Tensor) -> Tensor:
        before = hidden[:, :-1].reshape(-1, CONFIG.hidden_size)
        found, _ = model.token_logprobs(before, model.head_weight, ids[:, 1:].flatten(), entropy=False)
        return -found.sum() / (ROWS * MICROS * (LENGTH - 1))

    return loss


class EqualLengths(nn.Module):
    """A part of a decoder on batches of sequences of one length."""

    def __init__(self, part: Decoder) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """x: token ids [rows, length], or hidden states -> hidden states [rows, length, width]."""
        rows, length = x.shape[:2]
        found = self.part(x.flatten(0, 1), PackedContext([length] * rows))
        return found.view(rows, length, -1).clone()  # no view: torch's zero-bubble detaches it in place


def whole() -> Decoder:
    """Return the model of one process."""
    model = Decoder(CONFIG)
    model.init_weights_(0)
    return model


def reference() -> dict[str, Tensor]:
    """Return the gradients of one process."""
    model = whole()
    loss_with(model)(EqualLengths(model)(tokens()), tokens()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ours(grid: ParallelDims, schedule: str) -> tuple[Callable[[], None], Callable[[], dict[str, Tensor]]]:
    """Return a step, and what returns the gradients of the last one."""
    sharded = shard(lambda: Decoder(CONFIG), grid, schedule=schedule)
    sharded.init_(0)
    engine = TrainEngine(sharded, OptimizerConfig(lr=1e-3), total_steps=100, micro_tokens=ROWS * LENGTH)
    mask = np.tile(np.arange(LENGTH) > 0, ROWS * MICROS).astype(np.uint8)
    own, gradients = Jagged.of(list(tokens().numpy())), dict[str, Tensor]()
    clip = engine.optimizers.clip

    def keeping(max_norm: float, measure: Any = None) -> float:
        if not gradients:
            gradients.update({n: p.grad.clone() for n, p in sharded.parameters.items() if p.grad is not None})
        return clip(max_norm, measure)

    engine.optimizers.clip = keeping  # type: ignore[method-assign]
    loss = negative_log_likelihood(float(mask.sum()))
    return lambda: void(engine.update(own, mask, {}, loss, entropy=False)), lambda: gradients


def void(_: object) -> None:
    """Drop a result."""


def theirs(grid: ParallelDims, name: str) -> tuple[Callable[[], None], Callable[[], dict[str, Tensor]]]:
    """Return a step of torch's schedule, and what returns the gradients of the first one."""
    rank, n = grid.coordinate("pp"), grid.size("pp")
    chunks = 1 if name == "Schedule1F1B" else 2
    division = stages_of(CONFIG, n, "1f1b" if chunks == 1 else "interleaved")
    second = 2 * n - 1 - rank if name == "ScheduleZBVZeroBubble" else n + rank
    parts = {part: keep_part(whole(), division, part) for part in (rank, second)[:chunks]}
    step = torch_schedule(name, grid, {at: EqualLengths(part) for at, part in parts.items()}, loss_with_last(parts))
    own = {n: p for part in parts.values() for n, p in part.named_parameters()}
    optimizer, gradients = torch.optim.AdamW(own.values(), lr=1e-3, foreach=True), dict[str, Tensor]()
    first, last = 0 in parts, chunks * n - 1 in parts

    def run() -> None:
        optimizer.zero_grad()
        step.step(*([tokens()] if first else []), **({"target": tokens()} if last else {}))
        if not gradients:
            gradients.update({name: p.grad.clone() for name, p in own.items() if p.grad is not None})
        optimizer.step()

    return run, lambda: gradients


def loss_with_last(parts: dict[int, Decoder]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of the last part, if it is here."""
    return next((loss_with(part) for part in parts.values() if part.last), lambda hidden, ids: hidden.sum())


def torch_schedule(name: str, grid: ParallelDims, parts: dict[int, nn.Module], loss: Any) -> Any:
    """Return a schedule of torch.distributed.pipelining. parts: of this rank, by number."""
    made, group = getattr(schedules, name), grid.group("pp")
    count = grid.size("pp") * len(parts)
    stages = [PipelineStage(part, at, count, torch.device("cpu"), group=group) for at, part in parts.items()]
    return made(stages[0] if count == grid.size("pp") else stages, MICROS, loss_fn=loss, scale_grads=False)


def compared(grid: ParallelDims, schedule: str, name: str, steps: int) -> dict[str, Any]:
    """Compare gradients, then time steps of both in turns."""
    wanted, both, off = reference(), (ours(grid, schedule), theirs(grid, name)), []
    for run, gradients in both:
        run()
        found = gradients()
        off.append(max(float((found[n] - wanted[n]).norm() / wanted[n].norm()) for n in found))
    took: list[list[tuple[float, float]]] = [[], []]
    for _ in range(steps):
        for (run, _), times in zip(both, took):
            dist.barrier()
            started, cpu = time.perf_counter(), time.process_time()
            run()
            dist.barrier()
            times.append((time.perf_counter() - started, time.process_time() - cpu))
    return {"off": off, "seconds": [min(t for t, _ in times) for times in took],
            "cpu": [sum(c for _, c in times) / steps for times in took]}  # fmt: skip


# ---- passes that sleep ----


class SendsWaitedFor(Pipe):
    """A pipe that computes nothing while it sends."""

    def give(self, one: Pass, result: Tensor) -> None:
        super().give(one, result)
        self.finish()


class ReceivesLate(Pipe):
    """A pipe that posts a receive when its result is needed."""

    ahead = 0


PIPES: dict[str, type[Pipe]] = {"ours": Pipe, "sends waited for": SendsWaitedFor, "receives late": ReceivesLate}


def seconds_of(schedule: str, chunks: int) -> dict[str, float]:
    """Return the seconds of each pass of a part."""
    forward, backward = (took / chunks for took in SECONDS.values())
    if schedule not in SPLIT:
        return {"forward": forward, "backward": backward}
    return {"forward": forward, "backward": backward / 2, "weight": backward / 2}


def sleep_in(grid: ParallelDims, schedule: str, kind: type[Pipe]) -> Callable[[], None]:
    """Return a step whose passes sleep."""
    n, chunks = grid.size("pp"), chunks_of(schedule)
    model, context = Decoder(replace(CONFIG, hidden_size=WIDTH, num_layers=1)), PackedContext([TOKENS])
    orders, took = passes(schedule, n, chunks, MICROS), seconds_of(schedule, chunks)
    message = torch.zeros(TOKENS, WIDTH)
    stage, parts = grid.coordinate("pp"), n * chunks
    kind(orders, stage, parts, grid=grid, model=model, spread=1).connect()

    def run() -> None:
        pipe = kind(orders, stage, parts, grid=grid, model=model, spread=1)
        for one in pipe.passes(lambda i: context):
            first, last = (0, parts - 1) if one.direction == "forward" else (parts - 1, 0)
            if one.direction != "weight" and one.part != first:
                pipe.take(one)
            time.sleep(took[one.direction])
            if one.direction != "weight" and one.part != last:
                pipe.give(one, message)

    return run


class Nap(torch.autograd.Function):
    """Sleep in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    """A part for torch's schedules whose passes sleep."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.took = seconds_of("zero-bubble", chunks)

    def forward(self, x: Tensor) -> Tensor:
        """x: [1, TOKENS, WIDTH]."""
        time.sleep(self.took["forward"])
        return Nap.apply(x + self.first, self.took["backward"]) + Nap.apply(self.second, self.took["weight"])


def sleep_in_theirs(grid: ParallelDims, name: str) -> Callable[[], None]:
    """Return a step of torch's schedule whose passes sleep."""
    rank, n = grid.coordinate("pp"), grid.size("pp")
    chunks = 1 if name == "Schedule1F1B" else 2
    second = 2 * n - 1 - rank if name == "ScheduleZBVZeroBubble" else n + rank
    parts: dict[int, nn.Module] = {part: Sleeper(chunks) for part in (rank, second)[:chunks]}
    made = torch_schedule(name, grid, parts, lambda hidden, x: hidden[0, 0].sum())
    batch = torch.zeros(MICROS, TOKENS, WIDTH)
    target = {"target": torch.zeros(MICROS)} if chunks * n - 1 in parts else {}
    return lambda: void(made.step(*([batch] if 0 in parts else []), **target))


def message_seconds(grid: ParallelDims) -> float:
    """Return the seconds of a message between two stages that do nothing else: the median of round trips, halved."""
    message, took = torch.zeros(TOKENS, WIDTH), []
    for _ in range(9):
        dist.barrier()
        started = time.perf_counter()
        if grid.rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        elif grid.rank == 1:
            dist.recv(message, 0)
            dist.send(message, 0)
        took.append((time.perf_counter() - started) / 2)
    return sorted(took)[len(took) // 2]


def bound(schedule: str, stages: int, message: float) -> float:
    """Return the least seconds of a step whose messages take ``message`` seconds and keep nobody from computing."""
    chunks, took = chunks_of(schedule), seconds_of(schedule, chunks_of(schedule))
    orders, ends = passes(schedule, stages, chunks, MICROS), dict[Pass, float]()
    places, clocks = [0] * stages, [0.0] * stages
    while any(place < len(order) for place, order in zip(places, orders)):
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                one = order[places[stage]]
                before = needed(one, stages * chunks)
                if before is not None and before not in ends:
                    break
                arrives = 0.0 if before is None else ends[before] + message * (before.part != one.part)
                ends[one] = clocks[stage] = max(clocks[stage], arrives) + took[one.direction]
                places[stage] += 1
    return max(clocks)


def idle(grid: ParallelDims, schedule: str, steps: int) -> dict[str, Any]:
    """Return the idle share of each way."""
    n, message = grid.size("pp"), message_seconds(grid)
    kinds = {name: kind for name, kind in PIPES.items() if schedule != "interleaved" or kind is not SendsWaitedFor}
    runs = {name: sleep_in(grid, schedule, kind) for name, kind in kinds.items()}
    runs |= {name: sleep_in_theirs(grid, name) for name in THEIRS[schedule]}
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(steps + 1):
        for name, run in runs.items():
            dist.barrier()
            started = time.perf_counter()
            run()
            dist.barrier()
            took[name].append(time.perf_counter() - started)
    best, work = {name: min(times[1:]) for name, times in took.items()}, MICROS * sum(SECONDS.values())
    shares = {name: 1 - work / seconds for name, seconds in best.items()}
    return {"idle_share_formula": idle_share(schedule, n, MICROS, seconds_of(schedule, 1)),
            "idle_share_bound": 1 - work / bound(schedule, n, message), "idle_share": shares,
            "message_seconds": message, "seconds": best}  # fmt: skip


# ---- processes ----


def one_rank(rank: int, ranks: int, file: str, what: str, given: tuple[Any, ...], pipe: Any) -> None:
    """Measure on one rank and send what was found."""
    torch.set_num_threads(1)
    join(rank, ranks, f"file://{file}", 60.0)
    grid = ParallelDims.of(Mesh.of({"pp": ranks}), rank)
    pipe.send(compared(grid, *given) if what == "steps" else idle(grid, *given))
    pipe.recv()  # until all are done


def measured(ranks: int, what: str, *given: Any) -> list[dict[str, Any]]:
    """Return what all ranks found."""
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        ends = [(rank, ranks, f"{folder}/store", what, given, there) for rank, (_, there) in enumerate(pipes)]
        processes = [fork.Process(target=one_rank, args=end, daemon=True) for end in ends]
        for process in processes:
            process.start()
        found = [received(here, process) for (here, _), process in zip(pipes, processes)]
        for here, _ in pipes:
            here.send(None)
        for process in processes:
            process.join()
    return found


def received(end: Any, process: Any) -> dict[str, Any]:
    """Return what a rank sends; end the script if it ends without."""
    while not end.poll(1.0):
        if not process.is_alive():
            sys.exit(f"a rank ended with exit status {process.exitcode}")
    return end.recv()


def steps_row(ranks: int, schedule: str, name: str, steps: int) -> dict[str, Any]:
    """Measure and print a row of the first table."""
    found = measured(ranks, "steps", schedule, name, steps)
    off = [max(one["off"][i] for one in found) for i in range(2)]
    took = [max(one["seconds"][i] for one in found) for i in range(2)]
    cpu = [sum(one["cpu"][i] for one in found) for i in range(2)]
    texts = (
        f"pp{ranks} {schedule:12} {name:29}",
        f"gradients off {off[0]:.0e} {off[1]:.0e}",
        f"time {took[0] / took[1]:.2f}",
        f"cpu {cpu[0] / cpu[1]:.2f} ({cpu[0]:.2f} s, {cpu[1]:.2f} s)",
    )
    print("   ".join(texts), flush=True)
    values = {"gradients_off": max(off), "seconds_ours": took[0], "seconds_torch": took[1],
              "cpu_seconds_ours": cpu[0], "cpu_seconds_torch": cpu[1]}  # fmt: skip
    return {"table": "steps", "ranks": ranks, "schedule": schedule, "torch_schedule": name, **values}


def idle_row(ranks: int, schedule: str, steps: int) -> dict[str, Any]:
    """Measure and print a row of the second table."""
    found = measured(ranks, "idle", schedule, steps)[0]
    shares = ", ".join(f"{name} {share:.3f}" for name, share in found["idle_share"].items())
    known = f"formula {found['idle_share_formula']:.3f}, bound {found['idle_share_bound']:.3f}"
    message = f"message {1e3 * found['message_seconds']:.1f} ms"
    print(f"pp{ranks} {schedule:12} idle: {known}, {shares}; {message}", flush=True)
    return {"table": "idle", "ranks": ranks, "schedule": schedule, **found}


def main() -> None:
    """Print both tables."""
    parser = benchmark_parser(__doc__, "two stages, 3 steps instead of 8")
    chosen = parser.parse_args()
    rows, steps = list[dict[str, Any]](), 3 if chosen.quick else 8
    sizes = (2,) if chosen.quick else (2, 4)
    for ranks in sizes:
        for schedule, names in THEIRS.items():
            for name in names:
                rows.append(steps_row(ranks, schedule, name, steps))
                write_rows(chosen.json, rows)
    for ranks in sizes:
        for schedule in THEIRS:
            rows.append(idle_row(ranks, schedule, steps))
            write_rows(chosen.json, rows)
    sys.exit(any(row["gradients_off"] > MOST for row in rows if row["table"] == "steps"))


if __name__ == "__main__":
    main()
