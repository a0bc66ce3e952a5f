"""Built-in losses of Tinker's API: a value for each token, added up, never averaged.

p: log-prob of the target under the model that learns; q: ``logprobs``, that under the model which chose it; A:
``advantages``; r = exp(p - q).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from tilth.core.errors import DataError
from tilth.service.wire import Datum

TOKENS = "target_tokens"
Columns = Mapping[str, Tensor]
Options = Mapping[str, float]


@dataclass(frozen=True)
class TokenLoss:
    """A loss by token. needs: its columns beside ``target_tokens``, [N] each; options: with their defaults."""

    values: Callable[[Tensor, Columns, Options], Tensor]
    """(p, columns, options) -> [N]."""
    needs: Sequence[str]
    options: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def _cross_entropy(p: Tensor, columns: Columns, options: Options) -> Tensor:
    return -p * columns["weights"]


def _ratio(p: Tensor, columns: Columns) -> Tensor:
    return torch.exp(p - columns["logprobs"])


def _importance_sampling(p: Tensor, columns: Columns, options: Options) -> Tensor:
    return -_ratio(p, columns) * columns["advantages"]


def _clipped(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


def _ppo(p: Tensor, columns: Columns, options: Options) -> Tensor:
    ratio, advantages = _ratio(p, columns), columns["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, options) * advantages)


def _cispo(p: Tensor, columns: Columns, options: Options) -> Tensor:
    return -_clipped(_ratio(p, columns), options).detach() * p * columns["advantages"]


def _dro(p: Tensor, columns: Columns, options: Options) -> Tensor:
    return -p * columns["advantages"] + 0.5 * options["beta"] * (p - columns["logprobs"]) ** 2


_OF_POLICY = ("logprobs", "advantages")
_CLIP = MappingProxyType({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": TokenLoss(_cross_entropy, ("weights",)),
    "importance_sampling": TokenLoss(_importance_sampling, _OF_POLICY),
    "ppo": TokenLoss(_ppo, _OF_POLICY, _CLIP),
    "cispo": TokenLoss(_cispo, _OF_POLICY, _CLIP),
    "dro": TokenLoss(_dro, _OF_POLICY, MappingProxyType({"beta": 0.05})),
}
REFUSED: Mapping[str, str] = {
    "gspo": "its ratio of sequences is not documented; compute it with forward_backward_custom",
    "stable_reinforce": "it needs what only Tinker's own samplers record; use importance_sampling",
    "custom": "custom losses run in the client, as forward_backward_custom does with this server",
}


def loss_named(name: str) -> TokenLoss:
    """Return a loss. DataError: it is unknown, or not offered here, and why."""
    if name in REFUSED:
        raise DataError(f"loss_fn={name!r} is not offered by this server: {REFUSED[name]}", key="loss_fn.refused")
    if name not in LOSSES:
        raise DataError(f"loss_fn={name!r} is unknown; there are {', '.join(LOSSES)}", key="loss_fn")
    return LOSSES[name]


def options_of(name: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """Return all options of a loss. DataError: one is unknown or no number."""
    found = dict(loss_named(name).options)
    for key, value in given.items():
        if key not in found:
            there = ", ".join(found) or "none"
            message = f"loss_fn_config.{key} is no option of {name}; its options: {there}"
            raise DataError(message, key=f"loss_fn_config.{key}")
        if isinstance(value, str):
            message = f"loss_fn_config.{key}={value!r} is text; it must be a number"
            raise DataError(message, key=f"loss_fn_config.{key}.type")
        found[key] = float(value)
    return found


def check_data(name: str, data: Sequence[Datum], vocabulary: int, longest: int) -> None:
    """Raise DataError unless every sequence has the columns of the loss, each with one value for each token of input,
    tokens of the vocabulary and at most ``longest`` of them."""
    if not data:
        raise DataError("data is empty; it must have at least one datum", key="data")
    wanted = {TOKENS, *loss_named(name).needs}
    for i, datum in enumerate(data):
        where, size = f"data[{i}]", len(datum.tokens)
        if not 0 < size <= longest:
            message = f"{where}.model_input has {size} tokens; it must have 1 to {longest}"
            raise DataError(message, key=f"{where}.model_input.length")
        if datum.columns.keys() != wanted:
            have = ", ".join(sorted(datum.columns)) or "none"
            message = f"{where}.loss_fn_inputs are {have}; those of {name} are {', '.join(sorted(wanted))}"
            raise DataError(message, key=f"{where}.loss_fn_inputs")
        for column, values in datum.columns.items():
            _check_column(f"{where}.loss_fn_inputs.{column}", column, values, size)
        for column, ids in (("model_input", datum.tokens), (f"loss_fn_inputs.{TOKENS}", datum.columns[TOKENS])):
            if ids.min() < 0 or ids.max() >= vocabulary:
                message = f"{where}.{column} has the token {ids.max() if ids.min() >= 0 else ids.min()}"
                message = f"{message}, which is not in the vocabulary of {vocabulary}"
                raise DataError(message, key=f"{where}.{column}.vocabulary")


def _check_column(where: str, column: str, values: np.ndarray, size: int) -> None:
    if values.ndim != 1:
        message = f"{where} has the shape {list(values.shape)}; this server takes one target for each token, [{size}]"
        raise DataError(message, key=f"{where}.rank")
    if len(values) != size:
        message = f"{where} has {len(values)} values for {size} tokens of model_input"
        raise DataError(message, key=f"{where}.length")
    if (values.dtype.kind == "i") != (column == TOKENS):
        message = f"{where} is {values.dtype}; it must be {'int64' if column == TOKENS else 'float32'}"
        raise DataError(message, key=f"{where}.dtype")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"{where} has values that are not finite", key=f"{where}.finite")
