"""Values and gradients of the kernels in Triton's interpreter, against a float64 oracle and the plain functions.

In a process of its own, which ``test_kernels`` starts: Triton decides at its import whether to interpret. Its
interpreter keeps bf16 as bits, which it multiplies as integers, and cuts off what it should round; here torch converts.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.examples import examples
from tests.models.test_logprobs import LargestTensor, oracle, problem
from tests.training.test_engine import batch
from tilth.config.schema import OptimizerConfig
from tilth.models import logprobs as heads
from tilth.models.kernels import linear_cross_entropy as kernel
from tilth.parallel import vocabulary
from tilth.parallel.vocabulary import Vocabulary, VocabularyHead
from tilth.plan import kernels as sizes
from tilth.training.engine import TrainEngine, negative_log_likelihood

CAST, DOT = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def _wide(x):
    """Return a handle whose values are no bits of bf16."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    bits = torch.from_numpy(x.data.view(np.int16).copy())
    return TensorHandle(bits.view(torch.bfloat16).float().numpy(), tl.float32)


def _cast(self, source, wanted):
    if source.dtype.scalar == tl.float32 and wanted.scalar == tl.bfloat16:
        rounded = torch.from_numpy(source.data.copy()).bfloat16().view(torch.int16)
        return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)
    return (
        _wide(source)
        if source.dtype.scalar == tl.bfloat16 and wanted.scalar == tl.float32
        else CAST(self, source, wanted)
    )


