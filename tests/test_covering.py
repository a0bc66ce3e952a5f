"""Which rows of a table stay quick."""

import subprocess

import pytest

from tests import forked

TABLES = """
import pytest

@pytest.mark.parametrize("b", "xyz")
@pytest.mark.parametrize("a", range(2))
def test_two(a, b): ...

@pytest.mark.parametrize("c", [5, 6])
@pytest.mark.parametrize("b", [3, 4])
@pytest.mark.parametrize("a", [1, 2])
def test_three(a, b, c): ...

@pytest.mark.parametrize(("a", "b"), [(a, b) for a in (0, 1) for b in (0, 1)])
def test_chosen(a, b): ...

@pytest.mark.parametrize("b", [3, 4])
@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_slow(a, b): ...

@pytest.fixture(params="pq")
def made(request):
    return request.param

@pytest.mark.parametrize("a", [1, 2])
def test_fixture(a, made): ...
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    (folder / "test_tables.py").write_text(TABLES)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    gpu\n    dist\n    ray\n")
    command = [*forked.python(), "-m", "pytest", "-p", "tests.conftest", "-m", "not slow", "--collect-only", "-q"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    found = [line.split("::")[1][:-1].split("[") for line in ran.stdout.splitlines() if "::" in line]
    return {name: [row.split("-") for test, row in found if test == name] for name, _ in found}


@pytest.mark.parametrize(
    ("name", "rows", "axes"),
    [("two", 3, ["01", "xyz"]), ("slow", 2, ["1", "34"]), ("fixture", 2, ["12", "pq"]), ("chosen", 4, ["01", "01"])],
)
def test_each_value_of_two_axes_is_in_a_row(quick, name, rows, axes):
    found = quick[f"test_{name}"]
    assert len(found) == rows and sorted(map(sorted, map(set, zip(*found)))) == sorted(map(sorted, axes))


def test_each_pair_of_values_of_three_axes_is_in_a_row(quick):
    found = quick["test_three"]
    pairs = {(i, j, row[i], row[j]) for row in found for i in range(3) for j in range(i)}
    assert len(pairs) == 12 and len(found) < 8
