"""Micro-batches of packed sequences, and the log-probs of a model on them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tilth.core.batch import Ragged
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.models.logprobs import token_logprobs
from tilth.models.rows import take_rows
from tilth.plan.packing import micro_batches


@dataclass
class Micro:
    """One micro-batch, packed: per-token tensors [N] over ``len(lengths)`` sequences.

    ``logprobs`` and ``entropy`` are of the current policy, zero where ``mask`` is; ``columns`` are what the caller
    passed, cut to these sequences.
    """

    ids: Tensor
    lengths: Tensor
    mask: Tensor
    columns: dict[str, Tensor]
    logprobs: Tensor = field(default_factory=lambda: torch.zeros(0))
    entropy: Tensor = field(default_factory=lambda: torch.zeros(0))


def micros(
    tokens: Ragged, mask: np.ndarray, columns: Mapping[str, np.ndarray], max_tokens: int, device: torch.device
) -> Iterator[tuple[np.ndarray, Micro]]:
    """Split into micro-batches of at most ``max_tokens``; yields (indices into the packed columns [N], micro-batch)."""
    every = Ragged(np.arange(len(mask)), tokens.offsets)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    for rows in micro_batches(tokens.lengths, max_tokens):
        part = every.take(np.asarray(rows))
        index = part.values
        cut = {name: tensor(values[index]) for name, values in columns.items()}
        lengths = torch.from_numpy(part.lengths)
        yield index, Micro(tensor(tokens.values[index]), lengths, tensor(mask[index]), cut)


def score(model: Decoder, micro: Micro, context: PackedContext, *, temperature: float, entropy: bool) -> None:
    """Fill in log-probs (and entropy) of the tokens in the mask; only their logits are ever computed."""
    hidden = model(micro.ids, context)
    chosen = torch.nonzero(micro.mask, as_tuple=True)[0]
    found, entropies = token_logprobs(
        take_rows(hidden, chosen - 1), model.head_weight, micro.ids[chosen], temperature=temperature
    )
    blank = torch.zeros(len(micro.ids), device=micro.ids.device)
    micro.logprobs = blank.index_copy(0, chosen, found)
    if entropy:
        micro.entropy = blank.index_copy(0, chosen, entropies)


def packed_logprobs(
    model: Decoder, tokens: Ragged, mask: np.ndarray, *, max_tokens: int, temperature: float = 1.0, parity: bool = False
) -> np.ndarray:
    """Log-prob of each masked-in token under ``model``, float32 [N]; 0 elsewhere. No gradient."""
    found = np.zeros(len(mask), np.float32)
    device = next(model.parameters()).device
    with torch.no_grad():
        for index, micro in micros(tokens, mask, {}, max_tokens, device):
            context = PackedContext(micro.lengths, device, parity=parity)
            score(model, micro, context, temperature=temperature, entropy=False)
            found[index] = micro.logprobs.cpu().numpy()
    return found
