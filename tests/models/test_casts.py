"""Weights that are cast once for several passes: the same bits, and no copy that outlives its block."""

import numpy as np
import pytest
import torch

from tests.models.tiny import decoder, shape
from tests.training.test_engine import batch
from tilth.config.schema import OptimizerConfig
from tilth.models import casts
from tilth.models.casts import cast, keep_casts
from tilth.training import engine as engine_room
from tilth.training.engine import TrainEngine, negative_log_likelihood

BF16 = torch.bfloat16


def test_a_parameter_is_cast_once_in_a_block_and_anew_after_it():
    weight = torch.nn.Parameter(torch.randn(3, 4))
    with keep_casts([weight]):
        one, other = cast(weight, BF16), cast(weight, BF16)
        assert one.data_ptr() == other.data_ptr() and torch.equal(one, weight.to(BF16))
        assert cast(weight, torch.float32) is weight
        (one.float().sum() + other.float().square().sum()).backward()
    again = weight.detach().clone().requires_grad_()
    (again.to(BF16).float().sum() + again.to(BF16).float().square().sum()).backward()
    assert weight.grad.dtype == torch.float32 and torch.equal(weight.grad, again.grad)
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(cast(weight, BF16), weight.to(BF16)) and not casts._kept and not casts._storages
    with keep_casts([weight]):
        assert torch.equal(cast(weight, BF16), weight.to(BF16))


def test_what_is_no_parameter_or_frozen_has_no_graph():
    frozen, weight = torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.nn.Parameter(torch.ones(2))
    with keep_casts([frozen, weight]):
        assert not cast(frozen, BF16).requires_grad and cast(weight * 2, BF16).requires_grad
        with torch.no_grad():
            assert not cast(weight, BF16).requires_grad
        assert cast(weight, BF16).requires_grad


def test_a_parameter_of_another_model_is_cast_at_each_use():
    """An engine in another thread may be given new weights meanwhile."""
    weight, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    one, two = keep_casts([weight]), keep_casts([other])
    one.__enter__()
    before = cast(other, BF16).clone()
    with torch.no_grad():
        other.add_(1)
    assert torch.equal(cast(other, BF16), before + 1)
    two.__enter__()
    cast(weight, BF16), cast(other, BF16)
    one.__exit__(None, None, None)  # blocks of two threads end in any order
    two.__exit__(None, None, None)
    assert not casts._kept


def learned(monkeypatch, keep, **options):
    """Weights after two steps of several micro-batches in bf16, and gradients' norms."""
    model = decoder(shape("llama", num_layers=2), BF16)
    checkpointing = options.pop("checkpointing", False)
    model.checkpointing = checkpointing
    engine = TrainEngine(model, OptimizerConfig(lr=0.01), total_steps=3, micro_tokens=40, **options)
    if not keep:
        monkeypatch.setattr(engine_room, "keep_casts", lambda _: engine_room.nullcontext())
    tokens, mask = batch((30, 20, 40, 25))
    loss = negative_log_likelihood(float(mask.sum()))
    norms = [engine.update(tokens, mask, {}, loss).grad_norm for _ in range(2)]
    return norms, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "options", [{}, {"checkpointing": True}, {"offload": 1.0}], ids=["whole", "recomputed", "offloaded"]
)
def test_steps_have_the_bits_of_steps_that_cast_at_each_use(monkeypatch, options):
    norms, weights = learned(monkeypatch, True, **options)
    wanted, others = learned(monkeypatch, False, **options)
    assert norms == wanted and np.isfinite(norms).all()
    assert all(torch.equal(weights[name], other) for name, other in others.items())
