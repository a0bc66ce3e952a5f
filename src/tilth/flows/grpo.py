"""Group relative policy optimisation (GRPO, arXiv 2402.03300; without the division by std: arXiv 2503.20783)."""

from tilth.flows.checks import drops_flat
from tilth.flows.keep import has_spread
from tilth.flows.run import Run


def grpo(run: Run) -> None:
    """Sample groups, score them, compare within the group, update, publish; until the recipe's last step."""
    keep = has_spread if drops_flat(run.recipe) else None
    for batch in run.experience(group=run.recipe.rollout.group, max_staleness=0, keep=keep):
        batch = run.policy.advantages(run.logprobs(batch), run.how)
        for part in run.minibatches(batch):
            run.learned(run.policy.update(part, run.how))
        run.publish(run.policy)
