"""A trajectory: which tokens are prompt, which the policy chose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilth.core.trajectory import Trajectory


def trajectory(mask):
    mask = np.array(mask, np.uint8)
    return Trajectory(3, 1, 2, np.arange(len(mask)), mask, np.zeros(len(mask), np.float32))


@pytest.mark.parametrize(
    ("mask", "prompt", "completion"),
    [([0, 0, 1, 1], 2, 2), ([0, 0, 0], 3, 0), ([1], 0, 1), ([0, 1, 1, 0, 0, 1], 1, 3), ([], 0, 0)],
)
def test_lengths(mask, prompt, completion):
    episode = trajectory(mask)
    assert (episode.prompt_length, episode.completion_length) == (prompt, completion)
    assert type(episode.prompt_length) is int and type(episode.completion_length) is int


@given(st.integers(0, 20), st.integers(0, 20))
def test_single_turn_lengths_add_up(prompt, completion):
    episode = trajectory([0] * prompt + [1] * completion)
    assert episode.prompt_length + episode.completion_length == len(episode.tokens)


def test_an_unscored_trajectory_has_no_reward():
    episode = trajectory([0, 1])
    assert episode.reward is None and episode.finish == "stop" and episode.sampling_logprobs is None
    episode.info["x"] = 1
    episode.versions.append((0, 1))
    assert trajectory([0, 1]).info == {} and trajectory([0, 1]).versions == []
