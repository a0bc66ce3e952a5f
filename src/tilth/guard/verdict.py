"""Verdict of a detector: what went wrong, on which workers, and how one can tell."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Kind = Literal[
    "crash", "hang", "error", "out-of-memory", "not-finite", "slow", "corruption", "collective", "storage",
    "odd-machine", "leak", "memory", "disk", "files", "clock", "controller",
]  # fmt: skip


KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Verdict:
    """One finding. It blames no machine: ``guard.recovery`` decides what follows from it.

    A symptom has several possible roots (ByteRobust, arXiv 2509.16293), so ranks are those that a fact names, and empty
    where none does.
    """

    kind: Kind
    ranks: tuple[int, ...]
    """Workers at fault; () if nothing names them."""
    evidence: str
    """The facts in one sentence."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """More of them, as JSON."""
