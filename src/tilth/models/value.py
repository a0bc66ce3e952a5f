"""Value model: a decoder's body with one number at each position instead of logits.

Its parameters are named as in transformers' ``...ForTokenClassification`` with one label (``model.*``, ``score.*``).
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from tilth.core.errors import ModelError
from tilth.models.decoder import Decoder
from tilth.models.logprobs import wide
from tilth.plan.rules import VALUE_HEAD

HEAD = "score."
"""Prefix of the value head's parameters; the others belong to the decoder's body."""
OUTPUT = "lm_head."


class ValueHead(nn.Module):
    """Linear map of hidden to one value, in fp32 for any dtype of the residual stream; initially 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values float32 [N] (float64 of float64) of hidden [N, width]."""
        kind = wide(hidden.dtype)
        # Not F.linear: a product with one column sums in an order that depends on the number of rows.
        return (hidden.to(kind) * self.weight.to(kind)).sum(-1) + self.bias.to(kind)


class ValueModel(Decoder):
    """V(state) at each token: ``forward`` returns hidden states, as in ``Decoder``, and ``score`` maps them to values.

    The hidden state of token t - 1 is the state before token t is chosen, as for log-probs.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Copy the body, compute dtype and device of a decoder; the head is zero."""
        super().__init__(replace(decoder.config, tie_embeddings=True), decoder.dtype)  # tied: no output head
        self.score = ValueHead(decoder.config.hidden_size)
        self.table += VALUE_HEAD
        self.to(next(decoder.parameters()).device)
        self.checkpointing = decoder.checkpointing
        self.follow(decoder.named_parameters())

    @torch.no_grad()
    def follow(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy these weights of a decoder and zero the head. Raises ModelError that names what does not fit."""
        own = {name: p for name, p in self.named_parameters() if not name.startswith(HEAD)}
        for name, tensor in weights:
            if name.startswith(OUTPUT):
                continue
            if name not in own or own[name].shape != tensor.shape:
                message = f"{name} {list(tensor.shape)} has no place in the value model: another shape of decoder"
                raise ModelError(message, key=f"{name}.{'shape' if name in own else 'extra'}")
            own.pop(name).copy_(tensor)
        if own:
            name = next(iter(own))
            message = f"{name} is missing in the weights that the value model should begin with"
            raise ModelError(message, key=f"{name}.missing")
        for parameter in self.score.parameters():
            parameter.zero_()
