"""REINFORCE++ (arXiv 2501.03262): rewards to go, normalised over the whole batch; with groups and the estimator
reinforce_pp_baseline, less the mean of the group first."""

from tilth.flows.run import Run


def reinforce_pp(run: Run) -> None:
    """Sample, score, normalise over all tokens of the batch, update with PPO's clip, publish."""
    for batch in run.experience(group=run.recipe.rollout.group, max_staleness=0):
        batch = run.policy.advantages(run.logprobs(batch), run.how)
        for part in run.minibatches(batch):
            run.learned(run.policy.update(part, run.how))
        run.publish(run.policy)
