"""Bytes and losses of compressed gradients and weights, beside exact ones, and seconds of a step on a slow link.

    python benchmarks/economy.py [--quick] [--only ROW] [--json PATH] [--data ../shared/data/gsm8k] [--steps N]
                                 [--seeds 0,1,2] [--shape quick|full] [--lr RATE] [--ranks 4] [--list]

Each row trains the same model on the same bytes of text on four data ranks or more (backend local, gloo), two of which
are a node, with AdamW at one learning rate, and differs in ``policy.comm`` alone. Rows "SGD" have SGD with momentum at
three rates, of which the best one is shown (``--lr``: one rate in place of a row's own); "by topic" has other problems
on each rank, and AdaGrad or AdaAlter at one rate. "top-k of gradients, feedback" is not EF-SGD: its residual is of
gradients, and momentum and the clip come after the sum. ``--list`` names them, and ``--only`` takes any part of a name.
Steps are a multiple of all periods H, so that bytes and the model that is evaluated are of whole periods. Columns:

- KB: that a rank sends in a step, by the tensors of its collectives (``plan.costs.wire``: rings); across: of these in
  groups with ranks of several nodes.
- of exact: these bytes, divided by those of the exact row of the same layout and optimizer; ratio: the inverse. Names
  have the ratio of what is coded; tensors of less than 1,024 elements travel whole.
- loss: of held-out text after the steps, mean over the seeds, and the greatest distance of a seed from it; worse: than
  the exact row. "diverged": the loss of a seed is above ln 256, that of uniform bytes.
- ms: median of some steps with a token bucket of 100 Mbit/s for what a rank sends across: waiting costs no processor;
  of ranks that learn apart the mean of whole periods. Gradients travel in buckets of 1 MB beside the backward pass.
  after: of as many steps in which they travel after it. 1G, 10G: beside it at 1 and 10 Gbit/s.
- times: ms of the exact row over that of this one; beside a row with a period both are means of as many steps.
- code: processor time of a step of one rank without the bucket, more than the exact row (ms); not of the first two.

Below a row that has another beside it, what a step takes of one resource alone, which is not its time:

- link alone: time that the bytes across take at 100 Mbit/s.
- processor alone: processor time of a step of one rank.
- pays below: Mbit/s of a link for which the bytes across that are saved take longer than ``code``.
- at most: times if codes took no processor and all was hidden by the computing of exact sums, which shares the cores,
  while exact sums hid nothing.

``--paced SECONDS``: each rank has one sequence a step, and the backward pass of each layer sleeps so long, as if a
device computed it: what is hidden of a link then depends less on the cores.

``--only coding``: GB/s of float32 values that each compressor codes and decodes on one core, bits of a value, and the
bandwidth of a link below which that takes less time than the bytes that it saves. ``--only lans`` and ``--only
dynamic``, or longer: rows of ``economy_optimizers``. With ``--json`` a row has the loss of each step as its ``curve``.

The figures are of this model alone; --quick: a smaller one, fewer steps and rows.

A step of four ranks takes about 0.27 s of processor with ``--shape quick`` and 2.3 s with ``full``, so 300 steps of a
row, rate and seed are 1.5 and 13 minutes of it, the timed steps included; a run of 16,384 samples of lans 1.2, and one
batch of it has 24; a row and seed of dynamic 1.
"""

import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from driver import benchmark_parser, write_rows
from economy_optimizers import dynamic_rows, lans_rows, studied
from economy_rivals import declare, direct
from network_ring import TokenBucket, wait_until
from trial import JoinedRole

from tilth.cluster.backends.capacity import cores
from tilth.cluster.controller.cluster import open_cluster
from tilth.cluster.protocol import transfer
from tilth.config.open_sets import COMPRESSORS, WEIGHT_CODES
from tilth.config.roles import resolve
from tilth.config.schema import CommConfig, OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.layout import Mesh
from tilth.core.random import stream
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.parallel import comm
from tilth.parallel.compress import Compressor
from tilth.parallel.dims import ParallelDims
from tilth.parallel.local import reducer_of
from tilth.parallel.sharded import Zero, shard
from tilth.plan.costs import wire
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.packed import packed_logprobs

