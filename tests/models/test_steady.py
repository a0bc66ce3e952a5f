"""Blocks of products on machines whose libraries sum in an order of their own, and functions of elements."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.errors import raises
from tests.models.tiny import FAMILIES
from tilth.core.errors import RecipeError
from tilth.models import parity, steady
from tilth.models.parity import check_parity
from tilth.models.steady import PaddedBlock, ProductShape, elementwise, steady_linear, steady_scores, steady_values

CACHED = (steady._joins, 
    steady.reference, steady.keeps_bits, steady.summed, steady.row_blocks, steady.key_blocks,
    steady._blocks, steady.of_heads, steady._whole_block, parity._attends,
)  # fmt: skip


def forget() -> None:
    for function in CACHED:
        function.cache_clear()


class Machine:
    """Products that are exact but for what ``error`` adds, given [n, rows, width, out] and the shape of the result."""

    def __init__(self, error) -> None:
        self.error = error

    def bmm(self, left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
        found = (left.double() @ right.double()).round(decimals=9)
        found = (found + self.error(*left.shape, right.shape[2])).to(left.dtype)
        return found if out is None else out.copy_(found)

    def mm(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self.bmm(x[None], weight[None])[0])

    def addmm(self, bias: Tensor, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        return out.copy_(self.bmm(x[None], weight[None])[0] + bias)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        found = self.bmm(x[None], weight.t()[None])[0]
        return found if bias is None else found + bias


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Put a machine in the place of this one."""

    def replace(error) -> None:
        forget()
        made = Machine(error)
        for name in ("bmm", "mm", "addmm"):
            monkeypatch.setattr(torch, name, getattr(made, name))
        monkeypatch.setattr(F, "linear", made.linear)

    yield replace
    forget()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def linear_of(out: int, width: int) -> ProductShape:
    return ProductShape("linear", out, width, torch.float32, torch.get_num_threads())


@pytest.mark.parametrize("threshold", [20, 40, 64])
def test_joined_weights_keep_the_bits_of_each(machine, threshold: int) -> None:
    machine(lambda n, rows, width, out: 1e-3 * (out > threshold))
    x, weight, bias, sizes = random(5, 24), random(56, 24), random(56), [24, 16, 16]
    with steady.steady():
        for some in (None, bias):
            biases = [None] * 3 if some is None else some.split(sizes)
            apart = [steady_linear(x, *part) for part in zip(weight.split(sizes), biases)]
            assert torch.equal(steady.joined_linear(x, weight, some, sizes), torch.cat(apart, 1))
    assert steady._joins(linear_of(56, 24), (24, 16, 16)) == (threshold == 64)


@pytest.mark.parametrize("least", [4, 8, 12, 16])
def test_the_smallest_block_whose_rows_keep_their_bits_is_taken(machine, least: int) -> None:
    machine(lambda n, rows, width, out: 1e-3 * (rows < least))
    x, weight = random(64, 24), random(40, 24)
    assert steady.row_blocks(linear_of(40, 24), 1) == (PaddedBlock(0, 1, least),)
    whole = steady_linear(x, weight)
    assert all(torch.equal(steady_linear(x[:rows], weight), whole[:rows]) for rows in (1, 4, 9, 15, 16, 50))
    assert check_parity(FAMILIES["qwen3"], torch.float32) == least, "a pass of so many rows copies nothing"


@pytest.mark.parametrize("reference", [8, 4])
def test_rows_that_depend_on_their_place_among_16_go_through_smaller_blocks(machine, reference: int) -> None:
    machine(lambda n, rows, width, out: 1e-3 * (torch.arange(rows) >= reference)[:, None])
    x, weight = random(64, 24), random(40, 24)
    sizes = {block.size for block in steady.row_blocks(linear_of(40, 24), 31)}
    whole = steady_linear(x, weight)
    assert max(sizes) == reference
    assert all(torch.equal(steady_linear(x[:rows], weight), whole[:rows]) for rows in (1, 4, 9, 15, 16, 50))


@pytest.mark.parametrize("where", [lambda out, width: out == 300, lambda out, width: width == 64, lambda *_: True])
def test_a_model_whose_rows_always_depend_on_their_place_is_refused(machine, where) -> None:
    machine(lambda n, rows, width, out: 1e-3 * torch.arange(rows)[:, None] * where(out, width))
    config = FAMILIES["qwen3"]
    refused = any(where(*shape[1:3]) for shape in parity.products(config, torch.float32, torch.get_num_threads()))
    if not refused:
        check_parity(config, torch.float32)
        return
    with raises(RecipeError, "train.parity"):
        check_parity(config, torch.float32)


