import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.training.cutting import micros
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import LossMaskError
from tilth.core.trajectory import OPENS
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.plan.batch import COPIES, MicroBatchLimits, RowTable, prefix_groups, prompt_lengths
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.packed import (
    model_input,
    packed_logprobs,
    packed_squares,
    plan_micros,
    score,
    shares_prompts,
)

CPU = torch.device("cpu")


def group(prompt, completions):
    return [(list(prompt), list(c)) for c in completions]


def batch(samples):
    rows = [np.array(p + c, np.int64) for p, c in samples]
    mask = [np.array([0] * len(p) + [1] * len(c), np.uint8) for p, c in samples]
    return Jagged.of(rows), np.concatenate(mask) if mask else np.zeros(0, np.uint8)


SAMPLES = st.lists(
    st.tuples(st.sampled_from([[1], [1, 2], [2, 1, 3]]), st.lists(st.integers(0, 9), max_size=4)), max_size=12
)


def model(seed=0):
    made = Decoder(
        DecoderConfig(vocab_size=10, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, qk_norm=True)
    )
    made.init_weights_(seed)
    return made


@given(SAMPLES)
def test_prompt_lengths_equal_a_loop(samples):
    tokens, mask = batch(samples)
    found = prompt_lengths(Jagged(mask, tokens.offsets))
    assert found.tolist() == [len(p) for p, _ in samples]


@given(SAMPLES, st.integers(1, 40))
def test_groups_are_a_partition_into_equal_prompts(samples, most):
    tokens, mask = batch(samples)
    groups = prefix_groups(RowTable.of(tokens, mask), most)
    assert sorted(int(r) for g in groups for r in g) == list(range(len(samples)))
    for g in groups:
        assert len({tuple(samples[r][0]) for r in g}) == 1


def test_a_tree_has_a_greatest_size():
    long = [0] * 128
    tokens, mask = batch(group([1, 2], [long, long, long, long]) + group([3], [[0] * 512]))
    groups = prefix_groups(RowTable.of(tokens, mask), 260)
    sizes = [int(tokens.lengths[g].sum() - (len(g) - 1) * 2) for g in groups if len(g) > 1]
    assert sizes == [258, 258]
    assert sum(len(g) for g in groups) == 5


