"""Types of keys, and the tables that several sections of a recipe have."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from tilth.config.axes import AXES

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0)]
Weight = Annotated[float, Field(ge=-1e9, le=1e9)]
"""Weight of a reward, which fp32 must be able to hold (``rewards.functions.LARGEST``)."""
Penalty = Annotated[float, Field(ge=0, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
TINY = 1e-30
"""Least temperature above 0, and least top_p: engines compute in fp32, where a logit divided by less has no value."""
Precision = Literal["fp32", "bf16"]
Option = bool | int | float | str | tuple[str, ...] | tuple[float, ...] | dict[str, float | tuple[float, float]]
Options = dict[str, Option]
"""Keyword arguments of a user's function or class."""


@dataclass(frozen=True)
class Fixed:
    """Mark of a key, or of a section, with which a run would be another one: no update of a running run changes it.

    why: with subject "it" for the run; "": a key that may change though its section may not.
    """

    why: str


class Section(BaseModel):
    """Base of all sections: unknown keys and wrong types are errors (3.0 is no integer), values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_KEYS: dict[str, Any] = {
    axis.name: (Count, Field(0, description=axis.about)) if axis.fills else (Positive, Field(1, description=axis.about))
    for axis in AXES.values()
}


class LayoutConfig(create_model("Sizes", __base__=Section, **_KEYS)):  # type: ignore[misc]
    """Division of a role over its pool: the sizes of all axes, whose product is the number of workers."""

    sp: bool = Field(False, description="with tp: its ranks divide norms and residual stream by tokens too")
    cp_style: Literal["ring", "ulysses"] = Field(
        "ring", description="with cp: send keys and values around (ring), or exchange tokens for heads (ulysses)"
    )
    zero: Literal[1, 2, 3] = Field(
        3,
        description="with fsdp or ep: gather parameters once per step (2) or per micro-batch (3); 1: parameters are "
        "whole on each rank, and ranks that have the same (fsdp is then as dp) divide optimizer state and updates",
    )
    pp_schedule: Literal["1f1b", "interleaved", "zero-bubble"] = Field(
        "1f1b",
        description="with pp: order of passes; interleaved has two parts of the model on each stage, zero-bubble "
        "computes gradients of matrices where a stage would wait",
    )

    def sizes(self, workers: int) -> dict[str, int]:
        """Return the size of each axis over a pool of N workers."""
        found = {name: getattr(self, name) for name in AXES}
        rest = math.prod(size or 1 for size in found.values())
        return {name: size or workers // rest for name, size in found.items()}

    def meshed(self, workers: int) -> dict[str, int]:
        """Return the sizes of the mesh, in which ranks that shard parameters are replicas under ``zero = 1``."""
        found, fills = self.sizes(workers), next(name for name, axis in AXES.items() if axis.fills)
        for name in (name for name, axis in AXES.items() if self.zero == 1 and axis.splits == ("rows", "parameters")):
            found |= {fills: found[fills] * found[name], name: 1}
        return found


class RoleSection(Section):
    """Placement of a role."""

    pool: str = Field("", description="its pool of workers; empty: the first one")
    layout: LayoutConfig = Field(LayoutConfig(), description="its division over the pool: [layouts](#layouts)")


class LoraConfig(Section):
    """Low-rank adapters (LoRA), which are learned in place of the weights."""

    rank: Count = Field(0, description="rows of A and columns of B; 0: the weights themselves are learned")
    alpha: float = Field(32.0, gt=0, description="the change of a weight is alpha / rank times B A")
    rslora: bool = Field(False, description="alpha / sqrt(rank) instead (rsLoRA)")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="share of the inputs of A that are zeroed, the rest scaled up, in supervised steps"
    )
    targets: tuple[str, ...] = Field(
        ("*_proj",), min_length=1, description="modules that get one, by the end of their name; `*` matches anything"
    )


Adapters = Annotated[LoraConfig, Fixed("its adapters have this shape and began so")]
