"""Adapters of requests: one engine, one base, and a low-rank change of it for each request."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engines.reference import LORAS, Plain, halves, make_engine, make_model, make_requests
from tests.errors import raises
from tests.models.tiny import FAMILIES
from tilth.config.schema import LoraConfig
from tilth.core.errors import DataError, ModelError, RecipeError
from tilth.engines import adapters, scheduler
from tilth.engines.blocks import BlockError, BlockManager
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.protocol import EngineError
from tilth.engines.protocol import make_engine as make_native
from tilth.engines.request import Request, SamplingParams
from tilth.models.lora import merge
from tilth.plan.lora import pair_of, scale_of, weight_of

SLOW = pytest.mark.slow
PARAMS = SamplingParams(max_tokens=10, stop_tokens=(3,))
MODEL = make_model()


def merged(name, model=MODEL, lora=None):
    """The model with an adapter merged into its weights."""
    found, lora = copy.deepcopy(model), lora or LORAS[name]
    tensors = halves(name, model.config, lora)
    with torch.no_grad():
        for weight in dict.fromkeys(map(weight_of, tensors)):
            own = found.get_parameter(weight)
            own.copy_(merge(own, *(tensors[half] for half in pair_of(weight)), scale_of(lora)))
    return found


def holding(*names, model=MODEL, **options):
    engine = make_engine(model, **options)
    for name in names:
        engine.load_adapter(name, LORAS[name], halves(name))
    return engine


def asked(*names, first=0, params=PARAMS):
    """Two requests of each name, which share a prompt among all names."""
    prompts = [list(range(5, 45)), list(range(7, 20))]
    return [
        Request(first + 2 * i + j, prompt, params, adapter=name)
        for i, name in enumerate(names)
        for j, prompt in enumerate(prompts)
    ]


def same(found, wanted):
    return np.array_equal(found.tokens, wanted.tokens) and np.array_equal(found.logprobs, wanted.logprobs)


@pytest.mark.parametrize("parity", [False, pytest.param(True, marks=SLOW)])
def test_each_row_is_as_with_merged_weights(parity):
    """In mixed company, greedily and drawn, where the next token is not a tie."""
    requests = asked("", "a", "b", "c", "", "a", params=SamplingParams(max_tokens=10))
    found = holding("a", "b", "c", parity=parity, max_rows=8).generate(requests)
    plain = {name: make_engine(merged(name) if name else MODEL, parity=parity) for name in ("", "a", "b", "c")}
    for request, mixed in zip(requests, found):
        (wanted,) = plain[request.adapter].generate([replace(request, adapter="")])
        assert np.array_equal(mixed.tokens, wanted.tokens)
        np.testing.assert_allclose(mixed.logprobs, wanted.logprobs, atol=2e-4)
        if not request.adapter:
            assert not parity or same(mixed, wanted)
    assert len({found[2 * i].tokens.tobytes() for i in range(4)}) == 4


def test_company_changes_no_bit_in_parity_mode():
    requests = asked("", "c", "a", "b", "a")
    found = holding("a", "b", "c", parity=True, max_rows=5).generate(requests)
    for request, mixed in zip(requests, found):
        names = [request.adapter] if request.adapter else []
        assert same(mixed, holding(*names, parity=True).generate([request])[0])


@pytest.mark.parametrize(
    "options",
    [
        {"kv_tokens": 128, "max_rows": 4},
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({"max_rows": 2}, {"step_tokens": 24})),
    ],
)
def test_preempted_and_waiting_requests_keep_their_adapter(options):
    requests = asked("a", "", "b", "c", params=SamplingParams(max_tokens=24))
    found = holding("a", "b", "c", parity=True, **options).generate(requests)
    assert all(map(same, found, holding("a", "b", "c", parity=True).generate(requests)))


@pytest.mark.parametrize(
    "family",
    ["gpt-oss", "deepseek-v3-direct"] + [pytest.param(f, marks=SLOW) for f in ("gemma3", "olmo2-biases", "qwen3-moe")],
)
def test_families(family):
    """Attention's adapters of families whose projections are not those of a plain decoder."""
    model = make_model(FAMILIES[family], scale=2.0)
    lora = LoraConfig(rank=4, alpha=4.0, targets=("q_proj", "o_proj"))
    engine = make_engine(model, max_length=64)
    tensors = halves("a", model.config, lora)
    engine.load_adapter("a", lora, tensors)
    requests = [Request(i, [1, 2, 3 + i], SamplingParams(max_tokens=6), adapter="a" * (i % 2)) for i in range(4)]
    changed = merged("a", model, lora)
    for request, found in zip(requests, engine.generate(requests)):
        (wanted,) = make_engine(changed if request.adapter else model, max_length=64).generate(
            [replace(request, adapter="")]
        )
        assert np.array_equal(found.tokens, wanted.tokens)
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-4)


