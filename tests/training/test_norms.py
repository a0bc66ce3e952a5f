import math

import pytest
import torch

from tests.training.test_engine import CONFIG, batch, model, nan_loss, weights
from tilth.config.schema import OptimizerConfig
from tilth.models.config import DecoderConfig
from tilth.parallel.sharded import ShardedModel
from tilth.runs.metrics import Metrics
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.optim import layer_norms, layer_of

TIED = CONFIG
UNTIED = DecoderConfig(**{**CONFIG.__dict__, "tie_embeddings": False, "num_layers": 11, "qkv_bias": True})


def engine(watch=("layer_norms",), config=TIED, clip=0.01, **more):
    section = OptimizerConfig(lr=0.02, clip_norm=clip)
    return TrainEngine(model(config), section, total_steps=9, micro_tokens=12, watch=watch, **more)


def learn(e):
    tokens, mask = batch()
    return e.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))


def values(found, prefix):
    return {k.removeprefix(prefix): float(v) for k, v in found.metrics.items() if k.startswith(prefix)}


@pytest.mark.parametrize(
    ("parameter", "layer"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.layers.0.self_attn.q_proj.weight", "0"),
        ("model.layers.17.mlp.down_proj.bias", "17"),
        ("model.norm.weight", "norm"),
        ("lm_head.weight", "head"),
        ("value_head.bias", "value_head"),
    ],
)
def test_parameters_belong_to_layers(parameter, layer):
    assert layer_of(parameter) == layer


@pytest.mark.parametrize("config", [TIED, UNTIED])
def test_squares_over_layers_add_up_to_the_global_norm_before_clipping(config):
    found = learn(engine(config=config))
    grads = values(found, "norm/grad/")
    assert found.grad_norm > 0.01  # it was clipped
    assert math.fsum(g * g for g in grads.values()) == pytest.approx(found.grad_norm**2, rel=1e-5)
    ends = ["norm"] if config is TIED else ["norm", "head"]
    assert list(grads) == ["embedding", *map(str, range(config.num_layers)), *ends]


def test_weights_are_those_that_the_gradient_was_taken_at():
    e = engine(config=UNTIED)
    before = {n: p.detach().clone() for n, p in e.model.named_parameters()}
    found = values(learn(e), "norm/weight/")
    assert math.fsum(w * w for w in found.values()) == pytest.approx(
        float(sum(p.double().square().sum() for p in before.values())), rel=1e-6
    )
    for layer in ("0", "10"):
        mine = [p.double().square().sum() for n, p in before.items() if f".layers.{layer}." in n]
        assert found[layer] == pytest.approx(math.sqrt(sum(mine)), rel=1e-6)


def test_each_norm_equals_a_loop_in_float64():
    e = engine(config=UNTIED, clip=0.0)
    e.optimizers.zero_grad = lambda: None  # leave the gradients to be looked at
    grads = values(learn(e), "norm/grad/")
    for layer, found in grads.items():
        mine = [p.grad.double().square().sum() for n, p in e.model.named_parameters() if layer_of(n) == layer]
        assert found == pytest.approx(math.sqrt(sum(mine)), rel=1e-6), layer


def test_watching_changes_no_bit_of_the_training():
    plain, watched = engine(()), engine()
    for _ in range(3):
        a, b = learn(plain), learn(watched)
        assert (a.loss, a.grad_norm) == (b.loss, b.grad_norm)
        assert not [m for m in a.metrics if m.startswith("norm/")]
    assert torch.equal(weights(plain), weights(watched))


def test_a_skipped_step_reports_none():
    assert not engine(on_nan="skip").update(*batch(), {}, nan_loss).metrics


def test_layers_without_a_gradient_are_left_out():
    sharded = ShardedModel.of(model(TIED))
    assert layer_norms([], *sharded.squares({})[1]) == {}
    names, squares = sharded.squares({"model.layers.0.mlp.up_proj.weight": torch.full((2, 2), 2.0)})
    assert layer_norms(names, *squares) == {"0": 4.0}


def test_they_are_declared():
    metrics = Metrics()
    metrics.take(learn(engine()).metrics)
    taken = metrics.values()
    assert taken["norm/weight/embedding"] > 0 and taken["norm/grad/0"] > 0


def test_what_is_off_costs_nothing(monkeypatch):
    """One pass over the gradients, for the clip; watched, one more over them and one over the weights."""
    passes = []
    norm = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda tensors, *a, **k: (passes.append(1), norm(tensors, *a, **k))[1])
    learn(engine(()))
    assert len(passes) == 1
    learn(engine())
    assert len(passes) == 1 + 3
