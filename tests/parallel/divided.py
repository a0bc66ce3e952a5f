"""What runs in each rank for the tests of tensor parallelism: a model on one device beside its tensor-parallel twin."""

import copy
import unittest.mock
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.test_logprobs import LargestTensor
from tests.models.tiny import decoder, shape
from tests.training.cutting import micros
from tilth.core.batch import Jagged
from tilth.core.layout import Box, Mesh
from tilth.models.attention import DropoutContext, PackedContext
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.models.logprobs import head_logits, token_logprobs, token_squares
from tilth.parallel.collectives import gather_tokens
from tilth.parallel.dims import ParallelDims
from tilth.parallel.tensor import TensorPlan, apply_tensor
from tilth.parallel.vocabulary import Vocabulary, VocabularyHead
from tilth.plan import kernels
from tilth.training.packed import MicroBatch, appraise, model_input, score

SMALL = {"num_layers": 2, "hidden_size": 24, "head_dim": 8, "num_heads": 4, "intermediate_size": 32}


def grid(rank: int, tp: int) -> ParallelDims:
    return ParallelDims.of(Mesh(("tp",), (tp,)), rank)


def one_device(family: str, changes: dict[str, Any], dtype: torch.dtype, value: bool = False) -> Decoder:
    model = decoder(shape(family, **{**SMALL, **changes}), dtype).to(dtype)
    if value:
        model = ValueModel(model).to(dtype)
        with torch.no_grad():
            model.score.weight.copy_(torch.linspace(-1, 1, model.config.hidden_size))
    return model


def sequences(vocab: int, trees: bool, lengths: tuple[int, ...] = (5, 1, 7, 4)) -> tuple[Jagged, np.ndarray]:
    """Tokens and mask; trees: samples that share a prompt of five tokens, three of them, and one alone."""
    rng = np.random.default_rng(0)
    if not trees:
        tokens = Jagged.of([rng.integers(0, vocab, n) for n in lengths])
        mask = np.concatenate([np.arange(n) > 0 for n in lengths])
        return tokens, mask.astype(np.float32)
    prompt = rng.integers(0, vocab, 5)
    rows = [np.append(prompt, rng.integers(0, vocab, n)) for n in (2, 4, 3)] + [rng.integers(0, vocab, 4)]
    return Jagged.of(rows), np.concatenate([np.arange(len(r)) >= min(5, len(r) - 1) for r in rows]).astype(np.float32)


def loss(model: Decoder, micro: MicroBatch, temperature: float = 0.8, parity: bool = False) -> Tensor:
    """Log-probs and entropies, or values, with a weight of its own on each token."""
    dropout = None
    if model.config.dropout:
        dropout = DropoutContext(3, 1, 100 + torch.arange(len(micro.ids)).flip(0))
    hidden = model(*model_input(micro, parity, dropout))
    if isinstance(model, ValueModel):
        appraise(model, micro, hidden)
        return (micro.values * torch.linspace(0.5, 1.5, len(micro.values))).sum()
    score(model, micro, hidden, temperature=temperature, entropy=True)
    weights = torch.linspace(0.5, 1.5, len(micro.ids))
    return (micro.logprobs * weights).sum() + (micro.entropy * weights.flip(0)).sum()


def same(x: Tensor, group: Any) -> Tensor:
    """Instead of a sum over ranks."""
    return x


def everyone(x: Tensor, group: Any) -> Tensor:
    """Instead of a gather of copies: every rank's whole gradient is counted."""
    return gather_tokens(x, group)


def first(ctx: Any, group: Any) -> Any:
    """Instead of the masks of own tokens: those of the first tokens, on every rank."""
    narrow = copy.copy(ctx)
    rows = -(-ctx.positions.shape[0] // group.size())
    narrow.dropout = replace(ctx.dropout, tokens=ctx.dropout.tokens[:rows])
    return narrow


def add_partial(plan: TensorPlan, model: Decoder, forget: str = "") -> None:
    for group, names in plan.partial:
        for name in names:
            if not forget or forget not in name:
                dist.all_reduce(model.get_parameter(name).grad, group=group)


def far(found: Tensor, wanted: Tensor) -> float:
    """Greatest difference, in units of the greatest value wanted (at least 0.01)."""
    if not wanted.numel():
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=0.01))


