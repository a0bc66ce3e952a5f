"""What engine and trainer ask of a device, counted on the pretended one, and faults that it must see.

In a process of its own, which ``test_rehearsal`` starts.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.checkpoint.test_saver import alone
from tests.engines.reference import make_engine, make_model
from tests.gpu_free.counts import (
    CUDA,
    GREEDY,
    SAMPLED,
    TOP_P,
    captures,
    decode_step,
    device,
    engine_in_flight,
    shape,
    trainer,
    update,
)
from tests.training.test_engine import batch
from tilth.checkpoint import Commit, Saver, begin_save, open_checkpoint, snapshot
from tilth.core.device import to_device, to_host
from tilth.engines import runner, sampling
from tilth.engines.cache import KVCache
from tilth.engines.pages import PagedRows, PagePool
from tilth.engines.request import Request, SamplingParams
from tilth.engines.runner import Graphs
from tilth.models import decoder
from tilth.models.activations import HostActivations
from tilth.training import engine as engine_room
from tilth.training.engine import negative_log_likelihood
from tilth.training.packed import packed_logprobs

SLOW = pytest.mark.slow
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(device is None, reason="needs the pretended device")]


def test_arrays_of_all_kinds_go_to_the_device_and_back():
    rng = np.random.default_rng(0)
    arrays = [np.arange(5), np.array([True, False, True]), rng.normal(size=(3, 5)).astype(np.float32), np.zeros(0)]
    arrays += [np.arange(9, dtype=np.uint8)[::2], rng.normal(size=(2, 2)), np.array([7], np.int32)]
    with device.counted() as counts:
        there = to_device(arrays, CUDA)
    assert counts.beside == 1 and not counts.waits and all(tensor.is_cuda for tensor in there)
    with device.counted() as counts:
        back = to_host([*there, there[0].sum()])
    assert counts.waits.total() == 1 and back.pop() == 10
    for array, other in zip(arrays, back):
        assert array.dtype == other.dtype and np.array_equal(array, other)


@pytest.mark.parametrize("params", [SAMPLED, pytest.param(GREEDY, marks=SLOW)], ids=["sampled", "greedy"])
def test_a_decode_step_of_a_graph_waits_once(params):
    counts = decode_step(params, compile=True)
    assert counts.graphs == 1 and counts.beside <= 6 and counts.waits.total() == 1, counts.where


def test_an_eager_decode_step_waits_once():
    counts = decode_step(SAMPLED)
    assert not counts.graphs and counts.waits.total() == 1, counts.where


@SLOW
def test_filters_wait_once_and_top_p_once_more():
    """Top-p needs as many tokens as its mass asks for."""
    for params, waits in ((SamplingParams(max_tokens=40, top_k=5, min_p=0.1), 1), (TOP_P, 2)):
        counts = decode_step(params, compile=True)
        assert counts.waits.total() <= waits, counts.where


def test_filters_are_in_the_graph_with_the_kernel_of_the_sampler(monkeypatch):
    from tests.gpu_free.kernels import Sampler

    monkeypatch.setattr(runner, "chosen", lambda name, x: Sampler)
    monkeypatch.setattr(sampling, "chosen", lambda name, x: Sampler if x.is_cuda else None)
    counts = decode_step(TOP_P, compile=True)
    assert counts.graphs == 1 and counts.beside <= 6 and counts.waits.total() == 1, counts.where
    assert same_as_a_cpu(TOP_P) > 0.9


@pytest.mark.parametrize(("norms", "before"), [pytest.param(False, 19, marks=SLOW), (True, 26)], ids=["plain", "norms"])
def test_rope_and_the_write_to_pages_are_one_launch_with_their_kernel(monkeypatch, norms, before):
    """Launches of a layer over pages without it and with it; the answers stay."""
    from tests.gpu_free.kernels import RopeCache

    def layer():
        few, many = (decode_step(GREEDY, config=replace(shape(layers), qk_norm=norms)) for layers in (1, 3))
        return (many.beside - few.beside) / 2

    plain, right = layer(), across_pages(norms)
    monkeypatch.setattr(decoder, "chosen", lambda name, x: RopeCache if x.is_cuda and name == "rope_cache" else None)
    assert (plain, layer()) == (before, 15)
    assert np.array_equal(across_pages(norms), right)


@SLOW
def test_a_pass_over_prompts_waits_for_the_tokens_that_are_drawn():
    engine = engine_in_flight(SAMPLED, rows=4, compile=True)
    engine.submit([Request(100 + i, [7, 8, 9 + i], SAMPLED) for i in range(4)])
    with device.counted() as counts:
        engine.poll()
    assert counts.waits.total() <= 2 and counts.graphs == 1, counts.where


@SLOW
def test_answers_of_all_lengths_need_few_graphs():
    """Of each number of rows one, whatever the lengths; the tokens are a CPU's."""
    graphs, requests, said = captures()
    wanted = make_engine(make_model(), max_length=512).generate(requests)
    assert 0 < graphs <= 8
    assert np.mean([a.tokens.tolist() == b.tokens.tolist() for a, b in zip(said, wanted)]) > 0.9


