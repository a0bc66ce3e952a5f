"""Does ``tilth trace whatif`` name what made a run slow, and how fast it would be without? Injected causes, measured.

    python benchmarks/causes.py [--quick] [--json PATH] [--only TEXT] [--keep FOLDER] [--again]

Each run is the command ``tilth run`` with two workers of one thread, whose processes ``causes_inject/sitecustomize.py``
has made slow in one way: one rank computes 1.3 to 2 times as long, one rank gets the longest rows, one rank collects
garbage in its forward passes, or every collective takes the time of a slow network. The cause is off for 20 steps and
on for 20, in turn. Every window is analysed alone: with the cause its kind and rank must be named first; without it
nothing should be. What a step is said to take without the cause is compared with the windows before and after, in which
it really was off (medians of steps, and the mean of the two). Where these two differ by more than 25 % of their mean
the machine had other work, and that window is no measurement of the prediction.

Work: "real" is what the model computes; "sleep" is a tiny model whose passes also sleep a time that is linear in their
tokens (calibrated sleep, so that more ranks than cores can work at the same time). --again: analyse the runs that are
in FOLDER. --quick: one short run, which sleeps.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from driver import benchmark_parser, write_rows

from tilth.analysis.events import Events, load
from tilth.analysis.run_trace import open_run
from tilth.analysis.run_whatif import analyse_events
from tilth.analysis.whatif import Cause, Replayed

ROOT = Path(__file__).parent.parent
INJECT = Path(__file__).parent / "causes_inject"
WINDOW, WINDOWS = 20, 5
WARM = 3
"""Steps at the beginning of each window that nothing sees: the first steps of a run are slow."""
STEADY = 0.25
"""By how much of their mean the windows around one may differ."""
SLEEP = 0.01, 2e-4
"""Seconds of a forward pass, and of each of its tokens; twice that backwards."""
LIMIT = 300.0
NONE = {"kind": "none", "rank": -1}
CALLED = {
    "slow": "slow-worker", "lengths": "sequence-lengths", "gc": "garbage-collection", "network": "communication",
    "none": "none",
}  # fmt: skip
"""What the analysis calls a kind."""
KEYS = (
    "train.threads=1", "cluster.backend=local", "run.name=run", "run.eval_prompts=8", "run.save_every=1000",
    "supervised.check_every=1000", "rollout.max_tokens=8", "model.layers=2", "model.heads=4", "model.context=512",
    "optimizer.lr=1e-3",
)  # fmt: skip
REAL = ("model.hidden=320", "model.head_dim=64", "supervised.batch=16", "train.micro_tokens=512")
SLEEPING = ("model.hidden=32", "model.head_dim=16", "model.layers=1", "train.micro_tokens=1024")


@dataclass(frozen=True)
class Case:
    """One run: what is injected into which work, on how many workers, under which layout."""

    name: str
    cause: Mapping[str, Any]
    work: str = "real"
    workers: int = 2
    spread: float = 0.7
    """Standard deviation of the logarithm of the lengths of answers."""
    keys: tuple[str, ...] = ()
    seed: int = 1

    def injected(self) -> dict[str, Any]:
        """As ``$CAUSE`` says it."""
        sleep = SLEEP if self.work == "sleep" else None
        return {"window": WINDOW, "sleep": sleep, "factor": 1.0, **self.cause}

    def command(self, folder: Path, windows: int) -> list[str]:
        """``tilth run`` for so many windows."""
        data = answers(folder / f"answers-{self.spread}.jsonl", self.spread)
        more = (*REAL,) if self.work == "real" else (*SLEEPING, f"supervised.batch={8 * self.workers}")
        size = (f"cluster.workers={self.workers}", f"supervised.steps={WINDOW * windows}", f"seed={self.seed}")
        where = (f"data.source={data}", f"run.dir={folder / self.name}")
        return [sys.executable, "-m", "tilth", "run", "sft", *where, *size, *KEYS, *more, *self.keys]


@dataclass
class Row:
    """What came of a run. Seconds are medians of steps."""

    name: str
    work: str
    workers: int
    injected: str
    """As ``said`` puts it."""
    on_seconds: float
    off_seconds: float
    named: list[str] = field(default_factory=list)
    """What was found likeliest in each window with the cause."""
    false: list[str] = field(default_factory=list)
    """What was found likeliest in each window without."""
    predicted_seconds: list[float] = field(default_factory=list)
    """Seconds of a step without the likeliest cause, by windows with one."""
    measured_seconds: list[float] = field(default_factory=list)
    """Seconds of a step in the windows around each of them."""
    steady: list[bool] = field(default_factory=list)
    """Whether these two were alike."""
    model_error: float = 0.0
    """The greatest of all windows."""

    @property
    def right(self) -> bool:
        """Whether each window with the cause names it, and its rank."""
        return all(name == self.injected for name in self.named)

    @property
    def errors(self) -> list[float]:
        """Of the predictions against what was measured, where the machine was steady."""
        return [p / m - 1 for p, m, s in zip(self.predicted_seconds, self.measured_seconds, self.steady) if s]

    @property
    def whole(self) -> float:
        """Of the whole run: the mean of what is predicted in all windows against that of what was measured."""
        return sum(self.predicted_seconds) / sum(self.measured_seconds) - 1


def said(kind: str, rank: int) -> str:
    """A cause in a word, with its rank where it has one."""
    return f"{kind}@{rank}" if rank >= 0 else kind


def slow(rank: int, factor: float) -> dict[str, Any]:
    """One rank computes so many times as long."""
    return {"kind": "slow", "rank": rank, "factor": factor}


def lengths(rank: int, blur: float = 0.0) -> dict[str, Any]:
    """One rank gets the longest rows; blur: noise on their order."""
    return {"kind": "lengths", "rank": rank, "blur": blur}


def garbage(rank: int, objects: int, every: int = 1) -> dict[str, Any]:
    """One rank collects garbage over a heap of so many objects, in every n-th step."""
    return {"kind": "gc", "rank": rank, "objects": objects, "every": every}


def network(bandwidth: float, latency: float) -> dict[str, Any]:
    """Every collective takes so many bytes a second, and a latency."""
    return {"kind": "network", "rank": -1, "bandwidth": bandwidth, "latency": latency}


FSDP = ("policy.layout.fsdp=2",)
CASES = (
    Case("slow-0", slow(0, 1.5)),
    Case("slow-1", slow(1, 1.5)),
    Case("slow-1-double", slow(1, 2.0)),
    Case("slow-0-fsdp", slow(0, 1.7), keys=FSDP),
    Case("lengths-0", lengths(0)),
    Case("lengths-1", lengths(1)),
    Case("lengths-1-wide", lengths(1), spread=1.0),
    Case("lengths-0-blurred", lengths(0, 0.3), spread=0.9),
    Case("gc-0", garbage(0, 400_000)),
    Case("gc-1", garbage(1, 400_000)),
    Case("gc-1-large", garbage(1, 800_000)),
    Case("gc-0-fsdp", garbage(0, 500_000), keys=FSDP),
    Case("network-100MB", network(100e6, 0.0)),
    Case("network-50MB", network(50e6, 0.0)),
    Case("network-latency", network(200e6, 0.05)),
    Case("network-fsdp", network(200e6, 0.005), keys=FSDP),
    Case("healthy", NONE),
    Case("healthy-wide", NONE, spread=1.0),
    Case("healthy-fsdp", NONE, keys=FSDP),
    Case("healthy-again", NONE, seed=2),
    *(
        Case(f"{name}-sleep-{workers}", cause, "sleep", workers)
        for workers in (2, 8)
        for name, cause in (
            ("slow", slow(workers - 2, 1.5)),
            ("lengths", lengths(workers // 4, 0.5)),
            ("gc", garbage(workers // 2, 200_000)),
            ("network", network(4e5, 0.01)),
            ("healthy", NONE),
        )
    ),
)
QUICK = ("slow-sleep-2",)


def answers(path: Path, spread: float) -> Path:
    """A file of prompts with answers of very different lengths, the same one each time."""
    if not path.exists():
        g = np.random.default_rng(0)
        sizes = np.exp(g.normal(4.3, spread, 1400)).clip(8, 450).astype(int)
        texts = ("".join(g.choice(list("abcdefgh "), n)) for n in sizes)
        path.write_text("".join(json.dumps({"prompt": f"{i}:", "answer": t}) + "\n" for i, t in enumerate(texts)))
    return path


def execute(case: Case, folder: Path, windows: int) -> Path:
    """The folder of the run. RuntimeError with what it said if it did not end well."""
    paths = os.pathsep.join((str(INJECT), str(ROOT / "src")))
    more = {"PYTHONPATH": paths, "CAUSE": json.dumps(case.injected()), "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "1000"}
    done = subprocess.run(
        case.command(folder, windows),
        cwd=ROOT,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if done.returncode:
        raise RuntimeError(f"{case.name}: exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return folder / case.name / "run"


def step_seconds(events: Events, steps: range) -> list[float]:
    """Of the controller's steps in a window, the first few left out."""
    rows = events.op.is_("step") & np.isin(events.step, np.arange(steps.start + WARM, steps.stop))
    return [float(s) for s in events.duration[rows] * 1e-9]


