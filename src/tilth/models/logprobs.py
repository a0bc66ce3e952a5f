"""Log-probs, entropy and sums of squared probabilities of chosen tokens without keeping logits.

The logits of a long packed batch are the largest tensor of language model training. Rows go through the head in chunks,
forward and again backward, so only one chunk [rows, V] exists at a time (as in Liger's fused linear cross entropy,
arXiv 2410.10989, with an exact gradient of the entropy). Small log-probs are kept instead of computed twice, with
equal bits. Chunks are large for fast matrix products; element-wise work goes through them in parts that stay in the
cache. On a GPU a kernel computes tiles of logits in registers (``models.kernels``); these functions are its reference.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilth.models.casts import cast
from tilth.models.kernels import chosen
from tilth.models.steady import steady_linear
from tilth.plan import kernels
from tilth.plan.kernels import CACHED_ELEMENTS, chunk_rows


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of logits, log-probs and values: float64 if the residual stream is float64, else float32."""
    return dtype if dtype == torch.float64 else torch.float32


def keeps(rows: int, vocab: int) -> bool:
    """Return True if the log-probs of this many rows are kept for the backward pass."""
    return torch.is_grad_enabled() and kernels.keeps(rows, vocab)


def cached_parts(some: slice, logits: Tensor) -> Iterator[slice]:
    """Yield ``some`` rows in parts whose logits stay in the cache of a CPU; on other devices all at once."""
    rows = max(CACHED_ELEMENTS // max(logits.shape[1], 1) if logits.device.type == "cpu" else len(logits), 1)
    for i in range(some.start, some.stop, rows):
        yield slice(i, min(i + rows, some.stop))


def within(part: slice, some: slice) -> slice:
    """Return ``part`` of ``some`` rows relative to the first of them."""
    return slice(part.start - some.start, part.stop - some.start)


def chunks(rows: int, chunk: int) -> Iterator[slice]:
    """``rows`` in slices of ``chunk``, the last one perhaps shorter."""
    for i in range(0, rows, chunk):
        yield slice(i, min(i + chunk, rows))


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk: int | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-prob of ``targets`` and entropy (nats) under softmax(hidden @ weight.T / temperature).

    hidden: [N, d], weight: [V, d] (cast to hidden's dtype), targets: int64 [N], chunk: rows at a time. Returns two
    float32 [N] (float64 of float64), both differentiable (once) in hidden and weight; the gradient of weight adds up in
    weight's dtype. Without ``entropy`` the second one is empty, [0].
    """
    if (kernel := chosen("linear_cross_entropy", hidden)) is not None:
        return _KernelLogprobs.apply(hidden, weight, targets, temperature, kernel, entropy)
    rows, keep = chunk_rows(weight.shape[0], chunk, hidden.is_cuda), keeps(hidden.shape[0], weight.shape[0])
    return _TokenLogprobs.apply(hidden, weight, targets, temperature, rows, keep, entropy)


@torch.no_grad()
def token_squares(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probs of ``targets``, bit-equal to ``token_logprobs``, and sums over the vocabulary of p squared.

    Arguments of ``token_logprobs``. Returns two float32 [N] (float64 of float64) without a gradient.
    """
    rows, used = chunk_rows(weight.shape[0], chunk, hidden.is_cuda), weight.to(hidden.dtype)
    if (kernel := chosen("linear_cross_entropy", hidden)) is not None:
        greatest, sums = kernel.statistics(hidden, used, targets, temperature)
        return sums[2] - greatest - sums[0].log(), sums[3] / sums[0] ** 2
    logprobs = hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype))
    squares = torch.empty_like(logprobs)
    for some in chunks(hidden.shape[0], rows):
        logp = _log_softmax(head_logits(hidden[some], used), temperature)
        logprobs[some] = logp.gather(1, targets[some, None]).squeeze(1)
        squares[some] = logp.mul_(2).exp_().sum(-1)
    return logprobs, squares


