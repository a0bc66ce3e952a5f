"""Verdicts of a judge: what each earns, and a truth that is none."""

import pytest

from tests.errors import raises
from tilth.core.errors import RewardError
from tilth.rewards.verifiers import builtin


def judged(completion, answer, count=4):
    return builtin("flaws")("?", completion, {"answer": str(answer), "steps": count})


@pytest.mark.parametrize(
    "completion, answer, reward, parts",
    [
        ("#-1", -1, 1.0, {"correct": 1, "exact": 1, "format": 1}),
        ("#2", 2, 1.0, {"correct": 1, "exact": 1, "format": 1, "precision": 1, "recall": 1}),
        ("#0", 2, 0.5, {"correct": 1, "exact": 0, "format": 1, "precision": 1, "recall": 1}),
        ("#2", -1, -1.0, {"correct": 0, "exact": 0, "format": 1, "precision": 0}),
        ("#-1", 2, -1.0, {"correct": 0, "exact": 0, "format": 1, "recall": 0}),
        ("#4", 2, -1.0, {"correct": 0, "exact": 0, "format": 0, "recall": 0}),
        ("??", -1, -1.0, {"correct": 0, "exact": 0, "format": 0}),
    ],
)
def test_what_a_verdict_earns(completion, answer, reward, parts):
    assert judged(completion, answer) == {"reward": reward, **parts}


@pytest.mark.parametrize(
    ("info", "key"),
    [
        ({}, "steps"),
        ({"answer": "1"}, "steps"),
        ({"answer": "4", "steps": 4}, "answer"),
        ({"answer": "-2", "steps": 4}, "answer"),
        ({"answer": "0", "steps": 0}, "steps"),
    ],
)
def test_a_truth_that_is_none(info, key):
    with raises(RewardError, key):
        builtin("flaws")("", "#1", info)
    assert builtin("flaws").check(info)
