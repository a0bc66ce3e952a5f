"""Chunked log-probs, entropy and sums of squares against a dense float64 oracle: values, gradients, memory."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.examples import examples
from tilth.models.logprobs import cached_parts, logits_logprobs, token_logprobs, token_squares


def oracle(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(-1)


def problem(n: int, d: int, v: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(n, d, generator=generator), torch.randn(v, d, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(v, (n,), generator=generator)


@settings(max_examples=examples(30), deadline=None)
@given(
    n=st.integers(0, 40),
    v=st.integers(1, 50),
    chunk=st.none() | st.integers(1, 50),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    seed=st.integers(0, 9),
    cached=st.sampled_from([1, 100, 1 << 21]),
)
def test_values_and_gradients_are_the_oracles(
    n: int, v: int, chunk: int | None, temperature: float, seed: int, cached: int
) -> None:
    hidden, weight, targets = problem(n, 6, v, seed)
    probe = torch.randn(2, n, generator=torch.Generator().manual_seed(seed + 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilth.models.logprobs.CACHED_ELEMENTS", cached)
        check_values_and_gradients(hidden, weight, targets, temperature, chunk, probe)


def check_values_and_gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int | None, probe: Tensor
) -> None:
    found = token_logprobs(hidden, weight, targets, temperature, chunk)
    expected = oracle(hidden, weight, targets, temperature)
    assert all(x.dtype == torch.float32 for x in found)
    for ours, exact in zip(found, expected):
        assert torch.allclose(ours.double(), exact, atol=1e-4, rtol=1e-5)
    ours = torch.autograd.grad(sum((a * b).sum() for a, b in zip(found, probe)), (hidden, weight))
    exact = torch.autograd.grad(sum((a * b).sum() for a, b in zip(expected, probe)), (hidden, weight))
    for a, b in zip(ours, exact):
        assert torch.allclose(a, b, atol=1e-3, rtol=1e-4)


def test_gradcheck_in_float64() -> None:
    """float64 stays float64: analytic and numeric gradients agree to 1e-6, each output alone and both together."""
    hidden, weight, targets = problem(5, 4, 7)
    double = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    found = token_logprobs(*double, targets, 0.7)
    for ours, exact in zip(found, oracle(*double, targets, 0.7)):
        assert ours.dtype == torch.float64 and torch.allclose(ours, exact, atol=1e-14, rtol=1e-14)
    for pick in (lambda r: r[0], lambda r: r[1], lambda r: r):
        assert torch.autograd.gradcheck(lambda h, w: pick(token_logprobs(h, w, targets, 0.7, 8)), double)


@pytest.mark.parametrize("which", [0, 1])
def test_one_input_may_need_no_gradient(which: int) -> None:
    hidden, weight, targets = problem(9, 4, 5)
    inputs = [hidden, weight]
    expected = torch.autograd.grad(sum(x.sum() for x in oracle(*inputs, targets, 1.0)), inputs[which])[0]
    inputs[1 - which] = inputs[1 - which].detach()
    found = torch.autograd.grad(sum(x.sum() for x in token_logprobs(*inputs, targets)), inputs[which])[0]
    assert torch.allclose(found, expected, atol=1e-5)


def test_temperature_is_that_of_the_logits() -> None:
    hidden, weight, targets = problem(9, 4, 5)
    warm = token_logprobs(hidden, weight, targets, 2.0)
    divided = token_logprobs(hidden / 2, weight, targets)
    assert torch.allclose(warm[0], divided[0], atol=1e-6) and torch.allclose(warm[1], divided[1], atol=1e-6)


def test_extreme_logits_stay_finite() -> None:
    """A distribution with one sure token: entropy 0, and finite gradients of both outputs."""
    hidden, weight, targets = problem(16, 8, 30)
    found = token_logprobs(hidden * 300, weight, targets)
    grads = torch.autograd.grad(sum(x.sum() for x in found), (hidden, weight))
    assert all(x.isfinite().all() for x in (*found, *grads))
    assert found[1].abs().max() < 1e-3


def test_weight_gradient_adds_up_in_fp32_under_bf16_activations() -> None:
    """Many chunks with equal gradients: a bf16 sum would stop growing after 256 of them."""
    hidden = torch.ones(8 * 1024, 4, dtype=torch.bfloat16)
    weight = torch.zeros(2, 4, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(len(hidden), dtype=torch.int64), chunk=8)
    logprobs.sum().backward()
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad[0], torch.full((4,), 4096.0))


def test_bf16_hidden_gets_bf16_gradient_near_the_exact_one() -> None:
    hidden, weight, targets = problem(64, 32, 40)
    low = hidden.detach().bfloat16().requires_grad_()
    logprobs, entropy = token_logprobs(low, weight, targets, chunk=16)
    grads = torch.autograd.grad((logprobs + entropy).sum(), (low, weight))
    expected = torch.autograd.grad(sum(x.sum() for x in oracle(low, weight, targets, 1.0)), (low, weight))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]
    for a, b in zip(grads, expected):
        assert (a.float() - b.float()).norm() < 0.05 * b.float().norm()


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.numel())
        return out


def test_no_tensor_is_as_large_as_all_logits() -> None:
    n, v = 2048, 1500
    hidden, weight, targets = problem(n, 16, v)
    with LargestTensor() as seen:
        sum(x.sum() for x in token_logprobs(hidden, weight, targets, chunk=64)).backward()
    assert seen.most == 64 * v
    with LargestTensor() as dense:
        logits_logprobs(hidden @ weight.T, targets).sum().backward()
    assert dense.most == n * v, "the measure would not see a full tensor"
    with LargestTensor() as default:
        sum(x.sum() for x in token_logprobs(hidden, weight, targets)).backward()
    assert default.most <= n * v // 2


@pytest.mark.parametrize("chunk", [8, 24, 1000])
def test_chunks_change_no_bit_of_the_values(chunk: int) -> None:
    hidden, weight, targets = problem(100, 16, 33)
    one, two = token_logprobs(hidden, weight, targets, 0.9), token_logprobs(hidden, weight, targets, 0.9, chunk)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_keeping_log_probs_changes_no_bit(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = []
    for most in (0, 1 << 20):
        monkeypatch.setattr("tilth.plan.kernels.KEPT_ELEMENTS", most)
        hidden, weight, targets = problem(37, 6, 50)
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, 16)
        saved = logprobs.grad_fn.saved_tensors
        assert len(saved) == (4 if most == 0 else 4 + 3)  # chunks of 16 rows
        total = (logprobs * torch.arange(37)).sum() + entropy.sum()
        total.backward(retain_graph=True)
        first = hidden.grad.clone()
        hidden.grad = None
        total.backward()
        assert torch.equal(first, hidden.grad)  # what was kept is still whole
        grads.append((hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("cached", [1, 200, 1 << 21])
def test_parts_in_the_cache_change_no_bit(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (1 << 21, cached):
        monkeypatch.setattr("tilth.models.logprobs.CACHED_ELEMENTS", most)
        hidden, weight, targets = problem(37, 6, 50)
        values = token_logprobs(hidden, weight, targets, 0.7, 24)
        found.append((*values, *torch.autograd.grad(sum(x.sum() for x in values), (hidden, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_parts_are_those_of_a_cpu() -> None:
    """On a device without such a cache every part would be kernels of its own."""
    some = slice(64, 64 + 256)
    assert len(list(cached_parts(some, torch.empty(256, 150_000, device="meta")))) == 1
    assert len(list(cached_parts(some, torch.empty(1, 150_000).expand(256, -1)))) > 10


def test_without_entropy_nothing_else_changes_and_none_is_computed() -> None:
    found = []
    for entropy in (True, False):
        hidden, weight, targets = problem(37, 6, 50)
        logprobs, entropies = token_logprobs(hidden, weight, targets, 0.7, 8, entropy)
        assert len(entropies) == (37 if entropy else 0)
        found.append((logprobs, *torch.autograd.grad(logprobs.square().sum(), (hidden, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_nothing_is_kept_without_a_gradient() -> None:
    hidden, weight, targets = problem(8, 4, 7)
    with torch.no_grad():
        logprobs, _ = token_logprobs(hidden, weight, targets)
    assert logprobs.grad_fn is None


def test_second_derivative_is_refused() -> None:
    hidden, weight, targets = problem(4, 3, 5)
    (grad,) = torch.autograd.grad(token_logprobs(hidden, weight, targets)[0].square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@settings(max_examples=examples(30), deadline=None)
@given(
    n=st.integers(0, 40),
    v=st.integers(1, 50),
    chunk=st.none() | st.integers(1, 50),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    double=st.booleans(),
)
def test_squares_are_the_oracles(n: int, v: int, chunk: int | None, temperature: float, double: bool) -> None:
    hidden, weight, targets = problem(n, 6, v, n)
    if double:
        hidden, weight = hidden.double(), weight.double()
    logprobs, squares = token_squares(hidden, weight, targets, temperature, chunk)
    exact = (hidden.double() @ weight.double().T / temperature).softmax(-1).square().sum(-1)
    assert squares.dtype == logprobs.dtype == hidden.dtype and not squares.requires_grad
    assert torch.allclose(squares.double(), exact, atol=1e-13 if double else 1e-4, rtol=1e-12 if double else 1e-4)
    assert torch.equal(logprobs, token_logprobs(hidden, weight, targets, temperature, chunk)[0])
    slack = 1e-5 if not double else 1e-12
    assert (squares >= logprobs.exp() ** 2 - slack).all() and (squares >= 1 / v - slack).all()
    assert (squares <= 1 + slack).all()


def test_squares_of_a_sure_token_and_of_none() -> None:
    hidden, weight, targets = problem(16, 8, 30)
    assert torch.allclose(token_squares(hidden * 300, weight, targets)[1], torch.ones(16), atol=1e-3)
    assert torch.allclose(token_squares(hidden * 0, weight, targets)[1], torch.full((16,), 1 / 30))


def test_squares_need_no_tensor_as_large_as_all_logits() -> None:
    n, v = 2048, 1500
    hidden, weight, targets = problem(n, 16, v)
    with LargestTensor() as seen:
        token_squares(hidden, weight, targets, chunk=64)
    assert seen.most == 64 * v
