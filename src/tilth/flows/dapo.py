"""DAPO (arXiv 2503.14476): GRPO with clip-higher, token-mean loss, dynamic sampling and overlong shaping.

Each is a switch: algorithm.clip_high = clip_low, aggregation = seq-mean-token-mean, refill = 0 and overlong_buffer = 0
give GRPO.
"""

from tilth.flows.checks import drops_flat
from tilth.flows.keep import has_spread, is_mixed
from tilth.flows.run import Run
from tilth.flows.shape import overlong, uncut


def dapo(run: Run) -> None:
    """Sample until enough groups are neither all right nor all wrong; punish length; compare in the group; update."""
    how, rollout = run.recipe.algorithm, run.recipe.rollout
    keep = is_mixed if how.refill else has_spread if drops_flat(run.recipe) else None
    for batch in run.experience(group=rollout.group, max_staleness=0, keep=keep, rounds=how.refill):
        batch = overlong(batch, how, rollout.max_tokens)
        batch = uncut(run.policy.advantages(run.logprobs(batch), run.how), how)
        for part in run.minibatches(batch):
            run.learned(run.policy.update(part, run.how))
        run.publish(run.policy)
