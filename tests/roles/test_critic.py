"""The critic role, called directly: what it adds to a batch, what an update reports, what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import tilth.rl as rl
from tests.errors import raises
from tests.roles import small
from tilth.config.schema import OptimizerConfig
from tilth.core.errors import TokenCountError, TokenIdentityError
from tilth.models.attention import PackedContext
from tilth.models.converters import ValueModel
from tilth.roles.critic import CriticWorker, value_loss
from tilth.roles.objective import WEIGHT
from tilth.training.engine import TrainEngine
from tilth.training.packed import appraise

HOW = small.algorithm(advantage="gae")


def critic(worker, *, clip=0.2, lr=1e-2, micro_tokens=4096, parity=False, knowing=True, **section):
    """Of a policy worker's model and store; ``knowing``: with a head that says something."""
    model = ValueModel(worker.engine.model)
    if knowing:
        with torch.no_grad():
            model.score.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    engine = TrainEngine(
        model,
        OptimizerConfig(lr=lr, **section),
        total_steps=10,
        micro_tokens=micro_tokens,
        parity=parity,
        scorer=appraise,
    )
    return CriticWorker(engine, worker.store, clip=clip)


@pytest.fixture
def policy():
    return small.policy()


@pytest.fixture
def batch(policy):
    return small.experience(policy)


def test_a_critic_learns_without_dropout(policy, batch):
    """Its clip compares with values that were found without."""
    found = []
    for p in (0.0, 0.5):
        policy.engine.model.config = replace(policy.engine.model.config, dropout=p)
        judge = critic(policy)
        judge.update(ready(policy, judge, batch), HOW)
        found.append(torch.cat([t.flatten() for t in judge.engine.model.parameters()]))
    assert torch.equal(*found)


def ready(policy, judge, batch, how=HOW):
    return policy.advantages(judge.values(batch), how)


def column(worker, batch, name):
    return batch.read(worker.store, name)[name]


def weights(judge):
    return torch.cat([p.detach().flatten() for p in judge.model.parameters()])


# ---- values ----


def test_values_are_those_of_one_prefix_at_a_time(policy, batch):
    judge = critic(policy, micro_tokens=30)
    tokens, mask = column(policy, batch, "tokens"), column(policy, batch, "mask").values
    found = column(policy, judge.values(batch), "values")
    for row, start in enumerate(tokens.offsets[:-1]):
        for t in range(len(tokens.row(row))):
            ids = torch.from_numpy(tokens.row(row)[:t])
            if not mask[start + t]:
                assert found.values[start + t] == 0
                continue
            with torch.no_grad():
                expected = judge.model.score(judge.model(ids, PackedContext([t])))[-1]
            assert found.values[start + t] == pytest.approx(float(expected), abs=1e-5)
    assert found.values.dtype == np.float32 and found.values.any()


def test_a_critic_that_has_learned_nothing_values_nothing(policy, batch):
    assert not column(policy, critic(policy, knowing=False).values(batch), "values").values.any()


def test_values_follow_a_selection_of_rows(policy, batch):
    judge = critic(policy)
    some = np.array([7, 2, 3])
    whole, part = (column(policy, judge.values(b), "values") for b in (batch, batch.select(some)))
    assert np.allclose(part.values, whole.take(some).values, atol=1e-6)


# ---- advantages and returns ----


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.5)])
def test_advantages_with_values_are_those_of_rl_estimate(policy, batch, gamma, lam):
    how = HOW.updated(gamma=gamma, lam=lam)
    made = ready(policy, critic(policy), batch, how)
    tokens, values = column(policy, made, "tokens"), column(policy, made, "values")
    expected = rl.estimate(
        "gae",
        rewards=torch.from_numpy(batch["reward"]),
        lengths=torch.from_numpy(tokens.lengths),
        mask=torch.from_numpy(column(policy, batch, "mask").values),
        groups=None,
        values=torch.from_numpy(values.values),
        gamma=gamma,
        lam=lam,
    )
    for name in ("advantages", "returns"):
        found = column(policy, made, name)
        assert np.array_equal(found.values, expected[name].numpy()) and np.array_equal(found.offsets, tokens.offsets)