InterpreterBuilder.cast_impl = _cast
InterpreterBuilder.create_fp_trunc = InterpreterBuilder.create_fp_ext = _cast
InterpreterBuilder.create_dot = lambda self, a, b, *more: DOT(self, _wide(a), _wide(b), *more)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Programs of small tiles, and gradients in several parts of the vocabulary."""
    monkeypatch.setattr(kernel, "SIZES", kernel.TileSizes(rows=16, columns=16, inner=16, span=32))
    monkeypatch.setattr(sizes, "GPU_CHUNK_ELEMENTS", 1000)


def by_kernel(hidden, weight, targets, temperature=1.0, entropy=True):
    return heads._KernelLogprobs.apply(hidden, weight, targets, temperature, kernel, entropy)


@pytest.mark.slow
@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(
    n=st.integers(0, 40),
    v=st.integers(1, 100),
    d=st.sampled_from([1, 6, 16, 40]),
    temperature=st.sampled_from([1.0, 0.3, 2.5]),
    seed=st.integers(0, 9),
)
def test_values_and_gradients_are_the_oracles(n, v, d, temperature, seed):
    """Within 1e-5 of values up to about 30, and 1e-4 of gradients."""
    hidden, weight, targets = problem(n, d, v, seed)
    probe = torch.randn(2, n, generator=torch.Generator().manual_seed(seed + 1))
    found, expected = by_kernel(hidden, weight, targets, temperature), oracle(hidden, weight, targets, temperature)
    for ours, exact in zip(found, expected):
        assert ours.dtype == torch.float32 and torch.allclose(ours.double(), exact, atol=1e-5, rtol=1e-5)
    ours, exact = (
        torch.autograd.grad(sum((a * b).sum() for a, b in zip(some, probe)), (hidden, weight))
        for some in (found, expected)
    )
    for a, b in zip(ours, exact):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(n=st.integers(1, 20), v=st.integers(2, 70), share=st.sampled_from([0.1, 0.5, 0.9]), seed=st.integers(0, 9))
def test_tokens_that_cannot_be_have_no_weight(n, v, share, seed):
    """Logits of -inf: nothing of the sums, a log-prob of -inf; in whole tiles and whole spans, too."""
    hidden, weight, targets = problem(n, 6, v, seed)
    hidden, weight = hidden.detach(), weight.detach()
    hidden[:, 0] = 1.0
    banned = torch.rand(v, generator=torch.Generator().manual_seed(seed)) < share
    banned[0] = False
    weight[banned, 0] = -torch.inf
    (logprobs, entropy), (exact, _) = by_kernel(hidden, weight, targets), oracle(hidden, weight, targets, 1.0)
    assert torch.equal(logprobs == -torch.inf, banned[targets])
    assert torch.allclose(logprobs.double(), exact, atol=1e-5, rtol=1e-5)
    kept = (hidden.double() @ weight[~banned].double().T).log_softmax(-1)
    assert torch.allclose(entropy.double(), -(kept.exp() * kept).sum(-1), atol=1e-5)
    _, sums = kernel.statistics(hidden, weight, targets, 1.0)
    assert torch.allclose(sums[3] / sums[0] ** 2, kept.exp().square().sum(-1).float(), atol=1e-5)


def test_a_target_of_no_token_is_not_a_number_and_one_of_another_rank_is_nothing():
    hidden, weight, _ = problem(5, 6, 40)
    targets = torch.tensor([0, 39, 40, -1, -100])
    assert by_kernel(hidden, weight, targets)[0].isnan().tolist() == [False, False, True, True, True]
    greatest, sums = kernel.statistics(hidden.detach(), weight.detach(), targets, 1.0, whole=False)
    assert (sums[2, :2] != 0).all() and (sums[2, 2:] == 0).all() and greatest.isfinite().all()
    of_logprob = torch.ones(5)
    kept = (greatest, sums[0].log(), of_logprob)
    given = (hidden.detach(), weight.detach(), targets, 1.0, kept, (of_logprob, None), (True, True), torch.float32)
    ours = kernel.gradients(*given)
    logits = hidden @ weight.T
    exact = torch.autograd.grad(logits[[0, 1], [0, 39]].sum() - logits.logsumexp(-1).sum(), (hidden, weight))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, exact))


def test_what_is_not_a_number_stays_so():
    hidden, weight, targets = problem(4, 6, 40)
    for value in (torch.nan, torch.inf):
        broken = hidden.detach().clone()
        broken[1] = value
        logprobs, entropy = by_kernel(broken, weight, targets)
        assert logprobs.isfinite().tolist() == entropy.isfinite().tolist() == [True, False, True, True]


def test_extreme_logits_stay_finite():
    hidden, weight, targets = problem(16, 8, 30)
    found = by_kernel(hidden * 300, weight, targets)
    grads = torch.autograd.grad(sum(x.sum() for x in found), (hidden, weight))
    assert all(x.isfinite().all() for x in (*found, *grads)) and found[1].abs().max() < 1e-3


@pytest.mark.parametrize("entropy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_bf16_is_as_near_to_the_oracle_as_the_reference(entropy):
    """Logits are rounded as the reference's, so log-probs are 1e-4 from it but where a rounding falls otherwise."""
    hidden, weight, targets = problem(40, 40, 60)
    low = hidden.detach().bfloat16().requires_grad_()
    found = by_kernel(low, weight, targets, 0.7, entropy)
    plain = heads.token_logprobs(low, weight, targets, 0.7, entropy=entropy)
    assert len(found[1]) == len(plain[1]) == 40 * entropy
    assert (found[0] - plain[0]).abs().median() < 1e-4 and (found[0] - plain[0]).abs().max() < 0.1
    exact = torch.autograd.grad(sum(x.sum() for x in oracle(low, weight, targets, 0.7)[: 1 + entropy]), (low, weight))
    off = []
    for some in (found, plain):
        grads = torch.autograd.grad(sum(x.sum() for x in some[: 1 + entropy]), (low, weight))
        assert [g.dtype for g in grads] == [torch.bfloat16, torch.float32]
        off.append([float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(grads, exact)])
    assert all(a < 1.2 * b < 0.05 for a, b in zip(*off)), off


def test_a_row_has_its_bits_whatever_rows_are_beside_it():
    hidden, weight, targets = problem(20, 40, 50)
    together = by_kernel(hidden, weight, targets)
    for some in (slice(3, 4), slice(2, 19)):
        alone = by_kernel(hidden[some], weight, targets[some])
        assert all(torch.equal(a[some], b) for a, b in zip(together, alone))


