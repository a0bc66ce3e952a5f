"""Training loops that learn from given data: fine-tuning, pre-training, preference pairs, reward models."""

from tilth.flows.run import Run


def supervised(run: Run) -> None:
    """Maximise the likelihood of given answers (sft, warm-ups), or of every token of whole documents (pretrain)."""
    count = run.recipe.supervised.batch
    for batch in run.documents(count) if run.recipe.flow_spec.learns == "documents" else run.examples(count):
        run.log_update(run.policy.sft_step(batch))


def preference(run: Run) -> None:
    """Learn from pairs of answers: a policy (DPO, arXiv 2305.18290) or a reward model (arXiv 2203.02155, section 3.5).

    The losses are in ``tilth.rl.preference``. A reference, if the loss needs one, is the initial policy.
    """
    for batch in run.pairs(run.recipe.supervised.batch):
        if run.reference is not None:
            batch = run.reference.logprobs(batch)
        run.log_update(run.policy.pair_step(batch, run.recipe.preference))
