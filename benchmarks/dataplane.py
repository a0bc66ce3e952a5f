"""Load mixtures as torch's DataLoader, torchdata's StatefulDataLoader and this package's source loaders do it.

    python benchmarks/dataplane.py [--quick] [--json PATH] [--cases index,mixture,large,schedule,lost]

index: tilth alone, sources that a process opens for the first time (cold: each record is read once, and written with
its index) and that another one opens again (warm): seconds, and those of its processor; us of it for a line; growth of
the peak of memory.

mixture: each rank is a process that has imported torch and sleeps for a step instead of computing. torch and torchdata:
each rank has a loader with one worker, whose dataset opens all sources: of JSON lines the offsets and the files, of
Parquet the files and the group of rows that it read last of each. tilth: ranks share two loader processes
(``roles.source_loaders``), which the first rank asks; the others get their rows from it by a socket. All tokenise with
the same code and one thread, in the one order that is given to them. The samples of every step must be equal, token by
token, before a row is written. Texts have 40 to 1,280 words by source.

Columns: memory: PSS of all processes at the last step; loading: without what the ranks have after their imports;
samples for a processor second of all processes behind the first batch; first: seconds to the first batch, cold, and
with what a first pass keeps on disk (offsets, or the index), and processor seconds of all processes in them; alone:
once more with the ranks, and what they start, before all other work of the machine (SCHED_RR); stall: mean wait of a
rank for the batch of a step.

large: mixture of one source larger than the limit of memory: data segments of a rank, and of what it forks, may grow by
``LIMIT`` MB after its imports; a loader process of tilth has as much in all. schedule: tilth alone, a source whose
weight rises; loaders planned from the steps ahead, or from the step before; stall: sum over the steps. lost: tilth
alone, a loader is killed as soon as it is asked for the samples of the next step, with a shadow and without; stall:
mean over the kills. In these two loaders are slow to start: they import a plugin that imports torch.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from driver import benchmark_parser, write_rows

from tilth.config.schema import DataConfig, MixtureSource
from tilth.core.random import stream
from tilth.data.mixture import Mixture
from tilth.data.origin import Home
from tilth.data.prompts import load_source
from tilth.data.records import parts_of
from tilth.data.template import template_names
from tilth.data.tokenizer import Tokenizer
from tilth.plan.loaders import place_loaders, plan_loaders
from tilth.roles.source_loader import LoaderSettings
from tilth.roles.source_loaders import SourceLoaders

RANK = Path(__file__).with_name("dataplane_rank.py")
CONTENDERS = ("torch", "torchdata", "tilth")
WORDS = ["the", "of", "a", "soil", "seed", "rain", "field", "harvest", "plough", "root", "leaf", "grain", "sun", "worm"]
SIZES = (40, 40, 80, 160, 1280)
"""Words of the samples of a source, by its number."""
SEED, BATCH = 0, 64
PROCESSES = 2
"""Loader processes of tilth."""
AHEAD = 8
"""Steps that a plan of loaders sees."""
STEP = 0.1
"""Seconds that a rank sleeps in a step."""
LIMIT = 128
"""MB of data that a process may have beside its imports where the source is larger."""
KILLED = (3, 5, 7)
"""Steps whose samples a loader is asked for when it is killed."""
WAIT = 240.0
"""Seconds after which a rank is lost."""


@dataclass
class Sources:
    """Files of a mixture, the tokenizer, and the order of their samples [steps, batch]."""

    folder: Path
    files: list[str]
    order: np.ndarray
    tokenizer: str = ""

    @property
    def samples(self) -> int:
        """Samples of all steps."""
        return int(self.order.size)


def make_sources(
    folder: Path,
    count: int,
    samples: int,
    steps: int,
    tokenizer: str,
    kind: str = "jsonl",
    sizes: Sequence[int] = SIZES,
) -> Sources:
    """Write ``count`` sources of as many samples each, and draw the order. sizes: words of a sample, by source."""
    folder.mkdir(parents=True)
    rng, files = np.random.default_rng(SEED), []
    for number in range(count):
        files.append(str(folder / f"s{number}.{kind}"))
        size = sizes[number % len(sizes)]
        words = [rng.choice(WORDS, rng.integers(size // 2, size * 3 // 2)) for _ in range(samples)]
        prompts = [f"source {number} sample {i}: {' '.join(own)}" for i, own in enumerate(words)]
        answers = [str(own[0]) for own in words]
        if kind == "parquet":
            pq.write_table(pa.table({"prompt": prompts, "answer": answers}), files[-1])
            continue
        lines = [json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in zip(prompts, answers)]
        Path(files[-1]).write_text("".join(lines))
    parts = [MixtureSource(name=Path(file).stem, source=file) for file in files]
    rows = np.split(np.arange(count * samples), count)
    order = Mixture(parts, rows, BATCH).take(stream(SEED, "examples"), 0, steps * BATCH).reshape(steps, BATCH)
    np.save(folder / "order.npy", order)
    return Sources(folder, files, order, tokenizer)


@dataclass
class Ranks:
    """Rank processes of one contender."""

    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def tell(self) -> None:
        """Let all ranks go on."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        """Return the next message of each rank."""
        found = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"a rank ended with exit code {process.wait(WAIT)}")
            found.append(json.loads(line))
        return found

    def tree(self) -> list[psutil.Process]:
        """Return the processes of all ranks and what these have started."""
        ranks = [psutil.Process(process.pid) for process in self.processes]
        return [one for rank in ranks for one in (rank, *rank.children(recursive=True))]

    def memory(self) -> float:
        """Return the proportional set size of all processes in MB."""
        return sum(_pss(one.pid) for one in self.tree())

    def seconds(self) -> float:
        """Return the processor seconds of all processes."""
        return sum(sum(one.cpu_times()[:4]) for one in self.tree())


def _pss(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]) / 1024


@contextmanager
def started(contender: str, sources: Sources, ranks: int, **more: Any) -> Iterator[Ranks]:
    """Start the ranks, and end them and their loaders."""
    pairs = [socket.socketpair() for _ in range(ranks - 1)]
    made = Ranks()
    job = {
        "contender": contender,
        "ranks": ranks,
        "files": sources.files,
        "order": str(sources.folder / "order.npy"),
        "tokenizer": sources.tokenizer,
        "home": str(sources.folder / "runs"),
        "steps": len(sources.order),
        "workers": PROCESSES if contender == "tilth" else 1,
        "ahead": 4,
        "limit_mb": 0,
        "kept": False,
        "step_s": STEP,
        **more,
    }
    threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        for rank in range(ranks):
            fds = [ours.fileno() for ours, _ in pairs] if rank == 0 else [pairs[rank - 1][1].fileno()]
            made.processes.append(
                subprocess.Popen(
                    [sys.executable, str(RANK), json.dumps(job | {"rank": rank, "fds": fds})],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=fds,
                    env={**os.environ, **threads},
                )
            )
        for pair in pairs:
            for end in pair:
                end.close()
        yield made
    finally:
        _end(made)


def _end(ranks: Ranks) -> None:
    """Let the ranks end, and kill those that do not."""
    for process in ranks.processes:
        assert process.stdin is not None
        process.stdin.close()
    deadline = time.monotonic() + 20
    for process in ranks.processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for one in psutil.Process(process.pid).children(recursive=True):
                one.kill()
            process.kill()
            process.wait()


@dataclass
class Figures:
    """What one pass of a contender took, and the samples that its ranks saw, in order."""

    row: dict[str, Any]
    seen: list[list[list[int]]]


def measured(contender: str, sources: Sources, ranks: int, **more: Any) -> Figures:
    """Run all steps once."""
    with started(contender, sources, ranks, **more) as made:
        made.hear()
        alone, start = made.memory(), made.seconds()
        made.tell()
        first = max(one["first"] for one in made.hear())
        before = made.seconds()
        made.tell()
        found = made.hear()
        spent, whole = made.seconds() - before, made.memory()
    stalls = np.array([one["stalls"] for one in found])
    row = {
        "memory_mb": whole,
        "loading_mb": whole - alone,
        "samples_per_processor_s": sources.samples / spent,
        "first_s": first,
        "first_processor_s": before - start,
        "stall_ms": 1000 * float(stalls.mean()),
        "stall_p95_ms": 1000 * float(np.percentile(stalls, 95)),
    }
    seen = [[list(one["seen"][step]) for one in found] for step in range(len(sources.order))]
    return Figures(row, [[pair for one in own for pair in one] for own in seen])


def first_batch(contender: str, sources: Sources, ranks: int, *, alone: bool = False, **more: Any) -> float | None:
    """Return the seconds to the first batch. alone: before all other work of the machine; None if not permitted."""
    with started(contender, sources, ranks, steps=1, **more) as made:
        made.hear()
        try:
            for process in made.processes if alone else ():
                os.sched_setscheduler(process.pid, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            return None
        made.tell()
        return max(float(one["first"]) for one in made.hear())


def equal(figures: dict[str, Figures], sources: Sources) -> None:
    """Raise unless every contender gave each step's samples, in order, with the same tokens."""
    for step, rows in enumerate(sources.order):
        found = {name: sorted(map(tuple, one.seen[step])) for name, one in figures.items()}
        first = next(iter(found.values()))
        assert sorted(i for i, _ in first) == sorted(rows.tolist()), f"step {step} has other samples"
        assert all(other == first for other in found.values()), f"step {step}: tokens differ"


