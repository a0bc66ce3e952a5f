"""Open sets: keys whose values are names that plugins can add."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # the command line names these sets before anything is checked
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

Needs = Literal["elements", "matrices"]


@dataclass(frozen=True)
class OptimizerSpec:
    """State that an optimizer keeps, and parts of parameters that it needs."""

    state: tuple[str, ...]
    """State tensors of a parameter's shape, 0 at first."""
    needs: Needs = "elements"
    """elements: it updates any part of any parameter. matrices: it updates block matrices, each of which it sees whole
    (``training.optim.MatrixOptimizer``); AdamW updates the other parameters."""
    made: str | Callable[..., Any] = ""
    """Factory, or "module:name" of it (``tilth.optimizer``); "": AdamW."""


OPTIMIZERS = {
    "adamw": OptimizerSpec(("exp_avg", "exp_avg_sq")),
    "muon": OptimizerSpec(("momentum_buffer",), "matrices", "tilth.training.optim:Muon"),
    "lans": OptimizerSpec(("unit_avg", "unit_avg_sq"), made="tilth.training.optimizers.blockwise:LANS"),
    "lamb": OptimizerSpec(("exp_avg", "exp_avg_sq"), made="tilth.training.optimizers.blockwise:LAMB"),
    "lars": OptimizerSpec(("velocity",), made="tilth.training.optimizers.blockwise:LARS"),
    "adaalter": OptimizerSpec(("accumulated", "denominator"), made="tilth.training.optimizers.adaalter:AdaAlter"),
}
"""Optimizers by name; plugins add to it. State of another meaning has another name: a run loads it by name."""


def optimizer_states(name: str) -> set[str]:
    """Return the kinds of state that a run with this optimizer keeps."""
    rest = OPTIMIZERS["adamw"].state if OPTIMIZERS[name].needs == "matrices" else ()
    return {*OPTIMIZERS[name].state, *rest}


@dataclass(frozen=True)
class CompressorSpec:
    """Compressor of gradients, and what each rank keeps for it."""

    made: str | Callable[..., Any]
    """Class, or "module:name" of it; its keyword-only arguments are options."""
    state: tuple[str, ...] = ("residual",)
    """residual: what it leaves out of a gradient, which error feedback adds to the next one."""


COMPRESSORS = {
    "onebit": CompressorSpec("tilth.parallel.compress:OneBit"),
    "topk": CompressorSpec("tilth.parallel.compress:TopK"),
    "randomk": CompressorSpec("tilth.parallel.compress:RandomK", state=()),
    "dither": CompressorSpec("tilth.parallel.compress:Dither", state=()),
    "sdp4bit": CompressorSpec("tilth.parallel.sync:TwoLevels", state=()),
}
"""Compressors of gradients by name; plugins add to it. Those without bias need no residual, which learns worse."""
WEIGHT_CODES = {"difference4": "tilth.parallel.compress:four_bits"}
"""Ways in which changes of weights travel by name -> function that makes their compressor."""
LOCAL_METHODS = {
    "cser": "tilth.parallel.local:ErrorReset",
    "average": "tilth.parallel.local:Averaging",
    "adaalter": "tilth.parallel.local:LocalAdaAlter",
}
"""Ways in which data ranks learn apart by name -> class; its keyword-only arguments but those of ``Averaging`` are
options."""
TRACKERS = {"tensorboard": "TensorBoard", "wandb": "WeightsAndBiases", "mlflow": "MLflow", "trackio": "Trackio"}
"""Name of each tracker of Tilth -> its class in ``tilth.ui.track``."""
ALGORITHMS: dict[str, dict[str, Any]] = {}
"""Kind (losses, corrections ...) -> name -> class, which ``tilth.rl.registry.register`` fills."""


def algorithm_names(kind: str) -> list[str]:
    """Return the names of one kind: those that come with Tilth, then those registered in this process."""
    return list(dict.fromkeys([*(name for of, name in _shipped_algorithms() if of == kind), *ALGORITHMS.get(kind, ())]))


@cache
def _shipped_algorithms() -> list[tuple[str, str]]:
    """Return kind and name of every ``register`` in the sources of ``tilth.rl``: their import is that of torch."""
    sources = sorted((Path(__file__).parents[1] / "rl").glob("*.py"))
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    return re.findall(r'^(?:@| *)register\("(\w+)", "([\w-]+)"\)', text, re.MULTILINE)


@dataclass(frozen=True)
class OneOf:
    """Annotation of a text key: its value is one of the names that exist when a recipe is read."""

    names: Callable[[], Iterable[str]]
    kind: str = ""
    """The decorator of ``tilth`` with which a plugin adds a name; "": none does."""

    def __get_pydantic_core_schema__(self, source: Any, handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        from pydantic_core import PydanticCustomError

        if value not in (known := list(self.names())):
            raise PydanticCustomError("literal_error", "not one of {names}", {"names": ", ".join(known)})
        return value
