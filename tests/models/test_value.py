"""The value model against transformers' token classification with the same weights, and against one token at a time."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises
from tests.examples import examples
from tests.models import tiny
from tests.training.cutting import micros
from tilth.core.batch import Jagged
from tilth.core.errors import ModelError
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.converters import ValueModel
from tilth.models.decoder import Decoder
from tilth.models.hf import load_pretrained, load_weights, save_pretrained
from tilth.training.packed import appraise, model_input, packed_values

CPU = torch.device("cpu")
SMALL = DecoderConfig(vocab_size=10, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, qk_norm=True)


def critic(config=SMALL, dtype=torch.float32, seed=0):
    """A value model whose head says something."""
    made = ValueModel(tiny.decoder(config, dtype, seed))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        made.score.weight.normal_(0, 0.5, generator=generator)
        made.score.bias.fill_(0.25)
    return made


def batch(samples):
    """(prompt, completion) pairs -> tokens, mask."""
    mask = [np.array([0] * len(p) + [1] * len(c), np.uint8) for p, c in samples]
    return Jagged.of([np.array([*p, *c], np.int64) for p, c in samples]), np.concatenate(mask)


GROUPS = [([1, 2, 3, 4], [5]), ([1, 2, 3, 4], [6, 7]), ([1, 2, 3, 4], [5, 5, 0]), ([9], [1, 2]), ([9], [3, 1])]


# ---- what it is ----


@pytest.mark.parametrize("family", ["llama-none", "qwen2", "qwen3", "mistral"])
def test_it_is_transformers_token_classifier_with_one_label(family):
    """Same names, same numbers: a critic's checkpoint loads there."""
    config = tiny.FAMILIES[family]
    model, hf = critic(config), config.to_hf()
    settings = {k: v for k, v in hf.items() if k != "architectures"}
    there = transformers.AutoConfig.for_model(**settings, num_labels=1)
    other = transformers.AutoModelForTokenClassification.from_config(there, attn_implementation="eager").eval()
    other.load_state_dict(model.state_dict(), strict=True)
    ids = tiny.tokens([13])
    with torch.no_grad():
        ours = model.score(model(ids, PackedContext([13])))
        theirs = other(input_ids=ids[None]).logits[0, :, 0]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_it_begins_as_the_policys_body_without_an_output_head_and_knows_nothing(tied):
    policy = tiny.decoder(DecoderConfig(**{**SMALL.__dict__, "tie_embeddings": tied}))
    model = ValueModel(policy)
    own, theirs = dict(model.named_parameters()), dict(policy.named_parameters())
    assert set(own) - set(theirs) == {"score.weight", "score.bias"} and "lm_head.weight" not in own
    for name in set(own) & set(theirs):
        assert torch.equal(own[name], theirs[name]) and own[name].data_ptr() != theirs[name].data_ptr()
    tokens, mask = batch(GROUPS)
    assert not packed_values(model, tokens, mask, max_tokens=100).any()


def test_a_head_of_zeros_learns_all_the_same():
    """Zero weights give the body no gradient in the first step, but the head has one."""
    model = ValueModel(tiny.decoder(SMALL))
    tokens, mask = batch(GROUPS)
    (_, micro), *_ = micros(tokens, mask, {}, 100, CPU)
    appraise(model, micro, model(*model_input(micro)))
    ((micro.values - 1.0) ** 2)[micro.mask > 0].sum().backward()
    assert model.score.weight.grad.abs().sum() > 0 and model.score.bias.grad.abs() > 0


def test_from_a_hugging_face_directory(tmp_path):
    policy = tiny.decoder(tiny.FAMILIES["qwen2-window"])  # with an output head of its own
    save_pretrained(tmp_path, policy.config, policy.state_dict())
    config, tensors = load_pretrained(tmp_path)
    loaded = Decoder(config)
    load_weights(loaded, tensors)
    made, again = ValueModel(loaded), critic(tiny.FAMILIES["qwen2-window"], seed=5)
    again.follow((name, tensors[name]) for name in tensors)
    for name, parameter in ValueModel(policy).named_parameters():
        assert torch.equal(dict(made.named_parameters())[name], parameter)
        assert torch.equal(dict(again.named_parameters())[name], parameter)


def test_it_follows_weights_that_have_moved_and_forgets_what_it_knew():
    model, policy = critic(), tiny.decoder(SMALL, seed=9)
    before = model.model.embed_tokens.weight.data_ptr()
    model.follow(policy.named_parameters())
    assert torch.equal(model.model.embed_tokens.weight, policy.model.embed_tokens.weight)
    assert model.model.embed_tokens.weight.data_ptr() == before
    assert not model.score.weight.any() and not model.score.bias.any()


def test_weights_of_another_shape_are_named():
    other = tiny.decoder(DecoderConfig(**{**SMALL.__dict__, "hidden_size": 32, "head_dim": 16}))
    with raises(ModelError, "model.embed_tokens.weight.shape"):
        critic().follow(other.named_parameters())
    deeper = tiny.decoder(DecoderConfig(**{**SMALL.__dict__, "num_layers": 3}))
    with raises(ModelError, "model.layers.2.self_attn.q_proj.weight.extra"):
        critic().follow(deeper.named_parameters())
    shallow = tiny.decoder(DecoderConfig(**{**SMALL.__dict__, "num_layers": 1}))
    with raises(ModelError, "model.layers.1.self_attn.q_proj.weight.missing"):
        critic().follow(shallow.named_parameters())


