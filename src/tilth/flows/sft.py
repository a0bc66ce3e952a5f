"""Supervised fine-tuning: maximise the likelihood of given answers."""

from tilth.flows.run import Run


def sft(run: Run) -> None:
    """Learn from prompts with their answers, until the last step or the accuracy that the recipe asks for."""
    for batch in run.examples(run.recipe.supervised.batch):
        run.learned(run.policy.imitate(batch))