def logits_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log-probs float32 [N] (float64 of float64) of targets int64 [N], given logits [N, V]."""
    return _log_softmax(logits, temperature).gather(1, targets[:, None]).squeeze(1)


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits float32 [N, V] (float64 of float64) of hidden [N, d] and weight [V, d]; on a CPU a row has the
    same bits for every N."""
    return steady_linear(hidden, weight.to(hidden.dtype)).to(wide(hidden.dtype))


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(wide(logits.dtype))
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        keep: bool,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk = temperature, chunk
        used = cast(weight, hidden.dtype)
        logprobs = hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype))
        entropy = logprobs.new_empty(hidden.shape[0] if with_entropy else 0)
        kept: list[Tensor] = []
        for some in chunks(hidden.shape[0], chunk):
            logp = _log_softmax(head_logits(hidden[some], used), temperature)
            logprobs[some] = logp.gather(1, targets[some, None]).squeeze(1)
            if with_entropy:
                for part in cached_parts(some, logp):
                    entropy[part] = _entropy(logp[within(part, some)])
            if keep:
                kept.append(logp)
        ctx.save_for_backward(hidden, weight, targets, entropy, *kept)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, *kept = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(len(hidden), dtype=wide(hidden.dtype), device=hidden.device)
        used = cast(weight, hidden.dtype)

        def fill(some: slice, grad: Tensor) -> None:
            logp = (
                kept[some.start // ctx.chunk]
                if kept
                else _log_softmax(head_logits(hidden[some], used), ctx.temperature)
            )
            for part in cached_parts(some, logp):
                own = within(part, some)
                of_entropy = None if grad_entropy is None else (entropy[part, None], grad_entropy[part, None])
                incoming = grad_logprobs[part, None]
                found = grad_logits(logp[own], incoming, of_entropy, targets[part, None], incoming)
                grad[own] = found if ctx.temperature == 1.0 else found.div_(ctx.temperature)

        return *head_gradients(hidden, weight, ctx.chunk, fill, ctx.needs_input_grad[:2]), *[None] * 6


class _KernelLogprobs(torch.autograd.Function):
    """``token_logprobs`` by a kernel, given its module."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, kernel: Any, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.kernel = temperature, kernel
        greatest, sums = kernel.statistics(hidden, cast(weight, hidden.dtype), targets, temperature)
        log_total = sums[0].log()
        entropy = log_total - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, greatest, log_total, entropy)
        return sums[2] - greatest - log_total, entropy if with_entropy else entropy[:0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, *kept = ctx.saved_tensors
        used, wanted = cast(weight, hidden.dtype), ctx.needs_input_grad[:2]
        found = ctx.kernel.gradients(hidden, used, targets, ctx.temperature, kept, incoming, wanted, weight.dtype)
        return *found, *[None] * 4


def head_gradients(
    hidden: Tensor, weight: Tensor, chunk: int, fill: Callable[[slice, Tensor], None], wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the wanted gradients of hidden [N, d] and weight [V, d].

    fill: writes the gradient of the logits of some rows, at most ``chunk``, to a tensor [rows, V] of hidden's dtype.
    """
    used = cast(weight, hidden.dtype)
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = torch.zeros_like(weight) if wanted[1] else None
    room = hidden.new_empty(min(chunk, len(hidden)), len(weight))
    for some in chunks(len(hidden), chunk):
        grad = room[: some.stop - some.start]
        fill(some, grad)
        if grad_hidden is not None:
            torch.mm(grad, used, out=grad_hidden[some])
        if grad_weight is not None and weight.dtype == hidden.dtype:
            grad_weight.addmm_(grad.T, hidden[some])
        elif grad_weight is not None:
            grad_weight += grad.T @ hidden[some]
    return grad_hidden, grad_weight


def _entropy(logp: Tensor) -> Tensor:
    """Return -sum p log p over the last dimension; logits are finite, so every log p is."""
    return logp.exp().mul_(logp).sum(-1).neg_()


def grad_logits(
    logp: Tensor, grad_logprobs: Tensor, of_entropy: tuple[Tensor, Tensor] | None, targets: Tensor, here: Tensor
) -> Tensor:
    """d(log p[target]) = onehot - p, d(entropy) = -p (log p + entropy), each times its incoming gradient: [rows, V].

    of_entropy: entropy and its incoming gradient. targets: int64 columns; here: incoming gradient at these columns (0
    where another rank has the target). Everything but logp is [rows, 1].
    """
    p = logp.exp()
    if of_entropy is None:
        found = p.mul_(-grad_logprobs)
    else:
        entropy, incoming = of_entropy
        found = (logp + entropy).mul_(-incoming).sub_(grad_logprobs).mul_(p)
    return found.scatter_add_(1, targets, here)
