"""What the decoder promises beside parity: checkpointing, dropout, initialisation, dtypes, fused storage."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.tiny import FAMILIES, VOCAB, decoder, lively_, shape, tokens
from tilth.core.random import stream
from tilth.models.attention import CacheSlots, DropoutContext, PackedContext
from tilth.models.decoder import Attention, Decoder, Layer
from tilth.models.rows import take_rows

LENGTHS = [9, 20, 3]


def gradients(model: Decoder, ids: Tensor, ctx: PackedContext) -> dict[str, Tensor]:
    model.zero_grad()
    model(ids, ctx).float().square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def dropout(lengths: list[int], step: int = 3, seed: int = 7, tokens_at: list[int] | None = None) -> DropoutContext:
    at = torch.arange(sum(lengths)) if tokens_at is None else torch.tensor(tokens_at)
    return DropoutContext(seed, step, at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_gives_equal_gradients(dtype: torch.dtype) -> None:
    model = decoder(shape("qwen3", dropout=0.2), dtype).train()
    ids, ctx = tokens(LENGTHS), PackedContext(LENGTHS, dropout=dropout(LENGTHS))
    plain = gradients(model, ids, ctx)
    calls = []
    model.model.layers[1].register_forward_pre_hook(lambda *_: calls.append(1))
    model.checkpointing = True
    again = gradients(model, ids, ctx)
    assert len(calls) == 2, "the layer was not recomputed"
    assert plain.keys() == again.keys() and len(plain) > 30
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_dropout_does_not_depend_on_packing() -> None:
    """The same global token indices in another order and split: the same outputs, sequence by sequence."""
    model = decoder(shape("llama", dropout=0.3)).train()
    parts = tokens(LENGTHS).split(LENGTHS)
    at = torch.arange(sum(LENGTHS)).split(LENGTHS)
    whole = model(torch.cat(parts), PackedContext(LENGTHS, dropout=dropout(LENGTHS))).split(LENGTHS)
    for order in ([2, 0], [1], [1, 2]):
        lengths = [LENGTHS[i] for i in order]
        some = dropout(lengths, tokens_at=torch.cat([at[i] for i in order]).tolist())
        for parity in (False, True):
            ctx = PackedContext(lengths, parity=parity, dropout=some)
            hidden = model(torch.cat([parts[i] for i in order]), ctx).split(lengths)
            for i, found in zip(order, hidden):
                assert (found - whole[i]).abs().max() < 2e-5


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    context = dropout([4000])
    kept = context.apply(torch.ones(4000, 50), 0.3, layer=1, branch="mlp")
    assert abs(float((kept == 0).float().mean()) - 0.3) < 5 * math.sqrt(0.21 / kept.numel())
    assert torch.equal(kept.unique(), torch.tensor([0, 1 / 0.7]))
    others = [
        context.apply(torch.ones(4000, 50), 0.3, layer, branch) for layer, branch in ((0, "mlp"), (1, "attention"))
    ]
    others.append(dropout([4000], step=4).apply(torch.ones(4000, 50), 0.3, 1, "mlp"))
    others.append(dropout([4000], seed=8).apply(torch.ones(4000, 50), 0.3, 1, "mlp"))
    for other in others:
        assert abs(float(((kept == 0) & (other == 0)).float().mean()) - 0.09) < 0.01


def test_dropout_is_off_without_context_rate_or_training() -> None:
    ids, ctx = tokens(LENGTHS), PackedContext(LENGTHS, dropout=dropout(LENGTHS))
    model = decoder(shape("llama", dropout=0.3))
    plain = model.train()(ids, PackedContext(LENGTHS))
    assert torch.equal(model.eval()(ids, ctx), plain)
    assert torch.equal(decoder(shape("llama")).train()(ids, ctx), plain)
    assert not torch.equal(model.train()(ids, ctx), plain)


def test_init_is_addressed_by_name_and_seed() -> None:
    one, two = Decoder(shape("qwen2")), Decoder(shape("qwen2", num_layers=5))
    one.init_weights_(1)
    two.init_weights_(1)
    name = "model.layers.2.self_attn.k_proj.weight"
    found = one.get_parameter(name)
    assert torch.equal(found, two.get_parameter(name)), "depth changed the bits of a matrix"
    expected = stream(1, "init", name).normal(0, found.numel()).view_as(found) * 0.02
    assert torch.allclose(found, expected)
    one.init_weights_(2)
    assert not torch.equal(found, two.get_parameter(name))


def test_init_has_the_scales_it_states() -> None:
    model = Decoder(shape("qwen2", hidden_size=256, intermediate_size=512, num_layers=2, tie_embeddings=False))
    model.init_weights_(0)
    for name, p in model.state_dict().items():
        if p.ndim == 1:
            assert torch.equal(p, torch.zeros_like(p) if name.endswith("bias") else torch.ones_like(p)), name
        else:
            scale = 0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert abs(float(p.std()) / scale - 1) < 0.03, name
            assert abs(float(p.mean())) < 5 * scale / math.sqrt(p.numel()), name
    ids = tokens([50])
    logits = model.logits(model(ids, PackedContext([50])))
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
    assert abs(loss.item() - math.log(VOCAB)) < 0.2


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama-biases"])
def test_low_precision_parameters_do_the_arithmetic_of_cast_ones(name: str) -> None:
    """fp32 parameters under bf16 compute (trainer) and bf16 parameters (engine): the same bits."""
    master = decoder(FAMILIES[name], torch.bfloat16)
    stored = Decoder(FAMILIES[name], torch.bfloat16).to(torch.bfloat16)
    stored.load_state_dict(master.state_dict())
    ids, ctx = tokens(LENGTHS), PackedContext(LENGTHS)
    with torch.no_grad():
        one, two = master(ids, ctx), stored(ids, ctx)
        assert one.dtype == torch.bfloat16 and torch.equal(one, two)
        assert master.logits(one).dtype == torch.float32
        assert torch.equal(master.logits(one), stored.logits(two))


def test_gradients_of_fp32_parameters_are_fp32_under_bf16_compute() -> None:
    model = decoder(FAMILIES["qwen3"], torch.bfloat16)
    exact = decoder(FAMILIES["qwen3"])
    ids, ctx = tokens(LENGTHS), PackedContext(LENGTHS)
    low, full = gradients(model, ids, ctx), gradients(exact, ids, ctx)
    for name, grad in low.items():
        assert grad.dtype == torch.float32
        assert (grad - full[name]).norm() < 0.1 * full[name].norm(), name


def test_fused_parameters_keep_names_values_and_take_updates() -> None:
    plain, fused = decoder(FAMILIES["qwen2"]), decoder(FAMILIES["qwen2"])
    fused.fuse()
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(fused.parameters(), plain.parameters(), strict=True))
    update = lively_(Decoder(FAMILIES["qwen2"]), seed=5)
    ids, ctx = tokens(LENGTHS), PackedContext(LENGTHS)
    pointers = [p.data_ptr() for p in fused.parameters()]
    with torch.no_grad():
        for p, new in zip(fused.parameters(), update.parameters()):
            p.copy_(new)
        assert [p.data_ptr() for p in fused.parameters()] == pointers
        assert (fused(ids, ctx) - update(ids, ctx)).abs().max() < 1e-5
        assert (fused(ids, ctx) - plain(ids, ctx)).abs().max() > 1e-2


@pytest.mark.parametrize("how", ["to", "assign", "copy"])
def test_fused_storage_survives_moves_assignment_and_copies(how: str) -> None:
    """Without fusing anew the one matmul would silently read the old weights."""
    fused, update = decoder(FAMILIES["llama-biases"]), decoder(FAMILIES["llama-biases"], seed=5)
    fused.fuse()
    if how == "copy":
        fused = copy.deepcopy(fused)
        fused.load_state_dict(update.state_dict())
    elif how == "to":
        fused.to(torch.float64).to(torch.float32)
        fused.load_state_dict(update.state_dict())
    else:
        fused.load_state_dict(update.state_dict(), assign=True)
    ids, ctx = tokens(LENGTHS), PackedContext(LENGTHS)
    with torch.no_grad():
        assert (fused(ids, ctx) - update(ids, ctx)).abs().max() < 1e-5


def test_training_ignores_the_fused_storage() -> None:
    plain, fused = decoder(FAMILIES["qwen2"]), decoder(FAMILIES["qwen2"])
    fused.fuse()
    ids, ctx = tokens(LENGTHS), PackedContext(LENGTHS)
    one, two = gradients(plain, ids, ctx), gradients(fused, ids, ctx)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_tied_head_is_one_parameter_with_both_gradients() -> None:
    model = decoder(FAMILIES["qwen3"])
    assert model.head_weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in model.state_dict()
    assert decoder(FAMILIES["mistral"]).head_weight.shape == (VOCAB, 64)


def test_compiling_makes_two_graphs_whatever_the_lengths() -> None:
    """One for each side of attention, shared by all layers, in training; two more without autograd. (torch makes
    another where a length happens to equal a width.)"""
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    model, compiled = decoder(FAMILIES["qwen3-window-yarn"]), decoder(FAMILIES["qwen3-window-yarn"])
    compiled.compile(backend=count)
    for lengths in ([9, 20, 4], [7] * 12, [300, 4, 4], [31, 15]):
        ids = tokens(lengths)
        one, two = (gradients(m, ids, PackedContext(lengths)) for m in (model, compiled))
        assert all(torch.equal(one[name], two[name]) for name in one)
        assert len(graphs) == 2
    with torch.no_grad():
        assert torch.equal(compiled(ids, PackedContext(lengths)), model(ids, PackedContext(lengths)))
    assert len(graphs) == 4


@pytest.mark.slow
def test_compiled_training_is_near() -> None:
    model, compiled = decoder(FAMILIES["qwen3"]), decoder(FAMILIES["qwen3"])
    compiled.compile()
    for lengths in (LENGTHS, [17] * 4):
        ids = tokens(lengths)
        one, two = (gradients(m, ids, PackedContext(lengths)) for m in (model, compiled))
        assert all((one[name] - two[name]).abs().max() <= 1e-4 * one[name].abs().max() for name in one)


def test_taken_rows_and_their_gradient() -> None:
    x = torch.randn(6, 3, requires_grad=True)
    index = torch.tensor([4, 0, 5])
    probe = torch.randn(3, 3)
    (found,) = torch.autograd.grad((take_rows(x, index) * probe).sum(), x)
    (expected,) = torch.autograd.grad((x[index] * probe).sum(), x)
    assert torch.equal(take_rows(x, index), x[index]) and torch.equal(found, expected)


def test_learns_to_copy() -> None:
    """A few plain gradient steps on one repeated pattern bring the loss near 0: nothing is detached."""
    model = Decoder(shape("qwen3"))
    model.init_weights_(0)
    ids = torch.from_numpy(np.tile(np.arange(8), 4))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(45):
        logits = model.logits(model(ids, PackedContext([32])))
        loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.3


class ScaledLayer(Layer):
    def enter(self, x, tables):
        return super().enter(2 * x, tables)


class ScaledAttention(Attention):
    def forward(self, x, tables, scale=2):
        return super().forward(scale * x, tables)


class OwnLayer(Layer):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.self_attn = ScaledAttention(config)


class PassingLayer(Layer):
    def enter(self, x, tables, *into):
        return super().enter(2 * x, tables, *into)


class Slotted(PackedContext):
    """As over pages: a kernel may write to the cache."""

    def slots(self, layer: int) -> CacheSlots:
        return CacheSlots(torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("layer", "writes"), [(ScaledLayer, False), (OwnLayer, False), (PassingLayer, True), (Layer, True)]
)
def test_a_layer_gets_places_in_the_cache_only_if_it_takes_them(layer, writes, monkeypatch) -> None:
    monkeypatch.setattr("tilth.models.decoder.Layer", layer)
    given, ids = [], tokens(LENGTHS)
    model = decoder(shape("llama")).eval()
    for one in model.model.layers:
        one.self_attn.register_forward_pre_hook(lambda _, args: given.append(len(args)))
    with torch.no_grad():
        found = model(ids, Slotted(LENGTHS))
        assert given == [2 + writes] * 3 and torch.equal(found, model(ids, PackedContext(LENGTHS)))
