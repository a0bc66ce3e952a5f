"""Runs that survive: faults at random moments of real runs, and whether their ends are those of an undisturbed run.

    python benchmarks/faults.py [--quick] [--json PATH] [--rows 1,3,6] [--faults N] [--workers 2,4] [--seed N]

The rows are those of the fault matrix in docs/benchmarks.md. Each run is a process of its own with PER_RUN faults, one
after another, at a random time after random steps; nothing is tried twice. Detected: the verdict has the right kind and
names the right rank; seconds from the fault to the verdict, and to the moment when the run goes on. Equal: weights,
optimizer state, metrics and trajectories of the whole run are those of the undisturbed run, bit for bit. Left:
processes, session directories in shared memory, and temporary files that outlive the run. Row 0: ``torchrun`` with
--max-restarts and a plain loop that keeps no state, ranks killed in the same way.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from driver import benchmark_parser, write_rows

from tilth.runs.readers import read_metrics, read_trajectories

HANG_AFTER = 3.0
LIMIT = 240.0
"""Seconds for a run."""
PER_RUN = 4
TIMES = ("seconds", "attempt", "tokens_per_second/", "time/", "memory/", "mfu", "save/", "bytes/")
MOMENTS = (
    "forward", "backward", "reduce", "optimizer", "policy.save", "save.background", "policy.snapshot", "decode",
    "rollout.update_weights", "policy.load",
)  # fmt: skip
Fault = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One kind of fault. draw: faults of one run from (random, workers, steps); kinds: of verdicts that are right, ()
    if no recovery may happen; fallback: the same command is called with it."""

    number: int
    name: str
    draw: Callable[[random.Random, int, list[int]], list[Fault]]
    kinds: tuple[str, ...]
    named: bool = True
    prepare: Callable[[Path, random.Random], None] | None = None
    """Called before the command is started again after the controller was killed."""


def _each(*kinds: str, **more: Any) -> Callable[[random.Random, int, list[int]], list[Fault]]:
    """Faults of these kinds in turn, on random ranks at random times of the step after."""

    def draw(rng: random.Random, workers: int, steps: list[int]) -> list[Fault]:
        at = [rng.choice(MOMENTS)] if more.get("at") else [""]
        return [
            {"after": step, "delay": rng.uniform(0.0, 0.3), "kind": rng.choice(kinds), "rank": rng.randrange(workers),
             "workers": workers, "at": at[0] if not more.get("at") else rng.choice(MOMENTS[:-1])}
            for step in steps
        ]  # fmt: skip

    return draw


def _while_restoring(rng: random.Random, workers: int, steps: list[int]) -> list[Fault]:
    """Kill one rank, and another one while it loads its state."""
    found = []
    for step in steps:
        first, second = rng.sample(range(workers), 2)
        found.append({"after": step, "delay": 0.0, "kind": "kill", "rank": second, "at": "policy.load"})
        found.append({"after": step, "delay": 0.2, "kind": "kill", "rank": first})
    return found


