"""Forms of the KL penalty towards a reference policy, per token (Schulman, "Approximating KL divergence").

On samples of the policy, k1 and k3 are unbiased values of KL(policy || reference). As a loss on-policy the expected
gradient of k1 is 0, that of k2 is the gradient of KL(policy || reference), that of k3 of KL(reference || policy). Forms
with + have the value of their base and the gradient of k2 (straight through, as in verl): the right one for a loss.

In the reward (``penalise``) a penalty is a constant, so only its value counts: there k1 is right (InstructGPT).
"""

import math
from collections.abc import Callable

import torch
from pydantic import create_model
from torch import Tensor

from tilth.core.errors import RecipeError, TokenCountError
from tilth.rl.packing import Packing
from tilth.rl.registry import Entry, build, register

LARGEST_CHANGE = 0.2
"""Relative error of the KL, either way, up to which the adaptive coefficient follows it (Ziegler 2019)."""


class KlForm(Entry):
    """A form of the penalty: a function of d = logprobs - ref_logprobs."""

    def value(self, d: Tensor) -> Tensor:
        """Return the penalty of each token, same shape, differentiable."""
        raise NotImplementedError


def _k3(d: Tensor) -> Tensor:
    d = d.clamp(-20.0, 20.0)
    return (torch.exp(-d) - 1 + d).clamp(-10.0, 10.0)


_FORMS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "k1": (lambda d: d, "d."),
    "abs": (torch.abs, "|d|: at least 0, but neither a KL nor its gradient."),
    "k2": (lambda d: 0.5 * d * d, "d^2 / 2."),
    "k3": (_k3, "exp(-d) - 1 + d with d clamped to +-20 and the result to +-10 (as in verl); at least 0."),
}


def _straight_through(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function with the same value and the gradient of k2."""

    def both(d: Tensor) -> Tensor:
        k2 = 0.5 * d * d
        return value(d).detach() + (k2 - k2.detach())

    return both


def _register(name: str, value: Callable[[Tensor], Tensor], description: str) -> None:
    form = create_model(name, __base__=KlForm, __module__=__name__, __doc__=description)
    form.value = lambda self, d: value(d)  # type: ignore[method-assign]
    form.__reduce__ = lambda self: (_form, (name,))  # type: ignore[method-assign]
    register("kl", name)(form)


def _form(name: str) -> KlForm:
    """Return the form of this name: pickle cannot look up a class that no module has."""
    return build("kl", name, {}, KlForm)


for _name, (_value, _description) in _FORMS.items():
    _register(_name, _value, _description)
for _name in ("k1", "k3", "abs"):
    _register(f"{_name}+", _straight_through(_FORMS[_name][0]), f"Value of {_name}, gradient of k2.")


def kl_penalty(form: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the penalty of each token, same shape as ``logprobs``, at least float32; differentiable in ``logprobs``.

    form: one of ``names()["kl"]``. Masks are not applied: pass the result through an aggregation.
    """
    d = logprobs - ref_logprobs
    return build("kl", form, {}, KlForm).value(d.float() if d.dtype in (torch.bfloat16, torch.float16) else d)


def penalise(
    rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, *, kl: str, coef: float, mask: Tensor, lengths: Tensor
) -> Tensor:
    """Return token rewards with the KL penalty in them (InstructGPT 2203.02155), for ``estimate``.

    Each token that counts gets -coef * kl, the last of a row the row's reward too; others get 0. A reward that is
    missing (not finite) makes the last token's missing, and with it the row; so does a penalty that is not finite.

    Args:
        rewards: [n], of each row. logprobs, ref_logprobs: [total]; their gradients end here.
        kl: one of ``names()["kl"]``. coef: its weight.
        mask: [total], not 0 where the token counts; lengths: integers [n].

    Returns: [total], float64.

    Raises: RecipeError (unknown form), TokenCountError (a column of another size).
    """
    packing = Packing.of(lengths, mask)
    rewards = torch.as_tensor(rewards).to(packing.mask.device, torch.float64)
    if rewards.shape != packing.lengths.shape:
        raise TokenCountError(
            f"rewards has the shape {tuple(rewards.shape)}; there are {len(packing.lengths)} rows", key="rewards.shape"
        )
    columns = packing.column("logprobs", logprobs), packing.column("ref_logprobs", ref_logprobs)
    own, theirs = (packing.masked(column).detach().double() for column in columns)
    tokens = packing.masked(-coef * kl_penalty(kl, own, theirs))
    alive = packing.counts > 0
    return tokens.index_add(0, packing.ends[alive], rewards[alive])


def adapt(coef: float, kl: float, *, target: float, horizon: float, count: float) -> float:
    """Return the KL coefficient after ``count`` more samples: coef * (1 + clip(kl / target - 1, -0.2, 0.2) * count /
    horizon).

    Ziegler 2019 (1909.08593), as in verl and TRL: it grows while the KL is above its target, and falls below it.

    Args:
        coef: the coefficient now. kl: mean KL per token (or whatever ``target`` is of) of those samples, in nats; not
            finite, as where no token counts: the coefficient stays.
        target: KL to hold; horizon: samples over which the coefficient follows; count: samples since the last call.

    Raises: RecipeError: a target or horizon that is not positive, or a horizon so short that the coefficient could
        turn negative.
    """
    if not (target > 0 and horizon > 0):
        raise RecipeError(
            f"adaptive KL: target = {target}, horizon = {horizon}: both must be positive",
            key="horizon" if target > 0 else "target",
        )
    if LARGEST_CHANGE * count >= horizon:
        raise RecipeError(
            f"adaptive KL: horizon = {horizon}: it must be more than a fifth of the {count} samples of a step",
            key="horizon",
        )
    if not math.isfinite(kl):
        return coef
    return coef * (1 + min(max(kl / target - 1, -LARGEST_CHANGE), LARGEST_CHANGE) * count / horizon)


def adapt_entropy(
    coef: float, entropy: float, *, target: float, step: float = 1e-4, least: float = 0.0, most: float = math.inf
) -> float:
    """Return the coefficient of the entropy bonus after a training step (Skywork-OR1, 2505.22312, adaptive entropy
    control).

    It rises by ``step`` while the entropy is below its target and falls by as much elsewhere. In the paper the bonus is
    in the loss only while the entropy is at most the target: that is ``entropy_bonus`` of what this returns. The step
    is that of the released recipes, which hold the coefficient to 0.005; the paper's own example moves by 0.005.

    Args:
        coef: the coefficient now. entropy: mean of the policy's entropy over tokens, in nats; not finite, as where no
            token counts: the coefficient stays.
        target: entropy to hold, in nats (0.2 in the paper). step: how far the coefficient moves.
        least, most: bounds of the coefficient.

    Raises: RecipeError: a step that is not positive, or bounds that leave nothing between them.
    """
    if not step > 0:
        raise RecipeError(f"adaptive entropy: step = {step}: it must be positive", key="step")
    if not 0 <= least <= most:
        raise RecipeError(
            f"adaptive entropy: bounds [{least}, {most}]: they must be in order and not negative", key="least"
        )
    if not math.isfinite(entropy):
        return coef
    return min(max(coef + step if entropy < target else coef - step, least), most)


def entropy_bonus(coef: float, entropy: float, *, target: float) -> float:
    """Return the weight of the bonus in the loss: the coefficient while the entropy is at most its target, else 0."""
    return coef if entropy <= target else 0.0
