"""What can be known to be wrong before a run starts."""

import tilth.rl as rl
from tilth.config.schema import Recipe
from tilth.roles.policy import options

COLUMNS = {"rewards", "groups", "mask", "lengths", "logprobs", "old_logprobs", "advantages", "rollout_logprobs"}
"""Columns that the GRPO page makes."""


def check_algorithm(recipe: Recipe) -> None:
    """Raise RecipeError for an unknown estimator, loss or aggregation, or one that needs what no role makes."""
    if recipe.flow in ("sft", "pretrain"):
        return
    how = recipe.algorithm
    columns = COLUMNS | ({"ref_logprobs"} if how.kl_coef else set())
    rl.check(how.advantage, columns, options("advantages", how.advantage, how), kind="advantages")
    rl.check(how.loss, columns, options("losses", how.loss, how), kind="losses")
    rl.check(how.aggregation, columns, kind="aggregations")
