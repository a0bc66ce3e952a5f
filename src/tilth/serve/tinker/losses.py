"""Built-in losses of Tinker's API: a value for each token, added up, never averaged.

p: log-prob of the target under the model that learns; q: ``logprobs``, that under the model which chose it; A:
``advantages``; r = exp(p - q). Source: tinker-docs.thinkingmachines.ai/tinker/losses. ``stable_reinforce`` alone is
this server's own objective under Tinker's name, as ``_stable_reinforce`` says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilth.core.errors import DataError
from tilth.rl.packing import Packing
from tilth.serve.tinker.wire import Datum, ProvenanceRun

TOKENS = "target_tokens"
LENGTHS = "lengths"
"""Key of the tokens of each sequence, int64 [n], beside the columns."""
RATIO_MASK = "sequence_ratio_mask"
SAMPLED = "sampled"
"""Column that provenance gives: 1 at the tokens that a model sampled."""
WEIGHT = 2.0
"""Greatest importance weight of ``stable_reinforce``."""
Columns = Mapping[str, Tensor]
Options = Mapping[str, float]


@dataclass(frozen=True)
class TokenLoss:
    """A loss by token. needs: its columns beside ``target_tokens``, [N] each; options: with their defaults."""

    values: Callable[[Tensor, Columns, Options], Tensor]
    """(p, columns and ``lengths``, options) -> [N]."""
    needs: Sequence[str]
    options: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    provenance: bool = False
    """True if every datum must name the samples that it is made of."""


def _ratio(p: Tensor, columns: Columns) -> Tensor:
    return torch.exp(p - columns["logprobs"])


def _clipped(ratio: Tensor, options: Options) -> Tensor:
    return ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])


def _least(ratio: Tensor, columns: Columns, options: Options) -> Tensor:
    advantages = columns["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, options) * advantages)


def _gspo(p: Tensor, columns: Columns, options: Options) -> Tensor:
    """PPO with one ratio for a sequence: s = exp(mean of p - q over ``sequence_ratio_mask``), whose gradient at each
    token is that of its own p (GSPO-token, 2507.18071; Tinker's losses/gspo). Thresholds by default are the paper's."""
    rows = Packing.of(columns[LENGTHS], columns[RATIO_MASK])
    means = rows.sum(p.detach() - columns["logprobs"]) / rows.counts
    return _least(torch.exp(rows.spread(means).to(p.dtype) + p - p.detach()), columns, options)


def _stable_reinforce(p: Tensor, columns: Columns, options: Options) -> Tensor:
    """-w A p + kl_coeff (p - q)^2 / 2 with the constant w = min(r, 2), of tokens that were sampled.

    Tinker's losses/stable-reinforce, SDK and cookbook name its aim (REINFORCE that bears samples of older weights),
    provenance and the option ``kl_coeff``; no formula of theirs is known here. This is REINFORCE with truncated
    importance weights (verl's ``bypass_pg_is``, by token; ``reinforce`` with ``cap=2`` in ``tilth.rl``) and the k2
    estimate of the divergence from the model that sampled. Where both models are one, its gradient is REINFORCE's.
    """
    weight = _ratio(p, columns).detach().clamp(max=WEIGHT)
    penalty = 0.5 * options["kl_coeff"] * (p - columns["logprobs"]) ** 2
    return torch.where(columns[SAMPLED] != 0, penalty - weight * columns["advantages"] * p, 0.0)


_OF_POLICY = ("logprobs", "advantages")
_CLIP = MappingProxyType({"clip_low_threshold": 0.8, "clip_high_threshold": 1.2})
_CLIP_GSPO = MappingProxyType({"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4})
LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": TokenLoss(lambda p, c, o: -p * c["weights"], ("weights",)),
    "importance_sampling": TokenLoss(lambda p, c, o: -_ratio(p, c) * c["advantages"], _OF_POLICY),
    "ppo": TokenLoss(lambda p, c, o: _least(_ratio(p, c), c, o), _OF_POLICY, _CLIP),
    "cispo": TokenLoss(lambda p, c, o: -_clipped(_ratio(p, c), o).detach() * p * c["advantages"], _OF_POLICY, _CLIP),
    "dro": TokenLoss(
        lambda p, c, o: -p * c["advantages"] + 0.5 * o["beta"] * (p - c["logprobs"]) ** 2,
        _OF_POLICY,
        MappingProxyType({"beta": 0.05}),
    ),
    "gspo": TokenLoss(_gspo, (*_OF_POLICY, RATIO_MASK), _CLIP_GSPO),
    "stable_reinforce": TokenLoss(_stable_reinforce, _OF_POLICY, MappingProxyType({"kl_coeff": 0.0}), provenance=True),
}


def loss_named(name: str) -> TokenLoss:
    """Return a loss. DataError: it is unknown, or not offered here, and why."""
    if name == "custom":
        message = "loss_fn='custom': custom losses run in the client; use forward_backward_custom"
        raise DataError(message, key="loss_fn.refused")
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


def targets_of(datum: Datum) -> int:
    """Return the number of targets for each token."""
    return int(np.prod(datum.columns[TOKENS].shape[1:]))


def apart(datum: Datum) -> list[Datum]:
    """Return a datum of K targets for each token as K of one target: cross-entropy is a sum over targets."""
    if datum.columns[TOKENS].ndim == 1:
        return [datum]
    turned = {name: np.ascontiguousarray(values.T) for name, values in datum.columns.items()}
    return [Datum(datum.tokens, {name: rows[k] for name, rows in turned.items()}) for k in range(targets_of(datum))]


def check_data(name: str, data: Sequence[Datum], vocabulary: int, longest: int) -> None:
    """Raise DataError unless every sequence has the columns of the loss, each with one value for each token of input
    (``cross_entropy``: or K in all of them), tokens of the vocabulary and at most ``longest`` of them."""
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
        shape = (size, *data[0].columns[TOKENS].shape[1:]) if name == "cross_entropy" else (size,)
        for column, values in datum.columns.items():
            _check_column(f"{where}.loss_fn_inputs.{column}", column, values, shape)
        if RATIO_MASK in wanted and not datum.columns[RATIO_MASK].any():
            message = f"{where}.loss_fn_inputs.{RATIO_MASK} is 0 everywhere; mark the tokens that were sampled"
            raise DataError(message, key=f"{where}.loss_fn_inputs.{RATIO_MASK}.empty")
        for column, ids in (("model_input", datum.tokens), (f"loss_fn_inputs.{TOKENS}", datum.columns[TOKENS])):
            if ids.min() < 0 or ids.max() >= vocabulary:
                message = f"{where}.{column} has the token {ids.max() if ids.min() >= 0 else ids.min()}"
                message = f"{message}, which is not in the vocabulary of {vocabulary}"
                raise DataError(message, key=f"{where}.{column}.vocabulary")


def _check_column(where: str, column: str, values: np.ndarray, shape: tuple[int, ...]) -> None:
    if len(shape) > 2 or 0 in shape or values.shape != shape:
        message = f"{where} has the shape {list(values.shape)}; it must be {list(shape)}: one value for each token, or"
        raise DataError(f"{message} for cross_entropy K, the same for all data of a request", key=f"{where}.shape")
    if (values.dtype.kind == "i") != (column == TOKENS):
        message = f"{where} is {values.dtype}; it must be {'int64' if column == TOKENS else 'float32'}"
        raise DataError(message, key=f"{where}.dtype")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"{where} has values that are not finite", key=f"{where}.finite")


class SampleRecord(NamedTuple):
    """One sampled sequence: its prompt and tokens, int64, and log-probs of the tokens, float32."""

    prompt: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray


Find = Callable[[str], SampleRecord]


def check_provenance(data: Sequence[Datum], find: Find) -> None:
    """Raise DataError unless every datum names samples that have its tokens and log-probs, and has advantages of
    sampled tokens alone. find: returns the sample of a ``sequence_id``, or raises DataError."""
    for i, datum in enumerate(data):
        where = f"data[{i}]"
        for name, run, part in _tiled(f"{where}.model_input_spans", datum.inputs, len(datum.tokens)):
            source = find(run.sequence)
            _check_equal(name, run, source.tokens if run.sampled else source.prompt, datum.tokens[part])
        for name, run, part in _tiled(f"{where}.loss_fn_input_spans", datum.targets, len(datum.tokens)):
            if not run.sampled:
                if datum.columns["advantages"][part].any():
                    message = f"{where}.loss_fn_inputs.advantages has values at tokens that no model sampled"
                    raise DataError(f"{message}; make them 0", key=f"{where}.loss_fn_inputs.advantages.sampled")
                continue
            source = find(run.sequence)
            _check_equal(name, run, source.tokens, datum.columns[TOKENS][part])
            _check_equal(f"{where}.loss_fn_inputs.logprobs", run, source.logprobs, datum.columns["logprobs"][part])


def _tiled(where: str, runs: Sequence[ProvenanceRun], size: int) -> list[tuple[str, ProvenanceRun, slice]]:
    """Return runs with their names and places. DataError: they do not tile the tokens."""
    lengths = [run.length for run in runs]
    if sum(lengths) != size or min([0, *lengths, *(run.offset for run in runs)]) < 0:
        message = f"{where} covers {sum(lengths)} of {size} tokens; name the sample behind each (Datum.with_provenance)"
        raise DataError(message, key=f"{where}.length")
    ends = np.cumsum(lengths).tolist()
    return [(f"{where}[{j}]", run, slice(end - run.length, end)) for j, (run, end) in enumerate(zip(runs, ends))]


def _check_equal(where: str, run: ProvenanceRun, source: np.ndarray, given: np.ndarray) -> None:
    recorded = source[run.offset : run.offset + run.length]
    if not np.array_equal(recorded, given):
        kind = "tokens" if run.sampled else "prompt"
        message = f"{where}: {run.length} values from {run.offset} on are not those of the {kind} of {run.sequence}"
        raise DataError(f"{message}; give what the sampler returned", key=where)
