"""Converters: changes of a one-device model after it is built and before it is sharded.

A converter may replace modules and add parameters, whose rows it adds to the model's ``table``; without a row the
model is refused. Converters are applied in their order, on the meta device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tilth.config.schema import LoraConfig
from tilth.core.errors import ModelError, RecipeError
from tilth.models.decoder import Decoder
from tilth.models.logprobs import wide
from tilth.models.lora import Adapter
from tilth.models.moe import StackedLinear
from tilth.plan.lora import INFIX, adapter_rows, scale_of
from tilth.plan.rules import VALUE_HEAD, rule_of
from tilth.plan.shape import sized_names

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


Converter = Callable[[Decoder], Decoder]


def frozen(model: Decoder) -> Decoder:
    """Disable the gradients of all parameters."""
    return model.requires_grad_(False)


@dataclass(frozen=True)
class LowRank:
    """Converter that freezes a model but for its value head, and gives its matrices adapters (``models.lora``).

    merges: as in ``Adapter``. key: of the targets in a recipe, for its RecipeError.
    """

    lora: LoraConfig
    merges: bool = False
    key: str = "policy.lora.targets"

    def __call__(self, model: Decoder) -> Decoder:
        """Return the model, changed in place; the adapters are uninitialised."""
        rows, modules = adapter_rows(model.table, self.lora, self.key), dict(model.named_modules())
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(HEAD))
        dropping = dict[str, list[Adapter]]()
        for name, size in sized_names(model.config, rows).items():
            path, _, leaf = name.partition(INFIX)
            if modules[path].lora is None:
                own: dict[str, Any] = {
                    "merges": self.merges,
                    "dropout": self._dropout(path, modules[path]),
                    "name": path,
                }
                modules[path].lora = Adapter(scale_of(self.lora), **own, width=size[-1])
                dropping.setdefault(".".join(path.split(".")[:3]), []).append(modules[path].lora)
            setattr(modules[path].lora, leaf, nn.Parameter(torch.empty(size)))
        for layer, adapters in dropping.items() if self.lora.dropout else ():
            modules[layer].dropping = tuple(adapters)
        model.table += rows
        return model

    def _dropout(self, path: str, module: nn.Module) -> float:
        """Return the dropout of a layer. RecipeError: of experts, whose rows do not say which tokens they are."""
        if self.lora.dropout and isinstance(module, StackedLinear):
            key = self.key.replace("targets", "dropout")
            message = f"{key} = {self.lora.dropout}: {path} is of experts, whose adapters have no dropout; set it to 0"
            raise RecipeError(f"{message}, or leave experts out of {self.key}", key=f"{key}.experts")
        return self.lora.dropout


CONVERTERS: dict[str, Converter] = {"value_head": ValueModel, "frozen": frozen}
"""Name -> converter, which returns the model, changed in place, or another one. value_head: a value per token instead
of logits."""


def converted(model: Decoder, converters: Sequence[str | Converter]) -> Decoder:
    """Apply converters, by name or with options of their own. Raises ModelError for an undeclared name, or a parameter
    without a row in the model's table."""
    for own in converters:
        if isinstance(own, str) and own not in CONVERTERS:
            message = f"converter {own!r} is not declared; there are {', '.join(CONVERTERS)}"
            raise ModelError(message, key=f"converters.{own}")
        model = (CONVERTERS[own] if isinstance(own, str) else own)(model)
    for parameter, _ in model.named_parameters():
        rule_of(model.table, parameter)
    return model