def windows_of(count: int) -> tuple[list[range], list[range]]:
    """Steps of the windows without the cause, and with it."""
    every = [range(1 + i * WINDOW, 1 + (i + 1) * WINDOW) for i in range(count)]
    return every[::2], every[1::2]


def measure(case: Case, run: Path, windows: int) -> Row:
    """The medians, and what the analysis of each window says."""
    events = load(run)
    off, on = windows_of(windows)
    usual = [statistics.median(step_seconds(events, w)) for w in off]
    slow = statistics.median(s for w in on for s in step_seconds(events, w))
    injected = said(CALLED[case.cause["kind"]], case.cause["rank"])
    row = Row(case.name, case.work, case.workers, injected, slow, statistics.mean(usual))
    for i, window in enumerate(on):
        name, seconds = likeliest(row, run, window)
        row.named.append(name)
        if injected != "none":
            around = usual[i : i + 2]
            row.predicted_seconds.append(seconds)
            row.measured_seconds.append(statistics.mean(around))
            row.steady.append(max(around) - min(around) <= STEADY * statistics.mean(around))
    row.false.extend(likeliest(row, run, window)[0] for window in off)
    return row


def analyse(run: Path, steps: range) -> tuple[object, Replayed, Cause]:
    """Analyse these steps of a run."""
    return analyse_events(open_run(run).events, steps)