def test_the_copies_of_a_long_prompt_take_room_in_a_micro_batch():
    """100 samples of one token after a prompt of 400: 500 tokens are computed, 40,100 keys and values are copied."""
    prompt = list(range(400))
    tokens, mask = batch(group(prompt, [[1]] * 100) + group(prompt[::-1], [[1]] * 100))
    found = [micro for _, micro in micros(tokens, mask, {}, 16_384, CPU, share=True)]
    assert [m.computed for m in found] == [500, 500]
    assert all(len(m.ids) // COPIES <= 16_384 for m in found)


@given(SAMPLES, st.integers(1, 30), st.booleans())
def test_micro_batches_use_every_token_once_and_keep_columns_aligned(samples, most, share):
    tokens, mask = batch(samples)
    used = np.zeros(len(mask), int)
    for index, micro in micros(tokens, mask, {"copy": tokens.values}, most, CPU, share=share):
        used[index] += 1
        assert torch.equal(micro.columns["copy"], micro.ids)
        assert micro.ids.tolist() == tokens.values[index].tolist()
        assert int(micro.lengths.sum()) == len(micro.ids)
        assert micro.computed <= most or len(micro.lengths) == 1 or micro.trees is not None
    assert (used == 1).all()


def test_sharing_computes_a_prompt_once():
    tokens, mask = batch(group([1, 2, 3, 4, 5, 6], [[7], [8], [9], [7]]))
    computed = {s: sum(m.computed for _, m in micros(tokens, mask, {}, 100, CPU, share=s)) for s in (False, True)}
    assert computed == {False: 28, True: 10}


def test_sharing_little_is_not_worth_it():
    tokens, mask = batch(group([1], [[2] * 20, [3] * 20]))
    assert all(m.trees is None for _, m in micros(tokens, mask, {}, 100, CPU, share=True))


@pytest.mark.parametrize("most", [12, 1000])
def test_logprobs_and_gradients_with_shared_prompts_are_those_without(most):
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(5):
        prompt = rng.integers(0, 10, rng.integers(2, 7)).tolist()
        samples += group(prompt, [rng.integers(0, 10, rng.integers(1, 6)).tolist() for _ in range(4)])
    tokens, mask = batch(samples)
    found = {}
    for share in (False, True):
        made, logprobs = model(), np.zeros(len(mask), np.float32)
        for index, micro in micros(tokens, mask, {}, most, CPU, share=share):
            score(made, micro, made(*model_input(micro)), temperature=0.7, entropy=True)
            logprobs[index] = micro.logprobs.detach().numpy()
            (micro.logprobs.sum() + 0.3 * micro.entropy.sum()).backward()
        found[share] = logprobs, torch.cat([p.grad.flatten() for p in made.parameters()])
    np.testing.assert_allclose(found[True][0], found[False][0], atol=2e-6)
    torch.testing.assert_close(found[True][1], found[False][1], rtol=1e-4, atol=1e-5)


def test_parity_never_shares():
    tokens, mask = batch(group([1, 2, 3, 4], [[5], [6], [7]]))
    made = model()
    exact = packed_logprobs(made, tokens, mask, max_tokens=100, parity=True)
    one_by_one = [batch(group([1, 2, 3, 4], [[last]])) for last in (5, 6, 7)]
    alone = [packed_logprobs(made, *one, max_tokens=100, parity=True) for one in one_by_one]
    assert np.array_equal(exact, np.concatenate(alone))


@pytest.mark.parametrize("parity", [False, True])
def test_conversations_of_a_sequence_see_themselves_alone(parity):
    """A row of three conversations has the log-probs and gradients of three rows; its neighbour is another one."""
    rng = np.random.default_rng(0)
    talks = group([1, 2, 3], [rng.integers(0, 10, n).tolist() for n in (5, 1, 7)]) + group([4], [[5, 6]])
    apart, mask = batch(talks)
    whole, opens = Jagged(apart.values, apart.offsets[[0, 3, 4]]), np.zeros(len(mask), np.uint8)
    opens[apart.offsets[1:3]] = 1
    made, found = model(), []
    for tokens, columns in ((apart, {}), (whole, {OPENS: opens}), (whole, {})):
        found.append(packed_logprobs(made, tokens, mask, max_tokens=7, parity=parity, columns=columns))
    assert np.array_equal(*found[:2]) if parity else np.allclose(*found[:2], atol=2e-6)
    assert not np.allclose(found[0], found[2], atol=1e-3)
    steps = []
    for tokens, columns in ((apart, {}), (whole, {OPENS: opens})):
        engine = TrainEngine(model(), OptimizerConfig(lr=0.01), total_steps=1, micro_tokens=9, parity=parity)
        engine.update(tokens, mask, columns, negative_log_likelihood(float(mask.sum())))
        steps.append(torch.cat([p.detach().flatten() for p in engine.model.parameters()]))
    torch.testing.assert_close(*steps, rtol=1e-4, atol=1e-5)


def test_what_cannot_share_does_not():
    """Dynamic rope depends on the length of each sample."""
    plain = {"vocab_size": 10, "hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2}
    dynamic = {"family": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    shape = {"dynamic": dynamic, "plain": {}}
    found = {name: shares_prompts(DecoderConfig(**plain, **extra), parity=False) for name, extra in shape.items()}
    assert found == {"dynamic": False, "plain": True}
    assert not shares_prompts(DecoderConfig(**plain), parity=True)


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("most", [5, 30, 1000])
def test_squares_come_with_the_log_probs(parity, most):
    """The log-probs of ``packed_logprobs`` to the bit, and sums of squares that logits made one by one have."""
    made = model()
    with torch.no_grad():
        made.head_weight.mul_(8)  # far from uniform
    tokens, mask = batch(group([1, 2, 3], [[5, 1], [6], [7, 7, 2]]) + group([4], [[9, 0]]))
    settings = {"max_tokens": most, "temperature": 0.7, "parity": parity}
    logprobs, squares = packed_squares(made, tokens, mask, **settings)
    assert np.array_equal(logprobs, packed_logprobs(made, tokens, mask, **settings))
    for row, start in zip(np.split(tokens.values, tokens.offsets[1:-1]), tokens.offsets):
        hidden = made(torch.from_numpy(row), PackedContext(torch.tensor([len(row)]), CPU))
        p = (made.head_logits(hidden, made.head_weight).double() / 0.7).softmax(-1).square().sum(-1)
        found = squares[start + 1 : start + len(row)]
        expected = np.where(mask[start + 1 : start + len(row)], p[:-1].detach().numpy(), 0)
        np.testing.assert_allclose(found, expected, atol=2e-6)
    assert squares.dtype == np.float32 and not squares[mask == 0].any() and squares[mask != 0].std() > 0.01


# ---- no state comes before the first token of a sequence ----


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("first", [([], [4, 5]), ([], [4])])
def test_a_first_token_in_the_mask_is_refused_and_never_read_from_its_neighbour(first, parity):
    samples = [([1, 2], [3]), first, ([3], [])]
    tokens, mask = batch(samples)
    for call in (
        lambda: packed_logprobs(model(), tokens, mask, max_tokens=100, parity=parity),
        lambda: packed_squares(model(), tokens, mask, max_tokens=3, parity=parity),
        lambda: list(micros(tokens, mask, {}, 100, CPU, share=True)),
        lambda: TrainEngine(model(), OptimizerConfig(), total_steps=1, micro_tokens=100, parity=parity).update(
            tokens, mask, {}, negative_log_likelihood(3.0)
        ),
    ):
        with raises(LossMaskError, "mask.1"):
            call()


@given(SAMPLES, st.data())
def test_only_a_first_token_in_the_mask_is_refused(samples, data):
    """Sequences without a token, first and last, are none to complain of."""
    tokens, _ = batch(samples)
    rows = [tokens.row(i)[: data.draw(st.integers(0, len(tokens.row(i))))] for i in range(len(samples))]
    mask = [np.array([data.draw(st.integers(0, 1)) for _ in row], np.uint8) for row in rows]
    cut, masked = Jagged.of(rows), np.concatenate([*mask, np.zeros(0, np.uint8)])
    if any(len(m) and m[0] for m in mask):
        with pytest.raises(LossMaskError):
            plan_micros(cut, masked, MicroBatchLimits(8, share=True))
    else:
        plan_micros(cut, masked, MicroBatchLimits(8, share=True))
