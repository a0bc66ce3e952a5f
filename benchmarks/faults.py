"""Runs that survive: faults at random moments of real runs, and whether their ends are those of an undisturbed run.

    python benchmarks/faults.py [--quick] [--json PATH] [--rows 1,3,6] [--only TEXT] [--seeds N] [--workers 4]
                                [--seed N] [--keep FOLDER] [--torchft PYTHON] [--nvrx PYTHON]

The rows are those of the fault matrix in docs/benchmarks.md (``faults_rows.py``). Each seed is one fault at a random
time after a random step, or at a named moment; some of them happen in one run, one after another. Each run is a process
of its own, and nothing is tried twice. Right: the verdict has the right kind and names the right rank. Seconds are from
the fault to the verdict, and to the moment when the run goes on. Equal: weights, optimizer state, metrics and
trajectories of the whole run are those of the undisturbed run, bit for bit. Left: processes (and so ports), session
directories and files in shared memory, and temporary files that outlive the run.

Row 5 makes one rank slow in the second half of a run, and compares what the trace says that costs with what it did
cost. Passes of the model sleep there for half a second, as on devices that no other rank uses (``faults_paced.py``).
Row 0 is what others do with the same faults (``faults_rivals.py``): ``torchrun``, and torchft and NVRx, each by the
interpreter of an environment that has it:

    python3.11 -m venv /tmp/torchft && /tmp/torchft/bin/pip install torchft-nightly torch
    python3.11 -m venv /tmp/nvrx && /tmp/nvrx/bin/pip install nvidia-resiliency-ext==0.4.1 torch

Some rows need the right to make cgroups or to mount a file system; without it they are left out, and that is said.
"""

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from driver import benchmark_parser, write_rows
from faults_rivals import rivals
from faults_rows import QUICK, ROWS, SLOW, Row
from faults_run import MEMORY_GROUPS, MOUNT
from tilth_studies.guard_replay import TIMES

from tilth.analysis.events import load
from tilth.analysis.run_trace import open_run
from tilth.analysis.run_whatif import analyse_events
from tilth.runs.readers import read_metrics, read_trajectories

HANG_AFTER = 3.0
LIMIT, MORE = 300.0, 60.0
"""Seconds for a run, and more for each of its faults."""
RUNS = 10
"""Runs of the row of slow ranks for 20 seeds."""
SLOW_STEPS = 20
PACED = str(Path(__file__).with_name("faults_paced.py"))
TORCHS = "torchinductor_"
"""Begin of the name of torch's folder for what it compiles, which it keeps for other processes."""
Spec = dict[str, Any]


