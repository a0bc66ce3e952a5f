"""Proximal policy optimisation with a critic (PPO, arXiv 1707.06347; value pre-training: arXiv 2503.01491)."""

from tilth.flows.run import Run


def values(run: Run) -> None:
    """Train the critic alone on what the policy, left as it is, does: towards the rewards that its samples end with."""
    how = run.recipe.algorithm.model_copy(update={"lam": 1.0})  # Monte-Carlo returns: no value of an untrained critic
    for batch in run.experience(group=run.recipe.rollout.group, max_staleness=0):
        batch = run.policy.advantages(run.critic.values(batch), how)
        for part in run.minibatches(batch):
            run.valued(run.critic.update(part, how))


def ppo(run: Run) -> None:
    """Sample, value each token, compare what came with what was expected, update both models, publish."""
    how = run.recipe.algorithm
    for batch in run.experience(group=run.recipe.rollout.group, max_staleness=0):
        batch = run.policy.advantages(run.critic.values(batch), how)
        if how.epochs * how.minibatches > 1:
            batch = run.policy.logprobs(batch)
        if run.reference is not None:
            batch = run.reference.logprobs(batch)
        for part in run.minibatches(batch):
            run.valued(run.critic.update(part, how))
            run.learned(run.policy.update(part, how))
        run.publish(run.policy)
