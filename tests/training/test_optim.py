import copy

import numpy as np
import pytest
import torch
from torch import nn

from tilth.config.open_sets import OPTIMIZERS
from tilth.config.schema import ModelConfig, OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import ModelError
from tilth.models.decoder import Decoder
from tilth.models.family import family_of, new_config
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.optim import Optimizers, orthogonal

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


@pytest.mark.parametrize("momentum", [0.95, 0.8])
def test_muon_takes_the_block_matrices_and_adamw_the_rest(momentum):
    ours, theirs = Toy(), Toy()
    options = {"muon_lr_ratio": 3.0, "muon_precision": "bf16", "muon_momentum": momentum}
    optimizers = Optimizers(ours.names(), OptimizerConfig(name="muon", lr=0.01, **options), TABLE)
    block = theirs.layers[0].mlp.up_proj.weight
    rest = [p for p in theirs.parameters() if p is not block]
    muon = torch.optim.Muon([block], lr=0.03, weight_decay=0.0, momentum=momentum)
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0, foreach=False)
    for s in range(5):
        fill_grads(ours, s)
        fill_grads(theirs, s)
        optimizers.step(0.01)
        muon.step()
        adamw.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (8, 8), (1, 6)])
def test_a_step_of_muon_is_the_iteration_in_float64(shape):
    update = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = torch.linalg.svd(update)[1] / update.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    left, _, right = torch.linalg.svd(update, full_matrices=False)
    wanted = left @ torch.diag(values) @ right
    torch.testing.assert_close(orthogonal(update), wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(orthogonal(update.float()).double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(orthogonal(update.float(), bf16=True).double(), wanted, rtol=0.1, atol=0.1)


def weights_after(precision, micro_tokens):
    """Weights after three steps in fp32: of experts with few tokens, whose gradients have low ranks."""
    shape = {
        "hidden": 32,
        "layers": 2,
        "heads": 4,
        "context": 48,
        "experts": 8,
        "experts_per_token": 2,
        "expert_ffn": 16,
    }
    model = Decoder(new_config(ModelConfig(family="mixtral", **shape), 40))
    model.init_weights_(0)
    section = OptimizerConfig(name="muon", lr=1e-3, muon_precision=precision)
    engine, rng = TrainEngine(model, section, total_steps=3, micro_tokens=micro_tokens), np.random.default_rng(0)
    mask = np.tile(np.arange(8) >= 4, 9).astype(np.uint8)
    for _ in range(3):
        tokens = Jagged.of([rng.integers(0, 40, 8) for _ in range(9)])
        engine.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))
    return {name: p.detach() for name, p in model.named_parameters()}


def test_the_size_of_micro_batches_changes_no_model_under_muon():
    apart = {}
    for precision in ("fp32", "bf16"):
        few, many = weights_after(precision, 30), weights_after(precision, 1000)
        apart[precision] = max(float((few[n] - w).abs().max() / w.abs().max()) for n, w in many.items())
    assert apart["fp32"] < 1e-4 and apart["bf16"] > 30 * apart["fp32"], apart  # how far bf16 is apart, a CPU decides


@pytest.mark.parametrize("name", OPTIMIZERS)
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
