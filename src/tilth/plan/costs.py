"""What work costs on a machine, as ``analysis.costs`` learned it from a run: for schedulers and planners.

Seconds of a compute are ``fixed + per_token * tokens + per_square * squares``, none of them negative, where squares is
the sum of the squared lengths of the sequences (attention). A communication takes
``messages * latency + bytes on the wire / bandwidth``, both as of rings (Patarasuk and Yuan 2009; Thakur et al. 2005),
which gloo and NCCL use. Each says how far it is off on steps that it has not seen, and answers only for amounts like
those it was fitted on, unless it is asked for what lies beyond.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from tilth.core.errors import DataError, StorageError

FORMAT, VERSION = "tilth-costs", 1
REACH = 1.5
"""Amounts up to so many times beyond the least and the greatest that were fitted are answered for."""
SMALL = 512
"""Bytes up to which a tensor is less than a packet: where all are that small, their time is latency."""
Numbers = np.ndarray | float
Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _null(value: float) -> BeforeValidator:
    """JSON has null for what is no number."""
    return BeforeValidator(lambda found: value if found is None else found)


def _pairs(found: Any) -> list[tuple[Any, Any]]:
    """JSON has an object for numbers by rank."""
    if not isinstance(found, dict):
        raise ValueError("it must be an object of numbers by rank")
    return list(found.items())


@dataclass(frozen=True)
class Error:
    """Relative errors |predicted - measured| / measured of ``count`` rows; nan of none."""

    median: Annotated[float, _null(math.nan)]
    p90: Annotated[float, _null(math.nan)]
    count: int
    held_out: bool = False
    """Whether these rows were kept out of the fit."""


@dataclass(frozen=True)
class Link:
    """How long one kind of communication among so many ranks takes."""

    op: str
    ranks: int
    latency: Cost
    """Seconds a message."""
    bandwidth: Annotated[float, Field(ge=0), _null(math.inf)]
    """Bytes a second; inf where the time does not grow with them."""
    least: int
    greatest: int
    """Bytes of the tensors it was fitted on."""
    count: int
    """Ends of communications that were fitted: each member's."""
    separate: bool
    """Whether sizes differed enough to tell latency and bandwidth apart; if not, all of it is bandwidth, or latency
    where all were ``SMALL``."""
    error: Error
    """Of steps that were not fitted, if there are several."""

    def seconds(self, nbytes: np.ndarray | float) -> np.ndarray:
        """float64 like ``nbytes``: of a communication whose tensor (as ``wire`` counts it) has so many."""
        messages, moved = wire(self.op, self.ranks, nbytes)
        return messages * self.latency + moved / self.bandwidth


def wire(op: str, ranks: int, nbytes: np.ndarray | float) -> tuple[float, np.ndarray]:
    """Messages one after another, and bytes that go over each rank's link, in one communication.

    nbytes: of the rank's own tensor: all_reduce's input, all_gather's own part, reduce_scatter's whole input, what is
    broadcast or sent.
    """
    size, others = np.asarray(nbytes, np.float64), ranks - 1
    if op == "all_reduce":
        return 2.0 * others, 2 * size * others / ranks
    if op == "reduce_scatter":
        return float(others), size * others / ranks
    if op == "all_gather":
        return float(others), size * others
    if op == "broadcast":
        return float(others), size * min(others, 1)
    if op in ("send", "receive"):
        return 1.0, size
    raise DataError(f"{op!r} is no communication whose bytes are known")


