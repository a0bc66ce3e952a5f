from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tilth.plan.batch as planning
from tests.errors import raises
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import NonFiniteError, TokenCountError
from tilth.models.attention import PackedContext
from tilth.models.config import DecoderConfig
from tilth.models.decoder import Decoder
from tilth.rl.metrics import Metric
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.packed import packed_logprobs

CONFIG = DecoderConfig(
    vocab_size=11, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, qk_norm=True, tie_embeddings=True
)


def model(config=CONFIG, dtype=torch.float32):
    made = Decoder(config, dtype=dtype)
    made.init_weights_(0)
    return made


def engine(micro_tokens=10_000, on_nan="stop", seed=0, config=CONFIG, **optimizer):
    section = OptimizerConfig(**{"lr": 0.01, **optimizer})
    return TrainEngine(model(config), section, total_steps=10, micro_tokens=micro_tokens, on_nan=on_nan, seed=seed)


def batch(lengths=(5, 3, 9, 4, 7), seed=0):
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths)
    tokens = Jagged.with_lengths(rng.integers(0, 11, lengths.sum()), lengths)
    mask = np.concatenate([[0, 0] + [1] * (n - 2) for n in lengths]).astype(np.uint8)
    return tokens, mask


def weights(e):
    return torch.cat([p.detach().flatten() for p in e.model.parameters()])


def reference_loss(m, tokens, mask):
    """Mean NLL of the masked tokens: each sequence alone, dense logits, torch's own cross entropy."""
    total = torch.zeros(())
    for i in range(len(tokens.lengths)):
        ids = torch.from_numpy(tokens.row(i))
        chosen = torch.from_numpy(mask[tokens.offsets[i] : tokens.offsets[i + 1]]).bool()
        logits = m.logits(m(ids, PackedContext([len(ids)])))
        total = total + F.cross_entropy(logits[:-1], ids[1:], reduction="none")[chosen[1:]].sum()
    return total / mask.sum()


def test_loss_gradient_norm_and_step_equal_a_plain_loop():
    e, plain = engine(clip_norm=0.0), model()
    tokens, mask = batch()
    found = e.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))
    loss = reference_loss(plain, tokens, mask)
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    grads = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert found.grad_norm == pytest.approx(float(grads.norm()), rel=1e-5)
    matrices = [p for p in plain.parameters() if p.ndim > 1]
    vectors = [p for p in plain.parameters() if p.ndim == 1]
    torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0).step()
    expected = torch.cat([p.detach().flatten() for p in plain.parameters()])
    torch.testing.assert_close(weights(e), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("micro_tokens", [1, 9, 16])
def test_the_split_into_micro_batches_changes_nothing_but_rounding(micro_tokens):
    tokens, mask = batch()
    whole, split = engine(), engine(micro_tokens=micro_tokens)
    a = whole.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))
    b = split.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-5)


def test_a_denominator_per_micro_batch_would_be_seen():
    """The mistake that one global denominator excludes: a mean of means depends on the split."""
    tokens, mask = batch()

    def mean_of_means(micro):
        return -micro.logprobs.sum() / micro.mask.sum(), {}

    a = engine().update(tokens, mask, {}, mean_of_means)
    b = engine(micro_tokens=9).update(tokens, mask, {}, mean_of_means)
    assert a.loss != pytest.approx(b.loss, rel=1e-3)


def test_logprobs_equal_those_that_the_loss_sees():
    e = engine()
    tokens, mask = batch()
    seen = {}

    def loss(micro):
        seen["logprobs"] = micro.logprobs.detach().numpy()
        return -micro.logprobs.sum(), {}

    expected = packed_logprobs(e.model, tokens, mask, max_tokens=10_000)
    e.update(tokens, mask, {}, loss)
    assert np.array_equal(seen["logprobs"], expected)
    assert (expected[mask == 0] == 0).all() and (expected[mask == 1] < 0).all()


