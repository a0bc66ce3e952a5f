"""What a run would take on another network, beside a run that had both networks.

    python benchmarks/network_run.py [--quick] [--json PATH] [--keep FOLDER]

One `tilth run` with two workers of one thread, whose collectives sleep as on a slow link in every second window of
steps (``causes_inject/sitecustomize.py``, from outside). From the trace of the slow windows alone the step on the fast
network is predicted (``tilth_studies.other_network``, with the link that the fast windows have, replayed by
``analysis.run_replay``), and from the fast windows alone the step on the slow one. Measured is the median step of the
other windows.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from driver import benchmark_parser, write_rows
from tilth_studies.other_network import OtherNetwork

from tilth.analysis.events import Events, load
from tilth.analysis.network import links
from tilth.analysis.run_graph import read_steps
from tilth.analysis.run_replay import RunModel
from tilth.plan.costs import Link

ROOT = Path(__file__).parent.parent
INJECT = Path(__file__).parent / "causes_inject"
WARM = 3
"""Steps at the beginning of each window that no median sees."""
LEVELS = ((5e-3, 2e7), (5e-3, 5e6))
"""Seconds, and bytes a second, that a collective takes more."""
KEYS = (
    "cluster.backend=local", "cluster.workers=2", "train.threads=1", "run.name=run", "run.eval_prompts=8",
    "run.save_every=1000", "supervised.check_every=1000", "supervised.batch=16", "algorithm.steps=0", "model.hidden=96",
    "model.layers=2",
)  # fmt: skip


def run(folder: Path, window: int, windows: int, latency: float, bandwidth: float) -> Path:
    """Its directory."""
    cause = {"kind": "network", "rank": -1, "window": window, "latency": latency, "bandwidth": bandwidth, "sleep": None}
    where = {"PYTHONPATH": f"{INJECT}:{ROOT / 'src'}", "CAUSE": json.dumps(cause), "OMP_NUM_THREADS": "1"}
    steps = (f"supervised.steps={window * windows}", "supervised.until=1.0", f"run.dir={folder}")
    done = subprocess.run(
        [sys.executable, "-m", "tilth", "run", "addition-grpo", *KEYS, *steps],
        env=os.environ | where, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return folder / "run"


def halves(events: Events, window: int, windows: int) -> tuple[list[range], list[range]]:
    """Steps of the windows with the fast network, and of those with the slow one."""
    all_ = [range(1 + window * i + WARM, 1 + window * (i + 1)) for i in range(windows)]
    return all_[0::2], all_[1::2]


def measured(events: Events, windows: list[range]) -> float:
    """Median seconds of a step."""
    steps = events.op.is_("step") & np.isin(events.step, np.concatenate([list(w) for w in windows]))
    return float(np.median(events.duration[steps]) * 1e-9)


def link_of(events: Events, windows: list[range]) -> Link:
    """That of the all-reduce, as these steps have it."""
    chosen = events.select(np.isin(events.step, np.concatenate([list(w) for w in windows])))
    return next(k for k in links(chosen) if k.op == "all_reduce")


def predicted(events: Events, windows: list[range], link: Link) -> float:
    """Median seconds of a step of these windows, replayed over another link."""
    times = []
    for window in windows:
        steps = read_steps(events, window)
        times += OtherNetwork(link.latency, link.bandwidth).times(RunModel(steps)).tolist()
    return statistics.median(times)


def rows_of(events: Events, window: int, windows: int, latency: float, bandwidth: float) -> list[dict[str, Any]]:
    """The two predictions of a run."""
    fast, slow = halves(events, window, windows)
    found = []
    for name, seen, unseen in (("slow to fast", slow, fast), ("fast to slow", fast, slow)):
        link = link_of(events, unseen)
        took, said, before = measured(events, unseen), predicted(events, seen, link), measured(events, seen)
        found.append(
            {
                "kind": "run", "injected_latency_s": latency, "injected_mb_per_s": bandwidth / 1e6, "direction": name,
                "link_latency_us": link.latency * 1e6, "link_mb_per_s": link.bandwidth / 1e6, "seen_s": before,
                "measured_s": took, "predicted_s": said, "error": said / took - 1,
            }
        )  # fmt: skip
    return found


def main() -> None:
    """Run, predict, print."""
    arguments = benchmark_parser(__doc__, "one network, a window of 10 steps each")
    arguments.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the runs there")
    asked = arguments.parse_args()
    window, windows = (10, 2) if asked.quick else (20, 6)
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for i, (latency, bandwidth) in enumerate(LEVELS[:1] if asked.quick else LEVELS):
            path = run((asked.keep or Path(folder)) / str(i), window, windows, latency, bandwidth)
            rows += rows_of(load(path), window, windows, latency, bandwidth)
    for r in rows:
        print(
            f"{r['injected_mb_per_s']:g} MB/s, {r['direction']}: a step of {r['seen_s']:.3f} s becomes "
            f"{r['measured_s']:.3f} s, predicted {r['predicted_s']:.3f} s ({100 * r['error']:+.1f} %)"
        )
    write_rows(asked.json, rows)


if __name__ == "__main__":
    main()