# ---- its numbers ----


def one_at_a_time(model, tokens, mask):
    """The reference: the value before each chosen token, from that prefix alone."""
    found = np.zeros(len(mask), np.float32)
    for start, end in zip(tokens.offsets, tokens.offsets[1:]):
        for at in np.flatnonzero(mask[start:end]) + start:
            prefix = torch.from_numpy(tokens.values[start:at])
            with torch.no_grad():
                found[at] = model.score(model(prefix, PackedContext([len(prefix)])))[-1]
    return found


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([[1], [1, 2], [2, 1, 3, 4, 5, 6]]), st.lists(st.integers(0, 9), min_size=1, max_size=4)
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 40),
)
def test_value_at_t_is_that_of_the_tokens_before_t(samples, most):
    """Whatever the split into micro-batches, with shared prompts or without."""
    model = critic()
    tokens, mask = batch(samples)
    found = packed_values(model, tokens, mask, max_tokens=most)
    np.testing.assert_allclose(found, one_at_a_time(model, tokens, mask), atol=3e-6)
    assert found.dtype == np.float32 and not found[mask == 0].any()


def test_a_later_token_never_moves_an_earlier_value():
    model = critic()
    tokens, mask = batch([([1, 2], [3, 4, 5])])
    before = packed_values(model, tokens, mask, max_tokens=100)
    tokens.values[-2] = 8
    after = packed_values(model, tokens, mask, max_tokens=100)
    assert np.array_equal(before[:4], after[:4]) and before[4] != after[4]


@pytest.mark.parametrize("most", [12, 1000])
def test_values_and_gradients_with_shared_prompts_are_those_without(most):
    tokens, mask = batch([(p * 3, c) for p, c in GROUPS])
    found = {}
    for share in (False, True):
        model, values, trees = critic(), np.zeros(len(mask), np.float32), 0
        for index, micro in micros(tokens, mask, {}, most, CPU, share=share):
            appraise(model, micro, model(*model_input(micro)))
            values[index] = micro.values.detach().numpy()
            micro.values.square().sum().backward()
            trees += micro.trees is not None
        gradient = [p.grad.flatten() for p in model.parameters()]
        found[share] = values, torch.cat(gradient)
        assert (trees > 0) == share
    np.testing.assert_allclose(found[True][0], found[False][0], atol=2e-6)
    torch.testing.assert_close(found[True][1], found[False][1], rtol=1e-4, atol=1e-5)


def test_bf16_computes_the_body_in_bf16_and_values_in_fp32():
    exact, rough = critic(), critic(dtype=torch.bfloat16)
    tokens, mask = batch(GROUPS)
    a, b = (packed_values(m, tokens, mask, max_tokens=100) for m in (exact, rough))
    assert a.dtype == b.dtype == np.float32
    np.testing.assert_allclose(a, b, atol=0.1)
    assert not np.array_equal(a, b)
    # more digits than bf16 has: the head is not rounded
    assert any(float(torch.tensor(v).bfloat16()) != float(v) for v in b[mask == 1])
    assert all(p.dtype == torch.float32 for p in rough.parameters())


def test_parity_gives_the_same_bits_however_packed():
    model = critic()
    tokens, mask = batch(GROUPS)
    whole = packed_values(model, tokens, mask, max_tokens=100, parity=True)
    alone = [packed_values(model, *batch([g]), max_tokens=100, parity=True) for g in GROUPS]
    assert np.array_equal(whole, np.concatenate(alone))


def test_values_are_read_with_the_bits_that_an_update_begins_with():
    """No gradient and gradient take different kernels in the MLP: the numbers must be the same."""
    model = critic()
    tokens, mask = batch([(p * 3, c) for p, c in GROUPS])
    old = packed_values(model, tokens, mask, max_tokens=40)
    for index, micro in micros(tokens, mask, {}, 40, CPU, share=True):
        appraise(model, micro, model(*model_input(micro)))
        assert np.array_equal(micro.values.detach().numpy(), old[index])


def test_nothing_chosen_is_no_value():
    model = critic()
    tokens, mask = Jagged.of([np.array([1, 2, 3])]), np.zeros(3, np.uint8)
    assert not packed_values(model, tokens, mask, max_tokens=100).any()


def test_recomputing_activations_changes_no_bit():
    gradients = []
    for checkpointing in (False, True):
        policy = tiny.decoder(SMALL)
        policy.checkpointing = checkpointing
        model = ValueModel(policy)
        with torch.no_grad():
            model.score.weight.fill_(0.3)
        assert model.checkpointing == checkpointing
        (_, micro), *_ = micros(*batch(GROUPS), {}, 100, CPU)
        appraise(model, micro, model(*model_input(micro)))
        micro.values.square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*gradients)
