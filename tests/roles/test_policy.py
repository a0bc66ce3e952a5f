"""The policy role, called directly: what it adds to a batch, what an update reports, what it refuses."""

import math

import numpy as np
import pytest
import torch

import tilth.rl as rl
from tests.errors import raises
from tests.roles import small
from tilth.cluster.backends.inline import InlineStore
from tilth.config.schema import OptimizerConfig
from tilth.core.batch import Jagged
from tilth.core.errors import TokenCountError, TokenIdentityError
from tilth.core.layout import Mesh
from tilth.models.attention import PackedContext
from tilth.models.decoder import Decoder
from tilth.parallel.dims import ParallelDims
from tilth.parallel.sharded import ShardedModel, shard
from tilth.rl.metrics import Metric
from tilth.roles import policy as roles_policy
from tilth.roles.experience import TURN_REWARDS, put_like
from tilth.roles.objective import WEIGHT, Objective, alone, check_weight, gather_data_ranks
from tilth.roles.policy import PolicyWorker
from tilth.roles.reference import ReferenceWorker
from tilth.training.engine import TrainEngine


@pytest.fixture
def worker():
    return small.policy()


@pytest.fixture
def batch(worker):
    return small.experience(worker)


def column(worker, batch, name):
    return batch.read(worker.store, name)[name]


def dense_logprobs(model, tokens: Jagged, temperature=1.0):
    """The reference: one sequence at a time, whole logits, float64 softmax."""
    found = np.zeros(len(tokens.values))
    for i, start in enumerate(tokens.offsets[:-1]):
        ids = torch.from_numpy(tokens.row(i))
        with torch.no_grad():
            logits = model.logits(model(ids, PackedContext([len(ids)]))).double() / temperature
        logp = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
        found[start + 1 : start + len(ids)] = logp.numpy()
    return found


def with_dropout(store, p: float) -> PolicyWorker:
    """A policy whose model drops while it learns from given text; the same weights whatever p is."""
    model = Decoder(small.config(dropout=p))
    model.init_weights_(1)
    engine = TrainEngine(model, OptimizerConfig(lr=1e-2), total_steps=10, micro_tokens=64, seed=1)
    return PolicyWorker(engine, store)


# ---- dropout ----


@pytest.mark.parametrize("again", [False, True])
def test_a_policy_gradient_is_that_of_the_policy_which_sampled_whatever_the_dropout(again):
    """Not of one with its dropout mask: the bits are those of a model without dropout, and the first ratio is 1."""
    found = []
    for p in (0.0, 0.5):
        worker = with_dropout(InlineStore(), p)
        batch = worker.advantages(small.experience(worker), small.HOW)
        metrics = worker.update(worker.logprobs(batch) if again else batch, small.HOW)
        assert float(metrics["ratio"]) == pytest.approx(1, abs=1e-6)
        found.append(torch.cat([t.flatten() for _, t in worker.weights()]))
    assert torch.equal(*found)


def test_learning_from_given_text_drops():
    found = []
    for p in (0.0, 0.5):
        worker = with_dropout(InlineStore(), p)
        worker.sft_step(small.experience(worker))
        found.append(torch.cat([t.flatten() for _, t in worker.weights()]))
    assert not torch.allclose(*found, atol=1e-4)


# ---- advantages ----


@pytest.mark.parametrize("name", ["grpo", "grpo_no_std", "rloo"])
def test_advantages_are_those_of_rl_estimate(worker, batch, name):
    found = column(worker, worker.advantages(batch, small.algorithm(advantage=name)), "advantages")
    tokens, mask = column(worker, batch, "tokens"), column(worker, batch, "mask").values
    expected = rl.estimate(
        name,
        rewards=torch.from_numpy(batch["reward"]),
        lengths=torch.from_numpy(tokens.lengths),
        mask=torch.from_numpy(mask),
        groups=torch.from_numpy(batch["group"]),
    )
    assert np.array_equal(found.values, expected.advantages.numpy())
    assert np.array_equal(found.offsets, tokens.offsets)
    assert found.values.dtype == np.float32 and not found.values[mask == 0].any() and found.values.any()


def test_advantages_of_centred_rewards_by_hand(worker, batch):
    found = column(worker, worker.advantages(batch, small.HOW), "advantages")
    for row in range(len(batch)):
        mates = batch["reward"][batch["group"] == batch["group"][row]]
        assert found.row(row)[-1] == pytest.approx(batch["reward"][row] - mates.mean(), abs=1e-6)


