"""Everything that one GPU can show: its tests, then generation, training, GRPO, checkpoints and memory, in one table.

    python benchmarks/gpu.py [--device cuda] [--quick] [--json PATH] [--markdown PATH] [--minutes 25] [--parts NAMES]

``make gpu`` runs it, ``make gpu DEVICE=cpu`` rehearses it: every part on a CPU with tiny shapes. ``make gpu
DEVICE=pretended`` runs the tests of a GPU on a CPU that pretends to have one (``tests/gpu_free``). A part is a script
of this folder (or pytest) in a process of its own, with a limit of time; beside Tilth it has ``transformers`` and,
where they are installed, vLLM, TRL and the ``Trainer`` (which needs ``accelerate``). Models are of 0.5B to 8B
parameters with random weights, so nothing is downloaded. With fp32 weights and AdamW (16 bytes a parameter), 1.5B is
the largest that trains on one GPU of 80 GB; of 8B there are generation and what its memory would be.

Parts come in the order of what they are worth. A part that fails or takes too long is a row with its error, behind the
rows that it wrote until then; the next ones still run, and the exit status is 1. What the time did not suffice for is a
row, too. PATHs are written anew after each part, so that they have all that there is whenever the machine goes. The
first row is the machine: device, driver, versions.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from driver import benchmark_parser, write_rows

HERE = Path(__file__).parent
Row = dict[str, Any]
PRETENDED = "pretended"
"""``--device`` of tests on a pretended device, which have all minutes for themselves."""
GRACE = 20.0
"""Seconds in which a part whose time is over may write its rows: pytest reports what has run."""
RIVALS = ("torch", "transformers", "accelerate", "trl", "vllm")


@dataclass(frozen=True)
class Part:
    """One process: a script by its name without ``.py``, or pytest, and how long it may take."""

    name: str
    script: str
    limit_s: float
    arguments: str = ""
    quick: str = ""
    """Further arguments of the rehearsal."""
    columns: tuple[str, ...] = ()
    """Of the table for people."""

    def command(self, device: str, quick: bool, result: Path) -> list[str]:
        """What is run; its rows, or pytest's report, go to ``result``."""
        if self.script == "pytest":
            files = (HERE.parent / "tests").rglob("test_*.py")  # to import all takes 40 s
            found = (path for path in files if "mark.gpu" in path.read_text(encoding="utf-8"))
            tests = [str(path) for path in sorted(found, key=lambda path: (path.name != "test_gpu.py", path))]
            how = ["-q", "-p", "no:cacheprovider", "-m", "gpu", f"--junitxml={result}"]
            plugin = ["-p", "tests.gpu_free.device"] if device == PRETENDED else []
            return [sys.executable, "-m", "pytest", *plugin, *how, *tests]
        more = f"--quick {self.quick}" if quick else self.arguments
        return [
            sys.executable,
            str(HERE / f"{self.script}.py"),
            *shlex.split(more),
            "--device",
            device,
            "--json",
            str(result),
        ]


