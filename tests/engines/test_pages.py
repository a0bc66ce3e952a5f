"""Pages hold what slots do; attention over them runs on a device alone: ``tests/test_gpu.py``."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engines.reference import CONFIG
from tilth.engines import pages
from tilth.engines.blocks import BlockManager
from tilth.engines.pages import PagedRows, PagePool, pages_serve
from tilth.plan.kernels import PAGE
from tilth.plan.working import EngineDemand, paged_cache

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def pool_of(most=9):
    return PagePool(CONFIG, torch.float32, CPU, most)


def values(count, seed=0):
    shape = (count, CONFIG.num_kv_heads, CONFIG.head_dim)
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(2 * CONFIG.num_layers)]


def test_rows_read_what_was_written_wherever_their_pages_are():
    pool = pool_of()
    one, other = PagedRows(pool), PagedRows(pool)
    one.layout(2, 2 * PAGE)
    other.layout(1, 3 * PAGE)
    one.bind(0, [4, 1])
    one.bind(1, [0])
    kept, new = values(PAGE + 3), values(20, seed=1)
    one.write(0, 0, kept)
    one.write(1, 0, new)
    other.bind(0, [4, 1])  # the same sequence in another table
    assert all(torch.equal(a, b) for a, b in zip(other.read(0, 0, PAGE + 3), kept))
    one.layout(4, 2 * PAGE, keep_rows=2)
    assert all(torch.equal(a, b[PAGE:]) for a, b in zip(one.read(0, PAGE, PAGE + 3), kept))
    assert all(torch.equal(a, b) for a, b in zip(one.read(1, 0, 20), new))
    assert one.tables(2)[0].tolist() == [[5, 2], [1, 0]] and one.tables(2)[0].dtype == np.int32


def test_a_pool_grows_with_what_is_bound_and_forks_blocks():
    pool, before = pool_of(), values(PAGE)
    rows = PagedRows(pool)
    rows.layout(1, PAGE)
    rows.bind(0, [0])
    rows.write(0, 0, before)
    layouts = pool.layouts
    pool.fork([(0, 6), (0, 0)])
    rows.bind(0, [6])
    assert all(torch.equal(a, b) for a, b in zip(rows.read(0, 0, PAGE), before))
    assert pool.layouts == layouts + 1 and len(pool.tensors[0]) == 8
    pool.fork([(0, 0), (6, 6)])
    rows.bind(0, [8])
    assert len(pool.tensors[0]) == 10  # not half as many again: there are no more blocks
    assert pool.nbytes == 10 * PAGE * CONFIG.num_kv_heads * CONFIG.head_dim * 4 * 2 * CONFIG.num_layers


def test_torch_serves_pages_on_a_gpu_in_half_precision_and_says_once_if_it_is_too_old(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    pages._device_serves.cache_clear()
    for config, dtype, device, serves in (
        (CONFIG, torch.bfloat16, CUDA, True),
        (CONFIG, torch.float32, CUDA, False),
        (CONFIG, torch.bfloat16, CPU, False),
        (replace(CONFIG, head_dim=12), torch.bfloat16, CUDA, False),
        (replace(CONFIG, head_dim=512), torch.bfloat16, CUDA, False),
        (replace(CONFIG, family="gpt_oss"), torch.bfloat16, CUDA, False),  # its attention has sinks
    ):
        assert pages_serve(config, dtype, device) == (serves and torch.__version__ >= "2.13")
    pages._device_serves.cache_clear()
    capsys.readouterr()
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.11.0"))
    assert not pages_serve(CONFIG, torch.bfloat16, CUDA) and not pages_serve(CONFIG, torch.float16, CUDA)
    assert capsys.readouterr().err.count("torch 2.11.0") == 1
    pages._device_serves.cache_clear()


@pytest.mark.parametrize(("prompt", "longest", "group"), [(20, 200, 1), (600, 900, 4), (512, 1200, 8), (300, 310, 2)])
def test_the_plan_counts_the_pages_that_rows_and_prompts_have(prompt, longest, group):
    rows, prompts, element = 16, 8, 4
    asked = EngineDemand(rows, prompts, group, prompt, longest, 2048, rows * 2048)
    blocks = BlockManager(asked.kv_tokens // PAGE, PAGE, asked.kv_tokens // PAGE // 4)
    pool = PagePool(CONFIG, torch.float32, CPU, blocks.num_blocks)
    tables = []
    for number in range(rows // group):
        keys = np.full(prompt, number)
        table = blocks.open(keys, salt=1)
        pool.reserve(table.blocks)
        blocks.register(table, keys, prompt, salt=1)
        tables += [*(blocks.fork(table, prompt) for _ in range(group - 1)), table]
    for table in tables:
        assert blocks.extend(table, longest)
        pool.reserve(table.blocks)
    held, grows = paged_cache(CONFIG, asked, element)
    assert pool.nbytes <= held <= 1.9 * pool.nbytes and 0 < grows < held


@pytest.mark.parametrize("capability", [7, 8])
def test_kernels_need_products_in_bf16(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
    pages._device_serves.cache_clear()
    assert pages_serve(CONFIG, torch.bfloat16, CUDA) == (capability == 8 and torch.__version__ >= "2.13")
    pages._device_serves.cache_clear()
