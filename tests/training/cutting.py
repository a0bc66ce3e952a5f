"""Micro-batches of a batch, for tests."""

from tilth.training.packed import cut, plan_micros


def micros(tokens, mask, columns, max_tokens, device, *, share=False, several=False):
    """Split into micro-batches of at most ``max_tokens``: (indices into the packed columns [N], micro-batch)."""
    return cut(tokens, mask, columns, plan_micros(tokens, mask, max_tokens, share=share, several=several), device)
