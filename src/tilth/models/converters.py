"""Converters: changes of a one-device model after it is built and before it is sharded.

A converter may replace modules and add parameters, whose rows it adds to the model's ``table``; without a row the
model is refused. Converters are applied in their order, on the meta device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilth.config.schema import LoraConfig
from tilth.core.errors import ModelError, RecipeError
from tilth.models.decoder import Decoder
from tilth.models.lora import Adapter
from tilth.models.moe import StackedLinear
from tilth.models.value import HEAD, ValueModel
from tilth.plan.lora import INFIX, adapter_rows, scale_of
from tilth.plan.rules import rule_of
from tilth.plan.shape import sized_names

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
