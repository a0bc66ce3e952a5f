"""An engine over several ranks says what an engine of one rank says, and stops as soon as its ranks differ."""

import numpy as np
import pytest

from tests.engines.divided import config_of, generated
from tests.engines.reference import CONFIG, make_engine, make_model
from tests.errors import raises
from tilth.config.schema import DraftConfig
from tilth.core.errors import ModelError
from tilth.core.layout import Mesh
from tilth.engines.engine import Engine, EngineError
from tilth.engines.options import EngineOptions
from tilth.parallel.dims import ParallelDims

HERE = "tests.engines.divided:"
EXPERTS = {"family": "qwen3_moe", "num_experts": 5, "experts_per_token": 2, "expert_size": 24, "expert_layers": (1,)}
CASES = {
    "plain": (2, {}, {}),
    "preemption": (2, {}, {"max_rows": 16, "kv_tokens": 320, "step_tokens": 40}),
    "one key head": (2, {"num_kv_heads": 1}, {}),
    "experts": (2, EXPERTS, {}),
    "drafts": (2, {}, {"draft": DraftConfig()}),
    "odd vocabulary, untied": (2, {"vocab_size": 97, "tie_embeddings": False}, {}),
}
FOUR = {
    "fewer key heads than ranks": (4, {}, {}),
    "a rank without tokens of the vocabulary": (4, {"vocab_size": 9}, {}),
}


EXPERTS = {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "expert_size": 16, "expert_layers": (0,)}


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


FAMILIES = ["deepseek-v3", *slow("gpt-oss", "gemma3", "olmo2", "olmo3", "mixtral", "qwen3-moe")]


def compare(pool, tp, changes, options, requests=8, ep=1):
    """All ranks return the same; it is what one rank says, but for rounding."""
    found = pool.run(ep * tp, HERE + "spoken", tp=tp, ep=ep, changes=changes, requests=requests, **options)
    config = config_of(changes)
    model = make_model(config)
    alone = make_engine(model, **options)
    wanted = generated(alone, requests, again="draft" in options)
    for rank in found:
        for mine, first, other in zip(rank["said"], found[0]["said"], wanted, strict=True):
            assert mine.tokens.tolist() == first.tokens.tolist() == other.tokens.tolist()
            assert (mine.id, mine.finish, mine.versions) == (other.id, other.finish, other.versions)
            assert np.array_equal(mine.logprobs, first.logprobs), "bits differ between ranks"
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=3e-5)
        assert rank["heads"] == (1 if config.latents else max(1, config.num_kv_heads // tp))
        counts = alone.stats()
        assert rank["stats"] == (counts.decoded_tokens, counts.preemptions, counts.accepted_tokens)
        assert ("draft" in options) == (counts.accepted_tokens > 0)
    held, whole = [rank["elements"] for rank in found], sum(p.numel() for p in model.parameters())
    assert max(held) < whole and sum(held) >= whole


@pytest.mark.dist
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("one key head", "drafts"))) for n in CASES]
)
def test_it_says_what_one_rank_says(pool, case):
    compare(pool, *CASES[case], requests=16 if case == "preemption" else 8)


@pytest.mark.dist
@pytest.mark.parametrize("changes", [{"num_kv_heads": 1}, *slow({})])
def test_each_rank_has_its_part_of_the_adapters_of_requests(pool, changes):
    found, (wanted,) = (pool.run(tp, HERE + "adapted", tp=tp, changes=changes) for tp in (2, 1))
    for said in found:
        for mine, first, other in zip(said, found[0], wanted, strict=True):
            assert mine.tokens.tolist() == other.tokens.tolist()
            assert np.array_equal(mine.logprobs, first.logprobs)
            np.testing.assert_allclose(mine.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.dist
@pytest.mark.parametrize("sizes", [(2, 1), *(pytest.param(s, marks=pytest.mark.slow) for s in [(4, 1), (2, 2)])])
def test_an_engine_of_divided_experts_says_what_one_rank_says(pool, sizes):
    ep, tp = sizes
    compare(pool, tp, EXPERTS, {}, ep=ep)


@pytest.mark.dist
@pytest.mark.parametrize(
    "family", ["deepseek-v3", *slow("gpt-oss", "gemma3", "olmo2", "olmo3", "mixtral", "qwen3-moe")]
)
def test_an_engine_of_any_family_over_tp_says_what_one_rank_says(pool, family):
    """The latents of multi-head latent attention are the same on all ranks; each expands them for its own heads."""
    compare(pool, 2, {"of": family, "max_positions": 256}, {}, requests=6)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize(("family", "tp"), [("deepseek-v3", 1), ("deepseek-v3", 2), ("gpt-oss", 1), ("gpt-oss", 2)])
def test_an_engine_of_any_family_over_ep_says_what_one_rank_says(pool, family, tp):
    compare(pool, tp, {"of": family, "max_positions": 256, "num_experts": 8}, {}, requests=6, ep=2)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("case", FOUR)
def test_it_says_what_one_rank_says_on_four(pool, case):
    compare(pool, *FOUR[case])


@pytest.mark.dist
def test_a_request_is_aborted_on_all_ranks(pool):
    first, second = pool.run(2, HERE + "aborted", tp=2)
    assert first == second
    ((_, finish, length),) = [found for found in first if found[0] == 1]
    assert finish == "aborted" and 0 < length < 50
    assert [found[1:] for found in first if found[0] == 2] == [("length", 50)]


@pytest.mark.dist
@pytest.mark.parametrize("how", ["requests", "seed", "version", "abort"])
def test_ranks_that_differ_are_named_on_all_of_them(pool, how):
    for told in pool.run(2, HERE + "diverged", tp=2, how=how):
        assert told.startswith("rollout.layout.tp: ranks 1 of a generation engine"), told


def test_what_such_an_engine_cannot_do_is_refused():
    dims = ParallelDims.of(Mesh.of({"tp": 2}), 0)
    for mode in ("parity", "compile"):
        with raises(EngineError, f"{mode}.tp"):
            Engine(CONFIG, EngineOptions(dims=dims, **{mode: True}))
        with raises(EngineError, f"{mode}.ep"):
            Engine(CONFIG, EngineOptions(dims=ParallelDims.of(Mesh.of({"ep": 2}), 0), **{mode: True}))
    with raises(ModelError, "layout.ep"):
        Engine(CONFIG, EngineOptions(dims=ParallelDims.of(Mesh.of({"ep": 2}), 0)))
    with raises(ModelError, "layout.tp"):
        Engine(CONFIG, EngineOptions(dims=ParallelDims.of(Mesh.of({"tp": 3}), 0)))