@pytest.mark.parametrize(
    "family, parity",
    [("qwen3-moe", True)]
    + [pytest.param(*one, marks=SLOW) for one in (("gpt-oss", False), ("qwen3-moe", False), ("gpt-oss", True))],
)
def test_experts_of_each_row_are_as_with_merged_weights(family, parity):
    """In mixed company; and company changes no bit in parity mode."""
    model = make_model(FAMILIES[family], scale=2.0)
    loras = {"a": LoraConfig(rank=4, alpha=4.0, targets=("q_proj", "gate_proj", "down_proj")),
             "b": LoraConfig(rank=3, alpha=6.0, targets=("up_proj",))}  # fmt: skip

    def engine(*names):
        made = make_engine(model, max_length=64, parity=parity)
        for name in names:
            made.load_adapter(name, loras[name], halves(name, model.config, loras[name]))
        return made

    names = ["", "a", "b", "a", "", "b"]
    params = SamplingParams(max_tokens=6)
    requests = [Request(i, [1, 2, 3 + i], params, adapter=name) for i, name in enumerate(names)]
    mixed = engine("a", "b").generate(requests)
    for request, found in zip(requests, mixed):
        whole = merged(request.adapter, model, loras[request.adapter]) if request.adapter else model
        plain = make_engine(whole, max_length=64, parity=parity)
        (wanted,) = plain.generate([replace(request, adapter="")])
        assert np.array_equal(found.tokens, wanted.tokens)
        np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-4)
        assert not parity or same(found, engine(*filter(None, [request.adapter])).generate([request])[0])
    assert len({found.logprobs.tobytes() for found in mixed[:3]}) == 3


def test_compiled_steps_are_those_of_the_base_alone():
    engine = make_engine(MODEL, max_length=64)
    engine._runner._compiled = lambda *_: pytest.fail("compiled")
    engine._runner.compile_seconds = 1.0
    engine.load_adapter("a", LORAS["a"], halves("a"))
    assert same(engine.generate(asked("a"))[0], holding("a", max_length=64).generate(asked("a"))[0])
    with pytest.raises(pytest.fail.Exception):
        engine.generate(asked(""))


# ---- the KV cache ----


def test_a_prefix_of_another_adapter_is_computed_again():
    engine = holding("a", "b", parity=True)
    engine.generate(asked("a"))
    again = engine.generate(asked("a", first=10))
    assert engine.stats(reset=True).cached_tokens == 32
    others = engine.generate(asked("b", "", first=20))
    assert engine.stats().cached_tokens == 0
    fresh = holding("a", "b", parity=True)
    assert all(map(same, others, fresh.generate(asked("b", "", first=20))))
    assert all(map(same, again, holding("a", parity=True).generate(asked("a", first=10))))


def test_a_cache_that_forgot_the_adapter_is_seen(monkeypatch):
    """The accounting names the block whose KV another adapter computed."""
    chain = BlockManager.chain
    monkeypatch.setattr(BlockManager, "chain", lambda self, tokens, salt, count: chain(self, tokens, 1, count))
    engine = holding("a", "b")
    engine.generate(asked("a"))
    with raises(BlockError, "salt"):
        engine.generate(asked("b", first=10))


def test_a_key_without_the_adapter_gives_the_tokens_of_another(monkeypatch):
    """What the key guards against: without it a prompt goes on from another one's KV."""
    wanted = holding("a", "b").generate(asked("b", first=10))
    for module in (scheduler, adapters):
        monkeypatch.setattr(module, "salt_of", lambda version, adapter: version)
    monkeypatch.setattr("tilth.engines.engine.salt_of", lambda version, adapter: version)
    engine = holding("a", "b")
    engine.generate(asked("a"))
    assert not all(map(same, engine.generate(asked("b", first=10)), wanted))


def test_equal_prompts_of_two_adapters_are_not_computed_once():
    engine = holding("a", "b")
    engine.generate([Request(i, [1, 2, 3], PARAMS, adapter=name) for i, name in enumerate(["a", "a", "b", ""])])
    assert engine.stats().prefilled_tokens == 9