def test_a_cut_completion_is_worth_its_reward_and_nothing_after_the_cut(policy, batch):
    """No bootstrap at rollout.max_tokens: the return before the last token is the reward, however it finished."""
    finish = np.arange(len(batch)) % 2  # stop, length, stop, ...
    made = ready(policy, critic(policy), batch.with_rows(finish=finish.astype(np.int8)), HOW)
    returns, values = column(policy, made, "returns"), column(policy, made, "values")
    for row in range(len(batch)):
        assert returns.row(row)[-1] == pytest.approx(batch["reward"][row], abs=1e-6)
        # lam = gamma = 1: so is every return of the row
        chosen = column(policy, made, "mask").row(row) == 1
        assert np.allclose(returns.row(row)[chosen], batch["reward"][row], atol=1e-6)
        assert values.row(row)[chosen].any()


def test_estimators_without_returns_put_none(policy, batch):
    made = policy.advantages(batch, small.HOW)
    assert "returns" not in made.payload and "values" not in made.payload


# ---- update ----


def test_an_update_moves_the_critic_only_and_reports_what_it_did(policy, batch):
    judge = critic(policy)
    before, policys = weights(judge), [t.clone() for _, t in policy.weights()]
    made = ready(policy, judge, batch)
    found = judge.update(made, HOW)
    mask = column(policy, made, "mask").values == 1
    values, returns = (column(policy, made, c).values[mask].astype(np.float64) for c in ("values", "returns"))
    assert not torch.equal(weights(judge), before)
    assert all(torch.equal(a, b) for a, (_, b) in zip(policys, policy.weights()))
    assert float(found["value/loss"]) == pytest.approx(0.5 * ((values - returns) ** 2).mean(), rel=1e-5)
    assert float(found["value/mean"]) == pytest.approx(values.mean(), abs=1e-6)
    assert float(found["value/return"]) == pytest.approx(returns.mean(), abs=1e-6)
    assert float(found["value/explained"]) == pytest.approx(1 - (returns - values).var() / returns.var(), abs=1e-5)
    assert float(found["value/clipped"]) == 0 and float(found["value/skipped"]) == 0
    assert float(found["value/lr"]) == pytest.approx(1e-2) and float(found["value/grad_norm"]) > 0
    assert WEIGHT not in found and all(name.startswith("value/") for name in found)


def test_the_first_update_begins_at_the_very_values_that_were_read(policy, batch):
    """Old values have the same numerics as the update: with a clip of almost nothing, nothing is clipped."""
    for parity in (False, True):
        judge = critic(policy, clip=1e-30, parity=parity)
        assert float(judge.update(ready(policy, judge, batch), HOW)["value/clipped"]) == 0


def test_a_second_update_is_held_by_the_clip(policy, batch):
    shares = {}
    for clip in (0.001, 0.0):
        judge = critic(policy, clip=clip)
        made = ready(policy, judge, batch)
        judge.update(made, HOW)
        shares[clip] = float(judge.update(made, HOW)["value/clipped"])
    assert shares[0.0] == 0 < shares[0.001]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_the_split_into_micro_batches_does_not_change_an_update(policy, batch, aggregation):
    how, found = HOW.updated(aggregation=aggregation), []
    for micro_tokens in (4096, 30):
        judge = critic(policy, micro_tokens=micro_tokens)
        found.append((judge.update(ready(policy, judge, batch, how), how), weights(judge)))
    (whole, a), (split, b) = found
    assert set(whole) == set(split)
    for name, metric in whole.items():
        assert float(split[name]) == pytest.approx(float(metric), rel=1e-4, abs=1e-6), name
    assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.slow
def test_a_critic_learns_the_value_of_states(policy, batch):
    judge = critic(policy, knowing=False, clip=0.0)
    made = ready(policy, judge, batch)
    found = [judge.update(made, HOW) for _ in range(60)]
    explained = [float(m["value/explained"]) for m in found]
    assert explained[0] == pytest.approx(0, abs=1e-6) and explained[-1] > 0.3
    assert float(found[-1]["value/loss"]) < 0.7 * float(found[0]["value/loss"])


