"""Cost models of a machine, fitted by ``analysis.costs`` on a traced run: for schedulers and planners.

Seconds of a compute are ``fixed + per_token * tokens + per_square * squares``, none of them negative, where squares is
the sum of the squared lengths of the sequences (attention). A communication takes
``messages * latency + bytes on the wire / bandwidth``, both as of rings (Patarasuk and Yuan 2009; Thakur et al. 2005),
which gloo and NCCL use. Each model states its error on held-out steps, and raises for amounts beyond those it was
fitted on unless extrapolation is asked for (``beyond=True``).
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from tilth.core.errors import DataError
from tilth.core.files import atomic_write

FORMAT, VERSION = "tilth-costs", 1
LEARN = "learn"
"""Operation of ``Compute``: both passes of a micro-batch, and its loss."""
REACH = 1.5
"""Factor by which an amount may lie beyond the least and the greatest that were fitted."""
SMALL = 512
"""Bytes of one packet: if all tensors are smaller, their time is latency alone."""
Numbers = np.ndarray | float
Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _null(value: float) -> BeforeValidator:
    """Read JSON's null as this value."""
    return BeforeValidator(lambda found: value if found is None else found)


def _pairs(found: Any) -> list[tuple[Any, Any]]:
    """Read an object of numbers by rank as pairs."""
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
    """True if these rows were kept out of the fit."""


@dataclass(frozen=True)
class Link:
    """Time of one kind of communication among N ranks."""

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

    nbytes: of the rank's own tensor: all_reduce's input, all_gather's own part, reduce_scatter's whole input, what
    all_to_all sends to others, what is broadcast or sent.
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
    if op == "all_to_all":
        return float(others), size
    if op in ("send", "receive"):
        return 1.0, size
    raise DataError(f"{op!r} is no communication with known bytes on the wire", key=op)


@dataclass(frozen=True)
class Compute:
    """Cost of one operation of one role. Times in seconds."""

    op: str
    role: str
    fixed: Cost
    """Per span."""
    per_token: Cost
    per_square: Cost
    """Per unit of the sum of squared lengths."""
    tokens: tuple[int, int]
    squares: tuple[int, int]
    """Least and greatest amount of one span; squares are (0, 0) if the trace does not record them."""
    lengths: tuple[float, float]
    """Least and greatest mean length of the sequences in a span, squares / tokens."""
    count: int
    ranks: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_pairs)]
    """(rank, its median time over the fitted time): a rank above its peers is slow."""
    separate: bool
    """True if amounts differed enough to fit the fixed part; else it is 0."""
    separate_squares: bool
    """True if lengths differed enough to separate squares from tokens; else ``per_square`` is 0."""
    error: Error

    def seconds(self, tokens: Numbers = 0, squares: Numbers = 0, *, beyond: bool = False) -> np.ndarray:
        """Return the time of spans with these tokens and squares, float64 [...]. Raises DataError beyond the fit."""
        if not beyond:
            what, asked = f"{self.op} of {self.role or 'the run'}", np.asarray(tokens, np.float64)
            _check(what, "tokens", tokens, self.tokens)
            _check(what, "squares", squares, self.squares)
            _check(what, "tokens a sequence", np.asarray(squares, np.float64) / np.maximum(asked, 1), self.lengths)
        return self.fixed + self.per_token * np.asarray(tokens, float) + self.per_square * np.asarray(squares, float)

    def rows(self, lengths: np.ndarray, *, beyond: bool = False) -> np.ndarray:
        """Return the cost of each sequence without the fixed part, float64 [n], for ``packing.balance``.

        Raises DataError if one is longer than the fitted sequences.
        """
        n = np.asarray(lengths, np.float64)
        if not beyond and n.size:
            _check(f"{self.op} of {self.role or 'the run'}", "tokens a sequence", n.max(), (0.0, self.lengths[1]))
        return self.per_token * n + self.per_square * n**2


