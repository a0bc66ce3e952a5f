"""What every generation engine must do, and what a run does with one that comes from a plugin.

An engine joins by its registration. ``slow`` is the worked example of docs/extending.md: transformers' own model, whose
weights Tilth does not look at.
"""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.config.test_plugins import _nothing_left_behind, write  # noqa: F401  (a fixture)
from tests.documents import blocks
from tests.engines.reference import CONFIG, make_model, make_requests
from tests.engines.standin import standing
from tests.errors import raises
from tests.flows import tiny
from tests.models.tiny import reference
from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.config.plugins import ENGINES, SERVED, engine, load_plugins
from tilth.config.roles import resolve
from tilth.core.errors import DataError, LogprobMismatch, PluginError, RecipeError, WeightMismatch
from tilth.data.prompts import PromptSet
from tilth.engines.engine import Engine
from tilth.engines.options import EngineOptions
from tilth.engines.protocol import EngineError, make_engine
from tilth.engines.request import Request, SamplingParams
from tilth.engines.stats import Stats
from tilth.flows.heldout import Evaluator
from tilth.launch.evaluate import EvalSettings, evaluate
from tilth.rewards.process_pool import RewardPool
from tilth.runs.models import load_model

(ENGINE,) = (block.text for block in blocks("docs/extending.md") if block.first == "# slow.py")
MODEL, OTHER = make_model(), make_model(seed=1)
KINDS = [SamplingParams(max_tokens=12, temperature=0.8, stop_tokens=(3, 5)), SamplingParams(max_tokens=7)]
REQUESTS = make_requests(6, kinds=KINDS, longest=20)


@pytest.fixture(
    params=["native", "vllm", pytest.param("slow", marks=pytest.mark.slow)]
)  # sglang draws as SGLang does: test_sglang.py
def name(request, tmp_path, monkeypatch):
    if request.param in SERVED:
        standing(monkeypatch)
    elif request.param not in ENGINES:
        load_plugins([str(write(tmp_path, ENGINE))])
    return request.param


@pytest.fixture
def made(name):
    """Constructs an engine of this name with the weights of MODEL."""

    def make(**options):
        found = make_engine(name, CONFIG, EngineOptions(seed=7, max_length=64, **options))
        found.update_weights(MODEL.named_parameters(), version=1)
        return found

    return make


def drained(engine, count):
    found = []
    while len(found) < count:
        found += engine.poll()
    return {t.id: t for t in found}


def test_greedy_completions_are_those_of_transformers(made):
    theirs, params = reference(MODEL), SamplingParams(max_tokens=10, temperature=0.0, stop_tokens=(3,))
    requests = [Request(i, r.prompt, params) for i, r in enumerate(REQUESTS)]
    for request, found in zip(requests, made().generate(requests)):
        ids = torch.from_numpy(np.asarray(request.prompt))[None]
        wanted = theirs.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=3, pad_token_id=3)[0]
        assert found.tokens.tolist() == wanted.tolist()
        assert found.finish == ("stop" if wanted[-1] == 3 else "length")


def test_log_probs_are_those_of_transformers_at_the_temperature(made):
    theirs = reference(MODEL)
    for request, found in zip(REQUESTS, made().generate(REQUESTS)):
        with torch.no_grad():
            logits = theirs(torch.from_numpy(found.tokens)[None]).logits[0, :-1].double()
        every = (logits / request.params.temperature).log_softmax(-1)
        wanted = every[torch.arange(len(every)), torch.from_numpy(found.tokens[1:])].numpy()
        chosen = found.mask.astype(bool)
        assert chosen.tolist() == [i >= len(request.prompt) for i in range(len(found.tokens))]
        assert found.logprobs.dtype == np.float32 and not found.logprobs[~chosen].any()
        assert np.abs(found.logprobs[chosen] - wanted[chosen[1:]]).max() < 2e-4


def test_requests_come_back_once_whatever_their_company_and_order(made):
    alone = {t.id: t for r in REQUESTS for t in made().generate([r])}
    engine = made()
    engine.submit(REQUESTS[:3])
    early = engine.poll()
    engine.submit(REQUESTS[:2:-1])
    found = drained(engine, len(REQUESTS) - len(early)) | {t.id: t for t in early}
    assert {i: t.tokens.tolist() for i, t in found.items()} == {i: t.tokens.tolist() for i, t in alone.items()}
    assert [t.id for t in engine.generate(REQUESTS)] == [r.id for r in REQUESTS]


