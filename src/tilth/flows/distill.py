"""On-policy distillation (GKD, arXiv 2306.13649, its reverse KL on the student's own samples)."""

from tilth.flows.run import Run


def distill(run: Run) -> None:
    """Sample, let the teacher say how likely it finds each token, follow it where it differs, publish."""
    for batch in run.experience(group=run.recipe.rollout.group, max_staleness=0):
        batch = run.policy.advantages(run.logprobs(batch), run.how)
        for part in run.minibatches(batch):
            run.learned(run.policy.update(part, run.how))
        run.publish(run.policy)