def compared(
    case: str, sources: Sources, ranks: int, contenders: Sequence[str], limit: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield a row for each contender: the first batch of a cold pass, then a pass with what that has kept on disk,
    within a limit of memory in MB."""
    figures, firsts = dict[str, Figures](), dict[str, dict[str, float | None]]()
    for name in contenders:
        cold = first_batch(name, sources, ranks)
        figures[name] = measured(name, sources, ranks, kept=True, limit_mb=limit)
        quiet = first_batch(name, sources, ranks, alone=True, kept=True, limit_mb=limit)
        firsts[name] = {"first_cold_s": cold, "first_alone_s": quiet}
    equal(figures, sources)
    size = sum(Path(file).stat().st_size for file in sources.files) / 1e6
    kind = Path(sources.files[0]).suffix[1:]
    for name, one in figures.items():
        row = {"case": case, "contender": name, "format": kind, "sources": len(sources.files), "ranks": ranks}
        yield row | {"source_mb": size, "limit_mb": limit, **one.row, **firsts[name]}


# ---- tilth alone ----


def indexed(sources: Sources) -> Iterator[dict[str, Any]]:
    """Yield the row of sources that one process opens cold, and another one warm."""
    job = {"contender": "index", "files": sources.files, "home": str(sources.folder / "runs")}
    row: dict[str, Any] = {"case": "index", "contender": "tilth", "sources": len(sources.files)}
    for state in ("cold", "warm"):
        command = [sys.executable, str(RANK), json.dumps(job)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        row |= {"lines": found["lines"], "fingerprint": found["fingerprint"][:16]}
        row |= {f"{state}_{key}": found[key] for key in ("seconds", "processor_s", "peak_mb")}
    yield row | {"line_us": 1e6 * row["cold_processor_s"] / row["lines"]}


def alone(sources: Sources, plan: list[dict[str, float]], shadows: int = 0) -> SourceLoaders:
    """Start loaders in this process, as the first rank does; each imports a plugin that imports torch."""
    slow = sources.folder / "slow.py"
    slow.write_text("import torch\n")
    parts = tuple(MixtureSource(name=Path(file).stem, source=file) for file in sources.files)
    data = DataConfig(source="", mixture=parts)
    opened = parts_of(load_source(data, home=Home(str(sources.folder / "runs"))).source)
    tokenizer = Tokenizer.load(Path(sources.tokenizer))
    settings = LoaderSettings(template_names(data), tokenizer, 4096, plugins=(str(slow),))
    return SourceLoaders(dict(zip([part.name for part in parts], opened)), settings, plan, shadows=shadows)


def walk(
    loaders: SourceLoaders,
    order: np.ndarray,
    act: Callable[[int], None],
    asked: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Take all steps, a step ahead; return the seconds that each waited. act: called before a step; asked: once its
    samples are asked for."""
    stalls = []
    for step, rows in enumerate(order):
        act(step)
        began = time.perf_counter()
        loaders.take("examples", rows.tolist())
        stalls.append(time.perf_counter() - began)
        loaders.ask("examples", order[step + 1 : step + 2].ravel().tolist())
        asked(step + 1)
        time.sleep(STEP * 3)
    return stalls


def ramp(sources: Sources, steps: int) -> tuple[np.ndarray, list[dict[str, float]]]:
    """Return the order, and the samples of each source by step: half way the last one gets 0.8 of the weight."""
    count, rng = len(sources.files), np.random.default_rng(SEED)
    each = int(sources.order.max() + 1) // count
    after = np.full(count, 0.2 / (count - 1))
    after[-1] = 0.8
    picks = [rng.choice(count, BATCH, p=after if step >= steps // 2 else np.eye(count)[0]) for step in range(steps)]
    order = np.array([own * each + rng.integers(each, size=BATCH) for own in picks])
    return order, [{f"s{n}": float((own == n).sum()) for n in set(own.tolist())} for own in picks]


def followed(sources: Sources, steps: int, seen: Callable[[list[Any], int], list[Any]]) -> dict[str, Any]:
    """Walk over a ramp with loaders planned from the weights that are seen at each step."""
    order, weights = ramp(sources, steps)
    costs = {Path(file).stem: float(Path(file).stat().st_size) for file in sources.files}
    most, used = len(costs) + PROCESSES, list[int]()
    now, places = dict[str, int](), list[dict[str, float]]()

    def follow(step: int) -> None:
        nonlocal now, places
        now = plan_loaders(costs, seen(weights, step), PROCESSES, now, cap=most)
        if (new := place_loaders(now, costs, most, places)) != places:
            loaders.follow(new)
        places = new
        used.append(len(loaders.pids()))

    loaders = alone(sources, [])
    try:
        stalls = walk(loaders, order, follow)
    finally:
        loaders.close()
    half = stalls[steps // 2 :]
    processes = {"processes_before": used[steps // 4], "processes_after": used[-1]}
    return {"stall_s": sum(half), "worst_stall_s": max(half), **processes}


def scheduled(sources: Sources, steps: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way to plan."""
    ways: dict[str, Callable[[list[Any], int], list[Any]]] = {
        "steps ahead": lambda weights, step: weights[step : step + AHEAD],
        "step before": lambda weights, step: weights[max(0, step - 1) : max(1, step)],
    }
    for name, seen in ways.items():
        yield {"case": "schedule", "contender": f"tilth, {name}", **followed(sources, steps, seen)}


def settle(loaders: SourceLoaders) -> None:
    """Wait until no loader computes: all have started and made what they were asked for."""
    before, now = -1.0, 0.0
    while now > before:
        before = now
        time.sleep(2.0)
        now = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in loaders.pids())


def after_kills(sources: Sources, shadows: int) -> np.ndarray:
    """Return the stalls of steps, float64 [steps], of which those in ``KILLED`` have lost their loader."""
    loaders = alone(sources, [{Path(file).stem: 1.0 for file in sources.files}], shadows)

    def ready(step: int) -> None:
        if step + 1 in KILLED:
            settle(loaders)

    def kill(step: int) -> None:
        if step in KILLED:
            os.kill(loaders.pids()[0], signal.SIGKILL)

    try:
        return np.array(walk(loaders, sources.order[: max(KILLED) + 2], ready, kill))
    finally:
        loaders.close()


def lost(sources: Sources) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of shadows."""
    for shadows in (0, 1):
        stalls, own = after_kills(sources, shadows), list(KILLED)
        usual = float(np.median(np.delete(stalls, [0, *own])))
        row = {"case": "lost", "contender": "tilth", "shadows": shadows, "stall_s": stalls[own].mean()}
        yield row | {"worst_stall_s": stalls[own].max(), "usual_stall_s": usual}


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    print("  ".join(f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)


def main(options: Namespace) -> None:
    """Measure all, and write the rows after each case."""
    contenders = [name for name in CONTENDERS if name != "torchdata" or find_spec("torchdata")]
    if "torchdata" not in contenders:
        print("torchdata is not installed, so that StatefulDataLoader is left out")
    rows: list[dict[str, Any]] = []

    def add(more: Iterable[dict[str, Any]]) -> None:
        for row in more:
            show(row)
            rows.append(row)
            write_rows(options.json, rows)

    with tempfile.TemporaryDirectory() as name:
        folder, chosen = Path(name), options.cases.split(",")
        texts = [" ".join(np.random.default_rng(i).choice(WORDS, 50)) + "source sample 0123456789:" for i in range(99)]
        Tokenizer.train(texts, 400).save(folder)
        steps = 5 if options.quick else 20
        five = make_sources(folder / "five", 5, 200, max(steps, 10), name)
        if "index" in chosen:
            for count, samples in [(1, 20_000), (5, 1_000)] if options.quick else [(1, LARGE), (300, 3_000)]:
                add(indexed(make_sources(folder / f"index-{count}", count, samples, 1, name, sizes=SIZES[:1])))
        if "schedule" in chosen:
            add(scheduled(five, 8 if options.quick else 16))
        if "lost" in chosen:
            add(lost(five))
        if "mixture" in chosen:
            cases = [(5, 2, "jsonl")] if options.quick else FULL
            for count, ranks, kind in cases:
                sources = make_sources(folder / f"{count}-{ranks}-{kind}", count, 200, steps, name, kind)
                add(compared("mixture", sources, ranks, contenders))
        if "large" in chosen and not options.quick:
            add(compared("large", make_sources(folder / "large", 1, LARGE, 5, name), 2, contenders, LIMIT))


FULL = [(300, 4, "parquet"), (300, 4, "jsonl"), (300, 2, "parquet"), (5, 4, "parquet"), (5, 2, "parquet")]
"""Sources, ranks and format of the cases."""
LARGE = 1_000_000
"""Samples of the large source, 200 MB."""


if __name__ == "__main__":
    parser = benchmark_parser(__doc__, "5 sources, 2 ranks, nothing large")
    parser.add_argument("--cases", default="index,mixture,large,schedule,lost", help="what is measured, by commas")
    main(parser.parse_args())
