"""Verdict of a detector: what happened, on which ranks, with evidence. What to do about it is decided elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = (
    "crash", "hang", "error", "out-of-memory", "not-finite", "slow", "corruption", "collective", "storage",
    "odd-machine", "controller",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """One finding."""

    kind: str
    """One of KINDS."""
    ranks: tuple[int, ...]
    """Culprits; () if nobody can be named."""
    evidence: str
    """One sentence of facts: "rank 5 has not come to all_reduce 12 of group dp; ranks 1, 9 wait for it"."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """JSON."""