def apart_from_transformers(said):
    """Return how far the log-probs of answers are from those of a plain forward pass in fp32, float32 [T]."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model, far = make_model(dtype=torch.bfloat16), []
    theirs = Qwen3ForCausalLM(Qwen3Config(**{**model.config.to_hf(), "vocab_size": 100})).eval()
    theirs.load_state_dict(model.float().state_dict(), strict=True)
    for t in said:
        tokens, own = torch.tensor(t.tokens), t.mask.nonzero()[0]
        with torch.no_grad():
            logp = theirs(tokens[None]).logits[0].log_softmax(-1)
        far.append(np.abs(t.logprobs[own] - logp[own - 1, tokens[own]].numpy()))
    return np.concatenate(far)


@SLOW
def test_answers_over_pages_need_few_graphs_and_have_the_log_probs_of_transformers():
    graphs, _, said = captures(torch.bfloat16)
    assert 0 < graphs <= 8 and len(said) == 48
    far = apart_from_transformers(said)
    assert np.median(far) < 0.015 and np.quantile(far, 0.99) < 0.06 and far.max() < 0.2


@pytest.mark.parametrize("how", [pytest.param("plain", marks=SLOW), "shared", "policy"])
def test_a_micro_batch_waits_for_nothing(how):
    few, many = (update(count, how, shape(1)) for count in (1, 3))
    assert few.beside < many.beside and few.waits.total() == many.waits.total() <= 4, many.where


def test_weights_are_cast_once_for_all_micro_batches_of_a_step(monkeypatch):
    """Seven matrices and two norms of a layer, the last norm, and the head in three uses; gradients each time."""

    def casts():
        few, many = (update(count, config=shape(1)).launches["aten._to_copy"] for count in (1, 3))
        return (many - few) // 2

    once = casts()
    monkeypatch.setattr(engine_room, "keep_casts", lambda parameters: nullcontext())
    assert casts() - once == 9 + 1 + 3


def test_log_probs_wait_once_a_micro_batch():
    tokens, mask = batch((30, 20, 40, 25))
    model = make_model(shape(), dtype=torch.bfloat16).to(CUDA)
    with device.counted() as counts:
        packed_logprobs(model, tokens, mask, max_tokens=64)
    assert counts.waits.total() <= 3, counts.where


@pytest.mark.parametrize(("width", "capability"), [(20, 9), (264, 9), (16, 7)], ids=["odd", "wide", "old"])
def test_flash_attention_gets_nothing_that_it_refuses(monkeypatch, width, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
    tokens, mask = batch((30, 20))
    model = make_model(replace(shape(1), head_dim=width), dtype=torch.bfloat16)
    wanted = packed_logprobs(model, tokens, mask, max_tokens=64)
    assert np.allclose(packed_logprobs(model.to(CUDA), tokens, mask, max_tokens=64), wanted, atol=0.1)


@pytest.mark.parametrize("share", [1.0, pytest.param(0.5, marks=SLOW)])
def test_what_is_offloaded_goes_once_each_way_and_nobody_waits(monkeypatch, share):
    made, init = [], HostActivations.__init__
    monkeypatch.setattr(HostActivations, "__init__", lambda self, *given: made.append(self) or init(self, *given))
    plain, moved = (update(1, config=shape(2), offload=offload) for offload in (0.0, share))
    assert moved.waits == plain.waits and len(made) == 1
    tensors, size = made[0].tensors / 2, made[0].bytes / 2  # of two updates
    more = {name: moved.launches[name] - plain.launches[name] for name in ("aten.copy_", "aten.clone")}
    assert tensors == 14  # of the layer that is not the last one: no cast of a weight, which all micro-batches need
    assert more == {"aten.copy_": 3 * tensors, "aten.clone": tensors}  # out, back, and the rest beside it
    assert moved.bytes["aten.copy_"] - plain.bytes["aten.copy_"] == 2 * size / share


# ---- faults ----


def same_as_a_cpu(params=GREEDY):
    """Return the share of the answers of graphs that are a CPU's, with log-probs.

    Few rows decode, more are placed, which need a larger cache, and few are left.
    """
    requests = [Request(i, [3, i], replace(params, max_tokens=5 + 10 * (i < 4))) for i in range(12)]
    model = make_model(shape(1), dtype=torch.float32)
    engine, wanted = make_engine(model, device=CUDA, compile=True), make_engine(model).generate(requests)
    engine.submit(requests[:4])
    found = [t for _ in range(3) for t in engine.poll()]
    engine.submit(requests[4:])
    while engine.pending:
        found += engine.poll()
    said = {t.id: t for t in found}
    alike = [np.array_equal(t.tokens, said[t.id].tokens) for t in wanted]
    return np.mean([a and np.allclose(t.logprobs, said[t.id].logprobs, atol=1e-4) for a, t in zip(alike, wanted)])


def test_graphs_answer_as_a_cpu():
    assert same_as_a_cpu() > 0.9


def test_a_tensor_left_on_the_host_is_seen(monkeypatch):
    monkeypatch.setattr(runner, "to_device", lambda arrays, device: [torch.from_numpy(array) for array in arrays])
    with pytest.raises(device.DeviceFault):
        decode_step(SAMPLED)


def test_a_number_read_in_a_decode_step_is_seen(monkeypatch):
    choose = runner.choose_from

    def reads(logp, *rest):
        assert logp.amax().item() <= 0
        return choose(logp, *rest)

    monkeypatch.setattr(runner, "choose_from", reads)
    assert decode_step(SAMPLED).waits.total() == 2
    with pytest.raises(device.DeviceFault):
        decode_step(SAMPLED, compile=True)


def test_an_input_of_a_graph_that_is_not_static_is_seen(monkeypatch):
    capture = Graphs._capture

    def elsewhere(*args):
        found = capture(*args)
        return found._replace(flat=found.flat.clone())

    monkeypatch.setattr(Graphs, "_capture", elsewhere)
    assert same_as_a_cpu() < 0.9


def test_a_capture_of_a_cache_laid_out_anew_is_seen(monkeypatch):
    layout = KVCache.layout

    def unnoticed(self, *args):
        layout(self, *args)
        self.layouts = 1

    monkeypatch.setattr(KVCache, "layout", unnoticed)
    assert same_as_a_cpu() < 0.9


def across_pages(norms=False):
    """Log-probs of answers that go on in a second page, for which the pool grows after the first graph."""
    params, config = replace(GREEDY, max_tokens=20), replace(shape(1), qk_norm=norms)
    model = make_model(config, dtype=torch.bfloat16)
    engine = make_engine(model.to(CUDA), device=CUDA, max_length=512, compile=True)
    prompts = np.random.default_rng(0).integers(0, 11, (3, 250))
    return np.concatenate([t.logprobs for t in engine.generate([Request(i, p, params) for i, p in enumerate(prompts)])])


def test_a_page_that_is_not_in_the_table_is_seen(monkeypatch):
    right, bind = across_pages(), PagedRows.bind
    assert np.array_equal(across_pages(), right)
    monkeypatch.setattr(PagedRows, "bind", lambda self, row, blocks: bind(self, row, blocks[:1]))
    assert not np.allclose(across_pages(), right, atol=1e-3)


def test_a_graph_of_a_pool_that_has_grown_is_seen(monkeypatch):
    reserve = PagePool.reserve

    def unnoticed(self, blocks):
        reserve(self, blocks)
        self.layouts = 1

    monkeypatch.setattr(PagePool, "reserve", unnoticed)
    with pytest.raises(IndexError):  # it writes behind the pages that there were
        across_pages()


def test_a_graph_in_the_memory_of_graphs_that_are_gone_is_seen(monkeypatch):
    """torch's allocator keeps the memory of graphs as long as there is one of them."""
    first, enter = [], torch.cuda.graph

    @contextmanager
    def again(graph, pool, **how):
        with enter(graph, first[0] if first else pool, **how):
            yield
        first.append(graph.pool())

    assert same_as_a_cpu() > 0.9
    monkeypatch.setattr(torch.cuda, "graph", again)
    with pytest.raises(device.DeviceFault):
        same_as_a_cpu()