@pytest.mark.parametrize("prompt, most", [([], 4), ([1] * 64, 1), ([1], 64)])
def test_a_request_that_cannot_be_served_is_refused_with_all_others(made, prompt, most):
    engine = made()
    with pytest.raises(DataError) as raised:
        engine.submit([Request(1, [1], KINDS[0]), Request(2, prompt, SamplingParams(max_tokens=most))])
    assert "request 2" in str(raised.value)
    assert [t.id for t in engine.generate([Request(1, [1], KINDS[0])])] == [1]


def test_an_aborted_request_returns_what_it_has_and_frees_its_blocks(made):
    long = Request(1, [1, 2, 3], SamplingParams(max_tokens=61))
    whole = made().generate([long])[0]
    engine = made(kv_tokens=64, max_rows=4)  # room for one such request
    engine.submit([long])
    for _ in range(9):
        assert engine.poll() == []
    found = engine.abort(1)
    assert found.finish == "aborted" and 0 < found.completion_length < 61
    assert found.tokens.tolist() == whole.tokens[: len(found.tokens)].tolist()
    with raises(DataError, "trajectory"):
        engine.abort(1)
    assert engine.generate([long])[0].tokens.tolist() == whole.tokens.tolist()


def test_new_weights_change_the_fingerprint_and_what_is_said(made):
    engine = made()
    before, old = dict(engine.fingerprint()), engine.generate(REQUESTS)
    engine.update_weights(OTHER.named_parameters(), version=2)
    assert dict(engine.fingerprint()) != before and engine.version == 2
    new = engine.generate(REQUESTS)
    assert [t.tokens.tolist() for t in new] != [t.tokens.tolist() for t in old]
    assert {v for t in new for _, v in t.versions} == {2} and {v for t in old for _, v in t.versions} == {1}
    engine.update_weights(MODEL.named_parameters(), version=1)
    assert dict(engine.fingerprint()) == before


def test_requests_in_flight_go_on_under_new_weights(made):
    engine = made()
    engine.submit([Request(1, [1, 2], SamplingParams(max_tokens=30))])
    for _ in range(5):
        engine.poll()
    engine.update_weights(OTHER.named_parameters(), version=2)
    found = drained(engine, 1)[1]
    assert [v for _, v in found.versions] == [1, 2] and found.completion_length == 30
    assert found.versions[0][0] == 2 < found.versions[1][0]


def test_sleep_keeps_weights_and_requests_or_says_that_it_does_not(made):
    wanted, engine = made().generate(REQUESTS[:3]), made()
    engine.submit(REQUESTS[:3])
    engine.poll()
    before = dict(engine.fingerprint())
    engine.sleep()
    with raises(EngineError, "poll"):
        engine.poll()
    engine.wake_up()
    assert dict(engine.fingerprint()) == before
    try:
        found = drained(engine, 3)
    except EngineError:
        found = {t.id: t for t in engine.generate(REQUESTS[:3])}
    assert [found[t.id].tokens.tolist() for t in wanted] == [t.tokens.tolist() for t in wanted]


def test_stats_have_the_same_keys_everywhere_and_begin_anew(made):
    engine = made()
    found = engine.generate(REQUESTS)
    counts = engine.stats(reset=True)
    assert counts.dump().keys() == Stats().dump().keys()
    assert counts.finished == len(REQUESTS) and counts.decoded_tokens == sum(t.completion_length for t in found)
    assert engine.stats().finished == 0


# ---- which engines there are ----


@pytest.mark.parametrize("kind", ENGINES.values())
def test_each_engine_is_constructed_from_one_object_of_options(kind):
    assert list(inspect.signature(resolve(kind)).parameters) == ["config", "options"]


def test_an_engine_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with pytest.raises(RecipeError) as raised:
        tiny.recipe(tmp_path, rollout={"engine": "nativ"})
    assert "rollout.engine" in str(raised.value) and "native" in str(raised.value)
    with raises(RecipeError, "rollout.engine") as raised:
        make_engine("nativ", CONFIG, EngineOptions())
    assert "native" in str(raised.value)


