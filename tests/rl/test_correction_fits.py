"""Which corrections fit which losses: nothing may be corrected twice."""

import math

import pytest
import torch

from tests.errors import raises
from tilth import rl
from tilth.core.errors import RecipeError

PRESETS = rl.names()["corrections"]
RATIO_FREE = {("reinforce", None), ("reinforce", 0.0), ("gpg", None)}


@pytest.mark.parametrize(
    "name, cap", [*((n, None) for n in rl.names()["losses"]), ("reinforce", 0.0), ("reinforce", 2.0)]
)
def test_a_loss_says_whether_it_takes_a_ratio(name, cap):
    """By its gradient at two old policies; only where they make no difference may weights stand for the ratio."""
    options = {} if cap is None else {"cap": cap}
    gradients = []
    for old in (-1.0, -1.1):
        logprobs = torch.tensor([-1.0, -1.2], dtype=torch.float64, requires_grad=True)
        rl.policy_loss(
            name, logprobs=logprobs, old_logprobs=torch.full((2,), old, dtype=torch.float64), mask=torch.ones(2),
            advantages=torch.tensor([1.0, -2.0]), lengths=torch.tensor([1, 1]), uniforms=torch.tensor([0.3, 0.6]),
            **options,
        ).loss.backward()  # fmt: skip
        gradients.append(logprobs.grad)
    entry = rl.loss_entry(name, **options)
    assert entry.takes_ratio == (not torch.equal(*gradients)) == ((name, cap) not in RATIO_FREE)
    twice = rl.check("custom", ["rollout_logprobs", "old_logprobs"], {"bypass": True, "level": "token"})
    if not entry.takes_ratio:
        return twice.fits(entry)
    with raises(RecipeError, "algorithm.correction"):
        twice.fits(entry)


def test_a_weight_counts_once():
    """rho = 1.5, A = 1: the gradient is -1.5; with the loss's own weight beside it, it would be its square."""
    one, rollout = torch.ones(1), torch.tensor([-1.0 - math.log(1.5)])
    columns = {"rollout_logprobs": rollout, "mask": one, "lengths": torch.tensor([1])}
    found = rl.correct("bypass_pg_token_icepop", old_logprobs=-one, **columns)

    def gradient(**options):
        logprobs = (-one).requires_grad_()
        result = rl.policy_loss(
            "reinforce", logprobs=logprobs, old_logprobs=rollout, advantages=one, weights=found.weights, **options,
            **{k: columns[k] for k in ("mask", "lengths")},
        )  # fmt: skip
        result.loss.backward()
        return logprobs.grad.item()

    assert gradient() == pytest.approx(-1.5) and gradient(cap=2.0) == pytest.approx(-2.25)
    for name in (n for n in PRESETS if n.startswith("bypass_pg")):
        entry = rl.check(name, ["rollout_logprobs", "old_logprobs"])
        entry.fits(rl.loss_entry("reinforce"))
        if not entry.weighted:
            entry.fits(rl.loss_entry("reinforce", cap=2.0))
            continue
        with raises(RecipeError, "algorithm.correction"):
            entry.fits(rl.loss_entry("reinforce", cap=2.0))


def test_a_loss_that_does_not_fit():
    columns = ["rollout_logprobs", "old_logprobs"]
    with raises(RecipeError, "algorithm.loss"):
        rl.check("bypass_pg_is", columns).fits(rl.loss_entry("ppo_clip"))
    with raises(RecipeError, "algorithm.loss"):
        rl.check("bypass_ppo_clip", columns).fits(rl.loss_entry("reinforce"))
    twice = rl.check("custom", columns, {"bypass": True, "level": "token"})
    with raises(RecipeError, "algorithm.correction"):
        twice.fits(rl.loss_entry("gspo"))
    twice.fits(rl.loss_entry("gpg"))
    for loss_name in ("ppo_clip", "gspo", "cispo"):
        rl.check("decoupled_token_is", columns).fits(rl.loss_entry(loss_name))
        rl.check("none", []).fits(rl.loss_entry(loss_name))
