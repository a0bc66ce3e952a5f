"""Activations that are recomputed or moved to the host change no bit."""

import pytest
import torch

from tests.errors import raises
from tests.models import tiny
from tilth.config.load import load_recipe
from tilth.core.errors import RecipeError
from tilth.models.activations import KEPT, HostActivations
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.models.value import ValueModel

SHAPES = {
    "dense": {"family": "qwen3", "qk_norm": True},
    "biased": {"family": "qwen2", "num_kv_heads": 1, "qkv_bias": True},
    "experts": {
        "family": "qwen3_moe", "qk_norm": True, "num_experts": 4, "experts_per_token": 2, "expert_size": 32,
        "expert_layers": (0, 1),
    },
}  # fmt: skip


def gradients(shape, how=False, *, offload=False, dtype=torch.float32, lengths=(9, 200, 30)):
    """Loss, gradients and, of activations on the host, their number and bytes."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 30}
    model = Decoder(tiny.shape(**{**size, **SHAPES[shape]}), dtype)
    model.init_weights_(0)
    model.checkpointing = how
    if offload:
        model.offload = HostActivations(model.parameters(), torch.device("cpu"), least=1)
    ids = torch.arange(sum(lengths)) % 30
    hidden = model(ids, PackedContext(list(lengths)))
    loss = model.logits(hidden).float().logsumexp(-1).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_way_gives_the_same_bits(shape, dtype):
    plain, _ = gradients(shape, dtype=dtype)
    for how in KEPT:
        found, _ = gradients(shape, how, dtype=dtype)
        assert all(map(torch.equal, plain, found)), how
    found, model = gradients(shape, offload=True, dtype=dtype)
    assert all(map(torch.equal, plain, found)) and model.offload.tensors > 10


def test_storages_move_once_and_parameters_stay():
    model = Decoder(tiny.shape("qwen3"))
    moved = HostActivations(model.parameters(), torch.device("cpu"), least=1)
    weight, x = next(model.parameters()), torch.ones(8, 4, requires_grad=True)
    with moved():
        y = x * 2
        out = (y * y).sum() + (y[:, :4].t() * y.t()).sum() + (weight[0] * weight[0]).sum()
    assert (moved.tensors, moved.bytes) == (1, 8 * 4 * 4)  # y, saved four times
    out.backward()
    assert torch.equal(x.grad, torch.full((8, 4), 16.0))
    with moved():
        out = (x * 3).square().sum()
    out.backward()
    assert moved.tensors == 2


def test_a_storage_that_changed_between_two_saves_moves_twice():
    moved = HostActivations([], torch.device("cpu"), least=1)
    x = torch.ones(4, requires_grad=True)
    with moved():
        y = x * 1
        first = (y.detach() * x).sum()
        y = y.detach()
        a = (y * x).sum()
        y.add_(1)
        b = (y * x).sum()
    (first + a + b).backward()
    assert torch.equal(x.grad, torch.full((4,), 4.0))


def test_a_value_model_takes_the_policy_of_its_decoder():
    decoder = Decoder(tiny.shape("qwen3"))
    decoder.init_weights_(0)
    decoder.checkpointing = "selective"
    assert ValueModel(decoder).checkpointing == "selective"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        (["train.offload_activations=true", "train.device=cpu"], "train.offload_activations.device"),
        (["train.offload_activations=true", "train.checkpointing=true"], "train.offload_activations"),
        (["train.checkpointing=all"], "train.checkpointing"),
    ],
)
def test_what_contradicts_is_refused_by_name(keys, key):
    with raises(RecipeError, key):
        load_recipe("addition-grpo", keys)
