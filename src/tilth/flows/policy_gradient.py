"""Training loop of algorithms without a critic: GRPO, RLOO, REINFORCE++, ReMax, DAPO, FAPO, distillation.

They differ in keys, whose defaults are one row of ``tilth.config.flows.FLOWS`` each: the estimator
(``algorithm.advantage``), the loss and its clips, the KL penalty, dynamic sampling (``refill``), overlong shaping, the
judge.
"""

from tilth.flows.reward_shaping import group_filter, mask_truncated, overlong
from tilth.flows.run import Run
from tilth.flows.step_judge import ask_judge, drop_flat_groups, penalised


def policy_gradient(run: Run) -> None:
    """Sample groups of answers, score them, compute advantages, update the policy, sync the engine; each step."""
    rollout, algo = run.recipe.rollout, run.recipe.algorithm
    judge = run.roles.judge if run.recipe.flow_spec.judge else None  # else it grades: a part of the reward
    for batch in run.experience(group=rollout.group, keep=group_filter(run.recipe, run.algorithm), rounds=algo.refill):
        if judge is not None:  # read below, so that a judge with its own pool works beside other roles
            verdicts = ask_judge(judge, run.loader, batch)
        if "baselines" in run.algorithm.computed:  # ReMax: the reward of the greedy answer
            batch = run.baselines(batch)
        batch = run.logprobs(batch)
        if judge is not None:  # FAPO: right answers with a wrong step earn less
            batch = drop_flat_groups(run, penalised(run, batch, verdicts))
        batch = overlong(batch, algo, rollout.max_tokens)
        batch = mask_truncated(run.policy.advantages(batch, run.algo), algo)
        for part in run.minibatches(batch):
            run.log_update(run.policy.update(part, run.algo))
        run.sync_weights(run.policy)
