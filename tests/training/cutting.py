"""Micro-batches of a batch, for tests."""

from tilth.plan.batch import MicroBatchLimits
from tilth.training.packed import cut, plan_micros


def micros(tokens, mask, columns, max_tokens, device, *, share=False, several=False):
    """Split into micro-batches of at most ``max_tokens``: (indices into the packed columns [N], micro-batch)."""
    plan = plan_micros(tokens, mask, MicroBatchLimits(max_tokens, share, several)).learn
    return cut(tokens, mask, columns, plan, device)
