"""Saving and loading a model with its optimizer state, beside torch.distributed.checkpoint and torch.save.

    python benchmarks/checkpoint.py [--quick] [--json PATH] [--ranks 1,2,4] [--mb 50,500,4000] [--folder DIR]
        [--methods "tilth,DCP save"] [--rounds 3] [--pairs 12] [--step 0.2] [--device cpu]

Weights of a decoder and Adam's moments, so many megabytes in all, divided by fsdp over processes of this machine, one
thread each. The distributed checkpoint is set as it is best at saving again and again (``checkpoint_methods.py``).
First what each way loads is compared bit for bit with what it saved, which had been changed in the meantime; then:

- stall: extra time of the ten steps from a save on, against ten steps without one. A step is matrix products that take
  0.2 s where there is a core for each rank, a change of every tensor, and a barrier; so work that a save does behind
  the steps counts where it takes their cores. The two in turns, "pairs" of them: the median of their differences and
  its 95 % interval by bootstrap, for on a shared machine two such series may differ by more than a save costs.
- call: until the call returns and the state may be changed. durable: from the call until all ranks' bytes and the
  commit are synchronised to disk, no steps beside it. Slowest rank, median. cpu: processor time of all ranks until
  then, threads and child processes included; a busy machine changes it little.
- load: into memory that is there, in the same layout. warm: all files were read just before; cold: they were put out of
  the page cache. Tilth compares checksums of all that it reads; nobody else does.
- columns: the first of four ranks that divide matrices by columns loads its quarter, saved by rows; "read" is what the
  process read of files (rchar, or what the library says, if it is more), over all bytes saved.
- peak: memory above that before the first save, at the greatest, in all ranks; kept copies and child processes
  included, shared memory once.

On a GPU (``--device cuda --ranks 1``) state and steps are there, and the distributed checkpoint stages through pinned
memory; memory is still the host's. The quarter of the columns is loaded on the CPU.

Goals, as ratios below each row of Tilth: stall at most a fifth of DCP's save and half of the best of its asynchronous
saves ("+": staged in a thread, too); durable and both loads at most DCP's best; a quarter of the columns at most 0.3 of
the bytes. Exit status 1 if bits or bytes are wrong; whether times reach their goals depends on how quiet it is around.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from driver import benchmark_parser, write_rows
from work import same_work

METHODS = ("tilth", "DCP save", "DCP thread", "DCP thread+", "DCP process", "DCP process+", "torch.save")
QUICK = tuple(name for name in METHODS if not name.endswith("+"))
RESHARDS = ("tilth", "DCP save")
"""Those of which another layout is loaded: all of DCP write the same."""
RANK = Path(__file__).parent / "checkpoint_rank.py"
GOALS = {
    "stall_s": {"DCP save": 0.2, "best async": 0.5},
    "durable_s": {"best DCP": 1.0},
    "warm_s": {"best DCP": 1.0},
    "cold_s": {"best DCP": 1.0},
}
"""Column -> beside whom -> at most this ratio."""
MOST_READ = 0.3
COLUMNS = ("stall_s", "stall_low_s", "stall_high_s", "call_s", "durable_s", "cpu_s", "warm_s", "cold_s", "columns_s")
Row = dict[str, Any]


def start(arguments: Mapping[str, object], rank: int, folder: Path) -> subprocess.Popen[bytes]:
    """A process of ``checkpoint_rank.py``."""
    given = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "PYTHONWARNINGS": "ignore"}
    with open(folder / f"log-{rank}", "wb") as log:
        command = [sys.executable, str(RANK), "--rank", str(rank), "--folder", str(folder), *given]
        return subprocess.Popen(command, env={**os.environ, **quiet}, stdout=log, stderr=log)


def _failed(started: Sequence[subprocess.Popen[bytes]], folder: Path) -> str:
    """What every rank that failed said last: the first to fail takes the others with it."""
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    failed = [rank for rank, process in enumerate(started) if process.poll()]
    return "\n".join(f"rank {r} failed ({started[r].returncode}):\n{_log(folder, r)}" for r in failed)


def _log(folder: Path, rank: int) -> str:
    return (folder / f"log-{rank}").read_text()[-2000:]


def ranks(arguments: Mapping[str, object], count: int, folder: Path) -> list[dict[str, Any]]:
    """What so many processes found, by rank. RuntimeError with the logs of those that failed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    started = [start(arguments, rank, folder) for rank in range(count)]
    try:
        for process in started:
            if process.wait():
                raise RuntimeError(_failed(started, folder))
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(count)]


