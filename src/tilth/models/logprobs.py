"""Log-probs, entropy and sums of squared probabilities of chosen tokens without keeping logits.

The head's logits of a long packed batch are the largest tensor of language model training. Here rows go through the
head in chunks, forward and again backward, so only one chunk [rows, V] exists at a time (the idea of Liger's fused
linear cross entropy, arXiv 2410.10989, with an entropy whose gradient is exact). Where all of them together are small,
they are kept instead of computed twice; the bits are the same.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_ELEMENTS = 1 << 21
_CHUNK_ROWS = (128, 1024)
"""Default chunk: about 8 MiB of fp32 logits (they stay in the cache), 128 to 1024 rows (measured, V 32 to 50,000)."""
_KEPT_ELEMENTS = 1 << 26
"""Most log-probs that are kept for the backward pass: 256 MiB. Computing them twice costs 5 % of a step and more."""
_ROW_MULTIPLE = 8


def wide(dtype: torch.dtype) -> torch.dtype:
    """What logits, log-probs and values have: float64 where the residual stream has it, else float32."""
    return dtype if dtype == torch.float64 else torch.float32


def chunk_rows(vocab: int, wanted: int | None) -> int:
    """Rows of hidden states that go through a head of so many logits at a time, ``wanted`` or the default."""
    rows = wanted or min(max(_CHUNK_ELEMENTS // max(vocab, 1), _CHUNK_ROWS[0]), _CHUNK_ROWS[1])
    return rows + -rows % _ROW_MULTIPLE


def keeps(rows: int, vocab: int) -> bool:
    """Whether the log-probs of so many rows are kept for the backward pass."""
    return torch.is_grad_enabled() and rows * vocab <= _KEPT_ELEMENTS


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob of ``targets`` and entropy (nats) under softmax(hidden @ weight.T / temperature).

    hidden: [N, d], weight: [V, d] (cast to hidden's dtype), targets: int64 [N], chunk: rows at a time. Returns two
    float32 [N] (float64 of float64), both differentiable (once) in hidden and weight; the gradient of weight adds up in
    weight's dtype.
    """
    rows, keep = chunk_rows(weight.shape[0], chunk), keeps(hidden.shape[0], weight.shape[0])
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, rows, keep)


@torch.no_grad()
def token_squares(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob of ``targets``, the same bits as of ``token_logprobs``, and the sum over the vocabulary of p squared.

    Arguments as there. Two float32 [N] (float64 of float64) without a gradient; one chunk of logits exists at a time.
    """
    rows, used = chunk_rows(weight.shape[0], chunk), weight.to(hidden.dtype)
    logprobs = hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype))
    squares = torch.empty_like(logprobs)
    for i in range(0, hidden.shape[0], rows):
        some = slice(i, i + rows)
        logp = _log_softmax(head_logits(hidden[some], used), temperature)
        logprobs[some] = logp.gather(1, targets[some, None]).squeeze(1)
        squares[some] = logp.mul_(2).exp_().sum(-1)
    return logprobs, squares


def logits_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of ``targets`` int64 [N] given logits [N, V]: float32 [N] (float64 of float64), as in
    ``token_logprobs``."""
    return _log_softmax(logits, temperature).gather(1, targets[:, None]).squeeze(1)


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [N, d] times weight [V, d]: float32 [N, V] (float64 of float64).

    On a CPU rows are padded to a multiple of 8.
    """
    n = hidden.shape[0]
    spare = -n % _ROW_MULTIPLE if hidden.device.type == "cpu" else 0
    padded = F.pad(hidden, (0, 0, 0, spare)) if spare else hidden
    logits = F.linear(padded, weight.to(hidden.dtype)).to(wide(hidden.dtype))
    return logits[:n] if spare else logits


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(wide(logits.dtype))
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int, keep: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk = temperature, chunk
        used = weight.to(hidden.dtype)
        logprobs = hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype))
        entropy = torch.empty_like(logprobs)
        kept: list[Tensor] = []
        for i in range(0, hidden.shape[0], chunk):
            some = slice(i, i + chunk)
            logp = _log_softmax(head_logits(hidden[some], used), temperature)
            logprobs[some] = logp.gather(1, targets[some, None]).squeeze(1)
            entropy[some] = _entropy(logp)
            if keep:
                kept.append(logp)
        ctx.save_for_backward(hidden, weight, targets, entropy, *kept)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, *kept = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        used = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        for i in range(0, hidden.shape[0], ctx.chunk):
            some = slice(i, i + ctx.chunk)
            logp = kept[i // ctx.chunk] if kept else _log_softmax(head_logits(hidden[some], used), ctx.temperature)
            of_entropy = None if grad_entropy is None else (entropy[some, None], grad_entropy[some, None])
            grad = grad_logits(logp, grad_logprobs[some, None], of_entropy)
            grad = grad.scatter_add_(1, targets[some, None], grad_logprobs[some, None])
            grad = (grad if ctx.temperature == 1.0 else grad.div_(ctx.temperature)).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[some] = grad @ used
            if grad_weight is not None:
                grad_weight += (grad.T @ hidden[some]).to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _entropy(logp: Tensor) -> Tensor:
    """-sum p log p over the last dimension; logits are finite, so every log p is."""
    return logp.exp().mul_(logp).sum(-1).neg_()


def grad_logits(logp: Tensor, grad_logprobs: Tensor, of_entropy: tuple[Tensor, Tensor] | None) -> Tensor:
    """d(log p[target]) = onehot - p, d(entropy) = -p (log p + entropy), each times its incoming gradient: [rows, V].

    of_entropy: the entropy and its incoming gradient. Everything else is [rows, 1]. The onehot is left to the caller.
    """
    p = logp.exp()
    if of_entropy is None:
        return p.mul_(-grad_logprobs)
    entropy, incoming = of_entropy
    return (logp + entropy).mul_(-incoming).sub_(grad_logprobs).mul_(p)
