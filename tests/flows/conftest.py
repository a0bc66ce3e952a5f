"""Fixtures of runs."""

from unittest.mock import patch

import pytest

from tests.flows import tiny


@pytest.fixture(scope="module")
def two_layers():
    """Models of a test file that has stages: the others' have one layer, a fifth cheaper."""
    with patch.dict(tiny.SHAPE, layers=2):
        yield


@pytest.fixture
def parts(tmp_path):
    """Two sources of single-digit sums, small and large."""
    few = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(9)]
    more = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(2, 10)]
    sources = {"few": tiny.write(tmp_path / "few.jsonl", few), "more": tiny.write(tmp_path / "more.jsonl", more)}
    return [{"name": name, "source": source, "weight": w} for (name, source), w in zip(sources.items(), (1.0, 3.0))]
