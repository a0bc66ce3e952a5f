"""Adapters beside autograd on merged weights."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.errors import raises
from tests.models.tiny import FAMILIES, decoder
from tilth.config.schema import LoraConfig
from tilth.core.errors import ModelError, RecipeError
from tilth.core.random import dropout_mask, stream
from tilth.models.attention import DropoutContext, PackedContext
from tilth.models.converters import LowRank, ValueModel, converted
from tilth.models.decoder import Decoder
from tilth.models.lora import merge
from tilth.plan.lora import adapter_shapes, is_adapter, pair_of, scale_of

LORA = LoraConfig(rank=3, alpha=6.0)
LENGTHS = [5, 1, 7]


def adapted(family: str, lora: LoraConfig = LORA, *, merges: bool = False) -> tuple[Decoder, Decoder]:
    """A float64 model with adapters, whose B are not zero, and the plain model that it changes."""
    plain = decoder(FAMILIES[family], torch.float64).double()
    model = converted(copy.deepcopy(plain), [LowRank(lora, merges)]).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if is_adapter(name):
                p.normal_(0, 0.2, generator=generator)
    return model, plain


def outcome(model: Decoder) -> torch.Tensor:
    ids = torch.randint(0, model.config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    hidden = model(ids, PackedContext(LENGTHS))
    logits = F.linear(hidden, model.head_weight)
    return (logits.log_softmax(-1) * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum()


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_merged_weights(family, merges):
    """dA = scale B^T dW and dB = scale dW A^T, where dW is autograd's gradient at W + scale B A."""
    model, plain = adapted(family, merges=merges)
    own, scale = dict(model.named_parameters()), scale_of(LORA)
    changed = [name for name in dict(plain.named_parameters()) if pair_of(name)[0] in own]
    assert len(changed) == sum(map(is_adapter, own)) / 2 > 0
    with torch.no_grad():
        for name in changed:
            a, b = (own[half] for half in pair_of(name))
            plain.get_parameter(name).add_(scale * (b @ a))
    found, wanted = outcome(model), outcome(plain)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    found.backward()
    wanted.backward()
    for name in changed:
        (a, b), whole = (own[half] for half in pair_of(name)), plain.get_parameter(name).grad
        torch.testing.assert_close(a.grad, scale * (b.mT @ whole), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(b.grad, scale * (whole @ a.mT), rtol=1e-9, atol=1e-11)
    assert all(p.grad is None for name, p in own.items() if not is_adapter(name))


def test_a_new_adapter_changes_nothing():
    model, plain = adapted("qwen3")
    model.init_weights_(seed=0)
    plain.init_weights_(seed=0)
    assert torch.equal(outcome(model), outcome(plain))
    first = dict(model.named_parameters())["model.layers.0.self_attn.q_proj.lora.A"]
    assert first.std().item() == pytest.approx((3 * first.shape[1]) ** -0.5, rel=0.15)


def test_dropout_zeroes_inputs_of_adapters_alone():
    """Of the input of A a share, scaled up; the same in every pass with the same numbers, none without them."""
    model, plain = adapted("qwen3", LORA.model_copy(update={"dropout": 0.25}))
    without, _ = adapted("qwen3")
    layer, ids = "model.layers.1.self_attn.q_proj", torch.arange(sum(LENGTHS))
    seen = {}

    def look(module, args, found):
        seen["x"], seen["found"] = args[0].detach(), found.detach()

    model.get_submodule(layer).register_forward_hook(look)
    dropout = DropoutContext(3, 7, 5 + ids)
    first = model(ids, PackedContext(LENGTHS, dropout=dropout))
    adapter, weight = model.get_submodule(layer).lora, plain.get_parameter(f"{layer}.weight")
    keep = dropout_mask(stream(3, "dropout", layer, 7), 5 + ids, seen["x"].shape[1], 0.25)
    assert 0.6 < keep.double().mean() < 0.9
    wanted = seen["x"] @ weight.T + (seen["x"] * keep / 0.75) @ adapter.A.T @ adapter.B.T * adapter.scale
    torch.testing.assert_close(seen["found"], wanted)
    assert torch.equal(first, model(ids, PackedContext(LENGTHS, dropout=dropout)))
    assert not torch.equal(first, model(ids, PackedContext(LENGTHS, dropout=DropoutContext(3, 8, 5 + ids))))
    for other in (model(ids, PackedContext(LENGTHS)), model.eval()(ids, PackedContext(LENGTHS, dropout=dropout))):
        assert torch.equal(other, without(ids, PackedContext(LENGTHS)))


def test_experts_have_no_dropout_of_adapters():
    with raises(RecipeError, "policy.lora.dropout.experts"):
        adapted("qwen3-moe", LORA.model_copy(update={"dropout": 0.1}))
    adapted("qwen3-moe", LORA.model_copy(update={"dropout": 0.1, "targets": ("q_proj",)}))


@pytest.mark.parametrize("rslora, scale", [(False, 2.0), (True, 6 / 3**0.5)])
def test_scale(rslora, scale):
    assert scale_of(LORA.model_copy(update={"rslora": rslora})) == pytest.approx(scale)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "deepseek-v3"])
def test_the_plan_knows_the_adapters(family):
    model, plain = adapted(family)
    found = {name: tuple(p.shape) for name, p in model.named_parameters() if is_adapter(name)}
    assert found == adapter_shapes(plain.config, LORA)


def test_targets():
    model, _ = adapted("qwen3", LORA.model_copy(update={"targets": ("q_proj", "*.mlp.down_*")}))
    modules = {name.split(".lora.")[0].rpartition(".")[2] for name, _ in model.named_parameters() if is_adapter(name)}
    assert modules == {"q_proj", "down_proj"}
    with raises(RecipeError, "policy.lora.targets"):
        adapted("qwen3", LORA.model_copy(update={"targets": ("q_proj", "query")}))


def test_a_value_head_is_learned_too():
    model = converted(ValueModel(decoder(FAMILIES["qwen3"], torch.float32)), [LowRank(LORA)])
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"score.weight", "score.bias"} == {name for name in learned if not is_adapter(name)}


def test_blocks_of_a_merged_matrix_have_its_bits():
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(*size, generator=generator) for size in ((37, 29), (5, 29), (37, 5)))
    whole = merge(weight, a, b, 0.7)
    for rows, columns in ((slice(3, 20), slice(0, 29)), (slice(0, 37), slice(7, 8)), (slice(36, 37), slice(2, 28))):
        assert torch.equal(merge(weight[rows, columns], a[:, columns], b[rows], 0.7), whole[rows, columns])
    torch.testing.assert_close(whole, weight + 0.7 * b @ a)


def test_an_undeclared_converter_is_named():
    with raises(ModelError, "converters.lore"):
        converted(decoder(FAMILIES["qwen3"], torch.float32), ["lore"])
