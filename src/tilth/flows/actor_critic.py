"""Training loops of algorithms with a critic: PPO (arXiv 1707.06347) and VAPO (arXiv 2504.05118).

VAPO's seven changes are keys: critic.steps (value pre-training), options value_lam and alpha (decoupled and
length-adaptive GAE), aggregation, clip_high, nll_coef (likelihood of right answers) and rollout.group.
"""

from tilth.flows.run import Run


def pretrain_critic(run: Run) -> None:
    """Train the critic alone towards Monte-Carlo returns of the frozen policy (VC-PPO, arXiv 2503.01491)."""
    # lam=1: an untrained critic's values are not in its own targets; no options of the policy's loss.
    algo = run.algo.updated(advantage="gae", lam=1.0, options={}, correction="")
    for batch in run.experience(group=run.recipe.rollout.group):
        batch = run.critic.values(batch)
        if algo.kl_in_reward:  # the return includes the KL penalty
            batch = run.logprobs(batch)
        batch = run.policy.advantages(batch, algo)
        for part in run.minibatches(batch):
            run.log_values(run.critic.update(part, algo))


def actor_critic(run: Run) -> None:
    """Sample, score, compute values and advantages, update both models, sync the engine's weights; each step."""
    for batch in run.experience(group=run.recipe.rollout.group):
        batch = run.policy.advantages(run.logprobs(run.critic.values(batch)), run.algo)
        for part in run.minibatches(batch):
            run.log_values(run.critic.update(part, run.algo))
            run.log_update(run.policy.update(part, run.algo))
        run.sync_weights(run.policy)