def likeliest(row: Row, run: Path, window: range) -> tuple[str, float]:
    """The first finding in the steps of a window, and seconds without it; without findings those of the replay."""
    _, found, cause = analyse(run, range(window.start + WARM, window.stop))
    row.model_error = max(row.model_error, abs(found.error))
    if not cause.findings:
        return "none", float(np.median(found.replayed))
    first = cause.findings[0]
    rank = first.where[0].get("rank", -1) if first.where else -1
    return said(first.kind, int(rank)), first.seconds or 0.0


def show(rows: Iterable[Row]) -> None:
    """A line a run."""
    for r in rows:
        apart = ", ".join(
            f"{100 * (p / m - 1):+.0f} %" + "?" * (not s)
            for p, m, s in zip(r.predicted_seconds, r.measured_seconds, r.steady)
        )
        print(
            f"{r.name:<18} {r.work:<5} {r.workers} off {r.off_seconds:.3f} s, on {r.on_seconds:.3f} s: "
            f"{'right' if r.right else 'WRONG'} {', '.join(r.named)}; without it {apart}; off: {', '.join(r.false)}; "
            f"model error {100 * r.model_error:.1f} %",
            flush=True,
        )


def tell(rows: Sequence[Row]) -> None:
    """What came of all."""
    errors = [abs(e) for r in rows for e in r.errors]
    every = [abs(p / m - 1) for r in rows for p, m in zip(r.predicted_seconds, r.measured_seconds)]
    quiet = [name for r in rows for name in r.false]
    print(
        f"{sum(r.right for r in rows)} of {len(rows)} runs right; nothing in {quiet.count('none')} of {len(quiet)} "
        f"windows without a cause; {len(errors)} of {sum(len(r.steady) for r in rows)} windows steady enough to compare"
    )
    if errors:
        print(f"predictions in these: {spread(errors)}; in all {len(every)}: {spread(every)}")
        print(f"predictions of whole runs: {spread([abs(r.whole) for r in rows if r.measured_seconds])}")


def spread(errors: Sequence[float]) -> str:
    """In words."""
    near = sum(e <= 0.1 for e in errors)
    return f"off by {100 * statistics.median(errors):.1f} % (median), {near} of {len(errors)} within 10 %"


def chosen(only: str, *, quick: bool) -> Sequence[Case]:
    """The cases that were asked for."""
    return [case for case in CASES if (case.name in QUICK if quick else only in f"{case.name} {case.work}")]


def main() -> None:
    """Run and print."""
    arguments = benchmark_parser(__doc__, "one short run")
    arguments.add_argument("--again", action="store_true")
    arguments.add_argument("--only", default="", help="text in the name of a case or of its work (real, sleep)")
    arguments.add_argument("--keep", type=Path)
    asked = arguments.parse_args()
    windows, rows = 3 if asked.quick else WINDOWS, list[Row]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for case in chosen(asked.only, quick=asked.quick):
            if asked.again and not (folder / case.name / "run" / "report.html").exists():
                continue
            run = folder / case.name / "run" if asked.again else execute(case, folder, windows)
            rows.append(measure(case, run, windows))
            show(rows[-1:])
    tell(rows)
    write_rows(asked.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