def test_advantages_leave_the_batch_that_was_given_as_it_was(worker, batch):
    before, rewards = set(batch.payload), batch["reward"].copy()
    worker.advantages(batch, small.HOW)
    assert set(batch.payload) == before and np.array_equal(batch["reward"], rewards)


# ---- log-probs ----


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_one_sequence_at_a_time(temperature):
    worker = small.policy(temperature=temperature, micro_tokens=24)
    batch = small.experience(worker, temperature=temperature)
    found = column(worker, worker.logprobs(batch), "old_logprobs").values
    tokens, mask = column(worker, batch, "tokens"), column(worker, batch, "mask").values
    expected = dense_logprobs(worker.engine.model, tokens, temperature) * mask
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(found - column(worker, batch, "rollout_logprobs").values).max() < 1e-5
    assert not found[mask == 0].any() and (found[mask == 1] < 0).all()


def test_logprobs_follow_a_selection_of_rows(worker, batch):
    whole = column(worker, worker.logprobs(batch), "old_logprobs")
    some = np.array([7, 2, 3])
    part = column(worker, worker.logprobs(batch.select(some)), "old_logprobs")
    assert np.allclose(part.values, whole.take(some).values, atol=1e-6)


def test_a_batch_without_rows_has_no_logprobs(worker, batch):
    empty = batch.select(np.zeros(len(batch), bool))
    assert len(column(worker, worker.logprobs(empty), "old_logprobs").values) == 0


# ---- update ----


def test_an_update_moves_the_weights_and_reports_what_it_did(worker, batch):
    before = {n: t.clone() for n, t in worker.weights()}
    ready = worker.advantages(batch, small.HOW)
    found = worker.update(ready, small.HOW)
    tokens, mask = column(worker, batch, "tokens"), column(worker, batch, "mask").values
    assert any(not torch.equal(t, before[n]) for n, t in worker.weights())
    assert float(found["tokens/trained"]) == tokens.offsets[-1]
    assert float(found["steps/skipped"]) == 0 and float(found["lr"]) == pytest.approx(1e-2)
    assert float(found["grad_norm"]) > 0 and float(found["ratio"]) == pytest.approx(1.0, abs=1e-6)
    assert float(found["mismatch/max"]) < 1e-5 and int(found["entropy"].count) == mask.sum()
    assert 0 < float(found["entropy"]) < np.log(small.TOKENIZER.vocab_size)
    # On-policy the loss is minus the mean advantage of the tokens, and the clip takes nothing.
    advantages = column(worker, ready, "advantages").values
    assert float(found["loss"]) == pytest.approx(-advantages.sum() / mask.sum(), abs=1e-6)
    assert float(found["clip_low"]) == float(found["clip_high"]) == 0
    assert WEIGHT not in found


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_split_into_micro_batches_does_not_change_an_update(aggregation):
    how = small.HOW.updated(aggregation=aggregation, entropy_coef=0.01)
    found = []
    for micro_tokens in (4096, 30):
        worker = small.policy(micro_tokens=micro_tokens)
        metrics = worker.update(worker.advantages(small.experience(worker), how), how)
        found.append((metrics, dict(worker.weights())))
    (whole, weights), (split, others) = found
    for name in ("loss", "grad_norm", "entropy", "tokens/trained"):
        assert float(split[name]) == pytest.approx(float(whole[name]), rel=1e-4, abs=1e-6)
    assert all(torch.allclose(weights[n], others[n], atol=1e-4) for n in weights)


def test_an_update_without_rows_is_a_skipped_step(worker, batch):
    before = {n: t.clone() for n, t in worker.weights()}
    ready = worker.advantages(batch, small.HOW).select(np.zeros(len(batch), bool))
    found = worker.update(ready, small.HOW)
    assert float(found["steps/skipped"]) == 1 and float(found["tokens/trained"]) == 0
    assert all(torch.equal(t, before[n]) for n, t in worker.weights())


def test_tokens_that_were_edited_in_the_store_are_refused(worker, batch):
    ready = worker.advantages(batch, small.HOW)
    for handle in ready.payload["tokens"].handles:
        worker.store.get(handle).values[-1] ^= 1
    with raises(TokenIdentityError, f"trajectory.{batch['id'][-1]}.tokens"):
        worker.update(ready, small.HOW)


