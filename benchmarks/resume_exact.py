"""Kill a run at twenty moments, go on with the same command each time, and compare with the run that was left alone.

    python benchmarks/resume_exact.py [--kills 20] [--quick] [--json PATH] [--backend inline|local|both] [--jobs 1]

The run is the command ``tilth run`` in a process of its own: addition-grpo shortened to about a minute, with a
checkpoint every 5 steps and an average of the weights; ``local`` is the same on two worker processes, its weights
divided (fsdp). Moments are drawn over the whole run by a seeded generator: after which committed step, and how long
after it, so that a busy machine moves them little. Every second kill is aimed: from its moment on it waits until the
process is in a given phase (saving, generating, publishing, training in turn) and strikes there. A kill is SIGKILL for
the controller's process group and its workers at once.

Where a run was when it was killed is what a thread of each of its processes had said (``watch/sitecustomize.py``). The
last column says what follows from the comparison of: weights, optimizer state, average and all objects of the last
checkpoint, bit for bit; the best evaluation; metrics.jsonl but for times, rates and memory; trajectories; the files of
the model. The number of the attempt is left out everywhere. Exit status 1 unless every run is equal.

--quick: 2 kills inline of a run of some seconds. --jobs: runs at the same time; nothing here is a measurement of time.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from driver import benchmark_parser, write_rows

from tilth.checkpoint import latest, open_checkpoint, read_best
from tilth.runs.readers import read_metrics, read_state, read_trajectories

ROOT = Path(__file__).parent.parent
WATCH = Path(__file__).parent / "watch"
IDLE = "starting or ending"
"""What a process says that does nothing of a run."""
COMMAND = [sys.executable, "-m", "tilth", "run", "addition-grpo"]
RUN = ("train.threads=1", "reward.timeout=120", "train.ema=0.99", "supervised.until=1", "run.name=run")
FULL = ("supervised.steps=80", "algorithm.steps=60", "run.save_every=5", "run.eval_every=10", "run.eval_prompts=128")
QUICK = (
    "model.hidden=32", "model.layers=2", "data.digits=1", "rollout.prompts=16", "supervised.batch=64",
    "supervised.steps=20", "algorithm.steps=20", "run.save_every=4", "run.eval_every=5", "run.eval_prompts=32",
)  # fmt: skip
BACKENDS = {"inline": (), "local": ("cluster.backend=local", "cluster.workers=2", "policy.layout.fsdp=2")}
TIMELIKE = ("seconds", "attempt", "mfu", "memory/", "bytes/", "balance/idle", "kv_cache_usage/")
"""Fields of a record that a comparison leaves out; and those that the run itself declares in the units below."""
TIME_UNITS = ("s", "tokens/s", "bytes/s")
LIMIT = 600.0
"""Seconds after which a run counts as hanging."""
AIMS = ("saving", "generating", "publishing", "training")


@dataclass(frozen=True)
class Moment:
    """When to kill: so many seconds after this committed step, and then in this phase ("": wherever it is)."""

    step: int
    after: float
    aim: str = ""


@dataclass
class Row:
    """One killed run."""

    backend: str
    number: int
    moment: Moment
    step: int
    """Committed steps when it was killed."""
    phase: str
    resumed_from: int
    """Step of the checkpoint that the second attempt went on from, -1 where the first one had just ended."""
    differs: list[str]


class Child:
    """One attempt: the command in a process group of its own."""

    def __init__(self, folder: Path, command: Sequence[str], run: str = "run") -> None:
        """folder: for what it says and what is said about it. run: name of the run's directory in it."""
        self.folder, self.run = folder, folder / run
        self.watch = folder / "watch"
        shutil.rmtree(self.watch, ignore_errors=True)
        self.watch.mkdir(parents=True)
        paths = [str(WATCH), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "WATCH": str(self.watch), "OMP_NUM_THREADS": "1"}
        with open(folder / "output.txt", "ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **more},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def end(self) -> None:
        """Wait until it has ended well. RuntimeError with the end of its output otherwise."""
        try:
            code: int | str = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()
            code = f"none within {LIMIT:g} s"
        if code:
            raise RuntimeError(f"{self.folder}: exit status {code}\n{self.said()}")

    def said(self) -> str:
        """The end of what it wrote."""
        return (self.folder / "output.txt").read_text(errors="replace")[-3000:]

    def steps(self) -> int:
        """Committed steps; before the run goes on, those of the attempt before."""
        with suppress(FileNotFoundError):
            return (self.run / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def wait_for(self, moment: Moment) -> str:
        """Sleep until then: the phase that it is in, "" if it ended before."""
        until = time.monotonic() + LIMIT
        while self.steps() < moment.step:
            if not self.alive() or time.monotonic() > until:
                return ""
            time.sleep(0.002)
        time.sleep(moment.after)
        while self.alive() and time.monotonic() < until:
            phase = self.phase()
            if moment.aim in phase:
                return phase if self.alive() else ""
            time.sleep(0.001)
        return ""

    def alive(self) -> bool:
        """Whether the controller has not ended."""
        return self.process.poll() is None

    def members(self) -> list[psutil.Process]:
        """The controller and its workers; their reaper, which ends them if the controller is killed, is left out."""
        with suppress(psutil.NoSuchProcess):
            controller = psutil.Process(self.process.pid)
            below = controller.children(recursive=True)
            return [controller, *(p for p in below if not _is_reaper(p))]
        return []

    def phase(self) -> str:
        """What the run is doing, in words: a main thread, the controller's first, and whether anybody writes behind it.

        The first process may be one that only starts the controller again.
        """
        files = sorted(self.watch.iterdir(), key=lambda file: int(file.name))
        said = [text for file in files if (text := file.read_text().strip())]
        busy = [text for text in said if not text.startswith(IDLE)]
        found = next(iter(busy or said), "starting")
        behind = any("saving behind" in text for text in said) and "saving" not in found
        return f"{found}, saving behind" if behind else found

    def kill(self) -> None:
        """SIGKILL for all of it; returns when none is left."""
        members = self.members()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in members:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(members, timeout=30)


def _is_reaper(process: psutil.Process) -> bool:
    return any(part.endswith("reaper.py") for part in _arguments(process))


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# The comparison


def differences(run: Path, whole: Path) -> list[str]:
    """What is not equal in two finished runs, a line each."""
    found = list[str]()
    if (state := read_state(run)["state"]) != "finished":
        found.append(f"state {state}")
    found += _checkpoints(run / "checkpoints", whole / "checkpoints")
    found += _metrics(_numbers(run), _numbers(whole))
    if not read_trajectories(run).equals(read_trajectories(whole)):
        found.append(f"trajectories: {_columns(run, whole)}")
    model = sorted(p.name for p in (whole / "model").iterdir())
    if model != sorted(p.name for p in (run / "model").iterdir()):
        found.append("files of the model")
    found += [f"model/{n}" for n in model if (run / "model" / n).read_bytes() != (whole / "model" / n).read_bytes()]
    return found


def _checkpoints(ours: Path, theirs: Path) -> Iterator[str]:
    a, b = latest(ours), latest(theirs)
    if a is None or b is None or a.name != b.name:
        yield f"last checkpoint {a} and {b}"
        return
    one, other = open_checkpoint(a), open_checkpoint(b)
    if one.groups != other.groups:
        yield f"groups {one.groups} and {other.groups}"
        return
    for group in one.groups:
        if one.names(group) != other.names(group):
            yield f"names of group {group}"
            continue
        for name in one.names(group):
            if not same_bits(one.read(group, name), other.read(group, name)):
                yield f"{group}/{name}"
    for key in sorted({*one.objects, *other.objects}):
        mine, yours = (_json(_lasting(c.objects.get(key))) for c in (one, other))
        if mine != yours:
            yield f"object {key}: {mine[:80]} and {yours[:80]}"
    if read_best(ours) != read_best(theirs):
        yield f"best {read_best(ours)} and {read_best(theirs)}"
    names = [sorted(p.name for p in root.iterdir()) for root in (ours, theirs)]
    if names[0] != names[1]:
        yield f"checkpoints {names[0]} and {names[1]}"


def _lasting(value: Any) -> Any:
    """Without the number of the attempt, which is not the same where a run was killed."""
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if key != "attempt"}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in shape, dtype and every bit: a NaN equals itself, and 0 is not -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(one, other)


def _numbers(run: Path) -> list[dict[str, Any]]:
    """Committed metrics, those left out that measure time or memory."""
    schema = json.loads((run / "metrics_schema.json").read_text())
    units = {name: metric["unit"] for name, metric in schema.items()}
    family = {name[:-1] for name, unit in units.items() if name.endswith("/*") and unit in TIME_UNITS}
    plain = {name for name, unit in units.items() if unit in TIME_UNITS}
    left = (*TIMELIKE, *family)
    return [{k: v for k, v in r.items() if k not in plain and not k.startswith(left)} for r in read_metrics(run)]


def _metrics(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The first difference, and how many records differ."""
    if len(ours) != len(theirs):
        yield f"{len(ours)} and {len(theirs)} records of metrics"
        return
    wrong = [(a, b) for a, b in zip(ours, theirs) if _json(a) != _json(b)]
    if wrong:
        a, b = wrong[0]
        key = next(k for k in {**a, **b} if _json(a.get(k)) != _json(b.get(k)))
        yield f"{len(wrong)} records of metrics, first step {b['step']} {key}: {a.get(key)} and {b.get(key)}"


def _columns(run: Path, whole: Path) -> str:
    ours, theirs = read_trajectories(run), read_trajectories(whole)
    if ours.num_rows != theirs.num_rows:
        return f"{ours.num_rows} and {theirs.num_rows} rows"
    return f"columns {[n for n in theirs.column_names if n not in ours.column_names or ours[n] != theirs[n]]}"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


# The runs


def moments(seed: str, count: int, whole: Path, aimed: bool = True) -> list[Moment]:
    """Moments over the duration of the whole run, the seconds before its first step included. Every second is aimed."""
    dice, times = random.Random(seed), [0.0, *(r["seconds"] for r in read_metrics(whole))]
    end = max(times[-1], read_state(whole)["seconds"])
    found = []
    for number in range(count):
        aim = AIMS[number // 2 % len(AIMS)] if aimed and number % 2 else ""
        second = dice.uniform(0.0, 0.9 * times[-1] if aim else end)
        step = max(i for i, t in enumerate(times) if t <= second)
        found.append(Moment(step, second - times[step], aim))
    return found


def kill(first: Child, moment: Moment) -> tuple[int, str]:
    """Kill at the moment: committed steps then, and phase. RuntimeError if it failed before."""
    try:
        phase = first.wait_for(moment)
        step = first.steps()
    finally:
        first.kill()
    if not phase and first.process.returncode:
        raise RuntimeError(f"{first.folder}: ended with {first.process.returncode} before its kill\n{first.said()}")
    return step, phase or "ended before"


def trial(folder: Path, backend: str, keys: Sequence[str], number: int, moment: Moment, whole: Path) -> Row:
    """One killed run as a row; what fails is a difference."""
    command = [*COMMAND, f"run.dir={folder}", *keys]
    try:
        step, phase = kill(first := Child(folder, command), moment)
        if not (first.run / "run.json").exists() or read_state(first.run)["state"] != "finished":
            Child(folder, command).end()
    except RuntimeError as error:
        return Row(backend, number, moment, moment.step, "?", -1, [str(error)])
    attempts = read_state(folder / "run")["attempts"]
    resumed = attempts[-1].get("from_step", 0) if len(attempts) > 1 else 0 if step == 0 else -1
    return Row(backend, number, moment, step, phase, resumed, differences(folder / "run", whole))


def trials(folder: Path, backend: str, options: argparse.Namespace) -> Iterator[Row]:
    """The run that is left alone, and then the others."""
    keys = (*RUN, *(QUICK if options.quick else FULL), *BACKENDS[backend])
    began = time.monotonic()
    Child(folder / "whole", [*COMMAND, f"run.dir={folder / 'whole'}", *keys]).end()
    whole = folder / "whole" / "run"
    print(f"{backend}: {read_metrics(whole)[-1]['step']} steps, {time.monotonic() - began:.0f} s uninterrupted")
    with ThreadPoolExecutor(options.jobs) as jobs:
        drawn = enumerate(moments(f"{options.seed} {backend}", options.kills, whole), 1)
        waiting = [jobs.submit(trial, folder / f"{i}", backend, keys, i, m, whole) for i, m in drawn]
        for future in waiting:
            yield future.result()


HEAD = f"{'backend':8} {'':3} {'moment':>12} {'aimed at':11} {'steps':>5} {'killed while':26} {'from':>5}"


def line(row: Row) -> str:
    """A row for people."""
    said = "bit-equal" if not row.differs else f"DIFFERS: {'; '.join(row.differs)}"
    moment = f"{row.moment.step}+{row.moment.after:.2f} s"
    resumed = row.resumed_from if row.resumed_from >= 0 else "-"
    found = f"{row.number:3} {moment:>12} {row.moment.aim or '-':11} {row.step:5} {row.phase:26} {resumed:>5}"
    return f"{row.backend:8} {found}  {said}"


def main() -> None:
    parser = benchmark_parser(__doc__, "two kills, inline only")
    parser.add_argument("--kills", type=int, default=0, help="default 20, with --quick 2")
    parser.add_argument("--backend", choices=("inline", "local", "both"), default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.kills = options.kills or (2 if options.quick else 20)
    backend = options.backend or ("inline" if options.quick else "both")
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        for name in BACKENDS if backend == "both" else (backend,):
            for row in trials(Path(folder) / name, name, options):
                if not rows:
                    print(HEAD)
                rows.append(row)
                print(line(row), flush=True)
    equal = sum(not row.differs for row in rows)
    print(f"{equal} of {len(rows)} bit-equal")
    write_rows(options.json, [asdict(row) for row in rows])
    sys.exit(equal != len(rows))


if __name__ == "__main__":
    main()
