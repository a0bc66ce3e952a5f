"""Two versions of this repository side by side: the same benchmarks of each, in turns, and the ratio of their figures.

    git worktree add ../before SOME_COMMIT
    python benchmarks/versions.py ../before --pairs 3 -- train.py --models 6M --contenders tilth --rounds 5

What follows ``--`` runs in both folders, each with its own sources and its own script, ``--json`` added. Rows that
carry the same texts are compared, in their order, and only if they count the same work (``WORK``). A ratio is the speed
of this version over that of the other: above 1, this is faster.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from driver import benchmark_parser, write_rows
from work import same_work

HERE = Path(__file__).parents[1]
FASTER_IF_MORE = ("per_s", "per_second", "tokens_per", "mfu")
TIMES = ("seconds", "_s", "_ms")
WORK = ("tokens", "samples", "steps", "bytes", "values", "episodes", "generated_tokens")
"""Keys of a row that count what was done."""


def rows_of(folder: Path, command: Sequence[str]) -> list[dict[str, Any]]:
    """Run a script of this folder's benchmarks. Raises CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made) / "rows.json"
        program = [sys.executable, str(folder / "benchmarks" / command[0]), *command[1:], "--json", str(path)]
        subprocess.run(
            program,
            check=True,
            cwd=made,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(folder / "src")},
        )
        found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def texts(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Keys whose values are texts."""
    return {key for row in rows for key, value in row.items() if isinstance(value, str)}


def speeds(rows: Sequence[Mapping[str, Any]], keys: Collection[str]) -> dict[tuple[str, ...], float]:
    """Each figure that says how fast something was, by the texts of its row at ``keys``, the row's number among those
    with equal texts, and its own name; more is faster."""
    found, seen = {}, Counter[tuple[str, ...]]()
    for row in rows:
        own = tuple(f"{k}={v}" for k, v in sorted(row.items()) if k in keys and isinstance(v, str))
        seen[own] += 1
        name = own if seen[own] == 1 else (*own, f"row {seen[own]}")
        for key, value in row.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                continue
            if any(word in key for word in FASTER_IF_MORE):
                found[*name, key] = float(value)
            elif key.endswith(TIMES):
                found[*name, key] = 1 / float(value)
    return found


def work_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Sums of what rows count, under the keys of ``WORK``."""
    found = Counter[str]()
    for row in rows:
        found.update({key: row[key] for key in WORK if isinstance(row.get(key), int | float)})
    return dict(found)


def main() -> None:
    parser = benchmark_parser(__doc__, "one pair of a small benchmark, against this version itself")
    parser.add_argument(
        "other", nargs="?", type=Path, default=HERE, help="folder of the other version; default: this one"
    )
    parser.add_argument("--pairs", type=int, default=3)
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, command = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :] or ["network.py", "--quick"]
    ratios: dict[tuple[str, ...], list[float]] = {}
    folders = {"this": HERE, "other": args.other.resolve()}
    for pair in range(1 if args.quick else args.pairs):
        turns = reversed(folders) if pair % 2 else folders
        made = {which: rows_of(folders[which], command) for which in turns}
        keys = texts(made["this"]) & texts(made["other"])  # a version may have more columns than the other
        counted = {which: work_of(rows) for which, rows in made.items()}
        both = counted["this"].keys() & counted["other"].keys()
        same_work({which: {kind: counted[which][kind] for kind in both} for which in folders})
        found = {which: speeds(made[which], keys) for which in folders}
        if not found["this"].keys() & found["other"].keys():
            raise SystemExit(f"{command[0]}: the two versions have no row in common")
        for name in found["this"].keys() & found["other"].keys():
            ratios.setdefault(name, []).append(found["this"][name] / found["other"][name])
    rows = [
        {"script": command[0], "figure": name[-1], "case": ", ".join(name[:-1]), "pairs": len(each),
         "ratio": statistics.median(each), "lowest_ratio": min(each), "highest_ratio": max(each)}
        for name, each in sorted(ratios.items())
    ]  # fmt: skip
    for row in rows:
        span = f"{row['lowest_ratio']:.3f} to {row['highest_ratio']:.3f}"
        print(f"{row['ratio']:.3f} ({span})  {row['figure']}  {row['case']}")
    write_rows(args.json, rows)


if __name__ == "__main__":
    main()