def _damage(folder: Path, rng: random.Random) -> None:
    """Damage the newest checkpoint: a byte, the end, or a whole file is lost."""
    newest = max(folder.glob("runs/*/checkpoints/step-*"), default=None)
    if newest is None:
        return
    file = rng.choice(sorted(newest.glob("*.safetensors")))
    way = rng.choice(("byte", "end", "file"))
    if way == "file":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    if way == "byte":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data[: len(data) // 2] if way == "end" else data)


ROWS = [
    Row(1, "a rank is killed", _each("kill"), ("crash",)),
    Row(1, "all ranks are killed", _each("kill-all"), ("crash",), named=False),
    Row(1, "the controller is killed, same command again", _each("kill-controller"), ()),
    Row(2, "a rank is killed at a named moment", _each("kill", at=True), ("crash",)),
    Row(2, "a second rank is killed while state is restored", _while_restoring, ("crash",)),
    Row(3, "a rank is stopped", _each("stop"), ("hang",)),
    Row(3, "a rank loops without end", _each("busy"), ("hang",)),
    Row(3, "a rank holds the GIL", _each("gil"), ("hang",)),
    Row(6, "NaN in a weight of one rank", _each("nan"), ("not-finite", "corruption"), named=False),
    Row(7, "a bit of a weight of one rank flips", _each("flip"), ("corruption",), named=False),
    Row(8, "checkpoint damaged, controller killed", _each("kill-controller"), (), prepare=_damage),
    Row(9, "a rank's writes fail", _each("disk-full"), ("storage",)),
    Row(11, "the kernel kills a rank that exceeds its memory", _each("oom-kill"), ("out-of-memory",)),
    Row(12, "a process of the reward is killed", _each("kill-reward"), ()),
    Row(14, "any of kill, stop, busy, GIL, exception", _each("kill", "stop", "busy", "gil", "exception"),
        ("crash", "hang", "error"), named=False),
    Row(15, "no fault: all processes stand still 4 s", _each("freeze"), ()),
    Row(15, "no fault: the controller stands still 4 s", _each("freeze-controller"), ()),
    Row(15, "no fault: a reward takes 4 s", _each("slow-reward"), ()),
    Row(15, "no fault: garbage collections", _each("collect"), ()),
]  # fmt: skip


def recipe(folder: Path, workers: int, steps: int) -> dict[str, Any]:
    """A run of some seconds: one-digit addition, FSDP over all workers."""
    return {
        "seed": 3,
        "model": {"hidden": 16, "layers": 2, "heads": 2, "ffn": 32, "context": 16},
        "data": {"source": "addition", "digits": 1, "holdout": 0.2},
        "supervised": {"steps": 2, "batch": 16, "check_every": 2, "lr": 5e-3},
        "rollout": {"prompts": 8, "group": 4, "max_tokens": 4, "max_rows": 16},
        "algorithm": {"advantage": "grpo_no_std", "steps": steps - 2, "kl_coef": 0.05},
        "policy": {"layout": {"fsdp": workers}},
        "train": {"threads": 1},
        "cluster": {"backend": "local", "workers": workers},
        "guard": {"hang_after": HANG_AFTER, "restarts": 50},
        "run": {"dir": str(folder / "runs"), "eval_every": 5, "eval_prompts": 16, "save_every": 3},
    }


@dataclass
class Trial:
    """What came of one run."""

    events: list[dict[str, Any]] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    directory: Path | None = None
    left: list[str] = field(default_factory=list)
    error: str = ""


def carry_out(folder: Path, spec: dict[str, Any], row: Row | None, rng: random.Random) -> Trial:
    """Run a spec to its end; the command is called again when its process was killed."""
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps({**spec, "fallback": False}))
    (folder / "tmp").mkdir()
    token = str(folder / "token")
    env = {**os.environ, "TILTH_FAULTS": token, "TMPDIR": str(folder / "tmp")}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # torch keeps it for other processes
    command = [sys.executable, str(Path(__file__).with_name("faults_run.py")), str(folder)]
    trial, begin = Trial(), time.monotonic()
    with open(folder / "log", "ab") as log:
        while not trial.error:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            try:
                code = process.wait(max(1.0, LIMIT - (time.monotonic() - begin)))
            except subprocess.TimeoutExpired:
                trial.error = f"not ended within {LIMIT:g} s"
                break
            if code != -signal.SIGKILL:
                trial.error = "" if code == 0 else f"exit code {code}"
                break
            time.sleep(0.5)  # its reaper ends the workers
            if row is not None and row.prepare is not None:
                row.prepare(folder, rng)
                (folder / "spec.json").write_text(json.dumps({**spec, "fallback": True}))
    return _finished(trial, folder, token)


def _finished(trial: Trial, folder: Path, token: str) -> Trial:
    """Read what a run wrote, and look for what it left."""
    path = folder / "events.jsonl"
    trial.events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for event in trial.events:
        trial.directory = Path(event["directory"]) if event["what"] == "end" else trial.directory
        trial.error = event["error"] if event["what"] == "failed" else trial.error
        if event["what"] == "session" and Path(event["path"]).exists():
            trial.left.append(event["path"])
    for file in folder.glob("runs/*/recoveries.jsonl"):
        trial.recoveries = [json.loads(line) for line in file.read_text().splitlines()]
    until = time.monotonic() + 2.0
    while (found := _running(token)) and time.monotonic() < until:
        time.sleep(0.1)
    trial.left += [f"process {process.pid}" for process in found]
    for process in found:
        process.kill()
    trial.left += [str(file) for file in (folder / "tmp").iterdir()]
    if trial.directory is None and not trial.error:
        trial.error = "no end was written"
    return trial


