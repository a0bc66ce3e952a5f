"""FAPO (arXiv 2510.22543): DAPO in which a right answer with a wrong step earns less, as a judge of steps says.

``judge.penalty`` is its lambda; with 0 the judge is asked and measured, and all else is as in DAPO.
"""

from tilth.flows.checks import drops_flat
from tilth.flows.judged import ask_judge, can_differ, penalised, spread
from tilth.flows.keep import is_mixed
from tilth.flows.run import Run
from tilth.flows.shape import overlong, uncut


def fapo(run: Run) -> None:
    """Sample, judge the steps of what is right, lower what is flawed, compare within the group, update, publish."""
    how, rollout = run.recipe.algorithm, run.recipe.rollout
    keep = is_mixed if how.refill else can_differ(run.recipe.judge.penalty) if drops_flat(run.recipe) else None
    for batch in run.experience(group=rollout.group, max_staleness=0, keep=keep, rounds=how.refill):
        told = ask_judge(run, batch)  # read below: a judge with a pool of its own works beside what comes between
        batch = spread(run, penalised(run, run.logprobs(batch), told))
        batch = overlong(batch, how, rollout.max_tokens)
        batch = uncut(run.policy.advantages(batch, run.how), how)
        for part in run.minibatches(batch):
            run.learned(run.policy.update(part, run.how))
        run.publish(run.policy)