# ---- one weight for the whole batch ----


def test_the_weights_of_parts_must_add_up(worker, batch):
    tokens, mask = column(worker, batch, "tokens"), column(worker, batch, "mask").values
    whole = Objective.of(small.HOW, mask, tokens).shared.whole
    assert whole == pytest.approx(1.0)  # token-mean: every token weighs 1 / tokens
    check_weight({WEIGHT: Metric(whole, 1, "sum")}, whole, ParallelDims.alone())


def divided(rank: int, own: bool) -> str:
    """An update on two ranks; own: each divides by what it has itself."""
    mesh = Mesh(("dp", "fsdp", "tp"), (2, 1, 1))
    model = shard(lambda: Decoder(small.config()), ParallelDims.of(mesh, rank))
    model.init_(1)
    store = InlineStore()
    worker = PolicyWorker(TrainEngine(model, OptimizerConfig(), total_steps=1, micro_tokens=64), store)
    batch = small.experience(small.policy(store))
    part = batch.with_rows(row=np.arange(len(batch))).select(np.arange(len(batch)) % 3 == rank)  # 4 rows each
    if own:
        roles_policy.gather_data_ranks = lambda grid: alone
    try:
        worker.update(worker.advantages(part, small.HOW), small.HOW)
    except TokenCountError as error:
        return str(error)
    finally:
        roles_policy.gather_data_ranks = gather_data_ranks
    return ""


@pytest.mark.dist
def test_a_denominator_of_one_s_own_is_told_on_every_rank(pool):
    assert pool.run(2, "tests.roles.test_policy:divided", own=False) == ["", ""]
    for said in pool.run(2, "tests.roles.test_policy:divided", own=True):
        assert "weigh 2 in the loss, their whole batch 1" in said


def test_a_dropped_token_is_told(worker, batch):
    tokens, mask = column(worker, batch, "tokens"), column(worker, batch, "mask").values
    whole = Objective.of(small.HOW, mask, tokens).shared.whole
    with raises(TokenCountError, "weight"):
        check_weight({WEIGHT: Metric(whole - 1 / mask.sum(), 1, "sum")}, whole, ParallelDims.alone())


def test_a_loss_that_drops_a_token_stops_the_update(worker, batch, monkeypatch):
    whole = rl.aggregate

    def forgets_one(name, values, *, mask, lengths, **options):
        mask = mask.clone()
        mask[torch.nonzero(mask)[0]] = 0
        return whole(name, values, mask=mask, lengths=lengths, **options)

    ready, calls = worker.advantages(batch, small.HOW), []

    def only_in_parts(name, values, **columns):
        calls.append(name)  # the first call weighs the whole batch, the later ones its parts
        return whole(name, values, **columns) if len(calls) == 1 else forgets_one(name, values, **columns)

    monkeypatch.setattr(rl, "aggregate", only_in_parts, raising=False)
    with raises(TokenCountError, "weight"):
        worker.update(ready, small.HOW)


def test_no_metric_of_weight_is_a_weight_of_zero():
    check_weight({}, 0.0, ParallelDims.alone())
    with pytest.raises(TokenCountError):
        check_weight({}, 1.0, ParallelDims.alone())


def test_options_are_the_recipe_s_keys_that_the_entry_has():
    how = small.algorithm(clip_low=0.1, kl_coef=0.5)
    found = how.options("losses", "ppo_clip")
    assert found["clip_low"] == 0.1 and found["kl_coef"] == 0.5 and "steps" not in found
    assert how.options("advantages", "grpo_no_std") == {}


# ---- the reference ----


def reference(worker) -> ReferenceWorker:
    sharded = ShardedModel.alone(Decoder(small.config()).requires_grad_(False))
    settings = {"temperature": worker.temperature, "micro_tokens": worker.engine.micro_tokens, "parity": False}
    found = ReferenceWorker(sharded, worker.store, **settings)
    found.receive(worker.weights(), 0)
    return found


def test_a_reference_stays_where_it_was_until_it_receives_anew(worker, batch):
    other = reference(worker)
    first = column(worker, worker.logprobs(batch), "old_logprobs").values
    worker.update(worker.advantages(batch, small.HOW), small.HOW)
    moved = column(worker, worker.logprobs(batch), "old_logprobs").values
    assert np.array_equal(column(worker, other.logprobs(batch), "ref_logprobs").values, first)
    assert not np.array_equal(moved, first)
    other.receive(worker.weights(), 1)
    assert np.array_equal(column(worker, other.logprobs(batch), "ref_logprobs").values, moved)
    assert other.fingerprint() == small.checksums(worker.weights())


