"""Passes of few rows: the bits of the modules, and the models that have none."""

from dataclasses import replace

import pytest
import torch

from tests.engines.reference import make_engine, make_model, make_requests
from tests.models.tiny import FAMILIES
from tilth.config.schema import LoraConfig
from tilth.engines.cache import KVCache
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.runner import Runner
from tilth.models import row_pass, row_product
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.inputs import ModelInput
from tilth.models.row_pass import RowPass, is_plain

QWEN3 = DecoderConfig(
    vocab_size=300, hidden_size=64, intermediate_size=172, num_layers=2, num_heads=4, num_kv_heads=2, qk_norm=True,
    max_positions=256,
)  # fmt: skip
QWEN2 = replace(QWEN3, family="qwen2", qk_norm=False, qkv_bias=True, sliding_window=20, window_layers=(1,))
CPU, SLOTS = torch.device("cpu"), 304


@pytest.fixture(autouse=True)
def built() -> None:
    row_product.prepare()
    if not row_product.ready():
        pytest.skip("the kernels cannot be built here")


def caches(config: DecoderConfig, rows: int) -> list[KVCache]:
    """Two caches with the same random keys and values."""
    found = [KVCache(config, torch.float32, CPU) for _ in range(2)]
    for slab in found:
        slab.layout(rows + 1, SLOTS)
        some = torch.Generator().manual_seed(0)
        for tensor in slab.tensors:
            tensor.normal_(generator=some)
    return found


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2, 7, 15])
@pytest.mark.parametrize(
    "config", [QWEN3, QWEN2, replace(QWEN3, num_kv_heads=4, head_dim=32, query_scalar=0)], ids=["3", "2", "mha"]
)
def test_a_pass_has_the_bits_of_the_modules(config: DecoderConfig, rows: int) -> None:
    model, (mine, plain) = make_model(config, scale=4), caches(config, rows)
    assert is_plain(model)
    start = torch.arange(rows) * 37 % (SLOTS - 1)
    ids = torch.arange(rows) * 11 % 300
    runner = Runner(model, True, False, CPU, 1)
    expected = runner.forward_rows(plain, ModelInput(ids[:, None]), start, SLOTS)
    found = RowPass(model).hidden(mine.keys, mine.values, ids, start, SLOTS)
    if found is None and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("torch has other orders here")
    assert found is not None and torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(mine.tensors, plain.tensors))


def test_an_engine_says_the_same_with_and_without_such_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = make_model(QWEN3, scale=4), make_requests(6, vocab=300)
    count, plain = [0], RowPass.hidden

    def counted(self, *given):
        found = plain(self, *given)
        count[0] += found is not None
        return found

    monkeypatch.setattr(RowPass, "hidden", counted)
    first = make_engine(model, parity=True).generate(requests)
    assert count[0] or torch.backends.cpu.get_cpu_capability() != "AVX512"
    monkeypatch.setattr(RowPass, "hidden", lambda self, *given: None)
    for a, b in zip(first, make_engine(model, parity=True).generate(requests)):
        assert a.tokens.tolist() == b.tokens.tolist() and a.logprobs.tolist() == b.logprobs.tolist()


def test_new_weights_are_read() -> None:
    one, other, requests = make_model(QWEN3, scale=4), make_model(QWEN3, seed=1, scale=4), make_requests(3, vocab=300)
    engine = make_engine(one, parity=True)
    engine.generate(requests)
    engine.update_weights(other.named_parameters(), version=2)
    again = make_engine(other, parity=True).generate(requests)
    for a, b in zip(engine.generate(requests), again):
        assert a.logprobs.tolist() == b.logprobs.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_models_with_more_than_a_plain_decoder_have_none(name: str) -> None:
    config, model = FAMILIES[name], Decoder(FAMILIES[name])
    dense = not config.num_experts and config.family in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
    assert is_plain(model) == dense and not is_plain(model.double())


def test_a_model_with_adapters_of_its_own_has_none() -> None:
    engine = make_engine(make_model(QWEN3), parity=True)
    assert engine._runner._row_pass is not None
    engine = Engine(QWEN3, EngineOptions(parity=True, max_length=64, lora=LoraConfig(rank=2)))
    assert engine._runner._row_pass is None


def test_a_function_with_other_bits_leaves_the_modules_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (mine, _) = make_model(QWEN3), caches(QWEN3, 1)
    for name, nothing in (("norms", False), ("exponential_of", 0), ("rotates", False), ("summed", 0)):
        with monkeypatch.context() as patched:
            patched.setattr(row_pass, name, lambda *_, nothing=nothing: nothing)
            assert RowPass(model).hidden(mine.keys, mine.values, torch.tensor([1]), torch.tensor([3]), SLOTS) is None
