"""Mixture of experts: router, stacked experts, and the seam through which tokens reach experts.

A layer's block chooses ``experts_per_token`` experts for each token (``Router``), hands the tokens to a dispatch, and
adds what comes back by the weights of the choice. Nothing has a capacity: no token is ever dropped.

What a forward pass shares between its layers is an ``ExpertContext``, carried by the attention context as its attribute
``experts`` (None: the local dispatch, no record). The dispatch is its part that another module replaces: expert
parallelism sends rows to the ranks that hold their experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tilth.models.config import DecoderConfig
from tilth.models.logprobs import wide
from tilth.models.lora import Adapter
from tilth.models.rows import pad_rows, spread_rows
from tilth.models.steady import elementwise, linear


class Routing(NamedTuple):
    """Choice of experts for N tokens: k of them each, in order of falling score."""

    experts: Tensor
    """int64 [N, k]: numbers of experts, different ones for each token."""
    weights: Tensor
    """[N, k] in the dtype of the tokens, with a gradient to the router."""


RunExperts = Callable[[Tensor, Tensor], Tensor]
"""(rows [M, hidden], counts int64 [experts held here]) -> [M, hidden]: rows are sorted by expert, the first
``counts[0]`` belong to the first expert held here, and so on; counts may be 0 and sum to M. Differentiable in rows and
weights."""


class ExpertDispatch(Protocol):
    """Way of tokens to their experts and back; forward and backward.

    Contract: return y [N, hidden] with y[t] = sum over j of weights[t, j] * expert experts[t, j] (x[t]), added in the
    order j = 0 .. k - 1 of the choice, so that no dispatch and no company of other tokens changes a bit of a row. Each
    pair of a token and an expert is computed once; ``run`` may be called with 0 rows, and must be called at least once
    in every forward pass (its collectives, and those of parameters, must match on all ranks). Padding rows are rows
    like others. Gradients reach x and weights. A dispatch may hold what it needs (process groups), but no state of a
    single pass: with activation checkpointing it is called again in the backward pass.
    """

    def __call__(self, x: Tensor, routing: Routing, run: RunExperts, experts: int) -> Tensor:
        """x: [N, hidden]; experts: number of experts of the layer, of which ``run`` may hold a part. -> [N, hidden]."""


def sort_by_expert(routing: Routing, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return how to sort N * k pairs of token and expert, in tokens' order within an expert.

    order: int64 [N * k], pair (t * k + j) of each sorted row; place: its inverse, the sorted row of each pair; counts:
    int64 [experts], rows of each expert.
    """
    flat = routing.experts.flatten()
    order = torch.argsort(flat, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return order, place, counts_of(flat, torch.ones_like(flat), experts)


def counts_of(index: Tensor, weights: Tensor, size: int) -> Tensor:
    """Return the sums of weights [n] by index, int64 [n]: [size]. For ``torch.bincount`` the host waits for a GPU."""
    return weights.new_zeros(size).index_add_(0, index, weights)


def gather_pairs(x: Tensor, routing: Routing, order: Tensor, place: Tensor) -> Tensor:
    """Return the row of each sorted pair: [N * k, hidden] of x [N, hidden]; gradients add up over a token's pairs."""
    n, k = routing.experts.shape
    return spread_rows(x, order // k, place, torch.arange(0, n * k, k, device=order.device))


def combine_pairs(rows: Tensor, routing: Routing, order: Tensor, place: Tensor) -> Tensor:
    """Return the weighted sum of each token's pairs: [N, hidden] of sorted rows [N * k, hidden]."""
    n, k = routing.experts.shape
    pairs = pad_rows(rows, place, order).view(n, k, rows.shape[1])
    found = pairs[:, 0] * routing.weights[:, :1]
    for j in range(1, k):  # in the order of the choice: a sum over a dimension may add in another one
        found = found + pairs[:, j] * routing.weights[:, j : j + 1]
    return found


def dispatch_here(x: Tensor, routing: Routing, run: RunExperts, experts: int) -> Tensor:
    """Run tokens through experts that are all held here; see ``ExpertDispatch``."""
    order, place, counts = sort_by_expert(routing, experts)
    return combine_pairs(run(gather_pairs(x, routing, order, place), counts), routing, order, place)


class _Attach(torch.autograd.Function):
    """Pass x on, and give a term that the loss does not contain the gradient that it would have as a part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor, share: float) -> Tensor:
        ctx.share, ctx.dtype = share, term.dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad.new_full((), ctx.share, dtype=ctx.dtype), None


@dataclass(frozen=True)
class RouterLoss:
    """Two terms of each layer's router logits l [N, E] that learn beside a loss, divided by tokens of the whole step.

    balance * E * sum over e of F[e] P[e], where F[e] is the share of the step's pairs of token and expert that chose
    expert e, a constant, and P[e] the mean over the step's tokens of its score divided by the token's sum of scores
    (arXiv 2101.03961, 2412.19437): ``balance`` if all experts are chosen alike. z * mean of (log sum exp l)^2 (arXiv
    2202.08906).
    """

    balance: float
    z: float
    tokens: float
    """Tokens of the whole step: of all micro-batches and ranks."""
    fractions: Tensor | None = None
    """F, float [layers with experts, E]; None: no term of balance."""
    share: float = 1.0
    """Of the gradient that this rank adds: 1 / N if N ranks compute with the same tokens and their gradients are
    summed."""

    def terms(self, number: int, logits: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
        """Return both terms of some tokens, [2]. number: of the layer among those with experts; weights: [N]."""
        weights = weights.to(logits.dtype) / self.tokens
        z = self.z * (weights * logits.logsumexp(-1).square()).sum()
        if self.fractions is None:
            return torch.stack([torch.zeros_like(z), z])
        chosen = self.fractions[number].to(logits) * (self.balance * logits.shape[1])
        shares = scores / (scores.sum(-1, keepdim=True) + torch.finfo(scores.dtype).tiny)
        return torch.stack([(weights[:, None] * shares * chosen).sum(), z])


@dataclass(eq=False)
class ExpertContext:
    """State that the expert layers of one forward pass share, whatever layer or pipeline stage runs them.

    A layer calls ``charge`` with its router logits and ``note`` with its own choice, and goes on with what they return.
    Both may be called again, with equal arguments, if the layer is recomputed.
    """

    dispatch: ExpertDispatch = dispatch_here
    parity: bool = False
    """A row has the same bits in any company (CPU)."""
    replay: Tensor | None = None
    """int64 [N, layers with experts, k]: choices to follow instead of the router's; below 0: the router's. Weights are
    always the router's own for the experts that are followed."""
    record: bool = False
    """Note the router's own choice."""
    weights: Tensor | None = None
    """float64 [N]: how often each token counts in ``loads`` and ``losses``; None: they are not measured."""
    loss: RouterLoss | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> int64 [N or more, k]: the router's own choice."""
    loads: dict[int, Tensor] = field(default_factory=dict)
    """Number of a layer among those with experts -> float64 [E]: pairs that each expert computed."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    """Number of a layer among those with experts -> [2]: both terms of ``loss``, without a gradient."""

    def charge(self, number: int, logits: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
        """Return router logits [N, E] whose gradient contains that of the layer's ``loss``."""
        if self.loss is None or self.weights is None or not torch.is_grad_enabled():
            return logits
        term = self.loss.terms(number, logits, score(logits), self._filled(self.weights, len(logits), 0.0))
        self.losses[number] = term.detach()
        return _Attach.apply(logits, term.sum(), self.loss.share)

    def note(self, layer: int, number: int, own: Tensor, experts: int) -> Tensor:
        """Return the experts to follow in a layer, int64 [N, k], given the router's own choice of ``experts``."""
        if self.record:
            self.chosen[layer] = own
        followed = own
        if self.replay is not None:
            wanted = self._filled(self.replay[:, number], len(own), -1)
            followed = torch.where(wanted < 0, own, wanted)
        if self.weights is not None:
            each = self._filled(self.weights, len(own), 0.0).repeat_interleave(own.shape[1])
            self.loads[number] = counts_of(followed.flatten(), each, experts)
        return followed

    @staticmethod
    def _filled(values: Tensor, rows: int, value: float) -> Tensor:
        """Return values [N, ...] for more rows: padding of parity mode, or fillers of sequence parallelism."""
        spare = rows - len(values)
        return values if not spare else F.pad(values, (0, 0) * (values.ndim - 1) + (0, spare), value=value)


class Router(nn.Module):
    """Linear map of a token to scores of the experts, and the choice of the best k.

    Logits and scores are fp32 (float64 of float64) in any compute dtype. ``correction``, if the config has one, is
    added for the choice alone; no gradient reaches it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    correction: nn.Parameter | None

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.register_parameter("correction", None)
        self.config = config

    def logits(self, x: Tensor) -> Tensor:
        """Return router logits [N, experts] of x [N, hidden]."""
        kind = wide(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype).to(kind)
        return linear(x.to(kind), self.weight.to(x.dtype).to(kind), bias)

    def scores(self, logits: Tensor) -> Tensor:
        """Return the score of each expert, [N, experts]."""
        return logits.softmax(-1) if self.config.router_score == "softmax" else elementwise(torch.sigmoid, logits)

    @torch.no_grad()
    def choose(self, scores: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the experts of each token, int64 [N, k], best first. dtype: of the tokens, in which an engine holds
        the correction."""
        if self.correction is not None:
            scores = scores + self.correction.to(dtype).to(scores.dtype)
        groups = self.config.expert_groups
        if self.config.groups_per_token < groups:
            split = scores.unflatten(1, (groups, -1))
            best = split.topk(min(2, split.shape[2]), -1)[0].sum(-1).topk(self.config.groups_per_token, -1)[1]
            allowed = torch.zeros_like(split[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
            scores = split.masked_fill(~allowed[:, :, None], -torch.inf).flatten(1)
        return scores.topk(self.config.experts_per_token, -1)[1]

    def weigh(self, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the weights [N, k] of chosen experts int64 [N, k]."""
        weights = scores.gather(1, experts)
        if self.config.renormalise:
            least = 1e-20 if self.config.router_score == "sigmoid" else 0.0  # all sigmoids may be 0
            weights = weights / (weights.sum(-1, keepdim=True) + least)
        return weights if self.config.routed_scale == 1.0 else weights * self.config.routed_scale


_Layer = Callable[[Tensor], Tensor]


def expert_linear(x: Tensor, stack: Tensor, expert: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [n, in] through the layer of one expert: [n, out]. weight: ``stack[expert]``; bias: the expert's."""
    return linear(x, weight, bias)


def grouped_linear(x: Tensor, stack: Tensor, ends: Tensor) -> Tensor:
    """Return rows [M, in], sorted by expert, through the layers of a stack without bias, in one kernel: [M, out].

    ends: int32 [experts], cumulative counts.
    """
    return F.grouped_mm(x, stack.to(x.dtype).transpose(1, 2), offs=ends)


class StackedLinear(nn.Module):
    """Linear layers of all experts: weight [experts, out, in] and, in some families, bias [experts, out].

    product, grouped_product: ``expert_linear`` and ``grouped_linear``, which a layout that computes gradients of
    weights apart replaces.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    lora: Adapter | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.lora = None
        self.share = 1.0
        """Of the bias that this rank adds, where results of several ranks are summed."""
        self.product: Callable[..., Tensor] = expert_linear
        self.grouped_product: Callable[..., Tensor] = grouped_linear

    def apart(self) -> list[_Layer]:
        """Return the layer of each expert: x [n, in] -> [n, out]."""
        biases = [None] * len(self.weight) if self.bias is None else self._bias(self.bias).unbind()
        stack = self._stack()
        own = zip(stack.unbind(), biases)
        each = ({"expert": i, "weight": weight, "bias": bias} for i, (weight, bias) in enumerate(own))
        layers: list[_Layer] = [partial(self.product, stack=stack, **how) for how in each]
        return layers if self.lora is None else self.lora.of_experts(layers)

    def grouped(self, x: Tensor, ends: Tensor, counts: Tensor) -> Tensor:
        """Apply the layers to rows [M, in] sorted by expert in one kernel. ends: int32 [experts], cumulative counts."""
        found = self.grouped_product(x, self._stack(), ends)
        found = found if self.lora is None else self.lora.grouped(found, x, ends)
        return found if self.bias is None else found + self._bias(self.bias).to(x.dtype).repeat_interleave(counts, 0)

    def _stack(self) -> Tensor:
        return self.weight if self.lora is None or not self.lora.merges else self.lora.merged(self.weight)

    def _bias(self, bias: Tensor) -> Tensor:
        return bias if self.share == 1 else bias * self.share


def grouped_matmul_serves(x: Tensor) -> bool:
    """Return True if torch has one kernel for the matmuls of all experts: bf16 on a GPU, with rows of 16 bytes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and x.shape[1] % 8 == 0


class Experts(nn.Module):
    """SwiGLU of every expert held here, over rows sorted by expert. ``act``: what a family makes of gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = StackedLinear(), StackedLinear(), StackedLinear()

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the inner activations [M, ffn]."""
        return F.silu(gate) * up

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: [M, hidden], counts: int64 [experts] -> [M, hidden]; see ``RunExperts``."""
        if len(rows) and grouped_matmul_serves(rows) and self.down_proj.weight.shape[2] % 8 == 0:
            ends = counts.cumsum(0).to(torch.int32)
            gate, up = (part.grouped(rows, ends, counts) for part in (self.gate_proj, self.up_proj))
            return self.down_proj.grouped(self.act(gate, up), ends, counts)
        layers = list(zip(self.gate_proj.apart(), self.up_proj.apart(), self.down_proj.apart()))
        found = [self._one(x, *own) for x, own in zip(rows.split(counts.tolist()), layers) if len(x)]
        # Without any row the result still depends on the weights, so that they have a gradient as on other ranks.
        return torch.cat(found) if found else self._one(rows, *layers[0])

    def _one(self, x: Tensor, gate: _Layer, up: _Layer, down: _Layer) -> Tensor:
        return down(elementwise(self.act, gate(x), up(x)))


class MoE(nn.Module):
    """Block of a layer with experts, in place of its MLP."""

    def __init__(self, config: DecoderConfig, layer: int, shared: nn.Module | None = None) -> None:
        """shared: the MLP that every token goes through."""
        super().__init__()
        self.layer, self.number, self.num_experts = layer, config.expert_layers.index(layer), config.num_experts
        self.gate, self.experts = Router(config), Experts()
        self.shared_experts = shared

    def forward(self, x: Tensor, ctx: ExpertContext | None) -> Tensor:
        """x: [N, hidden] -> [N, hidden]."""
        ctx = ctx or _ALONE
        scores = self.gate.scores(ctx.charge(self.number, self.gate.logits(x), self.gate.scores))
        experts = ctx.note(self.layer, self.number, self.gate.choose(scores, x.dtype), self.num_experts)
        routing = Routing(experts, self.gate.weigh(scores, experts).to(x.dtype))
        found = ctx.dispatch(x, routing, self.experts, self.num_experts)
        return found if self.shared_experts is None else found + self.shared_experts(x)


_ALONE = ExpertContext()
