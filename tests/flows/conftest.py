"""Fixtures of runs."""

from unittest.mock import patch

import pytest

from tests.flows import tiny


@pytest.fixture(scope="module")
def two_layers():
    """Models of a test file that has stages: the others' have one layer, a fifth cheaper."""
    with patch.dict(tiny.SHAPE, layers=2):
        yield