def test_a_copy_that_the_computing_stream_does_not_wait_for_is_seen(monkeypatch):
    def norm():
        tokens, mask = batch((40, 30, 50, 20))
        engine = trainer(dtype=torch.float32, micro_tokens=200, offload=1.0)
        return engine.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum()))).grad_norm

    assert np.isfinite(norm())
    fetch = HostActivations.fetch

    def hasty(self, moved):
        found = fetch(self, moved)
        moved.ready = None
        return found

    monkeypatch.setattr(HostActivations, "fetch", hasty)
    assert not np.isfinite(norm())


def test_a_snapshot_that_later_work_does_not_wait_for_is_seen(monkeypatch, tmp_path):
    copy = snapshot.HostBuffer.copy

    def saved(step):
        values, folder = torch.zeros(64, 64, device=CUDA), begin_save(tmp_path, step)

        def copied(*given):
            events = copy(*given)
            values.add_(1)  # before another thread waits for the copy
            return events

        monkeypatch.setattr(snapshot.HostBuffer, "copy", copied)
        Saver().start(folder, {"g": alone({"t": values})}, 0)
        return open_checkpoint(Commit(folder, {"g": (0,)}, {}).wait(60)).read("g", "t")

    assert not saved(1).any()
    monkeypatch.setattr(snapshot, "_recorded", lambda device, stream: stream.record_event())
    assert saved(2).any()
