"""Converters: what is done to a one-device model after it is built and before it is sharded.

A converter may put modules in the place of others and add parameters; the rows of these join the model's ``table``, or
the model is refused. Converters are applied in their order, on the meta device.
"""

from collections.abc import Callable, Sequence

from tilth.core.errors import ModelError
from tilth.models.decoder import Decoder
from tilth.models.value import ValueModel
from tilth.plan.rules import rule_of


def frozen(model: Decoder) -> Decoder:
    """Want no gradient of any parameter."""
    return model.requires_grad_(False)


Converter = Callable[[Decoder], Decoder]
CONVERTERS: dict[str, Converter] = {"value_head": ValueModel, "frozen": frozen}
"""By name: a model -> the same one, changed in place, or another one. value_head: one value for each token instead of
logits."""


def converted(model: Decoder, names: Sequence[str]) -> Decoder:
    """Apply converters. ModelError: one that is not declared, or parameters that the model's table has no row for."""
    for name in names:
        if name not in CONVERTERS:
            message = f"converter {name!r} is not declared; there are {', '.join(CONVERTERS)}"
            raise ModelError(message, key=f"converters.{name}")
        model = CONVERTERS[name](model)
    for parameter, _ in model.named_parameters():
        rule_of(model.table, parameter)
    return model
