"""LANS, LAMB, LARS and AdaAlter beside a slow reference in float64, written from the equations of the papers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel.layouts import Case, train
from tests.parallel.test_training import apart
from tests.training.test_optim import TABLE, Toy, fill_grads
from tilth.config.schema import OptimizerConfig
from tilth.training.optim import Optimizers
from tilth.training.optimizers import adaalter, blockwise

LR, B1, B2, EPS = 0.01, 0.9, 0.95, 1e-6


def norm(x):
    return math.sqrt(float((x.double() ** 2).sum()))


def lans(x, g, s, t, decay, vector):
    """Algorithm 2 of 2006.13484."""
    g = g / (norm(g) + EPS) if norm(g) else g
    s["m"] = B1 * s.get("m", 0) + (1 - B1) * g
    s["v"] = B2 * s.get("v", 0) + (1 - B2) * g * g
    under = (s["v"] / (1 - B2**t)).sqrt() + EPS
    r, c = s["m"] / (1 - B1**t) / under + decay * x, g / under + decay * x
    a, b = (norm(x) / norm(d) if norm(x) and norm(d) else 1.0 for d in (r, c))
    return x - LR * (B1 * a * r + (1 - B1) * b * c)


def lamb(x, g, s, t, decay, vector):
    """Algorithm 2 of 1904.00962, with phi the identity."""
    s["m"] = B1 * s.get("m", 0) + (1 - B1) * g
    s["v"] = B2 * s.get("v", 0) + (1 - B2) * g * g
    r = s["m"] / (1 - B1**t) / ((s["v"] / (1 - B2**t)).sqrt() + EPS) + decay * x
    return x - LR * (1.0 if vector or not norm(x) or not norm(r) else norm(x) / norm(r)) * r


def lars(x, g, s, t, decay, vector):
    """Algorithm 1 of 1708.03888."""
    local = 0.001 * (norm(x) / (norm(g) + decay * norm(x)) if norm(x) and norm(g) + decay * norm(x) else 1.0)
    s["v"] = B1 * s.get("v", 0) + LR * local * (g + decay * x)
    return x - s["v"]


def adaalter_(x, g, s, t, decay, vector):
    """Algorithm 2 of 1911.09030, beside the decay."""
    before = s.get("b", torch.full_like(x, adaalter.INITIAL**2))
    s["b"] = before + g * g
    return x - LR * (g / (before + adaalter.EPS**2).sqrt() + decay * x)


REFERENCE = {"lans": lans, "lamb": lamb, "lars": lars, "adaalter": adaalter_}


def made(name, toy, decay=0.1):
    section = OptimizerConfig(name=name, lr=LR, betas=(B1, B2), weight_decay=decay)
    return Optimizers(toy.names(), section, TABLE)


def zeros(toy, step):
    """The embedding begins at 0, and the norm has no gradient at first: no ratio has a meaning."""
    if step == 0:
        toy.embed_tokens.weight.data.zero_()
        toy.layers[0].input_layernorm.weight.grad.zero_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", REFERENCE)
def test_ten_steps_are_those_of_the_paper(name, dtype):
    ours = Toy().to(dtype)
    ours.embed_tokens.weight.data.zero_()
    wanted = {n: p.detach().double().clone() for n, p in ours.names().items()}
    optimizers, state = made(name, ours), {n: {} for n in wanted}
    for step in range(10):
        fill_grads(ours.float(), step) if dtype == torch.float32 else fill_double(ours, step)
        zeros(ours, step)
        for n, p in ours.names().items():
            x, g = wanted[n], p.grad.double()
            decay = 0.0 if p.ndim < 2 else 0.1
            wanted[n] = REFERENCE[name](x, g, state[n], step + 1, decay, p.ndim < 2)
        optimizers.step(LR)
    for n, p in ours.names().items():
        bound = 1e-12 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(p.detach().double(), wanted[n], rtol=bound, atol=bound)
        assert not torch.equal(p.detach(), Toy().names()[n].to(dtype))


def fill_double(toy, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in toy.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", REFERENCE)
def test_slices_change_nothing_but_last_bits(name, monkeypatch):
    ends = []
    for most in (blockwise.ON_CPU, 7, 1):  # 1: each block fills a slice, the last one too
        monkeypatch.setattr(blockwise, "ON_CPU", most)
        toy = Toy()
        optimizers = made(name, toy)
        for step in range(3):
            fill_grads(toy, step)
            optimizers.step(LR)
        ends.append([p.detach() for p in toy.parameters()])
    for whole, *others in zip(*ends):
        for other in others:
            torch.testing.assert_close(whole, other, rtol=1e-6, atol=1e-7)


@settings(max_examples=20, deadline=None)
@given(st.floats(1e-3, 1e6))
def test_a_step_of_lans_is_as_long_as_its_rate_says_whatever_the_scale_of_the_gradient(scale):
    ends = []
    for factor in (1.0, scale):
        toy = Toy()
        before = [p.detach().clone() for p in toy.parameters()]
        optimizers = made("lans", toy)
        fill_grads(toy, 0)
        for p in toy.parameters():
            p.grad *= factor
        optimizers.step(LR)
        ends.append([p.detach() for p in toy.parameters()])
        for p, old in zip(toy.parameters(), before):
            assert norm(p.detach() - old) <= LR * norm(old) * (1 + 1e-5)
    for a, b in zip(*ends):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFERENCE)
def test_a_parameter_without_a_gradient_stays(name):
    toy = Toy()
    optimizers = made(name, toy)
    fill_grads(toy, 0)
    toy.embed_tokens.weight.grad = None
    before = toy.embed_tokens.weight.detach().clone()
    optimizers.step(LR)
    assert torch.equal(toy.embed_tokens.weight, before)


def test_in_a_period_denominators_stand_still_and_the_sum_grows():
    toy = Toy()
    optimizers = made("adaalter", toy, decay=0.0)
    ((own, _),) = optimizers._parts
    own.every = 3
    x = toy.embed_tokens.weight.detach().double().clone()
    a = b = torch.zeros_like(x)
    for step in range(7):
        fill_grads(toy, step)
        k, g = step % 3 + 1, toy.embed_tokens.weight.grad.double()
        b = a if k == 1 else b
        x -= LR * g / (b + adaalter.INITIAL**2 + k * adaalter.EPS**2).sqrt()
        a = a + g * g
        optimizers.step(LR)
        state = own.state[toy.embed_tokens.weight]
        torch.testing.assert_close(state["denominator"].double(), b, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(state["accumulated"].double(), a, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(toy.embed_tokens.weight.detach().double(), x, rtol=1e-5, atol=1e-6)


SHARDED = [
    ("lans", Case(fsdp=2, double=True)),
    ("lans", Case(tp=2, sp=True, double=True, tied=False)),
    ("lars", Case(tp=2, double=True)),
]
MORE = [
    ("lans", Case(dp=2, zero=1, double=True)),
    ("adaalter", Case(dp=2, zero=1, double=True)),
    *((name, case) for name in ("lamb", "lars", "adaalter") for case in (Case(fsdp=2, double=True), SHARDED[1][1])),
    ("lamb", Case(dp=2, zero=1, double=True)),
    ("lans", Case(pp=2, double=True, layers=3)),
    ("lans", Case(fsdp=2, tp=2, double=True, experts=True)),
    ("lans", Case(dp=2, tp=2, zero=1, double=True, lora=True)),
    ("lans", Case(ep=2, double=True, experts=True, num_experts=4)),
    ("lans", Case(fsdp=2, double=True, value=True, zero=2)),
]


@pytest.mark.dist
@pytest.mark.parametrize(("name", "case"), [*SHARDED, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)])
def test_parts_of_blocks_are_updated_as_whole_ones(pool, name, case):
    optimizer = {"name": name, "lr": 1e-2, "weight_decay": 0.1}
    one = train(0, case.alone, steps=3, optimizer=optimizer)
    for got in pool.run(case.ranks, "tests.parallel.layouts:train", case=case, steps=3, optimizer=optimizer):
        assert max(apart(got["end"][n], w) for n, w in one["end"].items()) < 1e-9
    assert max(apart(w, one["start"][n]) for n, w in one["end"].items()) > 1e-4
