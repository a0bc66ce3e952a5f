"""Rules for parameters by name: what each one is, and how tensor parallelism divides it.

Shape and place of a tensor do not tell how it is used, so nothing is derived from them: a parameter without a rule here
is an error before anything is divided, initialised or updated.
"""

import re
from functools import cache
from typing import Literal, NamedTuple

from tilth.core.errors import ModelError
from tilth.core.layout import Replicate, Shard


class Rule(NamedTuple):
    """What holds for a parameter, whatever its size."""

    kind: Literal["matrix", "norm", "bias"]
    """Initialised to random numbers, ones or zeros; Muon takes the matrices of the layers."""
    tp: Literal["rows", "copied", "columns", "heads", "residual", "whole"]
    """Along "tp": divided by rows; by rows, of which there may be fewer than ranks; by columns; whole, and each rank
    applies it to its own heads; whole, and with sequence parallelism each rank applies it to its own tokens; whole, and
    every rank computes the same with it."""


_LAYER = r"model\.layers\.\d+\."
RULES = {
    r"(model\.embed_tokens|lm_head)\.weight": Rule("matrix", "rows"),
    _LAYER + r"(self_attn\.q|mlp\.gate|mlp\.up)_proj\.weight": Rule("matrix", "rows"),
    _LAYER + r"(self_attn\.q|mlp\.gate|mlp\.up)_proj\.bias": Rule("bias", "rows"),
    _LAYER + r"self_attn\.[kv]_proj\.weight": Rule("matrix", "copied"),
    _LAYER + r"self_attn\.[kv]_proj\.bias": Rule("bias", "copied"),
    _LAYER + r"(self_attn\.o|mlp\.down)_proj\.weight": Rule("matrix", "columns"),
    _LAYER + r"(self_attn\.o|mlp\.down)_proj\.bias": Rule("bias", "residual"),
    _LAYER + r"self_attn\.[qk]_norm\.weight": Rule("norm", "heads"),
    _LAYER + r"(input|post_attention)_layernorm\.weight": Rule("norm", "residual"),
    r"model\.norm\.weight": Rule("norm", "residual"),
    r"score\.weight": Rule("matrix", "whole"),
    r"score\.bias": Rule("bias", "whole"),
}
"""Pattern of whole names, those of Hugging Face -> rule."""


@cache
def rule_of(name: str) -> Rule:
    """The rule for a parameter; ModelError if there is none."""
    for pattern, rule in RULES.items():
        if re.fullmatch(pattern, name):
            return rule
    raise ModelError(
        f"parameter {name} has no rule: how it is divided, initialised and updated is unknown; "
        "give it one in tilth.plan.rules.RULES"
    )


def along_tp(name: str, copies: int) -> Shard | Replicate:
    """How a parameter lies along "tp"; copies: neighbours that hold the same key heads."""
    divided = {"rows": Shard(0), "copied": Shard(0, copies), "columns": Shard(1)}
    return divided.get(rule_of(name).tp, Replicate())


def is_block_matrix(name: str) -> bool:
    """True for the weight matrices inside the decoder layers: those that Muon orthogonalises."""
    return rule_of(name).kind == "matrix" and name.startswith("model.layers.")
