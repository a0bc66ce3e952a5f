"""Turns of a sampled trajectory with a colour and a number for each token, for the report and the page."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilth.core.errors import DataError
from tilth.envs.calls import find_calls
from tilth.ui import format

BOUNDS = (0.99, 0.9, 0.75, 0.5, 0.25, 0.1, 0.01)
"""Probabilities between the colours: class p0 is at least the first, p7 below the last."""
APART = (1e-6, 1e-4, 1e-3, 1e-2, 0.05, 0.2, 1.0)
"""Differences in nats between the colours: class p0 is below the first, p7 at least the last."""
COLOURINGS = {
    "logprob": "log-prob in the rollout engine", "advantage": "advantage", "mask": "mask", "version": "version",
    "difference": "log-prob in the trainer less that in the rollout engine",
}  # fmt: skip
"""Colouring -> title of its number."""
TEXT = 1500  # most characters of what an environment said
BRIEF = 60  # most characters of it that are seen while it is folded
MARKS = r"<\|[^|>]+\|>(?:\w+\n)?"
"""Marks of a chat template, with the role behind them."""
Row = dict[str, Any]
Pieces = Callable[[Sequence[int]], list[str]]


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


def numbers(row: Row, by: str) -> list[float] | None:
    """Return the number of each token of a trajectory in a colouring; None if the run did not write it."""
    if by == "version":
        return None if row.get("version") is None else [row["version"]] * len(row["tokens"] or [])
    if by == "difference":
        trained, drawn = row.get("trainer_logprobs"), row["logprobs"]
        return None if trained is None or drawn is None else [a - b for a, b in zip(trained, drawn)]
    found: list[float] | None = row.get({"logprob": "logprobs", "mask": "mask", "advantage": "advantages"}[by])
    return found


def colour_of(by: str, value: float) -> str:
    """Return the class of a number: p0 to p7 from usual to odd, v0 to v7 of versions."""
    if by == "logprob":
        return f"p{sum(math.exp(min(value, 0.0)) < bound for bound in BOUNDS)}"
    if by == "difference":
        return f"p{sum(abs(value) >= bound for bound in APART)}"
    if by == "advantage":
        return "z" if not value else f"{'up' if value > 0 else 'down'}{min(int(abs(value) * 2), 3)}"
    return f"v{int(value) % 8}" if by == "version" else "up2" if value else "z"


def turns(row: Row, pieces: Pieces, most: int, by: str = "logprob") -> list[Row]:
    """Return the turns of a trajectory up to ``most`` tokens behind its prompt: the policy's with a colour and a number
    for each token, and what its environment said between them as text."""
    start = row["prompt_length"] or 0
    values, known = numbers(row, by), [(s["role"], s["start"]) for s in row.get("segments") or []]
    known = known or [("assistant", start)]
    end = min(start + most, len(row["tokens"] or [])) if values is not None else start
    borders = [*(at for _, at in known), end]
    found: list[Row] = []
    paid, opens = iter(row.get("turn_rewards") or []), {*(row.get("conversations") or [])[1:]}
    for (role, at), after in zip(known, borders[1:]):
        earned = next(paid, None) if role == "assistant" else None
        a, b = max(at, start), min(after, end)
        if a >= b or values is None:
            continue
        ids, texts = row["tokens"][a:b], pieces(row["tokens"][a:b])
        turn = {"role": role, "count": len(ids), "text": "", "tokens": [], "calls": [], "opens": at in opens}
        if role == "assistant":
            turn |= {"tokens": [token(*one, by) for one in zip(texts, ids, values[a:b])], "calls": called(texts)}
        else:
            turn["text"] = cut("".join(texts), TEXT)
            turn["brief"] = cut(" ".join(re.sub(MARKS, " ", turn["text"]).split()), BRIEF)
        found.append(turn | {"reward": format.number(earned) if earned else ""})
    return found


def called(texts: Sequence[str]) -> list[str]:
    """Return the names of the tools that a turn calls."""
    return ["nothing that can be called" if call.problem else call.name for call in find_calls("".join(texts))[1]]


def token(text: str, number: int, value: float, by: str) -> tuple[str, str, str, int]:
    """Return text, class, value and id of a token."""
    kind = colour_of(by, value)
    special = text.startswith("<") and text.endswith(">") and len(text) > 2
    return text.replace("\n", "⏎\n") or "·", f"{kind} special" if special else kind, f"{value:.4g}", number


def cut(text: str, limit: int) -> str:
    """Return a text, or its beginning and end."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"
