"""The advantage of a student over its own tokens: how much likelier a teacher finds them."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from tilth.rl.advantage_base import Advantage, Tokens
from tilth.rl.packing import discounted_sums
from tilth.rl.registry import Scope, register


@register("advantages", "distill")
class Distill(Advantage):
    """On-policy distillation: log teacher - log student at each token that the student chose, and with ``horizon``
    above 0 the same of the tokens behind it, discounted.

    The policy gradient with the sum of all that is to come (horizon 1) is the gradient of KL(student || teacher) over
    whole answers; with 0, the default and the common practice, each token answers for itself alone, which has less
    variance (GKD 2306.13649 with reverse KL; MiniLLM 2306.08543). Rewards do not matter, but a row without one is left
    out.
    """

    horizon: float = Field(0.0, ge=0, le=1, description="discount of the tokens behind: 0 none of them, 1 all")

    needs: ClassVar[tuple[str, ...]] = ("logprobs", "ref_logprobs")
    reads_reward: ClassVar[bool] = False
    scope: ClassVar[Scope] = "token-local"

    def tokens(self, tokens: Tokens) -> tuple[Tensor, None]:
        """Teacher minus student."""
        gap = tokens.chosen("ref_logprobs") - tokens.chosen("logprobs")
        return tokens.scatter(discounted_sums(gap, tokens.packing.counts, self.horizon)), None
