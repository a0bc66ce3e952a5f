"""VAPO (arXiv 2504.05118): PPO whose critic is trained first, and never towards its own guesses.

Its seven changes are keys: critic.steps (value pre-training), options value_lam and alpha (decoupled and
length-adaptive GAE), aggregation, clip_high, nll_coef (likelihood of right answers) and rollout.group.
"""

from tilth.flows.run import Run


def vapo(run: Run) -> None:
    """Sample groups, value each token, estimate with a lambda for the critic and one by length for the policy; update
    both, the policy towards its right answers too; publish."""
    for batch in run.experience(group=run.recipe.rollout.group, max_staleness=0):
        batch = run.policy.advantages(run.logprobs(run.critic.values(batch)), run.how)
        for part in run.minibatches(batch):
            run.valued(run.critic.update(part, run.how))
            run.learned(run.policy.update(part, run.how))
        run.publish(run.policy)
