"""Trees of samples that share a prompt, against the same samples as separate sequences."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tilth.core.batch import Jagged
from tilth.models.attention import PackedContext, matmul_pays
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.models.rows import spread_rows
from tilth.models.tree import TreeContext, plant

SHAPES = {
    "plain": {},
    "grouped heads": {"num_kv_heads": 2},
    "window": {"sliding_window": 4, "window_layers": (1,), "family": "mistral", "qk_norm": False},
}


def model(**shape):
    base = {
        "vocab_size": 13,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "qk_norm": True,
    }
    made = Decoder(DecoderConfig(**{**base, **shape})).double()
    made.dtype = torch.float64
    made.init_weights_(0)
    return made


def samples(prompts, completions, seed=0):
    """Rows, their prompt lengths and their groups: completions[g] lists the completion lengths of group g."""
    rng = np.random.default_rng(seed)
    rows, lengths, groups = [], [], []
    for prompt, group in zip(prompts, completions):
        shared = rng.integers(0, 13, prompt)
        groups.append(np.arange(len(rows), len(rows) + len(group)))
        rows += [np.concatenate([shared, rng.integers(0, 13, n)]) for n in group]
        lengths += [prompt] * len(group)
    return Jagged.of(rows), np.array(lengths), groups


def compare(made, tokens, prompts, groups):
    ids = torch.from_numpy(tokens.values)
    apart = made(ids, PackedContext(tokens.lengths))
    trees = plant(tokens, prompts, groups)
    together = made(ids[torch.from_numpy(trees.source)], TreeContext(trees))[torch.from_numpy(trees.slot)]
    torch.testing.assert_close(together, apart, rtol=1e-9, atol=1e-9)
    return trees


@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_those_of_separate_sequences(shape):
    tokens, prompts, groups = samples([5, 3, 7], [[2, 6, 1], [4], [3, 3]])
    trees = compare(model(**SHAPES[shape]), tokens, prompts, groups)
    assert len(trees.source) == 5 + 9 + 7 + 7 + 6 < len(tokens.values)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 7), min_size=1, max_size=5)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_any_groups(made, seed):
    tokens, prompts, groups = samples([p for p, _ in made], [c for _, c in made], seed)
    compare(model(), tokens, prompts, groups)


WIDE = [5, 300, 40], [[2, 90, 31, 1, 64], [33, 7], [17, 200, 3]]
"""Prompts and completions of very different lengths: several groups of queries and of keys."""


@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_far_apart(shape):
    tokens, prompts, groups = samples(*WIDE)
    compare(model(**SHAPES[shape]), tokens, prompts, groups)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("shape", SHAPES)
def test_compute_dtypes_take_plain_matmuls_and_agree(shape, dtype, bound):
    tokens, prompts, groups = samples(*WIDE)
    made = model(**SHAPES[shape]).float()
    made.dtype = dtype
    assert matmul_pays(256, dtype, torch.device("cpu")) and not matmul_pays(256, torch.float64, torch.device("cpu"))
    ids, trees = torch.from_numpy(tokens.values), plant(tokens, prompts, groups)
    with torch.no_grad():
        apart = made(ids, PackedContext(tokens.lengths))
        together = made(ids[torch.from_numpy(trees.source)], TreeContext(trees))[torch.from_numpy(trees.slot)]
    assert float((apart - together).abs().max()) <= bound
    assert float((apart - apart.roll(1, 0)).abs().max()) > 10 * bound


def test_a_prompt_is_queried_once():
    """Slots are the tokens that ask and those that are seen, and fillers up to the longest: here all make one group."""
    tokens, prompts, groups = samples([16], [[48] * 8])
    context = TreeContext(plant(tokens, prompts, groups))
    assert len(context._asked) == (1 + 8) * 48 < len(tokens.values)
    assert len(context._seen) == (1 + 8) * 64


@given(st.lists(st.integers(0, 5), min_size=6, max_size=30), st.integers(0, 4))
def test_spread_rows_adds_up_the_gradients_of_all_images(index, fillers):
    index = np.array([0, 1, 2, 3, 4, 5, *index])
    real = len(index)
    order = np.argsort(index, kind="stable")
    first = np.cumsum(np.bincount(index)) - np.bincount(index)
    slots = torch.from_numpy(np.append(index, np.zeros(fillers, np.int64)))
    x = torch.randn(6, 2, 3, dtype=torch.float64, requires_grad=True)
    out = spread_rows(x, slots, torch.from_numpy(order), torch.from_numpy(first))
    assert torch.equal(out, x[slots])
    weight = torch.randn(real + fillers, 2, 3, dtype=torch.float64)
    (out * weight).sum().backward()
    expected = torch.zeros(6, 2, 3, dtype=torch.float64).index_add_(0, slots[:real], weight[:real])
    torch.testing.assert_close(x.grad, expected)


def test_gradients_are_those_of_separate_sequences():
    tokens, prompts, groups = samples([5, 3], [[2, 6, 1], [4, 4]])
    grads = []
    for shared in (False, True):
        made = model()
        ids = torch.from_numpy(tokens.values)
        if shared:
            trees = plant(tokens, prompts, groups)
            out = made(ids[torch.from_numpy(trees.source)], TreeContext(trees))[torch.from_numpy(trees.slot)]
        else:
            out = made(ids, PackedContext(tokens.lengths))
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        (out * weight).sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in made.parameters() if p.grad is not None]))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-8, atol=1e-10)


def test_a_branch_does_not_see_another():
    tokens, prompts, groups = samples([4], [[3, 3]])
    made, trees = model(), plant(tokens, prompts, groups)
    ids = torch.from_numpy(tokens.values)[torch.from_numpy(trees.source)]
    before = made(ids, TreeContext(trees))
    other = ids.clone()
    other[-1] = (other[-1] + 1) % 13  # the end of the second branch
    after = made(other, TreeContext(trees))
    assert torch.equal(before[:-1], after[:-1]) and not torch.equal(before[-1], after[-1])


def test_a_branch_that_saw_another_would_be_seen():
    """The comparison can fail: with all tokens in one branch the values differ."""
    tokens, prompts, groups = samples([4], [[3, 3]])
    trees = plant(tokens, prompts, groups)
    wrong = trees._replace(branch=np.minimum(trees.branch, 1))
    ids = torch.from_numpy(tokens.values)[torch.from_numpy(trees.source)]
    made = model()
    assert not torch.allclose(made(ids, TreeContext(wrong)), made(ids, TreeContext(trees)))
