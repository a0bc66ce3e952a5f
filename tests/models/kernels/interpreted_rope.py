"""The kernel of rotary embedding and cache in Triton's interpreter, against the plain functions."""

from dataclasses import replace

import pytest
import torch

from tests.engines.test_pages import CONFIG
from tests.models.kernels import interpreted  # noqa: F401  bf16 in the interpreter
from tilth.engines import pages
from tilth.engines.pages import PagedContext, PagedRows, PagePool
from tilth.models import decoder
from tilth.models.decoder import Decoder
from tilth.models.inputs import ModelInput
from tilth.models.kernels import rope_cache


def passed(monkeypatch, config, dtype, width, kernel):
    """Return queries of all layers, and the pages behind a pass of three rows whose tokens are padded to 16."""
    model, seen = Decoder(config, dtype), []
    model.init_weights_(seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_norm" in name:
                parameter.copy_(torch.linspace(0.5, 1.5, len(parameter)))
    model.to(dtype).requires_grad_(False).fuse()
    pool = PagePool(config, dtype, torch.device("cpu"), 8)
    rows = PagedRows(pool)
    rows.layout(3, 512)
    for row, blocks in enumerate(([0, 3], [1, 2], [4])):
        rows.bind(row, blocks)

    def attention(q, *rest):
        seen.append(q.clone())
        return q * 0.5

    monkeypatch.setattr(pages, "paged_attention", attention)
    monkeypatch.setattr(decoder, "chosen", lambda name, x: rope_cache if kernel and name == "rope_cache" else None)
    table, start = torch.from_numpy(rows.tables(3)[0]), torch.tensor([250, 300, 7])
    ids = torch.arange(3 * width) % config.vocab_size
    with torch.inference_mode():
        model(ModelInput(ids), PagedContext(rows, table, start, width, 16))
    return seen, pool.tensors


@pytest.mark.parametrize("width", [1, pytest.param(9, marks=pytest.mark.slow)], ids=["decode", "prompts"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_queries_and_pages_are_those_of_the_plain_functions(monkeypatch, dtype, norm, width):
    config = replace(CONFIG, num_heads=6, num_kv_heads=2, head_dim=24, qk_norm=norm)
    (found, cache), (wanted, plain) = (passed(monkeypatch, config, dtype, width, kernel) for kernel in (True, False))
    assert len(found) == config.num_layers and found[0].shape == (3 * width, 6, 24)
    for ours, theirs in zip([*found, *cache], [*wanted, *plain]):
        assert ours.dtype == dtype and theirs.any()
        if norm:
            off = (ours.float() - theirs.float()).abs()
            assert off.max() <= 2**-5 * theirs.float().abs().max() and off.mean() < 1e-3
        else:
            assert torch.equal(ours, theirs)
