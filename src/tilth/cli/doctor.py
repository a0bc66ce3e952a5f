"""``tilth doctor``: libraries, cores, number formats, measured matrix products, disk, and a small run."""

import json
import os
import platform
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch
import typer
from torch import Tensor

from tilth.api import run_recipe
from tilth.cli.main import DoctorCommand
from tilth.config.load import load_recipe
from tilth.core.errors import TilthError
from tilth.core.random import stream
from tilth.runs.environment import DISTRIBUTION, namesake

GIGA = 1e9
_SIZE = 1024
_SECONDS = 0.4
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")


@dataclass(frozen=True)
class Product:
    """Speed of a matrix product, and its error against float64 over the greatest exact value."""

    name: str
    gflops: float
    error: float


@dataclass
class Findings:
    """All findings."""

    python: str = field(default_factory=platform.python_version)
    torch: str = torch.__version__
    cpu_features: list[str] = field(default_factory=lambda: cpu_features())
    cores: int = field(default_factory=lambda: psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    usable: int = field(default_factory=lambda: _usable())
    threads: int = field(default_factory=lambda: torch.get_num_threads())
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    memory: int = field(default_factory=lambda: psutil.virtual_memory().total)
    memory_free: int = field(default_factory=lambda: psutil.virtual_memory().available)
    gpu: str | None = field(default_factory=lambda: torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    disk_free: int = field(default_factory=lambda: shutil.disk_usage(Path.cwd()).free)
    disk_writable: bool = field(default_factory=lambda: os.access(Path.cwd(), os.W_OK))
    products: list[Product] = field(default_factory=lambda: products())
    run_seconds: float | None = None
    run_error: str | None = None
    namesake: str | None = field(default_factory=namesake)
    advice: list[str] = field(default_factory=list)

    @property
    def able(self) -> bool:
        return self.run_error is None and self.disk_writable


def examine(options: DoctorCommand) -> None:
    """Print the findings; exit code 1 if a run would not work."""
    found = find()
    typer.echo(json.dumps(asdict(found)) if options.as_json else "\n".join(lines(found)))
    raise typer.Exit(0 if found.able else 1)


def find() -> Findings:
    """Inspect, measure (about two seconds), and train a small run. The current folder is that of future runs."""
    found = Findings()
    found.run_seconds, found.run_error = try_run()
    found.advice = advise(found)
    return found


def _usable() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """Return the vector and matrix extensions that torch uses; empty if unknown."""
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), [])
    return [name for name in _FEATURES if name in flags]


def products() -> list[Product]:
    """Measure the formats that a recipe can select: fp32 at two precisions, and bf16."""
    a = stream(0, "doctor", "a").normal(0, _SIZE * _SIZE).view(_SIZE, _SIZE)
    b = stream(0, "doctor", "b").normal(0, _SIZE * _SIZE).view(_SIZE, _SIZE)
    exact = a.double() @ b.double()
    before = torch.get_float32_matmul_precision()
    found = []
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            found.append(_measure(f"fp32 {precision}", a, b, exact))
    finally:
        torch.set_float32_matmul_precision(before)
    return [*found, _measure("bf16", a.bfloat16(), b.bfloat16(), exact)]


def _measure(name: str, a: Tensor, b: Tensor, exact: Tensor) -> Product:
    error = ((a @ b).double() - exact).abs().max() / exact.abs().max()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < _SECONDS:
        a @ b
        count += 1
    seconds = (time.perf_counter() - start) / count
    return Product(name, 2 * _SIZE**3 / seconds / GIGA, float(error))


def try_run() -> tuple[float | None, str | None]:
    """Train two supervised steps and one RL step in a temporary folder; return (seconds, error)."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        small = ["model.hidden=32", "model.layers=1", "data.digits=1", "rollout.prompts=8", "run.eval_prompts=8"]
        short = ["supervised.steps=2", "supervised.batch=8", "supervised.check_every=2", "algorithm.steps=1"]
        try:
            run_recipe(load_recipe("addition-grpo", [*small, *short, f'run.dir="{folder}"']), name="doctor")
        except TilthError as error:
            return None, str(error)
    return time.perf_counter() - start, None


def advise(found: Findings) -> list[str]:
    """Return sentences on what to set or to repair."""
    exact, medium, half = found.products
    advice = []
    if found.run_error:
        advice.append(f"a small run failed: {found.run_error}")
    if found.namesake:
        advice.append(
            f"a distribution called tilth is installed beside this one, which is {DISTRIBUTION}: {found.namesake}; on "
            "PyPI that name is another project's, and both install a package tilth: pip uninstall tilth, then install "
            "this one again"
        )
    if not found.disk_writable:
        advice.append("this folder cannot be written; set run.dir to one that can")
    if found.disk_free < 2 * GIGA:
        advice.append(f"only {found.disk_free / GIGA:.1f} GB of disk are free; checkpoints of a run may fill it")
    if found.load > found.usable:
        advice.append("other programs are busy: times are longer than they need to be, results stay the same")
    if medium.gflops > 1.3 * exact.gflops:
        kind = "as exact" if medium.error < 10 * exact.error else f"less exact ({medium.error:.0e}), as bf16 is"
        advice.append(f"train.matmul=medium multiplies {medium.gflops / exact.gflops:.1f} x faster here and is {kind}")
    if half.gflops > 1.5 * max(exact.gflops, medium.gflops):
        faster = half.gflops / exact.gflops
        advice.append(f"train.precision=bf16 multiplies {faster:.1f} x faster than fp32; parameters stay fp32")
    if found.gpu:
        advice.append("the GPU is used by default (train.device=auto)")
    return advice


def lines(found: Findings) -> list[str]:
    busy = f"{found.cores} cores, {found.usable} usable, {found.threads} threads, load {found.load:.1f}"
    speed = [f"{p.name:<14}{p.gflops:7,.0f} GFLOP/s, error {p.error:.0e}" for p in found.products]
    writable = "writable" if found.disk_writable else "not writable"
    rows = [
        ("python", found.python),
        ("torch", found.torch),
        ("processor", f"{busy}; {' '.join(found.cpu_features) or 'no extensions known'}"),
        ("memory", f"{found.memory / GIGA:.1f} GB, {found.memory_free / GIGA:.1f} GB free"),
        ("GPU", found.gpu or "none"),
        ("disk", f"{found.disk_free / GIGA:.1f} GB free, {writable}"),
        *(("matrices" if i == 0 else "", text) for i, text in enumerate(speed)),
        ("a small run", found.run_error or f"works ({found.run_seconds:.1f} s)"),
    ]
    text = [f"{name:<12} {value}" for name, value in rows]
    return [*text, "", *(found.advice or ["nothing to repair"])]
