"""Products of a few rows: their order of sums, and where they are not used."""

from pathlib import Path

import pytest
import torch

from tests.models.test_steady import forget
from tests.models.tiny import FAMILIES
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.models import row_product, steady
from tilth.models.parity import check_parity
from tilth.models.row_product import MOST, orders
from tilth.models.steady import ProductShape, steady_linear, steady_scores, steady_values

SIZES = [(24, 40), (17, 33), (70, 252), (40, 500), (48, 688), (16, 770), (40, 15), (3, 64)]


@pytest.fixture(autouse=True)
def fresh():
    row_product.prepare()
    forget()
    yield
    forget()


def shape_of(out: int, width: int, biased: bool = False) -> ProductShape:
    return ProductShape("linear", out, width, torch.float32, torch.get_num_threads(), biased)


@pytest.fixture
def kernel() -> None:
    if not row_product.ready():
        pytest.skip("the kernel cannot be built here")


@pytest.mark.parametrize(("out", "width"), [(24, 40), (17, 33), (40, 250), (300, 256)])
def test_sums_of_some_terms_are_added_one_after_another(kernel: None, out: int, width: int) -> None:
    some, terms = torch.Generator().manual_seed(0), 32
    x, weight, bias = (  # float64 holds every product and sum of these exactly: each term is rounded once, as fused
        torch.randint(-2000, 2000, size, generator=some).float() for size in ((MOST, width), (out, width), (out,))
    )
    expected = bias.expand(MOST, out)
    for begin in range(0, width, terms):
        total = torch.zeros(MOST, out)
        for k in range(begin, min(begin + terms, width)):
            total = (total.double() + x[:, k, None].double() * weight[:, k].double()).float()
        expected = expected + total
    for threads in (1, 2):
        for rows in (1, 2, 7, MOST):
            found = row_product.row_product(x[:rows], weight, bias, torch.empty(rows, out), terms, threads)
            assert torch.equal(found, expected[:rows])
    assert not torch.equal(expected, (bias + x.double() @ weight.double().t()).float()), "the order shows"


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("out", "width"), SIZES)
def test_few_rows_have_the_bits_of_many(out: int, width: int, biased: bool) -> None:
    some = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(size, generator=some) for size in ((64, width), (out, width), (out,)))
    whole = steady_linear(x, weight, bias if biased else None)
    for rows in (1, 2, 3, 8, 13, 15, 17, 31):
        assert torch.equal(steady_linear(x[-rows:], weight, bias if biased else None), whole[-rows:])


@pytest.mark.parametrize("width", [6, 24, 32, 80])
@pytest.mark.parametrize("keys", [16, 208, 256, 640])
def test_attention_of_few_rows_has_the_bits_of_many(width: int, keys: int) -> None:
    some = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(size, generator=some) for size in ((5, 48, width), (5, 720, width), (5, 720, width)))
    scores = steady_scores(q, k)
    weights = torch.softmax(scores.masked_fill(torch.arange(720) >= keys, -torch.inf), -1)
    mixed = steady_values(weights, v)
    with torch.no_grad():
        for heads, rows in ((slice(3, 4), slice(8, 9)), (slice(0, 5), slice(20, 27)), (slice(1, 4), slice(0, 15))):
            assert torch.equal(steady_scores(q[heads, rows], k[heads, :keys]), scores[heads, rows, :keys])
            assert torch.equal(steady_values(weights[heads, rows, :keys], v[heads, :keys]), mixed[heads, rows])


def test_an_order_that_this_machine_does_not_have_is_not_used(kernel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    some = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, 250, generator=some) for size in (16, 48))
    whole = steady_linear(x, weight)
    forget()
    monkeypatch.setattr(steady, "orders", lambda *_: iter((100, 7)))
    assert not steady.summed(shape_of(48, 250), 1)
    assert torch.equal(steady_linear(x[:3], weight), whole[:3])


@pytest.mark.parametrize("kind", ["linear", "scores", "values"])
def test_the_library_order_is_found(kernel: None, kind: str) -> None:
    """Each kind of product is tried with the order of this machine's library (Intel and AMD with AVX-512)."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("the orders of other libraries are not known")
    shape = ProductShape(kind, *((256, 32) if kind == "scores" else (32, 256)), torch.float32, 1)
    assert steady.reference(shape) is None or steady.summed(shape, 1)


def test_weights_smaller_than_a_vector_have_no_orders() -> None:
    assert [*orders(15, 64), *orders(64, 15)] == []
    assert [*orders(64, 300)] == [300, 150] and [*orders(64, 701)] == [351, 192] and [*orders(64, 4864)] == [384, 192]


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_blocks_are_padded_and_one_sentence_says_so(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    anew(monkeypatch)
    lacking = row_product.missing()
    for _ in range(2):
        assert check_parity(FAMILIES["qwen3"], torch.float32) in steady.TAILS
    assert [block.size for block in steady.row_blocks(shape_of(24, 40), 1)] != [1]
    (said,) = capfd.readouterr().err.splitlines()
    if lacking:  # a compiler that fails is one until it is tried
        assert said == f"tilth: {lacking}" and compiler != "false"
    missing = compiler if torch.backends.cpu.get_cpu_capability() in row_product.FLAGS else "AVX2"
    assert missing in said and "train.parity" in said and not [*tmp_path.iterdir()]


def test_a_user_without_a_home_gets_kernels_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert "home" not in row_product.missing()
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert "home" not in row_product.missing()


def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_library": None, "_tried": False, "_build": None}.items():
        monkeypatch.setattr(row_product, name, value)


def scripted(path: Path, *lines: str) -> str:
    """A compiler of these lines, and of a copy of the library that is there."""
    there = row_product._built(True)
    path.write_text("\n".join(["#!/bin/sh", *lines, f'for last; do :; done; cp {there} "$last"', ""]))
    path.chmod(0o755)
    return str(path)


def test_a_library_is_built_beside_the_passes_of_an_engine_and_used_once_it_is_there(
    kernel: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = scripted(tmp_path / "compiler", f"until [ -e {tmp_path}/go ]; do sleep 0.01; done")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    anew(monkeypatch)
    engine = Engine(FAMILIES["qwen3"], EngineOptions())
    assert row_product._build is None
    for _ in range(2):
        engine.poll()
        assert not row_product.ready()
    (tmp_path / "go").touch()
    assert row_product._build is not None
    row_product._build.process.wait(30)
    engine.poll()
    assert row_product.ready() and len([*(tmp_path / "built").iterdir()]) == 1


def test_a_process_that_ends_before_its_build_stops_it(
    kernel: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", scripted(tmp_path / "compiler", "sleep 60"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    anew(monkeypatch)
    row_product.prepare(wait=False)
    build = row_product._build
    assert build is not None and build.process.poll() is None
    build.end()
    assert build.process.poll() is not None and not [*(tmp_path / "built").iterdir()]


def test_a_compiler_may_have_words_before_and_behind_it(
    kernel: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in CXX="ccache g++ -v"."""
    (tmp_path / "my tools").mkdir()
    compiler = scripted(tmp_path / "my tools" / "g++", f'echo "$1 $2" >> {tmp_path}/asked')
    for number, words in enumerate((f'"{compiler}" -v', f'env "{compiler}"')):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / str(number)))
        monkeypatch.setenv("CXX", words)
        anew(monkeypatch)
        row_product.prepare()
        assert row_product.ready()
    assert (tmp_path / "asked").read_text().splitlines() == ["-v -std=c++17", "-std=c++17 -O2"]