def test_the_name_of_the_native_engine_is_taken():
    with pytest.raises(PluginError) as raised:
        engine("native")
    assert "native" in str(raised.value)


class Unlike:
    """It extends nothing."""


class Partial(Engine):
    """It cannot be constructed."""

    def __init__(self, config, options):
        raise RuntimeError("no server")


@pytest.mark.parametrize("kind, key", [(Unlike, "engine.mine.class"), (Partial, "engine.mine")])
def test_a_class_that_is_no_engine_is_named_with_its_file(kind, key):
    engine("mine")(kind)
    with raises(PluginError, key) as raised:
        make_engine("mine", CONFIG, EngineOptions())
    assert f"({Path(__file__).name}:" in str(raised.value)


# ---- a run through an engine of a plugin ----


@pytest.fixture
def slow(tmp_path):
    return {"plugins": [str(write(tmp_path, ENGINE))], "rollout": {"engine": "slow"}}


def test_a_run_through_another_engine_learns_the_same(tmp_path, slow, monkeypatch):
    probes, probe = [], Evaluator.probe
    monkeypatch.setattr(Evaluator, "probe", lambda self, *given: (probes.append(1), probe(self, *given)))
    short = {"supervised": {"steps": 2}, "algorithm": {"steps": 2}}
    theirs = tiny.run(tiny.recipe(tmp_path / "slow", **short, **slow))
    probed = len(probes)
    ours = tiny.run(tiny.recipe(tmp_path / "native", **short))
    assert probed > len(probes) - probed == 1  # after every sync where the weights cannot be seen
    for a, b in zip(tiny.numbers(theirs.directory), tiny.numbers(ours.directory), strict=True):
        for metric in ("reward/mean", "length/mean", "accuracy/heldout", "reward/heldout", "loss/policy"):
            assert a.get(metric) == pytest.approx(b.get(metric), abs=1e-5), metric
    assert "slow" in (theirs.directory / "recipe.toml").read_text()
    prompts = PromptSet.of(tiny.SUMS[:20])
    how = EvalSettings(sampling=SamplingParams(max_tokens=4, temperature=0.0))
    with RewardPool(tiny.close_enough) as pool:
        found = [evaluate(load_model(r.directory), prompts, pool, how).summary() for r in (theirs, ours)]
    assert found[0]["avg"] == found[1]["avg"] and found[0]["tokens"] == found[1]["tokens"]


def test_weights_that_do_not_arrive_in_it_are_seen_by_what_it_says(tmp_path, slow, monkeypatch):
    broken = ENGINE.replace(
        "for name, tensor in weights:", "for name, tensor in list(weights)[:5] if version > 2 else weights:"
    )
    assert broken != ENGINE
    (tmp_path / "mine.py").write_text(broken)
    with pytest.raises(LogprobMismatch):
        tiny.run(tiny.recipe(tmp_path, supervised={"steps": 2, "lr": 5e-2}, optimizer={"lr": 5e-2}, **slow))


# ---- weights that are not the very bits ----


class Quantised(Engine):
    """Weights in 8 bits for each row, and named what they stand for."""

    tolerance = 0.02
    damage = 0.0

    def update_weights(self, weights, version, keep_kv=False):
        super().update_weights(((name, self.rounded(tensor)) for name, tensor in weights), version, keep_kv)

    def rounded(self, tensor):
        scale = tensor.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        return (tensor / scale).round() * scale * (1 + self.damage)


@pytest.mark.parametrize("damage", [0.0, 0.05])
def test_quantised_weights_may_be_off_by_the_engine_s_tolerance(damage):
    store = InlineStore()
    worker, policy = small.rollout(store), small.policy(store)
    worker.engine = Quantised(small.config(), EngineOptions(tokenizer=small.TOKENIZER))
    worker.engine.damage = damage
    if not damage:
        worker.receive(policy.weights(), 1)
        assert worker.fingerprint() != small.checksums(policy.weights())
        return
    with pytest.raises(WeightMismatch) as raised:
        worker.receive(policy.weights(), 1)
    assert "model.embed_tokens.weight" in str(raised.value)
