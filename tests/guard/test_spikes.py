"""Jumps of a metric."""

import math
import random

from tilth.flows.step_log import LEAST, SpikeRule


def test_a_jump_is_reported_once_and_a_new_level_is_none():
    rule, noise = SpikeRule("grad_norm"), random.Random(3)
    assert not any(rule.add(1 + noise.random()) for _ in range(200))
    assert "grad_norm is 40" in rule.add(40.0)
    assert not rule.add(40.0) and not rule.add(1.0)
    assert rule.add(40.0)
    assert not any(rule.add(40.0) for _ in range(200))
    assert not rule.add(100.0)


def test_nothing_is_a_jump_at_the_beginning_nor_what_is_not_finite():
    rule = SpikeRule("loss")
    assert not any(rule.add(10.0**i) for i in range(LEAST))
    assert not rule.add(math.nan) and not rule.add(math.inf)


def test_a_median_of_zero_makes_no_jump():
    rule = SpikeRule("loss")
    assert not any(rule.add(0.0) for _ in range(50)) and not rule.add(1.0)
