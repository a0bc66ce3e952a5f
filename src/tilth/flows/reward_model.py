"""A reward model by pairs of answers (Bradley-Terry; arXiv 2203.02155, section 3.5)."""

from tilth.flows.run import Run


def reward_model(run: Run) -> None:
    """Learn scores by which the chosen answer is ahead of the rejected one, until the last step."""
    for batch in run.pairs(run.recipe.supervised.batch):
        run.learned(run.policy.prefer(batch, run.recipe.preference))
