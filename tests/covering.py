"""The rows of a table of tests that ``make test`` runs, where several axes are multiplied with each other.

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_round_trip(dtype, shape): ...  # each dtype and each shape at least once, not each with each

Of two axes each value is in some row, of more each pair of values; the other rows are slow. The rows of one decorator
are a list that somebody chose: all of them stay.
"""

from itertools import combinations

import pytest


def mark_covered(items: list) -> None:
    """Mark as slow, before ``-m`` looks at it, each row that others of its table cover."""
    tables: dict = {}
    for item in items:
        if hasattr(item, "callspec") and not any(item.get_closest_marker(name) for name in ("slow", "gpu")):
            tables.setdefault(item.nodeid.split("[")[0], []).append(item)
    for table in tables.values():
        for item in covered(table):
            item.add_marker(pytest.mark.slow)


def axes(item: pytest.Item) -> dict[str, tuple[int, ...]]:
    """Return the value of each axis: of each decorator and each fixture with parameters."""
    given = item.callspec.params
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [[name.strip() for name in mark.split(",")] if isinstance(mark, str) else mark for mark in marks]
    names += [[name] for name in given if not any(name in several for several in names)]
    return {",".join(several): tuple(id(given[name]) for name in several) for several in names}


def covered(table: list) -> list:
    """Return the rows of a table all of whose values, or pairs of values, are in the rows that stay."""
    rows = [axes(item) for item in table]
    free = [axis for axis in rows[0] if len({row[axis] for row in rows}) > 1]
    together = list(combinations(free, 1 if len(free) < 3 else 2))
    values = [{(several, tuple(row[axis] for axis in several)) for several in together} for row in rows]
    left, others = set().union(*values) if len(free) > 1 else set(), set(range(len(rows)))
    if not left:
        return []
    while left:
        best = max(sorted(others), key=lambda n: len(values[n] & left))
        others.remove(best)
        left -= values[best]
    return [table[n] for n in sorted(others)]