def test_a_request_that_goes_on_uses_its_own_tail():
    first = Request(1, list(range(5, 14)), SamplingParams(max_tokens=9), keeps=True, adapter="a")
    engine = holding("a", "b", parity=True)
    (begun,) = engine.generate([first])
    more = [Request(1, [*begun.tokens, 4], PARAMS, adapter=name) for name in ("b", "a")]
    for request in more:
        found = engine.generate([request])
        assert same(found[0], holding("a", "b", parity=True).generate([request])[0])
    engine.generate([first])
    cached = engine.stats(reset=True).cached_tokens
    engine.generate(more[1:])
    assert engine.stats().cached_tokens > 16 >= cached


# ---- replaced, removed ----


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_requests_in_flight_go_on_with_theirs(how):
    request = Request(1, list(range(5, 14)), SamplingParams(max_tokens=20), adapter="a")
    (wanted,) = holding("a", parity=True).generate([request])
    engine = holding("a", parity=True)
    engine.submit([request])
    for _ in range(5):
        assert not engine.poll()
    if how == "removed":
        engine.remove_adapter("a")
        with raises(DataError, "request.adapter"):
            engine.submit([Request(2, [1], PARAMS, adapter="a")])
    else:
        engine.load_adapter("a", LORAS["b"], halves("b"))
    later = Request(3, list(range(5, 14)), SamplingParams(max_tokens=20), adapter="a" * (how == "replaced"))
    engine.submit([later])
    found = {}
    while len(found) < 2:
        found |= {t.id: t for t in engine.poll()}
    assert same(found[1], wanted)
    names = ("b", Request(3, later.prompt, later.params, adapter="b")) if later.adapter else ("a", later)
    assert same(found[3], holding(names[0], parity=True).generate([names[1]])[0])


def test_new_weights_of_the_base_keep_adapters_and_compute_again():
    other = make_model(seed=1)
    engine = holding("a", parity=True)
    engine.generate(asked("a"))
    engine.update_weights(other.named_parameters(), version=2)
    assert all(
        map(
            same,
            engine.generate(asked("a", first=4)),
            holding("a", model=other, parity=True).generate(asked("a", first=4)),
        )
    )


def test_an_aborted_request_is_resumed_with_its_adapter():
    request = Request(1, list(range(5, 14)), SamplingParams(max_tokens=20), adapter="a")
    (wanted,) = holding("a", parity=True).generate([request])
    engine = holding("a", parity=True)
    engine.submit([request])
    for _ in range(5):
        engine.poll()
    engine.resume(engine.abort(1), request.params, "a")
    found = []
    while not found:
        found = engine.poll()
    assert same(found[0], wanted)


def test_memory_is_counted_and_given_back():
    engine = holding()
    assert engine.adapter_bytes == 0
    padded = {"a": 8, "b": 8, "c": 24}
    for name, rank in padded.items():
        engine.load_adapter(name, LORAS[name], halves(name))
    own = sum(4 * tensor.numel() * padded[n] // LORAS[n].rank for n in padded for tensor in halves(n).values())
    assert engine.adapter_bytes == own
    engine.generate(asked("a", "b"))
    assert own < engine.adapter_bytes
    engine.generate(asked("a", "c"))
    engine.poll()
    engine.poll()
    assert engine.adapter_bytes == own
    for name in padded:
        engine.remove_adapter(name)
    assert engine.adapter_bytes == 0


# ---- adapters among the weights ----


def made_of(lora, **options):
    """An engine whose weights have adapters, and all its weights."""
    weights = dict(MODEL.named_parameters()) | halves("a", lora=lora)
    engine = make_native("native", MODEL.config, EngineOptions(seed=7, max_length=256, lora=lora, **options))
    engine.update_weights(weights, version=1)
    return engine, weights


@pytest.mark.parametrize("parity", [False, True])
def test_weights_may_have_adapters_that_are_updated_alone(parity):
    engine, _ = made_of(LORAS["a"], parity=parity)
    requests, changed = asked("", params=SamplingParams(max_tokens=10)), merged("a")
    wanted = make_engine(changed, parity=parity).generate(requests)
    for mine, other in zip(engine.generate(requests), wanted):
        assert np.array_equal(mine.tokens, other.tokens) and (not parity or same(mine, other))
        np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=2e-4)
    engine.update_weights({name: 0 * tensor for name, tensor in halves("a").items()}, version=2)
    found = engine.generate(requests)
    assert found[0].versions == [(40, 2)]
    assert all(same(mine, other) for mine, other in zip(found, make_engine(MODEL, parity=parity).generate(requests)))


