"""Functions between products: the bits of torch's, and where they are not used."""

import pytest
import torch
import torch.nn.functional as F

from tilth.models import fused, row_product
from tilth.models.rope import rotate
from tilth.models.steady import elementwise, steady

CACHED = (fused.norms, fused.exponential_of, fused.rotates)


@pytest.fixture(autouse=True)
def fresh():
    row_product.prepare()
    if not row_product.ready():
        pytest.skip("the kernels cannot be built here")
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("width", [16, 24, 40, 250, 256, 1000, 1100, 9000])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_norm_has_the_bits_of_torch(width: int, rows: int) -> None:
    x, weight = random(rows, width) * 2, random(width)
    if not fused.norms(width, 1e-6):
        pytest.skip("torch has another order of sums here")
    assert torch.equal(fused.norm(x, weight, 1e-6), F.rms_norm(x, (width,), weight, 1e-6))


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(1, 768), (5, 77), (64, 768)])
def test_a_gate_has_the_bits_of_torch(rows: int, width: int, joined: bool) -> None:
    gate, up = random(rows, 2 * width).mul(4).chunk(2, -1) if joined else (random(rows, width), random(rows, width) + 1)
    exponential = fused.exponential_of()
    if not exponential:
        pytest.skip("torch has another exponential function here")
    with torch.no_grad(), steady():
        assert torch.equal(fused.gated(gate, up, exponential), elementwise(F.silu, gate.contiguous()).mul_(up))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("width", [8, 32, 80])
def test_heads_have_the_bits_of_torch(width: int, normed: bool) -> None:
    rows, sizes, eps = 9, (4, 2, width), 1e-5
    x, weights, tables = random(rows, 8, width), (random(width), random(width) + 1), random(2, rows, 1, width).unbind()
    if not fused.rotates(width) or (normed and not fused.norms(width, eps)):
        pytest.skip("torch has another order here")
    q, k = fused.heads(x.flatten(1), weights if normed else None, tables, sizes, eps)
    for found, part, weight in ((q, x[:, :4], weights[0]), (k, x[:, 4:6], weights[1])):
        part = F.rms_norm(part, (width,), weight, eps) if normed else part
        assert torch.equal(found, rotate(part, *tables))


def test_an_exponential_function_that_torch_does_not_use_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fused, "EXPONENTIALS", {key: name.replace("expf", "exp2f") for key, name in fused.EXPONENTIALS.items()}
    )
    assert not fused.exponential_of()
    fused.exponential_of.cache_clear()
    monkeypatch.setattr(fused, "EXPONENTIALS", {})
    assert not fused.exponential_of()


def test_an_order_of_sums_that_torch_does_not_have_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.rms_norm
    monkeypatch.setattr(F, "rms_norm", lambda x, *rest: plain(x.flip(-1), *rest).flip(-1))
    assert not fused.norms(250, 1e-6)


def test_tensors_of_other_kinds_are_left_to_torch() -> None:
    x = random(2, 16)
    assert not fused.serves(x)
    with torch.no_grad():
        assert fused.serves(x) and not fused.serves(x.double()) and not fused.serves(x.to("meta"))


def test_the_functions_of_this_machine_are_found() -> None:
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("not tried on other processors")
    assert fused.exponential_of() and fused.norms(256, 1e-6) and fused.rotates(32)