def slowest(found: Sequence[Mapping[str, Any]], key: str) -> float:
    """Median over repeats of the slowest rank's seconds."""
    return median(max(seconds) for seconds in zip(*(one[key] for one in found)))


def stall(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median of what the slowest rank's steps take longer, pair by pair, and its 95 % interval by bootstrap."""
    beside, without = (np.array([one[key] for one in found]).max(0) for key in ("beside", "without"))
    again = np.median(np.random.default_rng(0).choice(beside - without, (2000, len(beside))), axis=1)
    low, high = np.quantile(again, [0.025, 0.975])
    return {"stall_s": float(np.median(beside - without)), "stall_low_s": float(low), "stall_high_s": float(high)}


def row(name: str, found: Sequence[Mapping[str, Any]], nbytes: int) -> Row:
    """One way to save, in numbers."""
    return {
        "method": name,
        "same": all(one["same"] for one in found),
        **stall(found),
        "ten_steps_s": slowest(found, "without"),
        "call_s": slowest(found, "calls"),
        "first_call_s": max(one["first"] for one in found),
        "durable_s": slowest(found, "durable"),
        "cpu_s": median(sum(seconds) for seconds in zip(*(one["cpu"] for one in found))),
        "warm_s": slowest(found, "warm"),
        "cold_s": slowest(found, "cold"),
        "stored_bytes": max(one["stored"] for one in found),
        "read_share": sum(one["read"] for one in found) / nbytes,
        "peak_bytes": sum(one["peak"] for one in found),
        "repeats": {key: [one[key] for one in found] for key in ("calls", "durable", "without", "beside", "warm")},
    }


def columns(name: str, found: Sequence[Mapping[str, Any]], common: Mapping[str, object], place: Path) -> Row:
    """The quarter that one rank of another layout loads."""
    keys = {**common, "methods": name, "reshard": found[0]["kept"]}
    (loaded,) = ranks(keys, 1, place / "columns")
    return {
        "columns_s": median(loaded["seconds"]),
        "columns_read": loaded["read"],
        "columns_asked": loaded["asked"],
        "columns_same": loaded["prints"] == [one["prints"] for one in found],
    }


def rows(count: int, megabytes: float, options: argparse.Namespace, place: Path) -> Iterator[Row]:
    """All ways at one size on one number of ranks."""
    common: dict[str, object] = {"ranks": count, "mb": megabytes, "rounds": options.rounds, "step": options.step}
    common |= {"pairs": options.pairs, "device": options.device}
    found = ranks({**common, "methods": options.methods}, count, place / "ranks")
    nbytes = sum(one["nbytes"] for one in found)
    made = dict[str, Row]()
    for name in options.methods.split(","):
        seen = [one["found"][name] for one in found]
        made[name] = {"ranks": count, "mb": megabytes, "bytes": nbytes, **row(name, seen, nbytes)}
        if name in RESHARDS:
            made[name] |= columns(name, seen, common, place)
    if "tilth" in made:
        made["tilth"]["ratios"] = ratios(made)
    yield from made.values()


def ratios(made: Mapping[str, Row]) -> dict[str, dict[str, float]]:
    """Column -> beside whom -> Tilth's part of its seconds."""
    others = [name for name in made if name.startswith("DCP")]
    waits_not = [name for name in others if name != "DCP save"]
    same_work({name: {"bytes": row["stored_bytes"], "equal_states": row["same"]} for name, row in made.items()}, 0.05)
    found: dict[str, dict[str, float]] = {}
    for column, beside in GOALS.items():
        best = {"best DCP": others, "best async": waits_not, "DCP save": ["DCP save"]}
        times = {key: [made[name][column] for name in names if name in made] for key, names in best.items()}
        found[column] = {key: made["tilth"][column] / min(times[key]) for key in beside if times[key]}
    return found


def failures(row: Row) -> list[str]:
    """Bits and bytes that are wrong."""
    found = [f"{what} has other bits" for what in ("same", "columns_same") if not row.get(what, True)]
    if row["method"] == "tilth" and most_read(row) > MOST_READ * row["bytes"]:
        found.append(f"a quarter of the columns read {most_read(row) / row['bytes']:.2f} of the bytes")
    return found


def most_read(row: Row) -> int:
    """Bytes for the quarter of the columns, by the kernel's count or by the library's, whichever is more."""
    return max(row["columns_read"], row["columns_asked"])


WIDTHS = {"stall_low_s": 7, "stall_high_s": 7}
NAMES = ("stall", "from", "to", "call", "durable", "cpu", "warm", "cold", "columns")
HEAD = " ".join(
    [f"{'ranks':>5} {'MB':>5} {'':12}", *(f"{n:>{WIDTHS.get(c, 8)}}" for c, n in zip(COLUMNS, NAMES)), " read  peak MB"]
)


def line(row: Row) -> str:
    """A row for people, seconds to the millisecond; below Tilth's the ratios that have goals."""
    seconds = " ".join(f"{row[c]:{WIDTHS.get(c, 8)}.3f}" if c in row else " " * 8 for c in COLUMNS)
    read = f"{most_read(row) / row['bytes']:5.2f}" if "columns_read" in row else " " * 5
    said = f"{row['ranks']:5} {row['mb']:5.0f} {row['method']:12} {seconds} {read} {row['peak_bytes'] / 1e6:8.0f}"
    if "ratios" in row:
        said += "\n" + " " * 12 + "; ".join(goals(row["ratios"]))
    return "; ".join([said, *(f"WRONG: {text}" for text in failures(row))])


def goals(found: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Each ratio beside its goal."""
    for column, beside in found.items():
        for name, ratio in beside.items():
            most = GOALS[column][name]
            reached = "" if ratio <= most else " MISSED"
            yield f"{column.removesuffix('_s')}/{name} {ratio:.2f} (goal {most:g}{reached})"


def main() -> None:
    parser = benchmark_parser(__doc__, "50 MB on 2 ranks, one repeat of short steps")
    parser.add_argument("--ranks", default="")
    parser.add_argument("--mb", default="")
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary directory")
    parser.add_argument("--rounds", type=int, default=0, help="repeats; default 3, with --quick 1")
    parser.add_argument("--pairs", type=int, default=0, help="of ten steps, for the stall; default 12, with --quick 2")
    parser.add_argument("--step", type=float, default=0.0, help="seconds of a step; default 0.2, with --quick 0.05")
    parser.add_argument("--methods", default="", help="default all; with --quick without those of +")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.pairs = options.pairs or (2 if options.quick else 12)
    options.methods = options.methods or ",".join(QUICK if options.quick else METHODS)
    options.step = options.step or (0.05 if options.quick else 0.2)
    found, sizes = list[Row](), options.mb or ("50" if options.quick else "50,500,4000")
    print(HEAD)
    for megabytes in map(float, sizes.split(",")):
        for count in map(int, (options.ranks or ("2" if options.quick else "1,2,4")).split(",")):
            with tempfile.TemporaryDirectory(dir=options.folder) as place:
                for one in rows(count, megabytes, options, Path(place)):
                    found.append(one)
                    print(line(one), flush=True)
                    write_rows(options.json, found)
    sys.exit(any(failures(one) for one in found))


if __name__ == "__main__":
    main()
