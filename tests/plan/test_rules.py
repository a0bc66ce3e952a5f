"""Rules of parameters: every parameter of every decoder has one, and nothing else has."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.test_shape import shapes
from tilth.core.errors import ModelError
from tilth.plan.rules import RULES, is_block_matrix, rule_of
from tilth.plan.shape import Shape, matrices, parameter_shapes

FULL = Shape(7, 6, 8, 12, 2, 2, 3, qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True)
NAMES = sorted({**parameter_shapes(FULL), **parameter_shapes(FULL, value=True)})


@given(shapes, st.booleans())
def test_what_a_parameter_is_goes_with_its_dimensions(shape, value):
    for name, sizes in parameter_shapes(shape, value=value).items():
        assert (rule_of(name).kind == "matrix") == (len(sizes) == 2), name


@given(shapes)
def test_block_matrices_are_all_matrices_of_the_layers(shape):
    found = {name: rows * columns for name, (rows, *rest) in parameter_shapes(shape).items() for columns in rest}
    assert sum(size for name, size in found.items() if is_block_matrix(name)) == matrices(shape)


def test_each_name_has_one_rule_and_each_rule_a_name():
    of = {name: [pattern for pattern in RULES if re.fullmatch(pattern, name)] for name in NAMES}
    assert all(len(patterns) == 1 for patterns in of.values())
    assert {pattern for (pattern,) in of.values()} == set(RULES)


@given(st.sampled_from(NAMES), st.data())
def test_a_name_that_is_changed_anywhere_has_none(name, data):
    at = data.draw(st.integers(0, len(name)))
    more = data.draw(st.text("abdefgmq_.", min_size=1, max_size=6))
    cut = data.draw(st.integers(at, len(name)))
    changed = name[:at] + more + name[cut:]
    if changed not in NAMES:
        with pytest.raises(ModelError, match=re.escape(changed)):
            rule_of(changed)