@dataclass(frozen=True)
class Compute:
    """What one operation of one role costs. Times in seconds."""

    op: str
    role: str
    fixed: Cost
    """Whenever it is done."""
    per_token: Cost
    per_square: Cost
    """For each of the sum of squared lengths."""
    tokens: tuple[int, int]
    squares: tuple[int, int]
    """The least and the greatest amount of one span; squares are (0, 0) where the trace does not tell them."""
    lengths: tuple[float, float]
    """The least and the greatest mean length of the sequences in a span, squares / tokens."""
    count: int
    ranks: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_pairs)]
    """Each rank, and how many times the fitted seconds it takes (median): above its peers it is slow."""
    separate: bool
    """Whether amounts differed enough to tell the fixed part; if not, all goes by the amounts."""
    separate_squares: bool
    """Whether lengths differed enough to tell squares from tokens; if not, all goes by the tokens."""
    error: Error

    def seconds(self, tokens: Numbers = 0, squares: Numbers = 0, *, beyond: bool = False) -> np.ndarray:
        """float64 [...]: own time of spans of so many tokens and squares. DataError outside of what was fitted."""
        if not beyond:
            what, asked = f"{self.op} of {self.role or 'the run'}", np.asarray(tokens, np.float64)
            _check(what, "tokens", tokens, self.tokens)
            _check(what, "squares", squares, self.squares)
            _check(what, "tokens a sequence", np.asarray(squares, np.float64) / np.maximum(asked, 1), self.lengths)
        return self.fixed + self.per_token * np.asarray(tokens, float) + self.per_square * np.asarray(squares, float)

    def rows(self, lengths: np.ndarray, *, beyond: bool = False) -> np.ndarray:
        """float64 [n]: what each of the sequences adds, as ``packing.balance`` takes it; without the fixed part.

        DataError where one is longer than what was fitted.
        """
        n = np.asarray(lengths, np.float64)
        if not beyond and n.size:
            _check(f"{self.op} of {self.role or 'the run'}", "tokens a sequence", n.max(), (0.0, self.lengths[1]))
        return self.per_token * n + self.per_square * n**2


@dataclass(frozen=True)
class Costs:
    """All that a trace tells."""

    compute: tuple[Compute, ...]
    links: tuple[Link, ...]
    left: tuple[str, ...] = ()
    """Operations that had too few rows, in words."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Where it was measured: run, model, machine; anything that JSON takes."""

    def of(self, op: str, role: str) -> Compute:
        """DataError where there is none."""
        for one in self.compute:
            if (one.op, one.role) == (op, role):
                return one
        known = ", ".join(f"{c.op} of {c.role or 'the run'}" for c in self.compute) or "nothing"
        raise DataError(f"no cost of {op!r} of {role!r} was fitted; there is that of {known}")

    def link(self, op: str, ranks: int) -> Link:
        """DataError where there is none."""
        for one in self.links:
            if (one.op, one.ranks) == (op, ranks):
                return one
        known = ", ".join(f"{k.op} of {k.ranks}" for k in self.links) or "nothing"
        raise DataError(f"no cost of {op!r} among {ranks} ranks was fitted; there is that of {known}")

    def communication(self, op: str, ranks: int, nbytes: Numbers, *, beyond: bool = False) -> np.ndarray:
        """float64 like ``nbytes``: seconds of a transfer. DataError outside of what was fitted."""
        link = self.link(op, ranks)
        if not beyond:
            _check(f"{op} among {ranks} ranks", "bytes", nbytes, (link.least, link.greatest))
        return link.seconds(nbytes)


def _check(what: str, name: str, amount: Numbers, fitted: tuple[float, float]) -> None:
    least, greatest = fitted
    asked = np.asarray(amount, np.float64)
    if not asked.size or greatest == 0:
        return
    for value in (float(asked.min()), float(asked.max())):
        if not least / REACH <= value <= greatest * REACH:
            raise DataError(
                f"the cost of {what} was fitted on {least:,.0f} to {greatest:,.0f} {name}, not on {value:,.0f}: "
                "trace a run with such amounts, or ask for what lies beyond"
            )


def as_dict(costs: Costs) -> dict[str, Any]:
    """As JSON has it; a bandwidth or an error that is no number is null. Times in seconds, bandwidths in bytes/s."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "about": dict(costs.about),
        "compute": [_finite(asdict(c) | {"ranks": {str(r): x for r, x in c.ranks}}) for c in costs.compute],
        "links": [_finite(asdict(k)) for k in costs.links],
        "left": list(costs.left),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_costs(costs: Costs, path: str | Path) -> None:
    """StorageError where the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(as_dict(costs), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def load_costs(path: str | Path) -> Costs:
    """Costs that were saved. DataError names the file, and what in it is wrong."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read costs from {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{path} holds no costs; tilth trace costs RUN --save PATH writes them")
    if found.get("version") != VERSION:
        raise DataError(f"{path} is of version {found.get('version')!r}; this Tilth reads {VERSION}")
    try:
        return TypeAdapter(Costs).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(f"{path} is damaged: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