def test_temperature_divides_the_logits():
    e = engine()
    tokens, mask = batch(lengths=(6,))
    hidden = e.model(torch.from_numpy(tokens.values), PackedContext([6]))
    logits = e.model.logits(hidden)[1:5] / 2.5
    expected = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(tokens.values[2:])[:, None])[:, 0]
    found = packed_logprobs(e.model, tokens, mask, max_tokens=100, temperature=2.5)
    np.testing.assert_allclose(found[2:], expected.detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("broken", [[[0, 1], [1, 2, 3, 4]], [[0, 1, 2]]])
def test_a_row_used_twice_or_left_out_is_an_error(monkeypatch, broken):
    monkeypatch.setattr(planning, "micro_batches", lambda lengths, most: [np.array(b) for b in broken if len(lengths)])
    tokens, mask = batch()
    before = engine()
    start = weights(before).clone()
    with raises(TokenCountError, "tokens"):
        before.update(tokens, mask, {}, negative_log_likelihood(1.0))
    assert torch.equal(weights(before), start)


def nan_loss(micro):
    return micro.logprobs.sum() * float("nan"), {}


def test_a_loss_that_is_not_finite_stops_with_what_to_do():
    e = engine()
    start = weights(e).clone()
    with raises(NonFiniteError, "loss"):
        e.update(*batch(), {}, nan_loss)
    assert torch.equal(weights(e), start)


def test_weights_that_were_not_finite_are_named():
    e = engine()
    with torch.no_grad():
        e.model.model.norm.weight[0] = torch.nan
    with raises(NonFiniteError, "model.norm.weight"):
        e.update(*batch(), {}, negative_log_likelihood(1.0))


def test_or_is_skipped_and_counted_and_leaves_no_trace():
    e, clean = engine(on_nan="skip"), engine()
    tokens, mask = batch()
    loss = negative_log_likelihood(float(mask.sum()))
    assert e.update(tokens, mask, {}, nan_loss).skipped
    assert torch.equal(weights(e), weights(clean))
    assert not e.update(tokens, mask, {}, loss).skipped
    clean.update(tokens, mask, {}, loss)
    assert torch.equal(weights(e), weights(clean))


def test_the_third_in_a_row_stops_and_a_good_one_begins_the_row_again():
    e = engine(on_nan="skip")
    tokens, mask = batch()
    for _ in range(2):
        for _ in range(2):
            assert e.update(tokens, mask, {}, nan_loss).not_finite
        assert not e.update(tokens, mask, {}, negative_log_likelihood(1.0)).not_finite
    start = weights(e).clone()
    with raises(NonFiniteError, "loss"):
        for _ in range(3):
            e.update(tokens, mask, {}, nan_loss)
    assert torch.equal(weights(e), start)


def test_rows_with_numbers_that_are_not_finite_are_named_alone():
    e = engine(on_nan="skip")
    tokens, mask = batch()
    advantages = np.ones(len(mask), np.float32)
    wrong = len(tokens.lengths) - 2
    advantages[tokens.offsets[wrong] + 1] = np.inf

    def loss(micro):
        return (micro.logprobs * micro.columns["advantages"] * 0).sum(), {}

    names = {"prompt": np.arange(len(tokens.lengths)) + 70}
    assert e.update(tokens, mask, {"advantages": advantages}, loss, names=names).not_finite
    assert e.troubles[0].endswith(f"1 rows may be the cause: prompt {wrong + 70}")


def test_a_gradient_alone_names_no_row():
    e = engine(on_nan="skip")
    e.model.model.norm.weight.register_hook(lambda grad: grad * torch.inf)
    assert e.update(*batch(), {}, negative_log_likelihood(1.0)).not_finite
    assert "the loss of every row is finite" in e.troubles[0]


def test_a_batch_with_nothing_to_learn_makes_no_step():
    e = engine()
    start = weights(e).clone()
    tokens, mask = batch()
    assert e.update(tokens, np.zeros_like(mask), {}, negative_log_likelihood(0.0)).skipped
    empty = Jagged.with_lengths(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert e.update(empty, np.zeros(0, np.uint8), {}, negative_log_likelihood(0.0)).skipped
    assert torch.equal(weights(e), start)


def test_metrics_of_micro_batches_are_merged_by_their_reduction():
    tokens, mask = batch()

    def loss(micro):
        n = len(micro.ids)
        return -micro.logprobs.sum(), {"size": Metric(n, 1, "max"), "tokens": Metric(n, 1, "sum")}

    found = engine(micro_tokens=9).update(tokens, mask, {}, loss)
    assert float(found.metrics["tokens"]) == 28
    assert float(found.metrics["size"]) == 9


def test_columns_are_cut_like_the_tokens():
    tokens, mask = batch()

    def loss(micro):
        assert torch.equal(micro.columns["ids"], micro.ids)
        return -micro.logprobs.sum(), {}

    engine(micro_tokens=9).update(tokens, mask, {"ids": tokens.values}, loss)


def test_a_phase_begins_with_fresh_state_and_its_own_rate():
    e, fresh = engine(), engine()
    tokens, mask = batch()
    loss = negative_log_likelihood(float(mask.sum()))
    e.update(tokens, mask, {}, loss)
    e.begin(0.5, 7)
    assert e.lr == 0.5 and e.steps == 0 and e.updates == 1
    fresh.model.load_state_dict(e.model.state_dict())
    fresh.begin(0.5, 7)
    e.update(tokens, mask, {}, loss)
    fresh.update(tokens, mask, {}, loss)
    assert torch.equal(weights(e), weights(fresh))


def test_position_and_state_restore_the_next_update_bit_for_bit():
    config = CONFIG.__class__(**{**CONFIG.__dict__, "dropout": 0.2})
    e, other = engine(config=config, schedule="cosine"), engine(config=config, schedule="cosine")
    tokens, mask = batch()
    loss = negative_log_likelihood(float(mask.sum()))
    for _ in range(3):
        e.update(tokens, mask, {}, loss)
    other.model.load_state_dict(e.model.state_dict())
    for name, tensor in other.optimizers.state_tensors().items():
        tensor.copy_(e.optimizers.state_tensors()[name])
    unplaced = other.update(tokens, mask, {}, loss)
    other.model.load_state_dict(e.model.state_dict())
    for name, tensor in other.optimizers.state_tensors().items():
        tensor.copy_(e.optimizers.state_tensors()[name])
    other.restore(e.position())
    a, b = e.update(tokens, mask, {}, loss), other.update(tokens, mask, {}, loss)
    assert a == b and torch.equal(weights(e), weights(other))
    assert unplaced.loss != a.loss and unplaced.lr != a.lr


def test_dropout_depends_on_seed_and_step_but_not_on_the_split():
    config = CONFIG.__class__(**{**CONFIG.__dict__, "dropout": 0.2})
    tokens, mask = batch()
    loss = negative_log_likelihood(float(mask.sum()))
    a = engine(config=config).update(tokens, mask, {}, loss).loss
    b = engine(config=config, micro_tokens=9).update(tokens, mask, {}, loss).loss
    c = engine(config=config, seed=1).update(tokens, mask, {}, loss).loss
    assert a == pytest.approx(b, rel=1e-6)
    assert a != pytest.approx(c, rel=1e-4)


def test_an_update_without_dropout_is_that_of_a_model_that_has_none():
    tokens, mask = batch()
    loss = negative_log_likelihood(float(mask.sum()))
    plain, dropping = engine(), engine(config=CONFIG.__class__(**{**CONFIG.__dict__, "dropout": 0.2}))
    a, b = plain.update(tokens, mask, {}, loss), dropping.update(tokens, mask, {}, loss, dropout=False)
    assert a == b and torch.equal(weights(plain), weights(dropping))


def test_checkpointing_of_activations_changes_no_bit():
    tokens, mask = batch()
    loss = negative_log_likelihood(float(mask.sum()))
    plain, lean = engine(), engine()
    lean.model.checkpointing = True
    plain.update(tokens, mask, {}, loss)
    lean.update(tokens, mask, {}, loss)
    assert torch.equal(weights(plain), weights(lean))


def test_bf16_activations_train_fp32_parameters():
    tokens, mask = batch()
    e = TrainEngine(model(dtype=torch.bfloat16), OptimizerConfig(lr=0.01), total_steps=30, micro_tokens=100)
    loss = negative_log_likelihood(float(mask.sum()))
    losses = [e.update(tokens, mask, {}, loss).loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.dtype == torch.float32 for p in e.model.parameters())


@pytest.mark.slow
def test_compiled_training_equals_eager_and_tells_its_warm_up():
    tokens, mask = batch()
    loss = negative_log_likelihood(float(mask.sum()))
    eager = engine()
    compiled = TrainEngine(model(), OptimizerConfig(lr=0.01), total_steps=10, micro_tokens=10_000, compile=True)
    a, b = eager.update(tokens, mask, {}, loss), compiled.update(tokens, mask, {}, loss)
    assert a.loss == pytest.approx(b.loss, rel=1e-5)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
    assert compiled.compile_seconds > 0.5


@pytest.mark.parametrize("lengths", [[7], [5, 5, 9, 3]])
def test_timing_passes_leaves_no_trace(lengths):
    timed, plain = engine(), engine()
    tokens, mask = batch()
    loss = negative_log_likelihood(float(mask.sum()))
    for one in (timed, plain):
        one.update(tokens, mask, {}, loss)
    before = timed.position()
    assert timed.time_passes(lengths) > 0
    assert timed.position() == before and all(p.grad is None for p in timed.model.parameters())
    found = [one.update(tokens, mask, {}, loss) for one in (timed, plain)]
    assert found[0].loss == found[1].loss and found[0].grad_norm == found[1].grad_norm
    for a, b in zip(timed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_micro_batches_move_each_its_share_of_activations_and_the_weights_are_the_same():
    config = replace(CONFIG, num_layers=3)
    section, found, shares = OptimizerConfig(lr=0.01), [], []
    tokens, mask = batch()
    table = planning.RowTable.of(tokens, mask)
    plan = planning.plan_rows(table, planning.MicroBatchLimits(10))
    learn = tuple(micro._replace(offload=at / 4) for at, micro in enumerate(plan.learn))
    for offload, how in ((0.0, {}), (0.6, {}), (0.6, {"plan": plan._replace(learn=learn)})):
        e = TrainEngine(model(config), section, total_steps=10, micro_tokens=10, offload=offload)
        if offload:
            e.model.offload.least, begin = 1, e.model.offload.begin
            e.model.offload.begin = lambda *size, o=e.model.offload, begin=begin: shares.append(o.ratio) or begin(*size)
        result = e.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())), **how)
        found.append((result.loss, weights(e)))
        assert bool(offload) == (e.model.offload is not None and e.model.offload.bytes > 0)
    assert shares == [0.6] * len(learn) + [at / 4 for at in range(len(learn))] and len(learn) > 2
    for loss, learned in found[1:]:
        assert loss == found[0][0] and torch.equal(learned, found[0][1])