def test_an_update_without_rows_is_a_skipped_step(policy, batch):
    judge = critic(policy)
    before = weights(judge)
    found = judge.update(ready(policy, judge, batch.select(np.zeros(len(batch), bool))), HOW)
    assert float(found["value/skipped"]) == 1 and torch.equal(weights(judge), before)


# ---- invariants ----


def test_tokens_that_were_edited_in_the_store_are_refused(policy, batch):
    judge = critic(policy)
    made = ready(policy, judge, batch)
    for handle in made.payload["tokens"].handles:
        policy.store.get(handle).values[-1] ^= 1
    with raises(TokenIdentityError, f"trajectory.{batch['id'][-1]}.tokens"):
        judge.update(made, HOW)


def test_a_loss_that_drops_a_token_stops_the_update(policy, batch, monkeypatch):
    whole, calls = rl.aggregate, []
    judge = critic(policy)
    made = ready(policy, judge, batch)

    def forgets_one(name, values, *, mask, **columns):
        calls.append(name)  # the first call weighs the whole batch, the later ones its parts
        if len(calls) > 1:
            mask = mask.clone()
            mask[torch.nonzero(mask)[0]] = 0
        return whole(name, values, mask=mask, **columns)

    monkeypatch.setattr(rl, "aggregate", forgets_one, raising=False)
    with raises(TokenCountError, "weight"):
        judge.update(made, HOW)


def test_parts_with_denominators_of_their_own_are_told(policy, batch, monkeypatch):
    judge = critic(policy, micro_tokens=30)
    made = ready(policy, judge, batch)
    plain = rl.aggregate
    monkeypatch.setattr(
        rl, "aggregate", lambda *a, denominator, **columns: plain(*a, denominator=None, **columns), raising=False
    )
    with raises(TokenCountError, "weight"):
        judge.update(made, HOW)


def test_a_token_used_twice_is_told(policy, batch, monkeypatch):
    import tilth.training.engine as engine

    judge, plain = critic(policy), engine.cut
    made = ready(policy, judge, batch)

    def twice(*arguments, **options):
        for pair in plain(*arguments, **options):
            yield pair
            yield pair

    monkeypatch.setattr(engine, "cut", twice)
    with raises(TokenCountError, "tokens"):
        judge.update(made, HOW)


def test_the_weight_of_a_whole_batch(policy, batch):
    tokens, mask = column(policy, batch, "tokens"), column(policy, batch, "mask").values
    assert value_loss(HOW.aggregation, mask, tokens, 0.2)[1] == pytest.approx(1.0)
    assert value_loss(HOW.updated(aggregation="token-sum").aggregation, mask, tokens, 0.2)[1] == mask.sum()


# ---- phases ----


def test_a_phase_starts_with_fresh_optimizer_state_and_its_own_rate(policy, batch):
    judge = critic(policy)
    judge.update(ready(policy, judge, batch), HOW)
    judge.begin(5e-3, 7)
    assert not any(t.any() for t in judge.engine.optimizers.state_tensors().values())
    assert judge.engine.lr == 5e-3 and judge.engine.steps == 0


def test_it_follows_the_policy_and_forgets(policy, batch):
    judge = critic(policy)
    judge.update(ready(policy, judge, batch), HOW)
    policy.update(policy.advantages(batch, small.HOW), small.HOW)
    judge.receive(policy.weights(), 0)
    own = dict(judge.model.named_parameters())
    assert all(torch.equal(own[name], tensor) for name, tensor in policy.weights() if name in own)
    assert not column(policy, judge.values(batch), "values").values.any()


def test_it_keeps_state_of_its_own(policy, batch):
    """Muon for the matrices of the blocks and AdamW for the rest, the head among them, as the policy's optimizer."""
    judge = critic(policy, name="muon")
    kinds = judge.engine.optimizers.state_tensors()
    assert "exp_avg.score.weight" in kinds and "momentum_buffer.model.layers.0.mlp.up_proj.weight" in kinds
    shared = {t.data_ptr() for t in judge.model.parameters()} & {t.data_ptr() for _, t in policy.weights()}
    assert not shared


def test_only_a_value_model_is_a_critic(policy):
    with pytest.raises(TypeError):
        CriticWorker(policy.engine, policy.store)
