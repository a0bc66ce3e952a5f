"""Learning rate, momentum and progress where the batch of a step changes (Dynamic SGD)."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.flows import tiny
from tests.parallel.layouts import Case, batch, build, copied, engine_of, loss_of, weights
from tilth.core.errors import RecipeError
from tilth.parallel.sharded import ShardedModel
from tilth.training.optim import BatchScale, lr_factor


def test_a_larger_batch_raises_the_rate_over_a_ramp_and_a_smaller_one_lowers_it_at_once():
    scale = BatchScale(ramp=4, linear=True)
    scale.change(3.0, 10)
    assert [scale.factor(t) for t in (10, 11, 12, 14, 99)] == [1.0, 1.5, 2.0, 3.0, 3.0]
    scale.change(4.0, 12)  # within the ramp: from where it is
    assert [scale.factor(t) for t in (12, 14, 16)] == [2.0, 3.0, 4.0]
    scale.change(1.0, 13)
    assert scale.factor(13) == 1.0
    scale.change(4.0, 20)
    assert BatchScale(4, False, 4.0, 1.0, 20).factor(24) == scale.factor(24) ** 0.5 == 2.0


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])), max_size=8), st.integers(0, 6)
)
def test_the_rate_stays_between_those_of_both_batches(changes, ramp):
    scale, now = BatchScale(ramp, True), 0
    for wait, share in changes:
        now += wait
        low, high = sorted((scale.factor(now), share))
        scale.change(share, now)
        found = [scale.factor(now + i) for i in range(ramp + 2)]
        assert all(low <= one <= high for one in found) and found[-1] == share


def learn(engine, steps=1):
    tokens, mask = batch()
    rates = []
    for _ in range(steps):
        rates.append(engine.update(tokens, mask, {}, loss_of(Case(), mask)).lr)
    return rates


def begun(name="lars", ramp=4, **optimizer):
    sharded = ShardedModel.alone(build(Case()))
    sharded.load_(weights(Case()))
    return engine_of(Case(), sharded, optimizer={"name": name, "lr": 0.5, "ramp_steps": ramp, **optimizer})


@pytest.mark.parametrize("name", ["lars", "adamw"])
def test_a_kill_within_a_ramp_changes_no_bit(name):
    ends = []
    for killed in (False, True):
        engine = begun(name, lr=0.5 if name == "lars" else 1e-3)
        learn(engine, 2)
        engine.tune(engine.peak_lr, 100, share=4.0)
        learn(engine, 2)
        if killed:
            state, weight, position = (
                copied(engine.optimizers.state_tensors()), copied(engine.sharded.parameters), engine.position(),
            )  # fmt: skip
            engine = begun(name)
            for kept, own in ((state, engine.optimizers.state_tensors()), (weight, engine.sharded.parameters)):
                for key, tensor in own.items():
                    tensor.data.copy_(kept[key])
            engine.restore(position)
            engine.tune(engine.peak_lr, 100, share=4.0)
        rates = learn(engine, 4)
        ends.append((rates, copied(engine.sharded.parameters)))
    assert ends[0][0] == ends[1][0] and len(set(ends[0][0])) == 3
    assert all(torch.equal(ends[1][1][name], tensor) for name, tensor in ends[0][1].items())


def test_the_same_batch_changes_no_bit():
    ends = []
    for tuned in (False, True):
        engine = begun("adamw", lr=1e-3)
        learn(engine, 2)
        if tuned:
            engine.tune(engine.peak_lr, 100, share=1.0)
        learn(engine, 2)
        ends.append(copied(engine.sharded.parameters))
        assert "batch/share" not in engine.position()
    assert all(torch.equal(ends[1][name], tensor) for name, tensor in ends[0].items())


def test_the_schedule_goes_by_samples():
    engine = begun("adamw", ramp=0, schedule="cosine", warmup_steps=2, lr=1.0)
    engine.tune(1.0, 20)
    learn(engine, 4)
    engine.tune(1.0, 20, share=2.0)
    places = (4, 6, 8, 10)
    found = learn(engine, 4)
    assert found == pytest.approx([2**0.5 * lr_factor("cosine", at, 20, 2) for at in places])
    assert engine.steps == 12


def test_momentum_that_has_the_rate_in_it_is_corrected():
    engine = begun("lars", ramp=0)
    learn(engine)
    ((own, _),) = engine.optimizers._parts
    before = {p: state["velocity"].clone() for p, state in own.state.items()}
    engine.optimizers.rescale(3.0)
    assert all(torch.equal(state["velocity"], 3 * before[p]) for p, state in own.state.items())


def test_noise_after_a_jump_is_that_of_the_derivation():
    """Of k times the rate with k times the batch: 1 + (k - 1) mu^(2 s) times its final value, s steps later."""
    rng, mu, k = np.random.default_rng(0), 0.9, 4
    v = np.zeros(100_000)
    for _ in range(60):
        v = mu * v + rng.standard_normal(len(v))
    for s in range(6):
        final = k**2 / k / (1 - mu**2)
        assert np.var(k * v) / final == pytest.approx(1 + (k - 1) * mu ** (2 * s), rel=0.03)
        v = mu * v + rng.standard_normal(len(v)) / k**0.5


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("guard.batch", {"guard": {"batch": "scale"}}),
        ("optimizer.ramp_steps", {"optimizer": {"ramp_steps": 5}}),
        ("optimizer.plateau_steps", {"optimizer": {"plateau_steps": 5}}),
        ("optimizer.plateau_steps", {"optimizer": {"schedule": "plateau", "warmup_steps": 4, "plateau_steps": 5}}),
    ],
)
def test_keys_that_contradict_each_other_are_refused(tmp_path, key, sections):
    with raises(RecipeError, key):
        tiny.recipe(tmp_path, **sections)
