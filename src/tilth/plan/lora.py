"""Low-rank adapters (LoRA, arXiv 2106.09685): the rows that they add to a family's table, and their sizes.

A weight W [out, in] is frozen, and W + scale B A is computed with, A [rank, in] and B [out, rank] are learned. Beside
``q_proj.weight`` stand ``q_proj.lora.A`` and ``q_proj.lora.B``; stacked experts have one pair each.
"""

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from tilth.config.schema import LoraConfig
from tilth.core.errors import RecipeError
from tilth.plan.rules import ENCODERS, Parameter, Table
from tilth.plan.shape import DecoderShape, sized_names

INFIX = ".lora."
_WEIGHT = ".weight"


def is_adapter(name: str) -> bool:
    """True for a parameter of an adapter."""
    return INFIX in name


def has_adapters(names: Iterable[str]) -> bool:
    """True if some of a model's parameters are those of adapters, which are learned instead of its weights."""
    return any(map(is_adapter, names))


def weight_of(name: str) -> str:
    """Return the weight that an adapter's parameter belongs to."""
    return name.partition(INFIX)[0] + _WEIGHT


def pair_of(weight: str) -> tuple[str, str]:
    """Return the names of A and B beside a weight."""
    path = weight.removesuffix(_WEIGHT)
    return f"{path}{INFIX}A", f"{path}{INFIX}B"


def blocks_of(block: tuple[slice, ...], rank: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the blocks of A and B that change this block of their weight."""
    *experts, out, width = block
    return (*experts, slice(0, rank), width), (*experts, out, slice(0, rank))


def scale_of(lora: LoraConfig) -> float:
    """Return the factor of B A: alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv 2312.03732)."""
    return lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)


def targets(table: Table, lora: LoraConfig, key: str = "policy.lora.targets") -> tuple[Parameter, ...]:
    """Return the rows that get adapters: matrices of the decoder whose module matches a pattern. RecipeError: a pattern
    matches none.

    A pattern is the end of a module's name, as in PEFT's ``target_modules``, or matches it with ``*``.
    """
    matrices = (row for row in table if row.kind == "matrix" and row.name.endswith(_WEIGHT))
    rows = {row.name.removesuffix(_WEIGHT): row for row in matrices if not row.name.startswith(ENCODERS)}
    found = dict[str, Parameter]()
    for pattern in lora.targets:
        fits = [path for path in rows if fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")]
        if not fits:
            there = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in rows))
            message = f"{key} has {pattern!r}, which matches no matrix of this model; there are {there}"
            raise RecipeError(message, key=key)
        found |= {path: rows[path] for path in fits}
    return tuple(row for path, row in rows.items() if path in found)


def adapter_rows(table: Table, lora: LoraConfig, key: str = "policy.lora.targets") -> Table:
    """Return the rows of all adapters.

    Along tp the factor next to the divided side of its weight is divided alike; the other one is whole, and each rank
    has its part of the gradient.
    """
    found = list[Parameter]()
    along: dict[str, Any] = {"rows": ("heads", "rows"), "copied": ("heads", "copied"), "columns": ("columns", "heads")}
    for row in targets(table, lora, key):
        a, b = pair_of(row.name)
        *experts, out, width = row.shape
        first, second = along.get(row.tp, (row.tp, row.tp))
        own = row._replace(hf="", transposed=False)
        found.append(own._replace(name=a, shape=(*experts, lora.rank, width), tp=first, init="fan_in"))
        found.append(own._replace(name=b, shape=(*experts, out, lora.rank), tp=second, init="zeros"))
    return tuple(found)


def adapter_shapes(shape: DecoderShape, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every parameter of the adapters of a model."""
    return sized_names(shape, adapter_rows(shape.table, lora))
