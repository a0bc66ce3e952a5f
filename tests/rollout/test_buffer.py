"""Growing columns of a conversation against plain lists, turn by turn."""

import numpy as np
import pytest

from tilth.core.trajectory import Segment, Trajectory
from tilth.rollout.buffer import TrajectoryBuffer, joined, parted


def turned(rng, prompt, count, version, filtered):
    """What an engine returns for a request with this prompt."""
    n = len(prompt) + count
    mask = (np.arange(n) >= len(prompt)).astype(np.uint8)
    logprobs = np.where(mask, -rng.random(n), 0).astype(np.float32)
    t = Trajectory(9, 0, 0, np.array([*prompt, *rng.integers(0, 50, count)], np.int64), mask, logprobs)
    t.sampling_logprobs = logprobs / 2 if filtered else None
    t.versions = [(len(prompt), version)] if count else []
    t.routing = np.arange(2 * n, dtype=np.uint8).reshape(n, 2)
    return t


def conversation(rng, turns, filtered=False):
    """A buffer after some turns, and the lists that it should hold."""
    made, rows, segments, versions = TrajectoryBuffer(), [], [], []
    ids = rng.integers(0, 50, 3)
    for turn in range(turns):
        if turn:
            ids = rng.integers(0, 50, rng.integers(1, 5))
            made.read("tool", ids)
        segments.append(Segment("tool" if turn else "user", len(rows)))
        rows += [(int(i), 0, 0.0, 0.0) for i in ids]
        t = turned(rng, made.tokens if turn else ids, int(rng.integers(0 if turn else 1, 6)), turn // 2, filtered)
        made.take(t)
        new = slice(len(rows), None)
        if len(t.tokens) > len(rows):
            segments.append(Segment("assistant", len(rows)))
            versions += [(len(rows), turn // 2)] * (not versions or versions[-1][1] != turn // 2)
        sampling = t.logprobs if t.sampling_logprobs is None else t.sampling_logprobs
        rows += zip(*(column[new].tolist() for column in (t.tokens, t.mask, t.logprobs, sampling)))
    return made, rows, segments, versions


def columns(t):
    return [t.tokens.tolist(), t.mask.tolist(), t.logprobs.tolist(), t.sampling_logprobs.tolist()]


@pytest.mark.parametrize("seed", range(20))
def test_a_buffer_holds_what_its_turns_had(seed):
    made, rows, segments, versions = conversation(np.random.default_rng(seed), 1 + seed % 7, filtered=True)
    before = made.tokens
    t = joined(3, 4, 5, [made], 0, cut=False)
    assert (t.id, t.prompt, t.group, t.segments, t.versions) == (3, 4, 5, segments, versions)
    assert columns(t) == [list(column) for column in zip(*rows)]
    short = joined(3, 4, 5, [made], 0, cut=True)
    assert short.mask[-1] == 1 and columns(short) == [list(c[: len(short.tokens)]) for c in zip(*rows)]
    assert not t.mask[len(short.tokens) :].any() and len(short.routing) == len(short.tokens)
    made.read("tool", range(100))
    assert before.tolist() == [row[0] for row in rows]


def test_conversations_are_joined_and_parted():
    """One of them is drawn through filters, the other is not: its log-probs are those that it was drawn from."""
    rng = np.random.default_rng(0)
    made = [conversation(rng, 3, filtered=filtered) for filtered in (True, False)]
    whole = joined(0, 0, 0, [one for one, *_ in made], 1, cut=False)
    assert whole.opened == [len(made[0][1])] and len(whole.sampling_logprobs) == len(whole.tokens) == len(whole.routing)
    for part, (_, rows, segments, versions) in zip(parted(whole), made, strict=True):
        assert columns(part) == [list(column) for column in zip(*rows)]
        assert (part.segments, part.versions) == (segments, versions)
        again = joined(0, 0, 0, [TrajectoryBuffer.of(part, [])], 0, cut=False)
        assert columns(again) == columns(part) and again.segments == segments and again.versions == versions


def test_rewards_of_a_turn_add_up_at_its_last_token():
    made, rows, *_ = conversation(np.random.default_rng(1), 1)
    for reward in (1.0, 0.0, 2.0):
        made.pay(reward)
    assert made.rewards == [(len(rows) - 1, 3.0)]
