"""Every registered algorithm against its formula, as one table; a name or an option without a reference fails it.

python benchmarks/conformance.py [--quick] [--only NAME ...] [--json FILE] [--markdown FILE]
python benchmarks/conformance.py --bandit

Rows: advantages, policy losses, aggregations, KL forms, corrections, preference losses, the value loss. Columns:
vectors published by running verl's functions; plain loops in float64; invariance to micro-batches, order and padding;
edge cases; two workers; one step of every flow. Exit status 1 if a cell fails. --quick: fewer random batches, workers
as threads only, each entry in one flow. The checks are those of tests/rl/conformance, which `make test` samples.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from driver import benchmark_parser, write_rows

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = benchmark_parser(__doc__, "fewer samples")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows by name or kind")
    parser.add_argument("--bandit", action="store_true", help="bias and variance of the gradient on a bandit")
    parser.add_argument("--markdown", type=Path, help="write the table")
    return parser.parse_args()


def main() -> int:
    """Print the table and write it where asked; the exit status."""
    given = arguments()
    if given.bandit:
        from tests.rl.conformance.bandit import markdown, measure

        measured = measure()
        print(markdown(measured))
        write_rows(given.json, measured)
        _write(given.markdown, markdown(measured))
        return 0
    from tests.rl.conformance import table

    start = time.perf_counter()
    rows = [s for s in table.subjects() if not given.only or {s.name, s.kind} & set(given.only)]
    made = table.make(given.quick, rows, lambda text: print(text, file=sys.stderr, flush=True))
    print(made.markdown())
    took = time.perf_counter() - start
    work = f"{took:.0f} s, {time.process_time():.0f} s of CPU in this process"
    print(f"\n{len(made.cells)} entries, {len(made.failures)} cells fail; {work}")
    write_rows(given.json, [{"quick": given.quick, **row} for row in made.rows()])
    _write(given.markdown, made.markdown() + "\n")
    return 1 if made.failures or not made.cells else 0


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
