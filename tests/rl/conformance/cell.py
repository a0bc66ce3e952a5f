"""What one check of one entry found: agreement with the largest difference, a failure, or why it does not apply."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

State = Literal["pass", "fail", "n/a"]


@dataclass(frozen=True)
class Subject:
    """A row of the table: an entry by kind and name. ``value`` and the like are functions without a registry."""

    kind: str
    name: str


class NotApplicable(Exception):
    """Raised by a check that an entry cannot have; its text is the reason."""


@dataclass
class Gap:
    """The largest difference that a check has seen, in units of what is allowed, and the first that is too large."""

    tolerance: float
    largest: float = 0.0
    wrong: str = ""
    seen: int = 0

    def see(self, actual: Any, expected: Any, what: str, tolerance: float | None = None) -> None:
        """Compare numbers or tensors; differences are relative where the expected number is above 1. NaN: a failure."""
        found, wanted = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (actual, expected))
        self.seen += 1
        if found.shape != wanted.shape:
            self.fail(f"{what}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}")
            return
        apart = ((found - wanted).abs() / wanted.abs().clamp(min=1)).flatten()
        worst = float(apart.max()) if len(apart) else 0.0
        self.largest = worst if math.isnan(worst) else max(self.largest, worst)
        if not worst <= (self.tolerance if tolerance is None else tolerance):
            place = int(torch.where(apart.isnan(), torch.inf, apart).argmax())
            self.fail(f"{what}: {float(found.flatten()[place]):.7g}, expected {float(wanted.flatten()[place]):.7g}")

    def same(self, actual: Tensor, expected: Tensor, what: str) -> None:
        """The same bits."""
        self.see(actual, expected, what, 0.0)

    def true(self, holds: Any, what: str) -> None:
        """A statement that must hold."""
        self.seen += 1
        if not bool(holds):
            self.fail(what)

    def fail(self, what: str) -> None:
        """Remember the first failure."""
        self.wrong = self.wrong or what


@dataclass(frozen=True)
class Cell:
    """One cell. note: the reason, or what went wrong; largest: of all differences seen."""

    state: State
    note: str = ""
    largest: float = 0.0
    seconds: float = field(default=0.0, compare=False)

    def text(self) -> str:
        """For a table: pass, fail with the largest difference, or n/a (the reason is in the legend)."""
        return f"fail {self.largest:.0e}" if self.state == "fail" else self.state


Check = Callable[[Subject], Gap]


def cell(check: Check, subject: Subject) -> Cell:
    """Run a check; whatever it raises is a failed cell, so that the rest of the table is still made."""
    start = time.perf_counter()
    try:
        gap = check(subject)
        wrong = gap.wrong or ("" if gap.seen else "nothing was compared")
        found: tuple[State, str, float] = ("fail" if wrong else "pass", wrong, gap.largest)
    except NotApplicable as reason:
        found = ("n/a", str(reason), 0.0)
    except Exception as error:  # noqa: BLE001 - a crash of one entry must not hide the others
        found = ("fail", f"{type(error).__name__}: {error}", math.inf)
    return Cell(*found, seconds=time.perf_counter() - start)
