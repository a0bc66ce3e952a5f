"""What the what-if analysis costs: seconds and memory for each trace, and for 1,024 workers x 50 steps.

    python benchmarks/whatif.py [--quick] [--json PATH] [--data FOLDER]

Each trace is read, analysed (S and all its parts, exact S of every worker, M_W, M_S) and diagnosed in a process of its
own, several times: ``first`` with imports warm, ``warm`` the median of the others, ``cpu`` the least processor time of
a pass, ``peak`` the most memory the process ever had, ``base`` that with the libraries alone. The synthetic job is 1F1B
over 8 stages x 128 data-parallel ranks of 16 micro-batches, written to a file first and read like any other. --quick:
8 x 16 workers, 10 steps.

Published for the study's own tool on 2 cores: 1.24 to 1.33 s and 212 MB (AR), 0.99 to 1.12 s and 208 MB (SE), after
which M_W and M_S take 1.0 to 1.5 s more; it has no exact S of workers.
"""

import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from driver import benchmark_parser, write_rows
from pipeline_schedules import orders, synthetic, to_table
from tilth_studies.cause import diagnose
from tilth_studies.straggler_format import OPTYPES, Trace, read_study
from tilth_studies.whatif import TraceModel, what_if

DATA = Path(__file__).parents[2] / "shared" / "data" / "stragglers"
SECONDS = {
    "forward-compute": 0.1, "backward-compute": 0.2, "forward-recv": 0.004, "forward-send": 0.004,
    "backward-recv": 0.004, "backward-send": 0.004, "params-all-gather": 0.05, "grads-reduce-scatter": 0.08,
    "optimizer": 0.03,
}  # fmt: skip


def peak() -> float:
    """Most resident memory so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def analyse(path: Path, repeats: int) -> dict[str, Any]:
    """Seconds of each pass, parts of the last one, and memory."""
    base, passes, used = peak(), [], []
    for _ in range(repeats):
        began, cpu = time.perf_counter(), time.process_time()
        trace = read_study(path)
        read = time.perf_counter() - began
        model = TraceModel(trace)
        found = what_if(trace, model)
        cause = diagnose(model, found)
        passes.append(time.perf_counter() - began)
        used.append(time.process_time() - cpu)
    return {
        "trace": path.stem, "rows": int(trace.start.size), "workers": int(found.exact.size), "steps": len(found.steps),
        "first_s": passes[0], "warm_s": statistics.median(passes[1:] or passes), "read_s": read, "cpu_s": min(used),
        "peak_mb": peak(), "base_mb": base, "slowdown": found.slowdown, "model_error": found.error,
        "cause": [f.kind for f in cause.findings],
    }  # fmt: skip


def write(path: Path, stages: int, dp: int, steps: int) -> None:
    """A 1F1B job with noise of 5 %, in which one worker is 1.4 times as slow."""

    def durations(trace: Trace) -> np.ndarray:
        usual = np.array([SECONDS.get(name, 0.0) for name in OPTYPES])[trace.optype]
        noise = np.random.default_rng(0).lognormal(0, 0.05, trace.start.shape)
        took = usual[:, None, None] * noise
        took[(trace.stage == 1) & trace.named("forward-compute", "backward-compute"), :, 3] *= 1.4
        return took

    trace = synthetic(orders("1f1b", stages, 16), durations, dp=dp, steps=steps)
    pq.write_table(to_table(trace), path)


def main() -> None:
    """Run and print."""
    arguments = benchmark_parser(__doc__, "three repeats, a job of 8 x 16 workers")
    arguments.add_argument("--data", type=Path, default=DATA)
    asked = arguments.parse_args()
    alone = multiprocessing.get_context("spawn")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        big = Path(folder) / "synthetic.parquet"
        writer = alone.Process(target=write, args=(big, *((8, 16, 10) if asked.quick else (8, 128, 50))))
        writer.start()
        writer.join()
        cases = [(p, 3 if asked.quick else 9) for p in sorted(asked.data.glob("trace-*.parquet"))] + [(big, 2)]
        for path, repeats in cases:
            with alone.Pool(1) as pool:
                results.append(r := pool.apply(analyse, (path, repeats)))
            print(
                f"{r['trace']:<12} {r['workers']:>5} workers x {r['steps']:>2} steps, {r['rows']:>9,} rows: first "
                f"{r['first_s']:.2f} s, warm {r['warm_s']:.2f} s (reading {r['read_s']:.2f}; "
                f"CPU time {r['cpu_s']:.2f}), "
                f"peak {r['peak_mb']:.0f} MB "
                f"(libraries {r['base_mb']:.0f}), S {r['slowdown']:.4f}, error {100 * r['model_error']:.2f} %, "
                f"{', '.join(r['cause']) or 'no cause'}"
            )  # fmt: skip
    write_rows(asked.json, results)


if __name__ == "__main__":
    main()
