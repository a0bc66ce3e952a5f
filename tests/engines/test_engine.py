"""The engine says what a naive generator says, whatever is in the batch and whatever happens on the way."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engines.reference import CONFIG, KINDS, WAYS, check_blocks, make_engine, make_model, make_requests, naive
from tests.errors import raises
from tilth.core.errors import DataError, ModelError, NonFiniteError
from tilth.engines.engine import EngineError
from tilth.engines.request import Request, SamplingParams
from tilth.engines.rounds import EngineRounds
from tilth.models.config import DecoderConfig

MODEL = make_model()
REQUESTS = make_requests(16)


@functools.cache
def naively():
    return {r.id: naive(MODEL, r) for r in REQUESTS}


def check(found, requests=REQUESTS, wanted=None):
    wanted = wanted or naively()
    for request, t in zip(requests, found, strict=True):
        tokens, raw, filtered = wanted[request.id]
        n = len(request.prompt)
        assert (t.id, t.group, t.prompt) == (request.id, request.group, request.prompt_index)
        assert t.tokens.tolist() == tokens
        assert t.mask.tolist() == [0] * n + [1] * (len(tokens) - n)
        np.testing.assert_allclose(t.logprobs[n:], raw, atol=2e-5)
        assert not t.logprobs[:n].any()
        assert (t.sampling_logprobs is not None) == request.params.filtered
        if request.params.filtered:
            np.testing.assert_allclose(t.sampling_logprobs[n:], filtered, atol=2e-5)
        assert t.finish == ("stop" if tokens[-1] in request.params.stop_tokens else "length")
        assert t.versions == [(n, 1)]


def tables(engine):
    """Every open block table, wherever it is."""
    lanes = engine._lanes.values()
    prompts = engine._scheduler._prompts()
    return [lane.answers[r].table for lane in lanes for r in lane.rows] + [p.table for p in prompts]


def finish(engine, found=()):
    found = {t.id: t for t in found}
    while engine.pending:
        found |= {t.id: t for t in engine.poll()}
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(how, id=name, marks=[pytest.mark.slow] * (name in ("few-rows", "small-chunks")))
        for name, how in WAYS.items()
    ],
)
def test_same_tokens_as_a_naive_generator(options):
    engine = make_engine(MODEL, **options)
    check(engine.generate(REQUESTS))
    assert engine.pending == 0
    assert ("kv_tokens" in options) == (engine.stats().preemptions > 0)
    assert not check_blocks(engine._blocks, [])


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_random_arrival_abort_and_resume(seed):
    """Requests trickle in; some are stopped half-way and go on later, in this engine or in another one."""
    rng = np.random.default_rng(seed)
    ways = [*WAYS.values()]
    engines = [make_engine(MODEL, **ways[rng.integers(len(ways))]) for _ in range(2)]
    waiting, params, found = list(REQUESTS), {r.id: r.params for r in REQUESTS}, {}
    parked, aborted = [], 0
    while waiting or parked or any(e.pending for e in engines):
        engine = engines[rng.integers(2)]
        for _ in range(rng.integers(4)):
            if waiting:
                engine.submit([waiting.pop(0)])
        if parked and rng.random() < 0.3:
            t = parked.pop(0)
            engine.resume(t, params[t.id])
        if engine._known and rng.random() < 0.2:
            parked.append(engine.abort(int(rng.choice(sorted(engine._known)))))
            assert parked[-1].finish == "aborted"
            aborted += 1
        for t in engine.poll():
            found[t.id] = t
        assert not check_blocks(engine._blocks, tables(engine))
    assert aborted > 5
    check([found[r.id] for r in REQUESTS])


def test_rows_move_through_the_lanes():
    """Sequences that grow beyond 128 tokens change lanes, some of them amid shorter ones."""
    rng = np.random.default_rng(3)
    lengths = [(100, 40), (13, 10), (101, 60), (14, 20), (102, 45), (15, 10), (16, 10), (17, 10)]
    requests = [
        Request(i, rng.integers(0, 100, prompt), SamplingParams(max_tokens=n)) for i, (prompt, n) in enumerate(lengths)
    ]
    engine = make_engine(MODEL, max_rows=6)
    check(engine.generate(requests), requests, {r.id: naive(MODEL, r) for r in requests})
    assert sorted(engine._lanes) == [128, 256]
    assert engine.stats().moved_rows == 3


def test_greedy_equals_transformers():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM(Qwen3Config(**{**CONFIG.to_hf(), "vocab_size": 100})).eval()
    theirs.load_state_dict(MODEL.state_dict(), strict=True)
    rng = np.random.default_rng(0)
    requests = [Request(i, rng.integers(0, 100, 9), SamplingParams(30, temperature=0.0)) for i in range(12)]
    ids = torch.tensor(np.stack([r.prompt for r in requests]))
    wanted = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0
    )
    found = make_engine(MODEL, max_rows=5, step_tokens=40).generate(requests)
    assert [t.tokens.tolist() for t in found] == wanted.tolist()


# Sharing


@pytest.mark.parametrize("options", [{}, {"max_rows": 8}, {"max_rows": 24, "step_tokens": 40}], ids=str)
@pytest.mark.parametrize("size", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_a_group_computes_its_prompt_once(size, options):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 100, n) for n in (37, 48, 5)]
    params = SamplingParams(max_tokens=6, stop_tokens=(1, 2, 3))
    requests = [Request(i * size + k, p, params, group=i) for i, p in enumerate(prompts) for k in range(size)]
    engine = make_engine(MODEL, **options)
    found = engine.generate(requests)
    stats = engine.stats()
    assert stats.prefilled_tokens == sum(map(len, prompts))
    assert stats.shared_tokens == (size - 1) * sum(map(len, prompts))
    some = requests[:: size // 4]
    check([found[r.id] for r in some], some, {r.id: naive(MODEL, r) for r in some})
    assert len({tuple(t.tokens[37:]) for t in found[:size]}) > 1, "samples of a group differ"


def test_later_prompts_copy_what_earlier_ones_computed():
    rng = np.random.default_rng(0)
    system = rng.integers(0, 100, 40)
    requests = [Request(i, np.append(system, rng.integers(0, 100, 7)), KINDS[0]) for i in range(5)]
    engine = make_engine(MODEL)
    check([engine.generate([r])[0] for r in requests], requests, {r.id: naive(MODEL, r) for r in requests})
    assert engine.stats().cached_tokens == 4 * 32
    engine.reset_prefix_cache()
    engine.generate([Request(9, requests[0].prompt, KINDS[0])])
    assert engine.stats().cached_tokens == 4 * 32


def test_a_sequence_goes_on_in_another_engine_with_its_kv():
    """Whatever blocks it has; what the other has of its beginning stays."""
    for request in REQUESTS[:4]:
        first, second = make_engine(MODEL), make_engine(MODEL, block_size=8)
        first.submit([request])
        while not first.running:
            first.poll()
        begun, kv = first.export(request.id)
        assert not first.pending and len(kv.tokens) == len(begun.tokens) - 1
        if begun.finish == "aborted":
            second.generate([Request(99, request.prompt, SamplingParams(max_tokens=1))])
            before = second.stats().prefilled_tokens
            second.resume(begun, request.params, kv=kv)
            check([finish(second)[request.id]], [request])
            assert second.stats().prefilled_tokens == before + 1


@pytest.mark.parametrize("ends", ["aborted", "computed"])
def test_kv_that_is_given_is_dropped_with_its_request(ends):
    """Also if it is aborted before it has a row, or its prompt has another sequence."""
    first, second = make_engine(MODEL), make_engine(MODEL)
    request = Request(0, np.arange(20), SamplingParams(max_tokens=9, temperature=0.0))
    first.submit([request])
    while not first.running:
        first.poll()
    begun, kv = first.export(0)
    for id in (0, 1):
        second.resume(replace(begun, id=id), request.params, kv=kv)
    if ends == "aborted":
        second.abort(0)
        second.abort(1)
    else:
        finish(second)
    assert not second._tails and not second.pending


def test_kv_of_other_shapes_or_weights_is_refused():
    first, second = make_engine(MODEL), make_engine(MODEL)
    first.submit(REQUESTS[:2])
    assert first.export(REQUESTS[1].id)[1] is None  # it has no row
    first.poll()
    first.poll()
    begun, kv = first.export(REQUESTS[0].id)
    with raises(DataError, "kv.shape"):
        second.resume(begun, REQUESTS[0].params, kv=kv._replace(tensors=kv.tensors[1:]))
    second.update_weights(MODEL.named_parameters(), version=2)
    with raises(DataError, "kv.version"):
        second.resume(begun, REQUESTS[0].params, kv=kv)
    assert not second.pending
    stale = make_engine(MODEL)
    stale.submit(REQUESTS[:1])
    stale.poll()
    stale.poll()
    stale.update_weights(MODEL.named_parameters(), version=2, keep_kv=True)
    assert stale.export(REQUESTS[0].id)[1] is None


def test_an_aborted_answer_resumes_from_the_cache():
    engine = make_engine(MODEL)
    request = Request(0, np.arange(30), SamplingParams(max_tokens=60))
    engine.submit([request])
    for _ in range(30):
        engine.poll()
    partial = engine.abort(0)
    before = engine.stats().prefilled_tokens
    engine.resume(partial, request.params)
    check(list(finish(engine).values()), [request], {0: naive(MODEL, request)})
    assert engine.stats().prefilled_tokens - before == len(partial.tokens) % 16


def test_two_samples_where_only_one_fits():
    """The prompt alone fills the cache: its samples take turns."""
    requests = [Request(i, np.arange(60), SamplingParams(max_tokens=4)) for i in range(3)]
    engine = make_engine(MODEL, kv_tokens=64)
    check(engine.generate(requests), requests, {r.id: naive(MODEL, r) for r in requests})


# Bits


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"max_rows": 6}, {"max_rows": 16, "kv_tokens": 480}], ids=str)
def test_what_was_done_before_leaves_no_trace(options):
    """After draining, an engine computes as a new one."""
    rng = np.random.default_rng(1)
    long = [Request(i, rng.integers(0, 100, 100), SamplingParams(max_tokens=60)) for i in range(6)]
    used, fresh = (make_engine(MODEL, parity=True, **options) for _ in range(2))
    used.generate(make_requests(15, seed=5))
    used.reset_prefix_cache()
    for a, b in zip(used.generate(long), fresh.generate(long)):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert np.array_equal(a.logprobs, b.logprobs)


def test_the_seed_and_the_id_decide():
    requests = make_requests(6, kinds=KINDS[:1])
    one = [t.tokens.tolist() for t in make_engine(MODEL).generate(requests)]
    assert one == [t.tokens.tolist() for t in make_engine(MODEL).generate(requests)]
    assert one != [t.tokens.tolist() for t in make_engine(MODEL, seed=8).generate(requests)]
    renamed = [Request(r.id + 100, r.prompt, r.params) for r in requests]
    assert one != [t.tokens.tolist() for t in make_engine(MODEL).generate(renamed)]


# Weights


def test_new_weights_never_meet_old_keys_and_values():
    """Half-way, other weights: what follows is what these weights say after the same tokens."""
    other = make_model(seed=9)
    requests = REQUESTS[:16]
    engine = make_engine(MODEL, max_rows=8)
    engine.submit(requests)
    done = {t.id: t for _ in range(14) for t in engine.poll()}
    before = {r.id: done.get(r.id) for r in requests}
    engine.update_weights(other.named_parameters(), version=2)
    found = finish(engine, done.values())
    swapped = 0
    for request in requests:
        t = found[request.id]
        if before[request.id] is not None:
            assert t.versions == [(len(request.prompt), 1)]
            continue
        last_start, version = t.versions[-1]
        assert version == 2
        rest = SamplingParams(**{**vars(request.params), "max_tokens": len(t.tokens) - last_start})
        tokens, raw, _ = naive(other, Request(request.id, t.tokens[:last_start], rest))
        assert t.tokens.tolist() == tokens
        np.testing.assert_allclose(t.logprobs[last_start:], raw, atol=2e-5)
        swapped += len(t.versions) == 2
    assert swapped >= 5


def test_weights_changed_behind_the_engines_back_would_be_seen():
    """The same without telling the engine: stale prefixes are used and tokens differ, so the test above can fail."""
    other, request = make_model(seed=9), Request(0, np.arange(40), SamplingParams(max_tokens=30))
    engine = make_engine(MODEL)
    engine.generate([request])
    for name, p in engine.named_parameters():
        p.copy_(dict(other.named_parameters())[name])
    assert engine.generate([request])[0].tokens.tolist() != naive(other, request)[0]
    engine.update_weights(other.named_parameters(), version=2)
    assert engine.generate([request])[0].tokens.tolist() == naive(other, request)[0]


def test_long_prompts_go_in_chunks():
    """A prompt of 1,300 tokens with a budget of 600 a step, beside short ones that keep decoding."""
    config = DecoderConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, max_positions=2048
    )
    model, rng = make_model(config), np.random.default_rng(0)
    prompts = [rng.integers(0, 100, n) for n in (9, 1300, 700, 11)]
    requests = [Request(i, p, SamplingParams(max_tokens=8, temperature=0.0)) for i, p in enumerate(prompts)]
    engine = make_engine(model, max_length=1500, step_tokens=600)
    engine.submit(requests)
    decoding = []
    found = {}
    while engine.pending:
        found |= {t.id: t for t in engine.poll()}
        decoding.append(engine.running)
    assert decoding[0] == 1 and len(decoding) < 16
    check([found[i] for i in range(4)], requests, {r.id: naive(model, r) for r in requests})


def test_going_on_with_old_keys_is_stamped_and_leaves_nothing_behind():
    other = make_model(seed=9)
    engine = make_engine(MODEL)
    requests = [Request(i, np.arange(40), SamplingParams(max_tokens=50)) for i in range(3)]
    engine.submit(requests)
    for _ in range(30):
        engine.poll()
    engine.update_weights(other.named_parameters(), version=2, keep_kv=True)
    assert engine.stats().preemptions == 0 and engine.running == 3
    engine.poll()
    partial = engine.abort(0)
    assert partial.versions == [(40, 1), (70, 2)]
    again = Request(5, partial.tokens[:64], SamplingParams(max_tokens=20))
    engine.submit([again])
    found = finish(engine)
    assert found.pop(5).tokens.tolist() == naive(other, again)[0]
    assert {len(t.versions) for t in found.values()} == {2}


def test_weights_are_copied_into_the_live_storage():
    engine = make_engine(MODEL)
    before = {name: p.data_ptr() for name, p in engine.named_parameters()}
    other = dict(make_model(seed=4).named_parameters())
    engine.update_weights(iter(other.items()), version=3)
    for name, p in engine.named_parameters():
        assert p.data_ptr() == before[name] and torch.equal(p, other[name])
        assert p.data_ptr() != other[name].data_ptr()
    assert engine.version == 3


@pytest.mark.parametrize(
    "harm, key",
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight.missing"),
        (lambda w: w.update(stray=torch.zeros(1)), "stray.extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), "model.norm.weight.shape"),
    ],
)
def test_wrong_weights_are_named_and_nothing_changes(harm, key):
    engine = make_engine(MODEL)
    weights = dict(make_model(seed=4).named_parameters())
    harm(weights)
    with raises(ModelError, key):
        engine.update_weights(weights, version=2)
    assert engine.version == 1
    check(engine.generate(REQUESTS[:4]), REQUESTS[:4])


def test_weights_that_are_not_finite_are_an_error_not_an_answer():
    engine = make_engine(MODEL)
    bad = {n: p.clone() for n, p in MODEL.named_parameters()}
    bad["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    engine.update_weights(bad, version=2)
    with raises(NonFiniteError, "logits") as raised:
        engine.generate(REQUESTS[:3])
    assert "version 2" in str(raised.value) and "model.layers.0.mlp.up_proj.weight" in str(raised.value)
    engine.update_weights(MODEL.named_parameters(), version=1)
    check(engine.generate(REQUESTS[:4]), REQUESTS[:4])


# Memory


def test_kv_memory_is_released_and_regained():
    engine = make_engine(MODEL, max_rows=12)
    engine.submit(REQUESTS)
    done = [t for _ in range(10) for t in engine.poll()]
    assert engine.kv_bytes > 0
    engine.sleep()
    assert engine.kv_bytes == 0
    with raises(EngineError, "poll"):
        engine.poll()
    engine.wake_up()
    found = finish(engine, done)
    check([found[r.id] for r in REQUESTS])


@pytest.mark.slow
def test_released_memory_goes_back_to_the_system():
    psutil = pytest.importorskip("psutil")
    config = DecoderConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=6, num_heads=8, head_dim=32, max_positions=256
    )
    engine = make_engine(make_model(config))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 64, 100) for _ in range(64)]
    engine.generate([Request(i, p, SamplingParams(max_tokens=8)) for i, p in enumerate(prompts)])
    held, before = engine.kv_bytes, psutil.Process().memory_info().rss
    assert held > 100e6
    engine.sleep()
    assert before - psutil.Process().memory_info().rss > 0.9 * held


def test_cache_grows_with_what_is_there_not_with_what_is_allowed():
    engine = make_engine(MODEL, max_rows=256, max_length=512)
    engine.generate([Request(i, [1, 2, 3], SamplingParams(max_tokens=8)) for i in range(16)])
    token = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    assert engine.kv_bytes < 2 * 2 * 16 * 16 * token  # two slabs, 16 rows of 16 slots, and spare buffers


def test_a_step_keeps_to_its_budget():
    engine = make_engine(MODEL, step_tokens=20, max_rows=64)
    engine.submit(REQUESTS)
    while engine.pending:
        engine.stats(reset=True)
        engine.poll()
        s = engine.stats()
        assert s.prefilled_tokens + s.useful_rows <= 20
        assert engine.running <= 20


def test_the_newest_yields_and_the_oldest_goes_on():
    engine = make_engine(MODEL, kv_tokens=160)
    requests = [Request(i, np.arange(16), SamplingParams(max_tokens=90)) for i in range(4)]
    order = [t.id for t in EngineRounds(engine).drain(requests)]
    stats = engine.stats()
    assert stats.preemptions > 0 and 0 < stats.kv_used / stats.kv_looks < stats.kv_peak and 0.8 < stats.kv_peak <= 1
    assert order == [0, 1, 2, 3]


# Requests


def test_an_answer_that_never_stops_ends_by_length():
    t = make_engine(MODEL).generate([Request(0, [1, 2, 3], SamplingParams(max_tokens=253, stop_tokens=(101,)))])[0]
    assert t.finish == "length" and len(t.tokens) == 256


@pytest.mark.parametrize(
    "prompt, params, key",
    [
        ([], {}, "request.prompt"),
        ([1] * 300, {"max_tokens": 1}, "request.max_tokens"),
        ([1] * 250, {"max_tokens": 7}, "request.max_tokens"),
        ([100], {}, "request.prompt.vocab_size"),
        ([-1], {}, "request.prompt.vocab_size"),
        ([1] * 60, {"max_tokens": 5}, "kv_tokens"),
        ([1], {"stop": ("a",), "max_tokens": 5}, "request.stop"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(prompt, params, key):
    engine = make_engine(MODEL, kv_tokens=64)
    with raises(DataError, key) as raised:
        engine.submit([Request(2, [1], SamplingParams(max_tokens=3)), Request(3, prompt, SamplingParams(**params))])
    assert engine.pending == 0 and str(raised.value).startswith("request 3: ")


def test_ids_are_unique_and_known():
    engine = make_engine(MODEL)
    engine.submit([Request(1, [1])])
    with raises(DataError, "request.id"):
        engine.submit([Request(1, [2])])
    with raises(DataError, "request.id"):
        engine.submit([Request(2, [2]), Request(2, [2])])
    with raises(DataError, "trajectory"):
        engine.abort(9)
    done = finish(engine)[1]
    with raises(DataError, "params.max_tokens"):
        engine.resume(done, SamplingParams())


def test_sliding_windows_and_biases():
    """Another family: some layers see only the last 7 tokens."""
    config = DecoderConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=1, qkv_bias=True,
        max_positions=256, family="qwen2", sliding_window=7, window_layers=(0,),
    )  # fmt: skip
    model = make_model(config)
    requests = REQUESTS[:8]
    engine = make_engine(model, max_rows=5)
    check(engine.generate(requests), requests, {r.id: naive(model, r) for r in requests})
