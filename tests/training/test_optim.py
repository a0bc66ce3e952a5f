import copy

import pytest
import torch
from torch import nn

from tilth.config.schema import OptimizerConfig
from tilth.core.errors import ModelError
from tilth.models.family import family_of
from tilth.training.optim import Optimizers

TABLE = family_of("llama").table


class Toy(nn.Module):
    """Parameters named as a decoder's: a block matrix, a norm, an embedding."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        block = nn.Module()
        block.mlp = nn.Module()
        block.mlp.up_proj = nn.Linear(6, 4, bias=False)
        block.input_layernorm = nn.Module()
        block.input_layernorm.weight = nn.Parameter(torch.ones(6))
        self.layers = nn.ModuleList([block])
        self.embed_tokens = nn.Embedding(5, 6)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator)

    def names(self):
        return {f"model.{n}": p for n, p in self.named_parameters()}


def fill_grads(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def run(model, optimizers, steps, lr=0.01, first=0):
    for s in range(first, first + steps):
        fill_grads(model, s)
        optimizers.step(lr)


def test_muon_refuses_a_matrix_of_a_layer_that_it_does_not_know():
    names = Toy().names() | {"model.layers.0.mlp.router.weight": nn.Parameter(torch.ones(4, 6))}
    with pytest.raises(ModelError) as caught:
        Optimizers(names, OptimizerConfig(name="muon"), TABLE)
    assert "router" in str(caught.value)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_equals_torch_with_decay_on_matrices_only(decay):
    ours, theirs = Toy(), Toy()
    optimizers = Optimizers(ours.names(), OptimizerConfig(name="adamw", lr=0.01, weight_decay=decay), TABLE)
    matrices = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), foreach=False)
    for s in range(5):
        fill_grads(ours, s)
        fill_grads(theirs, s)
        optimizers.step(0.01)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_biases_of_experts_do_not_decay_though_they_are_stacked():
    expert = "model.layers.0.mlp.experts.up_proj"
    names = {f"{expert}.weight": nn.Parameter(torch.ones(3, 4, 6)), f"{expert}.bias": nn.Parameter(torch.ones(3, 4))}
    optimizers = Optimizers(names, OptimizerConfig(lr=0.01, weight_decay=0.1), family_of("gpt_oss").table)
    for p in names.values():
        p.grad = torch.zeros_like(p)
    optimizers.step(0.01)
    assert torch.equal(names[f"{expert}.bias"], torch.ones(3, 4))
    assert torch.allclose(names[f"{expert}.weight"], torch.tensor(1 - 0.01 * 0.1))


def test_muon_takes_the_block_matrices_and_adamw_the_rest():
    ours, theirs = Toy(), Toy()
    optimizers = Optimizers(ours.names(), OptimizerConfig(name="muon", lr=0.01, muon_lr_ratio=3.0), TABLE)
    block = theirs.layers[0].mlp.up_proj.weight
    rest = [p for p in theirs.parameters() if p is not block]
    muon = torch.optim.Muon([block], lr=0.03, weight_decay=0.0)
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    for s in range(5):
        fill_grads(ours, s)
        fill_grads(theirs, s)
        optimizers.step(0.01)
        muon.step()
        adamw.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_restored_state_continues_bit_for_bit(name):
    section = OptimizerConfig(name=name, lr=0.01)
    whole = Toy()
    optimizers = Optimizers(whole.names(), section, TABLE)
    run(whole, optimizers, 3)
    saved = {k: t.clone() for k, t in optimizers.state_tensors().items()}
    resumed = copy.deepcopy(whole)
    again = Optimizers(resumed.names(), section, TABLE)
    assert saved.keys() == again.state_tensors().keys()
    for key, tensor in again.state_tensors().items():
        tensor.copy_(saved[key])
    run(whole, optimizers, 3, first=3)
    run(resumed, again, 3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))


def test_fresh_state_does_not_continue_the_same_way():
    whole = Toy()
    optimizers = Optimizers(whole.names(), OptimizerConfig(lr=0.01), TABLE)
    run(whole, optimizers, 3)
    forgetful = copy.deepcopy(whole)
    run(whole, optimizers, 1, first=3)
    run(forgetful, Optimizers(forgetful.names(), OptimizerConfig(lr=0.01), TABLE), 1, first=3)
    assert not torch.equal(whole.embed_tokens.weight, forgetful.embed_tokens.weight)


def test_clip_scales_to_the_bound_and_reports_the_norm_before():
    model = Toy()
    optimizers = Optimizers(model.names(), OptimizerConfig(), TABLE)
    fill_grads(model, 1)
    before = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert optimizers.clip(0.5) == pytest.approx(float(before))
    after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert float(after) == pytest.approx(0.5, rel=1e-4)


def test_clip_with_no_bound_only_measures():
    model = Toy()
    optimizers = Optimizers(model.names(), OptimizerConfig(), TABLE)
    fill_grads(model, 1)
    grads = [p.grad.clone() for p in model.parameters()]
    optimizers.clip(0.0)
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters()))
