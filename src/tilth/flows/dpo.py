"""Direct preference optimisation and its variants (DPO, arXiv 2305.18290; the losses: ``tilth.rl.preference``)."""

from tilth.flows.run import Run


def dpo(run: Run) -> None:
    """Learn from pairs of answers, held to the policy as it began, until the last step."""
    for batch in run.pairs(run.recipe.supervised.batch):
        if run.reference is not None:
            batch = run.reference.logprobs(batch)
        run.learned(run.policy.prefer(batch, run.recipe.preference))