def test_what_the_reference_holds_is_a_copy(worker):
    mine = {p.data_ptr() for p in worker.engine.model.parameters()}
    assert not mine & {p.data_ptr() for p in reference(worker).sharded.parameters.values()}


# ---- beside the samples ----


def test_log_probs_of_policy_and_samples_are_compared_where_tokens_were_chosen(worker, batch):
    found = worker.compare(batch)["mismatch/max"]
    assert found.reduction == "max" and 0 <= float(found) < 1e-5
    handle = batch.payload["rollout_logprobs"].handles[0]
    worker.store.get(handle).values[np.flatnonzero(column(worker, batch, "mask").values)[0]] += 0.25
    assert float(worker.compare(batch)["mismatch/max"]) == pytest.approx(0.25, abs=1e-4)


# ---- supervised ----


def test_imitation_is_the_mean_negative_log_likelihood_of_the_answers(worker):
    examples = small.loader(worker.store).examples([3, 50, 99])
    tokens, mask = column(worker, examples, "tokens"), column(worker, examples, "mask").values
    expected = -(dense_logprobs(worker.engine.model, tokens) * mask).sum() / mask.sum()
    first = worker.sft_step(examples)
    assert float(first["loss"]) == pytest.approx(expected, abs=1e-5)
    assert float(first["tokens/trained"]) == tokens.offsets[-1] and "entropy" not in first
    losses = [float(worker.sft_step(examples)["loss"]) for _ in range(20)]
    assert losses[-1] < 0.7 * expected


def test_a_phase_starts_with_fresh_optimizer_state_and_its_own_rate(worker, batch):
    worker.update(worker.advantages(batch, small.HOW), small.HOW)
    worker.begin(5e-3, 7)
    assert not any(t.any() for t in worker.engine.optimizers.state_tensors().values())
    assert worker.engine.lr == 5e-3 and worker.engine.steps == 0
    assert worker.compile_seconds() == 0


def paid_by_turns(worker):
    """Experience in three rows whose turns, one to three of them, have rewards; and those rewards for each token."""
    batch, rng = small.experience(worker).select(np.arange(4)), np.random.default_rng(0)
    tokens, mask = (column(worker, batch, name) for name in ("tokens", "mask"))
    turns = np.where(mask.values != 0, rng.normal(size=len(mask.values)), 0.0).astype(np.float32)
    return put_like(batch, worker.store, TURN_REWARDS, turns, tokens), turns, mask


@pytest.mark.parametrize("keys", [{}, {"kl_in": "reward", "kl": "k1", "kl_coef": 0.5}])
def test_the_tokens_of_a_turn_get_its_reward_and_the_last_one_the_rest(worker, keys):
    batch, turns, mask = paid_by_turns(worker)
    whiten = {"options": {"whiten": False}}
    how = small.algorithm(advantage="reinforce_pp", loss="reinforce", **whiten, **keys)
    batch = worker.logprobs(batch)
    reference = column(worker, batch, "old_logprobs").values - 0.25
    batch = put_like(batch, worker.store, "ref_logprobs", reference.astype(np.float32), mask)
    found = column(worker, worker.advantages(batch, how), "advantages")
    for i in range(len(batch)):
        chosen = np.flatnonzero(mask.row(i))
        paid = [float(turns[mask.offsets[i] + t]) - (0.125 if keys else 0.0) for t in chosen]
        paid[-1] += float(batch["reward"][i]) - math.fsum(float(turns[mask.offsets[i] + t]) for t in chosen)
        to_come = [math.fsum(paid[k:]) for k in range(len(chosen))]
        np.testing.assert_allclose(found.row(i)[chosen], to_come, atol=1e-5)


def test_group_estimators_take_the_sum_of_an_episode(worker):
    batch, _, _ = paid_by_turns(worker)
    plain = small.experience(small.policy(worker.store)).select(np.arange(4))
    found = [column(worker, worker.advantages(one, small.HOW), "advantages").values for one in (batch, plain)]
    np.testing.assert_allclose(*found, atol=1e-6)
