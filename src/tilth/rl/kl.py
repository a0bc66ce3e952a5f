"""Forms of the KL penalty towards a reference policy, per token (Schulman, "Approximating KL divergence").

On samples of the policy, k1 and k3 are unbiased values of KL(policy || reference). As a loss on-policy the expected
gradient of k1 is 0, that of k2 is the gradient of KL(policy || reference), that of k3 of KL(reference || policy).
"""

import torch
from torch import Tensor

from tilth.rl.registry import Entry, build, register


class KlForm(Entry):
    """A form: a function of d = logprobs - ref_logprobs."""

    def value(self, d: Tensor) -> Tensor:
        """Per-token penalty, same shape, differentiable."""
        raise NotImplementedError


@register("kl", "k1")
class K1(KlForm):
    """d."""

    def value(self, d: Tensor) -> Tensor:
        """Per-token penalty."""
        return d


@register("kl", "k2")
class K2(KlForm):
    """d^2 / 2."""

    def value(self, d: Tensor) -> Tensor:
        """Per-token penalty."""
        return 0.5 * d * d


@register("kl", "k3")
class K3(KlForm):
    """exp(-d) - 1 + d with d clamped to +-20 and the result to +-10 (as in verl); at least 0."""

    def value(self, d: Tensor) -> Tensor:
        """Per-token penalty."""
        d = d.clamp(-20.0, 20.0)
        return (torch.exp(-d) - 1 + d).clamp(-10.0, 10.0)


def kl_penalty(form: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Penalty of each token, same shape as ``logprobs``, in at least float32; differentiable in ``logprobs``.

    form: one of ``names()["kl"]``. Masked tokens are the caller's: pass the result through an aggregation.
    """
    d = logprobs - ref_logprobs
    return build("kl", form, {}, KlForm).value(d.float() if d.dtype in (torch.bfloat16, torch.float16) else d)
