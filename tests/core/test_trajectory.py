"""A trajectory: which tokens are prompt, which the policy chose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tilth.core.errors import TrajectoryError
from tilth.core.trajectory import ROLES, Segment, Trajectory, token_versions


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


@st.composite
def episodes(draw):
    """A random episode: its trajectory, and for each token (role, whether the policy chose it, version)."""
    truth, segments, spans, version = [], [], [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 6))):
        role, size = draw(st.sampled_from(ROLES)), draw(st.integers(1, 5))
        segments.append(Segment(role, len(truth)))
        for _ in range(size):
            chosen = role == "assistant" and len(truth) > 0 and draw(st.booleans())
            version += draw(st.integers(0, 1)) if chosen else 0
            if chosen and (not spans or spans[-1][1] != version):
                spans.append((len(truth), version))
            truth.append((role, chosen, version if chosen else 0))
    mask = np.array([chosen for _, chosen, _ in truth], np.uint8)
    tokens = np.array(draw(st.lists(st.integers(0, 9), min_size=len(truth), max_size=len(truth))), np.int64)
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    return Trajectory(0, 0, 0, tokens, mask, logprobs, segments=segments, versions=spans), truth


@given(st.lists(episodes(), max_size=4))
def test_versions_of_several_trajectories_are_those_of_each(several):
    found = token_versions([made for made, _ in several])
    assert found.dtype == np.int32 and found.tolist() == [version for _, truth in several for *_, version in truth]


@given(episodes())
def test_version_spans_cover_each_chosen_token_exactly_once(episode):
    made, _ = episode
    ends = [start for start, _ in made.versions[1:]] + [len(made.tokens)]
    spans = [range(start, end) for (start, _), end in zip(made.versions, ends)]
    assert all(sum(i in span for span in spans) == 1 for i in np.flatnonzero(made.mask))


@given(episodes())
def test_segments_tile_the_tokens(episode):
    made, truth = episode
    ends = [s.start for s in made.segments[1:]] + [len(made.tokens)]
    assert [s.role for s, end in zip(made.segments, ends) for _ in range(s.start, end)] == [
        role for role, _, _ in truth
    ]


def test_a_single_turn_is_a_user_segment_and_an_assistant_segment():
    user, assistant = ("user", 0, False), ("assistant", 0, False)
    assert trajectory([0, 0, 1, 1]).segments == [user, ("assistant", 2, False)]
    assert trajectory([0, 0]).segments == [user] and trajectory([1]).segments == [assistant]


@pytest.mark.parametrize(
    "segments, mask",
    [
        ([("user", 1)], [0, 0]), ([("user", 0), ("tool", 0)], [0, 0]), ([("user", 0), ("assistant", 2)], [0, 0]),
        ([("user", 0), ("tool", 1)], [0, 1]), ([("user", 0)], [0, 0, 0]),
        ([("user", 0), ("assistant", 1, True)], [0, 1]),
    ],
)  # fmt: skip
def test_parts_that_contradict_each_other_are_refused(segments, mask):
    """A gap, an order, an end behind the tokens, a trained token that a tool said, arrays of two lengths, a trained
    token that begins a conversation."""
    with pytest.raises(TrajectoryError):
        Trajectory(
            3, 0, 0, np.arange(2), np.array(mask, np.uint8), np.zeros(2), segments=[Segment(*s) for s in segments]
        )


@pytest.mark.parametrize("versions", [[], [(2, 0)], [(1, 0), (1, 1)], [(2, 1), (1, 0)]])
def test_version_spans_that_miss_a_chosen_token_or_overlap_are_refused(versions):
    made = Trajectory(3, 0, 0, np.arange(3), np.array([0, 1, 1], np.uint8), np.zeros(3), versions=versions)
    with raises(TrajectoryError, "versions"):
        token_versions([made])
    made.id = 4
    with pytest.raises(TrajectoryError, match="trajectory 4"):
        token_versions([trajectory([0, 0]), made, trajectory([0])])


def test_version_spans_out_of_order_are_refused_where_no_token_was_chosen():
    made = Trajectory(3, 0, 0, np.arange(2), np.zeros(2, np.uint8), np.zeros(2), versions=[(1, 5), (0, 6)])
    with raises(TrajectoryError, "versions"):
        token_versions([made])


@pytest.mark.parametrize("paid", [[(0, 1.0)], [(2, 1.0), (1, 1.0)], [(9, 1.0)], [(1, 1.0), (1, 2.0)]])
def test_rewards_of_turns_are_at_chosen_tokens_in_order(paid):
    with raises(TrajectoryError, "turn_rewards"):
        Trajectory(3, 1, 2, np.arange(3), np.uint8([0, 1, 1]), np.zeros(3, np.float32), turn_rewards=paid)
