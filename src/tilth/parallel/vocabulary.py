"""Embedding and output head with rows (tokens of the vocabulary) divided over ranks, as ``torch.chunk`` does.

The vocabulary need not divide: the last ranks hold fewer rows, or none. Log-probs and entropy take two collectives for
all tokens (the greatest logit, then sums); no rank sees the logits of another one.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilth.models.kernels import chosen
from tilth.models.logprobs import (
    cached_parts,
    chunks,
    grad_logits,
    head_gradients,
    head_logits,
    keeps,
    wide,
    within,
)
from tilth.parallel.collectives import Group, add_up_, copy_in, gather_copies, reduce_out, scatter_tokens
from tilth.parallel.comm import MAX, all_reduce
from tilth.plan.kernels import chunk_rows


@dataclass(frozen=True)
class Vocabulary:
    """This rank's tokens: ``rows`` of them from ``start`` on, of ``size`` in all."""

    group: Group
    size: int

    @property
    def chunk(self) -> int:
        """Tokens of every rank but the last ones."""
        return -(-self.size // self.group.size())

    @property
    def start(self) -> int:
        """First token of this rank."""
        return min(self.size, self.group.rank() * self.chunk)

    @property
    def rows(self) -> int:
        """Tokens of this rank, possibly none."""
        return min(self.size, self.start + self.chunk) - self.start

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices of tokens int64 [N] in this rank's rows (0 if on another rank), and bool [N], True if here."""
        local = ids - self.start
        inside = (local >= 0) & (local < self.rows)
        return local.masked_fill(~inside, 0), inside


class VocabularyEmbedding(nn.Module):
    """Embedding lookup on the rank that has the row; the sum over ranks is exact, since every other rank adds zeros."""

    def __init__(self, weight: nn.Parameter, vocabulary: Vocabulary, dtype: torch.dtype, sp: bool) -> None:
        """weight: this rank's rows [rows, width]; dtype: of the result; sp: return this rank's tokens only."""
        super().__init__()
        self.weight, self.vocabulary, self.dtype, self.sp = weight, vocabulary, dtype, sp

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 [N] -> [N, width], with sp [ceil(N / ranks), width]."""
        index, inside = self.vocabulary.find(ids)
        if self.vocabulary.rows:
            found = F.embedding(index, self.weight).to(self.dtype).masked_fill(~inside[:, None], 0)
        else:  # the sum over nothing ties the result to the weight, so that it has a gradient as on other ranks
            found = self.weight.new_zeros(len(ids), self.weight.shape[1], dtype=self.dtype) + self.weight.sum()
        return (scatter_tokens if self.sp else reduce_out)(found, self.vocabulary.group)


@dataclass(frozen=True)
class VocabularyHead:
    """Output head: called as ``models.logprobs.token_logprobs``; ``squares`` as ``token_squares``.

    ``logits`` is ``head_logits``. All take hidden states that are equal on every rank, and return their whole gradient
    to each.
    """

    vocabulary: Vocabulary

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        chunk: int | None = None,
        entropy: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """See ``token_logprobs``; weight: [rows, d], this rank's part."""
        rows, keep = chunk_rows(weight.shape[0], chunk, hidden.is_cuda), keeps(hidden.shape[0], weight.shape[0])
        found, entropies = _Logprobs.apply(hidden, weight, targets, temperature, rows, keep, self.vocabulary)
        return found, entropies if entropy else entropies[:0]

    @torch.no_grad()
    def squares(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``token_squares``; weight: [rows, d], this rank's part."""
        rows, used = chunk_rows(weight.shape[0], chunk, hidden.is_cuda), weight.to(hidden.dtype)
        parts, (index, inside) = _Parts(hidden, squares=True), self.vocabulary.find(targets)
        kernel = parts.by_kernel(hidden, used, temperature, index, inside)
        for some in chunks(0 if kernel else len(hidden), rows):
            parts.add(some, _logits(hidden[some], used, temperature), index, inside)
        above, log_sum, _ = parts.together(self.vocabulary.group)
        return above - log_sum, parts.sums[3] / parts.sums[0] ** 2

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden [N, d] -> float32 [N, V] (float64 of float64), gathered from all ranks."""
        vocabulary = self.vocabulary
        own = head_logits(copy_in(hidden, vocabulary.group), weight)
        columns = F.pad(own, (0, vocabulary.chunk - vocabulary.rows)).T.contiguous()
        return gather_copies(columns, vocabulary.group)[: vocabulary.size].T


class _Parts:
    """Statistics that ranks exchange about their logits l of N rows: the greatest one m, then three or four sums."""

    def __init__(self, hidden: Tensor, squares: bool = False) -> None:
        dtype = wide(hidden.dtype)
        self.greatest = hidden.new_full((hidden.shape[0],), torch.finfo(dtype).min, dtype=dtype)
        self.sums = hidden.new_zeros((4 if squares else 3, hidden.shape[0]), dtype=dtype)
        """Sums of exp(l - m), of exp(l - m) (l - m), of the target's logit on its rank, of exp(2 (l - m))."""

    def by_kernel(self, hidden: Tensor, weight: Tensor, temperature: float, index: Tensor, inside: Tensor) -> Any:
        """Compute all rows by the kernel and return its module, if it is chosen here; else return None."""
        kernel = chosen("linear_cross_entropy", hidden)
        if kernel is not None:
            own = index.masked_fill(~inside, -1)
            self.greatest, sums = kernel.statistics(hidden, weight, own, temperature, whole=False)
            self.sums = sums[: len(self.sums)]
        return kernel

    def add(self, some: slice, logits: Tensor, index: Tensor, inside: Tensor) -> None:
        """Add some rows: their logits [n, rows]; for all rows the targets' indices [N] and bool [N], True if here."""
        if not logits.shape[1]:
            return
        self.greatest[some] = logits.amax(-1)
        self.sums[2, some] = logits.gather(1, index[some, None]).squeeze(1).masked_fill(~inside[some], 0)
        for part in cached_parts(some, logits):
            above = logits[within(part, some)] - self.greatest[part, None]
            weight = above.exp()
            if len(self.sums) > 3:
                self.sums[3, part] = weight.square().sum(-1)
            self.sums[0, part] = weight.sum(-1)
            self.sums[1, part] = above.mul_(weight).sum(-1)

    def together(self, group: Group) -> tuple[Tensor, Tensor, Tensor]:
        """Combine all ranks: the target's logit above the greatest one, log of the sum of exp(l - m), mean of l - m."""
        own = self.greatest.clone()
        if own.numel():
            all_reduce(self.greatest, group, MAX).wait()
        lower = own - self.greatest
        scale = lower.exp()
        total, spread = self.sums[:2]
        self.sums[3:] *= scale.square()
        self.sums[1] = scale * (spread + lower * total)
        self.sums[0] = scale * total
        add_up_(self.sums, group)
        return self.sums[2] - self.greatest, self.sums[0].log(), self.sums[1] / self.sums[0]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = head_logits(hidden, weight)
    return logits if temperature == 1.0 else logits / temperature


class _Logprobs(torch.autograd.Function):
    """``models.logprobs.token_logprobs`` over a divided vocabulary, in the same chunks of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        keep: bool,
        vocabulary: Vocabulary,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk, ctx.group = temperature, chunk, vocabulary.group
        used, parts = weight.to(hidden.dtype), _Parts(hidden)
        index, inside = vocabulary.find(targets)
        kept: list[Tensor] = []
        ctx.kernel = parts.by_kernel(hidden, used, temperature, index, inside)
        for some in chunks(0 if ctx.kernel else len(hidden), chunk):
            logits = _logits(hidden[some], used, temperature)
            parts.add(some, logits, index, inside)
            if keep:
                kept.append(logits)
        above, log_sum, mean = parts.together(vocabulary.group)
        entropy = log_sum - mean
        ctx.save_for_backward(hidden, weight, index, inside, entropy, parts.greatest, log_sum, *kept)
        return above - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, index, inside, entropy, greatest, log_sum, *kept = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        used, here, wanted = weight.to(hidden.dtype), grad_logprobs * inside, ctx.needs_input_grad[:2]

        def fill(some: slice, grad: Tensor) -> None:
            logits = kept[some.start // ctx.chunk] if kept else _logits(hidden[some], used, ctx.temperature)
            for part in cached_parts(some, logits) if logits.shape[1] else ():
                own = within(part, some)
                logp = (logits[own] - greatest[part, None]).sub_(log_sum[part, None])
                of_entropy = None if grad_entropy is None else (entropy[part, None], grad_entropy[part, None])
                found = grad_logits(logp, grad_logprobs[part, None], of_entropy, index[part, None], here[part, None])
                grad[own] = found if ctx.temperature == 1.0 else found.div_(ctx.temperature)

        if ctx.kernel is None:
            grad_hidden, grad_weight = head_gradients(hidden, weight, ctx.chunk, fill, wanted)
        else:
            numbers, incoming = (greatest, log_sum, entropy), (grad_logprobs, grad_entropy)
            own = (hidden, used, index.masked_fill(~inside, -1), ctx.temperature)
            grad_hidden, grad_weight = ctx.kernel.gradients(*own, numbers, incoming, wanted, weight.dtype)
        if grad_hidden is not None:
            add_up_(grad_hidden, ctx.group)
        return grad_hidden, grad_weight, *[None] * 5
