"""Control of the entropy bonus: a coefficient that follows the policy's entropy towards a target."""

import math

from tilth.core.errors import RecipeError


def adapt_entropy(
    coef: float, entropy: float, *, target: float, step: float = 1e-4, least: float = 0.0, most: float = math.inf
) -> float:
    """The coefficient of the entropy bonus after a training step (Skywork-OR1, 2505.22312, adaptive entropy control).

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
    """Weight of the bonus in the loss: the coefficient while the entropy is at most its target, else 0."""
    return coef if entropy <= target else 0.0