def test_a_part_of_a_block_of_keys_is_filled_where_its_sum_has_another_order(machine) -> None:
    machine(lambda n, rows, width, out: 1e-3 * (128 < width < 256))  # an AMD processor with AVX-512
    weights, v = random(2, 4, 700), random(2, 700, 16)
    seen = torch.arange(700) < 650
    found = steady_values(weights * seen, v)
    assert torch.equal(steady_values((weights * seen)[..., :656], v[:, :656]), found)
    shape = steady.of_heads("values", 16, torch.float32, torch.get_num_threads())
    assert [block.size for block in steady.key_blocks(shape, 656)] == [256, 256, 256]
    assert [block.size for block in steady.key_blocks(shape, 600)] == [256, 256, 96]


def test_heads_whose_rows_depend_on_their_place_are_wider(machine) -> None:
    machine(lambda n, rows, width, out: 1e-3 * torch.arange(rows)[:, None] * (out in (6, 8)))
    weights, v = random(3, 40, 48), random(3, 48, 6)
    shape = steady.of_heads("values", 6, torch.float32, torch.get_num_threads())
    found = steady_values(weights, v)
    assert shape.out == 16 and found.shape == (3, 40, 6)
    assert torch.equal(steady_values(weights[1:2, 7:8], v[1:2]), found[1:2, 7:8])


def test_a_machine_whose_batches_sum_in_another_order_is_refused(machine) -> None:
    machine(lambda n, rows, width, out: 1e-3 * (n > 1))
    with raises(RecipeError, "train.parity"):
        check_parity(FAMILIES["qwen3"], torch.float32)


@pytest.mark.parametrize("width", [2, 6, 10, 16, 40, 96])
def test_attention_has_the_same_bits_for_any_rows_heads_and_keys_behind(width: int) -> None:
    q, k = random(5, 70, width), random(5, 720, width)
    scores, seen = steady_scores(q, k), 208
    weights = torch.softmax(scores.masked_fill(torch.arange(720) >= seen, -torch.inf), -1)
    mixed = steady_values(weights, k)
    for heads, rows, keys in ((slice(3, 4), slice(8, 9), seen), (slice(1, 4), slice(20, 23), 400)):
        found = steady_scores(q[heads, rows], k[heads, :keys])
        assert torch.equal(found, scores[heads, rows, :keys])
        assert torch.equal(steady_values(weights[heads, rows, :keys], k[heads, :keys]), mixed[heads, rows])
    assert (scores - q @ k.mT).abs().max() < 1e-4 and (mixed - weights @ k).abs().max() < 1e-5


def test_gradients_of_blocks_are_those_of_the_product() -> None:
    inputs = [x.double().requires_grad_() for x in (random(3, 21, 6), random(3, 300, 6))]
    probe = random(3, 21, 6).double()

    def mixed(scores, values):
        return (values(scores(*inputs).softmax(-1), inputs[1]) * probe).sum()

    found = torch.autograd.grad(mixed(steady_scores, steady_values), inputs)
    expected = torch.autograd.grad(mixed(lambda q, k: q @ k.mT, torch.matmul), inputs)
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(found, expected))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("function", [F.silu, torch.sigmoid, lambda x: F.gelu(x, approximate="tanh")])
def test_an_element_has_the_same_bits_wherever_it_is(function, threads: int) -> None:
    before, x = torch.get_num_threads(), random(250_003)
    torch.set_num_threads(threads)
    try:
        with steady.steady():
            whole = elementwise(function, x)
            for n in (1, 7, 63, 500, 70_001, 99_999, 131_072):
                assert torch.equal(elementwise(function, x[-n:]), whole[-n:])
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(whole, function(x), atol=1e-6)


@pytest.mark.parametrize("width", [6, 64, 250, 688])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_of_rows_have_the_same_bits_for_any_number_of_rows(width: int, dtype: torch.dtype) -> None:
    x, weight = random(40, width).to(dtype), random(width).to(dtype)
    for function in (
        lambda x: F.rms_norm(x, (width,), weight, 1e-6),
        lambda x: x.softmax(-1),
        lambda x: x.log_softmax(-1),
    ):
        whole = function(x)
        assert all(torch.equal(function(x[:rows]), whole[:rows]) for rows in range(1, 40))
