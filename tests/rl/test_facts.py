"""What an estimator says of itself to flows, against what it does with flat groups, rewards and their scale."""

import pytest
import torch

from tilth import rl
from tilth.rl.advantages import Advantage
from tilth.rl.estimators import OF_TOKENS
from tilth.rl.registry import build

REWARDS = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 1])
FLAT = GROUPS != 1
LENGTHS = torch.tensor([1, 2, 4, 2, 3, 5, 1, 1, 3, 2])
MASK = torch.ones(int(LENGTHS.sum()))
TURNS = MASK.index_fill(0, torch.tensor([4]), 0.0)
"""A mask with two turns in the third row."""
PARTS = {"keys": ("correct", "form")}

# name, options, flat_teaches, reads_reward, relative_to_spread
TABLE = [
    ("grpo", {}, False, True, True),
    ("grpo", {"std": "biased", "singleton": "zero"}, False, True, True),
    ("grpo_process", {}, True, True, True),
    ("grpo_no_std", {}, False, True, False),
    ("rloo", {}, False, True, False),
    ("opo", {}, False, True, False),
    ("gpg", {}, False, True, True),
    ("gpg", {"count": "spread"}, False, True, True),
    ("grpo_passk", {}, False, True, True),
    ("grpo_passk", {"std": "none"}, False, True, False),
    ("gdpo", {}, True, True, True),
    ("gdpo", PARTS, True, False, True),
    ("reinforce_pp", {}, True, True, False),
    ("reinforce_pp_baseline", {}, True, True, False),
    ("remax", {}, True, True, False),
    ("optimal_token_baseline", {}, True, True, False),
    ("optimal_token_baseline", {"singleton": "zero"}, False, True, False),
    ("tir_optimal_token_baseline", {}, True, True, False),
    ("gae", {}, True, True, False),
    ("gae", {"whiten": False}, True, True, False),
    ("vapo", {}, True, True, False),
    ("distill", {}, True, False, False),
]
CASES = pytest.mark.parametrize("name, options, flat, reads, relative", TABLE)


def _noise(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _columns(entry: Advantage, seed: int, parts_by: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {}
    for number, name in enumerate(c for c in entry.needs if c not in ("rewards", "groups")):
        found[name] = _noise(len(MASK if name in OF_TOKENS else REWARDS), seed * 16 + number)
        if name.startswith("part/"):
            found[name] = (REWARDS.roll(1) if number else REWARDS) + parts_by
        if name == "logprobs":
            found[name] = -found[name].abs() - 0.1
        if name == "sum_pi_squared":
            found[name] = found[name].abs().clamp(0.1, 0.9)
    return found


def _advantages(name: str, options: dict, rewards: torch.Tensor, seed: int = 0, parts_by: float | torch.Tensor = 0.0):
    entry = build("advantages", name, options, Advantage)
    columns = _columns(entry, seed, torch.as_tensor(parts_by))
    groups = GROUPS if "groups" in entry.needs else None
    mask = TURNS if name == "grpo_process" else MASK
    return rl.estimate(
        name, rewards=rewards, groups=groups, lengths=LENGTHS, mask=mask, **columns, **options
    ).advantages


def test_every_estimator_is_asked():
    assert {name for name, *_ in TABLE} == set(rl.names()["advantages"])


@CASES
def test_what_entries_say(name, options, flat, reads, relative):
    entry = build("advantages", name, options, Advantage)
    assert (entry.flat_teaches, entry.reads_reward, entry.relative_to_spread) == (flat, reads, relative)


@CASES
def test_groups_of_equal_rewards_get_exactly_0_or_teach(name, options, flat, reads, relative):
    of_flat = torch.repeat_interleave(FLAT, LENGTHS)
    found = [_advantages(name, options, REWARDS, seed)[of_flat] for seed in range(3)]
    assert any(bool((a != 0).any()) for a in found) == flat


@CASES
def test_other_rewards_make_other_advantages_or_none_do(name, options, flat, reads, relative):
    other = REWARDS + _noise(len(REWARDS), 7)
    assert (not torch.equal(_advantages(name, options, REWARDS), _advantages(name, options, other))) == reads


@CASES
def test_a_small_penalty_is_a_small_change_or_a_large_one(name, options, flat, reads, relative):
    """A thousandth in the reward, or in its parts, moves advantages by about a thousandth, or by about one."""
    small = 1e-3 * _noise(len(REWARDS), 9)
    moved = _advantages(name, options, REWARDS + small, parts_by=small) - _advantages(name, options, REWARDS)
    assert (moved.abs().max() > 0.3) == relative, moved.abs().max()
    if not relative:
        assert moved.abs().max() < 0.02


def test_an_estimator_of_ones_own_is_trusted_with_nothing():
    """Without a word of its own no group is left out, its reward counts, and its scale is that of the reward."""
    entry = Advantage()
    assert (entry.flat_teaches, entry.reads_reward, entry.relative_to_spread) == (True, True, False)