def compare(
    rank: int,
    tp: int,
    sp: bool,
    family: str = "qwen3",
    changes: dict[str, Any] | None = None,
    dtype: str = "float64",
    trees: bool = False,
    checkpointing: bool = False,
    value: bool = False,
    parity: bool = False,
    lengths: tuple[int, ...] = (5, 1, 7, 4),
    forget: str = "",
    instead: tuple[str, str] = ("", ""),
) -> dict[str, float]:
    """Loss and every gradient of the twin against the model on one device: how far each is, by name.

    forget: partial gradients that are not summed; instead: what of ``parallel`` is broken, and what stands there.
    """
    if instead[0]:
        with unittest.mock.patch(f"tilth.parallel.{instead[0]}", globals()[instead[1]]):
            return compare(rank, tp, sp, family, changes, dtype, trees, checkpointing, value, parity, lengths)
    model = one_device(family, changes or {}, getattr(torch, dtype), value)
    twin = copy.deepcopy(model)
    plan = apply_tensor(twin, grid(rank, tp), sp)
    model.checkpointing = twin.checkpointing = checkpointing
    tokens, mask = sequences(model.config.vocab_size, trees, lengths)
    results = []
    for each in (model, twin):
        total = torch.zeros(())
        for _, micro in micros(tokens, mask, {}, 1000, torch.device("cpu"), share=trees):
            assert (micro.trees is not None) or not trees or len(micro.lengths) == 1
            total = total + loss(each, micro, parity=parity)
        total.backward()
        results.append(total.detach())
    add_partial(plan, twin, forget)
    distances = {"loss": far(results[1], results[0])}
    for name, p in twin.named_parameters():
        whole = model.get_parameter(name)
        (box,) = plan.placements[name].piece(Box.whole(whole.shape), rank, tp)
        assert p.shape == box.size and (p.grad is not None) == (whole.grad is not None), name
        assert torch.equal(p, whole[box.slices])
        distances[name] = far(p.grad, whole.grad[box.slices]) if p.grad is not None else 0.0
    return distances


def head(
    rank: int, tp: int, vocab: int, tokens: int, temperature: float, chunk: int | None, keep: bool
) -> dict[str, float]:
    """Log-probs, entropies, logits and their gradients against the undivided head, float64; and what was sent."""
    generator = torch.Generator().manual_seed(vocab + tokens)
    hidden = torch.randn(tokens, 6, generator=generator, dtype=torch.float64) * 3
    weight = torch.randn(vocab, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    probe = torch.randn(2, tokens, generator=generator, dtype=torch.float64)
    vocabulary = Vocabulary(grid(rank, tp).group("tp"), vocab)
    own = slice(vocabulary.start, vocabulary.start + vocabulary.rows)
    divided = VocabularyHead(vocabulary)
    if not keep:
        kernels.KEPT_ELEMENTS, before = 0, kernels.KEPT_ELEMENTS
    found = _head(divided, hidden, weight[own], targets, temperature, chunk, probe)
    if not keep:
        kernels.KEPT_ELEMENTS = before
    wanted = _head(token_logprobs, hidden, weight, targets, temperature, chunk, probe)
    wanted[3] = wanted[3][own]
    alone, none = divided(hidden, weight[own], targets, temperature, chunk, entropy=False)
    assert torch.equal(alone, found[0]) and not len(none)
    squares = divided.squares(hidden, weight[own], targets, temperature, chunk)
    assert torch.equal(squares[0], found[0]) and not squares[1].requires_grad
    found.append(squares[1])
    wanted.append(token_squares(hidden, weight, targets, temperature, chunk)[1])
    logits, whole = _logits(divided.logits, hidden, weight[own]), _logits(head_logits, hidden, weight)
    whole[2] = whole[2][own]
    names = ("logprobs", "entropy", "of hidden", "of weight", "squares")
    names += ("logits", "logits of hidden", "logits of weight")
    return {name: far(a, b) for name, a, b in zip(names, [*found, *logits], [*wanted, *whole])}


def _head(head, hidden, weight, targets, temperature, chunk, probe) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = head(hidden, weight, targets, temperature, chunk)
    grads = torch.autograd.grad(sum((a * b).sum() for a, b in zip(found, probe)), (hidden, weight))
    return [*(x.detach() for x in found), *grads]


def _logits(logits, hidden, weight) -> list[Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = logits(hidden, weight)
    return [found.detach(), *torch.autograd.grad(found.square().sum(), (hidden, weight))]


def sent(rank: int, tp: int, sp: bool, checkpointing: bool = False) -> dict[str, int]:
    """How many collectives the twin issues: forward through the layers, for the log-probs, and backward."""
    twin = one_device("qwen3", {"num_layers": 3}, torch.float32)
    twin.checkpointing = checkpointing
    apply_tensor(twin, grid(rank, tp), sp)
    ids = torch.arange(200) % 97
    with Collectives() as forward:
        hidden = twin(ids, PackedContext([140, 60]))
    with Collectives() as head, LargestTensor() as seen:
        found, _ = twin.token_logprobs(hidden, twin.head_weight, ids)
    with Collectives() as backward:
        found.sum().backward()
    return {"forward": forward.count, "head": head.count, "backward": backward.count, "largest": seen.most}


class Collectives(TorchDispatchMode):
    """Counts the operations of process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def nothing(rank: int, tp: int, sp: bool) -> dict[str, tuple[int, ...]]:
    """A micro-batch without tokens, and one without a token to learn from: they pass, with gradients of zero."""
    twin = one_device("llama", {}, torch.float32)
    apply_tensor(twin, grid(rank, tp), sp)
    for ids, lengths in ((torch.zeros(0, dtype=torch.int64), []), (torch.arange(5), [5])):
        hidden = twin(ids, PackedContext(lengths))
        found, entropy = twin.token_logprobs(hidden[:0], twin.head_weight, ids[:0])
        (found.sum() + entropy.sum() + hidden[:0].sum()).backward()
    wrong = {n: tuple(p.shape) for n, p in twin.named_parameters() if p.grad is None or p.grad.any()}
    return {name: found for name, found in wrong.items() if name != "model.norm.weight"}