GENERATED = ("model", "dtype", "case", "contender", "tokens_per_second", "over_hugging_face", "worst_logit_gap")
PARTS = (
    Part("tests", "pytest", 240, columns=("passed", "failed", "skipped", "seconds", "failures")),
    Part(
        "generation", "generate", 330,
        "--models 0.5B --dtypes bf16 --repeats 2 --contenders 'tilth eager,tilth compiled,loop eager,vllm'",
        "--dtypes bf16", GENERATED,
    ),
    Part(
        "training", "train", 270, "--models 0.5B,1.5B --dtypes bf16 --rounds 4 --apart", "--dtypes bf16 --apart",
        ("model", "case", "contender", "tokens_per_second", "mfu", "over_plain", "over_trainer", "peak_bytes", "error"),
    ),
    Part(
        "grpo", "rl_vs_trl", 240, "--shape 0.5B --cases 'bf16 equal' --steps 8 --rounds 1",
        "--cases 'bf16 equal'",
        ("case", "contender", "seconds_per_step", "over_trl", "generated_tokens_per_second",
         "trained_tokens_per_second", "compile_seconds", "peak_bytes"),
    ),
    Part(
        "generation of 8B", "generate", 240,
        "--models 8B --dtypes bf16 --repeats 1 --cases '128x48,groups of 16' --contenders 'tilth compiled,vllm'",
        "--dtypes bf16 --cases 32x32", GENERATED,
    ),
    Part(
        "memory", "memory", 120, "--models 0.5B,1.5B,8B --dtypes bf16", "--dtypes bf16",
        ("model", "what", "predicted_bytes", "peak_bytes", "predicted_over_peak"),
    ),
    Part(
        "checkpoint", "checkpoint", 150,
        "--ranks 1 --mb 4000 --methods 'tilth,DCP save,DCP thread,torch.save' --rounds 2 --pairs 4", "--ranks 1",
        ("mb", "method", "stall_s", "call_s", "durable_s", "warm_s", "cold_s", "peak_bytes"),
    ),
)  # fmt: skip


def machine(device: str) -> Row:
    """What all figures are of."""
    import torch

    packages = {f"{name}_version": _version(name) for name in RIVALS}
    found: Row = {"part": "machine", "device": "CPU", "python_version": platform.python_version(), **packages}
    if device == PRETENDED:
        found["device"] = "pretended"
    elif device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "device_bytes": properties.total_memory, "driver_version": _driver()}
        found |= {"cuda_version": torch.version.cuda, "compute_capability": f"{properties.major}.{properties.minor}"}
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True).stdout.split()
    return said[0] if said else None


def contenders(part: Part, quick: bool) -> list[str]:
    """Arguments that leave out rivals that are not installed, where the script would refuse to run without them."""
    if part.script != "rl_vs_trl" or all(find_spec(name) for name in ("trl", "accelerate", "datasets")):
        return []
    return ["--contenders", "tilth" if quick else "tilth,tilth compiled"]


def run(part: Part, device: str, quick: bool, limit_s: float) -> list[Row]:
    """Rows of one part; a failure is one of them."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        began = time.monotonic()
        error = _ended(part.command(device, quick, result) + contenders(part, quick), limit_s)
        read = _tests if part.script == "pytest" else _rows
        try:
            rows = read(result) if result.is_file() else []
        except (ElementTree.ParseError, ValueError) as broken:  # it was killed while it wrote
            rows, error = [], f"{error or 'no error'}; its rows are not whole: {broken}"
        if not error and not rows:
            error = "it wrote no rows"
        failed = [{"error": error, "seconds": round(time.monotonic() - began, 1)}] if error else []
    return [{"part": part.name, **row} for row in rows + failed]


def _ended(command: Sequence[str], limit_s: float) -> str:
    """Run a command in a group of its own, with what it prints: "" or why it failed."""
    source = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": source, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=env, stdout=said, stderr=said, cwd=HERE.parent, start_new_session=True)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            _kill(process)
        said.seek(0)
        text = said.read()
    print(text.rstrip("\n"), flush=True)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if code is None:
        return f"it took longer than its {limit_s:.0f} s"
    return f"exit status {code}: {lines[-1][:300] if lines else ''}" if code else ""


def _kill(process: subprocess.Popen[Any]) -> None:
    """The whole group: workers and rivals' engines, too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rows(result: Path) -> list[Row]:
    found: list[Row] = json.loads(result.read_text())
    return found


def _tests(result: Path) -> list[Row]:
    """One row of pytest's report, with the tests that failed and why."""
    suite = next(ElementTree.parse(result).getroot().iter("testsuite"))
    wrong = [(case.get("name"), case.find("failure"), case.find("error")) for case in suite.iter("testcase")]
    why = {f"{name}": fault.get("message", "") for name, *faults in wrong for fault in faults if fault is not None}
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    row: Row = {"passed": passed, "failed": failed, "skipped": count["skipped"], "seconds": float(suite.get("time", 0))}
    return [row | {"failures": "; ".join(f"{name}: {text[:300]}" for name, text in why.items()) or None}]


