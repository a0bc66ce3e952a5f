"""The report's sampled answers at several steps of a run, each token coloured by its probability."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from tilth.runs.readers import read_trajectories, steps_of
from tilth.ui import format
from tilth.ui.html import render
from tilth.ui.tokens import Pieces, Row, cut, pieces_of, turns

MOMENTS, GROUPS, SAMPLES, TOKENS = 5, 2, 4, 250
"""Most steps, groups of a step, samples of a group and tokens of a sample that are shown."""


def samples(run: Path) -> Markup | None:
    """Render the section; None if there is no trajectory yet."""
    shown, pieces = [], pieces_of(run)
    for step in moments_of(run):
        rows = read_trajectories(run, step).to_pylist()
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        groups = [
            {"prompt": prompt_of(g[0], pieces), "answer": g[0].get("answer"), "samples": [sample(r, pieces) for r in g]}
            for g in groups_of(rows)
        ]
        mean = f", mean reward {format.number(sum(rewards) / len(rewards))}" if rewards else ""
        shown += [{"step": step, "count": len(rows), "mean": mean, "groups": groups}] if rows else []
    return render("samples.html", moments=shown) if shown else None


def moments_of(run: Path) -> list[int]:
    """Choose at most MOMENTS steps with trajectories, evenly spread, with the first and the last."""
    ranges = steps_of(run)
    if not ranges:
        return []
    first, last = ranges[0][0], max(b for _, b in ranges)
    wanted = [first + (last - first) * i / (MOMENTS - 1) for i in range(MOMENTS)]
    return sorted({_nearest(run, ranges, w) for w in wanted})


def _nearest(run: Path, ranges: Sequence[tuple[int, int]], wanted: float) -> int:
    """Return the step with trajectories that is nearest to the wanted one."""
    low, high = min(ranges, key=lambda r: max(r[0] - wanted, wanted - r[1], 0))
    if low == high:
        return low
    inside = np.unique(read_trajectories(run, round(min(max(wanted, low), high)), ["step"])["step"].to_numpy())
    return int(inside[0]) if len(inside) else low


def groups_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Return at most GROUPS groups of samples, those with different rewards first."""
    by_group: dict[int, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row["group"] if row["group"] is not None else row["id"], []).append(row)
    ordered = sorted(by_group.values(), key=lambda g: len({r["reward"] for r in g}) == 1)
    return [_varied(group) for group in ordered[:GROUPS]]


def _varied(group: Sequence[Row]) -> list[Row]:
    """Choose at most SAMPLES, one of each reward in turn; the best come first."""
    kinds: dict[Any, list[Row]] = {}
    for row in group:
        kinds.setdefault(row["reward"], []).append(row)
    chosen: list[Row] = []
    while len(chosen) < min(SAMPLES, len(group)):
        for rows in kinds.values():
            if rows and len(chosen) < SAMPLES:
                chosen.append(rows.pop(0))
    return sorted(chosen, key=lambda r: math.inf if r["reward"] is None else -r["reward"])


def prompt_of(first: Row, pieces: Pieces, limit: int = 1500) -> str:
    """Return the prompt of a trajectory, or its beginning and end."""
    known = first["prompt_text"]
    text = "".join(pieces((first["tokens"] or [])[: first["prompt_length"] or 0])) if known is None else known
    return cut(text, limit)


def sample(row: Row, pieces: Pieces, most: int = TOKENS, by: str = "logprob") -> Row:
    """Return what is shown of a trajectory: its reward, turns of at most ``most`` tokens, coloured as ``by`` says."""
    reward = "missing" if row["reward"] is None else format.number(row["reward"])
    parts = "".join(f", {name} {format.number(value)}" for name, value in row.get("parts") or [])
    count = max(len(row["tokens"] or []) - (row["prompt_length"] or 0), 0)
    shown = turns(row, pieces, most, by)
    return {
        "kind": format.verdict(row), "reward": reward, "title": f"reward {reward}{parts}", "turns": shown,
        "more": max(count - most, 0) if shown else 0, "text": cut(row["text"] or "", 1500),
        "cut": row["finish"] == "length",
    }  # fmt: skip
