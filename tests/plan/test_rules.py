"""Tables of families: every parameter of every decoder has one row, and nothing else has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tests.plan.test_shape import shapes
from tilth.core.errors import ModelError
from tilth.models.config import DecoderConfig
from tilth.models.family import families
from tilth.plan.rules import VALUE_HEAD, rule_of
from tilth.plan.shape import matrices, parameter_shapes

FULL = DecoderConfig(7, 6, 8, 12, 2, 2, 4, qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True)
TABLE = FULL.table + VALUE_HEAD
NAMES = sorted({**parameter_shapes(FULL), **parameter_shapes(FULL, value=True)})


@given(shapes(), st.booleans())
def test_what_a_parameter_is_goes_with_its_dimensions(shape, value):
    for name, sizes in parameter_shapes(shape, value=value).items():
        assert (rule_of(TABLE, name).kind in ("matrix", "embedding")) == (len(sizes) == 2), name


@given(shapes())
def test_matrices_are_all_matrices_of_the_layers(shape):
    found = {name: rows * columns for name, (rows, *rest) in parameter_shapes(shape).items() for columns in rest}
    assert sum(size for name, size in found.items() if rule_of(TABLE, name).kind == "matrix") == matrices(shape)
    assert all((rule_of(TABLE, name).kind == "matrix") == name.startswith("model.layers.") for name in found)


@pytest.mark.parametrize("name", families())
def test_each_row_of_a_table_has_a_name_of_its_own_and_there_is_no_other(name):
    table = families()[name].table
    assert len({row.name for row in table}) == len(table)
    assert table != FULL.table or {rule_of(TABLE, name) for name in NAMES} == {*table, *VALUE_HEAD}


@given(st.sampled_from(NAMES), st.data())
def test_a_name_that_is_changed_anywhere_has_none(name, data):
    at = data.draw(st.integers(0, len(name)))
    more = data.draw(st.text("abdefgmq_.", min_size=1, max_size=6))
    cut = data.draw(st.integers(at, len(name)))
    changed = name[:at] + more + name[cut:]
    if changed not in NAMES:
        with raises(ModelError, changed):
            rule_of(TABLE, changed)