def _running(token: str) -> list[psutil.Process]:
    """Processes of this run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TILTH_FAULTS") == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def same(ours: Path, plain: Path) -> str:
    """Return what differs between two runs, "" if nothing does."""
    files = [{file.name: file.read_bytes() for file in max(run.glob("checkpoints/step-*")).glob("*.safetensors")}
             for run in (ours, plain)]  # fmt: skip
    if files[0] != files[1]:
        return "weights or optimizer state"
    rows = [[{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_metrics(run)]
            for run in (ours, plain)]  # fmt: skip
    if json.dumps(rows[0], sort_keys=True) != json.dumps(rows[1], sort_keys=True):
        return "metrics"
    a, b = (read_trajectories(run).sort_by("id") for run in (ours, plain))
    return "" if a.num_rows and a.equals(b) else "trajectories"


def measured(trial: Trial, row: Row) -> dict[str, Any]:
    """Match the faults of a run with its recoveries; seconds to the verdict and until it goes on."""
    missed = {event["number"] for event in trial.events if event["what"] == "missed"}
    faults = [event for event in trial.events if event["what"] == "fault" and event["number"] not in missed]
    messages = [event for event in trial.events if event["what"] == "message"]
    verdicts = [event for event in messages if event["text"].startswith("after step")]
    resumed = [event for event in messages if event["text"].startswith("going on after")]
    right, detect, pause, unmatched = 0, list[float](), list[float](), list(faults)
    for recovery, verdict, onward in zip(trial.recoveries, verdicts, resumed):
        before = [one for one in unmatched if one["time"] <= verdict["time"]]
        named = [one for one in before if not row.named or {one["rank"]} == set(recovery["ranks"])]
        if not named or recovery["kind"] not in row.kinds:
            continue
        unmatched.remove(named[-1])
        right += 1
        detect.append(verdict["time"] - named[-1]["time"])
        pause.append(onward["time"] - named[-1]["time"])
    if "kill-controller" in {fault["kind"] for fault in faults}:
        pause = [_next_step(trial, fault["time"]) - fault["time"] for fault in faults]
    steps = [event["step"] for event in trial.events if event["what"] == "step"]
    return {
        "faults": len(faults), "missed": len(missed), "right": right, "recoveries": len(trial.recoveries),
        "detect": detect, "pause": pause, "again": len(steps) - len(set(steps)),
    }  # fmt: skip


def _next_step(trial: Trial, after: float) -> float:
    return next((e["time"] for e in trial.events if e["what"] == "step" and e["time"] > after), float("inf"))


def _steps(rng: random.Random, count: int) -> tuple[list[int], int]:
    """Steps after which faults happen, at least two apart, and the length of the run."""
    found, step = list[int](), 1
    for _ in range(count):
        step += rng.randint(1, 2)
        found.append(step)
        step += 1
    return found, 3 * PER_RUN + 3


def measure(row: Row, workers: int, faults: int, seed: int, root: Path, plain: Path) -> dict[str, Any]:
    """Run a row."""
    found, equal, errors, left, runs = list[dict[str, Any]](), 0, list[str](), list[str](), 0
    while runs * PER_RUN < faults:
        rng = random.Random(f"{seed}-{row.name}-{workers}-{runs}")
        steps, length = _steps(rng, min(PER_RUN, faults - runs * PER_RUN))
        folder = root / f"{ROWS.index(row)}-{workers}-{runs}"
        spec = {"recipe": recipe(folder, workers, length), "faults": row.draw(rng, workers, steps)}
        trial = carry_out(folder, spec, row, rng)
        differs = trial.error or same(trial.directory or plain, plain)
        equal += not differs
        errors += [differs.partition("\n")[0][:200]] if differs else []
        left += trial.left
        found.append(measured(trial, row))
        runs += 1
    return _summary(row, workers, runs, found, equal, errors, left)


def _summary(
    row: Row, workers: int, runs: int, found: Sequence[dict[str, Any]], equal: int, errors: list[str], left: list[str]
) -> dict[str, Any]:
    totals = {key: sum(one[key] for one in found) for key in ("faults", "missed", "right", "recoveries", "again")}
    seconds = {
        f"{name}_{how}": round(value, 2)
        for name in ("detect", "pause")
        if (values := [second for one in found for second in one[name]])
        for how, value in (("median", statistics.median(values)), ("max", max(values)))
    }
    return {
        "row": row.number, "fault": row.name, "workers": workers, "runs": runs, **totals, **seconds, "equal": equal,
        "left": len(left), "errors": errors, "what_is_left": left, "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def torchrun(workers: int, faults: int, seed: int, root: Path) -> dict[str, Any]:
    """Kill ranks of a plain loop under torchrun; seconds from each kill to the next step of all ranks."""
    rng, path = random.Random(seed), root / f"torchrun-{workers}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}",
               f"--max-restarts={faults}", str(Path(__file__).with_name("faults_torchrun.py")), str(path)]  # fmt: skip
    pause, errors = list[float](), list[str]()
    with open(f"{path}.log", "ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            last = _stepped(process, path, 0.0)
            for _ in range(faults):
                time.sleep(rng.uniform(0.2, 0.6))
                victim = rng.choice(_newest(path))
                begin = time.monotonic()
                os.kill(victim["pid"], signal.SIGKILL)
                last = _stepped(process, path, begin, not_from=victim["pid"])
                pause.append(last - begin)
        except TimeoutError as error:
            errors.append(str(error))
        finally:
            process.kill()
            process.wait()
            for one in _newest(path):
                with suppress(ProcessLookupError):
                    os.kill(one["pid"], signal.SIGKILL)
    row = Row(0, "torchrun: a rank is killed", _each("kill"), ())
    found = [{"faults": len(pause) + len(errors), "missed": 0, "right": 0, "recoveries": len(pause), "again": 0,
              "detect": [], "pause": pause}]  # fmt: skip
    return _summary(row, workers, 1, found, 0, errors, [])


def _newest(path: Path) -> list[dict[str, Any]]:
    """The newest line of each rank that has written one."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({row["rank"]: row for row in rows}.values())