@dataclass(frozen=True)
class Costs:
    """All costs fitted on one trace."""

    compute: tuple[Compute, ...]
    links: tuple[Link, ...]
    left: tuple[str, ...] = ()
    """Descriptions of operations with too few rows for a fit."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Origin: run, model, machine; any JSON values."""
    ring: Cost = 0.0
    """Seconds in which keys and values of one token, and their gradients, visit the ranks that divide its sequence
    (``layout.hdp``), in all layers; 0: not measured."""

    def of(self, op: str, role: str) -> Compute:
        """Return the cost of an operation of a role. Raises DataError if none was fitted."""
        for one in self.compute:
            if (one.op, one.role) == (op, role):
                return one
        known = ", ".join(f"{c.op} of {c.role or 'the run'}" for c in self.compute) or "nothing"
        raise DataError(f"no cost of {op!r} of {role!r} was fitted; there is that of {known}", key=f"{role}.{op}")

    def learning(self, role: str) -> tuple[Compute, ...]:
        """Return the costs whose sum is that of a micro-batch that a role learns from. DataError if none was fitted."""
        both = tuple(one for one in self.compute if (one.op, one.role) == (LEARN, role))
        return both or tuple(self.of(op, role) for op in ("forward", "backward"))

    def rows(self, role: str) -> Callable[[np.ndarray], np.ndarray]:
        """Return a function from lengths to the seconds of sequences that a role learns from.

        It extrapolates. Raises DataError if these passes were not fitted.
        """
        fitted = self.learning(role)
        return lambda lengths: np.sum([one.rows(lengths, beyond=True) for one in fitted], axis=0)

    def link(self, op: str, ranks: int) -> Link:
        """Return the link of a communication among N ranks. Raises DataError if none was fitted."""
        for one in self.links:
            if (one.op, one.ranks) == (op, ranks):
                return one
        known = ", ".join(f"{k.op} of {k.ranks}" for k in self.links) or "nothing"
        message = f"no cost of {op!r} among {ranks} ranks was fitted; there is that of {known}"
        raise DataError(message, key=f"{op}.{ranks}")

    def communication(self, op: str, ranks: int, nbytes: Numbers, *, beyond: bool = False) -> np.ndarray:
        """Return the seconds of a transfer, float64 like ``nbytes``. Raises DataError beyond the fit."""
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
            message = f"the cost of {what} was fitted on {least:,.0f} to {greatest:,.0f} {name}, not on {value:,.0f}: "
            raise DataError(f"{message}trace a run with such amounts, or set beyond=True", key=name)


def as_dict(costs: Costs) -> dict[str, Any]:
    """Return costs as JSON values, null for NaN and infinity. Times in seconds, bandwidths in bytes/s."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "about": dict(costs.about),
        "compute": [_finite(asdict(c) | {"ranks": {str(r): x for r, x in c.ranks}}) for c in costs.compute],
        "links": [_finite(asdict(k)) for k in costs.links],
        "left": list(costs.left),
        "ring": costs.ring,
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save_costs(costs: Costs, path: str | Path) -> None:
    """Write costs as JSON. Raises StorageError if the file cannot be written."""
    with atomic_write(Path(path)) as temporary:
        temporary.write_text(json.dumps(as_dict(costs), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_costs(path: str | Path) -> Costs:
    """Read costs that ``save_costs`` wrote. Raises DataError with the file and the wrong field."""
    name = Path(path).name
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read costs from {path}: {error.strerror}", key=name) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}", key=f"{name}.syntax") from error
    return parse_costs(found, Path(path))


def parse_costs(found: Any, path: Path, part: str = "") -> Costs:
    """Return costs from JSON values of ``as_dict``. path, part: where they stand. DataError with the wrong field."""
    name = f"{path.name}{part}"
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{path} holds no costs; tilth trace costs RUN --save PATH writes them", key=f"{name}.format")
    if found.get("version") != VERSION:
        message = f"{path} is of version {found.get('version')!r}; this Tilth reads {VERSION}"
        raise DataError(message, key=f"{name}.version")
    try:
        return TypeAdapter(Costs).validate_python(found)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise DataError(f"{path} is damaged: {field}: {first['msg']}", key=f"{name}.{field}") from error