def test_adapters_alone_are_no_first_update():
    engine = make_native("native", MODEL.config, EngineOptions(max_length=64, lora=LORAS["b"]))
    for weights in (halves("b"), iter(halves("b").items())):
        with raises(ModelError, "lm_head.weight.missing"):
            engine.update_weights(weights, version=1)
    engine, weights = made_of(LORAS["a"])
    with raises(ModelError, f"{Q}.A.missing"):
        engine.update_weights({n: t for n, t in weights.items() if n != f"{Q}.A"}, version=2)


def test_an_engine_that_takes_no_adapters_is_refused(monkeypatch):
    monkeypatch.setattr(Engine, "syncs_adapters", False)
    with raises(RecipeError, "rollout.adapters.engine"):
        make_native("native", MODEL.config, EngineOptions(lora=LORAS["a"]))


# ---- refused ----


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate([Request(0, [1]), Request(1, [1], adapter="a")]),
        lambda engine: engine.load_adapter("a", LoraConfig(rank=2), {}),
        lambda engine: engine.remove_adapter("a"),
    ],
)
def test_engines_without_adapters_refuse_them(call):
    with raises(EngineError, "request.adapter.engine"):
        call(Plain())


@pytest.fixture(scope="module")
def wanted():
    return holding("a").generate(asked("a"))[0]


Q = "model.layers.0.self_attn.q_proj.lora"
FAR = "model.layers.9.self_attn.q_proj.lora.A"


@pytest.mark.parametrize(
    "key, name, lora, change",
    [
        ("adapter.name", "", {}, {}),
        ("adapter.rank", "x", {"rank": 0}, {}),
        ("adapter.targets", "x", {"targets": ("c_attn",)}, {}),
        (f"{Q}.A.shape", "x", {}, {f"{Q}.A": torch.zeros(3, 31)}),
        (f"{Q}.A.shape", "x", {"rank": 4}, {}),
        (f"{Q}.A.finite", "x", {}, {f"{Q}.A": torch.full((3, 32), torch.inf)}),
        (f"{Q}.B.missing", "x", {}, {f"{Q}.B": None}),
        (f"{FAR}.extra", "x", {}, {FAR: torch.ones(3, 32)}),
    ],
)  # fmt: skip
def test_an_adapter_of_another_base_is_refused_and_changes_nothing(wanted, key, name, lora, change):
    engine = holding("a")
    tensors = {n: t for n, t in (halves("a") | change).items() if t is not None}
    with raises(DataError if key == "adapter.name" else ModelError, key):
        engine.load_adapter(name, LORAS["a"].model_copy(update=lora), tensors)
    assert same(engine.generate(asked("a"))[0], wanted)
    with raises(DataError, "request.adapter"):
        engine.generate([Request(9, [1], adapter="x")])


@pytest.mark.parametrize("name", ["", "nobody"])
def test_an_unknown_adapter_is_not_removed(name):
    with raises(DataError, "request.adapter" if name else "adapter.name"):
        holding("a").remove_adapter(name)


def test_a_request_of_an_unknown_adapter_is_refused_with_all_others():
    engine = holding("a")
    with raises(DataError, "request.adapter"):
        engine.submit([Request(1, [1], adapter="a"), Request(2, [1], adapter="b")])
    assert engine.pending == 0


def test_layers_that_are_served_merged_only_are_refused():
    model, lora = make_model(FAMILIES["deepseek-v3-direct"]), LoraConfig(rank=2, targets=("kv_b_proj",))
    tensors = halves("a", model.config, lora)
    with raises(ModelError, f"{weight_of(next(iter(tensors)))}.latent"):
        make_engine(model, max_length=64).load_adapter("a", lora, tensors)


@pytest.mark.slow
def test_requests_are_made_at_random_and_served_alone_and_together():
    names = ["", "a", "b", "c"]
    kinds = [SamplingParams(max_tokens=12, temperature=0.8, top_k=9), SamplingParams(max_tokens=7)]
    plain = make_requests(24, kinds=kinds, longest=40)
    requests = [Request(r.id, r.prompt, r.params, adapter=names[r.id % 4]) for r in plain]
    found = holding("a", "b", "c", parity=True, max_rows=7, kv_tokens=512).generate(requests)
    engine = holding("a", "b", "c", parity=True)
    assert all(same(t, engine.generate([r])[0]) for r, t in zip(requests, found))
