"""What can be known to be wrong before a run starts."""

import tilth.rl as rl
from tilth.config.schema import Recipe
from tilth.core.errors import RecipeError
from tilth.roles.policy import options

COLUMNS = {"rewards", "groups", "mask", "lengths", "logprobs", "old_logprobs", "advantages", "rollout_logprobs"}
"""Columns that the pages of GRPO and PPO make; PPO's critic makes ``values`` too."""


def check_algorithm(recipe: Recipe) -> None:
    """Raise RecipeError for an unknown estimator, loss or aggregation, or one that needs what no role makes."""
    if recipe.flow == "pretrain" and recipe.reward.function:
        raise RecipeError("flow=pretrain generates nothing, so nothing is scored; leave reward.function out")
    if recipe.flow in ("sft", "pretrain"):
        return
    how = recipe.algorithm
    columns = COLUMNS | ({"ref_logprobs"} if how.kl_coef else set())
    chosen = options("advantages", how.advantage, how)
    found = rl.check(how.advantage, columns | {"values"}, chosen, kind="advantages")
    _check_critic(recipe, judged="values" in found.needs)
    rl.check(how.loss, columns, options("losses", how.loss, how), kind="losses")
    rl.check(how.aggregation, columns, kind="aggregations")


def _check_critic(recipe: Recipe, *, judged: bool) -> None:
    """A critic is there if and only if the estimator asks for its values."""
    name = recipe.algorithm.advantage
    if judged and recipe.flow != "ppo":
        raise RecipeError(f"algorithm.advantage={name} needs a critic, which flow={recipe.flow} has not; set flow=ppo")
    if not judged and recipe.flow == "ppo":
        raise RecipeError(
            f"algorithm.advantage={name} never looks at the critic that flow=ppo trains; "
            "use algorithm.advantage=gae, or flow=grpo"
        )
