"""Processor seconds of the tests by package, at the end of a run: what takes more and more is seen."""

import os
from collections import Counter
from pathlib import Path

import pytest

from tests import forked

SHOWN = 12
_before, _collected = [0.0], [0.0]


def spent() -> float:
    """Return processor seconds of this process, of its children that have ended, and of what its server has forked."""
    total = sum(os.times()[:4])
    for _, _, server in forked._own:
        times = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[11:15]
        total += sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Let the report of each phase carry the seconds since the phase before."""
    report = yield
    now = spent()
    report.user_properties = [*report.user_properties, ("processor", now - _before[0])]
    _before[0] = now
    return report


def pytest_collection_finish():
    _before[0] = _collected[0] = spent()


def pytest_terminal_summary(terminalreporter):
    found: Counter = Counter()
    for report in [one for several in terminalreporter.stats.values() for one in several]:
        for name, seconds in getattr(report, "user_properties", []):
            if name == "processor":
                found["/".join(report.nodeid.split("::")[0].split("/")[:2])] += seconds
    if found:
        shown = ", ".join(f"{name} {seconds:.0f}" for name, seconds in found.most_common(SHOWN))
        collected = f"{_collected[0]:.0f} before them"
        terminalreporter.write_line(f"processor seconds: {found.total():.0f} of all tests, {collected}; {shown}")