RANKS, NODE = 4, 2
SLOW, FASTER = 100e6 / 8, (1e9 / 8, 1e10 / 8)
"""Bytes a second of the slow link, and of others."""


@dataclass(frozen=True)
class Row:
    """One row. beside: the row that its figures are divided by; "": itself."""

    comm: dict[str, Any] = field(default_factory=dict)
    beside: str = ""
    zero: int = 3
    optimizer: dict[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = (3e-3,)
    """Rates of learning, of which the best one is shown."""
    by_topic: bool = False
    """Each rank has problems of other topics."""
    direct: bool = False
    """Weights travel in four bits themselves, which ``comm`` does not offer."""

    @property
    def period(self) -> int:
        """Steps after which what is sent repeats."""
        return int(self.comm.get("every", 1))

    @property
    def timed(self) -> int:
        """Steps on a link: whole periods."""
        return max(TIMED, self.period)


def cser(ratio: int, every: int) -> dict[str, Any]:
    """CSER that sends 1 / ratio of the elements, half of it in each step and half in resets."""
    options = {"changes": 2 * ratio, "models": 2 * ratio // every}
    return {"local": "cser", "every": every, "options": options}


def late(ratio: int, every: int) -> dict[str, Any]:
    """QSparse-local-SGD, or with 1 EF-SGD, which sends 1 / ratio of the elements."""
    return {"local": "late", "every": every, "options": {"models": ratio // every}}


RATIOS = {8: 4, 32: 8, 128: 16, 256: 16, 1024: 16}
"""Bytes of exact sums over those that travel -> H of ways with a period."""
SGD: dict[str, Any] = {"optimizer": {"name": "sgd"}, "rates": (0.1, 0.02, 0.005)}
ADAGRAD: dict[str, Any] = {"optimizer": {"name": "adagrad"}, "rates": (2e-2,), "by_topic": True}
ADAALTER = ADAGRAD | {"optimizer": {"name": "adaalter"}}
TOPICS = "AdaGrad, by topic"
PERIODS = (2, 4, 8, 16)
ROWS: dict[str, Row] = {
    "exact": Row(),
    "onebit": Row({"gradients": "onebit"}, "exact"),
    "onebit, both ways": Row({"gradients": "onebit", "two_way": True}, "exact"),
    "onebit, no feedback": Row({"gradients": "onebit", "feedback": False}, "exact"),
    "onebit, no feedback, both ways": Row({"gradients": "onebit", "feedback": False, "two_way": True}, "exact"),
    "topk 1 %": Row({"gradients": "topk"}, "exact"),
    "topk 1 %, both ways": Row({"gradients": "topk", "two_way": True}, "exact"),
    "topk 1 %, no feedback": Row({"gradients": "topk", "feedback": False}, "exact"),
    "topk 1 %, no feedback, both ways": Row({"gradients": "topk", "feedback": False, "two_way": True}, "exact"),
    "randomk 1 %": Row({"gradients": "randomk"}, "exact"),
    "randomk 1 %, both ways": Row({"gradients": "randomk", "two_way": True}, "exact"),
    "randomk 1 %, feedback": Row({"gradients": "randomk-residual"}, "exact"),
    "randomk 1 %, feedback, both ways": Row({"gradients": "randomk-residual", "two_way": True}, "exact"),
    "dither": Row({"gradients": "dither"}, "exact"),
    "dither, both ways": Row({"gradients": "dither", "two_way": True}, "exact"),
    "dither, feedback": Row({"gradients": "dither-residual"}, "exact"),
    "dither, feedback, both ways": Row({"gradients": "dither-residual", "two_way": True}, "exact"),
    **{f"cser {ratio}": Row(cser(ratio, every), "exact") for ratio, every in RATIOS.items()},
    "local AdamW, H = 8": Row({"local": "average", "every": 8}, "exact"),
    "exact, zero 1": Row(zero=1),
    "differences": Row({"weights": "difference4"}, "exact, zero 1", 1),
    "two levels, not smoothed": Row(
        {"gradients": "sdp4bit", "node_size": NODE, "options": {"smooth": False}}, "exact, zero 1", 1
    ),
    "two levels": Row({"gradients": "sdp4bit", "node_size": NODE}, "exact, zero 1", 1),
    "SDP4Bit": Row({"gradients": "sdp4bit", "weights": "difference4", "node_size": NODE}, "exact, zero 1", 1),
    "four bits in both levels": Row({"gradients": "fourbits", "node_size": NODE}, "exact, zero 1", 1),
    "direct weights": Row(beside="exact, zero 1", zero=1, direct=True),
    "SGD": Row(**SGD),
    **{
        f"SGD, ratio {ratio}, {way}": Row(comm, "SGD", **SGD)
        for ratio, every in RATIOS.items()
        for way, comm in {
            "CSER": cser(ratio, every),
            "EF-SGD": late(ratio, 1),
            "top-k of gradients, feedback": {
                "gradients": "topk",
                "two_way": True,
                "options": {"share": 1 / (2 * ratio)},
            },
            "QSparse-local-SGD": late(ratio, every),
        }.items()
    },
    TOPICS: Row(**ADAGRAD),
    **{
        f"naive AdaGrad, by topic, H = {every}": Row({"local": "average", "every": every}, TOPICS, **ADAGRAD)
        for every in PERIODS
    },
    **{
        f"adaalter, by topic, H = {every}": Row({"local": "adaalter", "every": every}, TOPICS, **ADAALTER)
        for every in (1, *PERIODS)
    },
}
WIDE = max(map(len, ROWS))
WHOLE = math.lcm(*(own.period for own in ROWS.values()))
"""Steps of a run are a multiple of this."""
QUICK = ("exact", "topk 1 %, both ways", "cser 8", "exact, zero 1", "SDP4Bit")
SHAPES = {
    "full": DecoderConfig(vocab_size=256, hidden_size=192, intermediate_size=576, num_layers=6, num_heads=6),
    "quick": DecoderConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_layers=2, num_heads=2),
}
LENGTH, BATCH, HELD = 128, 32, 64
"""Bytes of a sequence; sequences of a step, and held out."""
WARM = 2
"""Steps before processor time is counted: the first ones build, import and allocate."""
TIMED = 8
"""Steps on the slow link, in each of the two ways, and on other links; more if a period is longer."""
BUCKET = 1 << 20
"""Bytes of gradients that travel together: the model is small."""
CODED = 1 << 22
"""Values that are coded at once."""
TOPIC = (r"\$|dollar|cent|cost|price", r"hour|minute|day|week|year", r"mile|meter|feet|inch|pound|liter")
"""What problems of a topic have in their text; others are of a last topic."""


declare()


class Meter:
    """Counts what this rank sends in collectives, and keeps it to a rate."""

    def __init__(self) -> None:
        self.plain, self.collective, self.sent, self.across = comm.communication, comm.Collective, 0.0, 0.0
        self.bucket: TokenBucket | None = None

    def begin(self, op: str, group: Any, nbytes: int) -> float:
        """Begin to send; return when all is sent."""
        ranks = torch.distributed.get_process_group_ranks(group)
        sent = float(wire(op, len(ranks), nbytes)[1])
        self.sent += sent
        if len({rank // NODE for rank in ranks}) == 1:
            return 0.0
        self.across += sent
        return 0.0 if self.bucket is None else self.bucket.begin(sent)

    def __call__(self, op: str, group: Any, nbytes: int) -> Any:
        wait_until(self.begin(op, group, nbytes))
        return self.plain(op, group, nbytes)

    def started(self, op: str, group: Any, nbytes: int, works: Sequence[Any]) -> "Metered":
        """Return a collective on its way over the link."""
        return Metered(self, op, group, nbytes, works)


class Metered:
    """A collective that is on its way for as long as the link takes."""

    def __init__(self, meter: Meter, op: str, group: Any, nbytes: int, works: Sequence[Any]) -> None:
        self.meter, self.span, self.works = meter, (op, group, nbytes), [work for work in works if work is not None]
        self.end = meter.begin(op, group, nbytes)

    def wait(self) -> None:
        """Wait until it has ended on this rank."""
        with self.meter.plain(*self.span):
            for work in self.works:
                work.wait()
            wait_until(self.end)


class Trial(JoinedRole):
    """A role that trains one row."""

    @transfer("all", "all")
    def run(self, shape: str, text: str, name: str, steps: int, seed: int, lr: float, paced: float) -> dict[str, Any]:
        """Return this rank's measurements."""
        meter = Meter()
        comm.communication = meter  # type: ignore[assignment]
        comm.Collective = meter.started  # type: ignore[assignment,misc]
        try:
            return self.measured(meter, SHAPES[shape], text, name, steps, seed, lr, paced)
        finally:
            comm.communication = meter.plain
            comm.Collective = meter.collective  # type: ignore[misc]

    def measured(
        self, meter: Meter, config: DecoderConfig, text: str, name: str, steps: int, seed: int, lr: float, paced: float
    ) -> dict[str, Any]:
        """Train, then time some steps with the bucket: sums beside the backward pass, then after it, then beside it on
        faster links."""
        rank, ranks, row = self.context.rank, torch.distributed.get_world_size(), ROWS[name]
        grid = ParallelDims.of(Mesh.of({"dp": ranks}), rank)
        small = {} if row.comm.get("local") == "average" or not row.comm else {"smallest": 1024}
        coded = CommConfig(bucket_bytes=BUCKET, **small | row.comm)
        reducer = direct(1024, seed, BUCKET) if row.direct else reducer_of(coded, seed)
        zero, links = cast(Zero, row.zero), (SLOW, SLOW, *FASTER)
        longest = max(own.timed for own in (row, *ROWS.values()) if own is row or own.beside == name)
        sharded = shard(lambda: Decoder(config), grid, zero=zero, reducer=reducer)
        sharded.init_(seed)
        options = OptimizerConfig(**row.optimizer, lr=lr, warmup_steps=10, schedule="cosine")
        tokens = LENGTH * BATCH
        engine = TrainEngine(sharded, options, total_steps=steps + 2 * TIMED, micro_tokens=tokens, seed=seed)
        codes, total = np.frombuffer(text.encode(), np.uint8), steps + longest + row.timed * len(links[1:])
        batches = sequences(codes, seed, total, rank, ranks, row.by_topic)
        if paced:
            batches = (tokens.take(np.zeros(1, np.int64)) for tokens in batches)
            for own, p in sharded.parameters.items():
                if own.endswith("input_layernorm.weight"):  # one of each layer
                    p.register_hook(lambda grad: time.sleep(paced))
        curve = list[float]()
        for number, one in enumerate(islice(batches, steps)):
            if number == min(WARM, steps - 1):
                began = time.process_time()
            curve.append(round(update(engine, one), 4))
        spent = (time.process_time() - began) / max(1, steps - WARM)
        sent, loss = (meter.sent / steps, meter.across / steps), self.held_out(sharded, text)
        last_pass, found, every = sharded.gradients.last_pass, list[float](), list[list[float]]()
        for place, link in enumerate(links):
            meter.bucket = TokenBucket(link)
            sharded.gradients.last_pass = _nothing if place == 1 else last_pass  # type: ignore[method-assign]
            every.append([timed_update(engine, one) for one in islice(batches, row.timed if place else longest)])
            took = every[-1][: row.timed]
            found.append(statistics.mean(took) if row.period > 1 else statistics.median(took[1:]))
        times = {"seconds": found[0], "after": found[1], "faster": found[2:], "processor": spent, "took": every[0]}
        return {"loss": loss, "curve": curve, "sent": sent[0], "across": sent[1], **times}

    def held_out(self, sharded: Any, text: str) -> float:
        """Return the loss of the end of the text, in nats a byte."""
        codes = np.frombuffer(text.encode(), np.uint8)[-HELD * LENGTH :].astype(np.int64).reshape(HELD, LENGTH)
        tokens, mask = Jagged.of(list(codes)), np.tile(np.arange(LENGTH) > 0, HELD).astype(np.uint8)
        with sharded.gradients.reducer.averaged():
            return -float(packed_logprobs(sharded, tokens, mask, max_tokens=LENGTH * BATCH)[mask > 0].mean())


def _nothing() -> None:
    """In place of what lets sums start beside a backward pass."""


def sequences(codes: np.ndarray, seed: int, steps: int, rank: int, ranks: int, own: bool) -> Iterator[Jagged]:
    """Yield this rank's sequences of each step. own: from its part of the text."""
    count = len(codes) - (HELD + 1) * LENGTH
    first, last = (rank * count // ranks, (rank + 1) * count // ranks) if own else (0, count)
    places = stream(seed, "places").integers(0, steps * BATCH, last - first).view(steps, BATCH)
    for step in places[:, rank::ranks].tolist():
        yield Jagged.of([codes[first + at : first + at + LENGTH].astype(np.int64) for at in step])


def sorted_by_topic(problems: Sequence[str]) -> str:
    """Return the text of problems with those of a topic side by side; the end, which is held out, stays."""
    held = len(problems)
    while held and sum(len(one) + 1 for one in problems[held:]) < (HELD + 1) * LENGTH:
        held -= 1

    def topic(text: str) -> int:
        return next((i for i, words in enumerate(TOPIC) if re.search(words, text)), len(TOPIC))

    return "\n".join([*sorted(problems[:held], key=topic), *problems[held:]])


def update(engine: TrainEngine, tokens: Jagged) -> float:
    """Run one step; return its loss."""
    mask = np.tile(np.arange(LENGTH) > 0, len(tokens.lengths)).astype(np.uint8)
    return engine.update(tokens, mask, {}, negative_log_likelihood(float(BATCH * (LENGTH - 1)))).loss


def timed_update(engine: TrainEngine, tokens: Jagged) -> float:
    """Run one step; return its seconds."""
    began = time.perf_counter()
    update(engine, tokens)
    return time.perf_counter() - began


def row(
    shape: str, text: str, name: str, steps: int, seeds: Sequence[int], lr: float, paced: float, ranks: int
) -> dict[str, Any]:
    """Measure a row at its rates, or at ``lr``; return it at the best one."""
    found, rates = dict[float, list[Any]](), (lr,) if lr else ROWS[name].rates
    with open_cluster("local", ranks) as cluster:
        for rate, seed in itertools.product(rates, seeds):
            mesh = Mesh.of({"dp": ranks})
            role = cluster.group(f"trial {rate} {seed}", "economy:Trial", {}, mesh=mesh)
            found.setdefault(rate, []).append(role.run(shape, text, name, steps, seed, rate, paced))
    by_rate = {rate: [several[0]["loss"] for several in own] for rate, own in found.items()}
    rate = min(by_rate, key=lambda one: (diverged(by_rate[one]), statistics.mean(by_rate[one])))
    losses, first = by_rate[rate], found[rate][0]
    return {
        "row": name, "zero": ROWS[name].zero, "steps": steps, "seeds": list(seeds), "losses": losses,
        "rate": rate, "by_rate": by_rate, "diverged": diverged(losses),
        "loss": statistics.mean(losses), "spread": max(abs(one - statistics.mean(losses)) for one in losses),
        "sent": max(one["sent"] for one in first), "across": max(one["across"] for one in first),
        "seconds": max(one["seconds"] for one in first), "after": max(one["after"] for one in first),
        "faster": [max(several) for several in zip(*(one["faster"] for one in first))],
        "curve": [several[0]["curve"] for several in found[rate]], "took": [one["took"] for one in first],
        "processor": statistics.mean(one["processor"] for one in first),
    }  # fmt: skip


def diverged(losses: Sequence[float]) -> bool:
    """Return True if a loss is above that of uniform bytes, or is not a number."""
    return not all(loss <= math.log(256) for loss in losses)


def seconds_beside(base: dict[str, Any], name: str) -> float:
    """Return the time of a step of an exact row, taken as that of the row beside it is."""
    own = ROWS[name]
    if own.period == 1:
        return float(base["seconds"])
    return max(statistics.mean(took[: own.timed]) for took in base["took"])


def line(found: dict[str, Any], exact: dict[str, Any] | None) -> str:
    """Format a row."""
    base = found if exact is None else exact
    share, worse = found["sent"] / base["sent"], found["loss"] / base["loss"] - 1
    code = 1e3 * (found["processor"] - base["processor"])
    figures = (
        f"{found['sent'] / 1e3:9.1f} {found['across'] / 1e3:9.1f} {share:8.3f} {1 / share:7.1f} {found['rate']:6g}"
    )
    told = f"{found['loss']:8.4f} {found['spread']:7.4f} {100 * worse:+7.2f} %"
    figures += f" {'diverged':>{len(told)}}" if found["diverged"] else f" {told}"
    slow = " ".join(f"{1e3 * seconds:8.1f}" for seconds in (found["seconds"], found["after"], *found["faster"]))
    times = seconds_beside(base, found["row"]) / found["seconds"]
    return f"{found['row']:{WIDE}} {figures} {slow} {times:6.2f} {code:7.1f}"


def alone(found: dict[str, Any], exact: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Print and return rows of what a step takes of the link and of the processor alone (seconds), and the bound."""
    rows = list[dict[str, Any]]()
    for what, own, base in (
        ("link alone", found["across"] / SLOW, exact["across"] / SLOW),
        ("processor alone", found["processor"], exact["processor"]),
    ):
        rows.append({"row": f"{found['row']}: {what}", "seconds": own, "exact": base, "times": base / own})
        print(f"  {what:28} {1e3 * base:8.1f} ms of exact, {1e3 * own:8.1f} ms: {base / own:6.2f} times, not of a step")
    (link, _), several = [(row["exact"], row["seconds"]) for row in rows], cores()
    computing = exact["processor"] * ranks / several
    most = (computing + link[0]) / max(computing, link[1])
    rows.append({"row": f"{found['row']}: at most", "computing": computing, "cores": several, "times": most})
    print(f"  {'at most':28} {1e3 * computing:8.1f} ms of computing on {several} cores: {most:6.2f} times")
    code, saved = found["processor"] - exact["processor"], exact["across"] - found["across"]
    below = 8e-6 * saved / code if code > 0 else None  # None: on any link
    rows.append({"row": f"{found['row']}: pays below", "mbit": below})
    print(f"  {'pays below':28} {'any link' if below is None else f'{below:.0f} Mbit/s'}", flush=True)
    return rows


def coding(repeats: int = 5) -> list[dict[str, Any]]:
    """Measure each compressor on one core; print and return rows."""
    levels = resolve(COMPRESSORS["sdp4bit"].made)()
    made: dict[str, Compressor] = {"sdp4bit, 8 bits": levels.within, "sdp4bit, 4 bits": levels.across}
    made |= {name: resolve(own.made)() for name, own in COMPRESSORS.items() if name != "sdp4bit"}
    made |= {name: resolve(own)() for name, own in WEIGHT_CODES.items()}
    x, table, threads = stream(0, "values").normal(0, CODED), list[dict[str, Any]](), torch.get_num_threads()
    torch.set_num_threads(1)
    print(f"{'compressor':20} encode decode   bits a value   pays below, Mbit/s")
    for name, one in made.items():
        random, code = stream(0, name), one.encode(x, stream(0, name))
        acts = partial(one.encode, x, random), partial(one.decode, code, CODED, random)
        seconds = [min(_seconds(act) for _ in range(repeats)) for act in acts]
        encode, decode = (x.nbytes / own / 1e9 for own in seconds)
        bits, below = 8 * code.nbytes / CODED, 8 * (x.nbytes - code.nbytes) / sum(seconds) / 1e6
        row = {"row": "coding", "compressor": name, "encode": encode, "decode": decode}
        table.append({**row, "bits": bits, "pays_below": below})
        print(f"{name:20} {encode:6.3f} {decode:6.3f} {bits:14.3f} {below:20.0f}", flush=True)
    torch.set_num_threads(threads)
    return table


def _seconds(act: Callable[[], Any]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def main() -> None:
    parser = benchmark_parser(__doc__, "a smaller model, fewer steps and rows")
    parser.add_argument("--only", default="", help="text in the names of rows; the exact ones run too")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data" / "gsm8k")
    parser.add_argument("--steps", type=int, default=0, help=f"default 300, with --quick 12; a multiple of {WHOLE}, up")
    parser.add_argument("--seeds", default="", help="default 0,1,2, with --quick and of lans 0")
    parser.add_argument("--shape", choices=SHAPES, default="", help="of the model; default full, with --quick quick")
    parser.add_argument("--lr", type=float, default=0.0, help="of all rows, in place of their own rates")
    parser.add_argument("--paced", type=float, default=0.0, help="seconds that the backward pass of a layer sleeps")
    parser.add_argument("--ranks", type=int, default=RANKS, help="data ranks, a multiple of two; default 4")
    parser.add_argument("--samples", type=int, default=0, help="of a run; lans: 16384, dynamic: 8192 by default")
    parser.add_argument("--list", action="store_true", help="print the names of all rows")
    options = parser.parse_args()
    study = [*lans_rows(quick=options.quick), *dynamic_rows(quick=options.quick)]
    if options.list:
        print("\n".join([*ROWS, "coding", *study]))
        return
    studies = options.only.startswith(("lans", "dynamic"))
    known = study if studies else ["coding"] if options.only == "coding" else [*ROWS]
    wanted = [name for name in known if options.only in name and (options.only or not options.quick or name in QUICK)]
    if not wanted:
        raise SystemExit(f"--only {options.only!r} is in no name of a row; --list prints them")
    if not (options.data / "train.jsonl").is_file():
        raise SystemExit(f"no train.jsonl in {options.data}; give the folder of GSM8K's files with --data")
    lines = (options.data / "train.jsonl").read_text().splitlines()[: 500 if options.quick else None]
    shape = options.shape or ("quick" if options.quick else "full")
    problems = [f"{one['question']}\n{one['answer']}" for one in map(json.loads, lines)]
    problems = [text.encode("ascii", "ignore").decode() for text in problems]
    if options.only == "coding":
        write_rows(options.json, coding())
        return
    one_seed = options.quick or options.only.startswith("lans")
    seeds = [int(seed) for seed in (options.seeds or ("0" if one_seed else "0,1,2")).split(",")]
    if studies:
        how: Any = (seeds, options.lr, options.samples, options.json)
        studied(options.only, SHAPES[shape], "\n".join(problems), *how, quick=options.quick)
        return
    texts = {False: "\n".join(problems), True: sorted_by_topic(problems)}
    names = [name for name in ROWS if name in {*wanted, *(ROWS[name].beside for name in wanted)}]
    steps, table, exact = options.steps or (12 if options.quick else 300), list[dict[str, Any]](), dict[str, Any]()
    steps = -(-steps // WHOLE) * WHOLE
    columns = (
        "       KB    across of exact   ratio   rate     loss  spread     worse       ms    after       1G      10G"
    )
    print(f"{f'row, after {steps} steps':{WIDE}} {columns}  times    code")
    for name in names:
        table.append(
            found := row(
                shape, texts[ROWS[name].by_topic], name, steps, seeds, options.lr, options.paced, options.ranks
            )
        )
        exact[name] = found
        print(line(found, exact[ROWS[name].beside or name]), flush=True)
        table += alone(found, exact[ROWS[name].beside], options.ranks) if ROWS[name].beside else []
        write_rows(options.json, table)


if __name__ == "__main__":
    main()
