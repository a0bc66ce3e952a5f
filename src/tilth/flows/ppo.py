"""Proximal policy optimisation with a critic (PPO, arXiv 1707.06347; value pre-training: arXiv 2503.01491)."""

from tilth.flows.run import Run


def values(run: Run) -> None:
    """Train the critic alone on what the policy, left as it is, does: towards the rewards that its samples end with."""
    # No value of an untrained critic in its own target; nothing that the policy's loss alone goes by.
    monte_carlo = {"advantage": "gae", "lam": 1.0, "options": {}, "correction": ""}
    how = run.how.model_copy(update=monte_carlo)
    for batch in run.experience(group=run.recipe.rollout.group, max_staleness=0):
        batch = run.critic.values(batch)
        if how.kl_coef and how.kl_in == "reward":  # what samples end with has the penalty in it
            batch = run.logprobs(batch)
        batch = run.policy.advantages(batch, how)
        for part in run.minibatches(batch):
            run.valued(run.critic.update(part, how))


def ppo(run: Run) -> None:
    """Sample, value each token, compare what came with what was expected, update both models, publish."""
    for batch in run.experience(group=run.recipe.rollout.group, max_staleness=0):
        batch = run.policy.advantages(run.logprobs(run.critic.values(batch)), run.how)
        for part in run.minibatches(batch):
            run.valued(run.critic.update(part, run.how))
            run.learned(run.policy.update(part, run.how))
        run.publish(run.policy)