def recipe(folder: Path, workers: int, steps: int, keys: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A run of some seconds: one-digit addition, FSDP over all workers. keys: others, by section."""
    made: dict[str, Any] = {
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
    return {**made, **{section: {**made[section], **more} for section, more in keys.items()}}


@dataclass
class Trial:
    """What came of one run."""

    events: list[dict[str, Any]] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    directory: Path | None = None
    ended: dict[str, Any] = field(default_factory=dict)
    """As ``numbers`` has it: a mounted folder is gone."""
    left: list[str] = field(default_factory=list)
    error: str = ""


def carry_out(folder: Path, spec: Spec, row: Row | None, rng: random.Random) -> Trial:
    """Run a spec to its end; the command is called again when its process was killed."""
    (folder / "tmp").mkdir(parents=True)
    (folder / "spec.json").write_text(json.dumps({**spec, "fallback": False}))
    mount = folder / MOUNT if row is not None and row.mount else None
    if mount is not None and row is not None:
        mount.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={row.mount}m", "tmpfs", mount], check=True)
    try:
        return _called(folder, spec, row, rng)
    finally:
        if mount is not None:
            subprocess.run(["umount", "-l", mount], check=True)


def _called(folder: Path, spec: Spec, row: Row | None, rng: random.Random) -> Trial:
    token = str(folder / "token")
    env = {**os.environ, "TILTH_FAULTS": token, "TMPDIR": str(folder / "tmp")}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    command = [*_apart(row), sys.executable, str(Path(__file__).with_name("faults_run.py")), str(folder)]
    trial, begin, limit = Trial(), time.monotonic(), LIMIT + MORE * len(spec["faults"])
    with open(folder / "log", "ab") as log:
        while not trial.error:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            try:
                code = process.wait(max(1.0, limit - (time.monotonic() - begin)))
            except subprocess.TimeoutExpired:
                trial.error = f"not ended within {limit:g} s"
                break
            if code != -signal.SIGKILL:
                trial.error = "" if code == 0 else f"exit code {code}"
                break
            time.sleep(0.5)  # its reaper ends the workers
            if row is not None and row.prepare is not None:
                row.prepare(folder, rng)
                (folder / "spec.json").write_text(json.dumps({**spec, "fallback": True}))
    trial = _finished(trial, folder, token)
    if trial.directory is not None:
        trial.ended = numbers(trial.directory)
    return trial


def _apart(row: Row | None) -> list[str]:
    """Return the begin of a command that runs with a /dev/shm of its own, if its row needs one."""
    if row is None or not row.shared:
        return []
    mounted = f'mount -t tmpfs -o size={row.shared}m tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mounted, "sh"]


def _finished(trial: Trial, folder: Path, token: str) -> Trial:
    """Read what a run wrote, and look for what it left."""
    path = folder / "events.jsonl"
    trial.events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for event in trial.events:
        trial.directory = Path(event["directory"]) if event["what"] == "end" else trial.directory
        trial.error = event["error"] if event["what"] == "failed" else trial.error
        if event["what"] == "session" and Path(event["path"]).exists():
            trial.left.append(event["path"])
    for file in [*folder.glob("runs/*/recoveries.jsonl"), *folder.glob(f"{MOUNT}/runs/*/recoveries.jsonl")]:
        trial.recoveries = [json.loads(line) for line in file.read_text().splitlines()]
    until = time.monotonic() + 2.0
    while (found := _running(token)) and time.monotonic() < until:
        time.sleep(0.1)
    trial.left += [f"process {process.pid}" for process in found]
    for process in found:
        process.kill()
    own = [str(file) for file in (folder / "tmp").iterdir() if not file.name.startswith(TORCHS)]
    trial.left += own + _shared_memory(trial.events)
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


def _shared_memory(events: Sequence[dict[str, Any]]) -> list[str]:
    """Files in shared memory that carry the number of a process of this run, as libomp's."""
    ours = {str(pid) for event in events for pid in event.get("pids", ())}
    return [str(file) for file in Path("/dev/shm").iterdir() if ours.intersection(file.name.split("_"))]


def numbers(run: Path) -> dict[str, Any]:
    """What must be equal in two runs, by name."""
    kept = [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in read_metrics(run)]
    return {
        "weights or optimizer state": {
            file.name: file.read_bytes() for file in max(run.glob("checkpoints/step-*")).glob("*.safetensors")
        },
        "metrics": json.dumps(kept, sort_keys=True),
        "trajectories": read_trajectories(run).sort_by("id"),
    }


def differs(ours: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return what differs between two runs, "" if nothing does."""
    if not ours or not other:
        return "there is nothing to compare with"
    return next((name for name in ours if ours[name] != other[name]), "")


def measured(trial: Trial, row: Row) -> dict[str, Any]:
    """Match the faults of a run with its recoveries; seconds to the verdict and until it goes on."""
    missed = {event["number"] for event in trial.events if event["what"] == "missed"}
    faults = [event for event in trial.events if event["what"] == "fault" and event["number"] not in missed]
    messages = [event for event in trial.events if event["what"] == "message"]
    verdicts = [event for event in messages if event["text"].startswith("after step")]
    resumed = [event for event in messages if event["text"].startswith(("going on ", "nothing is lost"))]
    told = [one for past, one in zip([None, *trial.recoveries], trial.recoveries) if not _tries_on(past, one)]
    right, detect, pause, unmatched = 0, list[float](), list[float](), list(faults)
    for recovery, verdict, onward in zip(told, verdicts, resumed):
        before = [one for one in unmatched if one["time"] <= verdict["time"]]
        named = [one for one in before if not row.named or {one["rank"]} == set(recovery["ranks"])]
        if not named or recovery["kind"] not in row.kinds:
            continue
        unmatched.remove(named[-1])
        right += 1
        detect.append(verdict["time"] - named[-1]["time"])
        pause.append(onward["time"] - named[-1]["time"])
    ends = [0.0, *(event["time"] for event in resumed)]
    for recovery, begin, end in zip(told, ends, ends[1:]):  # another worker, killed while the first is replaced
        also = [one for one in unmatched if begin < one["time"] <= end and one["rank"] in recovery["replaced"]]
        right += len(also) if recovery["kind"] in row.kinds else 0
        unmatched = [one for one in unmatched if one not in also]
    for fault in list(unmatched) if row.told else []:
        if at := _told(messages, row.told, fault["time"]):
            right += 1
            detect.append(at - fault["time"])
    if "kill-controller" in {fault["kind"] for fault in faults}:
        pause = [_next_step(trial, fault["time"]) - fault["time"] for fault in faults]
    steps = [event["step"] for event in trial.events if event["what"] == "step"]
    return {
        "faults": len(faults), "missed": len(missed), "right": right, "recoveries": len(trial.recoveries),
        "false": 0 if row.kinds or row.told else len(trial.recoveries), "detect": detect, "pause": pause,
        "again": len(steps) - len(set(steps)), "kinds": [one["kind"] for one in trial.recoveries],
    }  # fmt: skip


def _tries_on(past: Mapping[str, Any] | None, one: Mapping[str, Any]) -> bool:
    """Return True for a step without room that is run once more, which is told once."""
    return past is not None and [(r["kind"], r["step"]) for r in (past, one)] == [("storage", one["step"])] * 2


def _told(messages: Sequence[dict[str, Any]], pattern: str, after: float) -> float:
    """Return the time of the first message that fits, 0 without one."""
    fits = (e["time"] for e in messages if e["time"] > after and re.search(pattern, e["text"]))
    return float(next(fits, 0.0))


def _next_step(trial: Trial, after: float) -> float:
    return next((e["time"] for e in trial.events if e["what"] == "step" and e["time"] > after), float("inf"))


def _steps(rng: random.Random, count: int) -> tuple[list[int], int]:
    """Steps after which faults happen, at least two apart, and the length of the run."""
    found, step = list[int](), 1
    for _ in range(count):
        step += rng.randint(1, 2)
        found.append(step)
        step += 1
    return found, 3 * count + 3


class Bench:
    """What all rows share. plain: ends of undisturbed runs, made when a row needs one."""

    def __init__(self, root: Path, seeds: int, seed: int) -> None:
        self.root, self.seeds, self.seed = root, seeds, seed
        self.plain: dict[str, Mapping[str, Any]] = {}

    def undisturbed(self, row: Row, workers: int, length: int) -> Mapping[str, Any]:
        """Return the end of a run of this length without a fault."""
        name = f"plain-{workers}-{length}-{json.dumps(row.keys, sort_keys=True)}"
        if name not in self.plain:
            folder = self.root / f"plain-{len(self.plain)}"
            spec = {"recipe": recipe(folder, workers, length, row.keys), "faults": []}
            trial = carry_out(folder, spec, None, random.Random(0))
            if trial.error:
                sys.exit(f"the undisturbed run fails: {trial.error}\n{(folder / 'log').read_text()[-2000:]}")
            self.plain[name] = trial.ended
        return self.plain[name]

    def measure(self, row: Row, workers: int) -> dict[str, Any]:
        """Run a row."""
        workers = row.workers or workers
        found, equal, errors, left, runs = list[dict[str, Any]](), 0, list[str](), list[str](), 0
        while runs * row.per_run < self.seeds:
            folder = self.root / f"{ROWS.index(row)}-{workers}-{runs}"
            rng = random.Random(f"{self.seed}-{row.name}-{workers}-{runs}")
            steps, length = _steps(rng, min(row.per_run, self.seeds - runs * row.per_run))
            faults = row.draw(rng, workers, steps, runs * row.per_run)
            trial = self._carried_out(row, workers, length, folder, faults, rng)
            other = self.undisturbed(row, workers, length) if row.equal == "plain" else {}
            if row.equal == "twin" and not trial.error:
                moved = [{**fault, "rank": (fault["rank"] + 1) % workers} for fault in faults]
                twin = folder.with_name(f"{folder.name}-twin")
                other = self._carried_out(row, workers, length, twin, moved, rng).ended
            wrong = trial.error or differs(trial.ended, other)
            equal += not wrong
            errors += [wrong.partition("\n")[0][:200]] if wrong else []
            left += trial.left
            found.append(measured(trial, row))
            runs += 1
        return _summary(row.number, row.name, workers, runs, found, equal, errors, left)

    def _carried_out(
        self, row: Row, workers: int, length: int, folder: Path, faults: list[Spec], rng: random.Random
    ) -> Trial:
        place = folder / MOUNT if row.mount else folder
        return carry_out(folder, {"recipe": recipe(place, workers, length, row.keys), "faults": faults}, row, rng)

    def slow(self, workers: int, number: int) -> dict[str, Any]:
        """Make a rank slow in the second half of a run: seconds of a step before and with it, and those that the trace
        says it would take without."""
        rng = random.Random(f"{self.seed}-slow-{workers}-{number}")
        rank, half, folder = rng.randrange(workers), SLOW_STEPS // 2, self.root / f"slow-{workers}-{number}"
        fault = {"after": half, "delay": 0.0, "kind": "slow-pass", "rank": rank, "at": ""}
        made = recipe(folder, workers, SLOW_STEPS, {"run": {"eval_every": 1000, "save_every": 1000}})
        trial = carry_out(folder, {"recipe": {**made, "plugins": [PACED]}, "faults": [fault]}, None, rng)
        if trial.directory is None:
            return {"error": trial.error}
        before, during = range(half // 2, half + 1), range(half + 3, SLOW_STEPS + 1)
        events = load(trial.directory)
        seconds = [
            statistics.median(events.duration[events.op.is_("step") & np.isin(events.step, np.array(window))] * 1e-9)
            for window in (before, during)
        ]
        _, replay, cause = analyse_events(open_run(trial.directory).events, during)
        findings, now = cause.findings, float(np.median(replay.replayed))
        named = [f for f in findings if f.kind == "slow-worker" and {"rank": rank}.items() <= dict(f.where[0]).items()]
        cost = None if not named or named[0].seconds is None else now - named[0].seconds
        others = len([f for f in findings if f.kind == "slow-worker" and f not in named])
        return {"off": seconds[0], "on": seconds[1], "cost": cost, "others": others, "left": trial.left}


def slow_row(bench: Bench, workers: int) -> dict[str, Any]:
    """Row 5: the cost of a slow rank by the trace, against that measured in the same run."""
    found = [bench.slow(workers, number) for number in range(-(-bench.seeds * RUNS // 20))]
    named = [one for one in found if one.get("cost") is not None]
    costs = [(one["cost"], one["on"] - one["off"]) for one in named]
    errors = [one["error"] for one in found if "error" in one]
    made = _summary(SLOW, "a rank takes 1.5 times as long for a pass", workers, len(found), [], 0, errors, [])
    made |= {"faults": len(found), "right": len(named), "others": sum(one.get("others", 0) for one in found)}
    made["each"] = found
    if costs:
        made["cost_trace"] = round(statistics.median(cost for cost, _ in costs), 3)
        made["cost_measured"] = round(statistics.median(cost for _, cost in costs), 3)
        made["cost_error"] = round(statistics.median(abs(a / b - 1) for a, b in costs if b > 0), 3)
    return made


def _summary(
    number: int,
    name: str,
    workers: int,
    runs: int,
    found: Sequence[dict[str, Any]],
    equal: int,
    errors: list[str],
    left: list[str],
) -> dict[str, Any]:
    totals = {
        key: sum(one[key] for one in found) for key in ("faults", "missed", "right", "recoveries", "false", "again")
    }
    seconds = {
        f"{name}_{how}": round(value, 2)
        for name in ("detect", "pause")
        if (values := [second for one in found for second in one[name]])
        for how, value in (("median", statistics.median(values)), ("max", max(values)))
    }
    return {
        "row": number, "fault": name, "workers": workers, "runs": runs, **totals, **seconds, "equal": equal,
        "kinds": [kind for one in found for kind in one["kinds"]], "left": len(left), "errors": errors,
        "what_is_left": left, "load": round(os.getloadavg()[0], 1), "hang_after": HANG_AFTER,
    }  # fmt: skip


def show(made: dict[str, Any]) -> None:
    """Print a row."""
    if "why" in made:
        print(f"{made['row']:2} {made['fault']}: left out, {made['why']}", flush=True)
        return
    seconds = ", ".join(f"{key} {made[key]} s" for key in made if key.startswith(("detect_", "pause_", "cost_")))
    kinds = ", ".join(f"{made['kinds'].count(kind)} {kind}" for kind in sorted(set(made["kinds"])))
    print(
        f"{made['row']:2} {made['fault']}, {made['workers']} workers: {made['faults']} faults, "
        f"{made['recoveries']} recoveries ({kinds}), {made['right']} right, equal {made['equal']} of {made['runs']}, "
        f"steps again {made['again']}, left {made['left']}; {seconds} {'; '.join(made['errors'])}",
        flush=True,
    )


def missing(row: Row, root: Path) -> str:
    """Return why a row cannot be run here, "" if it can."""
    if "exceeds its memory" in row.name and not os.access(MEMORY_GROUPS, os.W_OK):
        return f"{MEMORY_GROUPS} cannot be written"
    if row.shared:
        done = subprocess.run([*_apart(row), "true"], capture_output=True, text=True)
        return done.stderr.strip() if done.returncode else ""
    if row.mount:
        (root / "probe").mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", root / "probe"], capture_output=True, text=True)
        if done.returncode:
            return done.stderr.strip()
        subprocess.run(["umount", root / "probe"], check=True)
    return ""


def arguments() -> Any:
    """Return the options, with the numbers of rows as ``numbers``."""
    parser = benchmark_parser(__doc__, f"two workers, 3 seeds of: {', '.join(QUICK)}")
    parser.add_argument("--rows", default="", help="numbers of rows, as 1,3; default: all; 0: the rivals")
    parser.add_argument("--only", default="", help="text in the name of a row")
    parser.add_argument("--seeds", type=int, default=20, help="faults of each row")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a new folder for the runs, which stays")
    parser.add_argument("--torchft", default="", metavar="PYTHON", help="interpreter of an environment with torchft")
    parser.add_argument("--nvrx", default="", metavar="PYTHON", help="and with nvidia-resiliency-ext")
    given = parser.parse_args()
    given.numbers = {int(number) for number in given.rows.split(",") if number}
    given.numbers = given.numbers or {0, SLOW, *(row.number for row in ROWS)}
    if given.quick:
        given.seeds, given.workers = 3, 2
    return given


def measurements(given: Any, root: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows that were asked for."""
    bench = Bench(root, given.seeds, given.seed)
    for row in ROWS:
        if row.number not in given.numbers or given.only not in row.name or (given.quick and row.name not in QUICK):
            continue
        if why := missing(row, root):
            yield {"row": row.number, "fault": row.name, "why": why}
        else:
            yield bench.measure(row, given.workers)
    if SLOW in given.numbers and not given.only and not given.quick:
        yield slow_row(bench, given.workers)
    if 0 in given.numbers and not given.quick:
        others = {"torchft": given.torchft, "NVRx": given.nvrx}
        yield from rivals(others, min(given.seeds, 5), given.seed, root, given.only)


def main() -> None:
    given, made = arguments(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="tilth-faults-") as temporary:
        for row in measurements(given, given.keep or Path(temporary)):
            made.append(row)
            show(row)
            write_rows(given.json, made)


if __name__ == "__main__":
    main()
