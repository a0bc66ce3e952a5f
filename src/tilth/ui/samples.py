"""The report's sampled answers at several steps of a run, each token coloured by its probability."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from tilth.core.errors import DataError
from tilth.runs.readers import read_trajectories, steps_of
from tilth.ui import format
from tilth.ui.html import render

MOMENTS, GROUPS, SAMPLES, TOKENS = 5, 2, 4, 250
"""Most steps, groups of a step, samples of a group and tokens of a sample that are shown."""
BOUNDS = (0.99, 0.9, 0.75, 0.5, 0.25, 0.1, 0.01)
"""Probabilities between the colours: class p0 is at least the first, p7 below the last."""
Row = dict[str, Any]
Pieces = Callable[[Sequence[int]], list[str]]


def samples(run: Path) -> Markup | None:
    """Render the section; None if there is no trajectory yet."""
    shown, pieces = [], pieces_of(run)
    for step in moments_of(run):
        rows = read_trajectories(run, step).to_pylist()
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        groups = [
            {"prompt": _prompt(g[0], pieces), "answer": g[0].get("answer"), "samples": [_sample(r, pieces) for r in g]}
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


def pieces_of(run: Path) -> Pieces:
    """Return a function from token ids to texts, by the run's tokenizer; without one it returns the ids."""
    from tilth.data.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(run / "model")
    except DataError:
        return lambda ids: [f"⟨{i}⟩" for i in ids]
    known: dict[int, str] = {}

    def pieces(ids: Sequence[int]) -> list[str]:
        return [known.setdefault(i, tokenizer.decode([i], special=True)) for i in ids]

    return pieces


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


def _prompt(first: Row, pieces: Pieces) -> str:
    known = first["prompt_text"]
    text = "".join(pieces((first["tokens"] or [])[: first["prompt_length"] or 0])) if known is None else known
    return _cut(text, 1500)


def _sample(row: Row, pieces: Pieces) -> Row:
    reward = "missing" if row["reward"] is None else format.number(row["reward"])
    parts = "".join(f", {name} {format.number(value)}" for name, value in row.get("parts") or [])
    start = row["prompt_length"] or 0
    ids = (row["tokens"] or [])[start:]
    shown = ids[:TOKENS] if row["logprobs"] else []
    return {
        "kind": format.verdict(row), "reward": reward, "title": f"reward {reward}{parts}",
        "turns": _turns(row, start, start + len(shown), pieces), "more": len(ids) - len(shown),
        "text": _cut(row["text"] or "", 1500), "cut": row["finish"] == "length",
    }  # fmt: skip


def _turns(row: Row, start: int, end: int, pieces: Pieces) -> list[Row]:
    """Return the parts of a sample: the policy's tokens in colours, and between them what its environment said."""
    known = [(s["role"], s["start"]) for s in row.get("segments") or []] or [("assistant", start)]
    borders = [*(at for _, at in known), end]
    found: list[Row] = []
    paid = iter(row.get("turn_rewards") or [])
    for (role, at), after in zip(known, borders[1:]):
        earned = next(paid, None) if role == "assistant" else None
        a, b = max(at, start), min(after, end)
        ids = row["tokens"][a:b] if a < b else []
        if role == "assistant" and ids:
            tokens = [_token(*token) for token in zip(pieces(ids), ids, row["logprobs"][a:b])]
            found.append({"tokens": tokens, "role": "", "text": "", "reward": format.number(earned) if earned else ""})
        elif ids:
            text = _cut("".join(pieces(ids)), 1500)
            found.append({"tokens": [], "role": role, "text": text, "count": len(ids), "reward": ""})
    return found


def _token(text: str, token: int, logprob: float) -> tuple[str, str, str, int]:
    """Return text, class, log-prob and id of a token."""
    kind = sum(math.exp(min(logprob, 0.0)) < bound for bound in BOUNDS)
    special = text.startswith("<") and text.endswith(">") and len(text) > 2
    return text.replace("\n", "⏎\n") or "·", f"p{kind} special" if special else f"p{kind}", f"{logprob:.4g}", token


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"
