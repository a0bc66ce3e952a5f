"""Every family in the engine: the trainer's bits in parity mode, transformers' greedy answers, prefix trees."""

import numpy as np
import pytest
import torch

from tests.engines.reference import make_engine, make_requests, naive
from tests.engines.test_parity import said, trained
from tests.models.tiny import FAMILIES, VOCAB, decoder, reference
from tilth.core.batch import Jagged
from tilth.engines.cache import KVCache
from tilth.engines.request import Request, SamplingParams
from tilth.models.attention import PackedContext
from tilth.models.tree import TreeContext, plant
from tilth.plan.shape import kv_bytes

LATER = ("gpt-oss", "olmo2", "olmo3", "gemma3", "deepseek-v3-direct")
NEW = ["deepseek-v3", *(pytest.param(name, marks=pytest.mark.slow) for name in LATER)]
KINDS = [SamplingParams(max_tokens=n, temperature=0.9, stop_tokens=(3,)) for n in (20, 60)]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", NEW)
def test_trainer_and_engine_agree_bit_for_bit(name, dtype):
    model = decoder(FAMILIES[name], dtype)  # fp32 parameters, as a trainer has them
    engine = make_engine(model, parity=True, max_rows=16, kv_tokens=640)
    found = engine.generate(make_requests(12, vocab=VOCAB, kinds=KINDS))
    assert len(said(found)) > 200
    assert np.array_equal(trained(model, found, parity=True), said(found))


@pytest.mark.parametrize("name", NEW)
def test_greedy_answers_are_those_of_transformers(name):
    model = decoder(FAMILIES[name])
    other = reference(model).eval()
    prompts = [np.arange(n) * 7 % VOCAB for n in (1, 5, 18)]
    asked = [Request(i, prompt, SamplingParams(max_tokens=30, temperature=0.0)) for i, prompt in enumerate(prompts)]
    for found, prompt in zip(make_engine(model).generate(asked), prompts):
        ids = torch.from_numpy(prompt)[None]
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 30}
        wanted = other.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert found.tokens.tolist() == wanted[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_samples_are_those_of_the_whole_sequence_forward_for_each_token(name):
    model = decoder(FAMILIES[name])
    asked = [Request(i, np.arange(3 + i), SamplingParams(max_tokens=25, temperature=0.8)) for i in range(3)]
    for found, request in zip(make_engine(model, max_rows=2).generate(asked), asked):
        assert found.tokens.tolist() == naive(model, request)[0]


@pytest.mark.parametrize("completions", [[3, 9, 1], [300, 40, 7]], ids=["short", "long"])
@pytest.mark.parametrize("name", NEW)
def test_trees_are_the_sequences_of_their_branches(name, completions):
    model = decoder(FAMILIES[name], torch.float64).double()
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, 11)
    tokens = Jagged.of([np.append(prompt, rng.integers(0, VOCAB, n)) for n in completions])
    trees = plant(tokens, np.full(3, 11), [np.arange(3)])
    ids = torch.from_numpy(tokens.values)
    with torch.no_grad():
        apart = model(ids, PackedContext(tokens.lengths))
        together = model(ids[torch.from_numpy(trees.source)], TreeContext(trees))[torch.from_numpy(trees.slot)]
    torch.testing.assert_close(together, apart, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_cache_of_latents_says_what_the_expanded_one_says():
    """Shared prefixes, preemption, growing rows: equal tokens, log-probs up to rounding, a smaller cache."""
    model = decoder(FAMILIES["deepseek-v3"])
    asked = make_requests(12, vocab=VOCAB, kinds=KINDS)
    engines = [make_engine(model, max_rows=6, kv_tokens=320, parity=parity) for parity in (False, True)]
    latent, expanded = (engine.generate(asked) for engine in engines)
    for one, other in zip(latent, expanded):
        assert np.array_equal(one.tokens, other.tokens)
    assert 0 < np.abs(said(latent) - said(expanded)).max() < 1e-4
    config = model.config
    assert kv_bytes(config, 4) == 4 * 3 * (24 + 8)
    assert kv_bytes(config, 4, latent=False) == 4 * 3 * 4 * (20 + 16)
    slabs = [KVCache(config, torch.float32, torch.device("cpu"), latent=latent) for latent in (True, False)]
    for slab in slabs:
        slab.layout(8, 16)
    assert [slab.nbytes for slab in slabs] == [8 * 16 * 4 * 32 * (3 + 1), 8 * 16 * 4 * 4 * 36 * (3 + 1)]
    assert slabs[0].values[0].data_ptr() == slabs[0].keys[0].data_ptr() and len(slabs[0].tensors) == 3
