"""Converters: changes of a one-device model after it is built and before it is sharded.

A converter may replace modules and add parameters, whose rows it adds to the model's ``table``; without a row the
model is refused. Converters are applied in their order, on the meta device.
"""

from collections.abc import Callable, Sequence

from tilth.core.errors import ModelError
from tilth.models.decoder import Decoder
from tilth.models.value import ValueModel
from tilth.plan.rules import rule_of


def frozen(model: Decoder) -> Decoder:
    """Disable the gradients of all parameters."""
    return model.requires_grad_(False)


Converter = Callable[[Decoder], Decoder]
CONVERTERS: dict[str, Converter] = {"value_head": ValueModel, "frozen": frozen}
"""Name -> converter, which returns the model, changed in place, or another one. value_head: a value per token instead
of logits."""


def converted(model: Decoder, names: Sequence[str]) -> Decoder:
    """Apply converters. Raises ModelError for an undeclared one, or a parameter without a row in the model's table."""
    for name in names:
        if name not in CONVERTERS:
            message = f"converter {name!r} is not declared; there are {', '.join(CONVERTERS)}"
            raise ModelError(message, key=f"converters.{name}")
        model = CONVERTERS[name](model)
    for parameter, _ in model.named_parameters():
        rule_of(model.table, parameter)
    return model
