"""What runs in each rank for the tests of tensor parallelism: a model on one device beside its tensor-parallel twin."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.models.tiny import decoder, shape
from tilth.core.batch import Ragged
from tilth.core.layout import Box, Mesh
from tilth.models.attention import DropoutContext
from tilth.models.decoder import Decoder
from tilth.models.value import ValueModel
from tilth.parallel.grid import Grid
from tilth.parallel.tensor import TensorPlan, apply_tensor
from tilth.training.packed import Micro, appraise, micros, score

SMALL = {"num_layers": 2, "hidden_size": 24, "head_dim": 8, "num_heads": 4, "intermediate_size": 32}


def grid(rank: int, tp: int) -> Grid:
    return Grid.of(Mesh(("tp",), (tp,)), rank)


def one_device(family: str, changes: dict[str, Any], dtype: torch.dtype, value: bool = False) -> Decoder:
    model = decoder(shape(family, **{**SMALL, **changes}), dtype).to(dtype)
    if value:
        model = ValueModel(model).to(dtype)
        with torch.no_grad():
            model.score.weight.copy_(torch.linspace(-1, 1, model.config.hidden_size))
    return model


def sequences(vocab: int, trees: bool, lengths: tuple[int, ...] = (5, 1, 7, 4)) -> tuple[Ragged, np.ndarray]:
    """Tokens and mask; trees: samples that share a prompt of five tokens, three of them, and one alone."""
    rng = np.random.default_rng(0)
    if not trees:
        tokens = Ragged.of([rng.integers(0, vocab, n) for n in lengths])
        mask = np.concatenate([np.arange(n) > 0 for n in lengths])
        return tokens, mask.astype(np.float32)
    prompt = rng.integers(0, vocab, 5)
    rows = [np.append(prompt, rng.integers(0, vocab, n)) for n in (2, 4, 3)] + [rng.integers(0, vocab, 4)]
    return Ragged.of(rows), np.concatenate([np.arange(len(r)) >= min(5, len(r) - 1) for r in rows]).astype(np.float32)


def loss(model: Decoder, micro: Micro, temperature: float = 0.8, parity: bool = False) -> Tensor:
    """Log-probs and entropies, or values, with a weight of its own on each token."""
    dropout = None
    if model.config.dropout:
        dropout = DropoutContext(3, 1, 100 + torch.arange(len(micro.ids)).flip(0))
    if isinstance(model, ValueModel):
        appraise(model, micro, parity=parity, dropout=dropout)
        return (micro.values * torch.linspace(0.5, 1.5, len(micro.values))).sum()
    score(model, micro, temperature=temperature, entropy=True, parity=parity, dropout=dropout)
    weights = torch.linspace(0.5, 1.5, len(micro.ids))
    return (micro.logprobs * weights).sum() + (micro.entropy * weights.flip(0)).sum()


def add_partial(plan: TensorPlan, model: Decoder, forget: str = "") -> None:
    for group, names in plan.partial:
        for name in names:
            if not forget or forget not in name:
                dist.all_reduce(model.get_parameter(name).grad, group=group)


def far(found: Tensor, wanted: Tensor) -> float:
    """Greatest difference, in units of the greatest value wanted (at least 1)."""
    if not wanted.numel():
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))


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
) -> dict[str, float]:
    """Loss and every gradient of the twin against the model on one device: how far each is, by name."""
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