def run_all(
    parts: Iterable[Part],
    seconds: float,
    one: Callable[[Part, float], list[Row]],
    clock: Callable[[], float],
    keep: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Rows of all parts, one after another, for so long in all. A part gets its limit, or what is left. keep: called
    with the rows so far after each."""
    end, rows = clock() + seconds, list[Row]()
    for part in parts:
        left = end - clock()
        if left < 10:
            rows.append({"part": part.name, "not_reached": f"the {seconds / 60:.0f} minutes were over"})
            continue
        print(f"\n== {part.name} (at most {min(left, part.limit_s):.0f} s)", flush=True)
        rows += one(part, min(left, part.limit_s))
        keep(rows)
    return rows


def failed(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Errors, by part; one of a rival's contender is a row of the part and no failure of it."""
    return [f"{row['part']}: {row['error']}" for row in rows if row.get("error") and "contender" not in row]


def markdown(rows: Sequence[Row], parts: Sequence[Part] = PARTS) -> str:
    """A table for each part, for docs/benchmarks.md."""
    said = [", ".join(f"{key.removesuffix('_version')} {value}" for key, value in rows[0].items() if key != "part")]
    for part in parts:
        own = [row for row in rows if row["part"] == part.name]
        told = [row for row in own if set(row) & set(part.columns) - {"error", "seconds"}]
        said += ["", f"### {part.name[0].upper()}{part.name[1:]}", ""]
        if told:
            said += ["| " + " | ".join(part.columns) + " |", "|---" * len(part.columns) + "|"]
            said += ["| " + " | ".join(_cell(row.get(column)) for column in part.columns) + " |" for row in told]
        said += [f"{row.get('error') or row.get('not_reached')}" for row in own if row not in told]
    return "\n".join(said) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return (
        f"{value:,}"
        if isinstance(value, int) and not isinstance(value, bool)
        else re.sub(r"\s*\|\s*", " / ", str(value))
    )


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = benchmark_parser(__doc__, "tiny shapes, which say nothing about speed; so on a CPU")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--device", default="", help="default: cuda where there is one, else cpu; or pretended")
    parser.add_argument("--minutes", type=float, default=25.0, help="in all")
    parser.add_argument("--parts", default="", help=f"comma-separated, of: {','.join(part.name for part in PARTS)}")
    return parser.parse_args()


def main() -> None:
    args = options()
    import torch

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", PRETENDED) and not torch.cuda.is_available():
        raise SystemExit(f"--device {device}: torch {torch.__version__} sees no CUDA device here; use --device cpu")
    quick, asked = args.quick or device == "cpu", [name for name in args.parts.split(",") if name]
    if unknown := set(asked) - {part.name for part in PARTS}:
        raise SystemExit(
            f"--parts: there is no {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PARTS)}"
        )
    parts = [part for part in PARTS if not asked or part.name in asked]
    if device == PRETENDED:
        parts = [replace(part, limit_s=60 * args.minutes) for part in parts if part.script == "pytest"]
    first = [machine(device)]

    def keep(found: list[Row]) -> None:
        if args.markdown:
            args.markdown.write_text(markdown(first + found, parts))
        write_rows(args.json, first + found)

    keep([])
    clock, seconds = time.monotonic, 60 * args.minutes
    rows = first + run_all(parts, seconds, lambda part, limit: run(part, device, quick, limit), clock, keep)
    keep(rows[1:])
    print("\n" + markdown(rows, parts))
    for text in failed(rows):
        print(f"FAILED {text}", file=sys.stderr)
    sys.exit(bool(failed(rows)))


if __name__ == "__main__":
    main()
