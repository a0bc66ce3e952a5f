"""Table of a model family: one row per pattern of parameter names, from which all else is derived.

Shape and position of a tensor do not determine its use: a parameter without a row raises before anything is sharded,
initialised or updated.
"""

import re
from functools import cache
from typing import Literal, NamedTuple

from tilth.config.axes import AXES, MODEL
from tilth.core.errors import ModelError
from tilth.core.layout import Placement, Replicate, Shard

_LAYER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
Space = Literal["", "tokens", "residual", "branch", "queries", "keys", "heads", "inner", "latent", "experts"]
"""Meaning of a dimension: the vocabulary; the residual stream, and norms of it; results of attention or MLP that a norm
takes before they are added to the stream; heads of queries and of keys, which norms may take; all other heads; inner
units of an MLP or expert; a latent; one number for each expert; "": not declared."""


class Parameter(NamedTuple):
    """Row of a family's table: properties of the parameters of one pattern."""

    name: str
    """Pattern of full names; ``*`` is the number of a layer."""
    shape: tuple[str | int, ...]
    """Sizes, or the attributes of the config that hold them."""
    kind: Literal["matrix", "embedding", "norm", "bias", "router"]
    """Muon updates matrices, of experts each for itself; AdamW the others, embedding, output head and router
    included."""
    tp: Literal["rows", "copied", "columns", "heads", "residual", "whole"]
    """Along "tp": divided by rows; by rows, of which there may be fewer than ranks; by columns; whole, and each rank
    applies it to its own heads; whole, and with sequence parallelism each rank applies it to its own tokens; whole, and
    every rank computes the same with it."""
    init: Literal["normal", "residual", "fan_in", "zeros", "ones"]
    """N(0, 0.02), for a matrix that writes to the residual stream divided by sqrt(2 layers); N(0, 1 / (3 in)); or a
    constant."""
    when: str = ""
    """Flag of the config, or ``not`` and a flag, under which the parameter exists; "": always."""
    hf: str = ""
    """Pattern of its name in a Hugging Face directory; "": the same name. Of a stacked one: of each expert's tensor,
    ``#`` is the expert's number."""
    layers: str = ""
    """Attribute of the config that holds the numbers of the layers that have it; "": all."""
    stacked: bool = False
    """One tensor per expert, stacked along dimension 0; ``tp`` divides each expert's."""
    transposed: bool = False
    """Its Hugging Face tensor has the last two dimensions exchanged. Rows with one Hugging Face tensor alternate along
    the last dimension of it, in the order of the table."""
    reads: Space = ""
    """Space of its input; of biases and sinks: none. Where it is not declared, a model cannot be expanded."""
    writes: Space = ""
    """Space of its output."""


Table = tuple[Parameter, ...]
ENCODERS = "encoders."
"""Prefix of the parameters of encoders of media."""
VALUE_HEAD: Table = (
    Parameter("score.weight", (1, "hidden_size"), "embedding", "whole", "zeros"),
    Parameter("score.bias", (1,), "bias", "whole", "zeros"),
)
"""Rows of a value model, which replace the output head."""


@cache
def _rows(table: Table) -> dict[str, Parameter]:
    return {row.name: row for row in table}


def rule_of(table: Table, name: str) -> Parameter:
    """Return the row of a parameter. Raises ModelError if there is none."""
    row = _rows(table).get(_LAYER.sub("*", name))
    if row is None:
        raise ModelError(
            f"parameter {name} matches no pattern of its family's table: how it is divided, initialised and updated is "
            "unknown; add a tilth.plan.rules.Parameter to the table",
            key=name,
        )
    return row


def along_tp(table: Table, name: str, copies: int) -> Shard | Replicate:
    """Return the placement of a parameter along "tp". copies: neighbours that hold the same key heads."""
    row = rule_of(table, name)
    dim = int(row.stacked)
    divided = {"rows": Shard(dim), "copied": Shard(dim, copies), "columns": Shard(dim + 1)}
    return divided.get(row.tp, Replicate())


def along_model(table: Table, name: str, copies: int, *, whole: bool = False) -> dict[str, Placement]:
    """Return axis -> placement of a parameter along axes on which ranks compute with their own part of it.

    whole: each rank has all parameters, along ep all but experts: of an engine, under ``zero = 1``, of gradients
    before they are summed.
    """
    experts: dict[str, Placement] = {"ep": Shard(0)} if rule_of(table, name).stacked else {}
    own_rows = [axis.name for axis in AXES.values() if "rows" in axis.splits and {*MODEL} & {*axis.splits}]
    return {
        **(dict.fromkeys(own_rows, Replicate()) if whole else {}),
        **experts,
        "tp": along_tp(table, name, copies),
    }
