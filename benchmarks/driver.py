"""The options that every benchmark takes, and the rows that it writes."""

import argparse
import json
from pathlib import Path
from typing import Any


def benchmark_parser(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """A parser with ``--quick`` and ``--json``. doc: of the script, printed by --help; quick: what is smaller then."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help=f"{quick}; within a minute")
    made.add_argument("--json", type=Path, metavar="PATH", help="write the rows here")
    return made


def write_rows(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Write the rows so far. The file is whole at any time, for those who interrupt the script."""
    if path is not None:
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(rows, indent=1) + "\n")
        part.replace(path)