@pytest.mark.parametrize("which", [0, 1])
def test_one_input_may_need_no_gradient(which):
    inputs = list(problem(9, 4, 50))
    targets = inputs.pop()
    expected = torch.autograd.grad(sum(x.sum() for x in oracle(*inputs, targets, 1.0)), inputs[which])[0]
    inputs[1 - which] = inputs[1 - which].detach()
    found = torch.autograd.grad(sum(x.sum() for x in by_kernel(*inputs, targets)), inputs[which])[0]
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.slow
def test_no_tensor_is_as_large_as_all_logits():
    hidden, weight, targets = problem(48, 4, 120)
    with LargestTensor() as seen:
        sum(x.sum() for x in by_kernel(hidden, weight, targets)).backward()
    assert seen.most == 4 * 5 * 48 * 4 < 48 * 120  # bytes of the numbers of four spans, which the interpreter copies


# ---- where it is called ----


@pytest.fixture
def everywhere(monkeypatch):
    """Choose the kernel on a CPU, for any dtype; return the names that were asked for."""
    asked = []
    for module in (heads, vocabulary):
        monkeypatch.setattr(module, "chosen", lambda name, x: asked.append(name) or kernel)
    return asked


@pytest.mark.slow
def test_the_trainer_learns_with_it_as_with_the_reference(everywhere, monkeypatch):
    from tests.engines.reference import make_model

    def losses():
        tokens, mask = batch((9, 6))
        model = make_model(dtype=torch.float32).requires_grad_(True)
        engine = TrainEngine(model, OptimizerConfig(lr=0.01), total_steps=2, micro_tokens=64)
        loss = negative_log_likelihood(float(mask.sum()))
        return [engine.update(tokens, mask, {}, loss, entropy=True).loss for _ in range(2)]

    ours = losses()
    assert everywhere and set(everywhere) == {"linear_cross_entropy"}
    monkeypatch.setattr(heads, "chosen", lambda name, x: None)
    assert np.allclose(ours, losses(), rtol=1e-5)


@pytest.mark.usefixtures("everywhere")
def test_squares_have_the_log_probs_of_the_kernel():
    hidden, weight, targets = problem(20, 6, 50)
    logprobs, squares = heads.token_squares(hidden, weight, targets, 0.7)
    assert torch.equal(logprobs, heads.token_logprobs(hidden, weight, targets, 0.7)[0])
    exact = (hidden.double() @ weight.double().T / 0.7).softmax(-1).square().sum(-1)
    assert torch.allclose(squares.double(), exact, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("everywhere")
def test_a_divided_vocabulary_has_its_values():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        head = VocabularyHead(Vocabulary(dist.group.WORLD, 50))
        hidden, weight, targets = problem(20, 6, 50)
        found, expected = head(hidden, weight, targets, 0.7), oracle(hidden, weight, targets, 0.7)
        grads = [torch.autograd.grad(sum(x.sum() for x in some), (hidden, weight)) for some in (found, expected)]
        for ours, exact in zip((*found, *grads[0]), (*expected, *grads[1])):
            assert torch.allclose(ours.double(), exact.double(), atol=1e-4)
        logprobs, squares = head.squares(hidden, weight, targets, 0.7)
        exact = (hidden.double() @ weight.double().T / 0.7).softmax(-1).square().sum(-1)
        assert torch.equal(logprobs, found[0]) and torch.allclose(squares.double(), exact, atol=1e-5)
    finally:
        dist.destroy_process_group()


def test_parts_of_two_ranks_are_the_whole():
    """Statistics of halves joined by ``_Parts`` are those of all columns; a rank may have none."""
    hidden, weight, targets = (x.detach() for x in problem(20, 6, 50))
    whole, sums = kernel.statistics(hidden, weight, targets, 1.0)
    parts = [kernel.statistics(hidden, weight[a:b], targets - a, 1.0, whole=False) for a, b in ((0, 17), (17, 50))]
    parts.append(kernel.statistics(hidden, weight[:0], targets - 50, 1.0, whole=False))
    greatest = torch.stack([own for own, _ in parts]).amax(0)
    total = sum((own - greatest).exp() * some[0] for own, some in parts)
    assert torch.equal(greatest, whole) and torch.allclose(total, sums[0], atol=1e-5)
    assert torch.allclose(sum(some[2] for _, some in parts), sums[2], atol=1e-6)
