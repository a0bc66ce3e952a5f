"""Lines of each package against its budget. ``python -m tests.test_size`` prints the table."""

from tests.errors import SOURCE, packages

BUDGETS = {
    "config": (3_950, 2_600),
    "core": (2_370, 1_800),
    "trace": (1_480, 1_400),
    "plan": (6_250, 3_700),
    "rl": (3_920, 3_900),
    "process": (700, 900),
    "sandbox": (1_060, 800),
    "rewards envs tasks": (5_430, 3_900),
    "cluster": (5_550, 4_500),
    "data": (5_810, 2_600),
    "models": (6_530, 4_200),
    "parallel": (5_150, 3_000),
    "checkpoint": (4_120, 3_600),
    "training": (2_400, 1_700),
    "engines rollout": (8_550, 5_700),
    "roles": (4_360, 1_700),
    "guard": (2_660, 2_700),
    "runs": (4_580, 2_650),
    "flows": (3_960, 1_850),
    "launch": (5_910, 2_700),
    "serve": (6_660, 4_200),
    "analysis": (3_450, 3_000),
    "ui cli api": (9_600, 6_100),
}
"""Packages, or modules beside them -> (lines that they may have now, lines that they should have)."""


def sizes(source=SOURCE):
    """Lines of each row of BUDGETS."""
    found = {}
    for row in BUDGETS:
        files = [path for name in row.split() for path in (source / f"{name}.py", *(source / name).rglob("*.py"))]
        found[row] = sum(path.read_text().count("\n") for path in files if path.is_file())
    return found


def over(found):
    """Rows that have more lines than they may."""
    return {row: (lines, BUDGETS[row][0]) for row, lines in found.items() if lines > BUDGETS[row][0]}


def test_packages_keep_within_their_budgets():
    assert not over(sizes()), "make it shorter; a new system adds to the budget what it names"


def test_every_package_has_a_budget():
    assert set(packages()) - {"__init__", "__main__"} <= {name for row in BUDGETS for name in row.split()}


def test_one_line_too_many_is_seen(tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "api.py").write_text("\n" * (BUDGETS["ui cli api"][0] + 1))
    (tmp_path / "trace" / "a.py").write_text("\n" * BUDGETS["trace"][0])
    assert list(over(sizes(tmp_path))) == ["ui cli api"]


if __name__ == "__main__":
    rows = [(row, lines, *BUDGETS[row]) for row, lines in sizes().items()]
    whole = ("all", *map(sum, zip(*(numbers for _, *numbers in rows))))
    print(f"{'lines':<20}{'now':>8}{'budget':>8}{'target':>8}")
    for name, *numbers in [*rows, whole]:
        print(f"{name:<20}" + "".join(f"{number:>8,}" for number in numbers))
