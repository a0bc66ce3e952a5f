"""REINFORCE leave-one-out (RLOO, arXiv 2402.14740): no critic, no clip, one update of a batch."""

from tilth.flows.run import Run


def rloo(run: Run) -> None:
    """Sample a few answers to each prompt, compare each with the others, follow the policy gradient once, publish."""
    for batch in run.experience(group=run.recipe.rollout.group, max_staleness=0):
        batch = run.policy.advantages(run.logprobs(batch), run.how)
        run.learned(run.policy.update(batch, run.how))
        run.publish(run.policy)
