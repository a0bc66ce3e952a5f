import numpy as np
import pytest
import torch

from tests.training.test_engine import batch, model, nan_loss, weights
from tilth.config.schema import OptimizerConfig
from tilth.training.engine import TrainEngine, negative_log_likelihood
from tilth.training.optim import Average


def engine(ema=0.9, **more):
    return TrainEngine(model(), OptimizerConfig(lr=0.02), total_steps=20, micro_tokens=1000, ema=ema, **more)


def flat(e):
    return torch.cat([t.flatten() for t in e.ema.tensors.values()])


def learn(e, seed=0):
    tokens, mask = batch(seed=seed)
    return e.update(tokens, mask, {}, negative_log_likelihood(float(mask.sum())))


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9, 0.999, 1.0])
def test_it_is_the_sum_over_all_earlier_weights_in_float64(decay):
    """The definition, not the recurrence: weights_0 decay^t + (1 - decay) sum of decay^(t - s) weights_s."""
    rng = np.random.default_rng(0)
    path = rng.normal(size=(12, 7))
    parameter = torch.nn.Parameter(torch.tensor(path[0], dtype=torch.float32))
    average = Average({"w": parameter}, decay)
    for row in path[1:]:
        parameter.data.copy_(torch.from_numpy(row))
        average.follow()
    if decay == 0:
        assert average.tensors == {}
        return
    powers = decay ** np.arange(11)[::-1]
    expected = decay**11 * path[0] + (1 - decay) * (powers[:, None] * path[1:]).sum(0)
    found = average.tensors["w"]
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-6, atol=1e-6)


def test_constant_weights_are_their_own_average_from_the_first_step_on():
    """An average that began at zeros would need a correction; a copy needs none."""
    parameter = torch.nn.Parameter(torch.full((3,), 5.0))
    average = Average({"w": parameter}, 0.99)
    for _ in range(3):
        average.follow()
        torch.testing.assert_close(average.tensors["w"], parameter.data, rtol=1e-6, atol=0)


def test_small_steps_are_not_lost_to_rounding():
    """In bf16 an average of decay 0.999 would never move: its parts are below half a unit in the last place."""
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    average = Average({"w": parameter}, 0.999)
    parameter.data.fill_(1.5)
    for _ in range(100):
        average.follow()
    assert average.tensors["w"].dtype == torch.float32
    np.testing.assert_allclose(average.tensors["w"].numpy(), 1.5 - 0.5 * 0.999**100, rtol=1e-5)


def test_an_engine_follows_each_applied_step():
    e, oracle = engine(), None
    for seed in range(4):
        before = weights(e).double()
        oracle = before if oracle is None else oracle
        learn(e, seed)
        oracle = 0.9 * oracle + 0.1 * weights(e).double()
    torch.testing.assert_close(flat(e).double(), oracle, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(flat(e), weights(e), atol=1e-4)


def test_a_skipped_step_does_not_count():
    e = engine(on_nan="skip")
    learn(e)
    before = flat(e).clone()
    assert e.update(*batch(), {}, nan_loss).skipped
    tokens, mask = batch()
    assert e.update(tokens, np.zeros_like(mask), {}, negative_log_likelihood(0.0)).skipped
    assert torch.equal(flat(e), before)
    learn(e)
    assert not torch.equal(flat(e), before)


def test_a_phase_begins_with_a_copy_of_its_weights():
    e = engine()
    learn(e)
    assert not torch.equal(flat(e), weights(e))
    e.begin(0.01, 5)
    assert torch.equal(flat(e), weights(e))


def test_it_changes_nothing_about_the_training():
    a, b = engine(0.9), engine(0.0)
    for seed in range(3):
        assert learn(a, seed) == learn(b, seed)
    assert torch.equal(weights(a), weights(b))
    assert b.ema.tensors == {}


def test_restored_in_place_it_goes_on_bit_for_bit():
    whole, other = engine(), engine()
    learn(whole)
    learn(whole, 1)
    other.model.load_state_dict(whole.model.state_dict())
    for name, tensor in other.optimizers.state_tensors().items():
        tensor.copy_(whole.optimizers.state_tensors()[name])
    for name, tensor in other.ema.tensors.items():
        tensor.copy_(whole.ema.tensors[name])
    other.restore(whole.position())
    learn(whole, 2)
    learn(other, 2)
    assert torch.equal(flat(whole), flat(other))
