"""ReMax (arXiv 2310.10505): the reward of the greedy answer is the baseline, so that one sample of a prompt will do."""

from tilth.flows.run import Run


def remax(run: Run) -> None:
    """Sample, answer each prompt greedily too, compare the two rewards, follow the policy gradient once, publish."""
    for batch in run.experience(group=run.recipe.rollout.group, max_staleness=0):
        batch = run.policy.advantages(run.logprobs(run.baselines(batch)), run.how)
        run.learned(run.policy.update(batch, run.how))
        run.publish(run.policy)
