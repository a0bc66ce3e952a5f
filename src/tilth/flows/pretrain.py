"""Pre-training: maximise the likelihood of whole documents."""

from tilth.flows.run import Run


def pretrain(run: Run) -> None:
    """Learn from pieces of documents, every token given those before it in its piece, until the last step."""
    for batch in run.documents(run.recipe.supervised.batch):
        run.learned(run.policy.imitate(batch))