def _stepped(process: subprocess.Popen[bytes], path: Path, after: float, not_from: int = 0) -> float:
    """Return the time of the first step after this time, of processes that are new. TimeoutError: there is none."""
    until = time.monotonic() + 120.0
    while time.monotonic() < until and process.poll() is None:
        found = _newest(path)
        if found and all(row["time"] > after and row["pid"] != not_from for row in found):
            return min(float(row["time"]) for row in found)
        time.sleep(0.01)
    raise TimeoutError(f"no step within 120 s; torchrun's exit code: {process.poll()}")


def show(made: dict[str, Any]) -> None:
    """Print a row."""
    seconds = ", ".join(f"{key} {made[key]} s" for key in made if key.startswith(("detect_", "pause_")))
    print(
        f"{made['row']:2} {made['fault']}, {made['workers']} workers: {made['faults']} faults, "
        f"{made['recoveries']} recoveries, {made['right']} right, equal {made['equal']} of {made['runs']}, "
        f"steps again {made['again']}, left {made['left']}; {seconds} {'; '.join(made['errors'])}",
        flush=True,
    )


def main() -> None:
    parser = benchmark_parser(__doc__, "rows 1 and 3, three faults in one run, two workers")
    parser.add_argument("--rows", default="", help="numbers of rows, as 1,3; default: all")
    parser.add_argument("--faults", type=int, default=20, help="faults of each row")
    parser.add_argument("--workers", default="2", help="numbers of workers, as 2,4")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    numbers = {int(number) for number in given.rows.split(",") if number} or {0, *(row.number for row in ROWS)}
    chosen = [row for row in ROWS if row.number in numbers]
    if given.quick:
        chosen, given.faults, given.workers = [ROWS[0], ROWS[5]], 3, "2"
    made = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="tilth-faults-") as root:
        for workers in map(int, given.workers.split(",")):
            folder = Path(root) / f"plain-{workers}"
            spec = {"recipe": recipe(folder, workers, _steps(random.Random(0), 0)[1]), "faults": []}
            plain = carry_out(folder, spec, None, random.Random(0))
            if plain.directory is None:
                sys.exit(f"the undisturbed run fails: {plain.error}\n{(folder / 'log').read_text()[-2000:]}")
            for row in chosen:
                made.append(measure(row, workers, given.faults, given.seed, Path(root), plain.directory))
                show(made[-1])
                write_rows(given.json, made)
            if 0 in numbers and not given.quick:
                made.append(torchrun(workers, min(given.faults, 5), given.seed, Path(root)))
                show(made[-1])
                write_rows(given.json, made)


if __name__ == "__main__":
    main()
