"""The training loops of algorithms with a critic: PPO (arXiv 1707.06347) and VAPO (arXiv 2504.05118).

VAPO's seven changes are keys: critic.steps (value pre-training), options value_lam and alpha (decoupled and
length-adaptive GAE), aggregation, clip_high, nll_coef (likelihood of right answers) and rollout.group.
"""

from tilth.flows.run import Run


def pretrain_critic(run: Run) -> None:
    """Train the critic alone, towards the rewards that samples of the frozen policy end with (VC-PPO, 2503.01491)."""
    # No value of an untrained critic in its own target; nothing that the policy's loss alone goes by.
    how = run.algo.updated(advantage="gae", lam=1.0, options={}, correction="")
    for batch in run.experience(group=run.recipe.rollout.group):
        batch = run.critic.values(batch)
        if how.kl_in_reward:  # what samples end with has the penalty in it
            batch = run.logprobs(batch)
        batch = run.policy.advantages(batch, how)
        for part in run.minibatches(batch):
            run.log_values(run.critic.update(part, how))


def actor_critic(run: Run) -> None:
    """Sample, score, value each token, compare what came with what was expected, update both models; each step."""
    for batch in run.experience(group=run.recipe.rollout.group):
        batch = run.policy.advantages(run.logprobs(run.critic.values(batch)), run.algo)
        for part in run.minibatches(batch):
            run.log_values(run.critic.update(part, run.algo))
            run.log_update(run.policy.update(part, run.algo))
        run.sync_weights(run.policy)
