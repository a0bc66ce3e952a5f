"""The reward model role: what its scores become in the column of rewards."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.roles.test_experience import trajectory
from tilth.cluster.backends.inline import InlineStore
from tilth.roles import pairs
from tilth.roles.experience import to_batch
from tilth.roles.pairs import PART, RatingWorker


@pytest.mark.parametrize("alone", [True, False])
def test_a_score_that_fp32_cannot_work_with_makes_the_reward_missing(monkeypatch, alone):
    store = InlineStore()
    batch = to_batch([trajectory(i, [1, 2], [3], "x") for i in range(5)], store)
    batch = batch.with_rows(reward=np.float32([1, 1, 1, np.nan, 1]))
    scores = np.float32([0.5, 3e38, np.inf, 0.5, -1e30])
    monkeypatch.setattr(pairs, "ratings", lambda *args, **kwargs: scores)
    worker = RatingWorker(SimpleNamespace(), store, weight=2.0, micro_tokens=64, parity=False)
    found = worker.rate(batch, alone=alone)
    expected = [1.0, np.nan, np.nan, 1.0, np.nan] if alone else [2.0, np.nan, np.nan, np.nan, np.nan]
    assert np.array_equal(found["reward"], np.float32(expected), equal_nan=True)
    assert np.isfinite(found[PART]).tolist() == [True, True, False, True, True]
