"""Model FLOPs of a decoder: the operations of the mathematics, independent of kernels."""

from typing import NamedTuple

import numpy as np

from tilth.plan.shape import DecoderShape, matrices


class Flops(NamedTuple):
    """Operations of the forward and of the backward pass; a multiply and an add are two."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """FLOPs of a training pass."""
        return self.forward + self.backward


def token_flops(shape: DecoderShape, attended: float, head: bool = True, frozen: bool = False) -> Flops:
    """Return the FLOPs of one token that attends to ``attended`` tokens, itself included. head: with its logits.
    frozen: no gradients of weights, as with adapters, whose own FLOPs are left out.

    Forward: 2 for each matrix element that the token meets (``experts_per_token`` of all experts), and 2 x heads x
    (head_dim + value_dim) for each attended token (scores and mixing). Backward: twice that. Look-ups, norms and the
    softmax are left out, as usual (PaLM, arXiv 2204.02311, appendix B).
    """
    weights = matrices(shape, active=True) + (shape.vocab_size * shape.hidden_size if head else 0)
    pairs = 2.0 * shape.num_layers * shape.num_heads * (shape.head_dim + shape.value_dim)
    forward = 2.0 * weights + pairs * attended
    return Flops(forward, 2 * forward - (2.0 * weights if frozen else 0))


def sequence_flops(shape: DecoderShape, lengths: np.ndarray, window: int | None = None) -> Flops:
    """Return the FLOPs of whole sequences under causal attention, with logits at every token. lengths: int [n]."""
    return pass_flops(shape, int(np.sum(lengths)), attended(lengths, window))


def pass_flops(shape: DecoderShape, tokens: int, pairs: int, head: bool = True, frozen: bool = False) -> Flops:
    """Return the FLOPs of a pass over ``tokens`` with ``pairs`` attended tokens in all. head, frozen: as in
    ``token_flops``."""
    if tokens == 0:
        return Flops(0.0, 0.0)
    one = token_flops(shape, pairs / tokens, head, frozen)
    return Flops(tokens * one.forward, tokens * one.backward)


def layer_flops(shape: DecoderShape, lengths: np.ndarray) -> np.ndarray:
    """Return the FLOPs of one layer's forward pass over each sequence: float64 [n]."""
    passes = [pass_flops(shape, n, n * (n + 1) // 2, head=False).forward for n in np.asarray(lengths).tolist()]
    return np.array(passes, np.float64) / shape.num_layers


def attended(lengths: np.ndarray, window: int | None = None) -> int:
    """Count pairs of a token and one that it attends to, over all sequences; a window includes the token."""
    n = np.asarray(lengths, np.int64)
    w = n if window is None else np.minimum(n, window)
    return int((w * (w + 1) // 2 + (n - w) * w).sum())
